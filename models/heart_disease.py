"""Heart disease in four hospitals: logistic regression on 740 patients of unequal silos.

The hospitals are Cleveland, Budapest, Zurich and Basel ("switzerland"), and Long Beach ("va"). The
outcome is any narrowing of the coronary arteries. Columns and patients are chosen as in FLamby's
Fed-Heart-Disease. Beware: a cholesterol of 0 means missing, as for all patients of "switzerland".

References: Detrano et al. (1989), American Journal of Cardiology 64, 304-310 (the data); Ogier du
Terrail et al. (2022), FLamby (the rule).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _data import path
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

# Round numbers near the pooled mean and sd, fixed in advance, so that no hospital has to send its
# own, and a column that is constant within a hospital does no harm.
SCALE = {
    "age": (53.0, 9.0),
    "trestbps": (133.0, 19.0),
    "chol": (220.0, 94.0),
    "thalach": (139.0, 26.0),
    "oldpeak": (0.9, 1.1),
}
KINDS = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}
MEASURED = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
UNUSED = ["slope", "ca", "thal"]
CHAINS = {"num_chains": 4, "chain_method": "vectorized"}


def data() -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Return covariates (740, 13), disease 0/1, and hospital of each patient."""
    table = pd.read_csv(
        path(
            "heart_disease",
            "heart_disease.csv",
            "the UCI repository, data set 45 (files processed.*.data of the four hospitals, put "
            "together under the header hospital,age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,"
            "oldpeak,slope,ca,thal,num with '?' left empty)",
            "920 rows: cleveland 303, hungarian 294, switzerland 123, va 200",
        )
    )
    table = table.drop(columns=UNUSED).dropna().reset_index(drop=True)
    hospital = table.pop("hospital").to_numpy(str)
    return *columns(table), hospital


def columns(table: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
    """Return covariates and disease 0/1, from complete rows of the study's table."""
    disease = (table["num"] > 0).to_numpy(np.float32)
    x = table.drop(columns="num")
    for column, (center, scale) in SCALE.items():
        x[column] = (x[column] - center) / scale
    for column, kinds in KINDS.items():  # a hospital may lack some kinds
        x[column] = pd.Categorical(x[column].astype(int), categories=kinds)
    return pd.get_dummies(x, columns=list(KINDS), drop_first=True).astype(np.float32), disease


def silo(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the model's arguments from one hospital's table with the study's columns."""
    x, disease = columns(table[[*MEASURED, "num"]].dropna().reset_index(drop=True))
    return {"x": x.to_numpy(), "y": disease}


def silos() -> fed.Silos:
    """Return the four hospitals."""
    x, disease, hospital = data()
    return fed.split({"x": x.to_numpy(), "y": disease}, by=hospital)


def model(x, y=None):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x @ beta), obs=y)


def fit(silos: fed.Silos, num_warmup: int = 200, num_samples: int = 1800) -> MCMC:
    """Run FSGLD with its defaults, every local step on all of a hospital's patients."""
    mcmc = MCMC(fed.FSGLD(model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    return mcmc


def reference(silos: fed.Silos, num_warmup: int = 500, num_samples: int = 2000) -> MCMC:
    """Run NUTS on the pooled patients."""
    mcmc = MCMC(NUTS(model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(1), **silos.pooled)
    return mcmc


def main(arguments: Sequence[str] | None = None) -> fed.Comparison:
    parser = argparse.ArgumentParser(description="Heart disease: FSGLD beside pooled NUTS.")
    parser.add_argument("--quick", action="store_true", help="few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures/heart_disease.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    hospitals = silos()
    print(hospitals)
    draws = {"num_warmup": 200, "num_samples": 300} if args.quick else {}
    # names of the covariates label beta in tables and the figure
    labels = {"coords": {"covariate": list(data()[0].columns)}, "dims": {"beta": ["covariate"]}}
    fed_idata = fed.to_inference_data(
        fit(hospitals, **draws), hospitals, log_likelihood=False, **labels
    )
    nuts_idata = az.from_numpyro(reference(hospitals, **draws), log_likelihood=False, **labels)
    comparison = fed.compare(fed_idata, nuts_idata)
    print(comparison)

    args.figure.parent.mkdir(parents=True, exist_ok=True)
    fed.plot_compare(fed_idata, nuts_idata, max_rows=14).savefig(args.figure, dpi=150)
    print(f"figure written to {args.figure}")
    return comparison


if __name__ == "__main__":
    main()
