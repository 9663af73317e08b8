"""Reading bands of 4,059 pupils at the intake of 65 schools: ordered logistic regression.

The model regresses the band (bottom 25 %, mid 50 %, top 25 %) on the score at 11, with an intercept
of each school. The two cut points are global and ordered, and replace an intercept. There are eight
silos of schools.

References: Goldstein et al. (1993), Oxford Review of Education 19, 425-433 (the data); McCullagh
(1980), Regression models for ordinal data, JRSS B 42, 109-142.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from exam import NUM_SILOS, data, school_numbers
from numpyro.distributions.transforms import OrderedTransform

import numpyro_fed as fed

BANDS = ["bottom 25%", "mid 50%", "top 25%"]


def silos() -> fed.Silos:
    """Return silos of neighboring school numbers."""
    table = data()
    school = school_numbers(table)
    schools = np.arange(school.max() + 1)
    return fed.split(
        {
            "band": table["intake"].map(BANDS.index).to_numpy(),
            "before": table["standLRT"].to_numpy(np.float32),
            "school": school,
            "schools": schools,
        },
        by=school * NUM_SILOS // len(schools),
        rows={"band": "pupils", "before": "pupils", "school": "pupils", "schools": "schools"},
        index={"school": "schools"},
    )


def model(band, before, school, schools):  # type: ignore[no-untyped-def]
    # normal priors: the lower cut, and the log of the distance to the upper cut
    cuts = numpyro.sample(
        "cuts",
        dist.TransformedDistribution(dist.Normal(0, 2).expand([2]).to_event(1), OrderedTransform()),
    )
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with fed.silo_plate("schools", schools.shape[0]):
        # centered, since 60 pupils inform their school well
        own = numpyro.sample("own", dist.Normal(0, tau))
    with fed.silo_plate("pupils", band.shape[0]):
        numpyro.sample("band", dist.OrderedLogistic(slope * before + own[school], cuts), obs=band)


if __name__ == "__main__":
    main("Intake, ordered", model, silos, "ordinal_intake")
