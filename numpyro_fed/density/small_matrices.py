"""Cholesky factors and solves of many small matrices at once, in elementwise arithmetic.

XLA's CPU backend hands a batch of 2 x 2 matrices to LAPACK one by one, which is slow. Worse, where
threads are few, batches from several threads can wait for each other forever (jaxlib 0.10.1, two
cores). Up to :data:`UNROLLED` columns this module computes factors entry by entry; for more it
calls LAPACK. :func:`solve_positive` is a loop over columns at any size.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

# most columns that are written out: 2,000 matrices of 6 x 6 take a quarter of LAPACK's time and
# 2.6 s of compiling, those of 10 x 10 a sixth and 8 s
UNROLLED = 6


def cholesky(matrix: Array) -> Array:
    """Return lower Cholesky factors of matrices ``(..., k, k)``.

    A matrix that is not positive definite has NaN in its factor.
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
    """Return ``lower^-1 x`` for lower triangular matrices and vectors ``(..., k)``."""
    k = x.shape[-1]
    if k > UNROLLED:
        return solve_triangular(lower, x[..., None], lower=True)[..., 0]
    out: list[Array] = []
    for i in range(k):
        rest = x[..., i] - sum(lower[..., i, j] * out[j] for j in range(i))
        out.append(rest / lower[..., i, i])
    return jnp.stack(out, axis=-1)


def solve(factor: Array, x: Array) -> Array:
    """Return ``(C C')^-1 x`` for Cholesky factors C and vectors ``(..., k)``."""
    half = solve_lower(factor, x)
    flipped = jnp.swapaxes(factor, -1, -2)[..., ::-1, ::-1]
    return solve_lower(flipped, half[..., ::-1])[..., ::-1]


def inverse_cholesky(matrix: Array) -> Array:
    """Return lower Cholesky factors of the inverses of matrices ``(..., k, k)``.

    The function factors each matrix in reverse order, inverts and transposes the factor, and
    reverses its order again.
    """
    backwards = cholesky(matrix[..., ::-1, ::-1])
    eye = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    columns = jax.vmap(solve_lower, in_axes=(None, -1), out_axes=-1)(backwards, eye)
    return jnp.swapaxes(columns, -1, -2)[..., ::-1, ::-1]


def solve_positive(matrix: Array, x: Array) -> Array:
    """Return ``matrix^-1 x`` for positive definite matrices ``(..., k, k)``, x ``(..., k, r)``.

    Gauss-Jordan elimination runs on matrices with a diagonal scaled to one. Positive definite
    matrices need no pivots.
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
