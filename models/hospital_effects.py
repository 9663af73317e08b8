"""Six-cities data with cities: children's own intercepts in silos with an intercept of their own.

The wheeze of ``six_cities`` is split into ten silos of 20 to 117 of its 537 children. A silo is one
element of the plate of cities, with a latent. It is also many elements of the plate of children,
each with a latent. These two local plates have very different sizes, and children point to their
city. The published order (not smoking first) makes the silos differ in smoking. The cities are made
up (all children lived in Steubenville), so that the spread between them should come out small.

Reference: Fitzmaurice & Laird (1993), Biometrika 80, 141-151 (the data).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from six_cities import AGE, TEN, data

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return ten cities of 20 to 117 children."""
    y, smoke = data()
    city = np.repeat(np.arange(len(TEN)), TEN)
    return fed.split(
        {"y": y, "smoke": smoke, "city": city, "cities": np.arange(len(TEN))},
        by=city,
        rows={"y": "children", "smoke": "children", "city": "children", "cities": "cities"},
        index={"city": "cities"},
    )


def model(y, smoke, city, cities):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    age = numpyro.sample("age", dist.Normal(0, 2.5))
    smoking = numpyro.sample("smoke", dist.Normal(0, 2.5))
    sigma_child = numpyro.sample("sigma_child", dist.Exponential(1.0))
    sigma_city = numpyro.sample("sigma_city", dist.Exponential(1.0))
    # both are non-centered
    with fed.silo_plate("cities", cities.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
    level = intercept + smoking * smoke + sigma_city * u[city]
    with fed.silo_plate("children", y.shape[0], dim=-2):
        z = numpyro.sample("z", dist.Normal(0, 1))
        logits = level[:, None] + age * AGE + sigma_child * z
        with numpyro.plate("visits", len(AGE), dim=-1):
            numpyro.sample("wheeze", dist.Bernoulli(logits=logits), obs=y)


if __name__ == "__main__":
    main("Six cities, cities", model, silos, "hospital_effects", target_accept_prob=0.95)
