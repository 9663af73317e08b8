"""The server's step: diagonal precisions as full ones, and the spread where a step is cut.

Also precisions that float32 cannot square.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.surrogates.natural_step import ApproxFactor, product


def test_a_diagonal_is_a_full_precision():
    linear, precision = jnp.array([0.5, -20.0, 2.0]), jnp.array([0.8, 2.0, -3.0])
    step, sd, moved, held = product(ApproxFactor(linear, precision))
    full = product(ApproxFactor(linear, jnp.diag(precision)))
    np.testing.assert_allclose(full[0], step, rtol=1e-6)
    np.testing.assert_allclose(full[1], jnp.diag(sd), atol=1e-6)
    assert float(full[2]) == pytest.approx(float(moved), rel=1e-6)
    assert held
    assert full[3]


@pytest.mark.parametrize("precision", [0.5, 1.0, 9.0, 100.0])
@pytest.mark.parametrize("sds", [2.0, 4.0, 7.0])
def test_a_step_that_is_cut_leaves_the_spread_at_least_as_wide(sds, precision):
    step, sd, _, held = product(ApproxFactor(jnp.array([sds * precision]), jnp.array([precision])))
    assert float(step[0]) == pytest.approx(min(sds, 3))
    assert bool(held) == (sds > 3)
    own = precision**-0.5
    expected = own if sds <= 3 else min(2.0, max(own, sds / 3))
    assert float(sd[0]) == pytest.approx(expected, rel=1e-5)


def test_curvatures_that_differ_by_a_billion_have_a_root():
    """In float32 the covariance is not positive definite, as rounded.

    There is a root all the same, right where curvature is large.
    """
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    values = np.array([0.3, 1.0, 1e3, 1e5, 1e8, 3e8])
    precision = (vectors * values) @ vectors.T
    covariance = (vectors / np.maximum(values, 0.25)) @ vectors.T
    assert np.isnan(jnp.linalg.cholesky(jnp.asarray(covariance, jnp.float32))).any()
    root = np.asarray(
        product(ApproxFactor(jnp.zeros(6), jnp.asarray(precision, jnp.float32)))[1], np.float64
    )
    assert (np.triu(root, 1) == 0).all()
    assert (np.diagonal(root) > 0).all()
    assert np.linalg.norm(root, 2) < 2.001  # twofold at most
    np.testing.assert_allclose(
        np.linalg.norm(root.T @ vectors, axis=0)[-2:], values[-2:] ** -0.5, rtol=0.1
    )
