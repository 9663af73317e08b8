"""Counts of birds at 235 sites in nine years, ten silos of sites: Poisson, or negative binomial.

The log of the expected count is a mean, plus an effect of the year, plus an effect of the site. All
silos share the nine effects of years, which sum to zero. The effect of a site is local. Sites are
the silo plate's coarser elements, and counts point to them. 43 of 2,115 counts are missing and left
out. The negative binomial adds variance that sites do not explain.

References: Kery & Schaub (2012), Bayesian Population Analysis using WinBUGS, section 4.2 (coal tits
in Switzerland: data and model); Magnusson et al. (2024), posteriordb (data set GLMM_data).
"""

import json

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _data import path
from jax import Array

import numpyro_fed as fed

NUM_SILOS = 10
NUM_YEARS = 9


def data() -> dict[str, np.ndarray]:
    """Return count, site (0 to 234) and year (0 to 8) of each of 2,072 visits."""
    loaded = json.loads(
        path(
            "posteriordb/data_only", "GLMM_data.json", "posteriordb (GLMM_data)", "2,072 counts"
        ).read_text()
    )
    return {
        "count": np.array(loaded["obs"]),
        "site": np.array(loaded["obssite"]) - 1,
        "year": np.array(loaded["obsyear"]) - 1,
    }


def silos() -> fed.Silos:
    """Return ten silos of 23 or 24 neighboring site numbers."""
    visits = data()
    sites = np.arange(visits["site"].max() + 1)
    return fed.split(
        {**visits, "sites": sites},
        by=visits["site"] * NUM_SILOS // len(sites),
        rows={"count": "visits", "site": "visits", "year": "visits", "sites": "sites"},
        index={"site": "sites"},
    )


def log_rate(site: Array, year: Array, sites: Array) -> Array:
    """Return the log of the expected count at each visit."""
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    sigma_year = numpyro.sample("sigma_year", dist.HalfNormal(0.5))
    # a sum of zero keeps the years apart from the mean
    effect = numpyro.sample("year_effect", dist.ZeroSumNormal(sigma_year, event_shape=(NUM_YEARS,)))
    sigma_site = numpyro.sample("sigma_site", dist.HalfNormal(2))
    with fed.silo_plate("sites", sites.shape[0]):
        # centered, since nine years inform a site well
        level = numpyro.sample("level", dist.Normal(mean, sigma_site))
    return level[site] + effect[year]


def model(count, site, year, sites):  # type: ignore[no-untyped-def]
    eta = log_rate(site, year, sites)
    with fed.silo_plate("visits", count.shape[0]):
        numpyro.sample("count", dist.Poisson(rate=jnp.exp(eta)), obs=count)


def model_negative_binomial(count, site, year, sites):  # type: ignore[no-untyped-def]
    eta = log_rate(site, year, sites)
    # the variance is rate + rate^2 / concentration
    concentration = numpyro.sample("concentration", dist.LogNormal(2, 1))
    with fed.silo_plate("visits", count.shape[0]):
        numpyro.sample("count", dist.NegativeBinomial2(jnp.exp(eta), concentration), obs=count)


if __name__ == "__main__":
    main("Bird counts", model, silos, "bird_counts")
