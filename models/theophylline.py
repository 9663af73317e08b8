"""Theophylline in the blood of twelve subjects, one compartment, three effects a subject.

A subject takes a dose by mouth, which is absorbed, distributed, and cleared. Each has a rate of
elimination, a rate of absorption and a clearance of its own, all as logs. Absorption is faster than
elimination: with the rates exchanged the curve is the same. Four silos have three subjects each.

References: Boeckmann, Sheiner & Beal (1994), NONMEM users guide, part V (the data, R's ``Theoph``);
Pinheiro & Bates (2000), Mixed-Effects Models in S and S-PLUS, section 8.2.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table, with_units

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return four silos of three subjects: hours, dose and concentration in mg/kg and mg/l."""
    table = r_table("datasets", "Theoph")
    columns = {"time": table["Time"], "dose": table["Dose"], "y": table["conc"]}
    return with_units(columns, table["Subject"], 4)


def model(time, dose, y, unit, units):  # type: ignore[no-untyped-def]
    # logs of elimination, of how much faster absorption is, of clearance
    mean = numpyro.sample("mean", dist.Normal(jnp.array([-2.5, 0.5, -3.2]), 1.0).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5).expand([3]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with fed.silo_plate("units", units.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
    elimination, gap, clearance = jnp.exp(mean + tau * z)[unit].T
    rise = jnp.exp(-elimination * time) - jnp.exp(-(elimination + gap) * time)
    with fed.silo_plate("rows", y.shape[0]):
        level = dose * elimination * (elimination + gap) / (clearance * gap) * rise
        numpyro.sample("y", dist.Normal(level, noise), obs=y)


if __name__ == "__main__":
    main("Theophylline", model, silos, "theophylline", by_fit=True, target_accept_prob=0.9)
