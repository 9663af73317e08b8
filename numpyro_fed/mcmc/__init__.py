"""Langevin kernels for :class:`numpyro.infer.MCMC`."""

from numpyro_fed.mcmc.dsgld import DSGLD
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.sgld import SGLD

__all__ = ["DSGLD", "FSGLD", "SGLD"]
