"""Models whose terms read across the rows of a silo, which the check refuses; one that does not."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as fed


def standardized(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=(y - y.mean()) / y.std())


def counted(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, y.shape[0] ** 0.5), obs=y)


def summed(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.factor("y", dist.Normal(mu, 1).log_prob(y).sum())


def broadcast(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + 0.1 * y, 1), obs=y[:, None])


def lagged(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + 0.5 * jnp.roll(y, 1), 1), obs=y)


def right(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


WRONG = [standardized, counted, summed, broadcast, lagged]
SERIES = fed.Silos(
    {
        n: {"y": np.random.default_rng(i).normal(size=7 + 4 * i)}
        for i, n in enumerate(("a", "b", "c"))
    }
)
# standardized rows have the same sums of squares in silos and pooled, but for padding
REFUSED = (
    r"factorization check: log p\(theta\) \+ sum of.*"
    r"(must not combine rows of different silos|row_wise=False)"
)
