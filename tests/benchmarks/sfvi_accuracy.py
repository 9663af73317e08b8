r"""SFVI beside pooled NUTS.

Six cities for several K, eight schools, ten groups as ten silos, and SFVI-Avg.

    python tests/benchmarks/sfvi_accuracy.py [--quick] [--record] [six_cities six_cities_random
    six_cities_ten eight_schools ten_groups]

A row per fit: the bound (a mean over the last tenth of the rounds), largest error of a mean of a
fixed effect and of a log scale in NUTS's sds, sd ratios, Pareto's k, kilobytes that left all silos,
seconds of the fit (compilation included). "resampled": draws of theta by importance weights.
"pooled MVN": NumPyro's ``AutoMultivariateNormal`` on the pooled data.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from record import record

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
import eight_schools
import six_cities

Cells = dict[str, str]
DIGITS = {"bound": 2, "k": 2, "size": 0, "seconds": 0}  # of numbers beside the errors
CHAINS = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}


def groups_model(y: Any) -> None:
    """Ten groups of 40 rows, an intercept for each with an unknown scale."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with fed.silo_plate("groups", y.shape[0], dim=-2):
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("rows", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(a, sigma), obs=y)


def groups_silos() -> fed.Silos:
    rng = np.random.default_rng(11)
    y = 1.0 + 0.8 * rng.normal(size=(10, 1)) + 1.5 * rng.normal(size=(10, 40))
    return fed.split({"y": y.astype(np.float32)}, by=np.arange(10))


PROBLEMS: dict[str, tuple[Callable, Callable[[], fed.Silos], tuple[str, ...], float]] = {
    "six_cities": (six_cities.model, six_cities.silos, ("sigma",), 0.8),
    "six_cities_random": (
        six_cities.model,
        lambda: six_cities.silos(shuffled=True),
        ("sigma",),
        0.8,
    ),
    "six_cities_ten": (six_cities.model, lambda: six_cities.silos(six_cities.TEN), ("sigma",), 0.8),
    "eight_schools": (eight_schools.model, eight_schools.silos, ("tau",), 0.95),
    "ten_groups": (groups_model, groups_silos, ("tau", "sigma"), 0.9),
}


def parameters(samples: dict[str, Any], scales: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Draws of global scalars, scales as logs."""
    out = {k: np.asarray(v) for k, v in samples.items() if np.asarray(v).ndim == 1}
    return {k: np.log(v) if k in scales else v for k, v in out.items()}


def row(name: str, draws: dict, reference: dict, scales: tuple[str, ...], **rest: Any) -> Cells:
    """Return errors beside NUTS as text; ``rest`` has the other numbers, "" where there is none."""
    error = {k: abs(draws[k].mean() - r.mean()) / r.std() for k, r in reference.items()}
    ratio = {k: draws[k].std() / r.std() for k, r in reference.items()}
    fixed = [k for k in reference if k not in scales]

    def worst(names: Sequence[str]) -> str:
        ratios = [ratio[k] for k in names]
        return f"{max(error[k] for k in names):.2f}; {min(ratios):.2f}-{max(ratios):.2f}"

    cells = {"fit": name, "fixed": worst(fixed), "scales": worst(scales)}
    cells |= {key: f"{rest[key]:.{n}f}" if key in rest else "" for key, n in DIGITS.items()}
    print(*cells.values(), sep="  ", flush=True)
    return cells


def reference_draws(
    model: Callable, silos: fed.Silos, scales: tuple[str, ...], target: float, quick: bool
) -> dict:
    mcmc = MCMC(
        NUTS(model, target_accept_prob=target),
        num_warmup=500,
        num_samples=500 if quick else 5000,
        **CHAINS,
    )
    mcmc.run(random.key(1), **silos.pooled)
    return parameters(mcmc.get_samples(), scales)


def federated(
    fit: Any, silos: fed.Silos, rounds: int, scales: tuple[str, ...], **run: Any
) -> tuple[dict, dict, Any]:
    start = time.perf_counter()
    result = fit.run(random.key(0), rounds, silos, progress_bar=False, **run)
    jax.block_until_ready(result.params)
    seconds = time.perf_counter() - start
    out = {}
    for resample in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pareto's k is in the table
            idata = fed.to_inference_data(
                fit, result, silos, num_draws=4000, log_likelihood=False, resample=resample
            )
        samples = {k: v.values[0] for k, v in idata.posterior.data_vars.items()}
        out[resample] = parameters(samples, scales)
    facts = {
        "bound": -result.losses[-max(1, len(result.losses) // 10) :].mean(),
        "k": idata.posterior.attrs["pareto_k"],  # of the resampled draws
        "size": sum(result.ledger.bytes_up) / 1e3,
        "seconds": seconds,
    }
    return out, facts, result


def problem(name: str, quick: bool) -> list[Cells]:
    """Return a row for each fit of a problem."""
    model, make, scales, target = PROBLEMS[name]
    silos = make()
    rounds = 500 if quick else 4000
    reference = reference_draws(model, silos, scales, target, quick)
    print(f"\n{name}: {len(silos)} silos", flush=True)
    rows: list[Cells] = []
    guide = fed.AutoSiloNormal(model)
    for num in (1, 8, 32) if quick else (1, 8, 32, 128):
        draws, facts, _ = federated(
            fed.SFVI(model, guide, optax.adam(0.01), 1, num), silos, rounds, scales
        )
        rows += [
            row(f"SFVI, K = {num}", draws[False], reference, scales, **facts),
            row(f"K = {num}, resampled", draws[True], reference, scales),
        ]
    avg = fed.SFVIAvg(model, guide, optax.adam(0.003), num_local_steps=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws, facts, _ = federated(avg, silos, max(1, rounds // 100), scales)
    del facts["bound"]  # of silos that have moved away from q
    rows.append(row("SFVI-Avg, 100 steps", draws[False], reference, scales, **facts))
    start = time.perf_counter()
    pooled = AutoMultivariateNormal(model, init_scale=0.3)
    svi = SVI(model, pooled, optax.adam(optax.exponential_decay(0.01, rounds, 0.1)), Trace_ELBO())
    found = svi.run(random.key(0), 2 * rounds, **silos.pooled, progress_bar=False)
    samples = pooled.sample_posterior(random.key(2), found.params, sample_shape=(4000,))
    facts = {
        "bound": -float(found.losses[-rounds // 5 :].mean()),
        "seconds": time.perf_counter() - start,
    }
    rows.append(row("pooled MVN", parameters(samples, scales), reference, scales, **facts))
    return [{"problem": name, "silos": str(len(silos)), **cells} for cells in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="SFVI beside pooled NUTS.")
    parser.add_argument(
        "problems", nargs="*", default=list(PROBLEMS), metavar="problem", help=", ".join(PROBLEMS)
    )
    parser.add_argument("--quick", action="store_true", help="few rounds and draws")
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    args = parser.parse_args()
    unknown = sorted(set(args.problems) - set(PROBLEMS))
    if unknown:
        parser.error(f"unknown problems {unknown}; there are {list(PROBLEMS)}")
    start, rows = time.time(), []
    for name in args.problems:
        rows += problem(name, args.quick)
        if args.record:
            record("sfvi_accuracy", rows, start)


if __name__ == "__main__":
    main()
