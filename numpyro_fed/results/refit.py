"""Fit of a model without one silo, for the check that leaves each silo out."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import jax
import numpy as np

from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.results.silo_likelihood import (
    JointLatentsError,
    Question,
    coefficients,
    global_draws,
    question,
)
from numpyro_fed.results.vi_inference_data import vi_inference_data
from numpyro_fed.rounds.remote import Loopback, RemoteSilos
from numpyro_fed.vi.conducive.checks import JointUnits, has_converged
from numpyro_fed.vi.importance import POOR, log_bridge
from numpyro_fed.vi.svi import MOST_ROUNDS, TOL, conducive_for

_FAR = 0.5  # error of elpd, in nats, beyond which the draws of two fits hardly overlap


@dataclass(frozen=True)
class Fit:
    """What a fit without a silo is held against.

    :param evidence: log evidence of the fit of all silos, and its error.
    :param terms: the silo's log likelihood at the draws of that fit.
    :param names: the coefficients.
    """

    evidence: tuple[float, float] | None
    terms: np.ndarray
    names: list[str]


@dataclass(frozen=True)
class Refit:
    """Fit without a silo: the silo's log density and its error, and the coefficients' means.

    :param how: whether it is sound.
    :param asked: the fit's draws as a question to the silo, where it can be asked.
    """

    density: tuple[float, float]
    mean: np.ndarray
    how: str
    asked: Question | None


def refitted(
    model: Callable,
    silos: Silos,
    name: str,
    num_draws: int,
    of_all: Fit,
    rows: bool,
) -> Refit | None:
    """Return a fit without a silo; ``None`` where latents of a silo depend on each other.

    :param of_all: the fit of all silos.
    :param rows: whether the silo will be asked for replicates.
    """
    rest = silos.among([other for other in silos.names if other != name])
    # the factorization was checked on all silos
    try:
        svi = conducive_for(model, rest, validate=False)
    except JointUnits:
        return None
    key = jax.random.key(silos.names.index(name))
    with warnings.catch_warnings():  # the table says so
        warnings.filterwarnings("ignore", "q has not converged")
        warnings.filterwarnings("ignore", "Pareto's k of the approximation")
        result = svi.run(key, MOST_ROUNDS, rest, tol=TOL, progress_bar=False)
        idata = vi_inference_data(
            svi,
            result,
            rest,
            num_draws=num_draws,
            log_likelihood=False,
            resample=True,
            progress_bar=False,
        )
    sound = has_converged(result.state) and _weights_hold(idata.posterior.attrs)
    sites = global_draws(idata.posterior, factorize(model, silos), num_draws)
    mean = coefficients(sites, of_all.names)[1].mean(0)
    without = log_evidence(idata.posterior.attrs)
    density, asked = None, None
    if of_all.evidence is not None and without is not None:
        value, error = of_all.evidence
        density = value - without[0], float(np.hypot(error, without[1]))
    if rows or density is None:
        with suppress(JointLatentsError):
            asked = question(model, askable(silos.among([name])), sites)
    if density is None and asked is not None:
        density = log_bridge(of_all.terms, asked.log_likelihood()[:, 0])
    density = (np.nan, np.nan) if density is None else density
    sound = sound and density[1] <= _FAR
    return Refit(density, mean, "refit" if sound else "unsound refit", asked)


def askable(silos: Silos) -> RemoteSilos:
    """Return silos that answer tasks, here or elsewhere."""
    return silos if isinstance(silos, RemoteSilos) else RemoteSilos(silos, Loopback(silos))


def log_evidence(attrs: dict) -> tuple[float, float] | None:
    """Return the log evidence of a fit whose weights are sound, and its error."""
    if "log_evidence" not in attrs or not _weights_hold(attrs):
        return None
    return float(attrs["log_evidence"]), float(attrs["log_evidence_error"])


def _weights_hold(attrs: dict) -> bool:
    """Return whether Pareto's k of a fit's weights is good, for theta and for the latents."""
    return max(attrs["pareto_k"], attrs.get("pareto_k_unit", 0)) <= POOR
