"""Shares of three reading bands at the intake of 65 schools, a local simplex for each school.

A school's pupils fall into bands (bottom 25 %, mid 50 %, top 25 %). The school's own shares are
drawn from a Dirichlet distribution around base shares, which all schools have in common: a
Dirichlet-multinomial. Base shares are a global simplex. Both are sampled in stick-breaking
coordinates. There are eight silos of schools.

References: Goldstein et al. (1993), Oxford Review of Education 19, 425-433 (the data); Mosimann
(1962), On the compound multinomial distribution, Biometrika 49, 65-82.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from exam import NUM_SILOS, data, school_numbers

import numpyro_fed as fed

BANDS = ["bottom 25%", "mid 50%", "top 25%"]


def counts() -> np.ndarray:
    """Return the number of pupils of each school in each band, shape (65, 3)."""
    table = data()
    bands = np.zeros((65, len(BANDS)), np.float32)
    np.add.at(bands, (school_numbers(table), table["intake"].map(BANDS.index).to_numpy()), 1)
    return bands


def silos() -> fed.Silos:
    """Return silos of neighboring school numbers."""
    bands = counts()
    return fed.split({"bands": bands}, by=np.arange(len(bands)) * NUM_SILOS // len(bands))


def model(bands):  # type: ignore[no-untyped-def]
    base = numpyro.sample("base", dist.Dirichlet(jnp.ones(3)))
    concentration = numpyro.sample("concentration", dist.LogNormal(2, 1))
    with fed.silo_plate("schools", bands.shape[0]):
        shares = numpyro.sample("shares", dist.Dirichlet(concentration * base))
        numpyro.sample("bands", dist.Multinomial(bands.sum(-1).astype(int), shares), obs=bands)


if __name__ == "__main__":
    main("Intake, shares", model, silos, "intake_shares")
