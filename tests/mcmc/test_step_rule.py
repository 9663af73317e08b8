"""From noise to steps, exactly: linear chains in one and two dimensions."""

import numpy as np
import pytest
from marks import heavy

from numpyro_fed.mcmc import step_rule
from numpyro_fed.mcmc.step_rule import VisitNoise


def noise(persistent, fresh, draws=4000, length=40, seed=0):
    """Return silos whose e have exactly these covariances of what persists and of what is redrawn.

    The x_s have equal probability.
    """
    rng = np.random.default_rng(seed)
    silos, dim = len(persistent), persistent[0].shape[0]

    def normal(covariances):
        z = rng.normal(size=(silos, draws, dim))
        z -= z.mean((0, 1))
        return np.einsum(
            "sij,snj->sni", np.linalg.cholesky(np.stack(covariances) + 1e-12 * np.eye(dim)), z
        )

    kept = normal(persistent)
    halves = [kept + normal(fresh) * np.sqrt(2 / length) for _ in range(2)]
    return VisitNoise(*halves, length)


def stationary(a, h, steps, persistent, fresh, injected):
    """Return the variance after a visit of v <- a v + h/2 (p + w) + sqrt(h) g xi.

    It is the sum of the series, with p drawn once a visit.
    """
    variance = 0.0
    for _ in range(20_000):
        within = sum(a ** (2 * k) * (h**2 / 4 * fresh + h * injected) for k in range(steps))
        variance = a ** (2 * steps) * variance + (1 - a**steps) ** 2 * persistent + within
    return variance


@pytest.mark.parametrize("steps", heavy([1, 40, 1000], 1000))
def test_the_variance_is_that_of_the_linear_chain(steps):
    h, persistent, fresh = 0.05, 0.3, 2.0
    law = stationary(1 - h / 2, h, steps, persistent, fresh, 1.0)
    n = step_rule.persistence(steps, h) * persistent + fresh
    assert law == pytest.approx((1 + h / 4 * n) / (1 - h / 4), rel=1e-9)
    injected = 1 - h / 4 * (1 + n)
    if injected > 0:
        assert stationary(1 - h / 2, h, steps, persistent, fresh, injected) == pytest.approx(
            1, rel=1e-9
        )
    # negative control: visits that persist without relaxing
    if steps == 1000:
        assert step_rule.persistence(steps, h) < steps / 10


def test_noise_is_put_together_from_silos():
    found = noise([np.diag([0.2, 0.0]), np.diag([0.4, 0.1])], [np.eye(2), 3 * np.eye(2)])
    f = np.array([0.5, 0.5])
    expected = 10 * (np.diag([0.6, 0.1]) * 2 - np.diag([0.6, 0.1])) + 2 * 4 * np.eye(2)
    np.testing.assert_allclose(found.covariance(f, 10), expected, atol=0.15 * expected.max())
    share = found.by_silo(np.eye(2), 10)
    np.testing.assert_allclose(share, [10 * 0.2 + 2, 10 * 0.5 + 6], rtol=0.15)
    drift = 10 * np.diag([0.6, 0.1])
    np.testing.assert_allclose(
        np.trace(found.covariance(f, 10)), 2 * share.sum() - np.trace(drift), rtol=0.1
    )


def test_injection_makes_up_for_the_noise():
    found = noise([np.diag([0.2, 0.0]), np.diag([0.4, 0.1])], [np.eye(2), 3 * np.eye(2)])
    f, h = np.array([0.5, 0.5]), 0.05
    g = step_rule.injection(found, f, 10, h)
    left = g @ g.T + h / 4 * found.covariance(f, 10, h)
    np.testing.assert_allclose(left, (1 - h / 4) * np.eye(2), atol=1e-12)
    with pytest.raises(
        ValueError, match=r"noise_correction: at step_size=3 .* expected a step below 0\.\d+"
    ):
        step_rule.injection(found, f, 10, 3.0)


def test_steps_reach_the_accepted_inflation():
    found = noise([np.eye(1) * 0.5, np.eye(1) * 1.5], [np.eye(1), np.eye(1)])
    f = np.array([0.5, 0.5])
    for b in (0.02, 0.2):
        h = step_rule.step_size(found, f, 20, b)
        assert h < step_rule.MAX_STEP_SIZE
        limit = np.sqrt((1 + h / 4 * found.covariance(f, 20)[0, 0]) / (1 - h / 4))
        assert limit == pytest.approx(1 + b, rel=1e-6)
        assert 1 < step_rule.inflation(found, f, 20, h) < 1 + b  # a visit of finite length relaxes
    h = step_rule.step_size(found, f, 20, 0.02)
    assert step_rule.step_size(found, f, 20, 0.02, corrected=True) == pytest.approx(4 * h)
    quiet = noise([np.zeros((1, 1))] * 2, [np.zeros((1, 1))] * 2)
    assert step_rule.step_size(quiet, f, 20, 0.02) == step_rule.MAX_STEP_SIZE


def test_probabilities_go_with_the_root_of_a_silos_noise():
    """In one dimension N is sum_s X_s / f_s, least at f_s ~ sqrt(X_s)."""
    sizes = np.array([1.0, 4.0, 9.0])
    found = noise([np.zeros((1, 1))] * 3, [np.eye(1) * x for x in sizes])
    f = step_rule.best_selection(found, 10)
    np.testing.assert_allclose(f, np.sqrt(sizes) / np.sqrt(sizes).sum(), rtol=0.05)
    equal = np.full(3, 1 / 3)
    assert found.covariance(f, 10)[0, 0] < 0.9 * found.covariance(equal, 10)[0, 0]
    # no silo is left out, however quiet
    lonely = noise([np.zeros((1, 1))] * 3, [np.eye(1) * x for x in (1e-9, 1.0, 1.0)])
    assert step_rule.best_selection(lonely, 10)[0] == pytest.approx(0.25 / 3, rel=0.1)
