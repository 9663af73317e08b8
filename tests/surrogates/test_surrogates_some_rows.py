"""Surrogates fitted to some of the rows have the posterior of all."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed.density.factorize import factorize
from numpyro_fed.surrogates import laplace, score, some_rows
from numpyro_fed.surrogates.gaussian import Gaussian

SIZES = (5000, 2500, 120)  # the last silo has fewer rows than its share


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


@pytest.fixture(scope="module")
def silos():
    rng = np.random.default_rng(0)
    by = np.repeat(np.arange(3), SIZES)
    x = rng.normal(size=(len(by), 3)) + rng.normal(size=(3, 3))[by]
    y = rng.random(len(by)) < 1 / (1 + np.exp(-x @ np.array([0.5, -1.0, 0.3])))
    return fed.split({"x": x.astype(np.float32), "y": y.astype(np.float32)}, by=by)


@pytest.mark.ci
@pytest.mark.parametrize("fit", [score.fit, laplace.fit], ids=["score", "laplace"])
def test_the_posterior_is_that_of_all_rows(silos, fit, monkeypatch):
    """Means are within .1 sd of a fit to all rows, and sds within 20 %.

    The curvature of the sds is that of 900 rows. After one step alone the means are off.
    """
    factors = factorize(logistic, silos)
    whole = fit(factors, silos).surrogates.posterior()
    monkeypatch.setattr(some_rows, "ENOUGH", 900)

    def gap(steps):
        monkeypatch.setattr(some_rows, "_STEPS", steps)
        found = some_rows.fit_some(
            fit, factors, silos, factors.batch_group()
        ).surrogates.posterior()
        sd = np.sqrt(np.diag(whole.covariance))
        np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), sd, rtol=0.2)
        return np.abs(np.asarray(found.mean) - whole.mean).max() / np.mean(sd)

    assert gap(4) < 0.1
    assert gap(1) > 0.1  # negative control


def test_surrogates_that_are_no_density_are_refused_in_words(silos, monkeypatch):
    def bent(factors, silos, units):
        found = laplace.fit(factors, silos, units)
        own = found.surrogates.factors
        return found._replace(
            surrogates=replace(found.surrogates, factors=Gaussian(own.eta, -own.precision))
        )

    monkeypatch.setattr(some_rows, "ENOUGH", 900)
    factors = factorize(logistic, silos)
    with pytest.raises(
        ValueError, match=r"fitted to 900 of the rows are together no density .*or take DSGLD"
    ):
        some_rows.fit_some(bent, factors, silos, factors.batch_group())


def test_each_silo_s_gradient_is_matched_at_the_center(silos, monkeypatch):
    monkeypatch.setattr(some_rows, "ENOUGH", 900)
    factors = factorize(logistic, silos)
    found = some_rows.fit_some(score.fit, factors, silos, factors.batch_group())
    mean = np.asarray(found.surrogates.posterior().mean)
    expected = some_rows.whole_gradients(factors, jnp.asarray(mean, jnp.float32), silos)
    scale = np.asarray(found.posterior_whitening.scale)
    gaps = (found.surrogates.scores(mean[None])[:, 0] - np.asarray(expected)) @ scale
    assert np.abs(gaps).max() < 0.05  # of a whitened score, whose size is 1 for the whole posterior
    assert np.abs(np.asarray(expected) @ scale).max() > 0.5  # silos pull in different directions


@pytest.mark.ci
def test_few_rows_are_fitted_to_as_they_are(silos):
    factors = factorize(logistic, silos)
    found = some_rows.fit_some(score.fit, factors, silos, factors.batch_group()).surrogates
    np.testing.assert_array_equal(
        found.factors.eta, score.fit(factors, silos).surrogates.factors.eta
    )


@pytest.mark.ci
def test_a_run_by_minibatches_has_the_posterior(silos, monkeypatch):
    """Means within 4 standard errors + .02 sd of a run on all rows, sds within 8 %."""
    runs = []
    for enough, options in (
        (900, {"batch_size": 100, "step_size": fed.Step(control_variates=True)}),
        (1 << 15, {}),
    ):
        monkeypatch.setattr(some_rows, "ENOUGH", enough)
        mcmc = MCMC(
            fed.FSGLD(logistic, **options),
            num_warmup=50,
            num_samples=500,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(1), silos)
        runs.append(np.asarray(mcmc.get_samples(group_by_chain=True)["beta"]))
    sd = runs[1].std((0, 1))
    error = [x.std((0, 1)) / np.sqrt(numpyro.diagnostics.effective_sample_size(x)) for x in runs]
    assert (
        np.abs(runs[0].mean((0, 1)) - runs[1].mean((0, 1))) < 4 * np.hypot(*error) + 0.02 * sd
    ).all()
    np.testing.assert_allclose(runs[0].std((0, 1)), sd, rtol=0.08)
