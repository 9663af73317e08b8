"""Sites of draws, in their supports."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from numpyro.infer.util import constrain_fn, transform_fn

from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factors import PARAMS
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.draws import Draws


def globals_of(
    config: FitConfig, silos: Silos, draws: Draws, params: dict[str, Array]
) -> dict[str, Array]:
    """Return the global sites in their supports, draws first.

    They follow from the shared arguments alone.
    """
    factors = config.families[0].factors
    learned = {PARAMS: {k: params[k] for k in config.learned}} if config.learned else {}
    shared = {**silos.shared, **learned}
    return lax.map(
        lambda theta: factors.constrain_globals(factors.unravel(theta), shared), draws.theta
    )


def constrained(
    config: FitConfig, part: int, silos: Silos, draws: Draws, params: dict[str, Array]
) -> dict[str, Array]:
    """Return a structure's latent and deterministic sites in their supports, draws first."""
    factors = config.families[part].factors
    learned = {k: params[k] for k in config.learned}
    kwargs = {**silos.pooled, PARAMS: learned} if learned else silos.pooled
    constrain: Callable
    if factors.transforms is not None:
        constrain = partial(transform_fn, factors.transforms)
    else:
        constrain = partial(constrain_fn, factors.model, (), kwargs, return_deterministic=True)

    def one(theta: Array, latents: dict[str, Array]) -> dict[str, Array]:
        placed = {s.name: jnp.moveaxis(latents[s.name], 0, s.axis) for s in factors.local_sites}
        return constrain({**factors.unravel(theta), **placed})

    return lax.map(lambda x: one(*x), (draws.theta, draws.latents[part]))
