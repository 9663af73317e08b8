"""Weights of sixteen rats on three diets, over nine weeks: a Gaussian process in each silo.

A rat is a silo of eleven weighings. It grows along its diet's line, at a level of its own, with
smooth deviations: a Gaussian process with exponential covariance. Rows of a silo depend on each
other. Each row's term is its law given the rows before it.

References: Crowder & Hand (1990), Analysis of Repeated Measures (the data, nlme's ``BodyWeight``);
Pinheiro & Bates (2000), Mixed-Effects Models in S and S-PLUS, section 5.3.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return a silo for each rat: weeks, diet (0 to 2) and weight in 100 g."""
    table = r_table("nlme", "BodyWeight")
    columns = {
        "rat": table["Rat"].to_numpy(),
        "week": table["Time"].to_numpy(float) / 7,
        "diet": table["Diet"].to_numpy() - 1,
        "weight": table["weight"].to_numpy(float) / 100,
    }
    return fed.split(columns, by=table["Rat"].to_numpy())


def model(rat, week, diet, weight):  # type: ignore[no-untyped-def]
    start = numpyro.sample("start", dist.Normal(4, 2).expand([3]).to_event(1))
    growth = numpyro.sample("growth", dist.Normal(0, 0.2).expand([3]).to_event(1))  # a week
    level = numpyro.sample("level", dist.HalfNormal(1))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    length = numpyro.sample("length", dist.LogNormal(jnp.log(2), 1))  # weeks
    noise = numpyro.sample("noise", dist.HalfNormal(0.1))
    near = level**2 + spread**2 * jnp.exp(-jnp.abs(week - week[:, None]) / length)
    near = near * (rat == rat[:, None])
    root = jnp.linalg.cholesky(near + noise**2 * jnp.eye(len(week)))
    means = start[diet] + growth[diet] * week
    ahead = jax.scipy.linalg.solve_triangular(root, weight - means, lower=True)
    terms = dist.Normal(0, 1).log_prob(ahead) - jnp.log(jnp.diagonal(root))
    with fed.silo_plate("weighings", week.shape[0], row_wise=False):
        numpyro.factor("weight", terms)


if __name__ == "__main__":
    main("Body weight", model, silos, "body_weight", by_fit=True, target_accept_prob=0.9)
