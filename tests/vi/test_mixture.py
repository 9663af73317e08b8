"""Mixtures of Student laws: their density, their draws, their fit, and draws that they mend."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from marks import heavy
from scipy import stats

import numpyro_fed as fed
from numpyro_fed.vi.importance import balanced
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


def test_draws_of_two_proposals_are_weighed_against_both():
    """Weights are p over the mean density of all draws' proposals; equal ones change nothing."""
    rng = np.random.default_rng(4)
    u = [rng.normal(size=30), rng.normal(2, 0.5, size=10)]
    laws = [stats.norm(), stats.norm(2, 0.5)]
    target = stats.norm(1, 1)
    alone = [target.logpdf(x) - law.logpdf(x) for x, law in zip(u, laws, strict=True)]
    found = balanced(alone, [np.stack([law.logpdf(x) for law in laws]) + 7 for x in u])
    for x, weight in zip(u, found, strict=True):
        expected = target.pdf(x) / (0.75 * laws[0].pdf(x) + 0.25 * laws[1].pdf(x))
        np.testing.assert_allclose(np.exp(weight), expected, rtol=1e-10)
    same = balanced([alone[0][:20], alone[0][20:]], [np.zeros((2, 20)), np.zeros((2, 10))])
    np.testing.assert_allclose(np.concatenate(same), alone[0], rtol=1e-12)


def test_a_tail_that_the_last_proposal_lacks_is_kept():
    """Its share is right within 4 Monte-Carlo errors; the last proposal's draws alone miss it."""
    rng, num, tail = np.random.default_rng(5), 5000, 0.02
    target = [stats.norm(), stats.norm(8, 0.3)]
    laws = [stats.t(3, scale=4), stats.norm()]
    u = [law.rvs(num, random_state=rng) for law in laws]
    log_target = [
        np.log((1 - tail) * target[0].pdf(x) + tail * target[1].pdf(x) + 1e-300) for x in u
    ]
    alone = [p - law.logpdf(x) for p, law, x in zip(log_target, laws, u, strict=True)]
    ratios = [np.stack([law.logpdf(x) for law in laws]) for x in u]
    weight = np.exp(np.concatenate(balanced(alone, ratios)))
    there = np.concatenate(u) > 6
    found = np.mean(weight * there)
    assert abs(found - tail) < 4 * np.std(weight * there) / (2 * num) ** 0.5
    assert np.mean(np.exp(alone[1]) * (u[1] > 6)) < tail / 10


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
    key = random.key(2)  # of ten runs, one was unsound, with k .96
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
