"""Models are compared by the silos that each leaves out."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize_scalar

import numpyro_fed as fed
from numpyro_fed.results.compare_models import stacking_weights
from numpyro_fed.results.row_check import RowCheck


def made(elpd, evidence=None, names=("a", "b", "c"), loo=None, observed=("y",)):
    index = pd.Index(names, name="silo")
    table = pd.DataFrame(
        {"rows": [3, 4, 5], "elpd": elpd, "pareto_k": [0.1, 0.9, 0.2]}, index
    ).assign(how=["weights", "refit", "weights"])
    if loo is not None:  # two observed sites, silos in another order
        places = pd.MultiIndex.from_product([["x", "y"], names[::-1]], names=["site", "silo"])
        loo = pd.DataFrame({"elpd": np.concatenate([loo[::-1], np.ones(3)])}, places)
        loo = RowCheck(loo, *[pd.DataFrame()] * 2)
    shifts, terms = pd.DataFrame(index=index), np.zeros((1, 3))
    return fed.SiloCheck(table, shifts, terms, loo, observed, "sound", evidence)


def test_the_table():
    one, other = np.array([-3.0, -4.0, -5.0]), np.array([-4.0, -3.5, -9.0])
    table = fed.compare_models({"other": made(other), "one": made(one, (-11.0, 0.01))})
    assert table.index.tolist() == ["one", "other"]
    assert table["elpd"].tolist() == [-12.0, -16.5]
    assert table["difference"].tolist() == [0.0, -4.5]
    assert table.loc["other", "se"] == pytest.approx(np.sqrt(3) * np.std(other - one, ddof=1))
    assert table["worst_k"].tolist() == [0.2, 0.2]  # not that of the refit
    assert table.loc["one", "log_evidence"] == -11.0
    assert np.isnan(table.loc["other", "log_evidence"])


def test_failed_weights_are_told():
    checks = {"one": made([-3.0, -4.0, -5.0]), "other": made([-4.0, -3.5, -9.0])}
    checks["other"].table.loc["b", "how"] = "failed weights"
    with pytest.warns(UserWarning, match=r"'other': the weights, or the refit, of silos \['b'\]"):
        fed.compare_models(checks)


def test_models_of_other_data_are_told():
    one = np.array([-3.0, -4.0, -5.0])
    checks = {"one": made(one), "other": made(one - 1, observed=("y", "bmi"))}
    with pytest.warns(UserWarning, match=r"'other' observes \['bmi', 'y'\], and 'one' \['y'\]"):
        fed.compare_models(checks)


def test_rows_are_compared_by_silo():
    one, other = np.array([-3.0, -4.0, -5.0]), np.array([-3.5, -4.0, -7.5])
    checks = {"one": made(one, loo=2 * one), "other": made(other, loo=other)}
    table = fed.compare_models(checks)
    assert table["elpd_loo"].tolist() == [-24.0 + 3, -15.0 + 3]
    # from the model that predicts silos best, which is not the one that predicts rows best
    assert table["difference_loo"].tolist() == [0.0, 9.0]
    error = np.sqrt(3) * np.std(other - 2 * one, ddof=1)
    assert table.loc["other", "se_loo"] == pytest.approx(error)
    # a check without rows has no part in it
    table = fed.compare_models({"one": made(one, loo=one), "other": made(other)})
    assert table["elpd_loo"].isna().tolist() == [False, True]
    assert np.isnan(table.loc["other", ["difference_loo", "se_loo"]].astype(float)).all()


def test_weights_are_the_best_mixture():
    elpd = np.random.default_rng(0).normal(size=(2, 12)) - 5

    def loss(w):
        return -np.log(w * np.exp(elpd[0]) + (1 - w) * np.exp(elpd[1])).sum()

    best = minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-9}).x
    np.testing.assert_allclose(stacking_weights(elpd), [best, 1 - best], atol=1e-4)
    # a model that is worse everywhere has no weight
    worse = np.vstack([elpd, elpd.min(0) - 2])
    np.testing.assert_allclose(stacking_weights(worse), [best, 1 - best, 0], atol=1e-4)


def test_bad_input():
    with pytest.raises(TypeError, match=r"expected \{name: fed.check\(...\)\}, got list"):
        fed.compare_models([made([-3.0, -4.0, -5.0])] * 2)
    one = made(np.zeros(3))
    with pytest.raises(ValueError, match="two models or more, got 1"):
        fed.compare_models({"one": one})
    with pytest.raises(TypeError, match=r"expected fed.check.*got dict for 'two'"):
        fed.compare_models({"one": one, "two": {}})
    with pytest.raises(ValueError, match="same silos; 'two' has others than 'one'"):
        fed.compare_models({"one": one, "two": made(np.zeros(3), names=("a", "b", "d"))})
    rows = dataclasses.replace(one, table=one.table.assign(rows=[3, 4, 6]))
    with pytest.raises(ValueError, match="same silos"):
        fed.compare_models({"one": one, "two": rows})
