"""Conducive rounds in many dimensions.

Logistic regression on 20 d rows in ten shifted silos, q full or diagonal.

    python tests/benchmarks/wide.py [--rounds 60] [--record]

A row for each d and form of q: rounds until bound and q stand still, kilobytes up of a silo,
seconds (compilation included), Pareto's k of the last round, and against the Gaussian at the
posterior's mode the range of the sd ratios (full: of marginal sds; diagonal: of conditional ones,
which are what such a q has).
"""

import argparse
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from record import record

import numpyro_fed as fed

NUM_SILOS = 10


def model(x, y):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def data(dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20 * dim, dim)) + rng.normal(size=(NUM_SILOS, dim)).repeat(2 * dim, 0) / 2
    y = rng.random(len(x)) < 1 / (1 + np.exp(-x @ rng.normal(size=dim) * 2 / np.sqrt(dim)))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def curvature(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the posterior's precision at its mode."""
    beta = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ beta))
        precision = (x.T * (p * (1 - p))) @ x + np.eye(len(beta))
        beta = beta + np.linalg.solve(precision, x.T @ (y - p) - beta)
    return precision


def row(dim: int, cov: str, rounds: int) -> dict[str, Any]:
    rows = data(dim)
    silos = fed.split(rows, by=np.arange(NUM_SILOS).repeat(2 * dim))
    avg = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model, global_cov=cov))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that has not converged says so; the table does
        start = time.perf_counter()
        result = avg.run(jax.random.key(0), rounds, silos, progress_bar=False, tol=0.01)
        seconds = time.perf_counter() - start
        idata = fed.to_inference_data(
            avg, result, silos, num_draws=2000, resample=True, log_likelihood=False
        )
    precision = curvature(rows["x"].astype(float), rows["y"])
    wanted = np.diag(np.linalg.inv(precision)) if cov == "full" else 1 / np.diag(precision)
    ratio = jnp.linalg.norm(result.whitening[1], axis=1) if cov == "full" else result.whitening[1]
    ratio = np.asarray(ratio) / np.sqrt(wanted)
    made = len(result.losses)
    return {
        "d": dim,
        "q": cov,
        "rounds": made if made < rounds else f"> {made}",
        "kB up a silo": round(result.ledger.bytes_up[0] / 1e3, 1),
        "seconds": round(seconds),
        "k": round(idata.posterior.attrs["pareto_k"], 2),
        "sd ratios": f"{ratio.min():.2f}-{ratio.max():.2f}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    args = parser.parse_args()
    begin = time.time()
    sizes = {"full": (20, 100, 200), "diag": (20, 100, 200, 1000)}
    found = [row(dim, cov, args.rounds) for cov, dims in sizes.items() for dim in dims]
    print(pd.DataFrame(found).to_string(index=False))
    if args.record:
        record("conducive_wide", found, begin)
