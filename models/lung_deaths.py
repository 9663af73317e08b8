"""Monthly deaths from lung diseases in the UK, 1974 to 1979: a state-space model in each silo.

Men's and women's deaths are two silos. Each has a level of its own, a random walk over 72 months,
and both share the yearly wave. The months of a silo depend on each other through the walk.

References: Diggle (1990), Time Series: A Biostatistical Introduction, table A.3 (the data, R's
``mdeaths`` and ``fdeaths``); Durbin & Koopman (2012), Time Series Analysis by State Space Methods.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table, standard

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return the silos of men and women: standardized logs of deaths, and the time of year."""
    out = {}
    for number, name in enumerate(("mdeaths", "fdeaths")):
        table = r_table("datasets", name)
        angle = 2 * np.pi * table["time"].to_numpy()
        out[name] = {
            "y": standard(np.log(table["value"])),
            "season": np.stack([np.sin(angle), np.cos(angle)], 1),
            "month": np.arange(len(angle)),
            "series": np.full(len(angle), number),
        }
    return fed.Silos(out)


def model(y, season, month, series):  # type: ignore[no-untyped-def]
    wave = numpyro.sample("wave", dist.Normal(0, 1).expand([2]).to_event(1))
    drift = numpyro.sample("drift", dist.HalfNormal(0.3))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    before = (month[:, None] >= month) & (series[:, None] == series)
    with fed.silo_plate("months", y.shape[0]):
        step = numpyro.sample("step", dist.Normal(0, 1))
        level = drift * (before @ step)
        numpyro.sample("y", dist.Normal(level + season @ wave, noise), obs=y)


if __name__ == "__main__":
    main("Lung deaths", model, silos, "lung_deaths", by_fit=True, target_accept_prob=0.9)
