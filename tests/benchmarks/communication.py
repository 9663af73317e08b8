"""Rounds and bytes until a mean is known to 0.1 sd.

Local steps a round at equal numbers of gradients, FSGLD beside DSGLD and SGLD, and silos that do
not answer.

    python tests/benchmarks/communication.py [MODEL ...] [--steps 40000] [--references DIR]
        [--record NAME] [--quick]

For T = 1, 10, 40, 100 and 400: largest error of a fixed effect or log scale in sds of pooled NUTS
(in float64, of `fidelity.py`) after as many local steps (four chains), with its Monte-Carlo
standard error, and the rounds and megabytes up, all chains and silos, after which every running
mean of the four chains is within 0.1 sd for good. "Prepared": megabytes up before the first round.
FSGLD chooses its step for each T; DSGLD has FSGLD's step at T = 1 in the same whitened coordinates,
and then its own; SGLD, on one silo with all rows, makes a round of each step (in a federation each
silo would have to send its part). The last row has FSGLD at T = 40 with three rounds in ten
unanswered.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import pandas as pd
from fidelity import reference
from fidelity_problems import PROBLEMS, Draws, Problem
from numpyro.infer import MCMC
from record import record

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_models import SilentSilos

CHAINS: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
VISITS = (1, 10, 40, 100, 400)
CLOSE = 0.1


def flat(draws: Draws, problem: Problem) -> np.ndarray:
    """Return the global coordinates as `fidelity.py` judges them, ``(chains, draws, scalars)``."""
    groups = problem.read(draws)
    each = [x for name in ("fixed", "scales") for x in groups[name].values()]
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in each], axis=2)


def standard_errors(draws: np.ndarray) -> np.ndarray:
    return az.mcse(az.convert_to_dataset({"x": draws}))["x"].values


def row(name: str, label: str, mcmc: MCMC, draws: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """Return a row of the table: one kernel on one model."""
    mean, sd = wanted.mean((0, 1)), wanted.std((0, 1))
    count = draws.shape[1]
    errors = np.abs(draws.mean(0).cumsum(0) / np.arange(1, count + 1)[:, None] - mean) / sd
    worst = int(errors[-1].argmax())
    noise = np.hypot(standard_errors(draws), standard_errors(wanted))[worst] / sd[worst]
    outside = np.flatnonzero(errors.max(1) > CLOSE)
    rounds = int(outside[-1]) + 2 if len(outside) else 1
    more, rounds = ("> ", count) if rounds > count else ("", rounds)
    ledger, setup = mcmc.sampler.ledger(mcmc.last_state), mcmc.sampler._setup_cost
    setup = len(ledger.silos) * setup.bytes_up
    up = (sum(ledger.bytes_up) - setup) / (4 * count)
    ratio = draws.std((0, 1)) / sd
    ess = float(az.ess(az.convert_to_dataset({"x": draws}))["x"].min())
    return {
        "model": name,
        "kernel": label,
        "step": float(mcmc.last_state.step_size.ravel()[0]),
        "error": float(errors[-1, worst]),
        "mcse": float(noise),
        "least_ratio": float(ratio.min()),
        "largest_ratio": float(ratio.max()),
        "ess_a_round": ess / (4 * count),
        "more": more,  # all rounds that there were did not suffice
        "rounds": 4 * rounds,
        "megabytes": 4 * rounds * up / 1e6,
        "prepared": setup / 1e6,
    }


def run(name: str, steps: int, folder: Path | None) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    problem = PROBLEMS[name]
    model, silos = problem.model, problem.silos()
    exact = flat(reference(problem, name, folder), problem)
    rows: list[dict[str, Any]] = []

    def add(label: str, kernel: Any, stay: int) -> float:
        mcmc = MCMC(kernel, num_warmup=0, num_samples=steps // stay, **CHAINS)
        mcmc.run(jax.random.key(0), silos)
        draws = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
        rows.append(row(name, label, mcmc, flat(draws, problem), exact))
        print(rows[-1], file=sys.stderr, flush=True)
        return rows[-1]["step"]

    steps_found = [
        add(f"FSGLD, T = {stay}", fed.FSGLD(model, num_local_steps=stay), stay) for stay in VISITS
    ]
    for stay in VISITS:
        add(f"DSGLD, T = {stay}", fed.DSGLD(model, fed.Step(steps_found[0]), stay), stay)
    for stay in (1, 40):
        add(f"DSGLD, T = {stay}, own step", fed.DSGLD(model, "auto", stay), stay)
    add("SGLD, a round a step", fed.SGLD(model, "auto", 1), 1)
    add("FSGLD, T = 40, 30 % unanswered", SilentSilos(model, silence=0.3), 40)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "models",
        nargs="*",
        default=["heart_disease", "six_cities"],
        choices=PROBLEMS,
        metavar="MODEL",
    )
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--references", type=Path, metavar="DIR", help="as of fidelity.py")
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    began, rows = time.time(), []
    for name in args.models:
        rows += run(name, 4000 if args.quick else args.steps, args.references)
        if args.record:
            record(args.record, rows, began)
    print(pd.DataFrame(rows).round(4).to_string(index=False))
