"""The models: their data against published facts, and a quick run of each.

Data that the library does not ship are looked for below NUMPYRO_FED_DATA. Where that is not set,
the tests of them assert the words that say what to put where. The scripts run on made-up files.
"""

import gzip
import os
from pathlib import Path

import eight_schools
import gaussian_mean
import heart_disease
import logistic_regression
import matplotlib.pyplot as plt
import multinomial_regression
import numpy as np
import pandas as pd
import pytest
import six_cities
from numpyro.infer.util import log_likelihood
from scipy import stats

from numpyro_fed._arviz import from_groups

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
    # negative control: at other values the likelihood is lower by far more than that
    assert marginal(1.9) < -798.3


def test_six_cities_dealt_out_at_random() -> None:
    children, cut = six_cities.silos(shuffled=True), six_cities.silos()
    assert children.sizes[children.group["y"]] == six_cities.TWO
    for name, value in zip(("y", "smoke"), six_cities.data(), strict=True):
        np.testing.assert_array_equal(children.pooled[name], value)
    # about as many smoke in either silo (187 of 537); in the published order nobody does in the
    # first
    assert all(abs(np.mean(children[name]["smoke"]) - 187 / 537) < 0.06 for name in children)
    assert not np.any(cut["0"]["smoke"])


def test_six_cities_figure_of_silos_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    draws = {name: rng.normal(i, 1, (1, 500)) for i, name in enumerate(six_cities.GLOBALS)}
    draws["sigma"] = np.exp(draws["sigma"])
    posteriors = {name: from_groups({"posterior": draws}) for name in ("SFVI", "all", "one", "two")}
    six_cities.draw_alone(posteriors, tmp_path / "new" / "figure.png")
    axes = plt.gcf().axes
    plt.close("all")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000
    assert [axis.get_xlabel() for axis in axes] == six_cities.LABELS
    for i, axis in enumerate(axes):
        assert len(axis.lines) == 4
        x, density = axis.lines[0].get_data()
        scale = (
            np.log(draws["sigma"]) if i == 4 else draws[six_cities.GLOBALS[i]]
        )  # of sigma its logarithm is drawn
        assert abs(np.average(x, weights=density) - scale.mean()) < 0.1 * scale.std()


@pytest.mark.ci
@pytest.mark.usefixtures("optimized")
def test_six_cities_quick(tmp_path: Path) -> None:
    found = six_cities.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert list(found) == ["FSGLD", "SFVI"]
    assert (tmp_path / "figure.png").stat().st_size > 0
    for comparison in found.values():
        assert list(comparison.table.index) == six_cities.GLOBALS
        errors = comparison.table["error"] - 4 * comparison.table["mcse"]
        assert errors.max() < 0.1, comparison
    # the bias that K = 32 leaves, and quick draws' noise
    table = found["SFVI"].table
    assert (abs(np.log(table["sd_ratio"])) < 0.07 + 4 * table["sd_ratio_mcse"]).all(), table
    assert found["SFVI"].pareto_k < 0.7


@pytest.mark.ci
@pytest.mark.usefixtures("optimized")
def test_six_cities_alone_quick(tmp_path: Path) -> None:
    comparison = six_cities.main(["--alone", "--quick", "--figure", str(tmp_path / "figure.png")])[
        "SFVI"
    ]
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 0
    assert (comparison.table["error"] - 4 * comparison.table["mcse"]).max() < 0.1, comparison


# Eight schools


def eight_schools_density(mu: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Return the log posterior of mu and tau up to a constant, schools' effects integrated out."""
    spread = np.hypot(tau[..., None], eight_schools.ERROR.astype(float))
    likelihood = stats.norm.logpdf(eight_schools.EFFECT.astype(float), mu[..., None], spread).sum(
        -1
    )
    return likelihood + stats.norm.logpdf(mu, 0, 5) + stats.halfcauchy.logpdf(tau, 0, 5)


def test_eight_schools_likelihood_is_the_closed_form() -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(101)
    draws = {
        "mu": np.full(101, 5.0),
        "tau": np.full(101, 6.0),
        "z": np.repeat(nodes[:, None], 8, 1),
    }
    draws = {k: v.astype(np.float32) for k, v in draws.items()}
    each = log_likelihood(eight_schools.model, draws, eight_schools.EFFECT, eight_schools.ERROR)[
        "y"
    ]
    marginal = np.log(np.exp(np.asarray(each, np.float64)).T @ weights / weights.sum()).sum()
    closed = stats.norm.logpdf(eight_schools.EFFECT, 5, np.hypot(6, eight_schools.ERROR)).sum()
    assert abs(marginal - closed) < 1e-4
    schools = eight_schools.silos()
    assert schools.names == tuple("ABCDEFGH")
    assert schools.sizes[schools.group["y"]] == (1,) * 8


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Pareto's k:UserWarning")
def test_eight_schools_quick(tmp_path: Path) -> None:
    found = eight_schools.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 0
    assert list(found) == ["SFVI", "SFVI, resampled"]
    mu, log_tau = np.meshgrid(np.linspace(-30, 40, 500), np.linspace(-15, 7, 800), indexing="ij")
    density = np.exp(eight_schools_density(mu, np.exp(log_tau)) + log_tau)
    mean = np.average(np.exp(log_tau), weights=density)
    sd = np.average((np.exp(log_tau) - mean) ** 2, weights=density) ** 0.5
    tau = found["SFVI, resampled"].table.loc["tau"]
    assert abs(tau["mean_ref"] - mean) < 0.15 * sd
    assert abs(tau["mean_fed"] - mean) < 0.15 * sd
    assert abs(np.log(tau["sd_fed"] / sd)) < 0.15, tau
    plain = found["SFVI"].table
    assert (plain["error"] - 4 * plain["mcse"]).max() < 0.1, plain
    # what a Gaussian of log tau cannot hold: tau's sd comes out too large, and k is far from that
    # of a good fit
    assert plain.loc["tau", "sd_fed"] > 1.02 * sd
    assert found["SFVI"].pareto_k > 0.5


# A Gaussian mean


def test_gaussian_mean_posterior_and_bounds() -> None:
    points = gaussian_mean.silos()
    x, silo = gaussian_mean.data()
    assert points.sizes[points.group["x"]] == (200,) * 10
    mean, sd = gaussian_mean.exact(points)
    np.testing.assert_allclose(mean, x.sum(0) / 2001, rtol=1e-5)
    assert sd == 2001**-0.5
    constants, (dsgld, fsgld) = gaussian_mean.bounds(points)
    # epsilon_s^2 does not depend on theta: it is the trace of the silo's covariance; gamma_s^2 is
    # largest in a corner
    rows = [x[silo == s].astype(float) for s in range(10)]
    variances = [own.var(0).sum() for own in rows]
    np.testing.assert_allclose(constants["ε²"], variances, rtol=1e-5)
    corners = np.array([[a, b] for a in (-6, 6) for b in (-6, 6)])
    squares = [((own[:, None] - corners) ** 2).sum(-1) for own in rows]
    np.testing.assert_allclose(constants["γ², rows"], [own.max() for own in squares], rtol=1e-5)
    np.testing.assert_allclose(
        constants["γ², mean"], [own.mean(0).max() for own in squares], rtol=1e-5
    )
    assert (constants["γ², mean"] > 10 * constants["ε²"]).all()
    # N_s^2 / (f_s m T) = 0.4 for each of them, and 1 / (h T) = 0.1
    assert dsgld == pytest.approx(0.4 * constants["γ², rows"].sum() + 0.1, rel=1e-5)
    assert fsgld == pytest.approx(0.4 * sum(variances) + 0.1, rel=1e-5)


def gaussian_chains(stay: int, num_chains: int, num_draws: int) -> np.ndarray:
    """Run DSGLD on the points in NumPy; return ``(chains, draws, 2)``.

    Every minibatch's mean comes from all rows' normal approximation.
    """
    x, silo = gaussian_mean.data()
    rng, h, lam = np.random.default_rng(1), gaussian_mean.STEP_SIZE, 2001
    rows = np.stack([x[silo == s].astype(float) for s in range(10)])
    centers, sds = rows.mean(1), rows.std(1)
    theta, out = np.zeros((num_chains, 2)), []
    for step in range(2000 + 100 * num_draws):
        if step % stay == 0:
            at = rng.integers(10, size=num_chains)
        seen = centers[at] + sds[at] * rng.normal(size=theta.shape) / gaussian_mean.BATCH_SIZE**0.5
        theta = theta + h / 2 * (2000 * seen - lam * theta) + h**0.5 * rng.normal(size=theta.shape)
        if step >= 2000 and step % 100 == 99:
            out.append(theta)
    return np.stack(out, 1)


@pytest.mark.parametrize("stay", [10, 200])
def test_gaussian_mean_closed_forms_are_those_of_simulated_chains(stay: int) -> None:
    points, count = gaussian_mean.silos(), 400
    draws = gaussian_chains(stay, count, 7)
    mean, _ = gaussian_mean.exact(points)
    numbers = np.arange(1, 8)
    expected = gaussian_mean.expected_mse(points, "DSGLD", stay, numbers)
    running = draws.cumsum(1) / numbers[:, None]
    each = ((running - mean) ** 2).sum(-1)
    assert (abs(each.mean(0) - expected) < 4 * each.std(0) / count**0.5).all()
    between, noise = gaussian_mean.variances(points, "DSGLD", stay)
    assert abs(draws.var((0, 1)).mean() / (between + noise) - 1) < 0.1
    other = gaussian_mean.expected_mse(
        points, "DSGLD", 1000, numbers
    )  # negative control: draws of one visit
    assert abs(each.mean(0) - other)[-1] > 8 * each.std(0)[-1] / count**0.5
    assert gaussian_mean.variances(points, "FSGLD", stay) == (0, noise)


@pytest.mark.ci
def test_gaussian_mean_quick(tmp_path: Path) -> None:
    draws = gaussian_mean.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 0
    points = gaussian_mean.silos()
    mean, sd = gaussian_mean.exact(points)
    for (method, stay), chains in draws.items():
        # at 100 steps of contraction 0.9 between draws these are as good as independent
        predicted, count = (
            sum(gaussian_mean.variances(points, method, stay)) ** 0.5,
            np.prod(chains.shape[:2]),
        )
        assert (abs(chains.mean((0, 1)) - mean) < 4 * predicted / count**0.5).all()
        ratio = chains.var((0, 1)).mean() ** 0.5 / predicted
        assert abs(ratio - 1) < 4 / (4 * count) ** 0.5 + 0.03, (method, stay, ratio)
    # negative controls: in long visits DSGLD's draws spread with the silos' centers; what is
    # predicted
    # is not the posterior's sd
    assert draws["DSGLD", 100].std((0, 1)).min() > 20 * draws["FSGLD", 100].std((0, 1)).max()
    assert sum(gaussian_mean.variances(points, "FSGLD", 100)) ** 0.5 > 2 * sd


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
        label = x[:, 0] / x[:, 0].std() + rng.logistic(size=3100) > 0
        frame = pd.DataFrame(x.round(3))
        if header:
            frame.insert(0, "ID", np.arange(3100))
        frame["default"] = label.astype(int) if header else np.where(label, "g", "h")
        with gzip.open(tmp_path / folder / file, "wt") as out:
            frame.to_csv(out, header=header, index=False)
    return tmp_path


@pytest.mark.ci
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


@pytest.mark.ci
def test_logistic_regression_quick(made_up: Path) -> None:
    x, _ = logistic_regression.data("credit")
    assert x.shape == (3100, 23)
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0), 1, rtol=1e-5)
    found, comparison = logistic_regression.main(
        ["--quick", "--figure", str(made_up / "figure.png")]
    )
    plt.close("all")
    assert (made_up / "figure.png").stat().st_size > 0
    assert len(found) == 6
    errors = comparison.table["error"] - 4 * comparison.table["mcse"]
    assert errors.max() < 0.1, comparison


@pytest.fixture
def made_up_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files in the form of MNIST: ten random patterns under noise."""
    rng = np.random.default_rng(0)
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    patterns = rng.normal(size=(10, 784))
    for part, count in (("train", 3000), ("t10k", 1000)):
        digit = rng.integers(0, 10, count)
        pixels = np.clip(
            60 + 11 * patterns[digit] + 50 * rng.normal(size=(count, 784)), 0, 255
        ).astype(np.uint8)
        for kind, header, values in (
            ("images-idx3", 16, pixels),
            ("labels-idx1", 8, digit.astype(np.uint8)),
        ):
            with gzip.open(tmp_path / "mnist" / f"{part}-{kind}-ubyte.gz", "wb") as out:
                out.write(bytes(header) + values.tobytes())
    return tmp_path


@pytest.mark.ci
@pytest.mark.usefixtures("optimized")
def test_multinomial_regression_quick(made_up_digits: Path) -> None:
    table = multinomial_regression.main(["--quick", "--figure", str(made_up_digits / "figure.png")])
    plt.close("all")
    assert (made_up_digits / "figure.png").stat().st_size > 0
    assert list(table.index) == [(20, method) for method in multinomial_regression.METHODS]
    test = table["test"].loc[20]
    assert test["SFVI"] > 80, table
    assert test["SFVI"] > test["independent"] + 15, table
    assert test["SFVI-Avg"] > test["independent"] + 10, table
    # a silo alone fits its own rows and not the others'
    assert table["train"].loc[20, "independent"] > test["independent"] + 15, table


@pytest.mark.ci
def test_multinomial_regression_predicts_by_its_q(made_up_digits: Path) -> None:
    train, test = multinomial_regression.data(num_rows=500)
    assert train["x"].shape == (500, 784)
    assert 0 <= train["x"].min() < train["x"].max() <= 1
    rows = multinomial_regression.silos(train, 20)
    assert rows.sizes[rows.group["x"]] == (25,) * 20
    rng = np.random.default_rng(1)
    b, w = (
        rng.normal(size=10),
        np.stack([train["x"][train["y"] == k].mean(0) for k in range(10)], axis=1),
    )
    loc = np.concatenate([b, w.ravel()]).astype(np.float32)
    right = 100 * ((test["x"] @ w + b).argmax(-1) == test["y"]).mean()
    params = {
        "auto_loc": loc,
        "auto_scale": np.full(7850, 1e-6, np.float32),
        "sigma_w": 1.0,
        "sigma_b": 1.0,
    }
    assert abs(multinomial_regression.accuracy(params, test) - right) < 0.11
    # negative control: a q that knows nothing predicts no better than chance
    params["auto_scale"] = np.full(7850, 10, np.float32)
    assert multinomial_regression.accuracy(params, test) < 25 < right


def test_multinomial_regression_counts_the_rounds_saved() -> None:
    cold = 1000.0 - np.arange(500)
    found = multinomial_regression.savings(cold, cold[200:], [100, 400, 500], before=5)
    assert set(found) == {100, 400, 500}
    # the smoothed bound of round 400 is reached 200 rounds earlier, plus the 5 of the warm start
    assert found[400] == (205, 400 / 205)
    # negative control: a bound that is never reached is not counted
    assert multinomial_regression.savings(cold, cold[:100], [400], before=5) == {}


def test_real_heart_disease_or_the_words_of_its_absence() -> None:
    if not HAVE_DATA:
        words = (
            r"NUMPYRO_FED_DATA is not set.*UCI repository, data set 45.*920 rows.*heart_disease/"
        )
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
        words = (
            rf"NUMPYRO_FED_DATA is not set.*UCI repository, data set {number}.*{shape[0]:,} rows"
        )
        with pytest.raises(FileNotFoundError, match=words):
            logistic_regression.data(name)
        return
    x, y = logistic_regression.data(name)
    assert x.shape == shape
    assert y.sum() == positives


def test_real_mnist_or_the_words_of_its_absence() -> None:
    if not HAVE_DATA:
        words = r"NUMPYRO_FED_DATA is not set.*any mirror of MNIST.*60,000 images.*mnist/"
        with pytest.raises(FileNotFoundError, match=words):
            multinomial_regression.main(["--quick"])
        return
    train, test = multinomial_regression.data()
    assert (train["x"].shape, test["x"].shape) == ((60_000, 784), (10_000, 784))
    np.testing.assert_array_equal(
        np.bincount(train["y"]), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    )
    np.testing.assert_array_equal(
        np.bincount(test["y"]), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    )
    assert (test["x"].min(), test["x"].max()) == (0, 1)


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"magic04.data.gz, but there is no such file"):
        logistic_regression.data("magic")
