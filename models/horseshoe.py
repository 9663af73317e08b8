"""A horseshoe among noise.

Concrete's strength on eight ingredients and eight columns of noise, five silos.

Linear regression with a regularised horseshoe: each coefficient is a normal with a scale of its
own, half-Cauchy, times one common scale, half-Cauchy as well, and large ones are held by a slab. 35
global parameters with heavy tails and with funnels between scales and coefficients, no local
latents; the coefficients are non-centred. Silos are cut at ranks of the age, one of the strongest
covariates, so that no silo sees it well.

References: Yeh (1998), Cement and Concrete Research 28, 1797-1808 (the data); Carvalho, Polson &
Scott (2010), Biometrika 97, 465-480 (the horseshoe); Piironen & Vehtari (2017), Electronic Journal
of Statistics 11, 5018-5051 (regularised).
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
    """Covariates (1030, 16), the last eight of them noise, and strength (1030,), all standardised
    over all rows.
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
    """Five silos of 206 mixtures, sorted by age."""
    x, y = data()
    rank = np.argsort(np.argsort(x["age"].to_numpy(), kind="stable"))
    return fed.split({"x": x.to_numpy(), "y": y}, by=rank * NUM_SILOS // len(rank))


def model(x, y):  # type: ignore[no-untyped-def]
    d = x.shape[-1]
    z = numpyro.sample("z", dist.Normal(0, 1).expand([d]).to_event(1))
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([d]).to_event(1))
    common = numpyro.sample("common", dist.HalfCauchy(0.1))
    slab = numpyro.sample("slab", dist.InverseGamma(2, 2))  # the slab's variance
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
