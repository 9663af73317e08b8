"""The models: their data against published facts, and a quick run of each.

Data that the library does not ship are looked for below NUMPYRO_FED_DATA. Where that is not set,
the tests of them assert the words that say what to put where. The scripts run on made-up files.
"""

import gzip
import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from numpyro.infer.util import log_likelihood

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import gaussian_mean
import heart_disease
import logistic_regression
import six_cities

HAVE_DATA = "NUMPYRO_FED_DATA" in os.environ


# Six cities


def test_six_cities_counts_are_the_published_ones() -> None:
    y, smoke = six_cities.data()
    assert y.shape == (537, 4)
    assert (smoke == 0).sum() == 350
    assert round(100 * y.mean(), 2) == 15.18
    np.testing.assert_array_equal(y.sum(0), [87, 91, 85, 63])
    children = six_cities.silos()
    assert children.sizes[children.group["y"]] == six_cities.TWO
    np.testing.assert_array_equal(children.pooled["y"], y)
    assert sum(six_cities.TEN) == 537
    assert (min(six_cities.TEN), max(six_cities.TEN)) == (20, 117)


def test_six_cities_likelihood_is_that_of_lme4() -> None:
    """The log likelihood at lme4's estimates, intercepts integrated out, is -797.3592."""
    y, smoke = six_cities.data()
    nodes, weights = np.polynomial.hermite_e.hermegauss(101)
    weights = weights / weights.sum()

    def marginal(sigma: float) -> float:
        values = {
            "intercept": -3.128395,
            "age": -0.21637,
            "smoke": 0.462044,
            "age_smoke": 0.105328,
            "sigma": sigma,
        }
        draws = {name: np.full(len(nodes), v, np.float32) for name, v in values.items()}
        draws["z"] = np.broadcast_to(nodes[:, None, None], (len(nodes), 537, 1)).astype(np.float32)
        each = np.asarray(log_likelihood(six_cities.model, draws, y, smoke)["wheeze"], np.float64)
        return float(np.log(np.exp(each.sum(-1)).T @ weights).sum())

    assert abs(marginal(2.166582) + 797.3592) < 2e-3
    # negative control: elsewhere the likelihood is lower by far more than that
    assert marginal(1.9) < -798.3


@pytest.mark.slow
def test_six_cities_quick(tmp_path: Path) -> None:
    comparison = six_cities.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert list(comparison.table.index) == six_cities.GLOBALS
    assert (tmp_path / "figure.png").stat().st_size > 0
    errors = comparison.table["error"] - 4 * comparison.table["mcse"]
    assert errors.max() < 0.1, comparison


# A Gaussian mean


def test_gaussian_mean_posterior_and_bounds() -> None:
    points = gaussian_mean.silos()
    x, silo = gaussian_mean.data()
    assert points.sizes[points.group["x"]] == (200,) * 10
    mean, sd = gaussian_mean.exact(points)
    np.testing.assert_allclose(mean, x.sum(0) / 2001, rtol=1e-5)
    assert sd == 2001**-0.5
    gamma, epsilon = gaussian_mean.bounds(points).values()
    # epsilon_s^2 does not depend on theta: it is the trace of the silo's covariance
    variances = [x[silo == s].astype(float).var(0).sum() for s in range(10)]
    np.testing.assert_allclose(epsilon, variances, rtol=1e-5)
    assert (gamma > 10 * epsilon).all()


def test_gaussian_mean_quick(tmp_path: Path) -> None:
    draws = gaussian_mean.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 0
    points = gaussian_mean.silos()
    mean, sd = gaussian_mean.exact(points)
    predicted = gaussian_mean.discretised_sd(points)
    for stay in (1, 100):
        chains = draws["FSGLD", stay]
        # at 100 steps of contraction 0.9 between draws these are as good as independent
        count = np.prod(chains.shape[:2])
        assert (abs(chains.mean((0, 1)) - mean) < 4 * predicted / count**0.5).all()
        ratio = chains.std((0, 1)) / predicted
        assert (abs(ratio - 1) < 4 / (2 * count) ** 0.5 + 0.05).all(), (stay, ratio)
    # negative controls: in long stays DSGLD's draws spread with the silos' centres; what is predicted
    # is not the posterior's sd
    assert draws["DSGLD", 100].std((0, 1)).min() > 20 * predicted
    assert predicted > 2 * sd


# Data that are not shipped


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small files of the right form. Every patient of one hospital has the same cholesterol."""
    rng = np.random.default_rng(0)
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    n = 160
    table = pd.DataFrame(
        {
            "hospital": np.repeat(["a", "b", "c", "d"], [60, 50, 20, 30]),
            "age": rng.integers(30, 75, n),
            "sex": rng.integers(0, 2, n),
            "cp": rng.integers(1, 5, n),
            "trestbps": rng.normal(130, 15, n).round(),
            "chol": rng.normal(220, 40, n).round(),
            "fbs": rng.integers(0, 2, n),
            "restecg": rng.integers(0, 3, n),
            "thalach": rng.normal(140, 20, n).round(),
            "exang": rng.integers(0, 2, n),
            "oldpeak": rng.uniform(0, 3, n).round(1),
            "slope": np.nan,
            "ca": np.nan,
            "thal": np.nan,
            "num": rng.integers(0, 3, n),
        }
    )
    table.loc[table["hospital"] == "c", "chol"] = 0
    table.loc[[0, 70], ["fbs", "exang"]] = np.nan
    for folder in ("heart_disease", "magic04", "credit_default"):
        (tmp_path / folder).mkdir()
    table.to_csv(tmp_path / "heart_disease" / "heart_disease.csv", index=False)
    for folder, file, columns, header in (
        ("magic04", "magic04.data.gz", 10, False),
        ("credit_default", "credit_default.csv.gz", 23, True),
    ):
        x = rng.normal(size=(3100, columns)) * rng.uniform(1, 50, columns)
        label = x[:, 0] / x[:, 0].std() + rng.logistic(size=3100) > 0.5
        frame = pd.DataFrame(x.round(3))
        if header:
            frame.insert(0, "ID", np.arange(3100))
        frame["default"] = label.astype(int) if header else np.where(label, "g", "h")
        with gzip.open(tmp_path / folder / file, "wt") as out:
            frame.to_csv(out, header=header, index=False)
    return tmp_path


def test_heart_disease_quick(made_up: Path) -> None:
    x, disease, hospital = heart_disease.data()
    assert x.shape == (158, 13)  # two patients with a missing value are gone
    assert np.ptp(x["chol"][hospital == "c"]) == 0
    assert set(disease) == {0.0, 1.0}
    comparison = heart_disease.main(["--quick", "--figure", str(made_up / "figure.png")])
    plt.close("all")
    assert (made_up / "figure.png").stat().st_size > 0
    assert "beta[cp_4]" in " ".join(comparison.table.index)
    errors = comparison.table["error"] - 4 * comparison.table["mcse"]
    assert errors.max() < 0.1, comparison


@pytest.mark.slow
def test_logistic_regression_quick(made_up: Path) -> None:
    x, _ = logistic_regression.data("credit")
    assert x.shape == (3100, 23)
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0), 1, rtol=1e-5)
    found, comparison = logistic_regression.main(["--quick", "--figure", str(made_up / "figure.png")])
    plt.close("all")
    assert (made_up / "figure.png").stat().st_size > 0
    assert len(found) == 8
    errors = comparison.table["error"] - 4 * comparison.table["mcse"]
    assert errors.max() < 0.1, comparison


def test_real_heart_disease_or_the_words_of_its_absence() -> None:
    if not HAVE_DATA:
        words = r"NUMPYRO_FED_DATA is not set.*UCI repository, data set 45.*920 rows.*heart_disease/"
        with pytest.raises(FileNotFoundError, match=words):
            heart_disease.main(["--quick"])
        return
    hospitals = heart_disease.silos()
    assert hospitals.names == ("cleveland", "hungarian", "switzerland", "va")
    assert hospitals.sizes[hospitals.group["x"]] == (303, 261, 46, 130)
    x, disease, hospital = heart_disease.data()
    assert x.shape == (740, 13)
    assert np.ptp(x["chol"][hospital == "switzerland"]) == 0
    assert np.isfinite(x.to_numpy()).all()
    assert 0 < disease.mean() < 1


@pytest.mark.parametrize(
    ("name", "shape", "positives", "number"),
    [("magic", (19_020, 10), 12_332, 159), ("credit", (30_000, 23), 6_636, 350)],
)
def test_real_magic_and_credit_or_the_words_of_their_absence(
    name: str, shape: tuple[int, int], positives: int, number: int
) -> None:
    if not HAVE_DATA:
        words = rf"NUMPYRO_FED_DATA is not set.*UCI repository, data set {number}.*{shape[0]:,} rows"
        with pytest.raises(FileNotFoundError, match=words):
            logistic_regression.data(name)
        return
    x, y = logistic_regression.data(name)
    assert x.shape == shape
    assert y.sum() == positives


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"magic04.data.gz, but there is no such file"):
        logistic_regression.data("magic")
