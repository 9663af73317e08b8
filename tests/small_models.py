"""Small models and silos that several test files share.

So their programs are compiled once a session.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random

import numpyro_fed as fed
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.mcmc.visit import LangevinState, chain_axes, wait

INTERCEPTS_CALLS: list[int] = []  # one entry for each call of the model in Python
GROUP_SD, ROW_SD, PRIOR_SD = 0.8, 1.5, 2.0


class SilentSilos(fed.FSGLD):
    """FSGLD for vectorized chains, whose silo does not answer with a given probability.

    The chain then waits, as over remote silos, and the next silo does not depend on the failure.
    """

    def __init__(self, model: Any, *args: Any, silence: float, **settings: Any) -> None:
        super().__init__(model, *args, **settings)
        self.silence = silence

    def sample(self, state: LangevinState, model_args: tuple, model_kwargs: Any) -> LangevinState:
        def one(old: LangevinState, new: LangevinState) -> LangevinState:
            key = random.fold_in(random.fold_in(old.key_silos, 1 << 30), old.i)
            return wait(old, new, jnp.ones((), jnp.int32), random.bernoulli(key, self.silence))

        axes = chain_axes(False)
        new = super().sample(state, model_args, model_kwargs)
        return jax.vmap(one, in_axes=(axes, axes), out_axes=axes)(state, new)


def linear(x: Array, y: Array | None = None) -> None:
    """Gaussian regression with known noise.

    Its posterior, and the law of any Langevin chain, are known.
    """
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def linear_silos(sizes: tuple[int, ...] = (3, 8, 5, 14), seed: int = 0) -> fed.Silos:
    """Rows of silos that differ in size, in the spread of x and in the slope."""
    rng = np.random.default_rng(seed)
    data = {}
    for s, n in enumerate(sizes):
        x = rng.normal(size=(n, 2)) * [1, 0.5 + 0.3 * s]
        y = x @ [0.5 * s, -1.0] + rng.normal(size=n)
        data[f"silo {s}"] = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return fed.Silos(data)


def linear_precisions(silos: fed.Silos) -> tuple[np.ndarray, np.ndarray]:
    """Exact natural parameters of the silos' likelihoods of :func:`linear`.

    ``(S, 2)`` and ``(S, 2, 2)``.
    """
    rows = [{k: np.asarray(v, np.float64) for k, v in silos[name].items()} for name in silos]
    eta = np.stack([r["x"].T @ r["y"] for r in rows])
    return eta, np.stack([r["x"].T @ r["x"] for r in rows])


def intercepts(y: Array | None, group: Array, groups: Array) -> None:
    """Random intercepts with known variances.

    The posterior of mu and of every intercept is Gaussian.
    """
    INTERCEPTS_CALLS.append(1)
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD))
    with fed.silo_plate("groups", groups.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, GROUP_SD))
    with fed.silo_plate("rows", group.shape[0]):
        numpyro.sample("y", dist.Normal(a[group], ROW_SD), obs=y)


def intercepts_silos(seed: int = 1) -> fed.Silos:
    """3 silos of 6 groups of 4 rows.

    Groups, rows and silos are all out of order in the pooled data.
    """
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(18), 4))
    silo = rng.permutation(np.repeat(np.arange(3), 6))
    y = rng.normal(size=18)[group] + 1.0 + 0.7 * silo[group] + ROW_SD * rng.normal(size=72)
    data = {"y": y.astype(np.float32), "group": group, "groups": np.arange(18)}
    rows = {"y": "rows", "group": "rows", "groups": "groups"}
    return fed.split(data, by=silo[group], rows=rows, index={"group": "groups"})


def intercepts_posterior(silos: fed.Silos) -> tuple[np.ndarray, np.ndarray]:
    """Exact posterior mean ``(19,)`` and covariance of (mu, a) with a in pooled order."""
    data = silos.pooled
    y, group = np.asarray(data["y"], np.float64), np.asarray(data["group"])
    precision = np.zeros((19, 19))
    linear_term = np.zeros(19)
    precision[0, 0] = PRIOR_SD**-2
    for g in range(18):
        link = np.zeros(19)
        link[0], link[1 + g] = 1, -1
        precision += np.outer(link, link) / GROUP_SD**2
    for value, g in zip(y, group, strict=True):
        precision[1 + g, 1 + g] += ROW_SD**-2
        linear_term[1 + g] += value / ROW_SD**2
    covariance = np.linalg.inv(precision)
    return covariance @ linear_term, covariance


def scale_model(y: Array | None, n: Array) -> None:
    """Sample a location and a scale, with a deterministic site.

    The model constrains its draws.
    """
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    numpyro.deterministic("ratio", mu / sigma)
    with fed.silo_plate("rows", n.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def scale_silos(seed: int = 2, shift: float = 1.0) -> fed.Silos:
    """3 silos, rows out of order in the pooled data."""
    rng = np.random.default_rng(seed)
    y = (shift + rng.normal(size=24)).astype(np.float32)
    return fed.split(
        {"y": y, "n": np.arange(24)}, by=rng.permutation(np.repeat([0, 1, 2], [5, 9, 10]))
    )


def view_of(silos: fed.Silos, number: Any) -> SiloView:
    """Return a silo's rows, as a step sees them."""
    return SiloView(silos, jnp.asarray(number), largest(silos))


def run_kernel(kernel: Any, silos: fed.Silos, rounds: int = 3, **init: Any) -> Any:
    """Return the state of a kernel after some rounds, without MCMC around it."""
    state = kernel.init(random.key(0), 0, model_args=(silos,), **init)
    for _ in range(rounds):
        state = kernel.sample(state, (silos,), {})
    return state
