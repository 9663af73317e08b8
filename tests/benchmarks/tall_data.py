"""Tall data: when is every posterior mean within 0.1 sd, and stays there? FSGLD by minibatches beside NUTS on the pooled rows.

    python tests/benchmarks/tall_data.py [--rows 10000 100000 1000000]

Logistic regression, d = 20, ten silos whose covariates and base rates are shifted. One chain each from the same start, zero. Seconds count everything: checks, fits, compilation,
warm-up; where compilation is most of it the last column says how much. FSGLD: minibatches of 100 with control variates, noise corrected. The reference is a run of FSGLD
on all rows of a silo, four chains, at a step whose predicted inflation is 1 %, until its standard errors are below 0.02 sd.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

NUM_SILOS, DIM, CLOSE = 10, 20, 0.1


def model(x, y):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def data(rows: int) -> fed.Silos:
    rng = np.random.default_rng(0)
    silo = np.repeat(np.arange(NUM_SILOS), rows // NUM_SILOS)
    x = rng.normal(size=(len(silo), DIM)) + rng.normal(size=(NUM_SILOS, DIM))[silo]
    x[:, 0] = 1
    y = rng.random(len(silo)) < 1 / (1 + np.exp(-x @ rng.normal(size=DIM) / np.sqrt(DIM)))
    return fed.split({"x": x.astype(np.float32), "y": y.astype(np.float32)}, by=silo)


def reference(silos: fed.Silos) -> tuple[np.ndarray, np.ndarray]:
    mcmc = MCMC(
        fed.FSGLD(model, bias_target=0.01, num_local_steps=20), num_warmup=100, num_samples=600, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(9), silos)
    draws = [np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])]
    while True:
        together = np.concatenate(draws, axis=1)
        error = az.mcse(az.convert_to_dataset({"b": together}))["b"].values / together.std((0, 1))
        if error.max() < 0.02 or len(draws) > 20:
            return together.mean((0, 1)), together.std((0, 1))
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(jax.random.key(9), silos)
        draws.append(np.asarray(mcmc.get_samples(group_by_chain=True)["beta"]))


def seconds_to(mcmc: MCMC, run: Callable[[], Any], law: tuple[np.ndarray, np.ndarray], most: float) -> dict[str, Any]:
    """Run in pieces until time is up; when the running means came within 0.1 sd for good."""
    mean, sd = law
    total, count, first, times, errors = np.zeros(DIM), 0, np.nan, [], []
    start = time.perf_counter()
    while time.perf_counter() - start < most:
        run()
        draws = np.asarray(mcmc.get_samples()["beta"], float)
        first = time.perf_counter() - start if np.isnan(first) else first
        running = (total + draws.cumsum(0)) / (count + np.arange(1, len(draws) + 1))[:, None]
        total, count = total + draws.sum(0), count + len(draws)
        errors.append((np.abs(running - mean) / sd).max(1))
        times.append(time.perf_counter() - start)
        mcmc.post_warmup_state = mcmc.last_state
    ends = np.cumsum([len(e) for e in errors])
    outside = np.flatnonzero(np.concatenate(errors) > CLOSE)
    last = -1 if not len(outside) else int(outside[-1])
    reached = last + 1 < ends[-1]
    piece = int(np.searchsorted(ends, last + 2))
    return {
        "s to 0.1 sd": round(times[min(piece, len(times) - 1)], 1) if reached else f"> {times[-1]:.0f}",
        "draws": last + 2 if reached else f"> {ends[-1]}",
        "error at the end": round(float(errors[-1][-1]), 3),
        "s to the first piece": round(first, 1),
    }


def rows_of(count: int, most: float) -> list[dict[str, Any]]:
    silos = data(count)
    law = reference(silos)
    out = []
    kernel = fed.FSGLD(model, batch_size=100, control_variates=True, noise_correction=True, selection="size")
    langevin = MCMC(kernel, num_warmup=20, num_samples=200, progress_bar=False)
    found = seconds_to(
        langevin, lambda: langevin.run(jax.random.key(0), silos, init_params={"beta": np.zeros(DIM)}), law, most
    )
    out.append({"rows": count, "kernel": "FSGLD", **found})
    pooled = silos.pooled
    nuts = MCMC(NUTS(model), num_warmup=300, num_samples=100, progress_bar=False)
    found = seconds_to(
        nuts, lambda: nuts.run(jax.random.key(0), **pooled, init_params={"beta": np.zeros(DIM)}), law, most
    )
    out.append({"rows": count, "kernel": "NUTS, pooled", **found})
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--seconds", type=float, default=240, help="for each kernel")
    args = parser.parse_args()
    for count in args.rows:
        print(pd.DataFrame(rows_of(count, args.seconds)).to_string(index=False), flush=True)
