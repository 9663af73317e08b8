"""Candidates of latents around their modes at one theta, where a fitted local map is too coarse.

A local map follows theta to second order. Where a scale goes to zero, or theta is far out, a unit's
conditional law is elsewhere, and nodes around the map miss it. A few Newton steps find it.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.surrogates.marginal import inverse_factor, newton
from numpyro_fed.vi.bound import unit_terms
from numpyro_fed.vi.guides.family import Family
from numpyro_fed.vi.guides.normal import Context, SiloNormal
from numpyro_fed.vi.minibatch import Batch

# most steps toward a unit's mode from where the map has it, which ten are enough for from anywhere
# on a log-concave law, and the squared length in sds of a step at which the mode is near enough:
# nodes reach 12 and 8 sds
_STEPS, _NEAR = 20, 0.01


def can_place(family: Family, rows: SiloRows) -> bool:
    """Return whether candidates can be around modes: those of one plate's elements."""
    alone = isinstance(family, SiloNormal) and family.has_local and family.group is not None
    return alone and not isinstance(family.units(rows), NestedUnits)


def at_modes(
    family: Family, own: LocalMap, context: Context, learned: dict[str, Array], batch: Batch
) -> tuple[SiloNormal, LocalMap]:
    """Return a map around each unit's mode at this theta, and the family that takes it as it is.

    :param own: the fitted map, where the steps start.
    """
    assert isinstance(family, SiloNormal)
    owned = family.units(batch.rows).owned(batch.rows)

    def log_terms(z: Array) -> Array:
        terms = unit_terms(family, context.theta, z, learned, batch)[0]
        return terms - 0.5 * jnp.sum(jnp.where(owned, 0.0, z**2), axis=1)

    start = family.latents(own, context, jnp.zeros((1, *owned.shape)), batch.rows)[0]
    mode = newton(log_terms, start, _STEPS, _NEAR)
    root = inverse_factor(mode.curvature)
    scale = jnp.diagonal(root, axis1=-2, axis2=-1)
    return replace(family, encoders=()), LocalMap(
        mode.at, jnp.log(scale), tril=root / scale[:, None]
    )
