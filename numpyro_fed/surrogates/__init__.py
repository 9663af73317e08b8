"""Gaussian surrogates of the silos' likelihoods, and functions that make and rate them.

The function :func:`analytic` makes them from moments in closed form, and :func:`moments` from draws
of the silos' own posteriors. :func:`low_rank` keeps a few directions of each silo's curvature, for
many dimensions. The kernels fit ``"score"`` (:mod:`numpyro_fed.surrogates.score`) or ``"laplace"``
(:mod:`numpyro_fed.surrogates.laplace`) surrogates themselves, and ``kernel.surrogates`` holds them
after the fit. :func:`noise` and :func:`mse_bounds` say how good surrogates are, and
:func:`optimal_alpha` how much weight they deserve.
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
