"""Kernels for :class:`numpyro.infer.MCMC`."""

from numpyro_fed.mcmc import remote_hmc
from numpyro_fed.mcmc._base import FederatedKernel
from numpyro_fed.mcmc.dsgld import DSGLD
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.mcmc.sgld import SGLD

# the import of remote_hmc registers how this process drives HMC over remote silos
__all__ = ["DSGLD", "FSGLD", "HMC", "SGLD", "FederatedKernel", "remote_hmc"]
