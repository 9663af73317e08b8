"""Deaths from melanoma in 354 counties of 78 regions: counts with an offset, nations as silos.

A county has an expected number of deaths, by its people's ages. Sunlight (UVB) multiplies it, and
so does the region, by an effect of its own. The nine nations have 1 to 21 regions.

References: Langford, Bentham & McDonald (1998), Statistics in Medicine 17, 41-57 (the data,
mlmRev's ``Mmmec``).
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table, standard, with_units

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return a silo for each nation."""
    table = r_table("mlmRev", "Mmmec")
    columns = {
        "uvb": standard(table["uvb"]),
        "log_expected": np.log(table["expected"]),
        "deaths": table["deaths"],
    }
    return with_units(columns, table["region"], table["nation"])


def model(uvb, log_expected, deaths, unit, units):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.Normal(0, 2.5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with fed.silo_plate("rows", uvb.shape[0]):
        log_mean = log_expected + intercept + slope * uvb + sigma * z[unit]
        numpyro.sample("deaths", dist.Poisson(jnp.exp(log_mean)), obs=deaths)


if __name__ == "__main__":
    main("Melanoma", model, silos, "melanoma", by_fit=True)
