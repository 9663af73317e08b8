"""Gaussian surrogates of the silos' likelihoods, and ways to make them.

:func:`analytic` takes known moments, :func:`moments` those of draws of the silos' own posteriors,
and :func:`low_rank` keeps a few directions of each silo's curvature where dimensions are many. The
kernels fit ``"score"`` (:mod:`numpyro_fed.surrogates.score`) or ``"laplace"``
(:mod:`numpyro_fed.surrogates.laplace`) surrogates themselves; ``kernel.surrogates`` holds them
afterwards. :func:`noise` and :func:`mse_bounds` say how good some are, :func:`optimal_alpha` how
much weight they deserve.
"""

from numpyro_fed.surrogates.alpha import optimal_alpha
from numpyro_fed.surrogates.analytic import analytic
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates
from numpyro_fed.surrogates.low_rank import low_rank
from numpyro_fed.surrogates.moments import moments
from numpyro_fed.surrogates.noise import mse_bounds, noise

__all__ = [
    "Gaussian",
    "Surrogates",
    "analytic",
    "low_rank",
    "moments",
    "mse_bounds",
    "noise",
    "optimal_alpha",
]
