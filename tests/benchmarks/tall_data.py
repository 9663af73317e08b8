"""Tall data.

When is every posterior mean within 0.1 sd for good? FSGLD by minibatches beside NUTS on the
pooled rows.

    python tests/benchmarks/tall_data.py [--rows 10000 100000 1000000] [--seconds 260]

Logistic regression, d = 20, ten silos whose covariates and base rates are shifted. One chain each;
NUTS starts from zero, where the fit of FSGLD's surrogates starts. Seconds count everything from a
model and its data on: checks, fits, compilation, warm-up; the first piece of a run (1,000 rounds of
FSGLD; 300 + 200 draws of NUTS) counts as a whole. FSGLD: minibatches of 100 with control variates,
noise corrected, no warm-up, since it starts at a draw of the surrogate posterior. "s a draw" is of
the last piece. The reference is importance sampling.
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

NUM_SILOS, DIM, CLOSE, PAIRS, MOST_DRAWS = 10, 20, 0.1, 500, 4000


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
    """Return mean and sds by importance sampling from the Laplace approximation.

    By antithetic pairs, in float64, without the library.
    """
    x, y = (np.asarray(silos.pooled[k], float) for k in ("x", "y"))
    mode = np.zeros(DIM)
    for _ in range(12):
        p = 1 / (1 + np.exp(-x @ mode))
        precision = (x.T * (p * (1 - p))) @ x + np.eye(DIM)
        mode += np.linalg.solve(precision, x.T @ (y - p) - mode)
    half = np.random.default_rng(1).normal(size=(PAIRS, DIM))
    u = np.concatenate([half, -half])
    draws = mode + np.linalg.solve(np.linalg.cholesky(precision).T, u.T).T
    log_weights = (u**2).sum(1) / 2 - (draws**2).sum(1) / 2 + draws @ (x.T @ y)
    for part in np.array_split(x, max(1, len(x) // 5000)):
        log_weights -= np.logaddexp(0, part @ draws.T).sum(0)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ draws
    return mean, np.sqrt(weights @ (draws - mean) ** 2)


def seconds_to(
    mcmc: MCMC, run: Callable[[Any], Any], law: tuple[np.ndarray, np.ndarray], most: float
) -> dict[str, Any]:
    """Run in pieces, each as long as all before, until time is up.

    When the running means came within 0.1 sd for good.
    """
    draws, ends, times = np.zeros((0, DIM)), [0], [0.0]
    start = time.perf_counter()
    while times[-1] < most and ends[-1] < MOST_DRAWS:
        run(
            jax.random.key(ends[-1])
        )  # MCMC.run sets the key anew, so that one key would repeat its numbers
        draws = np.concatenate([draws, np.asarray(mcmc.get_samples()["beta"], float)])
        ends.append(len(draws))
        times.append(time.perf_counter() - start)
        mcmc.post_warmup_state, mcmc.num_samples = mcmc.last_state, len(draws)
    running = draws.cumsum(0) / np.arange(1, len(draws) + 1)[:, None]
    errors = (np.abs(running - law[0]) / law[1]).max(1)
    outside = np.flatnonzero(errors > CLOSE)
    needed = int(outside[-1]) + 2 if len(outside) else 1
    reached = needed <= len(draws)
    ess = float(az.ess(az.convert_to_dataset({"x": draws[None]}))["x"].min())
    return {
        "s to 0.1 sd": f"{np.interp(max(needed, ends[1]), ends, times):.1f}"
        if reached
        else f"> {times[-1]:.0f}",
        "draws": needed if reached else f"> {len(draws)}",
        "ESS a draw": round(ess / len(draws), 3),
        "error at the end": round(float(errors[-1]), 3),
        "s to the first piece": round(times[1], 1),
        "s a draw": f"{(times[-1] - times[-2]) / (ends[-1] - ends[-2]):.2g}",
    }


def rows_of(count: int, most: float) -> list[dict[str, Any]]:
    silos = data(count)
    law = reference(silos)
    kernel = fed.FSGLD(
        model, fed.Step(control_variates=True, noise_correction=True), batch_size=100
    )
    langevin = MCMC(kernel, num_warmup=0, num_samples=1000, progress_bar=False, jit_model_args=True)
    found = seconds_to(langevin, lambda key: langevin.run(key, silos), law, most)
    out = [{"rows": count, "kernel": "FSGLD", **found}]
    nuts = MCMC(
        NUTS(model), num_warmup=300, num_samples=200, progress_bar=False, jit_model_args=True
    )
    start, pooled = {"beta": np.zeros(DIM, np.float32)}, silos.pooled
    found = seconds_to(nuts, lambda key: nuts.run(key, **pooled, init_params=start), law, most)
    return [*out, {"rows": count, "kernel": "NUTS, pooled", **found}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--seconds", type=float, default=260, help="for each kernel")
    args = parser.parse_args()
    for count in args.rows:
        print(pd.DataFrame(rows_of(count, args.seconds)).to_string(index=False), flush=True)
