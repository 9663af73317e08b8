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
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_fed.density import small_matrices
from numpyro_fed.surrogates.marginal import (
    DAMPED,
    NEWTON_STEPS,
    Local,
    Moments,
    Quadrature,
    cholesky,
    inverse_factor,
    near_enough,
    nodes,
    nowhere,
    place,
    place_at_mode,
    taken,
)

# from a start on the joint mode's tangent; these steps place nodes, whose weights correct a place
# that is a part of an sd off
INNER_STEPS = 4
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
    up = summed(parent, len(starts[0]))

    def here(a: Array, b: Array) -> tuple[Array, Array]:
        return log_terms(u, a, b)[:2]

    ridge = find_ridge(here, starts, parent)
    outer = place(ridge.outer, ridge.chol, nodes(ridge.outer.shape[1], **_OUTER))
    inner_nodes = partial(inner_quadrature, here, ridge, parent)
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


class Ridge(NamedTuple):
    """Joint mode ``(n0, k0)`` and ``(n1, k1)``, and how the latents spread around it.

    :param tangent: how inner modes move with their outer element, ``(n1, k1, k0)``.
    :param chol: factors of the outer latents' covariances, inner ones maximized out.
    """

    outer: Array
    inner: Array
    tangent: Array
    chol: Array

    def along(self, at: Array, parent: Array) -> Array:
        """Return where inner modes are about, for outer latents ``at`` ``(n0, k0)``."""
        return self.inner + jnp.einsum("eij,ej->ei", self.tangent, (at - self.outer)[parent])


def summed(parent: Array, count: int) -> Callable[[Array], Array]:
    """Return the sum over each outer element's inner ones, as a function."""
    return lambda x: jax.ops.segment_sum(x, parent, num_segments=count)


def find_ridge(log_terms: Terms, starts: tuple[Array, Array], parent: Array) -> Ridge:
    """Find the joint mode and the curvature there."""
    up = summed(parent, len(starts[0]))
    at_a, at_b = _mode(log_terms, starts, parent, up)
    tangent = -_solve(cholesky(at_b.curvature), at_b.cross)  # db / da along the ridge
    chol = inverse_factor(at_a.curvature + up(jnp.swapaxes(at_b.cross, -1, -2) @ tangent))
    return Ridge(at_a.at, at_b.at, tangent, chol)


def inner_quadrature(log_terms: Terms, ridge: Ridge, parent: Array, at: Array) -> Quadrature:
    """Return nodes of the inner latents, for outer latents ``at`` ``(n0, k0)``."""
    start = ridge.along(at, parent)
    table = nodes(start.shape[1], **_INNER)
    return place_at_mode(lambda x: log_terms(at, x)[1], start, table, INNER_STEPS)


class _Inner(NamedTuple):
    """Terms of inner elements at a position, and derivatives.

    ``curvature`` and ``cross`` are negative second derivatives: of an element alone ``(n1, k1,
    k1)``, and with its outer one ``(n1, k1, k0)``.
    """

    at: Array
    value: Array
    slope: Array
    curvature: Array
    cross: Array


def _local(log_terms: Terms, a: Array, b: Array) -> tuple[Local, _Inner]:
    """Evaluate all terms and their derivatives in one pass."""
    k0 = a.shape[1]

    def slope(a: Array, b: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        def total(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
            terms = log_terms(a, b)
            return jnp.sum(terms[0]) + jnp.sum(terms[1]), terms

        return jax.grad(total, argnums=(0, 1), has_aux=True)(a, b)

    def column(e: Array) -> tuple[tuple, tuple[Array, Array]]:
        tangents = jnp.broadcast_to(e[:k0], a.shape), jnp.broadcast_to(e[k0:], b.shape)
        here, change = jax.jvp(slope, (a, b), tangents)
        return here, change[0]

    basis = jnp.eye(k0 + b.shape[1], dtype=a.dtype)
    (slopes, terms), (of_a, of_b) = jax.vmap(column, out_axes=(None, -1))(basis)
    outer = Local(a, terms[0], slopes[0], -of_a[..., :k0])
    return outer, _Inner(b, terms[1], slopes[1], -of_b[..., k0:], -of_b[..., :k0])


_solve = jax.vmap(small_matrices.solve, in_axes=(None, -1), out_axes=-1)  # column by column


def _mode(
    log_terms: Terms, starts: tuple[Array, Array], parent: Array, up: Callable[[Array], Array]
) -> tuple[Local, _Inner]:
    """Find the joint mode by Newton steps.

    Each outer element is damped together with its inner ones (Levenberg-Marquardt).
    """

    def damped(matrix: Array, damping: Array) -> Array:
        diagonal = jnp.abs(jnp.diagonal(matrix, axis1=-2, axis2=-1))
        return matrix + (damping[:, None] * (diagonal.max(-1, keepdims=True) + 1e-6))[
            ..., None
        ] * np.eye(matrix.shape[-1], dtype=matrix.dtype)

    def moves_from(outer: Local, inner: _Inner, damping: Array) -> tuple[Array, Array]:
        chol = small_matrices.cholesky(damped(inner.curvature, damping[parent]))
        solved = _solve(chol, inner.cross)
        coupled = up(jnp.swapaxes(inner.cross, -1, -2) @ solved)
        right = outer.slope - up(jnp.einsum("eij,ei->ej", solved, inner.slope))
        schur = damped(outer.curvature, damping) - coupled
        move_a = small_matrices.solve(small_matrices.cholesky(schur), right)
        move_b = small_matrices.solve(chol, inner.slope) - jnp.einsum(
            "eij,ej->ei", solved, move_a[parent]
        )
        return move_a, move_b

    def step(carry: tuple) -> tuple:
        i, outer, inner, at, damping, moves = carry
        new = _local(log_terms, *at)
        better = new[0].value + up(new[1].value) >= outer.value + up(inner.value)  # not for NaN
        better = better & moves
        outer, inner = taken(better, new[0], outer), taken(better[parent], new[1], inner)
        damping = jnp.where(better, damping * 0.2, jnp.maximum(damping, 1e-3) * 6.0)
        move_a, move_b = moves_from(outer, inner, damping)
        length = jnp.sum(outer.slope * move_a, -1) + up(jnp.sum(inner.slope * move_b, -1))
        moves = moves & ~((length < near) & (damping < DAMPED))
        return i + 1, outer, inner, (outer.at + move_a, inner.at + move_b), damping, moves

    outer, inner = (nowhere(x) for x in starts)
    first = _Inner(*inner, jnp.zeros((*starts[1].shape, starts[0].shape[1]), starts[1].dtype))
    zero, near = jnp.zeros_like(outer.value), near_enough(starts[0].dtype)
    # the first step evaluates the start itself
    carry = 0, outer, first, starts, zero, jnp.ones(len(zero), bool)
    found = lax.while_loop(lambda x: (x[0] <= NEWTON_STEPS) & x[-1].any(), step, carry)
    return found[1], found[2]
