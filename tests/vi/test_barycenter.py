"""The Wasserstein-2 barycenter of Gaussians.

Against closed forms, its own equation and another implementation.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy.linalg import sqrtm
from scipy.stats import ortho_group

from numpyro_fed.vi.barycenter import Barycenter, barycenter

with warnings.catch_warnings():  # ott imports jaxopt, which announces its end
    warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
    from ott.geometry import costs

NUMBER = 4


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def gaussians(
    rng: np.random.Generator, dim: int, number: int = NUMBER
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, covariances of scales some tenfold apart, and weights that do not sum to one."""
    root = rng.normal(size=(number, dim, 2 * dim)) * rng.gamma(3.0, size=(number, 1, 1))
    return (
        rng.normal(size=(number, dim)),
        root @ root.swapaxes(1, 2) / (2 * dim),
        rng.gamma(2.0, size=number),
    )


def fixed_point_residual(
    covariance: np.ndarray, covariances: np.ndarray, weights: np.ndarray
) -> float:
    """Return the equation's relative residual, by the square roots of SciPy."""
    root = sqrtm(covariance)
    mean = sum(
        w * sqrtm(root @ v @ root)
        for w, v in zip(weights / weights.sum(), covariances, strict=True)
    )
    return float(np.linalg.norm(covariance - mean) / np.linalg.norm(covariance))


# closed forms


def test_diagonal_is_the_squared_mean_of_the_sds() -> None:
    found = barycenter(
        jnp.array([[0.0, 1.0], [4.0, 1.0]]),
        jnp.array([[1.0, 4.0], [25.0, 4.0]]),
        jnp.array([3.0, 1.0]),
    )
    np.testing.assert_allclose(found.mean, [1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(found.covariance, [4.0, 4.0], rtol=1e-6)
    assert (found.residual, found.num_steps) == (0, 0)


@pytest.mark.parametrize("dim", [1, 3, 20])
def test_commuting_covariances_have_the_closed_form_after_one_step(
    rng: np.random.Generator, dim: int
) -> None:
    variances, means, weights = (
        rng.gamma(2.0, size=(NUMBER, dim)),
        rng.normal(size=(NUMBER, dim)),
        rng.gamma(2.0, size=4),
    )
    rotation = ortho_group.rvs(dim, random_state=rng) if dim > 1 else np.eye(1)
    with jax.enable_x64(True):
        found = barycenter(means, (rotation * variances[:, None]) @ rotation.T, weights)
        diagonal = barycenter(means, variances, weights)
    expected = (weights / weights.sum() @ np.sqrt(variances)) ** 2
    np.testing.assert_allclose(diagonal.covariance, expected, rtol=1e-12)
    np.testing.assert_allclose(found.covariance, (rotation * expected) @ rotation.T, atol=1e-11)
    np.testing.assert_allclose(found.mean, weights / weights.sum() @ means, rtol=1e-12)
    assert found.num_steps == 1


def test_one_gaussian_and_one_hot_weights_return_their_own(rng: np.random.Generator) -> None:
    means, covariances, _ = gaussians(rng, 6)
    with jax.enable_x64(True):
        alone = barycenter(means[2:3], covariances[2:3])
        one_hot = barycenter(means, covariances, np.eye(NUMBER)[2])
    for found in (alone, one_hot):
        np.testing.assert_allclose(found.mean, means[2], rtol=1e-14)
        np.testing.assert_allclose(found.covariance, covariances[2], rtol=1e-11, atol=1e-11)


# the equation


@pytest.mark.parametrize("dim", [2, 10, 100])
def test_residual_is_the_equations_and_small(rng: np.random.Generator, dim: int) -> None:
    means, covariances, weights = gaussians(rng, dim)
    with jax.enable_x64(True):
        found = barycenter(means, covariances, weights)
    covariance = np.asarray(found.covariance)
    assert float(found.residual) <= 1e-6
    np.testing.assert_allclose(
        fixed_point_residual(covariance, covariances, weights), found.residual, rtol=1e-4
    )
    np.testing.assert_allclose(
        covariance, covariance.T, rtol=0, atol=1e-14 * np.abs(covariance).max()
    )
    # negative control: the mean of the covariances is not the barycenter
    assert fixed_point_residual(covariances.mean(0), covariances, weights) > 1e-2


@pytest.mark.parametrize("dim", [2, 10, 100])
def test_equals_ott(rng: np.random.Generator, dim: int) -> None:
    means, covariances, weights = gaussians(rng, dim)
    with jax.enable_x64(True):
        found = barycenter(means, covariances, weights, tol=1e-10)
        points = jnp.concatenate([means, covariances.reshape(NUMBER, -1)], axis=1)
        # a number of steps is given: its tolerance ends it after five whatever it is
        bures = costs.Bures(dim, sqrtm_kw={"threshold": 1e-12})
        theirs, _ = jax.jit(
            lambda *all: bures.barycenter(*all, min_iterations=30, max_iterations=30)
        )(jnp.asarray(weights), points)
    np.testing.assert_allclose(found.mean, theirs[:dim], rtol=1e-10, atol=1e-12)
    size = np.abs(covariances).max()
    np.testing.assert_allclose(found.covariance, theirs[dim:].reshape(dim, dim), atol=1e-9 * size)


def test_a_common_rotation_and_shift_carry_over(rng: np.random.Generator) -> None:
    means, covariances, weights = gaussians(rng, 5)
    rotation, shift = ortho_group.rvs(5, random_state=rng), rng.normal(size=5)
    with jax.enable_x64(True):
        plain = barycenter(means, covariances, weights, tol=1e-12)
        moved = barycenter(
            means @ rotation.T + shift, rotation @ covariances @ rotation.T, weights, tol=1e-12
        )
    np.testing.assert_allclose(moved.mean, rotation @ np.asarray(plain.mean) + shift, atol=1e-12)
    np.testing.assert_allclose(
        moved.covariance, rotation @ np.asarray(plain.covariance) @ rotation.T, atol=1e-9
    )


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_float32_at_any_scale(rng: np.random.Generator, scale: float) -> None:
    means, covariances, weights = gaussians(rng, 10)
    with jax.enable_x64(True):
        exact = barycenter(means, covariances, weights, tol=1e-12).covariance
    found = barycenter(means, jnp.asarray(scale * covariances, jnp.float32), weights)
    assert found.covariance.dtype == found.mean.dtype == jnp.float32
    assert float(found.residual) <= 4 * np.finfo(np.float32).eps * 10**0.5
    np.testing.assert_allclose(
        np.float64(found.covariance) / scale, exact, atol=2e-5 * np.abs(exact).max()
    )


def test_ill_conditioned_float32_ends_before_max_steps(rng: np.random.Generator) -> None:
    rotations = ortho_group.rvs(10, size=NUMBER, random_state=rng)
    covariances = (rotations * np.geomspace(1e-6, 1, 10)) @ rotations.swapaxes(1, 2)
    found = barycenter(
        np.zeros((NUMBER, 10)), jnp.asarray(covariances, jnp.float32), tol=0.0, max_steps=100_000
    )
    assert np.isfinite(found.covariance).all()
    assert found.num_steps < 1000
    assert float(found.residual) < 1e-5


def test_max_steps_ends_the_iteration_with_its_residual(rng: np.random.Generator) -> None:
    means, covariances, weights = gaussians(rng, 10)
    with jax.enable_x64(True):
        found = barycenter(means, covariances, weights, tol=0.0, max_steps=2)
    assert found.num_steps == 2
    expected = fixed_point_residual(np.asarray(found.covariance), covariances, weights)
    np.testing.assert_allclose(found.residual, expected, rtol=1e-6)
    assert float(found.residual) > 1e-6


def test_inside_jit_and_vmap(rng: np.random.Generator) -> None:
    means, covariances, weights = gaussians(rng, 3)

    @jax.jit
    def inside(means: Array, covariances: Array, weights: Array) -> Barycenter:
        return barycenter(means, covariances, weights)

    with jax.enable_x64(True):
        plain, jitted = (f(means, covariances, weights) for f in (barycenter, inside))
        batch = jax.vmap(inside, in_axes=(None, None, 0))(
            means, covariances, jnp.stack([weights, jnp.ones(NUMBER)])
        )
        equal = barycenter(means, covariances)
    np.testing.assert_allclose(jitted.covariance, plain.covariance, rtol=1e-10)
    np.testing.assert_allclose(
        batch.covariance, jnp.stack([plain.covariance, equal.covariance]), rtol=1e-10
    )


# refusals


def test_shapes_are_checked_also_inside_jit() -> None:
    means, covariances = np.zeros((3, 2)), np.tile(np.eye(2), (3, 1, 1))
    with pytest.raises(ValueError, match=r"means of shape \(S, d\).*got \(2,\)"):
        barycenter(means[0], covariances)
    with pytest.raises(
        ValueError,
        match=r"covariances of shape \(3, 2, 2\), or variances of shape \(3, 2\).*got \(2, 2, 2\)",
    ):
        barycenter(means, covariances[:2])
    with pytest.raises(
        ValueError, match=r"one weight for each of the 3 Gaussians, got shape \(2,\)"
    ):
        barycenter(means, covariances, np.ones(2))
    with pytest.raises(ValueError, match=r"got \(2, 2, 2\)"):
        jax.jit(barycenter)(means, covariances[:2])
