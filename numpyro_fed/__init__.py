"""Federated Bayesian inference for NumPyro: pooled NUTS's posterior from data that stay in their silos."""

from numpyro_fed import handlers, partitioners, surrogates
from numpyro_fed._elbo_figure import plot_elbo
from numpyro_fed.diagnostics import Diagnosis, diagnose
from numpyro_fed.engines.guards import Guards
from numpyro_fed.engines.remote import Loopback, RemoteSilos
from numpyro_fed.handlers import mark_silos, silo_plate
from numpyro_fed.inference_data import to_inference_data
from numpyro_fed.mcmc import graphs
from numpyro_fed.mcmc.dsgld import DSGLD
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.gossip import GossipLangevin
from numpyro_fed.mcmc.push_sum import PushSumLangevin
from numpyro_fed.mcmc.remote import RemoteMCMC
from numpyro_fed.mcmc.schedules import polynomial_decay
from numpyro_fed.mcmc.sgld import SGLD
from numpyro_fed.mixed import MixedSilos
from numpyro_fed.one_call import fit
from numpyro_fed.prediction import predict
from numpyro_fed.results import Comparison, compare, plot_compare
from numpyro_fed.silos import Silos
from numpyro_fed.splitting import split
from numpyro_fed.vi.guides import AutoSiloNormal
from numpyro_fed.vi.privacy import Privacy
from numpyro_fed.vi.sfvi import SFVI
from numpyro_fed.vi.sfvi_avg import SFVIAvg

__version__ = "0.1.0"

__all__ = [
    "DSGLD",
    "FSGLD",
    "SFVI",
    "SGLD",
    "AutoSiloNormal",
    "Comparison",
    "Diagnosis",
    "GossipLangevin",
    "Guards",
    "Loopback",
    "MixedSilos",
    "Privacy",
    "PushSumLangevin",
    "RemoteMCMC",
    "RemoteSilos",
    "SFVIAvg",
    "Silos",
    "compare",
    "diagnose",
    "fit",
    "graphs",
    "handlers",
    "mark_silos",
    "partitioners",
    "plot_compare",
    "plot_elbo",
    "polynomial_decay",
    "predict",
    "silo_plate",
    "split",
    "surrogates",
    "to_inference_data",
]
