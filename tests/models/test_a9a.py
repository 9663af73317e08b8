"""The model of a9a: its parser, its ROC-AUC, and a quick run."""

import itertools
import os
from pathlib import Path

import a9a_logistic
import matplotlib.pyplot as plt
import numpy as np
import pytest

HAVE_DATA = "NUMPYRO_FED_DATA" in os.environ


def test_libsvm_text_is_read() -> None:
    x, y = a9a_logistic.read_libsvm(["-1 3:1 5:0.5 \n", "+1 1:2\n", "\n", "1\n", "0 4:-1e-1\n"], 6)
    expected = [[0, 0, 1, 0, 0.5, 0], [2, 0, 0, 0, 0, 0], [0] * 6, [0, 0, 0, -0.1, 0, 0]]
    np.testing.assert_array_equal(x, np.array(expected, np.float32))
    np.testing.assert_array_equal(y, [0, 1, 1, 0])
    with pytest.raises(IndexError):  # an index beyond what was announced
        a9a_logistic.read_libsvm(["1 7:1"], 6)


@pytest.mark.parametrize("levels", [3, 20, 10_000])
def test_auc_is_the_brute_force_count(levels: int) -> None:
    rng = np.random.default_rng(levels)
    label = rng.integers(0, 2, 200)
    score = rng.integers(0, levels, 200) + label * rng.integers(0, levels // 2 + 1, 200)
    pairs = list(itertools.product(score[label == 1], score[label == 0]))
    wins = sum(1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs)
    assert a9a_logistic.auc(score, label) == pytest.approx(wins / len(pairs), abs=1e-12)
    assert a9a_logistic.auc(-score, label) == pytest.approx(1 - wins / len(pairs), abs=1e-12)
    assert a9a_logistic.auc(np.zeros(200), label) == 0.5


def test_laplace_is_a_mode() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4))
    y = (x[:, 0] + rng.logistic(size=300) > 0).astype(float)
    mode, covariance = a9a_logistic.laplace(x, y, 2.0)

    def slope(w: np.ndarray) -> np.ndarray:
        return x.T @ (1 / (1 + np.exp(-x @ w)) - y) + w / 2

    np.testing.assert_allclose(slope(mode), 0, atol=1e-9)
    numeric = np.stack([(slope(mode + e) - slope(mode - e)) / 2e-5 for e in 1e-5 * np.eye(4)])
    np.testing.assert_allclose(covariance @ numeric, np.eye(4), atol=1e-6)


@pytest.mark.skipif(HAVE_DATA, reason="NUMPYRO_FED_DATA is set")
def test_words_of_the_absence_of_a9a() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"NUMPYRO_FED_DATA is not set.*LIBSVM's page.*32,561 lines.*a9a/"
    ):
        a9a_logistic.main(["--quick"])


@pytest.mark.skipif(not HAVE_DATA, reason="needs a9a: NUMPYRO_FED_DATA is not set")
def test_real_a9a() -> None:
    (x, y), (x_test, y_test) = a9a_logistic.data()
    assert x.shape == (26_048, 123)
    assert x_test.shape == (6_513, 123)
    assert y.sum() + y_test.sum() == 7_841
    assert x.sum() + x_test.sum() == 451_592
    assert set(np.unique(x)) == {0, 1}
    rows = a9a_logistic.silos((x, y))
    assert rows.sizes[rows.group["y"]] == (6_512,) * 4


@pytest.mark.ci
@pytest.mark.skipif(not HAVE_DATA, reason="needs a9a: NUMPYRO_FED_DATA is not set")
def test_a9a_quick(tmp_path: Path) -> None:
    found = a9a_logistic.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    curves, pooled, nodes = found
    assert curves.current.shape == curves.running.shape == (len(curves.steps), 5)
    assert curves.steps[-1] == 250  # one epoch of 4,000 rows
    # 1,000 rows held out: the AUC has a standard error of 0.01, but all here are of the same rows
    assert pooled.mean > 0.87
    assert abs(pooled.mean - pooled.prediction) < 0.005
    assert curves.running[-1].min() > pooled.mean - 0.02
    assert curves.current[-1].min() > 0.8
    # negative control: the first draws rank people by chance
    assert curves.current[0].min() < 0.7
    assert list(nodes) == ["0", "1", "2", "3"]
    for comparison in nodes.values():
        table = comparison.table
        assert len(table) == 124
        assert (table["error"] - 4 * table["mcse"]).max() < 0.15, comparison
        assert (abs(np.log(table["sd_ratio"])) - 4 * table["sd_ratio_mcse"]).max() < 0.1, comparison
