"""Gradient estimators on Bernoulli silos.

The library's own, enumerated over all minibatches, against closed forms.
"""

from functools import partial
from pathlib import Path

import bernoulli_variance as bernoulli
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import stats

THETA = np.array([0.1, 0.35, 0.8])


def test_the_silos_tosses_are_those_of_a_fair_coin() -> None:
    rows = bernoulli.silos()
    assert [np.asarray(rows[name]["y"]).mean().round(6) for name in rows] == [
        np.float32(p) for p in (0.1, 0.5, 0.9)
    ]
    assert rows.pooled["y"].shape == (30,)
    assert rows.pooled["y"].sum() == 15


@partial(jax.jit, static_argnames=("config",))
def gradients(config, tuning, silos, thetas, numbers, batches):
    def one(theta, number, y):
        return bernoulli.gradient(config, tuning, silos, theta, number, {"y": y})

    over_batches = jax.vmap(one, in_axes=(None, None, 0))
    over_silos = jax.vmap(over_batches, in_axes=(None, 0, None))
    return jax.vmap(over_silos, in_axes=(0, None, None))(thetas, numbers, batches)


def enumerated(own: bernoulli.Estimator) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance at each THETA.

    They are over the silos, and over the numbers of heads among five tosses with replacement.
    """
    heads = np.arange(6)
    batches = (np.arange(5) < heads[:, None]).astype(np.float32)
    found = gradients(
        *own[:3], jnp.asarray(THETA, jnp.float32), jnp.arange(len(own.silos)), jnp.asarray(batches)
    )
    chances = [np.asarray(own.silos[name]["y"], float).mean() for name in own.silos]
    weights = np.stack([stats.binom.pmf(heads, 5, p) for p in chances]) / len(chances)
    values = np.asarray(found, np.float64)
    mean = (weights * values).sum((1, 2))
    return mean, (weights * (values - mean[:, None, None]) ** 2).sum((1, 2))


@pytest.mark.ci
@pytest.mark.parametrize("method", bernoulli.METHODS)
def test_the_librarys_estimators_have_the_closed_forms_mean_and_variance(method: str) -> None:
    own = bernoulli.estimator(method)
    mean, variance = enumerated(own)
    expected = bernoulli.variance(method, THETA, own.surrogates)
    np.testing.assert_allclose(mean, 15 / THETA - 15 / (1 - THETA), rtol=1e-3, atol=0.02)
    np.testing.assert_allclose(variance, expected, rtol=1e-3)
    # negative control: the others' closed forms
    if method != "SGLD":
        assert (abs(variance / bernoulli.variance("SGLD", THETA) - 1) > 0.1).all()
    if method.startswith("FSGLD"):
        assert (variance < 0.9 * bernoulli.variance("DSGLD", THETA)).all()


def test_closed_forms_by_hand_at_one_half() -> None:
    """With D = 4, N = 30 and m = 5, p(1 - p) is 1/4 in the pool and 0.43 / 3 in silos.

    The silos' means have variance 0.32 / 3.
    """
    half = np.array([0.5])
    assert bernoulli.variance("SGLD", half) == pytest.approx(120**2 * 0.25 / 5)
    assert bernoulli.variance("DSGLD", half) == pytest.approx(120**2 * (0.43 / 15 + 0.32 / 3))


@pytest.mark.ci
def test_score_matching_leaves_minibatches_noise_alone_and_moments_do_not() -> None:
    methods = ("FSGLD", "FSGLD, moments")
    left = [
        bernoulli.variance(method, THETA, bernoulli.estimator(method).surrogates)
        for method in methods
    ]
    within = (30 / (THETA * (1 - THETA))) ** 2 * 0.43 / 15
    np.testing.assert_allclose(left[0], within, rtol=1e-4)
    assert (left[1] > 1.5 * within).all()


@pytest.mark.ci
def test_quick(tmp_path: Path) -> None:
    frame = bernoulli.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 0
    assert isinstance(frame, pd.DataFrame)
    count = 1_000
    # sums of few tosses: kurtosis is below that of a normal, whose sample variance has relative sd
    # sqrt(2 / n)
    ratio = (frame["sd"] / frame["closed form"]) ** 2
    assert (abs(ratio - 1) < 4.5 * (2 / count) ** 0.5).all(), ratio
    assert (
        abs(frame["mean"] - frame["gradient"]) < 4.5 * frame["closed form"] / count**0.5
    ).all(), frame
    wrong = (frame.loc["DSGLD"]["sd"] / frame.loc["SGLD"]["closed form"]) ** 2  # negative control
    assert (abs(wrong - 1) > 10 * (2 / count) ** 0.5).all()
