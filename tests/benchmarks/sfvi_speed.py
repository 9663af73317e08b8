r"""SFVI's cost of a round as the number of silos grows, at constant total rows.

Beside it is the pooled ``SVI.update`` of the same guide.

    python tests/benchmarks/sfvi_speed.py [--rows 10000] [--rounds 400]

A logistic regression with a random intercept for each row (one local latent each) in 2 to ``rows``
equal silos, K = 1. Every time is the best of five calls, taken in turns in one process.
"hand-written" is a scan that vmaps over the silos what a person would write for this model alone;
"one silo" is SFVI with all rows in one silo.
"""

import argparse
import resource
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_fed as fed
from numpyro_fed.vi import sfvi
from numpyro_fed.vi.inline import advance

SILOS = (1, 2, 10, 100, 1000, 10_000)
OPTIM = optax.adam(1e-3)
DIM = 5  # global latents: four coefficients and a log scale


def model(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM - 1]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with fed.silo_plate("rows", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + sigma * z), obs=y)


def data(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, DIM - 1)).astype(np.float32)
    y = (rng.uniform(size=rows) < 1 / (1 + np.exp(-x.sum(1)))).astype(np.float32)
    return {"x": x, "y": y}


def pooled(rows: dict, rounds: int):
    """NumPyro's SVI with the same guide: a jitted scan of ``update``."""
    kwargs = {k: jnp.asarray(v) for k, v in rows.items()}
    svi = SVI(model, fed.AutoSiloNormal(model), OPTIM, Trace_ELBO())
    state = svi.init(random.key(0), **kwargs)

    @jax.jit
    def scan(state, kwargs):
        return lax.scan(lambda s, _: svi.update(s, **kwargs), state, length=rounds)

    return partial(scan, state, kwargs)


def ours(silos: fed.Silos, rounds: int):
    """SFVI's rounds, as ``run`` makes them (without its progress bar)."""
    svi = fed.SFVI(model, fed.AutoSiloNormal(model), OPTIM, 1, 1, validate=False)
    setup = svi.setup(silos)
    state = svi.init(random.key(0), silos)

    @jax.jit
    def scan(state, stacks):
        return lax.scan(
            lambda s, _: advance(sfvi.federated, setup.config, None, s, stacks),
            state,
            length=rounds,
        )

    return partial(scan, state, setup.stacks)


def by_hand(rows: dict, num_silos: int, rounds: int):
    """Write this model and guide by hand.

    Silos vmapped, K = 1, sticking the landing, Adam.
    """
    x, y = (jnp.asarray(v).reshape(num_silos, -1, *v.shape[1:]) for v in rows.values())
    n = x.shape[1]
    start = {"loc": jnp.zeros(DIM), "tril": 0.3 * jnp.eye(DIM)}
    local = {
        "m": jnp.zeros((num_silos, n)), "l": jnp.full((num_silos, n), -1.2),
        "c": jnp.zeros((num_silos, n, DIM)), "b": jnp.zeros((num_silos, n, DIM)),
    }  # fmt: skip

    def silo(p, theta, u, eps, x, y):
        z = p["m"] + p["c"] @ u + jnp.exp(p["l"] + p["b"] @ u) * eps
        q = jax.tree.map(lax.stop_gradient, p)
        e = (z - q["m"] - q["c"] @ u) * jnp.exp(-q["l"] - q["b"] @ u)
        logits = x @ theta[:-1] + jnp.exp(theta[-1]) * z
        terms = y * logits - jax.nn.softplus(logits) - 0.5 * z**2 + 0.5 * e**2 + q["l"] + q["b"] @ u
        return jnp.sum(terms)

    def loss(params, key, x, y):
        own, local = params
        tril = jnp.tril(own["tril"])
        key_theta, key_local = random.split(key)
        w = random.normal(key_theta, (DIM,))
        theta = own["loc"] + tril @ w
        frozen = lax.stop_gradient((own["loc"], tril))
        u = jax.scipy.linalg.solve_triangular(frozen[1], theta - frozen[0], lower=True)
        eps = random.normal(key_local, (num_silos, n))
        terms = jax.vmap(silo, in_axes=(0, None, None, 0, 0, 0))(local, theta, u, eps, x, y)
        prior = -0.5 * jnp.sum(theta[:-1] ** 2) - 0.5 * jnp.exp(2 * theta[-1]) + theta[-1]
        return -(
            terms.sum() + prior + 0.5 * jnp.sum(u**2) + jnp.sum(jnp.log(jnp.diagonal(frozen[1])))
        )

    @jax.jit
    def scan(params, optim_state, x, y):
        def step(carry, key):
            params, optim_state = carry
            value, gradient = jax.value_and_grad(loss)(params, key, x, y)
            updates, optim_state = OPTIM.update(gradient, optim_state, params)
            return (optax.apply_updates(params, updates), optim_state), value

        return lax.scan(step, (params, optim_state), random.split(random.key(0), rounds))

    return partial(scan, (start, local), OPTIM.init((start, local)), x, y)


def timed(programs: dict, repeats: int = 5) -> tuple[dict, dict]:
    """Seconds of the first call, and of the best of the others, taken in turns."""
    first, best = {}, {}
    for name, program in programs.items():
        start = time.perf_counter()
        jax.block_until_ready(program())
        first[name] = time.perf_counter() - start
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            best[name] = min(best.get(name, np.inf), time.perf_counter() - start)
    return first, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description="SFVI's cost of a round against the number of silos."
    )
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    rows = data(args.rows)
    print(f"{args.rows} rows, microseconds a round; seconds to compile and run the first time")
    print(
        f"{'silos':>7} {'SFVI':>8} {'pooled':>8} {'ratio':>6} {'by hand':>8} {'ratio':>6} "
        f"{'compile':>8} {'pooled':>8} {'MiB':>6}"
    )
    for num in SILOS:
        if num > args.rows:
            continue
        silos = fed.split(rows, by=np.repeat(np.arange(num), args.rows // num))
        programs = {
            "ours": ours(silos, args.rounds),
            "pooled": pooled(rows, args.rounds),
            "hand": by_hand(rows, num, args.rounds),
        }
        first, best = timed(programs)
        each = {k: 1e6 * v / args.rounds for k, v in best.items()}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{num:>7} {each['ours']:>8.0f} {each['pooled']:>8.0f} "
            f"{each['ours'] / each['pooled']:>6.2f} {each['hand']:>8.0f} "
            f"{each['ours'] / each['hand']:>6.2f} {first['ours']:>8.1f} {first['pooled']:>8.1f} "
            f"{memory:>6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
