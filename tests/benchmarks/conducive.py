"""Conducive rounds beside pooled NUTS and SFVI.

How many rounds and bytes to the pooled optimum, and how right it is.

    python tests/benchmarks/conducive.py [--references DIR] [--sfvi ROUNDS] [--missing 0.3] [PROBLEM
    ...]

The problems are those of `fidelity.py` without nested plates, whose references (``--references``)
and goals these are. For each: rounds from a cold start until q is within 0.1 sd and 5 % of where
the rounds end, and until the bound is within a nat of its end; kilobytes up in these, all silos.
Then two rows beside NUTS: draws of q, and those of the last round, in which the silos' likelihoods
at public draws weigh them (``resample=True``), with Pareto's k. ``--sfvi``: as many rounds of SFVI
with Adam(0.01), and after how many the running mean of 100 losses is within a nat of the same
bound. ``--missing``: the rounds again with that share of silos absent.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pandas as pd
from fidelity import Row, reference
from fidelity_problems import NESTED, PROBLEMS

import numpyro_fed as fed

MOST_ROUNDS, DRAWS = 30, 4000


def trace(fit: fed.SFVIAvg, silos: fed.Silos, **who: Any) -> tuple[Any, list, list, list[float]]:
    """Run round by round; return the last result, q's means and sds, and the losses before.

    Means and sds are those after each round.
    """
    state, means, sds, losses = None, [], [], []
    for _ in range(MOST_ROUNDS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each is the first of what follows
            result = fit.run(
                jax.random.key(0), 1, silos, progress_bar=False, init_state=state, **who
            )
        state = result.state
        losses.append(float(result.losses[0]))
        means.append(np.asarray(result.params["auto_loc"]))
        sds.append(np.linalg.norm(result.params["auto_scale_tril"], axis=1))
        if not who and float(state.server.moved) < 1e-3:
            break
    return result, means, sds, losses


def first_close(means: list, sds: list, mean: np.ndarray, sd: np.ndarray) -> int | str:
    """Return the rounds after which q remains within 0.1 sd and 5 % of a Gaussian."""
    off = [
        np.abs((m - mean) / sd).max() > 0.1 or np.abs(s / sd - 1).max() > 0.05
        for m, s in zip(means, sds, strict=True)
    ]
    last = max((i for i, x in enumerate(off) if x), default=-1)
    return last + 2 if last + 1 < len(off) else f"> {len(off)}"


def run(name: str, args: argparse.Namespace) -> None:
    problem, notes = PROBLEMS[name], []
    print(f"\n=== {name}", flush=True)
    silos = problem.silos()
    wanted = reference(problem, name, args.references)
    fit = fed.ConduciveSFVI(problem.model, fed.AutoSiloNormal(problem.model))
    start = time.perf_counter()
    result, means, sds, losses = trace(fit, silos)
    seconds = time.perf_counter() - start
    a_round = sum(result.ledger.bytes_up) / sum(result.ledger.rounds) * len(silos)  # of all silos
    close = first_close(means, sds, means[-1], sds[-1])
    nat = int(np.argmax(np.abs(np.array(losses) - losses[-1]) < 1)) + 1
    print(
        f"settled after {len(means)} rounds, {seconds:.0f} s with compilation (moved "
        f"{float(result.state.server.moved):.1g} sds, held back {int(result.state.server.held)} "
        "times); within 0.1 sd and "
        f"5 % after {close}; bound {-losses[-1]:.2f}, within a nat before round {nat}: "
        f"{a_round * (nat - 1) / 1e3:.2f} kB up, {a_round / 1e3:.3f} kB a round",
        flush=True,
    )
    if args.missing:
        who = {silo: 1 - args.missing for silo in silos.names}
        _, some_means, some_sds, _ = trace(fit, silos, participation=who)
        print(
            f"{100 * args.missing:.0f} % missing: within 0.1 sd and 5 % after "
            f"{first_close(some_means, some_sds, means[-1], sds[-1])} rounds",
            flush=True,
        )
    if args.sfvi:
        svi = fed.SFVI(problem.model, fed.AutoSiloNormal(problem.model), optax.adam(0.01))
        plain = svi.run(jax.random.key(0), args.sfvi, silos, progress_bar=False)
        running = np.convolve(plain.losses, np.ones(100) / 100, "valid")
        far = np.flatnonzero(running - losses[-1] > 1)
        needed = (
            (int(far[-1]) + 101 if len(far) else 100)
            if len(far) < len(running) and (not len(far) or far[-1] + 1 < len(running))
            else None
        )
        each = sum(plain.ledger.bytes_up) / args.sfvi
        shown = (
            f"{needed:,} rounds, {each * needed / 1e3:.1f} kB up"
            if needed
            else f"not in {args.sfvi:,} rounds (> {each * args.sfvi / 1e3:.0f} kB)"
        )
        print(
            f"SFVI: a nat from that bound after {shown}; its last bound {-running[-1]:.2f}",
            flush=True,
        )
    rows = []
    for method, resample in (("q", False), ("last round", True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pareto's k is in the table
            idata = fed.to_inference_data(
                fit, result, silos, num_draws=DRAWS, log_likelihood=False, resample=resample
            )
        draws = {
            str(k): v.values.reshape(4, DRAWS // 4, *v.shape[2:])
            for k, v in idata.posterior.data_vars.items()
        }
        row = Row(method, draws, wanted, problem)
        row.cells["k"] = f"{idata.posterior.attrs['pareto_k']:.2f}"
        rows.append(row.finish())
        notes += [f"{method}: {note}" for note in row.notes]
    print(
        f"\n{name}\n{pd.DataFrame(rows).fillna('').to_string(index=False)}\n" + "\n".join(notes),
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "problems", nargs="*", metavar="PROBLEM", default=[p for p in PROBLEMS if p not in NESTED]
    )
    parser.add_argument(
        "--references",
        type=Path,
        metavar="DIR",
        help="keep NUTS's draws here, and take them from here",
    )
    parser.add_argument("--sfvi", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--missing", type=float, default=0.0)
    args = parser.parse_args()
    for problem in args.problems:
        run(problem, args)
