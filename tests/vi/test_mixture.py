"""Mixtures of Student laws: their density, their draws, their fit, and draws that they mend."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from marks import heavy
from scipy import stats

import numpyro_fed as fed
from numpyro_fed.vi.mixture import Mixture, fit_mixture

TWO = Mixture(
    np.array([0.3, 0.7]),
    np.array([[0.0, 0.0], [3.0, -1.0]]),
    np.array([[[1.0, 0.0], [0.5, 1.0]], [[0.7, 0.0], [-0.4, 0.5]]]),
)


def density(u):
    each = [
        stats.multivariate_t.pdf(u, m, root @ root.T, df=6)
        for m, root in zip(TWO.loc, TWO.root, strict=True)
    ]
    return TWO.share @ np.stack(each)


def test_its_density_is_that_of_scipy():
    u = np.random.default_rng(0).normal(size=(50, 2)) * 5
    np.testing.assert_allclose(TWO.log_density(u), np.log(density(u)), rtol=1e-10)


def test_draws_have_its_law():
    """Weights of a Gaussian over its draws have mean 1; the control has another center."""
    rng, num = np.random.default_rng(1), 40_000
    u = TWO.wider().draw(rng, num)

    def off(mixture):
        log_normal = stats.multivariate_normal.logpdf(u, [2.0, -0.5], np.eye(2))
        weight = np.exp(log_normal - mixture.log_density(u))
        return abs(weight.mean() - 1) / (weight.std() / num**0.5)

    assert off(TWO.wider()) < 4
    assert off(TWO) > 8


def test_a_fit_finds_the_law_of_its_draws():
    """On new draws its log density is nearly the law's; that of a fit to seven draws is not."""
    rng = np.random.default_rng(2)
    u, new = TWO.draw(rng, 4000), TWO.draw(rng, 4000)
    loss = np.mean(TWO.log_density(new) - fit_mixture(u, rng).log_density(new))
    one = np.mean(TWO.log_density(new) - fit_mixture(u[:7], rng).log_density(new))
    assert 0 <= loss + 0.01 < 0.05
    assert one > 0.2


def test_few_distinct_draws_are_one_wide_part():
    u = np.repeat(np.random.default_rng(3).normal(size=(3, 4)), 100, axis=0)
    mixture = fit_mixture(u, np.random.default_rng(0))
    assert mixture.share.tolist() == [1.0]
    assert np.isfinite(mixture.log_density(np.zeros((1, 4)))).all()


def banana(y):
    """Rows that say nothing of theta: its posterior is the prior, which bends."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("b", dist.Normal(a**2 / 2, 0.4))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)


@pytest.mark.parametrize("remote", heavy([False, True], False))
def test_weights_that_fail_are_mended(monkeypatch, remote):
    """Moments of a and b are those of the prior within 4 Monte-Carlo errors of 2,000 draws."""
    silos = fed.Silos({s: {"y": np.full(3, i, np.float32)} for i, s in enumerate("ab")})
    silos = fed.RemoteSilos(silos, fed.Loopback(silos)) if remote else silos
    key = random.key(2)  # of twelve runs, k was .43 to .78
    idata = fed.fit(banana, silos, method="vi", rng_key=key, progress_bar=False)
    assert idata.posterior.attrs["verdict"] == "sound", idata.posterior.attrs["report"]
    assert idata.posterior.attrs["mixture"] > 0
    a, b = (idata.posterior[k].values.ravel() for k in "ab")
    error = 2000**-0.5
    assert abs(a.mean()) < 4 * error
    assert abs(a.std() - 1) < 4 * error / 2**0.5
    assert abs(b.mean() - 0.5) < 4 * 0.66**0.5 * error
    assert abs(b.std() / 0.66**0.5 - 1) < 8 * error  # b is skewed
    # without mixtures the weights are called unsound
    monkeypatch.setattr("numpyro_fed.results.weighing._MIXTURES", 0)
    with pytest.warns(UserWarning, match=r"Pareto's k .* \(the spread of b\), above 0.7"):
        plain = fed.fit(banana, silos, method="vi", rng_key=key, progress_bar=False)
    assert plain.posterior.attrs["verdict"] == "unsound"
