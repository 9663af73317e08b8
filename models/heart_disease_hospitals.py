"""Heart disease in four hospitals, each with its own intercept and age slope.

The patients are those of ``heart_disease``, in a model that lets hospitals differ: hospital h has
an intercept and a slope of age around common ones. A silo is one element of the plate of hospitals,
whose latent is a vector. It is also many elements of the plate of patients, which point to the
hospital. Four hospitals inform the spread between them little, so its prior matters, and its
posterior has a long right tail.

References: Detrano et al. (1989), American Journal of Cardiology 64, 304-310 (the data); Gelman
(2006), Bayesian Analysis 1, 515-533 (priors of such spreads).
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from heart_disease import data

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return the four hospitals.

    The hospital's own intercept replaces a silo's, so age is one column of x, too.
    """
    x, disease, hospital = data()
    names, number = np.unique(hospital, return_inverse=True)
    return fed.split(
        {
            "x": x.to_numpy(),
            "age": x["age"].to_numpy(),
            "y": disease,
            "hospital": number,
            "hospitals": np.arange(len(names)),
        },
        by=hospital,
        rows={
            "x": "patients",
            "age": "patients",
            "y": "patients",
            "hospital": "patients",
            "hospitals": "hospitals",
        },
        index={"hospital": "hospitals"},
    )


def model(x, age, y, hospital, hospitals):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([x.shape[-1]]).to_event(1))
    # sds of the intercepts and of the slopes
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    with fed.silo_plate("hospitals", hospitals.shape[0]):
        # non-centered: hospital h has the intercept  intercept + tau[0] z[h, 0]  and the age slope
        # beta[age] + tau[1] z[h, 1]
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    own = tau * z
    with fed.silo_plate("patients", x.shape[0]):
        logits = intercept + x @ beta + own[hospital, 0] + own[hospital, 1] * age
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


if __name__ == "__main__":
    main(
        "Heart disease, hospitals", model, silos, "heart_disease_hospitals", target_accept_prob=0.95
    )
