"""Linear regression on UCI data: loaders, density, surrogates and test errors exactly.

Short fits are compared with the posterior.
"""

import os
from pathlib import Path

import jax.numpy as jnp
import linear_regression as linear
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from numpyro.infer.util import log_density
from scipy import stats

HAVE_DATA = "NUMPYRO_FED_DATA" in os.environ


def table(num_rows: int, num_features: int, seed: int = 0) -> np.ndarray:
    """Features of many scales, and a target that they explain half of."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_features))
    y = x @ rng.normal(size=num_features) / num_features**0.5 + rng.normal(size=num_rows)
    return np.column_stack([3 + x * np.logspace(-2, 3, num_features), 10 * y])


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of the right form."""
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    for folder, file, shape in (
        ("uci_regression", "concrete.csv", (1_030, 8)),
        ("uci_regression", "airfoil.csv", (1_503, 5)),
        ("ct_slices", "slice_localization_data.csv", (53_500, 3)),
    ):
        place = tmp_path / folder / file
        place.parent.mkdir(exist_ok=True)
        pd.DataFrame(table(*shape).round(3)).to_csv(place, index=False)
    (tmp_path / "superconductivity").mkdir()
    rows = table(19_137, 81).astype(np.float32)
    np.savez(
        tmp_path / "superconductivity" / "superconductivity.npz", X=rows[:, :-1], y=rows[:, -1]
    )
    return tmp_path


def test_rows_are_split_and_scaled_as_the_training_rows_say(made_up: Path) -> None:
    train, test = linear.split("concrete", "sd")
    assert (train["x"].shape, test["x"].shape) == ((824, 8), (206, 8))
    for values in (train["x"], train["y"]):
        np.testing.assert_allclose(values.mean(0), 0, atol=1e-12)
        np.testing.assert_allclose(values.std(0), 1)
    assert abs(test["x"].mean(0)).max() > 0.001  # negative control: test rows were not looked at
    ranged, _ = linear.split("concrete", "range")
    assert (ranged["x"].min(), ranged["x"].max()) == (0, 1)
    # every row once, in one scale
    both = np.sort(np.concatenate([train["y"], test["y"]]))
    np.testing.assert_allclose(
        np.corrcoef(both, np.sort(linear.data("concrete")[1]))[0, 1], 1, rtol=1e-12
    )
    other, _ = linear.split("concrete", "sd", seed=1)
    assert (other["y"][:20] != train["y"][:20]).any()
    rows = linear.silos(train)
    assert sorted(rows.sizes[rows.group["y"]]) == [82] * 6 + [83] * 4
    # the paper's number of rows, 80 % of them
    assert [len(part["y"]) for part in linear.split("superconductivity", "sd")] == [13_911, 3_478]


def small() -> tuple[linear.Rows, linear.Rows]:
    rng = np.random.default_rng(3)
    x, beta = rng.normal(size=(160, 3)), np.array([1.0, -0.5, 0.2])
    y = x @ beta + rng.normal(size=160)
    return {"x": x[:100], "y": y[:100]}, {"x": x[100:], "y": y[100:]}


def test_the_density_by_hand() -> None:
    train, _ = small()
    beta = np.array([0.3, -1.0, 0.5])
    expected = (
        stats.norm.logpdf(beta).sum() + stats.norm.logpdf(train["y"], train["x"] @ beta).sum()
    )
    found = float(log_density(linear.model, (), train, {"beta": jnp.asarray(beta)})[0])
    assert abs(found - expected) < 1e-3
    assert (
        abs(stats.norm.logpdf(train["y"], train["x"] @ beta, 1.1).sum() - expected) > 1
    )  # negative control


def test_surrogates_are_the_silos_likelihoods() -> None:
    train, _ = small()
    rows = linear.silos(train)
    found = linear.surrogates(rows)
    beta = np.array([[0.3, -1.0, 0.5]])
    for s, name in enumerate(rows):
        x, y = (np.asarray(rows[name][k], np.float64) for k in ("x", "y"))
        np.testing.assert_allclose(found.scores(beta)[s, 0], x.T @ (y - x @ beta[0]), rtol=1e-5)
    q = found.posterior()
    precision = train["x"].T @ train["x"] + np.eye(3)
    np.testing.assert_allclose(q.covariance, np.linalg.inv(precision), rtol=1e-5)
    np.testing.assert_allclose(
        q.mean, np.linalg.solve(precision, train["x"].T @ train["y"]), rtol=1e-5
    )


def test_errors_and_their_expectation() -> None:
    train, test = small()
    precision = train["x"].T @ train["x"] + np.eye(3)
    mean = np.linalg.solve(precision, train["x"].T @ train["y"])
    rng, count = np.random.default_rng(0), 20_000
    normal = rng.normal(size=(count, 3)) @ np.linalg.inv(np.linalg.cholesky(precision))
    found = linear.errors(mean + normal, test)
    by_hand = [np.mean((test["y"] - test["x"] @ beta) ** 2) for beta in (mean + normal)[:3]]
    np.testing.assert_allclose(found[:3], by_hand)
    error = found.std() / count**0.5
    assert abs(found.mean() - linear.exact(train, test)) < 4 * error
    wider = linear.errors(
        mean + 1.1 * normal, test
    ).mean()  # negative control: draws a tenth too wide
    assert abs(wider - linear.exact(train, test)) > 10 * error


def test_cumulative_errors_by_rounds() -> None:
    own = linear.Fit(np.array([[1.0, 3, 5, 7], [0, 0, 4, 4]]), 2)
    np.testing.assert_array_equal(own.after(1), [2, 0])
    np.testing.assert_array_equal(own.after(2), [4, 2])
    np.testing.assert_array_equal(own.after(100), [4, 2])


def test_the_step_is_stable_up_to_an_eigenvalue_of_four_over_h() -> None:
    train, _ = small()
    x = train["x"] * (4 / linear.STEP_SIZE) ** 0.5 / np.linalg.norm(train["x"], 2)
    assert linear.steepness({"x": x}) == pytest.approx(4, rel=1e-4)


@pytest.mark.ci
def test_quick(made_up: Path) -> None:
    """FSGLD has the posterior's error, DSGLD's is that of draws near the silos' own estimates."""
    tables = linear.main(["--quick", "--data", "concrete", "--figure", str(made_up / "figure.png")])
    plt.close("all")
    assert (made_up / "figure.png").stat().st_size > 0
    found = tables["concrete", "sd"]
    best = linear.exact(*linear.split("concrete", "sd"))
    standard_error = (found["variance"] / 3) ** 0.5
    for method in ("FSGLD", "FSGLD, defaults"):
        assert abs(found["all"][method] - best) < 5 * standard_error[method] + 0.002 * best, (
            found,
            best,
        )
    # negative control: two thirds of the spread of estimates from 82 rows
    assert found["all"]["DSGLD"] > 1.02 * best, (found, best)


# Files


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "concrete",
            r"concrete.csv, but there is no such file.*data set 165.*1,030 rows of 8 features",
        ),
        (
            "airfoil",
            r"airfoil.csv, but there is no such file.*data set 291.*1,503 rows of 5 features",
        ),
        (
            "superconductivity",
            r"superconductivity.npz, but there is no such file.*data set 464.*19,137 rows",
        ),
        (
            "ct_slices",
            r"slice_localization_data.csv, but there is no such file.*data set 206.*53,500 rows",
        ),
    ],
)
def test_missing_files_are_named(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=words):
        linear.main(["--quick", "--data", name])


def test_files_that_are_cut_short_or_of_another_form_are_named(made_up: Path) -> None:
    place = made_up / "uci_regression" / "concrete.csv"
    lines = place.read_text().splitlines(keepends=True)
    place.write_text("".join(lines[:500]))
    with pytest.raises(
        ValueError, match=r"concrete.csv: expected 1,030 rows of 9 numbers, got 499 rows of 9;"
    ):
        linear.data("concrete")
    place.write_text("".join(lines)[:-30])  # cut in the middle of a line
    with pytest.raises(
        ValueError, match=r"concrete.csv: expected numbers, got 1 rows with missing values"
    ):
        linear.data("concrete")
    place.write_text("".join(lines[:-1]) + "<html>\n")
    with pytest.raises(
        ValueError, match=r"concrete.csv: expected 1,030 rows of 9 numbers, got could not convert"
    ):
        linear.data("concrete")
    place.write_text("")
    with pytest.raises(
        ValueError, match=r"concrete.csv: expected 1,030 rows of 9 numbers, got No columns"
    ):
        linear.data("concrete")
    # a made-up file of four columns in place of 386
    with pytest.raises(
        ValueError,
        match=r"slice_localization_data.csv: expected 53,500 rows of 386 numbers, got .* 4;",
    ):
        linear.data("ct_slices")
    place = made_up / "superconductivity" / "superconductivity.npz"
    whole = place.read_bytes()
    place.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError,
        match=r"superconductivity.npz: expected 19,137 rows of 81 features .* is the file whole",
    ):
        linear.data("superconductivity")
    np.savez(place, X=np.zeros((682, 81)), y=np.zeros(682))
    with pytest.raises(
        ValueError, match=r"expected 19,137 or 21,263 rows of 82 numbers, got 682 rows of 82"
    ):
        linear.data("superconductivity")
    np.savez(place, features=np.zeros((2, 81)))
    with pytest.raises(
        ValueError,
        match=r"superconductivity.npz: expected 19,137 rows of 81 features.*got .*X is not",
    ):
        linear.data("superconductivity")


@pytest.mark.skipif(not HAVE_DATA, reason="the data are not shipped")
@pytest.mark.parametrize(
    ("name", "shape", "mean", "sd"),
    [
        ("concrete", (1_030, 8), 35.818, 16.706),
        ("airfoil", (1_503, 5), 124.836, 6.899),
        ("superconductivity", (19_137, 81), 34.51, 34.28),
    ],
)
def test_real_data(name: str, shape: tuple[int, int], mean: float, sd: float) -> None:
    x, y = linear.data(name)
    assert x.shape == shape
    assert y.mean() == pytest.approx(mean, abs=0.01)
    assert y.std(ddof=1) == pytest.approx(sd, abs=0.01)
    # h = 1e-5 is stable for every scaling but standard scores of superconductivity
    steep = {
        scaling: linear.steepness(linear.split(name, scaling)[0]) for scaling in linear.SCALINGS
    }
    assert steep["range"] < 2
    assert (steep["sd"] > 4) == (name == "superconductivity")
