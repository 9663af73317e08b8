"""Growth in mathematics of 1,721 children in 60 schools: three levels, ten silos of six schools.

Each row is a score in one year. A child has an intercept of its own; a school has an intercept and
a slope of its own. So elements of one silo plate (children) lie within those of another (schools).

References: Raudenbush & Bryk (2002), Hierarchical Linear Models, chapter 8 (its model has slopes of
children, too; data of the US Sustaining Effects Study, mlmRev's ``egsingle``).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table

import numpyro_fed as fed

NUM_SILOS = 10


def silos() -> fed.Silos:
    """Return ten silos of six schools."""
    table = r_table("mlmRev", "egsingle")
    schools, school = np.unique(table["schoolid"], return_inverse=True)
    _, first, child = np.unique(table["childid"], return_index=True, return_inverse=True)
    return fed.split(
        {
            "math": table["math"].to_numpy(np.float32),
            "year": table["year"].to_numpy(np.float32),
            "child": child,
            "school": school[first],  # of each child
            "schools": np.arange(len(schools)),
        },
        by=school * NUM_SILOS // len(schools),
        rows={
            "math": "scores",
            "year": "scores",
            "child": "scores",
            "school": "children",
            "schools": "schools",
        },
        index={"child": "children", "school": "schools"},
    )


def model(math, year, child, school, schools):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    sigma_child = numpyro.sample("sigma_child", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with fed.silo_plate("schools", schools.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
    own = beta + tau * u
    with fed.silo_plate("children", school.shape[0]):
        v = numpyro.sample("v", dist.Normal(0, 1))
    means = own[school, 0] + sigma_child * v
    with fed.silo_plate("scores", math.shape[0]):
        slope = own[school, 1][child]
        numpyro.sample("math", dist.Normal(means[child] + slope * year, noise), obs=math)


if __name__ == "__main__":
    main("Growth in schools", model, silos, "school_growth", by_fit=True)
