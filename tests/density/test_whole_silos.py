"""Likelihoods of a whole silo: censored intervals, a filter along time, borders of regions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro.infer import MCMC
from scipy import stats

import numpyro_fed as fed
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.density.check import check_factorization
from numpyro_fed.density.factorize import factorize

RNG = np.random.default_rng(3)


def time_varying(x, start, stop, event, stratum, strata):
    """Cox's model: rows are intervals, in each of which a patient's covariate is constant."""
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    at_risk = (start < stop[:, None]) & (stop >= stop[:, None]) & (stratum == stratum[:, None])
    log_risk = jax.nn.logsumexp(jnp.where(at_risk, x * beta, -jnp.inf), axis=1)
    with fed.silo_plate("intervals", x.shape[0], row_wise=False):
        numpyro.factor("partial", event * (x * beta - log_risk))


def intervals(patients: int) -> dict[str, np.ndarray]:
    """Return two intervals of each patient, cut at a random time."""
    end = RNG.exponential(size=patients)
    cut = end * RNG.random(patients)
    none = np.zeros(patients)
    return {
        "x": RNG.normal(size=2 * patients),
        "start": np.concatenate([none, cut]),
        "stop": np.concatenate([cut, end]),
        "event": np.concatenate([none, RNG.random(patients) < 0.8]),
        "stratum": np.zeros(2 * patients, int),
        "strata": np.zeros(1),
    }


def time_varying_term(data: dict[str, np.ndarray], theta: dict, _: dict) -> float:
    eta, total = theta["beta"] * data["x"], 0.0
    for row in np.flatnonzero(data["event"]):
        when = data["stop"][row]
        at_risk = (data["start"] < when) & (when <= data["stop"])
        total += eta[row] - np.log(np.exp(eta[at_risk]).sum())
    return total


def local_level(y, first):
    """Random walk under noise, a path for each silo, by Kalman's filter in a scan."""
    step = numpyro.sample("step", dist.LogNormal(0, 1))

    def filtered(carry, row):
        value, begins = row
        mean, variance = jnp.where(begins, jnp.array([0.0, 1.0]), carry)
        ahead = variance + step**2
        law = dist.Normal(mean, jnp.sqrt(ahead + 1))
        gain = ahead / (ahead + 1)
        return jnp.stack([mean + gain * (value - mean), ahead * (1 - gain)]), law.log_prob(value)

    _, terms = lax.scan(filtered, jnp.zeros(2), (y, first))
    with fed.silo_plate("times", y.shape[0], row_wise=False):
        numpyro.factor("y", terms)


def path(times: int) -> dict[str, np.ndarray]:
    return {"y": RNG.normal(size=times), "first": np.arange(times) == 0}


def local_level_term(data: dict[str, np.ndarray], theta: dict, _: dict) -> float:
    times, variance = np.arange(1, len(data["y"]) + 1), np.exp(2 * theta["step"])
    cov = 1 + variance * np.minimum(times, times[:, None]) + np.eye(len(times))
    return stats.multivariate_normal(cov=cov).logpdf(data["y"])


def bordering(y, left, right):
    """Gaussian outcomes of regions, whose effects are close to those of their neighbors (ICAR)."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    with fed.silo_plate("regions", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0, 3))
        numpyro.sample("y", dist.Normal(level + effect, 1), obs=y)
    with fed.silo_plate("borders", left.shape[0]):
        numpyro.factor("smooth", -((effect[left] - effect[right]) ** 2))


def chain_of_regions(regions: int) -> dict[str, np.ndarray]:
    """Return regions in a row, the first of which also touches the last."""
    left = np.arange(regions)
    return {"y": RNG.normal(size=regions), "left": left, "right": (left + 1) % regions}


def bordering_term(data: dict[str, np.ndarray], theta: dict, z: dict) -> float:
    z = z["effect"]
    total = stats.norm.logpdf(z, 0, 3).sum() - ((z - np.roll(z, -1)) ** 2).sum()
    return total + stats.norm.logpdf(data["y"], theta["level"] + z).sum()


class Case(NamedTuple):
    """Model, its silos, and a silo's own log density at unconstrained theta and z."""

    model: Callable
    silos: fed.Silos
    term: Callable[[Any, dict, dict], float]


def case(model: Callable, make: Callable, sizes: tuple, term: Callable, **options: Any) -> Case:
    data = {f"silo {s}": make(n) for s, n in enumerate(sizes)}
    return Case(model, fed.Silos(data, **options), term)


REGIONS = {
    "rows": {"y": "regions", "left": "borders", "right": "borders"},
    "index": {"left": "regions", "right": "regions"},
}
CASES = {
    "intervals": case(
        time_varying,
        intervals,
        (6, 3, 9),
        time_varying_term,
        rows=dict.fromkeys(("x", "start", "stop", "event", "stratum"), "intervals")
        | {"strata": "strata"},
        index={"stratum": "strata"},
    ),
    "filter": case(local_level, path, (5, 8), local_level_term),
    "borders": case(bordering, chain_of_regions, (4, 7), bordering_term, **REGIONS),
}


@pytest.mark.parametrize("name", CASES)
def test_each_silo_has_its_own_likelihood(name):
    model, silos, term = CASES[name]
    factors = factorize(model, silos)
    check_factorization(factors, silos)  # their sum is the pooled density
    theta, pad = {name: 0.3 for name, _ in factors.global_sites}, largest(silos)
    z = {site.name: RNG.normal(size=7) for site in factors.local_sites}

    @jax.jit
    def own(number):
        kwargs, weights = SiloView(silos, number, pad).whole()
        return factors.log_local(theta, z, kwargs, weights)

    for number, silo in enumerate(silos.names):
        data = {k: np.asarray(v, np.float64) for k, v in silos[silo].items()}
        mine = {k: v[: len(data["y"])] for k, v in z.items()}
        wanted = term(data, theta, mine)
        assert float(own(number)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.ci
def test_borders_have_their_exact_posterior():
    model, silos, _ = CASES["borders"]
    mcmc = MCMC(
        fed.HMC(model),
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), silos)
    draws = mcmc.get_samples()
    y, count = np.asarray(silos.pooled["y"]), len(silos.pooled["y"])
    precision = np.zeros((count + 1, count + 1))  # of the level and of the effects
    precision[0, 0], precision[0, 1:], precision[1:, 0] = 1 + count, 1, 1
    precision[1:, 1:] = np.eye(count) * (1 + 1 / 9)
    for left, right in zip(silos.pooled["left"], silos.pooled["right"], strict=True):
        edge = np.eye(count + 1)[1 + left] - np.eye(count + 1)[1 + right]
        precision += 2 * np.outer(edge, edge)
    cov = np.linalg.inv(precision)
    mean, sd = cov @ np.concatenate([[y.sum()], y]), np.sqrt(np.diagonal(cov))
    got = np.column_stack([draws["level"], draws["effect"]])
    assert (np.abs(got.mean(0) - mean) < 0.2 * sd).all()  # 4 errors of 400 effective draws
    assert (np.abs(got.std(0) / sd - 1) < 0.15).all()
    free = np.sqrt(np.diagonal(np.linalg.inv(precision - precision[1, 2] * np.eye(count + 1))))
    assert (np.abs(got.std(0) / free - 1) > 0.15).any()  # negative control: another law
