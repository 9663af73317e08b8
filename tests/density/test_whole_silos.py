"""Likelihoods of a whole silo: risk sets, filters and processes in time, borders of regions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from messages import Fits
from numpyro.infer import MCMC
from scipy import stats

import numpyro_fed as fed
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.density.check import check_factorization
from numpyro_fed.density.factorize import factorize
from numpyro_fed.engines.wire import connect

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
        **stratum(2 * patients),
    }


def time_varying_term(data: dict[str, np.ndarray], theta: dict, _: dict) -> float:
    eta, total = theta["beta"] * data["x"], 0.0
    for row in np.flatnonzero(data["event"]):
        when = data["stop"][row]
        at_risk = (data["start"] < when) & (when <= data["stop"])
        total += eta[row] - np.log(np.exp(eta[at_risk]).sum())
    return total


def local_level(y, stratum, strata):
    """Random walk under noise, a path for each silo, by Kalman's filter in a scan."""
    first = jnp.diff(stratum, prepend=-1) != 0
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
    return {"y": RNG.normal(size=times), **stratum(times)}


def stratum(rows: int) -> dict[str, np.ndarray]:
    """Return a silo's stratum, to which its rows point."""
    return {"stratum": np.zeros(rows, int), "strata": np.zeros(1)}


def local_level_term(data: dict[str, np.ndarray], theta: dict, _: dict) -> float:
    times, variance = np.arange(1, len(data["y"]) + 1), np.exp(2 * theta["step"])
    cov = 1 + variance * np.minimum(times, times[:, None]) + np.eye(len(times))
    return stats.multivariate_normal(cov=cov).logpdf(data["y"])


def autoregressive(y, stratum, strata):
    """Rows that follow from the row before."""
    first = jnp.diff(stratum, prepend=-1) != 0
    slope = numpyro.sample("slope", dist.Normal(0, 0.5))
    before = jnp.where(first, 0.0, jnp.roll(y, 1))
    with fed.silo_plate("times", y.shape[0], row_wise=False):
        numpyro.sample("y", dist.Normal(slope * before, 1), obs=y)


def autoregressive_term(data: dict[str, np.ndarray], theta: dict, _: dict) -> float:
    before = np.append(0.0, data["y"][:-1])
    return stats.norm.logpdf(data["y"], theta["slope"] * before).sum()


def gaussian_process(t, y, stratum, strata):
    """Gaussian process in each silo, row by row given the rows before it."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
    kernel = jnp.exp(-0.5 * ((t - t[:, None]) / scale) ** 2) * (stratum == stratum[:, None])
    root = jnp.linalg.cholesky(kernel + 0.1 * jnp.eye(len(t)))
    standardized = jax.scipy.linalg.solve_triangular(root, y, lower=True)
    with fed.silo_plate("times", t.shape[0], row_wise=False):
        numpyro.factor("y", dist.Normal(0, 1).log_prob(standardized) - jnp.log(jnp.diagonal(root)))


def series(times: int) -> dict[str, np.ndarray]:
    return {"t": np.arange(times) / 2, "y": RNG.normal(size=times), **stratum(times)}


def gaussian_process_term(data: dict[str, np.ndarray], theta: dict, _: dict) -> float:
    apart = data["t"] - data["t"][:, None]
    cov = np.exp(-0.5 * (apart / np.exp(theta["scale"])) ** 2) + 0.1 * np.eye(len(apart))
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
    effect = z["effect"]
    total = stats.norm.logpdf(effect, 0, 3).sum() - ((effect - np.roll(effect, -1)) ** 2).sum()
    return total + stats.norm.logpdf(data["y"], theta["level"] + effect).sum()


def bordering_law(silos: fed.Silos, weight: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact mean and sd of the level and all effects.

    :param weight: precision of the difference of two neighbors.
    """
    data = {k: np.asarray(v) for k, v in silos.pooled.items()}
    one = np.eye(1 + len(data["y"]))
    precision = np.diag([1.0, *np.full(len(data["y"]), 1 / 9)])  # of the priors
    apart = one[1 + data["left"]] - one[1 + data["right"]]
    means = one[:1] + one[1:]  # of the outcomes
    precision = precision + weight * apart.T @ apart + means.T @ means
    cov = np.linalg.inv(precision)
    return cov @ means.T @ data["y"], np.sqrt(np.diagonal(cov))


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


def strata(plate: str, *names: str) -> dict[str, Any]:
    """Return the plates of the arguments, and what points into which."""
    rows = dict.fromkeys((*names, "stratum"), plate) | {"strata": "strata"}
    return {"rows": rows, "index": {"stratum": "strata"}}


INTERVALS = strata("intervals", "x", "start", "stop", "event")
CASES = {
    "intervals": case(time_varying, intervals, (6, 3, 9), time_varying_term, **INTERVALS),
    "filter": case(local_level, path, (5, 8), local_level_term, **strata("times", "y")),
    "lags": case(autoregressive, path, (9, 6), autoregressive_term, **strata("times", "y")),
    "causal": case(
        gaussian_process, series, (6, 9), gaussian_process_term, **strata("times", "t", "y")
    ),
    "borders": case(bordering, chain_of_regions, (4, 7), bordering_term, **REGIONS),
}


@pytest.mark.parametrize("name", CASES)
def test_each_silo_has_its_own_likelihood(name):
    model, silos, term = CASES[name]
    factors = factorize(model, silos)
    check_factorization(factors, silos)  # their sum is the pooled density
    theta, pad = {name: 0.3 for name, _ in factors.global_sites}, largest(silos)
    rng = np.random.default_rng(0)
    z = {site.name: rng.normal(size=7) for site in factors.local_sites}

    @jax.jit
    def own(number):
        kwargs, weights = SiloView(silos, number, pad).whole()
        return factors.log_local(theta, z, kwargs, weights)

    for number, silo in enumerate(silos.names):
        data = {k: np.asarray(v, np.float64) for k, v in silos[silo].items()}
        mine = {k: v[: len(data["y"])] for k, v in z.items()}
        wanted = term(data, theta, mine)
        assert float(own(number)) == pytest.approx(wanted, rel=1e-4)


PRIOR_SD = {"beta": 1.0, "step": 1.0, "slope": 0.5, "scale": 0.5}  # in unconstrained space
LOGS = ("step", "scale")
CHAINS = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}


def moments(name: str) -> tuple[float, float]:
    """Return mean and sd of the only global site of a case, in unconstrained space."""
    _, silos, term = CASES[name]
    ((site, _),) = factorize(*CASES[name][:2]).global_sites
    data = [{k: np.asarray(v, np.float64) for k, v in silos[s].items()} for s in silos.names]
    grid = np.linspace(-5, 5, 801) * PRIOR_SD[site]
    density = [sum(term(d, {site: x}, {}) for d in data) for x in grid]
    density += stats.norm.logpdf(grid, 0, PRIOR_SD[site])
    weight = np.exp(density - np.max(density))
    weight /= weight.sum()
    mean = weight @ grid
    return mean, np.sqrt(weight @ (grid - mean) ** 2)


def by_fit(model, silos):
    return fed.fit(model, silos, progress_bar=False).posterior


def by_sfvi(model, silos):
    svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.02))
    result = svi.run(random.key(0), 1500, silos, progress_bar=False)
    idata = fed.to_inference_data(svi, result, silos, log_likelihood=False, resample=True)
    return idata.posterior


def by_chains(kernel):
    def draws(model, silos):
        mcmc = MCMC(kernel(model), num_warmup=200, num_samples=1000, **CHAINS)
        mcmc.run(random.key(1), silos)
        return mcmc.get_samples()

    return draws


@pytest.mark.ci
@pytest.mark.parametrize("name", ["intervals", "filter", "lags", "causal"])
@pytest.mark.parametrize(
    "by",
    [by_fit, by_sfvi, by_chains(fed.FSGLD), by_chains(fed.HMC)],
    ids=["fit", "SFVI", "FSGLD", "HMC"],
)
def test_every_algorithm_has_the_exact_posterior(name, by):
    model, silos, _ = CASES[name]
    ((site, _),) = factorize(model, silos).global_sites
    x = np.ravel(by(model, silos)[site])
    x = np.log(x) if site in LOGS else x
    mean, sd = moments(name)
    assert abs(x.mean() - mean) < 0.15 * sd  # 4 errors of 700 effective draws
    assert abs(x.std() / sd - 1) < 0.15


@pytest.mark.ci
@pytest.mark.parametrize("name", ["intervals", "filter", "lags", "causal"])
def test_over_a_wire_as_at_hand(tmp_path, name):
    model, silos, _ = CASES[name]

    def make():
        return fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))

    def run(silos):
        return make().run(random.key(0), 40, silos, tol=0.1, progress_bar=False).params

    here, there = run(silos), run(connect(Fits(silos, make(), tmp_path, make), model, fit=make()))
    for key, value in here.items():
        np.testing.assert_allclose(there[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.ci
def test_borders_have_their_exact_posterior():
    model, silos, _ = CASES["borders"]
    mcmc = MCMC(fed.HMC(model), num_warmup=300, num_samples=1000, **CHAINS)
    mcmc.run(random.key(1), silos)
    draws = mcmc.get_samples()
    got = np.column_stack([draws["level"], draws["effect"]])
    mean, sd = bordering_law(silos)
    assert (np.abs(got.mean(0) - mean) < 0.2 * sd).all()  # 4 errors of 400 effective draws
    assert (np.abs(got.std(0) / sd - 1) < 0.15).all()
    _, without = bordering_law(silos, weight=0.0)
    assert (np.abs(got.std(0) / without - 1) > 0.15).any()  # negative control: no borders
