"""Eight schools: does coaching raise test scores? Each school is a silo with one row.

The data are estimated effects of coaching in eight schools, and their standard errors (Rubin 1981).
The schools' own effects never leave them. All schools together learn the mean effect and the spread
between schools. With one row per silo, and a spread that may be zero, no silo alone informs the
spread.

The posterior of log tau has a long left tail, and a Gaussian has none. SFVI finds tau's mean, and
an sd that is about a fifth too large. Pareto's k says so without a reference, and resampling the
draws mends it.

References: Rubin (1981), Estimation in parallel randomized experiments, J. Educ. Stat. 6, 377-401
(the data); Gelman et al. (2013), Bayesian Data Analysis, third edition, section 5.5.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

EFFECT = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], np.float32)
ERROR = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], np.float32)
GLOBALS = ["mu", "tau"]


def silos() -> fed.Silos:
    """Return one silo per school, A to H."""
    return fed.split({"y": EFFECT, "error": ERROR}, by=np.array(list("ABCDEFGH")))


def model(y, error):  # type: ignore[no-untyped-def]
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with fed.silo_plate("schools", y.shape[0]):
        # non-centered: a school's effect is mu + tau * z
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * z, error), obs=y)


def model_centered(y, error):  # type: ignore[no-untyped-def]
    """Sample the same law in the schools' effects themselves, whose spread goes to zero with tau.

    This is a funnel, and NUTS diverges in its neck. Compare a fit of this model with NUTS on
    :func:`model`, whose mu and tau are the same.
    """
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with fed.silo_plate("schools", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(effect, error), obs=y)


def fit(
    silos: fed.Silos, num_rounds: int = 4000, num_draws: int = 8000
) -> "tuple[az.InferenceData, az.InferenceData]":
    """Run SFVI with its defaults; return its draws as they are, and resampled.

    It warns of Pareto's k for both.
    """
    svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.01))
    result = svi.run(jax.random.key(0), num_rounds, silos)
    print(result)
    plain, resampled = (
        fed.to_inference_data(
            svi, result, silos, num_draws=num_draws, rng_key=jax.random.key(1), resample=resample
        )
        for resample in (False, True)
    )
    return plain, resampled


def reference(silos: fed.Silos, num_warmup: int = 1000, num_samples: int = 5000) -> MCMC:
    """Run NUTS on the pooled schools, with small steps for the narrow neck at tau near zero."""
    nuts = NUTS(model, target_accept_prob=0.95)
    mcmc = MCMC(
        nuts,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(2), **silos.pooled)
    return mcmc


def main(arguments: Sequence[str] | None = None) -> dict[str, fed.Comparison]:
    parser = argparse.ArgumentParser(description="Eight schools: SFVI in silos beside pooled NUTS.")
    parser.add_argument("--quick", action="store_true", help="few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures/eight_schools.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    schools = silos()
    print(schools)
    plain, resampled = fit(schools, num_draws=2000 if args.quick else 8000)
    draws = {"num_warmup": 500, "num_samples": 1000} if args.quick else {}
    nuts = az.from_numpyro(reference(schools, **draws), log_likelihood=False)
    found = {}
    for name, idata in (("SFVI", plain), ("SFVI, resampled", resampled)):
        found[name] = fed.compare(idata, nuts)
        print(f"\n{name}, beside pooled NUTS\n{found[name]}")

    args.figure.parent.mkdir(parents=True, exist_ok=True)
    fed.plot_compare(resampled, nuts, labels=("SFVI, resampled", "pooled NUTS")).savefig(
        args.figure, dpi=150
    )
    print(f"figure written to {args.figure}")
    return found


if __name__ == "__main__":
    main()
