"""Gaussian surrogates, marginal likelihoods and the local map.

Against closed forms and fine grids.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array, random
from numpyro.distributions import MultivariateNormal, Normal
from registry import ENTRIES

import numpyro_fed as fed
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.surrogates import Gaussian, Surrogates, laplace, score
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.marginal import laplace_marginal, quadrature_marginal
from numpyro_fed.surrogates.sobol import sobol_normal

RNG = np.random.default_rng(11)

# Gaussians


def gaussians(full: bool, number: int = 3, dim: int = 2) -> Gaussian:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(number, dim, dim))
    precision = (
        root @ root.swapaxes(1, 2) + np.eye(dim) if full else rng.gamma(3.0, size=(number, dim))
    )
    return Gaussian(jnp.asarray(rng.normal(size=(number, dim))), jnp.asarray(precision))


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_gaussian_algebra(full: bool) -> None:
    with jax.enable_x64(True):
        batch = gaussians(full)
        theta = jnp.array([0.3, -0.8])
        assert batch.is_diagonal != full

        def log_prob(q: Gaussian, s: int | None = None) -> Callable:
            mean, covariance = (x if s is None else x[s] for x in (q.mean, q.covariance))
            return MultivariateNormal(mean, covariance if full else jnp.diag(covariance)).log_prob

        for s in range(3):
            np.testing.assert_allclose(
                batch.score(theta)[s], jax.grad(log_prob(batch, s))(theta), rtol=1e-10
            )
        whole = batch.product()
        np.testing.assert_allclose(whole.score(theta), batch.score(theta).sum(0), rtol=1e-10)
        np.testing.assert_allclose(
            jax.grad(log_prob(whole))(theta), batch.score(theta).sum(0), rtol=1e-10
        )
        first, *rest = (Gaussian(batch.eta[s], batch.precision[s]) for s in range(3))
        quotient = whole / rest[0] / rest[1]
        np.testing.assert_allclose(quotient.eta, first.eta, rtol=1e-10)
        np.testing.assert_allclose(quotient.precision, first.precision, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose((first * rest[0] * rest[1]).mean, whole.mean, rtol=1e-10)
        np.testing.assert_allclose(batch.covariance[1], rest[0].covariance, rtol=1e-10)


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_surrogates_are_refused_only_where_their_product_is_no_density(full: bool) -> None:
    factors = gaussians(full)
    prior = Gaussian(jnp.zeros(2), jnp.eye(2) if full else jnp.ones(2))
    surrogates = Surrogates(factors, prior)
    assert (len(surrogates), surrogates.dim) == (3, 2)
    assert repr(surrogates) == f"Surrogates(3 silos, dimension 2, {'full' if full else 'diagonal'})"
    improper = -0.5 * factors.precision[0]
    fine = Gaussian(
        factors.eta, factors.precision.at[0].set(improper).at[1].set(factors.precision[0])
    )
    np.testing.assert_allclose(
        Surrogates(fine, prior).posterior().eta, factors.eta.sum(0), rtol=1e-5
    )
    bad = Gaussian(factors.eta, factors.precision - 50 * prior.precision)
    with pytest.raises(
        ValueError, match=r"not positive definite: smallest eigenvalue -.*expected > 0"
    ):
        Surrogates(bad, prior).posterior()


# Fits


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_scores_that_are_linear_are_fitted_exactly(full: bool) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        points, weights = rng.normal(0.5, 1.0, (40, 2)), rng.random(40)
        precision = np.array([[2.0, 0.7], [0.7, 1.0]]) if full else np.array([2.0, 1.0])
        scores = np.array([0.3, -1.0]) - (points @ precision if full else points * precision)
        scores[7], weights[7] = 1e3, 0.0
        shift, found, misfit = fit_score(*map(jnp.asarray, (points, scores, weights)), full)
        np.testing.assert_allclose(found, precision, rtol=1e-4)
        np.testing.assert_allclose(shift, [0.3, -1.0], rtol=1e-4)
        assert misfit < 1e-4


def random_map(rng: np.random.Generator, **sizes: tuple[int, ...]) -> LocalMap:
    parts = {k: jnp.asarray(0.5 * rng.normal(size=s)) for k, s in sizes.items()}
    return LocalMap(
        tril=jnp.tril(jnp.asarray(rng.normal(size=(5, 3, 3))), -1) + jnp.eye(3), **parts
    )


LINEAR_MAP = {
    "mean": (5, 3),
    "coupling": (5, 3, 2),
    "log_scale": (5, 3),
    "scale_coupling": (5, 3, 2),
}
SHIFTED = {"shift": (5, 3), "shift_coupling": (5, 3, 2)}
BENT = {"shift_curvature": (5, 3, 5), "scale_curvature": (5, 3, 5)}


@pytest.mark.ci
@pytest.mark.parametrize(
    "extra", [{}, SHIFTED, {**SHIFTED, **BENT}], ids=["linear", "shifted", "bent"]
)
def test_a_local_map_is_fitted_as_a_function(extra: dict) -> None:
    """Locations are right to 2 % of the scale in weighted mean square (the ridge).

    Log scales are right to 0.01. The parameters themselves are not unique.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        points, weights = jnp.asarray(rng.normal(size=(200, 2))), jnp.asarray(rng.random(200))
        expected = random_map(rng, **LINEAR_MAP, **extra)
        modes = jnp.stack([expected.location(u) for u in points])
        chols = jnp.stack([expected.tril * expected.scale(u)[:, None, :] for u in points])
        found = fit_map(points, modes, chols, weights)
        np.testing.assert_allclose(found.tril, expected.tril, atol=1e-6)
        log_scales = jax.vmap(found.log_scales)(points) - jax.vmap(expected.log_scales)(points)
        np.testing.assert_allclose(log_scales, 0, atol=0.01)
        errors = jax.vmap(found.inverse)(points, modes)
        assert np.sqrt(np.average(errors**2, axis=0, weights=weights)).max() < 0.02
        swapped = modes[:, ::-1]  # negative control
        assert np.abs(found.inverse(points[0], swapped[0])).max() > 0.5


def test_a_local_map_and_its_inverse() -> None:
    rng = np.random.default_rng(1)
    maps = random_map(rng, **LINEAR_MAP, **SHIFTED, **BENT)
    u, eps = jnp.asarray(rng.normal(size=2)), jnp.asarray(rng.normal(size=(5, 3)))
    np.testing.assert_allclose(maps.inverse(u, maps.forward(u, eps)), eps, atol=1e-4)
    np.testing.assert_allclose(maps.forward(u, jnp.zeros((5, 3))), maps.location(u), atol=1e-5)
    jacobian = jax.jacobian(lambda e: maps.forward(u, e)[0])(eps)[:, 0]
    np.testing.assert_allclose(
        np.linalg.slogdet(jacobian)[1], maps.log_scales(u)[0].sum(), atol=1e-4
    )


# Fits of models whose posterior is known


def linear(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 0.5), obs=y)


X = RNG.normal(size=(12, 2))
Y = X @ [1.0, -0.5] + 0.5 * RNG.normal(size=12)
BY = np.array([0, 1, 1, 1, 2, 2, 2, 2, 2, 1, 2, 1])  # silo 0 has one row
LINEAR = fed.split({"x": X, "y": Y}, by=BY)


def intercepts(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y)


INTERCEPTS = fed.split({"y": Y + 2}, by=BY)


@pytest.mark.parametrize("fit", [score.fit, laplace.fit], ids=["score", "laplace"])
def test_fit_of_a_linear_gaussian_model_is_exact(fit: Callable) -> None:
    found = fit(factorize(linear, LINEAR), LINEAR)
    for s in range(3):
        x, y = X[s == BY], Y[s == BY]
        np.testing.assert_allclose(
            found.surrogates.factors.precision[s], x.T @ x / 0.25, rtol=1e-3, atol=1e-3
        )
        np.testing.assert_allclose(
            found.surrogates.factors.eta[s], x.T @ y / 0.25, rtol=1e-3, atol=1e-3
        )
    np.testing.assert_allclose(found.surrogates.prior.precision, np.eye(2) / 4, atol=1e-3)
    precision = X.T @ X / 0.25 + np.eye(2) / 4
    posterior = found.surrogates.posterior()
    np.testing.assert_allclose(posterior.covariance, np.linalg.inv(precision), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        posterior.mean, np.linalg.solve(precision, X.T @ Y / 0.25), rtol=1e-4
    )
    whitening = found.posterior_whitening
    np.testing.assert_allclose(whitening.loc, posterior.mean, rtol=1e-4)
    np.testing.assert_allclose(whitening.scale @ whitening.scale.T, posterior.covariance, rtol=1e-3)
    assert found.local_map is None
    assert (found.misfit < 1e-3).all()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("fit", "group"),
    [(score.fit, "rows"), (score.fit, None), (laplace.fit, "rows")],
    ids=["score of elements", "score of silos", "laplace of elements"],
)
def test_fit_of_random_intercepts_is_exact(fit: Callable, group: str | None) -> None:
    """Marginally y ~ N(mu, 1 + 1/4), and z given mu ~ N((mu + 4 y) / 5, 1/5)."""
    factors = factorize(intercepts, INTERCEPTS)
    units = Units(factors, group, largest(INTERCEPTS))
    found = fit(factors, INTERCEPTS, units)
    y = np.asarray(INTERCEPTS.rows["y"])
    n, total = np.bincount(BY), np.bincount(BY[np.argsort(BY, kind="stable")], y)
    np.testing.assert_allclose(found.surrogates.factors.precision[:, 0, 0], n / 1.25, rtol=1e-3)
    np.testing.assert_allclose(found.surrogates.factors.eta[:, 0], total / 1.25, rtol=1e-3)
    # the map at any u is the law of z given mu
    u, eps = jnp.array([0.7]), random.normal(random.key(0), found.local_map.mean.shape)
    mu = (found.map_whitening.loc + found.map_whitening.scale @ u)[0]
    z = found.local_map.forward(u, eps)
    expected = np.asarray(INTERCEPTS.pooled["y"])
    pooled = units.to_pooled(z, INTERCEPTS)["z"]
    noise = units.to_pooled(eps, INTERCEPTS)["z"]
    np.testing.assert_allclose(
        pooled, (mu + 4 * expected) / 5 + noise * 0.2**0.5, rtol=2e-3, atol=2e-3
    )
    np.testing.assert_allclose(found.local_map.scale_coupling, 0, atol=1e-3)


def logistic(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


@pytest.mark.ci
def test_a_silo_with_one_label() -> None:
    """Its own likelihood has no mode; the sum of surrogates is a density near the posterior."""
    rng = np.random.default_rng(0)
    x = np.stack([np.ones(60), rng.normal(size=60)], 1)
    y = (rng.random(60) < 1 / (1 + np.exp(-x @ [0.5, 1.0]))).astype(int)
    silos = fed.split(
        {"x": x, "y": y}, by=np.where((y == 1) & (np.arange(60) % 2 == 0), 0, 1 + np.arange(60) % 2)
    )
    assert set(silos["0"]["y"].tolist()) == {1}
    found = score.fit(factorize(logistic, silos), silos)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found.surrogates))
    posterior = found.surrogates.posterior()
    axis = np.linspace(-4, 4, 401)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    logits = grid @ x.T
    log_density = (y * logits - np.logaddexp(0, logits)).sum(1) - (grid**2).sum(1) / 8
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ grid
    sd = np.sqrt(weight @ (grid - mean) ** 2)
    # a Gaussian of a skewed posterior: near, not equal
    np.testing.assert_allclose(posterior.mean, mean, atol=0.3 * sd.min())
    np.testing.assert_allclose(np.sqrt(np.diag(posterior.covariance)), sd, rtol=0.15)


# Marginal likelihoods


def conjugate(y: np.ndarray) -> Callable[[Array, Array], Array]:
    """Terms of z ~ N(u0, exp(u1)), y ~ N(z, 0.5)."""

    def log_density(u: Array, z: Array) -> Array:
        return (Normal(u[0], jnp.exp(u[1])).log_prob(z) + Normal(z, 0.5).log_prob(y[:, None]))[:, 0]

    return log_density


@pytest.mark.parametrize("marginal", [quadrature_marginal, laplace_marginal])
def test_marginal_of_a_conjugate_model_is_its_closed_form(marginal: Callable) -> None:
    with jax.enable_x64(True):
        y, u = Y[:5], jnp.array([0.4, -0.3])
        owned = jnp.ones((5, 1), bool)
        value, slope, found = jax.jit(marginal, static_argnums=0)(
            conjugate(y), u, jnp.zeros((5, 1)), owned
        )

        def closed(u: Array) -> Array:
            return Normal(u[0], jnp.sqrt(jnp.exp(2 * u[1]) + 0.25)).log_prob(y).sum()

        expected, expected_slope = jax.value_and_grad(closed)(u)
        np.testing.assert_allclose(value, expected, rtol=1e-9)
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-8)
        precision = np.exp(0.6) + 4
        np.testing.assert_allclose(
            found.location[:, 0], (0.4 * np.exp(0.6) + 4 * y) / precision, rtol=1e-8
        )
        np.testing.assert_allclose(found.chol[:, 0, 0], precision**-0.5, rtol=1e-8)


@pytest.mark.parametrize("marginal", [quadrature_marginal, laplace_marginal])
def test_padding_adds_nothing_to_a_marginal(marginal: Callable) -> None:
    with jax.enable_x64(True):
        u, n = jnp.array([0.4, -0.3]), 5
        owned = jnp.arange(8)[:, None] < n
        padded = jnp.asarray(np.append(Y[:n], [9.0, 9.0, 9.0]))

        def log_density(u: Array, z: Array) -> Array:
            return jnp.where(owned[:, 0], conjugate(padded)(u, z), -0.5 * z[:, 0] ** 2)

        run = jax.jit(marginal, static_argnums=0)
        first = run(log_density, u, jnp.zeros((8, 1)), owned)
        second = run(conjugate(Y[:n]), u, jnp.zeros((n, 1)), owned[:n])
        np.testing.assert_allclose(first[0], second[0], rtol=1e-9)
        np.testing.assert_allclose(first[1], second[1], rtol=1e-9)


BINARY = np.array([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]])


def bernoulli(u: Array, z: Array) -> Array:
    """Terms of z ~ N(u0, exp(u1)) and four binary visits of each child."""
    visits = z * BINARY - jnp.logaddexp(0.0, z)
    return Normal(u[0], jnp.exp(u[1])).log_prob(z)[:, 0] + visits.sum(1)


def on_a_grid(u: Array) -> tuple[Array, Array, Array]:
    """Value, mean and variance by 4,001 points a child."""
    z = jnp.linspace(-30.0, 30.0, 4001)
    terms = jax.vmap(lambda point: bernoulli(u, jnp.full((3, 1), point)))(z)
    weight = jax.nn.softmax(terms, axis=0)
    mean = z @ weight
    return (
        jax.nn.logsumexp(terms, axis=0).sum() + 3 * jnp.log(z[1] - z[0]),
        mean,
        z**2 @ weight - mean**2,
    )


@pytest.mark.parametrize("log_tau", [-1.0, 0.0, 0.8])
def test_quadrature_of_binary_data_is_that_of_a_fine_grid(log_tau: float) -> None:
    with jax.enable_x64(True):
        u, start = jnp.array([-1.0, log_tau]), jnp.zeros((3, 1))
        value, slope, found = jax.jit(quadrature_marginal, static_argnums=0)(
            bernoulli, u, start, start == 0
        )
        expected, mean, variance = jax.jit(on_a_grid)(u)
        expected_slope = jax.jit(jax.grad(lambda u: on_a_grid(u)[0]))(u)
        np.testing.assert_allclose(value, expected, atol=2e-5)
        np.testing.assert_allclose(slope, expected_slope, atol=5e-5)
        np.testing.assert_allclose(found.location[:, 0], mean, atol=5e-5)
        np.testing.assert_allclose(found.chol[:, 0, 0] ** 2, variance, rtol=5e-5)
        laplace_value = jax.jit(laplace_marginal, static_argnums=0)(
            bernoulli, u, start, start == 0
        )[0]
        assert log_tau < 0 or abs(laplace_value - expected) > 1e-2  # negative control


def test_laplace_gradient_is_that_of_its_value() -> None:
    """The motion of the mode and of the determinant included."""
    with jax.enable_x64(True):
        start = jnp.zeros((1, 3))

        def joint(u: Array, z: Array) -> Array:
            return jnp.sum(bernoulli(u, z.T))[None]

        run = jax.jit(lambda u: laplace_marginal(joint, u, start, start == 0)[:2])
        u, step = jnp.array([-1.0, 0.5]), 1e-5
        slope = run(u)[1]
        for axis in range(2):
            shift = step * jnp.eye(2)[axis]
            np.testing.assert_allclose(
                slope[axis], (run(u + shift)[0] - run(u - shift)[0]) / (2 * step), rtol=1e-6
            )


def test_quadrature_over_two_latents() -> None:
    """Intercept and slope, conjugate: 64 antithetic points have the mean exactly.

    The rest is right to some percent.
    """
    with jax.enable_x64(True):
        x = jnp.asarray(X[:6].reshape(2, 3, 2))
        y = jnp.asarray(Y[:6].reshape(2, 3))
        u = jnp.array([0.5])

        def log_density(u: Array, z: Array) -> Array:
            likelihood = Normal((x @ z[..., None])[..., 0], 0.5).log_prob(y).sum(1)
            return Normal(u[0], 1.0).log_prob(z).sum(1) + likelihood

        def closed(u: Array) -> Array:
            covariance = x @ jnp.swapaxes(x, 1, 2) + 0.25 * jnp.eye(3)
            return MultivariateNormal(u[0] * x.sum(-1), covariance).log_prob(y).sum()

        run = jax.jit(
            lambda u: quadrature_marginal(log_density, u, jnp.zeros((2, 2)), jnp.ones((2, 2), bool))
        )
        value, slope, found = run(u)
        expected, expected_slope = jax.jit(jax.value_and_grad(closed))(u)
        np.testing.assert_allclose(value, expected, atol=0.05)
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-6)
        precision = jnp.eye(2) + 4 * jnp.swapaxes(x, 1, 2) @ x
        mean = jnp.linalg.solve(precision, (0.5 + 4 * jnp.einsum("eij,ei->ej", x, y))[..., None])[
            ..., 0
        ]
        np.testing.assert_allclose(found.location, mean, rtol=1e-6)
        np.testing.assert_allclose(
            found.chol @ jnp.swapaxes(found.chol, 1, 2),
            jnp.linalg.inv(precision),
            rtol=0.1,
            atol=0.01,
        )


def test_sobol_points_are_antithetic() -> None:
    points = sobol_normal(64, 3, seed=1)
    np.testing.assert_array_equal(points[:32], -points[32:])
    np.testing.assert_array_equal(points, sobol_normal(64, 3, seed=1))
    assert (points != sobol_normal(64, 3, seed=2)).any()
    np.testing.assert_allclose((points**2).mean(0), 1, atol=0.1)


# The local map


def test_local_map_and_its_inverse() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        shapes = {
            "mean": (5, 3),
            "coupling": (5, 3, 2),
            "log_scale": (5, 3),
            "scale_coupling": (5, 3, 2),
        }
        parts = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
        tril = jnp.tril(jnp.asarray(rng.normal(size=(5, 3, 3))), -1) + jnp.eye(3)
        local_map = LocalMap(tril=tril, **parts)
        u, eps = jnp.array([0.3, -0.4]), jnp.asarray(rng.normal(size=(5, 3)))
        z = local_map.forward(u, eps)
        np.testing.assert_allclose(local_map.inverse(u, z), eps, rtol=1e-10)
        np.testing.assert_allclose(
            local_map.forward(u, jnp.zeros((5, 3))), parts["mean"] + parts["coupling"] @ u
        )
        jacobian = jax.jacfwd(lambda e: local_map.forward(u, e))(eps)
        for g in range(5):
            np.testing.assert_allclose(
                jnp.linalg.slogdet(jacobian[g, :, g])[1],
                local_map.log_scales(u)[g].sum(),
                rtol=1e-10,
            )


UNITS = [
    ("women_in_districts", "districts"),
    ("nested_plates", "rows"),
    ("silo_plate_innermost", "rows"),
    ("nested_plates", None),
    ("silo_plate_innermost", None),
    ("pupils_in_classes_in_schools", None),
]


def units_of(name: str, group: str | None) -> tuple[fed.Silos, Factors, Units, Any]:
    silos = ENTRIES[name].silos()
    factors = factorize(ENTRIES[name].model, silos)
    units = Units(factors, group, largest(silos))
    count = len(silos) if group is None else sum(silos.sizes[group])
    return (
        silos,
        factors,
        units,
        np.random.default_rng(0).normal(size=(count, units.dim)).astype(np.float32),
    )


@pytest.mark.parametrize(("name", "group"), UNITS)
def test_units_and_pooled_sites(name: str, group: str | None) -> None:
    silos, factors, units, z = units_of(name, group)
    pooled = units.to_pooled(z, silos)
    groups = factors.local_groups()
    for site in factors.local_sites:
        shape = list(site.shape)
        shape.insert(site.axis, sum(silos.sizes[groups[site.name]]))
        assert pooled[site.name].shape == tuple(shape)
    back = units.from_pooled(pooled, silos)
    views = [SiloView(silos, jnp.asarray(s), largest(silos)) for s in range(len(silos))]
    owned = (
        np.concatenate([units.owned(v) for v in views]) if group is None else np.ones(z.shape, bool)
    )
    assert owned.sum() == sum(x.size for x in pooled.values())
    np.testing.assert_array_equal(back, np.where(owned, z, 0.0))
    again = units.to_pooled(back, silos)
    jax.tree.map(np.testing.assert_array_equal, again, pooled)
    sites = units.to_sites(z[:2])
    np.testing.assert_array_equal(units.from_sites(sites), z[:2])


@pytest.mark.parametrize(("name", "group"), UNITS[:1] + UNITS[-1:])
def test_log_density_of_units(name: str, group: str | None) -> None:
    """They sum to the silo's term, padding standard normal."""
    silos, factors, units, _ = units_of(name, group)
    rng = np.random.default_rng(0)
    theta = factors.unravel(0.3 * random.normal(random.key(0), (factors.dim,)))
    for number in range(len(silos)):
        view = SiloView(silos, jnp.asarray(number), largest(silos))
        kwargs, weights = view.whole()
        owned = np.asarray(units.owned(view))
        z = rng.normal(size=owned.shape).astype(np.float32)
        terms = units.log_density(theta, z, kwargs, weights, view)
        assert terms.shape == owned.shape[:1]
        expected = (
            factors.log_local(theta, units.to_sites(z), kwargs, weights)
            - 0.5 * (z[~owned] ** 2).sum()
        )
        np.testing.assert_allclose(terms.sum(), expected, rtol=1e-5)


def test_identity_of_a_unit_is_its_pooled_row() -> None:
    silos, _, units, _ = units_of("women_in_districts", "districts")
    for number, name in enumerate(silos):
        view = SiloView(silos, jnp.asarray(number), largest(silos))
        own = units.identity(view)[: silos.sizes["districts"][number]]
        np.testing.assert_array_equal(silos.pooled["districts"][own], silos[name]["districts"])
