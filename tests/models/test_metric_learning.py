"""Metric learning on Isolet: the loader, pairs and silos, density, Laplace's surrogates.

Also what a visit does, and short fits.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import metric_learning as ml
import numpy as np
import pytest
from numpyro.infer.util import log_density
from scipy import special, stats

import numpyro_fed as fed

HAVE_DATA = "NUMPYRO_FED_DATA" in os.environ
K = ml.DIRECTIONS


def made_up(
    rows: int = 780, features: int = 12, noise: float = 0.7
) -> tuple[np.ndarray, np.ndarray]:
    """Letters at centers of their own, under noise."""
    rng = np.random.default_rng(0)
    letters = 1 + np.arange(rows) % 26
    return rng.normal(size=(26, features))[letters - 1] + noise * rng.normal(
        size=(rows, features)
    ), letters


def small(seed: int = 0, num_silos: int = 4) -> tuple[fed.Silos, ml.Pairs]:
    return ml.silos(*made_up(), seed, num_silos=num_silos, num_pairs=200, num_test=40)


def position(seed: int = 1) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {"gamma": jnp.asarray(rng.normal(3, 1, K), jnp.float32), "mu": jnp.asarray(1.5)}


def flat(theta: dict[str, jax.Array]) -> np.ndarray:
    return np.append(np.asarray(theta["gamma"], np.float64), float(theta["mu"]))


# The file


def test_real_isolet_or_the_words_of_its_absence() -> None:
    if not HAVE_DATA:
        words = (
            r"NUMPYRO_FED_DATA is not set.*UCI repository, data set 54.*7,797 rows.*617 "
            r"features.*isolet/"
        )
        with pytest.raises(FileNotFoundError, match=words):
            ml.main(["--quick"])
        return
    x, letters = ml.data()
    assert x.shape == (7797, 617)
    assert (x.min(), x.max()) == (-1, 1)
    np.testing.assert_array_equal(
        np.bincount(letters)[1:], [298 if k == 6 else 299 if k == 13 else 300 for k in range(1, 27)]
    )
    learn, test = ml.silos(x, letters)
    assert learn.sizes[learn.group["w"]] == (1000,) * 10
    assert test["w"].shape == (1000, 10)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    (tmp_path / "isolet").mkdir()
    return tmp_path / "isolet"


def write(folder: Path, rows: int = ml.ROWS, noise: float = 0.7) -> Path:
    x, letters = made_up(rows, ml.FEATURES, noise)
    np.savez(
        folder / "isolet.npz",
        X_int16=np.rint(1000 * x).astype(np.int16),
        y=letters.astype(np.uint8),
    )
    return folder / "isolet.npz"


def test_a_missing_or_truncated_file_is_named(folder: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"isolet.npz, but there is no such file.*data set 54.*7,797 rows"
    ):
        ml.data()
    place = write(folder)
    x, letters = ml.data()
    assert (x.shape, letters.dtype.kind) == ((7797, 617), "i")
    whole = place.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1000):
        place.write_bytes(whole[:length])
        with pytest.raises(
            ValueError, match=r"isolet.npz is truncated or no such file.*data set 54.*7,797 rows"
        ):
            ml.data()
    place.write_bytes(
        whole[: len(whole) // 4] + bytes(100) + whole[len(whole) // 4 + 100 :]
    )  # a checksum that fails
    with pytest.raises(ValueError, match=r"isolet.npz is truncated"):
        ml.data()
    np.savez(place, other=np.zeros(3))
    with pytest.raises(ValueError, match=r"truncated or no such file.*X_int16"):
        ml.data()
    write(folder, rows=6238)
    with pytest.raises(
        ValueError, match=r"expected 7,797 rows.*got shapes \(6238, 617\) and \(6238,\)"
    ):
        ml.data()


# Pairs


def test_directions_are_the_top_eigenvectors() -> None:
    x = made_up(features=15)[0]
    left, values, right = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(abs(ml.scores(x)), abs(left[:, :K] * values[:K]), atol=1e-9)
    assert right.shape == (15, 15)
    # as many features as directions: the metric with gamma = 1 is Euclid's
    x = x[:, :K]
    z = ml.scores(x)
    np.testing.assert_allclose(((z[0] - z[1:]) ** 2).sum(1), ((x[0] - x[1:]) ** 2).sum(1))


@pytest.mark.parametrize("similar", [True, False])
def test_pairs_are_different_and_of_their_kind(similar: bool) -> None:
    letters, rows = np.array([1, 1, 1, 2, 2, 3, 3]), np.array([0, 1, 2, 3, 4])
    count = 4 if similar else 6  # all there are
    pairs = ml.choose(np.random.default_rng(0), letters, rows, similar, count)
    assert {tuple(sorted(p)) for p in pairs.tolist()} == {
        (i, j) for i in range(5) for j in range(i + 1, 5) if (letters[i] == letters[j]) == similar
    }
    kind = "similar" if similar else "dissimilar"
    with pytest.raises(
        ValueError,
        match=f"expected {count + 1} {kind} pairs in a silo of 5 rows, got {count}; use fewer",
    ):
        ml.choose(np.random.default_rng(0), letters, rows, similar, count + 1)


def test_silos_have_letters_of_their_own() -> None:
    """A row is a number that tells its letter, so that a pair's distance tells its two."""
    letters, values = 1 + np.arange(520) % 26, 1.2 ** np.arange(1, 27)
    x = np.zeros((520, K))
    x[:, 0] = values[letters - 1]
    learn, test = ml.silos(x, letters, 3, num_pairs=100, num_test=10)
    by = fed.partitioners.disjoint(np.random.default_rng(3), letters, 10, min_labels=2)
    own = [values[np.unique(letters[by == s]) - 1] for s in range(10)]
    expected = [abs(np.subtract.outer(v, v))[np.triu_indices(len(v), 1)] for v in own]
    found = [np.sqrt(np.asarray(learn[name]["w"], np.float64)[:, 0]) for name in learn]
    unit = max(v.max() for v in expected) / max(v.max() for v in found)

    def fits(distances: np.ndarray, s: int) -> np.bool:
        return (abs(unit * distances[:, None] / expected[s] - 1).min(1) < 1e-4).all()

    for s in range(10):
        assert (found[s][:50] == 0).all()
        assert fits(found[s][50:], s)
        assert not fits(found[s][50:], (s + 1) % 10)  # negative control
        np.testing.assert_array_equal(np.asarray(learn[str(s)]["similar"]), np.repeat([1, 0], 50))
        assert fits(np.sqrt(test["w"][10 * s + 5 : 10 * (s + 1), 0]), s)
    np.testing.assert_array_equal(test["similar"], np.tile(np.repeat([1, 0], 5), 10))


def test_held_out_pairs_are_none_to_learn_from_and_distances_are_one_on_average() -> None:
    learn, test = small()
    w = np.asarray(learn.pooled["w"])
    assert w.shape == (800, K)
    assert abs(w.sum(1).mean() - 1) < 1e-5
    assert len(np.unique(np.concatenate([w, test["w"]]), axis=0)) == 960
    np.testing.assert_array_equal(w, small()[0].pooled["w"])
    assert (w != small(1)[0].pooled["w"]).any()


def test_more_silos_than_letters_allow_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"at least 28 different ones, so that 14 silos have 2.*got 26; use at most 13 silos",
    ):
        ml.silos(*made_up(), num_silos=14)
    assert len(ml.silos(*made_up(), num_silos=13, num_pairs=20, num_test=4)[0]) == 13


# The posterior


def test_density_is_yangs_and_not_the_garbled_one() -> None:
    pairs = small()[1]
    theta = position()
    distance = pairs["w"].astype(np.float64) @ np.asarray(theta["gamma"], np.float64)
    sign = (
        2 * pairs["similar"] - 1
    )  # Yang et al.: P(y) = 1 / (1 + exp(y (distance - mu))), y = 1 or -1
    prior = stats.norm.logpdf(flat(theta), 0, ml.PRIOR_SD).sum()
    right = prior - np.log1p(np.exp(sign * (distance - 1.5))).sum()
    found = float(log_density(ml.model, (), pairs, theta)[0])
    assert abs(found - right) < 1e-3
    similar = special.expit(-pairs["similar"] * (distance - 1.5))  # Ber of the paper's text
    garbled = prior + np.where(pairs["similar"] == 1, np.log(similar), np.log1p(-similar)).sum()
    assert abs(found - garbled) > 1  # negative control


def test_curvature_and_mode_are_those_of_the_density() -> None:
    learn, pairs = small()
    theta = position()

    def log_posterior(v: jax.Array, rows: ml.Pairs) -> jax.Array:
        return log_density(ml.model, (), rows, {"gamma": v[:K], "mu": v[K]})[0]

    gradient = jax.jit(jax.grad(log_posterior))
    hessian = jax.jit(jax.hessian(log_posterior))(jnp.asarray(flat(theta)), pairs)
    covariates, sign = ml.design(pairs)
    found = ml.curvature(covariates, flat(theta)) + np.eye(K + 1) / ml.PRIOR_SD**2
    np.testing.assert_allclose(found, -hessian, rtol=1e-3, atol=1e-3)
    top = ml.mode(learn.pooled)
    slope = gradient(jnp.asarray(top), learn.pooled)
    assert abs(np.asarray(slope)).max() < 0.02  # of single precision, by 800 pairs
    assert (
        abs(np.asarray(gradient(jnp.asarray(top + 0.3), learn.pooled))).max() > 1
    )  # negative control
    assert set(sign) == {-1.0, 1.0}


def test_laplace_has_each_silos_score_and_curvature_at_its_own_mode() -> None:
    learn, _ = small()
    surrogates = ml.laplace(learn)
    for s, name in enumerate(learn):
        a, sign = ml.design(learn[name])
        theta = ml.mode(learn[name])
        score = a.T @ (sign * special.expit(-sign * (a @ theta)))
        np.testing.assert_allclose(
            surrogates.scores(theta[None])[s, 0], score, rtol=1e-3, atol=2e-3
        )
        np.testing.assert_allclose(
            surrogates.factors.precision[s], ml.curvature(a, theta), rtol=1e-5
        )
        remote = surrogates.scores(ml.mode(learn.pooled)[None])[s, 0]
        assert abs(remote - score).max() > 0.1  # negative control


def test_growth_of_a_stay() -> None:
    learn, _ = small()
    theta, prior = ml.mode(learn.pooled), np.eye(K + 1) / ml.PRIOR_SD**2
    exact = np.stack([ml.curvature(ml.design(learn[name])[0], theta) for name in learn])
    values = np.linalg.eigvalsh(exact.sum(0) + prior)

    def of(precisions: np.ndarray, stay: int) -> float:
        return ml.growth(
            learn, fed.surrogates.analytic(learn, np.zeros((4, K + 1)), precisions), stay
        )

    # the silos' own curvatures: all silos alike, a step contracts as the posterior's smallest
    # curvature does
    assert abs(of(exact, 40) - (1 - ml.STEP_SIZE / 2 * values[0]) ** 40) < 1e-5
    # a silo whose surrogate is too sure by c in all directions: c - 4 c is left in its own visits
    wrong = exact.copy()
    wrong[2] += 50 * np.eye(K + 1)
    assert abs(of(wrong, 40) - (1 - ml.STEP_SIZE / 2 * (values[0] - 150)) ** 40) < 1e-3
    assert of(wrong, 40) > 10 > 1 > of(exact, 40)


# Judging draws


def test_log_likelihoods_are_both_averages() -> None:
    pairs = small()[1]
    rng = np.random.default_rng(0)
    draws = {
        "gamma": rng.normal(3, 1, (5, K)).astype(np.float32),
        "mu": rng.normal(size=5).astype(np.float32),
    }
    each, log_mean = ml.log_likelihoods(draws, pairs)
    sign = 2 * pairs["similar"] - 1
    p = special.expit(sign * (draws["mu"][:, None] - draws["gamma"] @ pairs["w"].T))
    np.testing.assert_allclose(each, np.log(p).mean(1), rtol=1e-5)
    np.testing.assert_allclose(
        log_mean, [np.log(p[:n].mean(0)).mean() for n in range(1, 6)], rtol=1e-5
    )
    assert log_mean[-1] > each.mean()  # Jensen


@pytest.mark.parametrize(
    ("curve", "round"),
    [([3, 3, 3], 1), ([0, 3, 3], 2), ([0, 3, 0, 3], 4), ([3, 3, 0], np.inf), ([0, 0], np.inf)],
)
def test_the_round_from_which_a_curve_stays_above(curve: list[float], round: float) -> None:
    assert ml.reached(np.array(curve), 1.0) == round


def test_the_table_leaves_out_chains_that_left_and_counts_them() -> None:
    rng = np.random.default_rng(0)

    def curves(level: float) -> ml.Curves:
        value = level + 0.01 * rng.normal(size=(3, 2, 50))
        return ml.Curves(value, value[..., 10:])

    found = {(method, name): curves(-0.3) for method in ml.METHODS for name in ml.SETS}
    found |= {("DSGLD", name): curves(-0.4) for name in ml.SETS}
    for name in ml.SETS:
        found["FSGLD, moments", name].whole[1, 0, 30] = -1e20
        found["FSGLD, moments", name].whole[2, 0, 40:] = np.nan
        found["FSGLD, Laplace", name].whole[:, 0, 40:] = -np.inf
    growths = {method: np.array([0.9, 2.0, 30.0]) for method in ml.METHODS} | {
        "NUTS": np.full(3, np.nan)
    }
    frame = ml.table(found, growths)
    assert frame["left"].tolist() == ["0", "2", "3", "0", "0", "0"]
    assert frame["above DSGLD"].tolist() == ["", "1", "0", "3", "3", "3"]
    assert frame.loc["FSGLD, Laplace", "held-out, average"] == "-"
    only = found["FSGLD, moments", "held-out"].late[0, 0].mean()
    assert frame.loc["FSGLD, moments", "held-out, average"] == f"{only:.4f} (0.0000)"
    short = found["DSGLD", "held-out"].late[:, 0].mean(-1) - found["NUTS", "held-out"].late[
        :, 0
    ].mean(-1)
    assert frame.loc["DSGLD", "less NUTS"] == f"{short.mean():.4f} ({short.std(ddof=1):.4f})"
    assert frame.loc["FSGLD, Laplace", "less NUTS"] == "-"
    assert frame.loc["FSGLD, score", "growth"] == "2, 30"
    assert frame.loc["NUTS", "growth"] == ""


# Fits


@pytest.mark.ci
def test_fsgld_is_above_dsgld_in_long_stays() -> None:
    learn, test = ml.silos(*made_up(), num_pairs=300)
    batches = {}
    for method in ("DSGLD", "FSGLD, Laplace"):
        draws, _ = ml.fit(learn, method, 200, 250)
        each = np.asarray(
            ml.log_likelihoods({k: v[50:] for k, v in draws.items()}, test)[0], np.float64
        )
        batches[method] = each.reshape(10, -1).mean(1)

    def apart(low: np.ndarray, high: np.ndarray) -> bool:
        return bool(
            high.mean() - low.mean()
            > 4 * np.hypot(*(v.std(ddof=1) / len(v) ** 0.5 for v in (low, high)))
        )

    low, high = batches.values()
    assert apart(low, high), batches
    assert not apart(high[::2], high[1::2])  # negative controls
    assert not apart(low[::2], low[1::2])


@pytest.mark.ci
def test_quick(folder: Path) -> None:
    write(
        folder, noise=4.0
    )  # letters that overlap, as the real ones do: a posterior with a curvature
    frame = ml.main(["--quick", "--figure", str(folder / "new" / "figure.png")])
    plt.close("all")
    assert (folder / "new" / "figure.png").stat().st_size > 10_000
    assert list(frame.index) == list(ml.METHODS)
    default, nuts = (
        float(frame.loc[m, "learning, log mean"].split()[0]) for m in ("FSGLD, default", "NUTS")
    )
    assert abs(default - nuts) < 0.01, frame
