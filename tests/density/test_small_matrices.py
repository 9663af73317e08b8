"""Small matrices, written out, against LAPACK in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.density import small_matrices


def matrices(k):
    root = np.random.default_rng(k).normal(size=(5, 3, k, k))
    return root @ np.swapaxes(root, -1, -2) + 0.5 * np.eye(k)


@pytest.mark.parametrize("k", [1, 2, 3, 6, 8])
def test_factors_and_solves(k):
    a, x = matrices(k), np.random.default_rng(0).normal(size=(5, 3, k))
    factor = jax.jit(small_matrices.cholesky)(a)
    np.testing.assert_allclose(factor, np.linalg.cholesky(a), rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(
        jax.jit(small_matrices.solve)(factor, x),
        np.linalg.solve(a, x[..., None])[..., 0],
        rtol=1e-3,
        atol=1e-4,
    )
    lower = jax.jit(small_matrices.solve_lower)(factor, x)
    np.testing.assert_allclose(
        np.einsum("...ij,...j->...i", factor, lower), x, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        jax.jit(small_matrices.inverse_cholesky)(a),
        np.linalg.cholesky(np.linalg.inv(a)),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("k", [1, 3, 40])
def test_positive_systems(k):
    a, x = (
        matrices(k) * (1 + 100 * np.arange(k)),
        np.random.default_rng(0).normal(size=(5, 3, k, 2)),
    )
    a = 0.5 * (a + np.swapaxes(a, -1, -2)) + 200 * k * np.eye(k) * (k > 1)
    found = jax.jit(small_matrices.solve_positive)(a, x)
    np.testing.assert_allclose(
        found, np.linalg.solve(a, x), rtol=1e-3, atol=1e-5 * np.abs(np.linalg.solve(a, x)).max()
    )


def test_no_factor_of_an_indefinite_matrix():
    a = jnp.asarray([[[1.0, 2.0], [2.0, 1.0]], [[2.0, 1.0], [1.0, 2.0]]])
    finite = np.isfinite(small_matrices.cholesky(a)).all((1, 2))
    assert finite.tolist() == [False, True]


def test_determinants_differentiate():
    a = jnp.asarray(matrices(3)[0, 0])

    def log_det(a):
        return 2 * jnp.sum(jnp.log(jnp.diagonal(small_matrices.cholesky(0.5 * (a + a.T)))))

    np.testing.assert_allclose(
        jax.jit(jax.grad(log_det))(a), np.linalg.inv(a), rtol=1e-3, atol=1e-4
    )
