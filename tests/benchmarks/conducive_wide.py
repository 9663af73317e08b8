"""Conducive rounds beside SFVI on models of thousands of dimensions.

Rounds and megabytes to the bound that SFVI ends at.

    NUMPYRO_FED_DATA=... python tests/benchmarks/conducive_wide.py multinomial [--sfvi 4000]
        [--rounds 60]
    NUMPYRO_FED_DATA=... python tests/benchmarks/conducive_wide.py network [--sfvi 2000]
        [--rounds 76]

multinomial: softmax regression on MNIST in five silos (`models/multinomial_regression.py`: 7,850
weights, two learned prior scales). network: the hierarchical network of
`models/hierarchical_bnn.py` in ten silos (39,751 shared latents, 39,250 of each silo's own). SFVI
as these files run it, for as many rounds as given; its level is the mean bound of its last tenth,
less a nat. For each method: rounds until the mean bound of a window (SFVI 100 rounds, conducive 5)
is at that level, megabytes up of a silo, and seconds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
import hierarchical_bnn as bnn
import multinomial_regression as softmax

WINDOWS = {"SFVI": 100, "conducive": 5}


def multinomial() -> tuple[fed.Silos, dict[str, Any]]:
    train, _ = softmax.data()
    guide, model = softmax.guide(), softmax.model
    plain = fed.SFVI(model, guide, softmax.OPTIM)
    conducive = fed.ConduciveSFVI(model, guide, softmax.OPTIM, num_local_steps=20, batch_size=96)
    return softmax.silos(train, 5), {"SFVI": plain, "conducive": conducive}


def network() -> tuple[fed.Silos, dict[str, Any]]:
    model, size = bnn.hierarchical, bnn.SIZES[10][0]
    guide = bnn.guide(model)
    plain = fed.SFVI(model, guide, bnn.SFVI_OPTIM, 1, 1, batch_size=size, validate=False)
    optim = optax.adam(
        optax.exponential_decay(0.03, 10_000, 0.1, end_value=0.002)
    )  # of a silo's own layer
    conducive = fed.ConduciveSFVI(
        model,
        guide,
        optim,
        num_local_steps=300,
        num_local_particles=1,
        batch_size=24,
        validate=False,
    )
    return bnn.silos(bnn.images("train", 60_000), 10), {"SFVI": plain, "conducive": conducive}


PROBLEMS: dict[str, Callable[[], tuple[fed.Silos, dict[str, Any]]]] = {
    "multinomial": multinomial,
    "network": network,
}


def report(name: str, result: Any, seconds: float, level: float | None) -> float:
    """Print a line; return the level: given, or the end of this run."""
    bound, window = -np.asarray(result.losses), WINDOWS[name]
    mean = np.convolve(bound, np.ones(window) / window, "valid")
    level = bound[-len(bound) // 10 :].mean() - 1 if level is None else level
    there = int(np.argmax(mean >= level)) + window if (mean >= level).any() else None
    each = result.ledger.bytes_up[0] / len(bound) / 1e6
    shown = (
        f"{there} rounds, {there * each:.1f} MB"
        if there
        else f"not in {len(bound)} rounds ({len(bound) * each:.1f} MB)"
    )
    print(
        f"{name}: at {level:,.0f} after {shown} up of a silo; last {mean[-1]:,.0f}, {seconds:.0f} "
        f"s for {len(bound)} rounds"
    )
    print(
        "  ",
        ", ".join(
            f"{n}: {mean[n - window]:,.0f}"
            for n in range(window, len(bound) + 1, max(window, len(bound) // 12))
        ),
        flush=True,
    )
    return float(level)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problem", choices=sorted(PROBLEMS))
    parser.add_argument("--sfvi", type=int, metavar="ROUNDS")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    silos, methods = PROBLEMS[args.problem]()
    rounds = {"SFVI": args.sfvi or {"multinomial": 4000, "network": 2000}[args.problem]}
    rounds["conducive"] = args.rounds or {"multinomial": 60, "network": 76}[args.problem]
    level = None
    for name, method in methods.items():
        start = time.perf_counter()
        result = method.run(jax.random.key(0), rounds[name], silos, progress_bar=False)
        level = report(name, result, time.perf_counter() - start, level)
