"""Gaussian surrogates of the silos' likelihoods, and ways to make them.

:func:`analytic` takes known moments. The kernels fit ``"score"`` (:mod:`numpyro_fed.surrogates.score`) or
``"laplace"`` (:mod:`numpyro_fed.surrogates.laplace`) surrogates themselves; ``kernel.surrogates`` holds them afterwards.
"""

from numpyro_fed.surrogates.analytic import analytic
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates

__all__ = ["Gaussian", "Surrogates", "analytic"]
