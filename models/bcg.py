"""Thirteen trials of the BCG vaccine against tuberculosis: a meta-analysis, each trial a silo.

A trial is one row, of cases among the vaccinated and the others. It has a risk and a log odds ratio
of its own.

References: Colditz et al. (1994), JAMA 271, 698-702 (the data, HSAUR's ``BCG``); Smith,
Spiegelhalter & Thomas (1995), Statistics in Medicine 14, 2685-2699 (the model).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return a silo for each trial."""
    table = r_table("HSAUR", "BCG")
    names = {"vaccinated": "BCGVacc", "control": "NoVacc", "y": "BCGTB", "y_control": "NoVaccTB"}
    columns = {name: table[column].to_numpy() for name, column in names.items()}
    return fed.split(columns, by=np.arange(len(table)))


def model(vaccinated, control, y, y_control):  # type: ignore[no-untyped-def]
    effect = numpyro.sample("effect", dist.Normal(0, 1))  # mean log odds ratio
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    risk = numpyro.sample("risk", dist.Normal(-3, 2))  # mean log odds without the vaccine
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    with fed.silo_plate("trials", y.shape[0]):
        base = numpyro.sample("base", dist.Normal(risk, spread))
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y_control", dist.Binomial(control, logits=base), obs=y_control)
        logits = base + effect + tau * z
        numpyro.sample("y", dist.Binomial(vaccinated, logits=logits), obs=y)


if __name__ == "__main__":
    main("BCG vaccine", model, silos, "bcg", by_fit=True)
