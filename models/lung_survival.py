"""Survival of 226 patients with advanced lung cancer; 18 institutions are silos with frailties.

The model is Weibull proportional hazards with right censoring. An institution multiplies the hazard
by exp(tau z), a log-normal frailty of its own. Two patients are left out: one has no institution,
one no performance score. The institutions have 2 to 36 patients, and the frailty's spread may be
zero.

References: Loprinzi et al. (1994), J. Clin. Oncol. 12, 601-607 (the data); Therneau & Grambsch
(2000), Modeling Survival Data, chapter 9 (frailty).
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _beside_nuts import main
from _data import path
from jax import Array
from numpyro.distributions import constraints

import numpyro_fed as fed


class CensoredWeibull(dist.Distribution):
    """Time to death, log hazard ``log k + (k - 1) log t + eta``.

    Where ``died`` is 0, death is only known to be later.
    """

    arg_constraints: ClassVar = {
        "concentration": constraints.positive,
        "eta": constraints.real,
        "died": constraints.boolean,
    }
    support = constraints.positive

    def __init__(self, concentration: Array, eta: Array, died: Array) -> None:
        self.concentration, self.eta, self.died = concentration, eta, died
        super().__init__(
            jnp.broadcast_shapes(jnp.shape(concentration), jnp.shape(eta), jnp.shape(died))
        )

    def log_prob(self, value: Array) -> Array:
        log_hazard = (
            jnp.log(self.concentration) + (self.concentration - 1) * jnp.log(value) + self.eta
        )
        return self.died * log_hazard - jnp.exp(self.concentration * jnp.log(value) + self.eta)


def data() -> pd.DataFrame:
    """Return complete patients.

    Columns are inst, years, died (1 or 0), and the covariates, centered by round numbers.
    """
    table = pd.read_csv(
        path(
            "mixed_models",
            "survival_lung.csv",
            "R's package survival (write.csv of lung)",
            "228 rows",
        )
    ).dropna(subset=["inst", "age", "sex", "ph.ecog"])
    return pd.DataFrame(
        {
            "inst": table["inst"].astype(int),
            "years": table["time"] / 365.25,
            "died": table["status"] - 1,
            "age": (table["age"] - 62) / 9,
            "female": table["sex"] - 1.5,
            "ecog": table["ph.ecog"] - 1,
        }
    )


def silos() -> fed.Silos:
    """Return one silo per institution."""
    table = data()
    institutions, number = np.unique(table["inst"], return_inverse=True)
    return fed.split(
        {
            "x": table[["age", "female", "ecog"]].to_numpy(np.float32),
            "years": table["years"].to_numpy(np.float32),
            "died": table["died"].to_numpy(np.float32),
            "institution": number,
            "institutions": institutions,
        },
        by=number,
        rows={
            "x": "patients",
            "years": "patients",
            "died": "patients",
            "institution": "patients",
            "institutions": "institutions",
        },
        index={"institution": "institutions"},
    )


def model(x, years, died, institution, institutions):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    # coefficients of age, female, ecog
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with fed.silo_plate("institutions", institutions.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))  # non-centered
    with fed.silo_plate("patients", x.shape[0]):
        eta = intercept + x @ beta + tau * z[institution]
        numpyro.sample("years", CensoredWeibull(shape, eta, died), obs=years)


if __name__ == "__main__":
    main("Lung cancer", model, silos, "lung_survival", target_accept_prob=0.95)
