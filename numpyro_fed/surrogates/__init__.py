"""Gaussian surrogates of the silos' likelihoods, and functions that make them.

The function :func:`analytic` makes them from moments in closed form, and :func:`moments` from draws
of the silos' own posteriors. The kernels fit ``"score"`` (:mod:`numpyro_fed.surrogates.score`) or
``"laplace"`` (:mod:`numpyro_fed.surrogates.laplace`) surrogates themselves, and
``kernel.surrogates`` holds them after the fit.
"""

from numpyro_fed.surrogates.analytic import analytic
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates
from numpyro_fed.surrogates.moments import moments

__all__ = ["Gaussian", "Surrogates", "analytic", "moments"]
