"""The exact sampler: its law, in counts that are whole numbers, and that a key determines it."""

import math

import numpy as np
import pytest
from scipy.stats import chi2

from numpyro_fed.privacy.discrete_gaussian import (
    MOST_SD,
    Words,
    _below,
    _bernoulli_exp,
    _geometric,
    discrete_gaussian,
)


def words(number):
    return Words(number.to_bytes(32, "little"))


def misfit(counts, probabilities):
    """Pearson's statistic over its 1 - 1e-6 quantile: below one for the right law."""
    expected = counts.sum() * probabilities
    return ((counts - expected) ** 2 / expected).sum() / chi2.ppf(1 - 1e-6, len(counts) - 1)


@pytest.mark.parametrize("sd", [1, 2, 5, 20])
def test_draws_have_the_law(sd):
    """The control is the normal distribution, rounded: of a small sd it is another law."""
    num, edge = 200_000, 3 * sd
    values = np.arange(-edge, edge + 1)
    weights = np.exp(-0.5 * (np.arange(-12 * sd, 12 * sd + 1) / sd) ** 2)
    law = np.exp(-0.5 * (values / sd) ** 2) / weights.sum()
    law[[0, -1]] += (1 - law.sum()) / 2  # tails count for the edges

    def counts(draws):
        return np.bincount(np.clip(draws, -edge, edge) + edge, minlength=len(values))

    assert misfit(counts(discrete_gaussian(words(sd), sd, num)), law) < 1
    rounded = np.rint(sd * np.random.default_rng(0).normal(size=num)).astype(np.int64)
    if sd <= 2:
        assert misfit(counts(rounded), law) > 1


@pytest.mark.parametrize("sd", [100, 2**18, MOST_SD])
def test_draws_of_a_large_sd_are_normal(sd):
    draws = discrete_gaussian(words(1), sd, 50_000) / sd
    # 5 standard errors
    assert abs(draws.mean()) < 5 / math.sqrt(50_000)
    assert abs((draws**2).mean() - 1) < 5 * math.sqrt(2 / 50_000)
    assert abs((draws**4).mean() - 3) < 5 * math.sqrt(96 / 50_000)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.5])
def test_coins_have_their_probability(gamma):
    num, p = 100_000, math.exp(-gamma)
    heads = _bernoulli_exp(words(2), np.full(num, int(gamma * 1000)), 1000).mean()
    assert abs(heads - p) <= 5 * math.sqrt(p * (1 - p) / num)  # 5 standard errors


def test_successes_and_uniform_numbers_have_their_laws():
    num = 100_000
    law = np.exp(-np.arange(8.0)) * -np.expm1(-1)
    law[-1] = math.exp(-7)  # and more
    assert misfit(np.bincount(np.minimum(_geometric(words(3), num), 7), minlength=8), law) < 1
    assert misfit(np.bincount(_below(words(4), 7, num), minlength=7), np.full(7, 1 / 7)) < 1
    # of words in [0, 2^63) one in four is beyond the last whole multiple of 3 2^61
    large = _below(words(5), 3 * 2**61, num) / (3 * 2**61)
    assert misfit(np.histogram(large, 12, (0, 1))[0], np.full(12, 1 / 12)) < 1


def test_a_key_determines_its_draws_and_no_others():
    one, again, other = (discrete_gaussian(words(i), 1000, 500) for i in (6, 6, 7))
    np.testing.assert_array_equal(one, again)
    assert (one != other).mean() > 0.99
    assert one.dtype == np.int64
    assert len(discrete_gaussian(words(6), 1000, 0)) == 0
    assert (discrete_gaussian(words(6), 0, 5) == 0).all()


@pytest.mark.parametrize("sd", [-1, MOST_SD + 1])
def test_an_sd_out_of_range_is_refused(sd):
    with pytest.raises(ValueError, match=r"sd: expected a whole number from 0 to 33554432, got"):
        discrete_gaussian(words(0), sd, 1)
