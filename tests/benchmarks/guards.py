"""What the guards cost: FSGLD as it is beside the same kernel without its cut, its automatic step and its statistics of e.

    python tests/benchmarks/guards.py [MODEL ...]

Per model of `models/`: time of a run of 4 chains, guarded over bare, median and quartiles of runs taken in turn in one process, each
compiled once; for stays of 40 local steps. The bare kernel has e and the server's gradient in one call of the model.
"""

import argparse
import copy
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
ROUNDS, TURNS = 200, 15


def compiled(kernel: Any, silos: fed.Silos) -> Callable[[jax.Array], Any]:
    @jax.jit
    def run(key: jax.Array) -> Any:
        mcmc = MCMC(
            kernel, num_warmup=0, num_samples=ROUNDS, num_chains=4, chain_method="vectorized", progress_bar=False
        )
        mcmc.run(key, silos)
        return mcmc.get_samples()

    return run


def seconds(run: Callable[[jax.Array], Any], key: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(key))
    return time.perf_counter() - start


def ratios(name: str) -> str:
    module = importlib.import_module(name)
    silos = module.silos()
    guarded = fed.FSGLD(module.model)
    guarded.init(jax.random.key(0), 0, model_args=(silos,))
    bare = copy.copy(guarded)
    assert guarded._plan is not None
    bare._plan = replace(guarded._plan, cut=False)
    runs = [compiled(kernel, silos) for kernel in (guarded, bare)]
    times = np.array([[seconds(run, jax.random.key(i)) for run in runs] for i in range(TURNS + 1)])[1:]
    assert not bare._plan.cut  # nothing was prepared again
    low, middle, high = np.quantile(times[:, 0] / times[:, 1], (0.25, 0.5, 0.75))
    each = 1e6 * np.median(times, 0) / (ROUNDS * 40 * 4)
    return f"{name}: guarded / bare {middle:.2f} ({low:.2f}-{high:.2f}); {each[0]:.2f} and {each[1]:.2f} microseconds a chain and step"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["heart_disease", "six_cities", "sleepstudy"])
    for name in parser.parse_args().models:
        print(ratios(name), flush=True)
