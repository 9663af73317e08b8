"""``fed.fit``, and FSGLD started at a variational fit."""

import json
import re

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS
from two_plates import crossed, crossed_silos, nested, nested_silos
from vi_models import (
    PRIOR_SD,
    hierarchy,
    hierarchy_posterior,
    hierarchy_silos,
    three_kinds,
    three_kinds_silos,
    wheeze,
    wheeze_silos,
)

import numpyro_fed as fed
from numpyro_fed.data import views as storage
from numpyro_fed.front import steps
from numpyro_fed.results.diagnose import Diagnosis


def vi(model, silos, rounds=12):
    return fed.ConduciveSFVI(model, fed.AutoSiloNormal(model)).run(
        random.key(0), rounds, silos, progress_bar=False
    )


@pytest.fixture(scope="module")
def seventy():
    return wheeze_silos(np.arange(70) % 4)


@pytest.fixture(scope="module")
def started(seventy):
    return vi(wheeze, seventy)


def test_draws_are_the_exact_posteriors():
    """Within four Monte-Carlo standard errors; the prior is four times as wide."""
    mean, covariance, _ = hierarchy_posterior()
    idata = fed.fit(hierarchy, hierarchy_silos(np.arange(9) % 3), progress_bar=False)
    draws = np.concatenate(
        [idata.posterior["mu"].values[0][:, None], idata.posterior["z"].values[0]], axis=1
    )
    sd = np.sqrt(np.diag(covariance))
    assert (np.abs(draws.mean(0) - mean) < 4 * sd / np.sqrt(len(draws))).all()
    np.testing.assert_allclose(draws.std(0), sd, rtol=4 / np.sqrt(2 * len(draws)))
    np.testing.assert_allclose(
        np.corrcoef(draws.T)[0], covariance[0] / sd / sd[0], atol=4 / np.sqrt(len(draws))
    )
    assert sd[0] < 0.5 * PRIOR_SD
    attrs = idata.posterior.attrs
    assert attrs["verdict"] == "sound"
    assert "converged in" in attrs["report"]
    assert "Pareto's k" in attrs["report"]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Pareto's k:UserWarning")  # of so few draws
def test_it_saves_and_has_the_silos(tmp_path, seventy, capsys):
    idata = fed.fit(wheeze, seventy, method="vi", num_draws=500)
    assert "conducive rounds of 4 silos" in capsys.readouterr().out
    assert set(idata.observed_data["children_silo"].values) == set(seventy.names)
    assert idata.posterior["z"].shape[:2] == (1, 500)
    idata.to_netcdf(tmp_path / "fit.nc")
    assert (
        az.from_netcdf(tmp_path / "fit.nc").posterior.attrs["report"]
        == idata.posterior.attrs["report"]
    )


@pytest.mark.parametrize(
    ("failing", "coarse", "short"),
    [
        ([], False, False),
        (["steps cut"], True, False),
        (["R-hat", "effective draws of latents"], False, True),
        (["R-hat", "inflation met"], True, False),
        (["R-hat", "visits"], False, False),  # neither mends it
    ],
)
def test_what_chains_do_next_follows_from_the_checks(failing, coarse, short):
    checks = ["R-hat", "effective draws of latents", "steps cut", "inflation met", "visits"]
    verdicts = ["unsound" if x in failing else "sound" for x in checks]
    found = Diagnosis(pd.DataFrame({"verdict": verdicts}, checks))
    assert (steps._are_coarse(found), steps._is_short(found)) == (coarse, short)


@pytest.mark.ci
def test_fsgld_in_one_call():
    """Compare with pooled NUTS, within four standard errors of both and the accepted bias.

    The ledger has the rounds of both. There are 140 children, because with 70 sigma has a tail to 0
    in which steps are cut, and whether ``diagnose`` lets that pass is chance.
    """
    silos = wheeze_silos(np.arange(140) % 4)
    idata = fed.fit(wheeze, silos, method="fsgld", num_draws=4000, progress_bar=False)
    nuts = MCMC(
        NUTS(wheeze),
        num_warmup=500,
        num_samples=2000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(random.key(1), **silos.pooled)
    comparison = fed.compare(idata, nuts)
    table = comparison.table.loc[
        [name for name in comparison.table.index if name.startswith(("beta", "sigma"))]
    ]
    assert (table["error"] < 4 * table["mcse"]).all()
    assert table["sd_ratio"].between(0.9, 1.1).all()
    assert idata.posterior.attrs["verdict"] == "sound"
    assert "FSGLD, 4 chains" in idata.posterior.attrs["report"]
    assert sum(json.loads(idata.posterior.attrs["rounds"])) > 4 * 1200


@pytest.mark.ci
def test_surrogates_from_a_start_are_those_from_none(seventy, started):
    """In four rounds and the pilot's two: the fit begins where q is.

    It ends at the same Gaussians, up to the remainder of its last round.
    """
    kernels = fed.FSGLD(wheeze), fed.FSGLD(wheeze, init_from=started)
    for kernel in kernels:
        kernel.init(random.key(0), 0, None, (seventy,), {})
    cold, warm = (k.surrogates.posterior() for k in kernels)
    sd = np.sqrt(np.diag(cold.covariance))
    assert (np.abs(warm.mean - cold.mean) < 0.1 * sd).all()
    np.testing.assert_allclose(np.diag(warm.covariance), np.diag(cold.covariance), rtol=0.1)
    rounds = [k._setup_cost.rounds for k in kernels]
    assert rounds[1] == 6 < rounds[0]


def other_outcomes(pooled):
    return fed.split({**pooled, "y": 1 - pooled["y"]}, by=np.arange(70) % 4)


def a_tenth(pooled):
    return fed.split({k: v[:7] for k, v in pooled.items()}, by=np.arange(7) % 4)


@pytest.mark.ci
@pytest.mark.parametrize("made", [other_outcomes, a_tenth])
def test_a_start_at_other_data_is_left(seventy, started, made):
    """Its center, or its spread, is another.

    The last round of q moved it by little, and yet the fit does not end around it.
    """
    other = made(seventy.pooled)
    kernels = fed.FSGLD(wheeze), fed.FSGLD(wheeze, init_from=started)
    for kernel in kernels:
        kernel.init(random.key(0), 0, None, (other,), {})
    cold, warm = (k.surrogates.posterior() for k in kernels)
    loc, scale = started.whitening
    far = np.abs(np.asarray(loc) - cold.mean) / np.sqrt(np.diag(cold.covariance))
    wider = np.sqrt(np.diag(cold.covariance)) / np.linalg.norm(scale, axis=1)
    assert far.max() > 2 or wider.max() > 2
    assert (np.abs(warm.mean - cold.mean) < 0.1 * np.sqrt(np.diag(cold.covariance))).all()
    assert kernels[1]._setup_cost.rounds > 6


@pytest.mark.ci
def test_a_diagonal_start_is_taken(seventy):
    guide = fed.AutoSiloNormal(wheeze, global_cov="diag")
    result = fed.ConduciveSFVI(wheeze, guide).run(random.key(0), 15, seventy, progress_bar=False)
    loc, scale = result.whitening
    assert loc.shape == scale.shape == (3,)
    kernel = fed.FSGLD(wheeze, init_from=result)
    kernel.init(random.key(0), 0, None, (seventy,), {})
    assert np.isfinite(kernel.surrogates.posterior().mean).all()


@pytest.mark.ci
def test_silos_that_measured_different_things():
    idata = fed.fit(three_kinds, three_kinds_silos(), num_draws=500, progress_bar=False)
    assert idata.posterior.attrs["structures"] == 3
    assert np.isfinite(idata.posterior["beta"].values).all()


def flat(y):
    mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@pytest.mark.ci
def test_an_improper_prior():
    y = np.arange(6.0)
    idata = fed.fit(
        flat, fed.split({"y": y}, by=np.arange(6) % 2), num_draws=2000, progress_bar=False
    )
    mu = idata.posterior["mu"].values.ravel()
    assert abs(mu.mean() - y.mean()) < 4 / np.sqrt(6 * 2000)
    assert mu.std() == pytest.approx(6**-0.5, rel=4 / np.sqrt(2 * 2000))


@pytest.mark.ci
def test_bad_input(seventy, started):
    with pytest.raises(
        ValueError, match=r"rng_key: expected one key, e.g. jax.random.key\(0\), got 0"
    ):
        fed.fit(wheeze, {}, rng_key=0)
    with pytest.raises(
        ValueError, match="method: expected one of auto, vi, hmc, fsgld, got 'nuts'"
    ):
        fed.fit(wheeze, seventy, method="nuts")
    with pytest.raises(ValueError, match=r"num_draws: expected a whole number >= 1, got 2.5"):
        fed.fit(wheeze, seventy, num_draws=2.5)
    with pytest.raises(ValueError, match=r'method="fsgld" is for silos of one structure'):
        fed.fit(three_kinds, three_kinds_silos(), method="fsgld")
    with pytest.raises(
        ValueError,
        match=r"init_from: expected the result of a variational fit with fed.AutoSiloNormal, got "
        r"dict",
    ):
        fed.FSGLD(wheeze, init_from={})
    with pytest.raises(
        ValueError, match=r'init_from: .* expected surrogate="score", got \'laplace\''
    ):
        fed.FSGLD(wheeze, surrogate="laplace", init_from=started)
    with pytest.raises(
        ValueError,
        match=r"init_from: expected a fit of the same model, with 1 unconstrained global latents "
        r"\['mu'\], got 3",
    ):
        fed.FSGLD(hierarchy, init_from=started).init(
            jax.random.key(0), 0, None, (hierarchy_silos(np.arange(9) % 3),), {}
        )


@pytest.mark.ci
def test_a_first_fit_compiles_few_programs_and_each_once(caplog):
    """The two large ones are compiled before they are called.

    There is no second weighing: candidates far out, which no draw comes from, do not count.
    """

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with fed.silo_plate("patients", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Binomial(5, logits=mu + sigma * z), obs=y)

    y = np.random.default_rng(0).binomial(5, 0.4, 40)
    silos = fed.split({"y": y}, by=np.arange(40) % 3)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        found = fed.fit(model, silos, num_draws=500, progress_bar=False).posterior.attrs
    assert (found["verdict"], found["placed"]) == ("sound", 0)
    compiled = re.findall(r"Compiling jit\((\w+)\)", caplog.text)
    assert compiled.count("_chunk") == compiled.count("draw") == 1
    assert len(compiled) <= 30, ", ".join(compiled)


@pytest.mark.ci
def test_a_centered_hierarchy_is_sound_here_and_remote():
    """Its scale may be zero, where the latents' maps miss them; candidates around modes do not."""
    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], np.float32)
    sd = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], np.float32)

    def centered(y, sd):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with fed.silo_plate("schools", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(z, sd), obs=y)

    silos = fed.split({"y": y, "sd": sd}, by=np.arange(8) % 2)
    here, remote = (
        fed.fit(centered, x, num_draws=1000, progress_bar=False).posterior
        for x in (silos, fed.RemoteSilos(silos, fed.Loopback(silos)))
    )
    for found in (here, remote):
        assert found.attrs["verdict"] == "sound"
        assert found.attrs["placed"] == 1
    # rounding of a weight may choose another candidate
    assert np.mean(np.isclose(here["tau"], remote["tau"], rtol=1e-3)) > 0.99
    # z integrated out by hand, on a grid of (mu, log tau)
    mu, log_tau = np.meshgrid(np.linspace(-20, 30, 400), np.linspace(-9, 5, 700), indexing="ij")
    var = np.exp(2 * log_tau)[..., None] + sd**2
    log_p = -0.5 * (mu / 5) ** 2 - np.log1p(np.exp(2 * log_tau) / 25) + log_tau
    log_p += np.sum(-0.5 * (y - mu[..., None]) ** 2 / var - 0.5 * np.log(var), -1)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    for x, draws in ((mu, here["mu"]), (np.exp(log_tau), here["tau"])):
        mean, spread = np.sum(p * x), np.sqrt(np.sum(p * x**2) - np.sum(p * x) ** 2)
        assert abs(float(draws.mean()) - mean) < 5 * spread / 1000**0.5


@pytest.mark.ci
@pytest.mark.parametrize("method", ["auto", "hmc"])
def test_latents_that_depend_on_each_other_are_drawn_by_hmc(method):
    silos, mean, sd = nested_silos()
    idata = fed.fit(nested, silos, method=method, num_draws=2000, progress_bar=False)
    attrs, mu = idata.posterior.attrs, idata.posterior["mu"]
    assert attrs["verdict"] == "sound"
    assert attrs["report"].startswith("Latents of a silo" if method == "auto" else "HMC, 4 chains")
    effective = float(az.ess(idata, var_names=["mu"])["mu"])
    assert abs(float(mu.mean()) - mean) < 4 * sd / np.sqrt(effective)
    assert float(mu.std()) == pytest.approx(sd, rel=4 / np.sqrt(effective / 2))
    assert idata.posterior["a"].shape == (4, 500, 5)
    assert list(idata.posterior["schools_silo"].values) == ["north"] * 3 + ["south"] * 2


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*of a silo are one unit")
def test_many_dependent_latents_of_remote_silos_are_for_fsgld(monkeypatch):
    """A conducive round takes a minute with 250. FSGLD may widen sds by 7 %."""
    monkeypatch.setattr("numpyro_fed.front.fit._LARGEST_UNIT", 8)  # the silos have 9 and 6
    silos, (mean, *_), (sd, *_) = crossed_silos()
    remote = fed.RemoteSilos(silos, fed.Loopback(silos))
    posterior = fed.fit(crossed, remote, num_draws=2000, progress_bar=False).posterior
    assert posterior.attrs["report"].startswith("9 latents of a silo are one unit: FSGLD, 4 chains")
    effective = float(az.ess(posterior, var_names=["mu"])["mu"])
    assert abs(float(posterior["mu"].mean()) - mean) < 4 * sd / np.sqrt(effective)
    assert float(posterior["mu"].std()) == pytest.approx(sd, rel=0.07 + 4 / np.sqrt(effective / 2))
    assert posterior["mu"].shape == (4, 500)


@pytest.mark.ci
def test_an_unsound_fit_goes_on_and_says_so(monkeypatch):
    """Control: one step alone ends unsound."""
    silos = hierarchy_silos(np.arange(9) % 3)
    monkeypatch.setattr(steps, "POOR", -10.0)  # no weights are good enough
    alone = fed.fit(hierarchy, silos, method="vi", progress_bar=False).posterior.attrs
    assert alone["verdict"] == "unsound"
    idata = fed.fit(hierarchy, silos, progress_bar=False)
    attrs = idata.posterior.attrs
    assert attrs["verdict"] == "sound"
    assert "(unsound, so chains went on); HMC, 4 chains" in attrs["report"]
    assert json.loads(attrs["rounds"])[0] > json.loads(alone["rounds"])[0] + 1000
    mean, covariance, _ = hierarchy_posterior()
    mu, effective = idata.posterior["mu"], float(az.ess(idata, var_names=["mu"])["mu"])
    assert abs(float(mu.mean()) - mean[0]) < 4 * np.sqrt(covariance[0, 0] / effective)


@pytest.mark.ci
def test_silos_of_many_sizes_are_fitted_as_one(monkeypatch):
    """The same draws as by silos, which are of one size in the first fit."""
    silos = wheeze_silos(np.repeat(np.arange(3), [2, 5, 9]))

    def fitted():
        svi = fed.ConduciveSFVI(wheeze, fed.AutoSiloNormal(wheeze))
        many, (_, together) = len(svi.setup(silos).stacks), svi.together(silos)
        idata = fed.fit(wheeze, silos, num_draws=500, progress_bar=False)
        return many, together.names, idata.posterior

    one, names, by_silo = fitted()
    monkeypatch.setattr(storage, "SMALL", 0)
    jax.clear_caches()  # programs for the same silos in one stack
    many, together, posterior = fitted()
    jax.clear_caches()
    assert (one, names, many, together) == (1, silos.names, 2, ("all",))
    for name, draws in by_silo.items():
        np.testing.assert_allclose(posterior[name], draws, rtol=1e-3, atol=1e-3)
    assert posterior.attrs["silos"] == by_silo.attrs["silos"]
    assert posterior.attrs["bytes_up"] == by_silo.attrs["bytes_up"]


@pytest.mark.ci
def test_chains_go_on_until_there_are_enough_draws():
    """Of 40 draws too few are effective, so chains keep one of four, or of sixteen, from there."""
    silos, _, _ = nested_silos()
    attrs = fed.fit(nested, silos, num_draws=40, progress_bar=False).posterior.attrs
    assert "one of 16 kept" in attrs["report"]
    assert attrs["verdict"] == "undecided"


def test_log_likelihoods_of_many_rows_are_left_out(monkeypatch):
    silos = hierarchy_silos(np.arange(9) % 3)
    how = {"num_draws": 40, "progress_bar": False}
    assert "log_likelihood" in fed.fit(hierarchy, silos, **how)
    assert "log_likelihood" not in fed.fit(hierarchy, silos, log_likelihood=False, **how)
    monkeypatch.setattr(steps, "_MOST_TERMS", 40 * 9 - 1)
    assert "log_likelihood" not in fed.fit(hierarchy, silos, **how)
    assert "log_likelihood" in fed.fit(hierarchy, silos, log_likelihood=True, **how)


@pytest.mark.ci
def test_chains_that_diverge_start_again_with_shorter_steps(monkeypatch):
    silos, _, _ = nested_silos()
    monkeypatch.setitem(fed.diagnose.__globals__, "MOST_DIVERGED", -1.0)  # any number is too many
    attrs = fed.fit(nested, silos, num_draws=40, progress_bar=False).posterior.attrs
    assert "of acceptance 0.99, as others diverged" in attrs["report"]
    assert attrs["verdict"] == "unsound"
    monkeypatch.setattr(steps, "_TARGETS", (0.99,))
    last = fed.fit(nested, silos, num_draws=40, progress_bar=False).posterior.attrs
    # the rounds of all three runs count
    assert json.loads(attrs["rounds"])[0] > 1.3 * json.loads(last["rounds"])[0]


def test_chains_that_cannot_start_leave_the_weighed_draws(monkeypatch):
    def no_start(*_):
        raise ValueError("the log density is not finite at the start of a chain")

    monkeypatch.setattr(steps, "POOR", -10.0)
    monkeypatch.setattr(steps, "hmc", no_start)
    silos = hierarchy_silos(np.arange(9) % 3)
    attrs = fed.fit(hierarchy, silos, progress_bar=False).posterior.attrs
    assert attrs["verdict"] == "unsound"
    assert attrs["report"].endswith("HMC: the log density is not finite at the start of a chain")
