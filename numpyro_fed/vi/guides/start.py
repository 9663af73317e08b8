"""Start of the global sites of a fit."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from numpyro.distributions import constraints
from numpyro.infer.initialization import init_to_median


def init_near_center(site: dict[str, Any] | None = None) -> Any:
    """Start as by :func:`numpyro.infer.init_to_median`, but near the mean of a wide prior.

    NumPyro's start is the median of 15 draws, about a third of a prior's sd from its center. With
    an sd of 1,000 that is further than a fit gets. So a site on the reals whose sd is above one
    starts as near to its mean as if its sd were one.
    """
    if site is None:  # so NumPyro asks for a strategy
        return partial(init_near_center)
    value = init_to_median(site)
    support = getattr(site.get("fn"), "support", None)
    if isinstance(support, constraints.independent):
        support = support.base_constraint
    if value is None or support not in (constraints.real, constraints.real_vector):
        return value
    try:
        mean, sd = site["fn"].mean, jnp.sqrt(site["fn"].variance)
    except NotImplementedError:
        return value
    near = mean + (value - mean) / jnp.maximum(sd, 1.0)
    return jnp.where(jnp.isfinite(near), near, value)
