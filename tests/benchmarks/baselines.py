"""What FSGLD is held against besides NUTS.

Methods that combine the silos' own posteriors, and NUTS on the pooled rows.

Consensus Monte Carlo and the parametric product are `numpyro.infer.hmc_util`'s, on NUTS draws of
each silo's posterior with the prior to the power 1/S. The one-shot product is that of FSGLD's
surrogates.

References: Scott et al. (2016), Bayes and big data, Int. J. Management Sci. Eng. Management 11,
78-88; Neiswanger, Wang & Xing (2014), Asymptotically exact, embarrassingly parallel MCMC, UAI.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer import MCMC, NUTS
from numpyro.infer.hmc_util import consensus, parametric
from numpyro.infer.util import transform_fn

import numpyro_fed as fed
from numpyro_fed.density.factors import Factors

Draws = dict[str, np.ndarray]  # (chains, draws, ...)
_CHAINS, _TOTAL = 4, 8000


def silo_draws(factors: Factors, silos: fed.Silos, num_samples: int) -> list[jnp.ndarray]:
    """Draws of each silo's own posterior, the prior shared out.

    Flat unconstrained global positions.
    """
    draws = []
    for s, name in enumerate(silos.names):
        kwargs = silos[name]
        groups = factors.local_groups()
        weights = dict.fromkeys(silos.sizes, 1.0)
        local = {v.name: (silos.sizes[groups[v.name]][s], *v.shape) for v in factors.local_sites}

        def potential(z: dict, kwargs: dict = kwargs, weights: dict = weights) -> jnp.ndarray:
            theta = factors.unravel(z["theta"])
            prior = factors.log_prior(theta, silos.shared) / len(silos)
            return -prior - factors.log_local(theta, z["local"], kwargs, weights)

        start = {
            "theta": jnp.zeros(factors.dim),
            "local": {k: jnp.zeros(v) for k, v in local.items()},
        }
        mcmc = MCMC(
            NUTS(potential_fn=potential),
            num_warmup=500,
            num_samples=num_samples,
            progress_bar=False,
        )
        mcmc.run(random.key(s), init_params=start)
        draws.append(mcmc.get_samples()["theta"])
    return draws


def as_chains(kernel: Any, silos: fed.Silos, flat: jnp.ndarray) -> Draws:
    """Flat unconstrained positions as constrained global sites of four chains."""
    sites = jax.vmap(kernel.factors.unravel)(flat)
    if kernel.factors.local_sites:
        values = transform_fn(kernel.factors.transforms, sites)
    else:  # deterministic sites, too
        values = jax.vmap(kernel.postprocess_fn((silos,), {}))(sites)
    return {k: np.asarray(v).reshape(_CHAINS, -1, *v.shape[1:]) for k, v in values.items()}


def combined(kernel: Any, silos: fed.Silos, num_samples: int) -> dict[str, Callable[[], Draws]]:
    """Each method by its name: a function that gives draws.

    :param kernel: an :class:`numpyro_fed.FSGLD` that has run on the silos.
    """
    own_posteriors = cache(lambda: silo_draws(kernel.factors, silos, num_samples))

    def one_shot() -> Draws:
        law = kernel.surrogates.posterior()
        covariance = jnp.diag(law.covariance) if law.is_diagonal else law.covariance
        draws = random.multivariate_normal(random.key(2), law.mean, covariance, (_TOTAL,))
        return as_chains(kernel, silos, draws)

    def consensus_monte_carlo() -> Draws:
        return as_chains(kernel, silos, consensus(own_posteriors(), rng_key=random.key(3)))

    def parametric_product() -> Draws:
        # parametric_draws refuses a covariance that rounding made asymmetric; its moments are what
        # we want
        mean, covariance = parametric(own_posteriors())
        product = random.multivariate_normal(
            random.key(4), mean, 0.5 * (covariance + covariance.T), (_TOTAL,)
        )
        return as_chains(kernel, silos, product)

    return {
        "one-shot product": one_shot,
        "Consensus": consensus_monte_carlo,
        "parametric": parametric_product,
    }
