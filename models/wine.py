"""Bitterness of wine, in five grades by nine judges: ordinal outcomes of few raters.

Judges live in three silos of three. Each shifts the scale by an effect of its own, which eight
ratings inform. The thresholds of the grades are global.

References: Randall (1989), Biometrical Journal 31, 781-793 (the data, ordinal's ``wine``).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table, with_units

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return three silos of three judges; x is warm, and contact of juice and skins."""
    table = r_table("ordinal", "wine")
    x = np.stack([table["temp"] == "warm", table["contact"] == "yes"], 1).astype(float)
    return with_units({"x": x, "y": table["rating"] - 1}, table["judge"], 3)


def model(x, y, unit, units):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    free = dist.Normal(0, 3).expand([4]).to_event(1)
    increasing = dist.transforms.OrderedTransform()
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(free, increasing))
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with fed.silo_plate("rows", x.shape[0]):
        eta = x @ beta + sigma * z[unit]
        numpyro.sample("y", dist.OrderedLogistic(eta, cuts), obs=y)


if __name__ == "__main__":
    main("Wine", model, silos, "wine", by_fit=True)
