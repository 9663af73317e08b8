"""Horseshoe regression among noise: concrete's strength on 8 ingredients and 8 noise columns.

The model is linear regression with a regularized horseshoe. Each coefficient is a normal with a
half-Cauchy scale of its own, times one common half-Cauchy scale, and a slab limits large
coefficients. There are 35 global parameters with heavy tails, with funnels between scales and
coefficients, and no local latents. The coefficients are non-centered. Five silos are cut at ranks
of the age, one of the strongest covariates, so that no silo sees its effect well.

References: Yeh (1998), Cement and Concrete Research 28, 1797-1808 (the data); Carvalho, Polson &
Scott (2010), Biometrika 97, 465-480 (the horseshoe); Piironen & Vehtari (2017), Electronic Journal
of Statistics 11, 5018-5051 (regularized).
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _beside_nuts import main
from _data import path

import numpyro_fed as fed

NUM_SILOS = 5
NUM_NOISE = 8


def data() -> tuple[pd.DataFrame, np.ndarray]:
    """Return covariates (1030, 16), the last eight of them noise, and strength (1030,).

    All are standardized over all rows.
    """
    table = pd.read_csv(
        path(
            "uci_regression",
            "concrete.csv",
            "the UCI repository, data set 165",
            "1,030 rows of 8 covariates and y",
        )
    )
    strength = table.pop("strength_mpa")
    table["age"] = np.log(table["age"])
    noise = np.random.default_rng(0).normal(size=(len(table), NUM_NOISE))
    for i in range(NUM_NOISE):
        table[f"noise_{i}"] = noise[:, i]
    x = (table - table.mean()) / table.std()
    return x.astype(np.float32), ((strength - strength.mean()) / strength.std()).to_numpy(
        np.float32
    )


def silos() -> fed.Silos:
    """Return five silos of 206 mixtures, sorted by age."""
    x, y = data()
    rank = np.argsort(np.argsort(x["age"].to_numpy(), kind="stable"))
    return fed.split({"x": x.to_numpy(), "y": y}, by=rank * NUM_SILOS // len(rank))


def model(x, y):  # type: ignore[no-untyped-def]
    d = x.shape[-1]
    z = numpyro.sample("z", dist.Normal(0, 1).expand([d]).to_event(1))
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([d]).to_event(1))
    common = numpyro.sample("common", dist.HalfCauchy(0.1))
    slab = numpyro.sample("slab", dist.InverseGamma(2, 2))  # variance of the slab
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    scale = common * local * jnp.sqrt(slab / (slab + (common * local) ** 2))
    beta = numpyro.deterministic("beta", scale * z)
    with fed.silo_plate("mixtures", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


if __name__ == "__main__":
    main(
        "Horseshoe",
        model,
        silos,
        "horseshoe",
        var_names=["beta", "common", "sigma"],
        target_accept_prob=0.99,
    )
