"""Immunization in Guatemala: 2,159 children in 1,595 families in 161 communities.

The model is logistic regression of complete immunization, with a random intercept for each family
and for each community. There are two local latents, one nested in the other: families point to
their community, and children to their family. No family is in two communities. Eight silos are
groups of neighboring community numbers, with about as many children each.

References: Pebley, Goldman & Rodriguez (1996), Prenatal and delivery care and childhood
immunization in Guatemala, Demography 33, 231-247 (the data); Rodriguez & Goldman (2001), JRSS A
164, 339-355 (this model).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _beside_nuts import main
from _data import path

import numpyro_fed as fed

# The levels at which each dummy is one; the first level of each factor is left out.
DUMMIES = {
    "kid2p": "Y",
    "mom25p": "Y",
    "ord": ("23", "46", "7p"),
    "ethn": ("N", "S"),
    "momEd": ("P", "S"),
    "husEd": ("P", "S", "U"),
    "momWork": "Y",
    "rural": "Y",
}
NUM_SILOS = 8


def data() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the table as published, and the covariates (2159, 15).

    They are dummies about 0, and the share of indigenous people, -1 to 1.
    """
    table = pd.read_csv(
        path(
            "mixed_models", "guImmun.csv", "R's package mlmRev (write.csv of guImmun)", "2,159 rows"
        ),
        dtype={"ord": str},
    )
    columns = {
        f"{name}_{level}": table[name] == level
        for name, levels in DUMMIES.items()
        for level in levels
    }
    # centered by round numbers near the shares, fixed in advance
    x = pd.DataFrame({name: column - round(column.mean(), 1) for name, column in columns.items()})
    x["pcInd81"] = 2 * (table["pcInd81"] - 0.5)
    return table, x.astype(np.float32)


def silos() -> fed.Silos:
    """Return eight silos of communities, with about as many children each."""
    table, x = data()
    communities, community = np.unique(table["comm"], return_inverse=True)
    _, first, family = np.unique(table["mom"], return_index=True, return_inverse=True)
    before = np.searchsorted(np.sort(community), np.arange(len(communities)))
    silo = before * NUM_SILOS // len(table)
    return fed.split(
        {
            "x": x.to_numpy(),
            "y": (table["immun"] == "Y").to_numpy(np.float32),
            "family": family,
            "community": community[first],
            "communities": communities,
        },
        by=silo[community],
        rows={
            "x": "children",
            "y": "children",
            "family": "children",
            "community": "families",
            "communities": "communities",
        },
        index={"family": "families", "community": "communities"},
    )


def model(x, y, family, community, communities):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([x.shape[-1]]).to_event(1))
    sigma_family = numpyro.sample("sigma_family", dist.HalfNormal(2))
    sigma_community = numpyro.sample("sigma_community", dist.HalfNormal(2))
    # both are non-centered
    with fed.silo_plate("communities", communities.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with fed.silo_plate("families", community.shape[0]):
        v = numpyro.sample("v", dist.Normal(0, 1))
    with fed.silo_plate("children", y.shape[0]):
        logits = (
            intercept + x @ beta + sigma_family * v[family] + sigma_community * u[community[family]]
        )
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


if __name__ == "__main__":
    main("Guatemala", model, silos, "gu_immun")
