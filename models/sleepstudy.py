"""Sleep deprivation: reaction times of 18 subjects over ten days, six silos of three subjects.

A subject's reaction time starts from an intercept, and grows with each day of three hours in bed.
Intercept and slope of a subject are drawn from a bivariate normal with an LKJ prior on its
correlation. Units are 100 ms. Maximum likelihood (lme4) gives 2.514 and 0.1047 for the mean
intercept and slope, sds of 0.238 and 0.0572, a correlation of 0.08, and a residual sd of 0.256.

Ten days inform each subject well, so that the centered form is the better conditioned one.

References: Belenky et al. (2003), Journal of Sleep Research 12, 1-12 (the data); Bates et al.
(2015), Fitting linear mixed-effects models using lme4, J. Stat. Softw. 67 (this model).
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _beside_nuts import main
from _data import path

import numpyro_fed as fed

PER_SILO = 3
DAYS = np.arange(10.0, dtype=np.float32)


def data() -> np.ndarray:
    """Return reaction times of each subject on days 0 to 9, in 100 ms, shape (18, 10)."""
    table = pd.read_csv(
        path(
            "mixed_models",
            "sleepstudy.csv",
            "R's package lme4 (write.csv of sleepstudy)",
            "180 rows",
        )
    )
    return (
        table.pivot(index="Subject", columns="Days", values="Reaction").to_numpy() / 100
    ).astype(np.float32)


def silos() -> fed.Silos:
    """Return six silos of three subjects, in the published order."""
    y = data()
    return fed.split({"y": y}, by=np.arange(len(y)) // PER_SILO)


def model(y):  # type: ignore[no-untyped-def]
    mean = numpyro.sample(
        "mean", dist.Normal(jnp.array([2.5, 0.0]), jnp.array([1.0, 0.5])).to_event(1)
    )
    tau = numpyro.sample("tau", dist.HalfNormal(jnp.array([0.5, 0.2])).to_event(1))
    root = numpyro.sample("correlation_cholesky", dist.LKJCholesky(2, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))
    with fed.silo_plate("subjects", y.shape[0], dim=-2):
        # centered: intercept and slope of each subject
        coefficients = numpyro.sample(
            "coefficients", dist.MultivariateNormal(mean, scale_tril=tau[:, None] * root)
        )
        with numpyro.plate("days", len(DAYS), dim=-1):
            means = coefficients[..., 0] + coefficients[..., 1] * DAYS
            numpyro.sample("y", dist.Normal(means, sigma), obs=y)


if __name__ == "__main__":
    main("Sleep study", model, silos, "sleepstudy", target_accept_prob=0.95)
