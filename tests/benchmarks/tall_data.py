"""Tall data.

When is every posterior mean within 0.1 sd for good? FSGLD by minibatches beside NUTS on the
pooled rows.

    python tests/benchmarks/tall_data.py [--rows 10000 100000 1000000] [--seeds 5] [--record]

Logistic regression, d = 20, ten silos whose covariates and base rates are shifted. One chain each,
in a process of its own, FSGLD and NUTS in turn. NUTS starts from zero, where the fit of FSGLD's
surrogates starts. Seconds count everything from a model and its data on: checks, fits, compilation,
warm-up; the first piece of a run (1,000 rounds of FSGLD; 300 + 200 draws of NUTS) counts as a
whole. FSGLD: minibatches of 100 with control variates, noise corrected, no warm-up, since it starts
at a draw of the surrogate posterior. A run ends 400 draws after its means have come within 0.1 sd
for good. "s a draw" is of the last piece. The reference is importance sampling.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from record import record

import numpyro_fed as fed

NUM_SILOS, DIM, CLOSE, PAIRS, MOST_DRAWS = 10, 20, 0.1, 500, 4000
AFTER = 400  # draws after means have come close for good


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
    mcmc: MCMC, run: Callable[[Any], Any], law: tuple[np.ndarray, np.ndarray], seed: int
) -> dict[str, Any]:
    """Run in pieces until the running means have been within 0.1 sd for long."""
    draws, ends, times = np.zeros((0, DIM)), [0], [0.0]
    start, needed = time.perf_counter(), MOST_DRAWS
    while ends[-1] < min(needed + AFTER, MOST_DRAWS):
        # MCMC.run sets the key anew, so that one key would repeat its numbers
        run(jax.random.key(MOST_DRAWS * seed + ends[-1]))
        draws = np.concatenate([draws, np.asarray(mcmc.get_samples()["beta"], float)])
        ends.append(len(draws))
        times.append(time.perf_counter() - start)
        mcmc.post_warmup_state = mcmc.last_state
        running = draws.cumsum(0) / np.arange(1, len(draws) + 1)[:, None]
        errors = (np.abs(running - law[0]) / law[1]).max(1)
        outside = np.flatnonzero(errors > CLOSE)
        needed = int(outside[-1]) + 2 if len(outside) else 1
    ess = float(az.ess(az.convert_to_dataset({"x": draws[None]}))["x"].min())
    return {
        "seconds": float(np.interp(max(needed, ends[1]), ends, times)),
        "needed": needed,
        "reached": needed <= len(draws),
        "draws": len(draws),
        "ess": ess / len(draws),
        "error": float(errors[-1]),
        "first": times[1],
        "each": (times[-1] - times[-2]) / (ends[-1] - ends[-2]),
    }


def answer(count: int, kernel: str, seed: int) -> dict[str, Any]:
    """Return the numbers of one chain."""
    silos = data(count)
    law = reference(silos)
    how: dict[str, Any] = {"progress_bar": False, "jit_model_args": True}
    if kernel == "FSGLD":
        step = fed.Step(control_variates=True, noise_correction=True)
        fsgld = fed.FSGLD(model, step, batch_size=100)
        mcmc = MCMC(fsgld, num_warmup=0, num_samples=1000, **how)
        return seconds_to(mcmc, lambda key: mcmc.run(key, silos), law, seed)
    mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=200, **how)
    start, pooled = {"beta": np.zeros(DIM, np.float32)}, silos.pooled
    return seconds_to(mcmc, lambda key: mcmc.run(key, **pooled, init_params=start), law, seed)


def main() -> None:
    """Print a line for each chain."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        count, kernel, seed = args.one
        print(json.dumps(answer(int(count), kernel, int(seed))))
        return
    began, found = time.time(), []
    for count in args.rows:
        for seed in range(args.seeds):
            for kernel in ("FSGLD", "NUTS"):
                command = [sys.executable, __file__, "--one", str(count), kernel, str(seed)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                row = {"rows": count, "seed": seed, "kernel": kernel}
                found.append(row | json.loads(done.stdout.splitlines()[-1]))
                print(found[-1], flush=True)
                if args.record:
                    record("tall_data", found, began)


if __name__ == "__main__":
    main()
