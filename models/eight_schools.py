"""Eight schools: does coaching raise test scores? Each school is a silo with one number of its own.

Estimated effects of coaching in eight schools and their standard errors (Rubin 1981). The schools' own effects never leave them;
the mean effect and the spread between schools are learned by all. One row a silo, and a spread that may be zero: no silo alone
says anything about it.

References: Rubin (1981), Estimation in parallel randomized experiments, J. Educ. Stat. 6, 377-401 (the data);
Gelman et al. (2013), Bayesian Data Analysis, third edition, section 5.5.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as fed

EFFECT = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], np.float32)
ERROR = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], np.float32)
GLOBALS = ["mu", "tau"]


def silos() -> fed.Silos:
    """One silo a school, A to H."""
    return fed.split({"y": EFFECT, "error": ERROR}, by=np.array(list("ABCDEFGH")))


def model(y, error):  # type: ignore[no-untyped-def]
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with fed.silo_plate("schools", y.shape[0]):
        # non-centred: a school's effect is mu + tau * z
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * z, error), obs=y)
