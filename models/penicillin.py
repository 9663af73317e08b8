"""Penicillin: how far six samples kill bacteria on 24 plates. Plates and samples are crossed.

Plates live in six silos of four. Each sample was tried on each plate, so that samples cross the
silos, and their effects are a global vector.

References: Davies & Goldsmith (1972), Statistical Methods in Research and Production (the data,
lme4's ``Penicillin``); Bates et al. (2015), J. Stat. Softw. 67(1).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table, standard, with_units

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return six silos of four plates: sample and standardized diameter."""
    table = r_table("lme4", "Penicillin")
    sample = np.unique(table["sample"], return_inverse=True)[1]
    return with_units({"sample": sample, "y": standard(table["diameter"])}, table["plate"], 6)


def model(sample, y, unit, units):  # type: ignore[no-untyped-def]
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(1))  # of samples
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))  # of plates
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([6]).to_event(1))
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        means = mean + tau * effect[sample] + sigma * z[unit]
        numpyro.sample("y", dist.Normal(means, noise), obs=y)


if __name__ == "__main__":
    main("Penicillin", model, silos, "penicillin", by_fit=True, target_accept_prob=0.9)
