"""What the silos' noise is made of, and what bounded corrections of the surrogates take away.

    python tests/benchmarks/visit_noise.py lung_survival sleepstudy heart_disease_hospitals

Per model of `models/`: the largest eigenvalue of N (a visit of 40 steps, `selection="auto"`) with
the surrogates as fitted and with their bounded corrections dropped, what is redrawn in every step
of it (local latents), and the step sizes that follow.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

import numpyro_fed as fed
from numpyro_fed.mcmc import pilot, step_rule

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
DEFAULT = ["six_cities", "lung_survival", "sleepstudy", "exam", "heart_disease_hospitals"]


def row(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    silos = module.silos()
    kernel = fed.FSGLD(module.model, selection="auto")
    start = time.perf_counter()
    kernel.init(jax.random.key(0), 0, model_args=(silos,))
    seconds = time.perf_counter() - start
    config, tuning = kernel._config, kernel._tuning
    f, steps = np.asarray(tuning.selection, float), config.num_local_steps
    out: dict[str, Any] = {"model": name, "silos": len(silos), "d": config.factors.dim}
    straight = tuning._replace(
        conducive=tuning.conducive._replace(corrections=None, total_corrections=None)
    )
    for label, numbers in (("Gaussian", straight), ("bent", tuning)):
        noise = pilot.visit_noise(config, numbers, silos)
        out[f"N, {label}"] = round(float(np.linalg.eigvalsh(noise.covariance(f, steps))[-1]), 2)
        out[f"h, {label}"] = round(step_rule.step_size(noise, f, steps, 0.02), 4)
    gap = noise.first - noise.second
    within = noise.length / 4 * np.einsum("sni,snj->ij", gap / f[:, None, None], gap) / gap.shape[1]
    out["redrawn"] = round(float(np.linalg.eigvalsh(within)[-1]), 2)
    out["prep s"] = round(seconds)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=DEFAULT)
    for name in parser.parse_args().models:
        print(pd.DataFrame([row(name)]).to_string(index=False), flush=True)
