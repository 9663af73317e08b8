"""The hierarchical models: their data against published facts.

Each density is compared with SciPy at one point.
"""

import os
from collections.abc import Callable
from typing import Any

import bird_counts
import eight_schools
import exam
import gu_immun
import heart_disease_hospitals
import horseshoe
import hospital_effects
import intake_shares
import kidiq
import lung_survival
import numpy as np
import ordinal_intake
import pytest
import sleepstudy
import stratified_cox
from numpyro.infer.util import log_density
from scipy import special, stats

import numpyro_fed as fed

needs_data = pytest.mark.skipif(
    "NUMPYRO_FED_DATA" not in os.environ, reason="the data are not shipped"
)
ROOT = np.array([[1.0, 0.0], [0.3, np.sqrt(1 - 0.09)]])  # a correlation of 0.3
# LKJ(2) in two dimensions has density proportional to 1 - r^2, which is 3/4 of it, and dr / d(the
# factor's entry) = 1
LKJ = np.log(0.75 * (1 - 0.09))


def density(model: Callable, silos: fed.Silos, **values: Any) -> float:
    """Return the pooled log density in the constrained space."""
    point = {name: np.asarray(value, np.float32) for name, value in values.items()}
    return float(log_density(model, (), silos.pooled, point)[0])


def norm(x: Any, mean: Any = 0.0, sd: Any = 1.0) -> float:
    return float(stats.norm.logpdf(np.asarray(x, float), mean, sd).sum())


def half_normal(x: Any, scale: Any) -> float:
    return float(stats.halfnorm.logpdf(np.asarray(x, float), scale=scale).sum())


def bernoulli(y: Any, logits: np.ndarray) -> float:
    return float(np.sum(np.asarray(y, float) * logits - np.logaddexp(0, logits)))


def bivariate(x: np.ndarray, mean: Any, tau: np.ndarray) -> float:
    root = tau[:, None] * ROOT
    return float(stats.multivariate_normal.logpdf(x, mean, root @ root.T).sum())


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def sizes(silos: fed.Silos, leaf: str) -> tuple[int, ...]:
    return silos.sizes[silos.group[leaf]]


@needs_data
def test_gu_immun() -> None:
    silos = gu_immun.silos()
    rows = silos.pooled
    assert [sum(sizes(silos, leaf)) for leaf in ("y", "community", "communities")] == [
        2159,
        1595,
        161,
    ]
    assert len(silos) == 8
    assert (min(sizes(silos, "y")), max(sizes(silos, "y"))) == (251, 287)
    assert np.sum(rows["y"]) == 964
    table, x = gu_immun.data()
    assert x.shape == (2159, 15)
    # each child's family and community are those of its row
    families, communities = np.unique(table["mom"]), np.unique(table["comm"])
    np.testing.assert_array_equal(families[rows["family"]], table["mom"])
    np.testing.assert_array_equal(
        communities[np.asarray(rows["community"])[rows["family"]]], table["comm"]
    )
    beta, u, v = rng().normal(size=15), rng().normal(size=161), rng().normal(size=1595)
    logits = (
        0.3
        + x.to_numpy(float) @ beta
        + 2.0 * v[rows["family"]]
        + 0.7 * u[np.searchsorted(communities, table["comm"])]
    )
    expected = (
        norm(0.3, 0, 2.5) + norm(beta, 0, 2.5) + half_normal([2.0, 0.7], 2) + norm(u) + norm(v)
    )
    expected += bernoulli(rows["y"], logits)
    found = density(
        gu_immun.model,
        silos,
        intercept=0.3,
        beta=beta,
        sigma_family=2.0,
        sigma_community=0.7,
        u=u,
        v=v,
    )
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@needs_data
def test_heart_disease_hospitals() -> None:
    silos = heart_disease_hospitals.silos()
    assert sizes(silos, "y") == (303, 261, 46, 130)
    assert sizes(silos, "hospitals") == (1, 1, 1, 1)
    x, y, hospital = heart_disease_hospitals.data()
    beta, z, tau = rng().normal(size=13), rng().normal(size=(4, 2)), np.array([0.8, 0.3])
    own = (tau * z)[np.unique(hospital, return_inverse=True)[1]]
    logits = -0.2 + x.to_numpy(float) @ beta + own[:, 0] + own[:, 1] * x["age"].to_numpy(float)
    expected = (
        norm(-0.2, 0, 2.5)
        + norm(beta, 0, 2.5)
        + half_normal(tau, 1)
        + norm(z)
        + bernoulli(y, logits)
    )
    found = density(heart_disease_hospitals.model, silos, intercept=-0.2, beta=beta, tau=tau, z=z)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@needs_data
def test_sleepstudy() -> None:
    silos = sleepstudy.silos()
    assert sizes(silos, "y") == (3,) * 6
    y = sleepstudy.data().astype(float)
    assert y.shape == (18, 10)
    assert abs(y[0, 0] - 2.4956) < 1e-6
    mean, tau, sigma = np.array([2.5, 0.1]), np.array([0.25, 0.06]), 0.26
    own = mean + tau * rng().normal(size=(18, 2))
    expected = (
        norm(mean, [2.5, 0], [1, 0.5])
        + half_normal(tau, [0.5, 0.2])
        + half_normal(sigma, 0.5)
        + LKJ
    )
    expected += bivariate(own, mean, tau) + norm(y, own[:, :1] + own[:, 1:] * np.arange(10), sigma)
    values = {
        "mean": mean,
        "tau": tau,
        "sigma": sigma,
        "coefficients": own[:, None],
        "correlation_cholesky": ROOT,
    }
    np.testing.assert_allclose(density(sleepstudy.model, silos, **values), expected, rtol=1e-5)


@needs_data
def test_exam() -> None:
    silos, alone = exam.silos(), exam.silos_by_school()
    assert (sum(sizes(silos, "score")), sum(sizes(silos, "schools")), len(silos)) == (4059, 65, 8)
    assert sizes(alone, "schools") == (1,) * 65
    assert (min(sizes(alone, "score")), max(sizes(alone, "score"))) == (2, 198)
    table = exam.data()
    school, before = table["school"].to_numpy(int) - 1, table["standLRT"].to_numpy(float)
    beta, tau, sigma = np.array([0.1, 0.6, -0.2]), np.array([0.3, 0.12]), 0.75
    own = tau * rng().normal(size=(65, 2))
    means = (
        beta[0]
        + own[school, 0]
        + (beta[1] + own[school, 1]) * before
        + beta[2] * (table["sex"] == "M")
    )
    expected = (
        norm(beta)
        + half_normal(tau, 0.5)
        + half_normal(sigma, 1)
        + LKJ
        + bivariate(own, [0, 0], tau)
    )
    expected += norm(table["normexam"], means, sigma)
    values = {"beta": beta, "tau": tau, "sigma": sigma, "own": own, "correlation_cholesky": ROOT}
    for each in (silos, alone):
        np.testing.assert_allclose(density(exam.model, each, **values), expected, rtol=1e-5)


@needs_data
def test_lung_survival() -> None:
    silos, table = lung_survival.silos(), lung_survival.data()
    assert len(silos) == 18
    assert (len(table), table["died"].sum()) == (226, 163)
    assert (min(sizes(silos, "x")), max(sizes(silos, "x"))) == (2, 36)
    beta, z, k, tau = np.array([0.1, -0.5, 0.4]), rng().normal(size=18), 1.3, 0.3
    number = np.unique(table["inst"], return_inverse=True)[1]
    eta = -0.4 + table[["age", "female", "ecog"]].to_numpy() @ beta + tau * z[number]
    # hazard k t^(k - 1) exp(eta): SciPy's Weibull with scale exp(-eta / k)
    law = stats.weibull_min(k, scale=np.exp(-eta / k))
    years, died = table["years"].to_numpy(), table["died"].to_numpy(bool)
    expected = norm(-0.4, 0, 2.5) + norm(beta) + norm(z) + half_normal(tau, 0.5)
    expected += (
        stats.lognorm.logpdf(k, 0.5) + np.where(died, law.logpdf(years), law.logsf(years)).sum()
    )
    found = density(lung_survival.model, silos, intercept=-0.4, beta=beta, shape=k, tau=tau, z=z)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@needs_data
def test_stratified_cox() -> None:
    """Each death is compared with the patients of its institution who were alive, one by one."""
    beta, table = np.array([0.1, -0.5, 0.4]), lung_survival.data()
    expected = norm(beta)
    for _, own in table.groupby("inst"):
        risk = np.exp(own[["age", "female", "ecog"]].to_numpy() @ beta)
        years = own["years"].to_numpy()
        for i in np.flatnonzero(own["died"]):
            expected += np.log(risk[i] / risk[years >= years[i]].sum())
    found = density(stratified_cox.model, stratified_cox.silos(), beta=beta)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("tau", [0.5, 6.0])
def test_eight_schools_centered_is_the_same_law(tau: float) -> None:
    """In z = (effect - mu) / tau it is the non-centered model, with eight effects' Jacobian."""
    z, silos = rng().normal(size=8), eight_schools.silos()
    found = density(eight_schools.model_centered, silos, mu=4.0, tau=tau, effect=4.0 + tau * z)
    np.testing.assert_allclose(
        found + 8 * np.log(tau),
        density(eight_schools.model, silos, mu=4.0, tau=tau, z=z),
        rtol=1e-5,
    )


@needs_data
def test_kidiq() -> None:
    silos, rows = kidiq.silos(), kidiq.data()
    assert sizes(silos, "kid_score") == (73, 72, 72, 73, 72, 72)
    # sorted: the silos' ranges of the mother's IQ do not overlap
    bounds = [(float(np.min(silos[s]["mom_iq"])), float(np.max(silos[s]["mom_iq"]))) for s in silos]
    assert all(high <= low for (_, high), (low, _) in zip(bounds, bounds[1:], strict=False))
    # posteriordb's beta, through the center: the density is the one that its draws are from
    draws = kidiq.reference_draws()
    assert draws["beta"].shape == (10, 1000, 3)
    beta, sigma = draws["beta"][0, 0].astype(float), float(draws["sigma"][0, 0])
    means = (
        beta[0] + beta[1] * rows["mom_hs"].astype(float) + beta[2] * rows["mom_iq"].astype(float)
    )
    expected = stats.halfcauchy.logpdf(sigma, scale=2.5) + norm(rows["kid_score"], means, sigma)
    centered = beta + np.array([kidiq.IQ * beta[2], 0, 0])
    np.testing.assert_allclose(
        density(kidiq.model, silos, centered=centered, sigma=sigma), expected, rtol=1e-5
    )


@needs_data
@pytest.mark.parametrize("negative_binomial", [False, True])
def test_bird_counts(negative_binomial: bool) -> None:
    silos, rows = bird_counts.silos(), bird_counts.data()
    assert (len(silos), sum(sizes(silos, "count")), sum(sizes(silos, "sites"))) == (10, 2072, 235)
    assert (
        len(np.unique(np.stack([rows["site"], rows["year"]]), axis=1).T) == 2072
    )  # each visit once
    level, effect = 2 + rng().normal(size=235), 0.2 * rng().normal(size=9)
    effect -= effect.mean()
    rate = np.exp(level[rows["site"]] + effect[rows["year"]])
    values = {
        "mean": 1.8,
        "sigma_year": 0.2,
        "year_effect": effect,
        "sigma_site": 1.1,
        "level": level,
    }
    expected = (
        norm(1.8, 0, 5)
        + half_normal(0.2, 0.5)
        + norm(effect, 0, 0.2)
        - norm(0, 0, 0.2)
        + half_normal(1.1, 2)
        + norm(level, 1.8, 1.1)
    )
    if negative_binomial:
        expected += stats.lognorm.logpdf(6.0, 1, scale=np.exp(2))
        expected += stats.nbinom.logpmf(rows["count"], 6.0, 6.0 / (6.0 + rate)).sum()
        found = density(bird_counts.model_negative_binomial, silos, concentration=6.0, **values)
    else:
        expected += stats.poisson.logpmf(rows["count"], rate).sum()
        found = density(bird_counts.model, silos, **values)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@needs_data
def test_ordinal_intake() -> None:
    silos, table = ordinal_intake.silos(), exam.data()
    assert (sum(sizes(silos, "band")), sum(sizes(silos, "schools")), len(silos)) == (4059, 65, 8)
    band = np.asarray(silos.pooled["band"])
    np.testing.assert_array_equal(np.bincount(band), [1176, 2344, 539])
    cuts, slope, tau, own = np.array([-1.5, 2.0]), 1.2, 0.8, 0.8 * rng().normal(size=65)
    eta = slope * table["standLRT"].to_numpy() + own[table["school"].to_numpy(int) - 1]
    below = np.stack(
        [np.zeros_like(eta), *(special.expit(cut - eta) for cut in cuts), np.ones_like(eta)]
    )
    # the cuts: c0 and log(c1 - c0) are N(0, 2)
    expected = norm([cuts[0], np.log(np.diff(cuts)[0])], 0, 2) - np.log(np.diff(cuts)[0])
    expected += norm(slope, 0, 2) + half_normal(tau, 1) + norm(own, 0, tau)
    expected += np.log(np.diff(below, axis=0)[band, np.arange(len(band))]).sum()
    found = density(ordinal_intake.model, silos, cuts=cuts, slope=slope, tau=tau, own=own)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@needs_data
def test_intake_shares() -> None:
    silos, bands = intake_shares.silos(), intake_shares.counts()
    assert sizes(silos, "bands") == (9, *(8,) * 7)
    np.testing.assert_array_equal(bands.sum(0), [1176, 2344, 539])
    assert (bands.sum(1).min(), bands.sum(1).max()) == (2, 198)
    base, concentration = np.array([0.3, 0.55, 0.15]), 9.0
    shares = rng().dirichlet(concentration * base, 65).astype(np.float32).astype(float)
    expected = stats.dirichlet.logpdf(base, np.ones(3)) + stats.lognorm.logpdf(
        concentration, 1, scale=np.exp(2)
    )
    for school, counts in zip(shares, bands, strict=True):
        share = school / school.sum()
        expected += stats.dirichlet.logpdf(share, concentration * base)
        expected += stats.multinomial.logpmf(counts, int(counts.sum()), share)
    found = density(
        intake_shares.model, silos, base=base, concentration=concentration, shares=shares
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@needs_data
def test_horseshoe() -> None:
    silos, (x, y) = horseshoe.silos(), horseshoe.data()
    assert x.shape == (1030, 16)
    assert sizes(silos, "y") == (206,) * 5
    np.testing.assert_allclose(x.mean(), 0, atol=1e-5)
    z, local, common, slab, sigma = (
        rng().normal(size=16),
        np.exp(rng().normal(size=16)),
        0.1,
        1.5,
        0.6,
    )
    raw = common * local
    beta = raw * np.sqrt(slab / (slab + raw**2)) * z
    expected = (
        norm(z) + stats.halfcauchy.logpdf(local).sum() + stats.halfcauchy.logpdf(common, scale=0.1)
    )
    expected += stats.invgamma.logpdf(slab, 2, scale=2) + half_normal(sigma, 1)
    expected += norm(y, x.to_numpy(float) @ beta, sigma)
    found = density(horseshoe.model, silos, z=z, local=local, common=common, slab=slab, sigma=sigma)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_hospital_effects() -> None:
    silos = hospital_effects.silos()
    y, smoke = hospital_effects.data()
    assert sizes(silos, "y") == hospital_effects.TEN
    assert sizes(silos, "cities") == (1,) * 10
    z, u = rng().normal(size=537), rng().normal(size=10)
    level = -3 + 0.4 * smoke + 0.5 * np.repeat(u, hospital_effects.TEN) + 2.1 * z
    logits = level[:, None] - 0.2 * np.arange(-2, 2)
    expected = (
        norm(-3, 0, 5)
        + norm([-0.2, 0.4], 0, 2.5)
        - 2.1
        - 0.5
        + norm(z)
        + norm(u)
        + bernoulli(y, logits)
    )
    values = {
        "intercept": -3,
        "age": -0.2,
        "smoke": 0.4,
        "sigma_child": 2.1,
        "sigma_city": 0.5,
        "u": u,
        "z": z[:, None],
    }
    np.testing.assert_allclose(
        density(hospital_effects.model, silos, **values), expected, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (gu_immun, r"mixed_models.*mlmRev.*2,159 rows"),
        (heart_disease_hospitals, r"heart_disease.*UCI repository, data set 45"),
        (sleepstudy, r"mixed_models.*lme4.*180 rows"),
        (exam, r"mixed_models.*mlmRev.*4,059 rows"),
        (lung_survival, r"mixed_models.*survival.*228 rows"),
        (kidiq, r"posteriordb.*434 children"),
        (bird_counts, r"posteriordb.*2,072 counts"),
        (ordinal_intake, r"mixed_models.*mlmRev.*4,059 rows"),
        (intake_shares, r"mixed_models.*mlmRev.*4,059 rows"),
        (horseshoe, r"uci_regression.*data set 165.*1,030 rows"),
    ],
)
def test_missing_data_are_named(module: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMPYRO_FED_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=f"NUMPYRO_FED_DATA is not set.*{words}|{words}"):
        module.silos()
