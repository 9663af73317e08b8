r"""Marginal likelihood of a silo whose local latents are those of two nested plates.

With terms :math:`\ell_g(a_g)` of the outer elements and :math:`\ell_i(a_{g(i)}, b_i)` of the inner
ones, it is

.. math::
    \log p(y_s \mid \theta) = \sum_g \log \int e^{\ell_g(a)}
        \prod_{i \in g} \left[ \int e^{\ell_i(a, b)} \, db \right] da

by quadrature in quadrature (:class:`numpyro_fed.surrogates.marginal.Quadrature`). The joint mode
and the curvature there place the outer nodes. The curvature is an arrow of inner blocks, outer
blocks, and blocks that couple an inner element to its outer one. Its Schur complement is the
curvature of a after the b are maximized out. At each outer node a few Newton steps place the
inner nodes. No gradient passes through nodes, so that the gradient of the value is Fisher's
identity, twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_fed.density import small_matrices
from numpyro_fed.surrogates.marginal import (
    NEWTON_STEPS,
    Moments,
    Quadrature,
    cholesky,
    inverse_factor,
    nodes,
    place,
    place_at_mode,
)

# from a start on the joint mode's tangent; these steps place nodes, whose weights correct a place
# that is a part of an sd off
_INNER_STEPS = 4
_OUTER = {"scalar": 11, "sobol": 32}  # few: outer elements with many rows are nearly normal
# the worst error of a score in a log scale is .010 for 21 nodes (marginal.py), and values cost
# 11 x 21 evaluations
_INNER = {"scalar": 21, "sobol": 32}

Terms = Callable[[Array, Array], tuple[Array, Array]]


def num_nodes(outer: int, inner: int) -> int:
    """Return the number of evaluations of the model in one value.

    :param outer: number of latents of an outer element.
    :param inner: number of latents of an inner element.
    """
    return len(nodes(outer, **_OUTER)[0]) * len(nodes(inner, **_INNER)[0])


class NestedMarginal(NamedTuple):
    """Result of :func:`nested_marginal`.

    :param value: the log marginal likelihood without its constant in ``2 pi``.
    :param score: its gradient ``(d,)``.
    :param outer: moments of the outer latents.
    :param inner: moments of the inner latents at outer latents ``outer.location + outer.chol @ e``;
        ``None`` without e.
    """

    value: Array
    score: Array
    outer: Moments
    inner: Moments | None


def nested_marginal(
    log_terms: Callable[[Array, Array, Array], tuple[Array, Array, Array]],
    u: Array,
    parent: Array,
    starts: tuple[Array, Array],
    e: Array | None = None,
) -> NestedMarginal:
    """Integrate outer and inner latents out.

    :param log_terms: ``(u, outer, inner) -> (n0,), (n1,), ()``: terms of outer elements, of inner
        ones, and of neither; padding is standard normal.
    :param u: global position (whitened), shape ``(d,)``.
    :param parent: the outer element of each inner one, ``(n1,)``.
    :param starts: first positions of the search for the mode, ``(n0, k0)`` and ``(n1, k1)``.
    :param e: standard normal position ``(k0,)`` of the inner moments, the same for all outer
        elements.
    """
    count = len(starts[0])

    def up(x: Array) -> Array:
        return jax.ops.segment_sum(x, parent, num_segments=count)

    def here(a: Array, b: Array) -> tuple[Array, Array]:
        return log_terms(u, a, b)[:2]

    a, b = _mode(here, starts, parent, up)
    arrow = _arrow(here, a, b)
    tangent = -_solve(cholesky(arrow.inner), arrow.cross)  # db / da along the ridge
    chol = inverse_factor(arrow.outer + up(jnp.swapaxes(arrow.cross, -1, -2) @ tangent))
    outer = place(a, chol, nodes(a.shape[1], **_OUTER))

    def inner_nodes(at: Array) -> Quadrature:
        start = b + jnp.einsum("eij,ej->ei", tangent, (at - a)[parent])
        return place_at_mode(
            lambda x: here(at, x)[1], start, nodes(b.shape[1], **_INNER), _INNER_STEPS
        )

    inner = jax.vmap(inner_nodes)(outer.points)

    def marginal(u: Array) -> tuple[Array, Array]:
        def given(at: Array, inner: Quadrature) -> tuple[Array, Array]:
            own, below, rest = jax.vmap(lambda x: log_terms(u, at, x))(inner.points)
            return own[0] + up(jax.nn.logsumexp(below + inner.log_weight, axis=0)), rest[0]

        values, rest = jax.vmap(given)(outer.points, inner)
        return jnp.sum(jax.nn.logsumexp(values + outer.log_weight, axis=0)) + rest[0], values

    (value, values), score = jax.value_and_grad(marginal, has_aux=True)(u)
    found = outer.moments(values)
    if e is None:
        return NestedMarginal(value, score, found, None)
    at = found.location + found.chol @ e
    there = inner_nodes(at)
    return NestedMarginal(
        value, score, found, there.moments(jax.vmap(lambda x: here(at, x)[1])(there.points))
    )


class _Arrow(NamedTuple):
    """Blocks of the negative second derivatives.

    The outer blocks are ``(n0, k0, k0)`` and the inner ones ``(n1, k1, k1)``; the cross blocks of
    inner elements with their outer ones are ``(n1, k1, k0)``.
    """

    outer: Array
    cross: Array
    inner: Array


def _arrow(log_terms: Terms, a: Array, b: Array) -> _Arrow:
    slope = jax.grad(lambda a, b: sum(jnp.sum(x) for x in log_terms(a, b)), argnums=(0, 1))

    def columns(x: Array, other: Array, first: bool) -> tuple[Array, Array]:
        def column(e: Array) -> tuple[Array, Array]:
            tangents = jnp.broadcast_to(e, x.shape), jnp.zeros_like(other)
            return jax.jvp(slope, (a, b), tangents if first else tangents[::-1])[1]

        found = jax.vmap(column)(jnp.eye(x.shape[1], dtype=x.dtype))
        return jax.tree.map(lambda x: -jnp.moveaxis(x, 0, -1), found)

    outer, cross = columns(a, b, first=True)
    return _Arrow(outer, cross, columns(b, a, first=False)[1])


_solve = jax.vmap(small_matrices.solve, in_axes=(None, -1), out_axes=-1)  # column by column


def _mode(
    log_terms: Terms, starts: tuple[Array, Array], parent: Array, up: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """Find the joint mode by Newton steps.

    Each outer element is damped together with its inner ones (Levenberg-Marquardt).
    """
    slope = jax.grad(lambda a, b: sum(jnp.sum(x) for x in log_terms(a, b)), argnums=(0, 1))

    def value_of(a: Array, b: Array) -> Array:
        own, below = log_terms(a, b)
        return own + up(below)

    def damped(matrix: Array, damping: Array) -> Array:
        diagonal = jnp.abs(jnp.diagonal(matrix, axis1=-2, axis2=-1))
        return matrix + (damping[:, None] * (diagonal.max(-1, keepdims=True) + 1e-6))[
            ..., None
        ] * np.eye(matrix.shape[-1], dtype=matrix.dtype)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        a, b, value, damping = carry
        slope_a, slope_b = slope(a, b)
        arrow = _arrow(log_terms, a, b)
        inner = small_matrices.cholesky(damped(arrow.inner, damping[parent]))
        solved = _solve(inner, arrow.cross)
        schur = damped(arrow.outer, damping) - up(jnp.swapaxes(arrow.cross, -1, -2) @ solved)
        right = slope_a - up(jnp.einsum("eij,ei->ej", solved, slope_b))
        move_a = small_matrices.solve(small_matrices.cholesky(schur), right)
        move_b = small_matrices.solve(inner, slope_b) - jnp.einsum(
            "eij,ej->ei", solved, move_a[parent]
        )
        new_a, new_b = a + move_a, b + move_b
        new = value_of(new_a, new_b)
        better = new >= value  # false for NaN
        a, b = jnp.where(better[:, None], new_a, a), jnp.where(better[parent, None], new_b, b)
        damping = jnp.where(better, damping * 0.2, jnp.maximum(damping, 1e-3) * 6.0)
        return (a, b, jnp.where(better, new, value), damping), None

    init = (*starts, value_of(*starts), jnp.zeros(len(starts[0]), starts[0].dtype))
    return lax.scan(step, init, None, length=NEWTON_STEPS)[0][:2]
