"""Ozone in New York, May to September 1973: outcomes are missing on 37 of 153 days.

Months are silos, and each has a level of its own. A day without an outcome is masked, and says
nothing.

References: Chambers et al. (1983), Graphical Methods for Data Analysis (the data, R's
``airquality``).
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table, standard, with_units

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return a silo for each month: temperature, wind, log of ozone, days measured."""
    table = r_table("datasets", "airquality")
    columns = {
        "x": np.stack([standard(table["Temp"]), standard(table["Wind"])], 1),
        "log_ozone": np.log(table["Ozone"]).fillna(0.0),
        "measured": table["Ozone"].notna(),
    }
    return with_units(columns, table["Month"], table["Month"])


def model(x, log_ozone, measured, unit, units):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, jnp.array([5.0, 1.0, 1.0])).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
    means = beta[0] + x @ beta[1:] + tau * z[unit]
    with fed.silo_plate("rows", x.shape[0]), numpyro.handlers.mask(mask=measured):
        numpyro.sample("log_ozone", dist.Normal(means, noise), obs=log_ozone)


if __name__ == "__main__":
    main("Air quality", model, silos, "airquality", by_fit=True, target_accept_prob=0.95)
