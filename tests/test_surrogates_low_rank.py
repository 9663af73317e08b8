"""Surrogates of a diagonal and a few directions, against full matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed.surrogates.gaussian import Gaussian, LowRank, Surrogates, matvec
from numpyro_fed.surrogates.low_rank import principal_factors

DIM = 6
RNG = np.random.default_rng(3)
X = (
    RNG.normal(size=(90, DIM))
    @ np.linalg.cholesky(0.7 ** abs(np.subtract.outer(np.arange(DIM), np.arange(DIM)))).T
)
Y = X @ np.linspace(-1, 1, DIM) + RNG.normal(size=90)
SILOS = fed.split({"x": X, "y": Y}, by=np.repeat(["oslo", "rome", "bern"], [20, 30, 40]))


def linear(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([DIM]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def exact() -> tuple[np.ndarray, np.ndarray]:
    parts = [
        (np.asarray(SILOS[name]["x"], np.float64), np.asarray(SILOS[name]["y"], np.float64))
        for name in SILOS
    ]
    return np.stack([x.T @ y for x, y in parts]), np.stack([x.T @ x for x, _ in parts])


def some(batch: tuple[int, ...] = (3,), rank: int = 2) -> tuple[LowRank, np.ndarray]:
    rng = np.random.default_rng(0)
    diagonal, factor, weight = (
        rng.gamma(2, size=(*batch, 5)),
        rng.normal(size=(*batch, 5, rank)),
        rng.normal(size=(*batch, rank)),
    )
    dense = np.einsum("...ik,...k,...jk->...ij", factor, weight, factor) + diagonal[
        ..., None
    ] * np.eye(5)
    return LowRank(diagonal, factor, weight), dense


def test_it_stands_for_its_full_matrix() -> None:
    with jax.enable_x64(True):
        low, full = some()
        assert (low.ndim, low.rank) == (3, 2)
        vector, columns = np.arange(5.0), RNG.normal(size=(5, 4))
        np.testing.assert_allclose(low.dense(), full, rtol=1e-12)
        np.testing.assert_allclose(low @ vector, full @ vector, rtol=1e-10)
        np.testing.assert_allclose(low @ columns, full @ columns, rtol=1e-10)
        np.testing.assert_allclose(low.sum(0), full.sum(0), rtol=1e-10)
        np.testing.assert_allclose((2.5 * low[1]).dense(), 2.5 * full[1], rtol=1e-12)
        whole = np.eye(5)
        for convert in (np.asarray, jnp.asarray):
            np.testing.assert_allclose(
                convert(whole) - 0.5 * low[1], whole - 0.5 * full[1], rtol=1e-12
            )
            np.testing.assert_allclose(low[1] + convert(whole), whole + full[1], rtol=1e-12)
        np.testing.assert_allclose(low[0] - low[1], full[0] - full[1], rtol=1e-12)
        chosen = jax.jit(lambda low, s, v: matvec(low[s], v))
        np.testing.assert_allclose(
            chosen(jax.tree.map(jnp.asarray, low), 2, vector), full[2] @ vector, rtol=1e-10
        )


def test_a_gaussian_of_low_rank() -> None:
    with jax.enable_x64(True):
        low, full = some()
        eta, theta = RNG.normal(size=(3, 5)), RNG.normal(size=5)
        first, second = Gaussian(eta, low), Gaussian(eta, full)
        assert not first.is_diagonal
        for name in ("mean", "covariance"):
            np.testing.assert_allclose(getattr(first, name), getattr(second, name), rtol=1e-8)
        np.testing.assert_allclose(first.score(theta), second.score(theta), rtol=1e-10)
        prior = Gaussian(np.zeros(5), 50 * np.eye(5))
        product, expected = (Surrogates(q, prior).posterior() for q in (first, second))
        np.testing.assert_allclose(product.precision, expected.precision, rtol=1e-10)
        assert repr(Surrogates(first, prior)) == "Surrogates(3 silos, dimension 5, rank 2)"


def test_principal_factors() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        basis = np.linalg.qr(rng.normal(size=(12, 12)))[0]
        units = rng.gamma(3, size=12)
        spiked = (
            (3 * np.eye(12) + (basis[:, :2] * [40, -7]) @ basis[:, :2].T) / units / units[:, None]
        )
        found = principal_factors(jnp.asarray(spiked), jnp.asarray(units), 2)
        np.testing.assert_allclose(found.dense(), spiked, rtol=1e-8, atol=1e-10)
        x = rng.normal(size=(30, 12)) @ rng.normal(size=(12, 12))
        matrix = x.T @ x
        scale = 1 / np.sqrt(np.diag(matrix))
        gaps = []
        for rank in (1, 3, 6, 12):
            found = principal_factors(jnp.asarray(matrix), jnp.asarray(scale), rank).dense()
            np.testing.assert_allclose(jnp.diagonal(found), np.diag(matrix), rtol=1e-9)
            gaps.append(np.linalg.norm((found - matrix) * scale * scale[:, None]))
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[-1] < 1e-9


@pytest.mark.parametrize("rank", [1, DIM])
def test_a_gaussian_model(rank: int) -> None:
    """The posterior and the silos' diagonals are right for any rank, everything for rank d."""
    found = fed.surrogates.low_rank(linear, SILOS, rank=rank)
    eta, precision = exact()
    law = precision.sum(0) + np.eye(DIM) / 4
    whole = found.posterior()
    np.testing.assert_allclose(whole.precision, law, rtol=1e-4, atol=1e-3)
    own = jnp.diagonal(found.factors.precision.dense(), axis1=1, axis2=2)
    np.testing.assert_allclose(own, np.diagonal(precision, axis1=1, axis2=2), rtol=1e-4)
    gap = np.asarray(whole.mean) - np.linalg.solve(law, eta.sum(0))
    assert gap @ law @ gap < 0.02**2
    if rank == DIM:
        np.testing.assert_allclose(found.factors.precision.dense(), precision, rtol=1e-3, atol=1e-2)
        np.testing.assert_allclose(found.factors.eta, eta, rtol=1e-3, atol=2e-2)
    else:  # negative control
        assert abs(found.factors.precision.dense() - precision).max() > 1


@pytest.mark.parametrize("alpha", [1.0, 0.8])
def test_fsgld_draws_the_posterior(alpha: float) -> None:
    """Also where alpha is not 1, whose conducive gradients need not cancel."""
    given = fed.surrogates.low_rank(linear, SILOS, rank=2)
    settings = {
        "num_warmup": 100,
        "num_samples": 2000,
        "num_chains": 2,
        "chain_method": "vectorized",
        "progress_bar": False,
    }
    mcmc = MCMC(fed.FSGLD(linear, surrogate=given, alpha=alpha), **settings)
    mcmc.run(jax.random.key(0), SILOS)
    eta, precision = exact()
    law = precision.sum(0) + np.eye(DIM) / 4
    sd = np.sqrt(np.diag(np.linalg.inv(law)))
    draws = np.asarray(mcmc.get_samples()["beta"])
    assert (abs(draws.mean(0) - np.linalg.solve(law, eta.sum(0))) < 0.25 * sd).all()
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.1)


def test_without_a_preconditioner_it_is_the_full_matrices_chain() -> None:
    """The same draws, to rounding, as with the matrices it stands for: steps and stays see one law."""
    given = fed.surrogates.low_rank(linear, SILOS, rank=2)
    factors = Gaussian(given.factors.eta, np.asarray(given.factors.precision.dense()))
    draws = []
    for surrogates in (given, Surrogates(factors, given.prior)):
        mcmc = MCMC(
            fed.FSGLD(linear, 1e-3, 5, surrogate=surrogates, preconditioner=None),
            num_warmup=0,
            num_samples=20,
            progress_bar=False,
        )
        mcmc.run(jax.random.key(0), SILOS)
        draws.append(mcmc.get_samples()["beta"])
    np.testing.assert_allclose(*draws, atol=1e-3)


def test_noise_and_alpha_of_low_rank_are_those_of_full_matrices() -> None:
    given = fed.surrogates.low_rank(linear, SILOS, rank=2)
    factors = Gaussian(given.factors.eta, np.asarray(given.factors.precision.dense()))
    full = Surrogates(factors, given.prior)
    theta = RNG.normal(size=(4, DIM))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4),
        *(fed.surrogates.noise(linear, SILOS, q, theta) for q in (given, full)),
    )
    first, second = (fed.surrogates.optimal_alpha(linear, SILOS, q) for q in (given, full))
    assert first == pytest.approx(second, rel=1e-3)


def intercepts(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y)


def test_what_is_refused() -> None:
    for rank in (0, DIM + 1, 2.0, True):
        with pytest.raises(
            ValueError, match=f"rank: expected an integer between 1 and d = {DIM}, got {rank}"
        ):
            fed.surrogates.low_rank(linear, SILOS, rank=rank)
    few = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.ones(2)}})
    with pytest.raises(ValueError, match=r"local latents \['z'\]: expected a model without"):
        fed.surrogates.low_rank(intercepts, few, rank=1)
