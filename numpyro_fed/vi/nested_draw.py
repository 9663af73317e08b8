"""Draws of the latents of two nested plates, given theta.

An outer element's latents are chosen among nodes around their mode, weighed with its inner elements
integrated out. Inner latents are then chosen among nodes around theirs. Nodes have a random shift
(:mod:`numpyro_fed.vi.proposals`), so that the law is exact as they get dense.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.nested import join_levels
from numpyro_fed.surrogates.marginal import inverse_factor, near_enough, newton
from numpyro_fed.surrogates.nested_marginal import (
    INNER_STEPS,
    find_ridge,
    inner_quadrature,
    summed,
)
from numpyro_fed.vi.guides.marginal import MarginalNormal
from numpyro_fed.vi.proposals import choose, nodes_at, uniform_at


def draw_nested(
    family: MarginalNormal, theta: Array, key: Array, rows: SiloRows
) -> dict[str, Array]:
    """Draw a silo's latents at an unconstrained position.

    :param key: key of the draws, which are folded by the elements' places in the pooled data.
    :return: unconstrained local sites, elements first.
    """
    units = family.integrated(rows)
    kwargs, weights = rows.whole()
    sites, parent = family.factors.unravel(theta), units.parent(kwargs)

    def terms(a: Array, b: Array) -> tuple[Array, Array]:
        row = join_levels(a, b)[None]
        return units.level_terms(sites, row, kwargs, weights, rows)[:2]

    starts = units.levels(jnp.zeros(units.owned(rows).shape, theta.dtype))
    ridge = find_ridge(terms, starts, parent)
    up = summed(parent, len(starts[0]))

    def outer_terms(a: Array) -> Array:
        inner = inner_quadrature(terms, ridge, parent, a)
        own, below = jax.vmap(partial(terms, a))(inner.points)
        return own[0] + up(jax.nn.logsumexp(below + inner.log_weight, axis=0))

    keys, owned = random.split(key), units.masks(rows)
    uniform = [
        uniform_at(k, rows.order[group], 1 + width)
        for k, (group, _, width) in zip(keys, units.blocks(), strict=True)
    ]
    a = _chosen(outer_terms, ridge.outer, ridge.chol, uniform[0], owned[0])

    def inner_terms(b: Array) -> Array:
        return terms(a, b)[1]

    near = near_enough(theta.dtype)
    mode = newton(inner_terms, ridge.along(a, parent), INNER_STEPS, near)
    root = inverse_factor(mode.curvature)
    b = _chosen(inner_terms, mode.at, root, uniform[1], owned[1])
    return units.to_sites(join_levels(a, b)[None])


def _chosen(
    log_terms: Callable[[Array], Array], center: Array, root: Array, uniform: Array, owned: Array
) -> Array:
    """Choose among nodes around ``center`` ``(E, k)`` by their weights.

    :param uniform: numbers ``(E, 1 + k)``: for the choice, and for the nodes' shift.
    """
    eps, log_ratio = nodes_at(uniform[:, 1:], jnp.broadcast_to(owned, center.shape))
    points = center + jnp.einsum("eij,nej->nei", root, eps)
    values = jax.lax.map(log_terms, points)
    log_weight = values + 0.5 * jnp.sum(eps**2, -1) - log_ratio
    log_weight = jnp.where(jnp.isfinite(log_weight), log_weight, -jnp.inf)
    which = choose(jax.nn.softmax(log_weight, axis=0), uniform[:, 0])
    return points[which, jnp.arange(points.shape[1])]
