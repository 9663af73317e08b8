"""Infections at the catheters of 38 kidney patients: Cox's model with strata and frailties.

A patient has two times, to an infection or to the catheter's removal. Patients of one disease are a
stratum with a hazard of its own, of any shape, and a silo. A patient multiplies the hazard by
exp(sigma z), a log-normal frailty. Patients of a silo are compared with each other, so that
``row_wise=False``, and their frailties depend on each other.

References: McGilchrist & Aisbett (1991), Biometrics 47, 461-466 (the data, R's ``kidney``); Ripatti
& Palmgren (2000), Biometrics 56, 1016-1022 (frailty in the partial likelihood).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table, standard, with_units

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return a silo for each of four diseases."""
    table = r_table("survival", "kidney")
    columns = {
        "x": np.stack([standard(table["age"]), table["sex"] - 1.5], 1),  # age, female
        "time": table["time"].astype(float),
        "infected": table["status"],
        "disease": np.unique(table["disease"], return_inverse=True)[1],
    }
    return with_units(columns, table["id"], table["disease"])


def model(x, time, infected, disease, unit, units):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
    eta = x @ beta + sigma * z[unit]
    log_risk = fed.log_risk(eta, time, disease)
    with fed.silo_plate("rows", time.shape[0], row_wise=False):
        numpyro.factor("partial_likelihood", infected * (eta - log_risk))


if __name__ == "__main__":
    main("Kidney, strata", model, silos, "kidney_strata", by_fit=True, target_accept_prob=0.9)
