"""Leaving a silo out by weights: against the closed form of a Gaussian hierarchy."""

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from messages import Fits
from numpyro.infer import MCMC
from scipy import stats

import numpyro_fed as fed
import numpyro_fed.results.refit as refit_module
from numpyro_fed.engines.wire import connect
from numpyro_fed.results.row_check import RowCheck
from numpyro_fed.results.silo_likelihood import coefficients
from numpyro_fed.vi.importance import log_bridge

SIZES, PRIOR, BETWEEN, WITHIN = (4, 7, 3, 5), 3.0, 0.7, 1.2


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, BETWEEN))
        numpyro.sample("y", dist.Normal(z, WITHIN), obs=y)


def crossed(y, case, other, cases):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR))
    with fed.silo_plate("cases", cases.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
    with fed.silo_plate("ratings", y.shape[0]):
        numpyro.sample("y", dist.Normal(z[case] + z[other], 1), obs=y)


def made(outlier=0.0, at=3):
    rng = np.random.default_rng(0)
    return {
        f"silo {s}": {"y": (0.3 * s + outlier * (s == at) + rng.normal(size=n)).astype(np.float32)}
        for s, n in enumerate(SIZES)
    }


def made_svi():
    return fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))


def evidence(y):
    """Return the log density of rows, with mu and the latents integrated out."""
    n, own = len(y), BETWEEN**2 + WITHIN**2
    return stats.multivariate_normal(np.zeros(n), own * np.eye(n) + PRIOR**2).logpdf(y)


def posterior(y):
    own = BETWEEN**2 + WITHIN**2
    precision = PRIOR**-2 + len(y) / own
    return y.sum() / own / precision, precision**-0.5


def exact(data):
    """Return each silo's log density under all others, and the shift of mu without it."""
    y, by = np.concatenate([d["y"] for d in data.values()]), np.repeat(range(len(SIZES)), SIZES)
    mean, sd = posterior(y)
    rest = [y[by != s] for s in range(len(SIZES))]
    shift = [(posterior(r)[0] - mean) / sd for r in rest]
    return evidence(y), np.array([evidence(y) - evidence(r) for r in rest]), np.array(shift)


@pytest.fixture(scope="module")
def fitted():
    silos = fed.Silos(made())
    return silos, fed.fit(model, silos, progress_bar=False)


@pytest.fixture(scope="module")
def checked(fitted):
    return fed.check(fitted[1], model, fitted[0], num_draws=1000, refit=False)


@pytest.mark.ci
def test_left_out_by_weights(checked):
    total, elpd, shift = exact(made())
    good = (checked.table["pareto_k"] <= 0.7).to_numpy()
    assert good.sum() >= 3
    error = np.abs(checked.table["elpd"] - elpd).to_numpy()
    assert (error < 4 * checked.table["se"].to_numpy())[good].all()
    assert (np.abs(checked.shifts["mu"] - shift).to_numpy() < 0.15)[good].all()
    assert checked.log_evidence[0] == pytest.approx(total, abs=0.02)
    # a control: densities under all data, silo's own included, are others
    own = np.log(np.exp(checked.log_likelihood).mean(0))
    assert (np.abs(own - elpd) > 4 * checked.table["se"].to_numpy())[1:].all()


@pytest.mark.ci
def test_log_likelihoods_integrate_latents_out(fitted, checked):
    silos, idata = fitted
    mu = idata.posterior["mu"].values.ravel()
    some = np.arange(1000) * len(mu) // 1000
    own = np.sqrt(BETWEEN**2 + WITHIN**2)
    for s, name in enumerate(silos.names):
        expected = stats.norm.logpdf(np.asarray(silos[name]["y"]), mu[some, None], own).sum(1)
        np.testing.assert_allclose(checked.log_likelihood[:, s], expected, rtol=1e-4)


@pytest.mark.ci
def test_an_outlier_is_fitted_without():
    data = made(outlier=4.0)
    silos = fed.Silos(data)
    idata = fed.fit(model, silos, progress_bar=False)
    found = fed.check(idata, model, silos, num_draws=1000)
    _, elpd, shift = exact(data)
    row = found.table.loc["silo 3"]
    assert (row["how"], found.table["elpd"].idxmin(), row["site"]) == ("refit", "silo 3", "mu")
    assert row["elpd"] == pytest.approx(elpd[3], abs=0.05)  # the difference of two evidences
    assert row["shift"] == pytest.approx(shift[3], abs=0.1)
    assert "refit" in repr(found)
    found = fed.check(idata, model, silos, num_draws=1000, rows=False, refit=False)
    assert found.table.loc["silo 3", "how"] == "failed weights"
    assert "silo 3: do not trust" in repr(found)
    assert "Log evidence" in repr(found)


@pytest.mark.ci
def test_without_evidence_a_bridge_tells_the_density(monkeypatch):
    """Within 4 of its errors of the closed form."""
    data = made(outlier=5.0)
    silos = fed.Silos(data)
    idata = fed.fit(model, silos, method="hmc", num_draws=2000, progress_bar=False)
    found = fed.check(idata, model, silos, rows=False)
    row = found.table.loc["silo 3"]
    assert row["how"] == "refit"
    assert row["se"] < 0.3
    assert abs(row["elpd"] - exact(data)[1][3]) < 4 * row["se"]
    monkeypatch.setattr(refit_module, "_FAR", 0.001)
    assert fed.check(idata, model, silos, rows=False).table.loc["silo 3", "how"] == "unsound refit"


@pytest.mark.ci
def test_a_refit_of_which_one_draw_is_left_is_unsound(monkeypatch):
    data = made(outlier=5.0)
    silos = fed.Silos(data)
    idata = fed.fit(model, silos, progress_bar=False)
    fitted = refit_module.vi_inference_data

    def one_draw(*args, **options):
        found = fitted(*args, **options)
        post = found.posterior.copy(deep=True)
        post["mu"].values = np.full(post["mu"].shape, 0.5)
        return az.InferenceData(posterior=post.assign_attrs(pareto_k=np.inf))

    monkeypatch.setattr(refit_module, "vi_inference_data", one_draw)
    found = fed.check(idata, model, silos)
    assert found.table.loc["silo 3", "how"] == "unsound refit"


def test_a_bridge_has_the_closed_form():
    """A mean of e^(3 x) over standard normals is e^4.5; far apart, the error says so."""
    rng = np.random.default_rng(1)
    for slope, far in ((1.0, False), (3.0, False), (12.0, True)):
        above, below = slope * rng.normal(slope, size=4000), slope * rng.normal(size=4000)
        value, error = log_bridge(above, below)
        assert (error > 0.5) == far
        assert far or abs(value - slope**2 / 2) < 4 * error


@pytest.mark.ci
def test_replicates_are_of_the_fit_without_the_silo(tmp_path):
    """The share above is that of the closed form, within 4 errors of 1,000 draws.

    By weights it is not: most rows are the silo's, so that they fail. The rest of the check stays.
    """
    rng = np.random.default_rng(3)
    data = {s: {"y": rng.normal(0.6 * (s == "b"), 1.3, size=12)} for s in "abcd"}
    data["b"]["y"] = rng.normal(1.2, 1.3, size=200)
    silos = fed.Silos(data)
    remote = connect(Fits(silos, made_svi(), tmp_path, made_svi), model, fit=made_svi())
    idata = fed.fit(model, remote, progress_bar=False)
    found = fed.check(idata, model, remote, num_draws=2000, refit=True)
    assert found.table["how"].tolist() == ["weights", "refit", "weights", "weights"]
    mean, sd = posterior(np.concatenate([d["y"] for t, d in data.items() if t != "b"]))
    own = BETWEEN**2 + WITHIN**2
    share = stats.norm.sf(data["b"]["y"].mean(), mean, np.sqrt(sd**2 + own / 200))
    error = 4 * np.sqrt(share * (1 - share) / 1000)
    assert abs(found.rows.predictive.loc[("y", "b"), "mean_tail"] - share) < error
    plain = fed.check(idata, model, remote, num_draws=2000)
    assert abs(plain.rows.predictive.loc[("y", "b"), "mean_tail"] - share) > error
    assert found.rows.loo.equals(plain.rows.loo)


@pytest.mark.parametrize("remote", [False, True])
def test_some_of_the_silos(remote):
    """Rows, positions and order are those of silos that are made of the same data."""
    data = {
        s: {"y": np.arange(3.0) + i, "g": np.array([0, 1, 1]), "u": np.zeros(2) + i}
        for i, s in enumerate("abc")
    }
    how = {"rows": {"y": "y", "g": "y", "u": "u"}, "index": {"g": "u"}}
    silos = fed.Silos(data, **how)
    expected = fed.Silos({s: data[s] for s in "ac"}, **how)
    if remote:
        some = fed.RemoteSilos(silos, fed.Loopback(silos)).among(["a", "c"])
        assert (some.numbers, some.among(["c"]).numbers) == ((0, 2), (2,))
        assert {k: x.shape for k, x in some.rows.items()} == {
            k: x.shape for k, x in expected.rows.items()
        }
    else:
        some = silos.among(["a", "c"])
        for leaf, x in expected.pooled.items():
            np.testing.assert_array_equal(some.pooled[leaf], x)
            np.testing.assert_array_equal(silos.among(["c", "a"])["c"][leaf], data["c"][leaf])
    assert some.spec == expected.spec


def test_a_shared_argument_as_long_as_rows_stays_shared():
    data = {s: {"y": np.arange(n) + 1.0, "grid": np.arange(4.0)} for s, n in (("a", 4), ("b", 5))}
    assert "grid" in fed.Silos(data).among(["a"]).shared


def test_lines_say_on_which_side_a_silo_is():
    tails = pd.DataFrame(
        {"mean": [9.0, 1.0], "mean_tail": [0.001, 0.999]},
        pd.MultiIndex.from_tuples([("y", "high"), ("y", "low")], names=["site", "silo"]),
    )
    lines = "\n".join(RowCheck(pd.DataFrame(index=tails.index[:0]), tails[:0], tails).lines())
    assert "'high': higher than 99.9 % of replicates" in lines
    assert "'low': lower than 99.9 % of replicates" in lines


@pytest.mark.ci
def test_chains_are_checked_like_fits(fitted, checked):
    silos = fitted[0]
    mcmc = MCMC(
        fed.HMC(model),
        num_warmup=200,
        num_samples=1000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), silos)
    found = fed.check(fed.to_inference_data(mcmc, silos), model, silos, num_draws=1000, refit=False)
    assert found.log_evidence is None
    error = np.hypot(found.table["se"], checked.table["se"])
    good = (found.table["pareto_k"] <= 0.7) & (checked.table["pareto_k"] <= 0.7)
    assert good.sum() >= 3
    assert (np.abs(found.table["elpd"] - checked.table["elpd"]) < 4 * error)[good].all()


@pytest.mark.ci
def test_remote_silos_send_a_number_a_draw(fitted, checked):
    silos, idata = fitted
    remote = fed.RemoteSilos(silos, fed.Loopback(silos))
    found = fed.check(idata, model, remote, num_draws=1000)
    np.testing.assert_allclose(found.log_likelihood, checked.log_likelihood, rtol=1e-5)


@pytest.mark.ci
def test_remote_silos_are_fitted_without_one(tmp_path):
    """The second of four is left out, so that others have other numbers among the rest."""
    data = made(outlier=5.0, at=1)
    silos = fed.Silos(data)
    remote = connect(Fits(silos, made_svi(), tmp_path, made_svi), model, fit=made_svi())
    idata = fed.fit(model, remote, progress_bar=False)
    _, elpd, shift = exact(data)
    found = fed.check(idata, model, remote, num_draws=1000, rows=False, refit=True)
    row = found.table.loc["silo 1"]
    assert row["how"] == "refit"
    assert row["elpd"] == pytest.approx(elpd[1], abs=0.05)
    assert row["shift"] == pytest.approx(shift[1], abs=0.1)
    # others' numbers: leaving out another silo's data would be far off
    assert abs(elpd[1] - elpd[0]) > 1
    plain = fed.check(idata, model, remote, num_draws=1000, rows=False)
    assert plain.table.loc["silo 1", "how"] == "failed weights"


@pytest.mark.ci
def test_figure(checked):
    figure = checked.plot()
    labels = [x.get_text() for x in figure.axes[0].get_yticklabels()]
    assert labels == list(checked.table.index)


@pytest.mark.ci
def test_bad_input(fitted):
    silos, idata = fitted
    with pytest.raises(TypeError, match=r"expected fed.Silos.*got dict"):
        fed.check(idata, model, made())
    with pytest.raises(TypeError, match=r"model: expected a function .*, got 'a name'"):
        fed.check(idata, "a name", silos)
    with pytest.raises(ValueError, match="two silos or more"):
        fed.check(idata, model, fed.Silos({"all": made()["silo 1"]}))
    with pytest.raises(ValueError, match="num_draws: expected"):
        fed.check(idata, model, silos, num_draws=0)
    with pytest.raises(ValueError, match="expected 25 draws or more, got 24"):
        fed.check(idata, model, silos, num_draws=24)
    with pytest.raises(TypeError, match="refit: expected True, False or None, got 'yes'"):
        fed.check(idata, model, silos, refit="yes")
    with pytest.raises(TypeError, match="rows: expected True or False, got None"):
        fed.check(idata, model, silos, rows=None)
    fewer = fed.Silos({k: v for k, v in made().items() if k != "silo 2"})
    for ask in (fed.check, fed.prior_sensitivity):
        with pytest.raises(ValueError, match=r"the silos of the fit, .*'silo 2'.*, got"):
            ask(idata, model, fewer)
    more = {k: {"y": np.append(v["y"], 0)} for k, v in made().items()}
    with pytest.raises(ValueError, match="19 elements of 'patients', got 23"):
        fed.check(idata, model, fed.Silos(more))

    def other(y):
        nu = numpyro.sample("nu", dist.Normal(0, 1))
        with fed.silo_plate("patients", y.shape[0]):
            numpyro.sample("y", dist.Normal(nu, 1), obs=y)

    with pytest.raises(ValueError, match=r"the posterior of this model.*\['nu'\] are not in it"):
        fed.check(idata, other, silos)
    rows = dict.fromkeys(("y", "case", "other"), "ratings") | {"cases": "cases"}
    one = {"y": np.zeros(4), "case": np.arange(4) % 2, "other": np.arange(4) // 2}
    one["cases"] = np.zeros(2)
    joint = fed.Silos({"a": one, "b": one}, rows=rows, index={"case": "cases", "other": "cases"})
    bare = idata.copy()
    bare.posterior.attrs = {}
    with pytest.raises(ValueError, match="latents of a silo depend on each other"):
        fed.check(bare, crossed, joint)


@pytest.mark.ci
def test_over_a_wire_as_at_hand(fitted, checked, tmp_path):
    silos, idata = fitted
    remote = connect(Fits(silos, made_svi(), tmp_path, made_svi), model, fit=made_svi())
    found = fed.check(idata, model, remote, num_draws=1000)
    np.testing.assert_allclose(found.log_likelihood, checked.log_likelihood, rtol=1e-5)


def test_a_remote_fit_keeps_what_a_check_needs(monkeypatch):
    silos = fed.Silos(made())
    remote = fed.RemoteSilos(silos, fed.Loopback(silos))
    idata = fed.fit(model, remote, num_draws=2000, progress_bar=False)
    assert idata.log_likelihood_silo["log_likelihood"].dims == ("chain", "draw", "silo")

    def unasked(calls):
        raise AssertionError("a silo was asked again")

    monkeypatch.setattr(remote.carrier, "ask", unasked)
    found = fed.check(idata, model, remote, rows=False)
    _, elpd, _ = exact(made())
    good = (found.table["pareto_k"] <= 0.7).to_numpy()
    assert good.sum() >= 3
    assert (np.abs(found.table["elpd"] - elpd) < 4 * found.table["se"] + 0.01)[good].all()
    with pytest.raises(AssertionError, match="asked again"):  # a control: rows have to be asked
        fed.check(idata, model, remote)


def test_a_coefficient_that_never_moves_is_none():
    chol = np.zeros((5, 2, 2))
    chol[:, 0, 0], chol[:, 1] = 1.0, np.random.default_rng(0).normal(size=(5, 2))
    names, values = coefficients({"mu": np.arange(5.0), "chol": chol})
    assert names == ["mu", "chol[1, 0]", "chol[1, 1]"]
    np.testing.assert_array_equal(values, np.column_stack([np.arange(5.0), chol[:, 1]]))
