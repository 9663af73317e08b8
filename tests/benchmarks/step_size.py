r"""Steps learned in warm-up, and what a chain that rejects nothing makes of them.

    python tests/benchmarks/step_size.py [--quick]

Two ways to a step size on the same models, full gradients, the same number of warm-up steps: this
library's `step_size="adaptive"` (accepted bias), and the gradient-based adaptive MCMC of Titsias
and Dellaportas (2019), which the push-sum paper uses, for a Metropolis-adjusted proposal with one
scale: it ascends the speed measure :math:`\log \text{acceptance} + \beta d \log \sigma`, with
:math:`\beta` driven to an acceptance of 0.574. Its :math:`\sigma^2` is then the step of an
unadjusted chain, as in the paper, and, for comparison, of the adjusted one. A row: the step,
measured ratios of sds to NUTS's, the least effective draws in 1,000 steps. And the same two for the
nodes of push-sum on a ring.
"""

import argparse
from functools import partial
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from jax import random
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed
from numpyro_fed.density.factors import pooled_log_density

CHAINS, ACCEPT = 8, 0.574


def linear(x, y=None):  # type: ignore[no-untyped-def]
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def logistic(x, y=None):  # type: ignore[no-untyped-def]
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def data(model: Any, dim: int) -> fed.Silos:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(800, dim)) * np.linspace(0.5, 1.5, dim)).astype(np.float32)
    mean = x @ rng.normal(size=dim)
    y = mean + rng.normal(size=800) if model is linear else rng.binomial(1, 1 / (1 + np.exp(-mean)))
    return fed.split({"x": x, "y": y.astype(np.float32)}, by=np.arange(800) % 4)


def titsias(model: Any, silos: fed.Silos, dim: int, steps: int) -> float:
    """Return the squared scale that gradient-based adaptive MCMC learns.

    It is the mean over chains and over the second half of the steps.
    """

    def log_density(w: jax.Array) -> jax.Array:
        return pooled_log_density(model, silos, {"w": w})

    slope = jax.grad(log_density)

    def speed(log_scale: jax.Array, w: jax.Array, xi: jax.Array, beta: jax.Array) -> Any:
        scale = jnp.exp(log_scale)
        new = w + 0.5 * scale**2 * slope(w) + scale * xi
        back = (w - new - 0.5 * scale**2 * slope(new)) / scale
        ratio = jnp.minimum(
            0.0, log_density(new) - log_density(w) + 0.5 * (jnp.sum(xi**2) - jnp.sum(back**2))
        )
        return ratio + beta * dim * log_scale, (ratio, new)

    def step(carry: Any, key: jax.Array) -> Any:
        w, log_scale, beta, square = carry
        key_xi, key_u = random.split(key)
        gradient, (ratio, new) = jax.grad(speed, has_aux=True)(
            log_scale, w, random.normal(key_xi, (dim,)), beta
        )
        gradient = jnp.nan_to_num(gradient)
        square = 0.9 * square + 0.1 * gradient**2  # RMSprop, as in their paper
        log_scale = log_scale + 0.01 * gradient / (1 + jnp.sqrt(square))
        accept = jnp.exp(ratio)
        beta = jnp.maximum(beta * (1 + 0.02 * (accept - ACCEPT)), 1e-6)
        w = jnp.where(jnp.log(random.uniform(key_u)) < ratio, new, w)
        return (w, log_scale, beta, square), log_scale

    start = (jnp.zeros(dim), jnp.asarray(np.log(0.1 / np.sqrt(dim))), jnp.ones(()), jnp.zeros(()))
    run = jax.jit(jax.vmap(lambda key: jax.lax.scan(step, start, random.split(key, steps))[1]))
    log_scales = run(random.split(random.key(0), CHAINS))
    return float(jnp.exp(2 * log_scales[:, steps // 2 :]).mean())


def adjusted(model: Any, silos: fed.Silos, dim: int, h: float, steps: int) -> np.ndarray:
    """Draws of MALA at step h ``(chains, steps, d)``."""

    def log_density(w: jax.Array) -> jax.Array:
        return pooled_log_density(model, silos, {"w": w})

    slope = jax.grad(log_density)

    def step(w: jax.Array, key: jax.Array) -> Any:
        key_xi, key_u = random.split(key)
        xi = random.normal(key_xi, (dim,))
        new = w + h / 2 * slope(w) + jnp.sqrt(h) * xi
        back = (w - new - h / 2 * slope(new)) / jnp.sqrt(h)
        ratio = log_density(new) - log_density(w) + 0.5 * (jnp.sum(xi**2) - jnp.sum(back**2))
        w = jnp.where(jnp.log(random.uniform(key_u)) < ratio, new, w)
        return w, w

    run = jax.jit(
        jax.vmap(lambda key: jax.lax.scan(step, jnp.zeros(dim), random.split(key, 2 * steps))[1])
    )
    return np.asarray(run(random.split(random.key(5), CHAINS)))[:, steps:]


def unadjusted(
    kernel: Any, silos: fed.Silos, steps: int, chains: int = CHAINS
) -> tuple[np.ndarray, float]:
    mcmc = MCMC(
        kernel,
        num_warmup=steps,
        num_samples=steps,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(2), silos)
    step_size = float(np.mean(np.asarray(mcmc.get_extra_fields()["step_size"])[-chains:]))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    return draws[
        :: chains // CHAINS
    ], step_size  # of a network the draws of its first node: the others are nearly the same


def row(name: str, draws: np.ndarray, h: float, sd: np.ndarray) -> dict[str, Any]:
    ratio = draws.std((0, 1)) / sd
    if not ratio.max() < 100:
        return {"": name, "step": f"{h:.2e}", "sd ratios": "diverges", "ess / 1,000": "-"}
    error = max(float(az.mcse(draws[..., j], method="sd")) / sd[j] for j in range(len(sd)))
    ess = (
        min(float(az.ess(draws[..., j])) for j in range(len(sd)))
        / (draws.shape[0] * draws.shape[1])
        * 1000
    )
    ratios = f"{ratio.min():.3f}-{ratio.max():.3f} ± {error:.3f}"
    return {"": name, "step": f"{h:.2e}", "sd ratios": ratios, "ess / 1,000": f"{ess:.1f}"}


def table(model: Any, dim: int, steps: int) -> pd.DataFrame:
    silos = data(model, dim)
    nuts = MCMC(
        NUTS(model),
        num_warmup=500,
        num_samples=5000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(random.key(1), **silos.pooled)
    sd = np.asarray(nuts.get_samples()["w"], np.float64).std(0)
    h = titsias(model, silos, dim, steps)
    rows = [
        row("adaptive, SGLD", *unadjusted(fed.SGLD(model, "adaptive", 1), silos, steps), sd),
        row("Titsias, unadjusted", unadjusted(fed.SGLD(model, h, 1), silos, steps)[0], h, sd),
        row("Titsias, MALA", adjusted(model, silos, dim, h, steps), h, sd),
    ]
    push_sum = partial(fed.PushSumLangevin, model, fed.graphs.ring(4), gradient_tracking=True)
    rows.append(
        row("adaptive, push-sum", *unadjusted(push_sum(), silos, 4 * steps, 4 * CHAINS), sd)
    )
    # the average's step h in the convention of SGLD is 2 alpha / m
    rows.append(
        row(
            "Titsias, push-sum",
            unadjusted(push_sum(2 * h), silos, 4 * steps, 4 * CHAINS)[0],
            2 * h,
            sd,
        )
    )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    for model, dim in ((linear, 2), (logistic, 10)):
        print(f"\n{model.__name__} regression, 800 rows, d = {dim}")
        print(table(model, dim, 1000 if args.quick else 10_000).to_string(index=False))
