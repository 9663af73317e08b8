"""Bounded corrections of surrogates: their fit and their place in the kernel.

They change no law.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from small_models import view_of

import numpyro_fed as fed
from numpyro_fed.density.bounded_features import features, num_features
from numpyro_fed.mcmc import gradients, pilot
from numpyro_fed.surrogates.corrections import Corrections, regress


def counts(y):
    """Sample a mean and the scale of its prior: flat in log tau on one side."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    mu = numpyro.sample("mu", dist.Normal(0, tau).expand([2]).to_event(1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(mu)).to_event(1), obs=y)


@pytest.fixture(scope="module")
def setup():
    y = np.random.default_rng(0).poisson(2, size=(30, 2))
    silos = fed.split({"y": y}, by=np.repeat([0, 1, 2], [3, 9, 18]))
    kernel = fed.FSGLD(counts, selection=[0.2, 0.3, 0.5])
    kernel.init(random.key(0), 0, model_args=(silos,))
    return kernel, silos


def test_features_are_bounded_and_linear_near_zero():
    for dim in (1, 4):
        far = features(1e6 * random.normal(random.key(0), (50, dim)))
        assert far.shape == (50, num_features(dim))
        assert np.abs(far).max() <= 3.0
    near = 1e-3 * random.normal(random.key(1), (5, 3))
    np.testing.assert_allclose(features(near)[:, 1:4], near, rtol=1e-4)


def test_regression_finds_what_is_in_the_span():
    rng = np.random.default_rng(0)
    points, truth = (
        jnp.asarray(rng.normal(size=(256, 3))),
        jnp.asarray(rng.normal(size=(num_features(3), 3))),
    )
    scores = features(points) @ truth
    found = regress(points, scores, jnp.ones(256))
    np.testing.assert_allclose(features(points) @ found, scores, atol=0.03)
    assert np.abs(features(points) @ found - scores).max() < 0.02 * np.abs(scores).max()


def test_scores_are_those_of_the_coordinates():
    rng = np.random.default_rng(1)
    whiten, loc = rng.normal(size=(2, 2)), rng.normal(size=2)
    corrections = Corrections(
        jnp.asarray(loc), jnp.asarray(whiten), jnp.asarray(rng.normal(size=(3, num_features(2), 2)))
    )
    theta = rng.normal(size=2)
    psi = np.asarray(features(jnp.asarray(whiten @ (theta - loc))))
    expected = [whiten.T @ (psi @ np.asarray(c)) for c in corrections.coefficients]
    np.testing.assert_allclose(corrections.score(jnp.asarray(theta)), expected, rtol=1e-4)
    np.testing.assert_allclose(
        corrections.of(corrections.coefficients[1]).score(jnp.asarray(theta)),
        expected[1],
        rtol=1e-4,
    )


@pytest.mark.ci
def test_they_cancel_in_the_mean_over_silos(setup):
    """With and without them sum_s f_s drift_s is the same.

    At a point well inside, and at one far away.
    """
    kernel, silos = setup
    config, tuning = kernel._config, kernel._tuning._replace(cut=jnp.asarray(jnp.inf))
    assert kernel.surrogates.corrections is not None
    assert "corrected" in repr(kernel.surrogates)
    straight = tuning._replace(
        conducive=tuning.conducive._replace(corrections=None, total_corrections=None)
    )
    f = np.asarray(tuning.selection)
    for theta in (tuning.loc, tuning.loc + 3 * gradients.push(tuning, jnp.ones(3))):
        means, parts = [], []
        for numbers in (tuning, straight):
            each = []
            for s in range(3):
                view = view_of(silos, s)
                silo = gradients.open_silo(config, numbers, None, view)
                each.append(
                    np.asarray(
                        gradients.drift(config, numbers, theta, None, silo, view)[0], np.float64
                    )
                )
            means.append(f @ np.stack(each))
            parts.append(np.stack(each))
        np.testing.assert_allclose(means[0], means[1], rtol=1e-3, atol=1e-3)
        assert (
            np.abs(parts[0] - parts[1]).max() > 0.03
        )  # negative control: silo by silo they differ


@pytest.mark.ci
def test_they_take_away_noise(setup):
    kernel, silos = setup
    config, tuning = kernel._config, kernel._tuning
    straight = tuning._replace(
        conducive=tuning.conducive._replace(corrections=None, total_corrections=None)
    )
    f = np.asarray(tuning.selection, float)
    bent, plain = (
        np.linalg.eigvalsh(pilot.visit_noise(config, t, silos).covariance(f, 40))[-1]
        for t in (tuning, straight)
    )
    assert bent < 0.5 * plain


@pytest.mark.ci
def test_surrogates_scores_have_them(setup):
    kernel, _ = setup
    surrogates, theta = kernel.surrogates, kernel._tuning.loc
    expected = np.asarray(surrogates.factors.score(theta)) + np.asarray(
        surrogates.corrections.score(theta)
    )
    np.testing.assert_allclose(surrogates.score(theta), expected, rtol=1e-5)
    two = np.stack([np.asarray(theta, float), np.zeros(3)])
    np.testing.assert_allclose(surrogates.scores(two)[:, 0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        surrogates.scores(two)[:, 1], surrogates.score(np.zeros(3)), rtol=1e-4, atol=1e-4
    )
    assert jax.tree.leaves(surrogates.corrections)[2].shape == (3, num_features(3), 3)
