"""What the guards cost.

FSGLD as it is beside the same kernel without its cut, its automatic step and its statistics of e.

    python tests/benchmarks/guards.py [MODEL ...]

Per model of `models/`: time of a run of 4 chains, guarded over bare, median and quartiles of runs
taken in turn in one process, each compiled once, with visits of 40 steps. The bare kernel has e and
the server's gradient in one call of the model.
"""

import argparse
import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC
from speed import in_turn, quartiles

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
ROUNDS, TURNS = 200, 15


def compiled(kernel: Any, silos: fed.Silos) -> Callable[[jax.Array], Any]:
    @jax.jit
    def run(key: jax.Array) -> Any:
        mcmc = MCMC(
            kernel,
            num_warmup=0,
            num_samples=ROUNDS,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(key, silos)
        return mcmc.get_samples()

    return run


def ratios(name: str) -> str:
    module = importlib.import_module(name)
    silos = module.silos()
    guarded = fed.FSGLD(module.model)
    guarded.init(jax.random.key(0), 0, model_args=(silos,))
    bare = copy.copy(guarded)
    assert guarded._config is not None
    bare._config = replace(guarded._config, cut=False)
    forms = {"guarded": compiled(guarded, silos), "bare": compiled(bare, silos)}
    times = in_turn(forms, TURNS)
    assert not bare._config.cut  # nothing was prepared again
    each = {form: 1e6 * np.median(seconds) / (ROUNDS * 40 * 4) for form, seconds in times.items()}
    return (
        f"{name}: guarded / bare {quartiles(times['guarded'] / times['bare'])}; "
        f"{each['guarded']:.2f} and {each['bare']:.2f} microseconds a chain "
        "and step"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["heart_disease", "six_cities", "sleepstudy"])
    for name in parser.parse_args().models:
        print(ratios(name), flush=True)
