"""Gaussian surrogates of the silos' likelihoods, and ways to fit them."""

from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates

__all__ = ["Gaussian", "Surrogates"]
