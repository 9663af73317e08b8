"""Moment-matched surrogates against closed forms, and what they refuse."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed
from numpyro_fed.density.factorize import factorize
from numpyro_fed.surrogates import local_draws, score

RNG = np.random.default_rng(11)
X = RNG.normal(size=(40, 2)) @ [[1.0, 1.0], [0.0, 1.0]]
Y = X @ [1.0, -0.5] + 0.5 * RNG.normal(size=40)
SILOS = fed.split({"x": X, "y": Y}, by=np.repeat(["oslo", "rome", "bern"], [5, 11, 24]))
PRIOR_MEAN, PRIOR_SD = 0.5, 0.3
EFFECTIVE = 1000  # draws that 3,000 of either sampler are worth at least, for means and covariances


def linear(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(PRIOR_MEAN, PRIOR_SD).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 0.5), obs=y)


def exact() -> tuple[np.ndarray, np.ndarray]:
    """Return eta and precision of the silos' likelihoods."""
    parts = [
        (np.asarray(SILOS[name]["x"], np.float64), np.asarray(SILOS[name]["y"], np.float64))
        for name in SILOS
    ]
    return np.stack([4 * x.T @ y for x, y in parts]), np.stack([4 * x.T @ x for x, _ in parts])


def errors(found: Any, power: float, divided: bool = True) -> tuple[float, float]:
    """Return largest errors of precisions and of means.

    They are in Monte-Carlo standard errors of the draws' law.
    """
    eta, precision = exact()
    prior = power * np.eye(2) / PRIOR_SD**2
    law = precision + prior
    own = np.asarray(found.factors.precision, np.float64) + (prior if divided else 0)
    variances = np.diagonal(law, axis1=1, axis2=2)
    se = np.sqrt((variances[:, :, None] * variances[:, None] + law**2) / EFFECTIVE)
    center = np.linalg.solve(law, (eta + prior @ np.full(2, PRIOR_MEAN))[..., None])[..., 0]
    shift = prior @ np.full(2, PRIOR_MEAN) if divided else 0
    gap = np.linalg.solve(own, (found.factors.eta + shift)[..., None])[..., 0] - center
    distance = np.sqrt(EFFECTIVE * np.einsum("si,sij,sj->s", gap, law, gap))
    return (abs(own - law) / se).max(), distance.max()


@pytest.mark.parametrize(
    ("method", "prior"),
    [("sgld", 1.0), ("sgld", 0.0), ("sgld", 0.5), pytest.param("nuts", 1.0, marks=pytest.mark.ci)],
)
def test_moments_of_a_gaussian_model_are_its_likelihoods(method: str, prior: float) -> None:
    found = fed.surrogates.moments(linear, SILOS, method=method, prior=prior, seed=1)
    of_precision, of_mean = errors(found, prior)
    assert of_precision < 4
    assert of_mean < 5
    np.testing.assert_allclose(found.prior.precision, np.eye(2) / PRIOR_SD**2, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found.prior.eta, np.full(2, PRIOR_MEAN / PRIOR_SD**2), rtol=1e-3)
    eta, precision = exact()
    whole = found.posterior()
    want = precision.sum(0) + np.eye(2) / PRIOR_SD**2
    gap = whole.mean - np.linalg.solve(want, eta.sum(0) + PRIOR_MEAN / PRIOR_SD**2)
    assert gap @ want @ gap < 0.3**2


def test_the_prior_has_to_be_divided_out() -> None:
    """Negative control: the moments themselves are no likelihood where the prior says anything."""
    found = fed.surrogates.moments(linear, SILOS, seed=1)
    prior = fed.surrogates.Gaussian(np.full(2, PRIOR_MEAN / PRIOR_SD**2), np.eye(2) / PRIOR_SD**2)
    undivided = fed.surrogates.Surrogates(found.factors * prior, found.prior)
    assert min(errors(undivided, 0.0)) > 8
    assert max(errors(undivided, 1.0, divided=False)) < 5


@pytest.mark.ci
def test_the_step_of_local_sgld_leaves_no_bias() -> None:
    """60,000 draws tell a variance 1 / (1 - h/4) too large.

    The negative control is without the factor.
    """
    found = fed.surrogates.moments(linear, SILOS, num_samples=60_000, seed=2)
    law = exact()[1] + np.eye(2) / PRIOR_SD**2
    own = np.asarray(found.factors.precision) + np.eye(2) / PRIOR_SD**2
    ratio = np.mean([np.trace(np.linalg.solve(q, p)) / 2 for p, q in zip(law, own, strict=True)])
    # squares of positions 20 steps apart are correlated by 0.95^40
    rho = 0.95**40
    se = np.sqrt(2 / (6 * 60_000 * (1 - rho) / (1 + rho)))
    assert abs(ratio - 1) < 4 * se
    assert abs(ratio / (1 - local_draws.STEP_SIZE / 4) - 1) > 6 * se


def test_diagonal_moments() -> None:
    full = fed.surrogates.moments(linear, SILOS, prior=0.0, seed=3)
    own = fed.surrogates.moments(linear, SILOS, prior=0.0, seed=3, diagonal=True)
    assert repr(own) == "Surrogates(3 silos, dimension 2, diagonal)"
    variances = np.diagonal(np.linalg.inv(full.factors.precision), axis1=1, axis2=2)
    np.testing.assert_allclose(own.factors.precision, 1 / variances, rtol=1e-3)
    np.testing.assert_allclose(
        own.factors.eta / own.factors.precision, full.factors.mean, rtol=1e-4
    )
    assert own.prior.precision.shape == (2,)


def test_a_seed_is_a_result() -> None:
    first, again, other = (
        fed.surrogates.moments(linear, SILOS, num_samples=480, seed=s) for s in (4, 4, 5)
    )
    np.testing.assert_array_equal(first.factors.eta, again.factors.eta)
    assert (first.factors.eta != other.factors.eta).all()


def intercepts(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y)


@pytest.mark.ci
def test_local_latents_are_drawn_along() -> None:
    y = RNG.normal(1.0, 1.2, 12)
    silos = fed.split({"y": y}, by=np.repeat([0, 1], [4, 8]))
    found = fed.surrogates.moments(intercepts, silos, method="nuts")
    for s, n in enumerate((4, 8)):
        law = n / 1.25 + 1
        assert abs(found.factors.precision[s, 0, 0] + 1 - law) < 4 * law * np.sqrt(2 / EFFECTIVE)
        total = np.asarray(silos[silos.names[s]]["y"], np.float64).sum() / 1.25
        mean = (found.factors.eta[s, 0]) / (found.factors.precision[s, 0, 0] + 1)
        assert abs(mean - total / law) < 4 / np.sqrt(law * EFFECTIVE)
    with pytest.raises(
        ValueError, match=re.escape("local latents ['z']; expected method=\"nuts\"")
    ):
        fed.surrogates.moments(intercepts, silos)
    mcmc = MCMC(
        fed.FSGLD(intercepts, surrogate="moments"),
        num_warmup=50,
        num_samples=1000,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), silos)
    law = 12 / 1.25 + 1
    assert abs(mcmc.get_samples()["mu"].mean() - y.sum() / 1.25 / law) < 0.3 / np.sqrt(law)


def logistic(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def one_label() -> fed.Silos:
    rng = np.random.default_rng(0)
    x = np.stack([np.ones(60), rng.normal(size=60)], 1)
    y = (rng.random(60) < 1 / (1 + np.exp(-x @ [0.5, 1.0]))).astype(int)
    by = np.where((y == 1) & (np.arange(60) % 4 == 0), "ones", "others")
    return fed.split({"x": x, "y": y}, by=by)


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"method": "sgld"}, {"method": "nuts", "num_samples": 200}])
def test_an_improper_law_is_refused_by_the_silo_s_name(options: dict) -> None:
    """One label and the paper's law: the silo's likelihood has no mode."""
    message = (
        r"silo 'ones': the draws of its own posterior (have not converged|are not "
        r"finite).*surrogate=\"score\""
    )
    with pytest.raises(ValueError, match=message):
        fed.surrogates.moments(logistic, one_label(), **options, prior=0.0)
    few = fed.split({"x": X, "y": Y}, by=np.repeat(["one row", "others"], [1, 39]))
    with pytest.raises(
        ValueError,
        match=r"silo 'one row': .*may be improper: expected prior=1\.0 and a proper prior",
    ):
        fed.surrogates.moments(linear, few, **options, prior=0.0)


@pytest.mark.ci
def test_with_the_prior_a_silo_with_one_label_gives_a_density() -> None:
    """Not a good one: its law is skewed, and moments follow the skew. Scores do not."""
    silos = one_label()
    assert set(silos["ones"]["y"].tolist()) == {1}
    found = fed.surrogates.moments(logistic, silos)
    moments = found.posterior()
    scores = score.fit(factorize(logistic, silos), silos).surrogates.posterior()
    nuts = MCMC(NUTS(logistic), num_warmup=300, num_samples=2000, progress_bar=False)
    nuts.run(jax.random.key(0), **silos.pooled)
    draws = np.asarray(nuts.get_samples()["beta"])
    of_moments, of_scores = (
        np.abs((q.mean - draws.mean(0)) / draws.std(0)).max() for q in (moments, scores)
    )
    assert of_scores < 0.3
    assert of_moments < 2


@pytest.mark.ci
def test_fsgld_makes_them_itself() -> None:
    kernel = fed.FSGLD(linear, surrogate="moments")
    mcmc = MCMC(kernel, num_warmup=50, num_samples=1500, progress_bar=False)
    mcmc.run(jax.random.key(0), SILOS)
    given = fed.surrogates.moments(linear, SILOS)
    np.testing.assert_allclose(
        kernel.surrogates.factors.precision, given.factors.precision, rtol=1e-5
    )
    eta, precision = exact()
    law = precision.sum(0) + np.eye(2) / PRIOR_SD**2
    mean = np.linalg.solve(law, eta.sum(0) + PRIOR_MEAN / PRIOR_SD**2)
    draws = np.asarray(mcmc.get_samples()["beta"])
    sd = np.sqrt(np.diag(np.linalg.inv(law)))
    assert (abs(draws.mean(0) - mean) < 0.3 * sd).all()
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.15)
    evaluations = kernel.ledger(mcmc.last_state).gradient_evaluations
    assert min(evaluations) > local_draws.gradients(2, 188)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "hmc"}, 'method: expected "sgld" or "nuts", got \'hmc\''),
        (
            {"num_samples": 319},
            "num_samples: expected an integer of at least 320 for a covariance in dimension d = 2",
        ),
        ({"num_samples": 100.0}, "num_samples: expected an integer .* got 100.0"),
        ({"num_samples": 79, "method": "nuts"}, "num_samples: expected an integer of at least 80"),
        (
            {"prior": 1.5},
            r"prior: expected a power between 0 \(the likelihood alone\) and 1, got 1.5",
        ),
        ({"prior": "flat"}, "prior: expected a power between 0 .* got 'flat'"),
    ],
)
def test_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fed.surrogates.moments(linear, SILOS, **options)


def test_fewer_draws_than_twice_the_dimension() -> None:
    def wide(y: Array) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([200]).to_event(1))
        with fed.silo_plate("patients", y.shape[0]):
            numpyro.sample("y", dist.Normal(beta.sum(), 1), obs=y)

    silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.ones(2)}})
    with pytest.raises(
        ValueError, match=r"at least 400 for a covariance in dimension d = 200 \(2 d, .* got 399"
    ):
        fed.surrogates.moments(wide, silos, num_samples=399)
