"""Models of one line over tables in silos, beside pooled NUTS on the model that is written.

    NUMPYRO_FED_DATA=FOLDER python tests/benchmarks/formulas.py [--draws N] [--record] [PROBLEM ...]

Tables are CSV files, one a silo, as a hospital has them: text columns, missing values. A row a
problem: silos and rows; seconds to read and code the tables; seconds of the fit; its rounds, and kB
up a silo; the verdict; of the coefficients, the largest error of a mean in sds of NUTS with its
Monte-Carlo standard error, and the range of sd ratios; NUTS's seconds and worst R-hat.
``--record``: for docs/results (`docs/tables.py`).
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import pandas as pd
from numpyro.infer import MCMC, NUTS
from record import record
from verdicts import errors

import numpyro_fed as fed

sys.path.append(str(Path(__file__).parents[2] / "models"))
from _data import path


@dataclass(frozen=True)
class Problem:
    """A formula over a table whose column ``by`` names the silos."""

    folder: str
    file: str
    by: str
    formula: str
    options: dict[str, Any]


IST = "dead_14_days ~ aspirin * C(heparin, Treatment('N')) + scale(age) + sex + conscious"
PROBLEMS = {
    "ist": Problem("federated", "ist.csv", "country", IST, {"family": "bernoulli"}),
    "ist_silo": Problem(
        "federated", "ist.csv", "country", f"{IST} + (1 | silo)", {"family": "bernoulli"}
    ),
    "ist_fibrillation": Problem(
        "federated",
        "ist.csv",
        "country",
        f"{IST} + atrial_fibrillation",
        {"family": "bernoulli", "impute": {"atrial_fibrillation": "scale(age) + sex"}},
    ),
    "ist_hospitals": Problem(
        "federated", "ist.csv", "country", f"{IST} + (1 | silo/hospital)", {"family": "bernoulli"}
    ),
    "ist_line": Problem(
        "federated",
        "ist.csv",
        "country",
        "dead_14_days ~ aspirin * heparin + s(age) + (1 + scale(age) | silo/hospital)",
        {"family": "bernoulli"},
    ),
    "opt_bmi": Problem(
        "federated",
        "opt.csv",
        "Clinic",
        "Birthweight ~ Group + scale(Age) + scale(BMI) + Hypertension",
        {"impute": {"BMI": "scale(Age)"}},
    ),
    "sleepstudy": Problem(
        "mixed_models",
        "sleepstudy.csv",
        "six",
        "Reaction ~ Days + (1 + Days | Subject)",
        {},
    ),
}

SHOWN = (
    "{problem:<18} {silos:3} {rows:6} {coded:5.1f} {seconds:7.1f} {rounds:6} {kb:8.1f} "
    "{verdict:<9} {off:.3f} ± {se:.3f} {low:.3f} {high:.3f} {nuts_seconds:7.1f} {rhat:.3f}"
)


def tables(problem: Problem, folder: Path) -> dict[str, str]:
    """Write one CSV file a silo, and return their paths."""
    table = pd.read_csv(path(problem.folder, problem.file, "its README", "rows of patients"))
    if problem.by == "six":
        table["six"] = table["Subject"].rank(method="dense").astype(int) % 6
    paths = {}
    for name, part in table.groupby(problem.by):
        paths[str(name)] = str(folder / f"{name}.csv")
        part.drop(columns=problem.by).to_csv(paths[str(name)], index=False)
    return paths


def row(name: str, num_draws: int) -> dict[str, Any]:
    """Return the numbers of a problem."""
    problem = PROBLEMS[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        paths = tables(problem, Path(folder))
        start = time.perf_counter()
        m = fed.glmm(problem.formula, paths, **problem.options)
        coded = time.perf_counter() - start
        start = time.perf_counter()
        idata = m.fit(jax.random.key(0), progress_bar=False)
        took = time.perf_counter() - start
    attrs = idata.posterior.attrs
    print(f"{name}: {attrs['report']}", flush=True)
    start = time.perf_counter()
    chains: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    nuts_kernel = NUTS(m.model, target_accept_prob=0.9)
    mcmc = MCMC(nuts_kernel, num_warmup=1000, num_samples=num_draws, **chains)
    mcmc.run(jax.random.key(1), **m.silos.pooled)
    nuts = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    nuts_seconds = time.perf_counter() - start
    found = errors(nuts["slopes"], idata.posterior["slopes"].to_numpy())
    off, se, ratio = found["off"], found["se"], found["ratio"]
    worst = int(off.argmax())
    rhat = float(az.rhat(az.convert_to_dataset({"x": nuts["slopes"]}))["x"].max())
    return {
        "problem": name,
        "formula": problem.formula,
        "silos": len(m.silos),
        "rows": len(m.silos.pooled["y"]),
        "coded": coded,
        "seconds": took,
        "rounds": max(json.loads(attrs["rounds"])),
        "kb": max(json.loads(attrs["bytes_up"])) / 1000,
        "verdict": attrs["verdict"],
        "off": float(off[worst]),
        "se": float(se[worst]),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
        "nuts_seconds": nuts_seconds,
        "rhat": rhat,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    args = parser.parse_args()
    print(f"{jax.default_backend()}; JAX {jax.__version__}", flush=True)
    start, found = time.time(), []
    for name in args.problems or PROBLEMS:
        found.append(row(name, args.draws))
        print(SHOWN.format(**found[-1]), flush=True)
    if args.record:
        record("formulas", found, start)


if __name__ == "__main__":
    main()
