"""Test scores of 434 children at age three or four, on their mother's schooling and IQ.

The model is linear regression without local latents, as in posteriordb (kidiq-kidscore_momhsiq), so
that its reference draws apply. The coefficients have flat priors, and the residual sd is
half-Cauchy(2.5). The model is written in coefficients around a center, an affine map of Jacobian
one. ``beta`` is computed from them: the intercept at an IQ of zero is correlated with the slope at
-0.95. Six silos are cut at ranks of the mother's IQ, so that no silo sees the slope well.

References: Gelman & Hill (2006), Data Analysis Using Regression, chapter 3 (the data and the
model); Magnusson et al. (2024), posteriordb (the reference draws).
"""

import json

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _data import path
from numpyro.distributions import constraints

import numpyro_fed as fed

NUM_SILOS = 6
IQ = 100.0


def data() -> dict[str, np.ndarray]:
    """Return score of the child, and schooling (0/1) and IQ of the mother, each of shape (434,)."""
    place = path(
        "posteriordb",
        "kidiq-kidscore_momhsiq.data.json",
        "posteriordb (data set kidiq)",
        "434 children",
    )
    loaded = json.loads(place.read_text())
    return {name: np.array(loaded[name], np.float32) for name in ("kid_score", "mom_hs", "mom_iq")}


def reference_draws() -> dict[str, np.ndarray]:
    """Return posteriordb's draws, (10, 1000) or (10, 1000, 3), by the names of this model."""
    draws = np.load(
        path(
            "posteriordb",
            "kidiq-kidscore_momhsiq.draws.npz",
            "posteriordb",
            "10 chains of 1,000 draws",
        )
    )
    return {"beta": draws["draws"][..., :3], "sigma": draws["draws"][..., 3]}


def silos() -> fed.Silos:
    """Return six silos of 72 or 73 children, sorted by the mother's IQ."""
    children = data()
    rank = np.argsort(np.argsort(children["mom_iq"], kind="stable"))
    return fed.split(children, by=rank * NUM_SILOS // len(rank))


def model(kid_score, mom_hs, mom_iq):  # type: ignore[no-untyped-def]
    centered = numpyro.sample("centered", dist.ImproperUniform(constraints.real_vector, (), (3,)))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    numpyro.deterministic("beta", centered - jnp.array([IQ, 0.0, 0.0]) * centered[..., 2:])
    with fed.silo_plate("children", kid_score.shape[0]):
        means = centered[0] + centered[1] * mom_hs + centered[2] * (mom_iq - IQ)
        numpyro.sample("kid_score", dist.Normal(means, sigma), obs=kid_score)


if __name__ == "__main__":
    main("Kid IQ", model, silos, "kidiq", var_names=["beta", "sigma"])
