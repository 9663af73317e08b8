"""Surrogates of low rank in many dimensions: numbers a silo, noise, and the step size that follows.

    python tests/benchmarks/low_rank.py [--dim 300] [--rows 600] [--covariates
    factors|autoregressive] [--ranks 5 20 60]

Logistic regression in ten silos; covariates share five strong directions and have five of their own
in each silo, or are autoregressive (0.9). `diagonal` and `full` are the diagonal of the silos'
curvatures at the posterior's mode, and all of them.
"""

import argparse
import time
from collections.abc import Iterator

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed.mcmc import pilot
from numpyro_fed.surrogates import Gaussian, Surrogates

NUM_SILOS = 10


def model(x, y):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def data(dim: int, rows: int, covariates: str) -> fed.Silos:
    rng = np.random.default_rng(0)
    silo = np.repeat(np.arange(NUM_SILOS), rows)
    x = rng.normal(size=(len(silo), dim))
    if covariates == "autoregressive":
        x = x @ np.linalg.cholesky(0.9 ** abs(np.subtract.outer(np.arange(dim), np.arange(dim)))).T
    else:
        common, *own = rng.normal(size=(1 + NUM_SILOS, dim, 5)) / np.sqrt(5)
        x *= 0.6
        for s in range(NUM_SILOS):
            x[silo == s] += 0.8 * (
                rng.normal(size=(rows, 5)) @ common.T + rng.normal(size=(rows, 5)) @ own[s].T
            )
    x /= x.std(0)
    y = rng.random(len(x)) < 1 / (1 + np.exp(-x @ rng.normal(size=dim) * 2 / np.sqrt(dim)))
    return fed.split({"x": x.astype(np.float32), "y": y.astype(np.int32)}, by=silo)


def forms(silos: fed.Silos, dim: int, ranks: list[int]) -> Iterator[tuple[str, Surrogates]]:
    whole = fed.surrogates.low_rank(model, silos, rank=dim)
    precision = np.asarray(whole.factors.precision.dense(), np.float64)
    eta, prior = np.asarray(whole.factors.eta), whole.prior
    mode = np.linalg.solve(precision.sum(0) + prior.precision, eta.sum(0) + prior.eta)
    diagonal, own = np.diagonal(precision, axis1=1, axis2=2), np.diag(prior.precision)
    slopes = eta - precision @ mode, prior.eta - prior.precision @ mode
    yield (
        "diagonal",
        Surrogates(
            Gaussian(slopes[0] + diagonal * mode, diagonal), Gaussian(slopes[1] + own * mode, own)
        ),
    )
    for rank in ranks:
        yield f"rank {rank}", fed.surrogates.low_rank(model, silos, rank=rank)
    yield "full", Surrogates(Gaussian(eta, precision), prior)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dim", type=int, default=300)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--covariates", choices=["factors", "autoregressive"], default="factors")
    parser.add_argument("--ranks", type=int, nargs="*", default=[5, 20, 60])
    args = parser.parse_args()
    silos = data(args.dim, args.rows, args.covariates)
    print("form      numbers a silo  largest eigenvalue of N  step size  cut %  s a round")
    for name, given in forms(silos, args.dim, args.ranks):
        kernel = fed.FSGLD(model, surrogate=given, validate=False)
        mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
        mcmc.run(jax.random.key(0), silos)
        start = time.perf_counter()
        mcmc.run(jax.random.key(1), silos)
        seconds = (time.perf_counter() - start) / 250
        config, tuning = kernel._config, kernel._tuning
        noise = pilot.visit_noise(config, tuning, silos).covariance(
            np.asarray(tuning.selection, float), config.num_local_steps
        )
        size = sum(np.asarray(v).size for v in jax.tree.leaves(given.factors)) // NUM_SILOS
        cut = 100 * float(mcmc.get_extra_fields()["cut_rate"].mean())
        top = np.linalg.eigvalsh(noise)[-1]
        print(
            f"{name:<10}{size:>14}{top:>25.1f}{float(tuning.step_size):>11.5f}{cut:>7.2f}{seconds:>11.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
