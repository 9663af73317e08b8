"""Factors and solves of many small matrices at once, in elementwise arithmetic over the batch.

XLA's CPU backend hands a batch of 2 x 2 matrices to LAPACK one by one, which is slow. Worse,
batches from several threads can wait for each other for ever where threads are few (jaxlib 0.10.1,
two cores). Up to :data:`UNROLLED` columns factors are written out entry by entry, beyond they are
LAPACK's; :func:`solve_positive` is a loop over columns at any size.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

__all__ = ["UNROLLED", "cholesky", "inverse_cholesky", "solve", "solve_lower", "solve_positive"]

UNROLLED = 6


def cholesky(matrix: Array) -> Array:
    """Lower Cholesky factors of matrices ``(..., k, k)``.

    NaN where one is not positive definite.
    """
    k = matrix.shape[-1]
    if k > UNROLLED:
        return jnp.linalg.cholesky(matrix)
    rows: list[list[Array]] = []
    for i in range(k):
        row: list[Array] = []
        for j in range(i + 1):
            rest = matrix[..., i, j] - sum(
                a * b for a, b in zip(row, rows[j] if j < i else row, strict=False)
            )
            row.append(jnp.sqrt(rest) if i == j else rest / rows[j][j])
        rows.append(row)
    return _lower(rows)


def solve_lower(lower: Array, x: Array) -> Array:
    """``lower^-1 x`` for vectors ``(..., k)``."""
    k = x.shape[-1]
    if k > UNROLLED:
        return solve_triangular(lower, x[..., None], lower=True)[..., 0]
    out: list[Array] = []
    for i in range(k):
        rest = x[..., i] - sum(lower[..., i, j] * out[j] for j in range(i))
        out.append(rest / lower[..., i, i])
    return jnp.stack(out, axis=-1)


def solve(factor: Array, x: Array) -> Array:
    """``(C C')^-1 x`` for Cholesky factors C and vectors ``(..., k)``."""
    half = solve_lower(factor, x)
    flipped = jnp.swapaxes(factor, -1, -2)[..., ::-1, ::-1]
    return solve_lower(flipped, half[..., ::-1])[..., ::-1]


def inverse_cholesky(matrix: Array) -> Array:
    """Lower Cholesky factors of the inverses.

    Of the matrix read backwards, inverted and read backwards again.
    """
    backwards = cholesky(matrix[..., ::-1, ::-1])
    eye = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    columns = jax.vmap(solve_lower, in_axes=(None, -1), out_axes=-1)(backwards, eye)
    return jnp.swapaxes(columns, -1, -2)[..., ::-1, ::-1]


def solve_positive(matrix: Array, x: Array) -> Array:
    """``matrix^-1 x`` for positive definite matrices ``(..., k, k)`` and columns ``(..., k, r)``,
    by Gauss-Jordan elimination.

    The diagonal is scaled to one; positive definite matrices need no pivots.
    """
    root = jnp.sqrt(jnp.diagonal(matrix, axis1=-2, axis2=-1))[..., None]
    rows = jnp.concatenate([matrix / (root * jnp.swapaxes(root, -1, -2)), x / root], axis=-1)

    def eliminate(i: Array, rows: Array) -> Array:
        column = jnp.take(rows, i, axis=-1)
        row = jnp.take(rows, i, axis=-2) / jnp.take(column, i, axis=-1)[..., None]
        rows = rows - column[..., :, None] * row[..., None, :]
        return (
            rows
            + jnp.where(jnp.arange(column.shape[-1]) == i, 1.0, 0.0)[:, None] * row[..., None, :]
        )

    return lax.fori_loop(0, matrix.shape[-1], eliminate, rows)[..., matrix.shape[-1] :] / root


def _lower(rows: list[list[Array]]) -> Array:
    zero = jnp.zeros_like(rows[0][0])
    k = len(rows)
    return jnp.stack([jnp.stack([*row, *[zero] * (k - len(row))], -1) for row in rows], -2)
