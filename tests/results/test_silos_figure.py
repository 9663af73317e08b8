"""Figure of silos' coefficients: its intervals are those of the draws, and bad input in words."""

import numpy as np
import pytest
import xarray

import numpyro_fed as fed

NAMES = ["oslo", "rome", "bern"]


def draws(names=NAMES, chains=2):
    shape = chains, 50, len(names)
    values = np.random.default_rng(0).normal(size=shape) + np.arange(len(names))
    coords = {"centers_silo": ("centers", list(names))}
    return xarray.DataArray(values, coords, ("chain", "draw", "centers"), name="z")


def test_intervals_are_those_of_the_draws():
    z, alone = draws(), {"bern": np.arange(101.0)}
    figure = fed.plot_silos(z, alone=alone, pooled=np.zeros(9), prob=0.8)
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == NAMES
    of_one, of_all = (lines.get_segments() for lines in axis.collections[-2:])
    np.testing.assert_allclose(np.array(of_one)[:, :, 0], [[10, 90]])  # tenths of 0 to 100
    assert of_one[0][0, 1] == pytest.approx(2 - 0.12)  # beside bern
    expected = np.quantile(z.values.reshape(-1, 3), [0.1, 0.9], axis=0).T
    np.testing.assert_allclose(np.array(of_all)[:, :, 0], expected)
    assert [t.get_text() for t in figure.legends[0].texts] == ["pooled", "alone", "hierarchical"]


def test_one_chain_is_enough():
    assert len(fed.plot_silos(draws(chains=1)).axes[0].get_yticklabels()) == 3


@pytest.mark.parametrize(
    ("given", "more", "words"),
    [
        (draws().values, {}, "names as a coordinate"),
        (draws(["oslo", "oslo"]), {}, "expected one element in each silo, got 2"),
        (draws(), {"alone": {"paris": np.zeros(3)}}, "alone: expected silos of the fit"),
        (draws(), {"prob": 90}, "prob: expected a probability"),
    ],
)
def test_bad_input_in_words(given, more, words):
    with pytest.raises(ValueError, match=words):
        fed.plot_silos(given, **more)
