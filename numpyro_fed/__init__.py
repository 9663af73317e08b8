"""Federated Bayesian inference for NumPyro.

Its methods draw from the pooled posterior while the data stay in their silos.
"""

import importlib
from typing import TYPE_CHECKING

from numpyro_fed import surrogates
from numpyro_fed._compat import enable_compilation_cache
from numpyro_fed.data import partitioners
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.split import split
from numpyro_fed.decentralized import graphs
from numpyro_fed.decentralized.gossip import GossipLangevin
from numpyro_fed.decentralized.push_sum import PushSumLangevin
from numpyro_fed.density import handlers
from numpyro_fed.density.aggregate import Aggregate
from numpyro_fed.density.handlers import mark_silos, silo_plate
from numpyro_fed.density.risk_sets import log_risk
from numpyro_fed.front.calibrate import calibrate
from numpyro_fed.front.fit import fit
from numpyro_fed.mcmc.dsgld import DSGLD
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.mcmc.options import Step
from numpyro_fed.mcmc.remote import RemoteMCMC
from numpyro_fed.mcmc.schedules import polynomial_decay
from numpyro_fed.mcmc.sgld import SGLD
from numpyro_fed.privacy.data_guards import Guards
from numpyro_fed.privacy.differential import Privacy
from numpyro_fed.results.calibration import Calibration
from numpyro_fed.results.check import SiloCheck, check
from numpyro_fed.results.compare import Comparison, compare, plot_compare
from numpyro_fed.results.compare_models import compare_models
from numpyro_fed.results.diagnose import Diagnosis, diagnose
from numpyro_fed.results.elbo_figure import plot_elbo
from numpyro_fed.results.inference_data import to_inference_data
from numpyro_fed.results.local_latents import local_latents
from numpyro_fed.results.predict import predict
from numpyro_fed.results.prior_sensitivity import prior_sensitivity
from numpyro_fed.results.row_check import RowCheck
from numpyro_fed.results.silos_figure import plot_silos
from numpyro_fed.rounds.remote import Loopback, RemoteSilos
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.svi import SFVI, ConduciveSFVI, SFVIAvg

if TYPE_CHECKING:
    from numpyro_fed.front.dictionary import Dictionary, describe
    from numpyro_fed.front.glmm import GLMM, glmm

__version__ = "0.2.0"

__all__ = [
    "DSGLD",
    "FSGLD",
    "GLMM",
    "HMC",
    "SFVI",
    "SGLD",
    "Aggregate",
    "AutoSiloNormal",
    "Calibration",
    "Comparison",
    "ConduciveSFVI",
    "Diagnosis",
    "Dictionary",
    "GossipLangevin",
    "Guards",
    "Loopback",
    "MixedSilos",
    "Privacy",
    "PushSumLangevin",
    "RemoteMCMC",
    "RemoteSilos",
    "RowCheck",
    "SFVIAvg",
    "SiloCheck",
    "Silos",
    "Step",
    "calibrate",
    "check",
    "compare",
    "compare_models",
    "describe",
    "diagnose",
    "enable_compilation_cache",
    "fit",
    "glmm",
    "graphs",
    "handlers",
    "local_latents",
    "log_risk",
    "mark_silos",
    "partitioners",
    "plot_compare",
    "plot_elbo",
    "plot_silos",
    "polynomial_decay",
    "predict",
    "prior_sensitivity",
    "silo_plate",
    "split",
    "surrogates",
    "to_inference_data",
]

_OF_TABLES = {"Dictionary": "dictionary", "describe": "dictionary", "GLMM": "glmm", "glmm": "glmm"}


def __getattr__(name: str) -> object:
    """Import what reads tables when it is asked for: pandas takes a second."""
    if name not in _OF_TABLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"numpyro_fed.front.{_OF_TABLES[name]}"), name)
