r"""Metropolis moves of the local latents of two nested plates given the global parameters.

The moves propose in the local map's coordinates. Law: they leave :math:`p(z_s \mid y_s, \theta)`
invariant exactly.

Each inner element proposes and accepts on its own, given its outer element's latents. Then each
outer element proposes on its own, and its inner elements move along at fixed coordinates. All terms
of an outer element and its inner ones decide, with the change of their scales.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.density.nested import NestedUnits, join_levels
from numpyro_fed.mcmc.local_moves import MoveNoise


def nested_metropolis(
    units: NestedUnits,
    log_terms: Callable[[Array], tuple[Array, Array]],
    eps: Array,
    noise: MoveNoise,
    parent: Array,
    masks: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Move all inner elements, then all outer ones.

    :param log_terms: log densities in eps ``(1, dim)`` of outer ``(n0,)`` and inner elements
        ``(n1,)``, scales included.
    :param parent: the outer element of each inner one.
    :param masks: which elements belong to the silo, ``(n0, 1)`` and ``(n1, 1)``.
    :return: the new eps, and the mean acceptance probability of the silo's elements.
    """
    (outer, inner), proposals = units.levels(eps), units.levels(noise.width * noise.normal)
    owned = [mask[:, 0] for mask in masks]
    uniform = noise.log_uniform[0, : len(outer)], noise.log_uniform[0, len(outer) :]

    def weight(x: Array) -> Array:
        """Return minus the log density of a proposal, up to a constant."""
        return 0.5 * jnp.sum(x**2, -1) / noise.width**2

    own, below = log_terms(eps)
    proposed = log_terms(join_levels(outer, proposals[1])[None])[1]
    log_ratio = proposed - below + weight(proposals[1]) - weight(inner)
    accept = uniform[1] < log_ratio  # NaN rejects
    inner, below = (
        jnp.where(accept[:, None], proposals[1], inner),
        jnp.where(accept, proposed, below),
    )
    probability = jnp.sum(jnp.where(owned[1], _probability(log_ratio), 0.0))

    new_own, new_below = log_terms(join_levels(proposals[0], inner)[None])
    change = jnp.where(
        owned[1], new_below - below, 0.0
    )  # padding moves along with the last outer element, but must not count
    log_ratio = new_own - own + jax.ops.segment_sum(change, parent, num_segments=len(outer))
    log_ratio += weight(proposals[0]) - weight(outer)
    outer = jnp.where((uniform[0] < log_ratio)[:, None], proposals[0], outer)
    probability += jnp.sum(jnp.where(owned[0], _probability(log_ratio), 0.0))
    return join_levels(outer, inner)[None], probability / (jnp.sum(owned[0]) + jnp.sum(owned[1]))


def _probability(log_ratio: Array) -> Array:
    return jnp.nan_to_num(jnp.exp(jnp.minimum(log_ratio, 0.0)))
