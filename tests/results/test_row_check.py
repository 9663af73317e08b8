"""Checks of rows in their silos: against ArviZ on pooled data, and against closed forms."""

from operator import attrgetter

import arviz as az
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from messages import Fits
from scipy import special, stats

import numpyro_fed as fed
from numpyro_fed._arviz import has_trees
from numpyro_fed.engines.wire import connect
from numpyro_fed.vi.row_checks import FEWEST, NUMBERS, row_numbers

SIZES = (40, 130, 23, 7)


def logistic(x, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def groups(y, group, names):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    with fed.silo_plate("centers", names.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, sd))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(z[group], 1), obs=y)


def tables():
    rng = np.random.default_rng(3)
    found = {}
    for s, n in enumerate(SIZES):
        x = np.stack([np.ones(n), rng.normal(size=n)], 1).astype(np.float32)
        y = rng.random(n) < special.expit(x @ [0.3, 1.0])
        found[f"s{s}"] = {"x": x, "y": y.astype(np.float32)}
    return found


def centers(shift=0.0, num=8, seed=0):
    rng = np.random.default_rng(seed)
    data = {}
    for s in range(num):
        y = rng.normal(rng.normal(0, 0.5) + shift * (s == 3), 1, 20 + s).astype(np.float32)
        data[f"s{s}"] = {"y": y, "group": np.zeros(20 + s, int), "names": np.array([1.0 * s])}
    rows = {"y": "patients", "group": "patients", "names": "centers"}
    return fed.Silos(data, rows=rows, index={"group": "centers"})


@pytest.fixture(scope="module")
def checked():
    silos = fed.Silos(tables())
    idata = fed.fit(logistic, silos, num_draws=1000, progress_bar=False)
    return silos, idata, fed.check(idata, logistic, silos, num_draws=1000, refit=False)


def leave_one_out(idata):
    """Return ArviZ's density of rows that are left out, by either form's names."""
    found = az.loo(idata, pointwise=True)
    names = ("elpd", "se", "p", "elpd_i") if has_trees() else ("elpd_loo", "se", "p_loo", "loo_i")
    return dict(zip(("elpd", "se", "p", "each"), attrgetter(*names)(found), strict=True))


def test_rows_are_left_out_as_arviz_does_on_pooled_data(checked):
    silos, idata, found = checked
    # draw by draw: no latents are drawn anew, so the numbers are the same
    pooled = leave_one_out(idata)
    own = np.asarray(silos.silo_of_row("x"))
    each = np.asarray(pooled["each"])[np.argsort(np.asarray(silos.order["x"]))]
    table = found.rows.loo.loc["y"]
    assert table["rows"].tolist() == list(SIZES)  # without padding
    np.testing.assert_allclose(table["elpd"], np.bincount(own, each), rtol=1e-4)
    errors = [np.sqrt(n * each[own == s].var()) for s, n in enumerate(SIZES)]
    np.testing.assert_allclose(table["se"], errors, rtol=1e-3)
    assert table["p_loo"].sum() == pytest.approx(pooled["p"], rel=1e-2)
    assert table["bad_k"].sum() == 0
    assert f"elpd {pooled['elpd']:.1f} (se {pooled['se']:.1f})" in repr(found)
    # a control: with the row itself the density is higher
    assert table["elpd"].sum() < pooled["elpd"] + pooled["p"] - 1


def test_tenths_of_rows_by_prediction(checked):
    silos, idata, found = checked
    table = found.rows.calibration.loc[("y", "s1")]
    assert table["rows"].tolist() == [13] * 10
    x, y = np.asarray(silos["s1"]["x"]), np.asarray(silos["s1"]["y"])
    draws = idata.posterior["b"].values.reshape(-1, 2)
    p = special.expit(x @ draws.T)  # leaving one of 200 rows out moves a prediction by 1 %
    order = np.argsort(p.mean(1))
    expected = [p[rows].mean() for rows in np.array_split(order, 10)]
    np.testing.assert_allclose(table["prediction"], expected, atol=0.02)
    assert np.sum(table["rows"] * table["outcome"]) == pytest.approx(y.sum(), rel=1e-5)
    assert len(found.rows.calibration.loc[("y", "s2")]) == 2  # 23 rows
    assert "s3" not in found.rows.calibration.index.get_level_values("silo")  # seven rows


def test_few_rows_tell_no_outcome(checked):
    _, _, found = checked
    assert SIZES[3] < FEWEST
    assert found.rows.predictive.loc[("y", "s3")].isna().all()
    assert found.rows.predictive.loc[("y", "s2")].notna().all()


def test_what_leaves_a_silo_is_41_numbers():
    rng = np.random.default_rng(0)
    y, theta = rng.normal(size=50), rng.normal(size=(300, 1)) / 7
    density = stats.norm.logpdf(y, theta)
    anew = theta[:, None] + rng.normal(size=(300, 50))[None].swapaxes(0, 1)[:, 0, None]
    drawn = np.stack([anew.mean((1, 2)), anew.std((1, 2)), np.zeros(300)], 1)
    mean = np.broadcast_to(theta, density.shape)
    own = np.array([y.mean(), y.std(), 0.0])
    found = row_numbers(density.sum(1), density, mean, drawn, y, np.ones(50, bool), own)
    assert found.shape == (NUMBERS,) == (41,)
    masked = row_numbers(
        density.sum(1), np.insert(density, 9, -1e6, 1), np.insert(mean, 9, 0, 1), drawn,
        np.insert(y, 9, 1e6), np.insert(np.ones(50, bool), 9, False), own,
    )  # fmt: skip
    np.testing.assert_array_equal(found, masked)


@pytest.mark.parametrize("whole", [False, True])
def test_a_zero_is_no_finding_among_outcomes_that_are_not_whole(whole):
    y = np.round(np.linspace(0, 9, 50)) if whole else np.linspace(0, 9, 50)
    density, drawn = np.zeros((100, 50)), np.tile([4.5, 2.6, 0.0], (100, 1))
    own = np.array([y.mean(), y.std(), np.mean(y == 0)])
    found = row_numbers(density.sum(1), density, density, drawn, y, np.ones(50, bool), own)
    assert found[-1] == 0.0 if whole else np.isnan(found[-1])


@pytest.mark.ci
@pytest.mark.parametrize(("shift", "seen"), [(0.0, False), (4.0, True)])
def test_an_outlier_is_seen_and_the_control_is_not(shift, seen):
    silos = centers(shift)
    idata = fed.fit(groups, silos, num_draws=1000, progress_bar=False)
    found = fed.check(idata, groups, silos, num_draws=1000, refit=False)
    tail = found.rows.predictive.loc[("y", "s3"), "mean_tail"]
    assert (tail < 0.005) == seen
    assert ("\n  mean of 'y' in silo 's3'" in repr(found)) == seen
    assert ("most extreme" in repr(found)) != seen
    if not seen:  # replicates with latents that the silo's own data chose would be near one half
        tails = found.rows.predictive["mean_tail"]
        assert tails.max() - tails.min() > 0.5


@pytest.mark.ci
def test_latents_are_integrated_as_in_pooled_draws():
    silos = centers()
    idata = fed.fit(groups, silos, progress_bar=False)
    found = fed.check(idata, groups, silos, refit=False)
    pooled = leave_one_out(idata)
    total = found.rows.loo["elpd"].sum()
    # two sets of draws: each elpd has an error of about sqrt(p_loo / draws) times a few
    assert total == pytest.approx(pooled["elpd"], abs=4 * np.sqrt(pooled["p"] * 2 / 1000))
    assert found.rows.loo["p_loo"].sum() == pytest.approx(pooled["p"], abs=0.5)


@pytest.mark.ci
def test_rows_over_a_wire_as_at_hand(checked, tmp_path):
    silos, idata, here = checked

    def make():
        return fed.ConduciveSFVI(logistic, fed.AutoSiloNormal(logistic))

    remote = connect(Fits(silos, make(), tmp_path, make), logistic, fit=make())
    found = fed.check(idata, logistic, remote, num_draws=1000)
    np.testing.assert_allclose(found.rows.loo, here.rows.loo, rtol=1e-4)
    np.testing.assert_allclose(found.rows.predictive, here.rows.predictive, atol=0.01)


def censored(y, seen, w):
    rate = numpyro.sample("rate", dist.Gamma(2, 2))
    with fed.silo_plate("patients", y.shape[0]):
        law = dist.RightCensoredDistribution(dist.Exponential(rate), seen)
        numpyro.sample("y", law, obs=y)
        numpyro.sample("w", dist.Normal(rate, 1).expand([2]).to_event(1), obs=w)
        with numpyro.handlers.mask(mask=seen > 0):
            numpyro.sample("v", dist.Normal(rate, 1), obs=y)


@pytest.mark.ci
def test_outcomes_without_replicates_and_masked_ones():
    rng = np.random.default_rng(1)
    data = {
        s: {"y": rng.exponential(size=n), "seen": np.arange(n) % 2, "w": rng.normal(size=(n, 2))}
        for s, n in {"a": 30, "b": 40}.items()
    }
    silos = fed.Silos(data)
    idata = fed.fit(censored, silos, num_draws=500, progress_bar=False)
    rows = fed.check(idata, censored, silos, num_draws=500, refit=False).rows
    assert rows.predictive.loc[["y", "w"]].isna().all(axis=None)  # censored, and vectors
    judged = rows.predictive.loc["v"].drop(columns="zeros_tail")  # not for continuous outcomes
    assert judged.notna().all(axis=None)
    assert rows.loo.loc[["y", "v", "w"], "rows"].tolist() == [30, 40, 15, 20, 30, 40]
    assert np.isfinite(rows.loo).all(axis=None)


def test_outcomes_of_a_factor_have_no_rows_to_check():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.factor("y", -0.5 * (y - mu) ** 2)

    silos = fed.Silos({s: {"y": np.arange(n) + 0.5} for s, n in {"a": 3, "b": 4}.items()})
    idata = fed.fit(model, silos, num_draws=500, progress_bar=False)
    found = fed.check(idata, model, silos, refit=False)
    assert found.rows is None
    assert np.isfinite(found.table["elpd"]).all()
