"""Conducive rounds of latents that silos integrate out: exact for two nested plates."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from marks import heavy
from messages import Fits
from numpyro.infer import SVI, Trace_ELBO
from scipy.stats import multivariate_normal
from two_plates import exact_moments, nested, nested_law, nested_silos
from vi_models import hierarchy, hierarchy_silos

import numpyro_fed as fed
from numpyro_fed._arviz import from_groups
from numpyro_fed.engines.wire import connect


def over(silos):
    return fed.RemoteSilos(silos, fed.Loopback(silos))


def marginal(model, **settings):
    return fed.ConduciveSFVI(model, fed.AutoSiloNormal(model, marginal=True, **settings))


def run(svi, silos):
    return svi.run(jax.random.key(0), 20, silos, tol=1e-3, progress_bar=False)


@pytest.mark.parametrize("remote", heavy([True, False], False))
def test_nested_plates_are_exact(remote):
    (silos, mean, sd), svi = nested_silos(), marginal(nested)
    where = over(silos) if remote else silos
    result = run(svi, where)
    assert float(result.params["auto_loc"][0]) == pytest.approx(mean, abs=1e-3 * sd)
    assert float(result.params["auto_scale_tril"][0, 0]) == pytest.approx(sd, rel=1e-3)
    posterior = fed.to_inference_data(svi, result, where, num_draws=500, resample=True).posterior
    assert set(posterior.data_vars) == ({"mu"} if remote else {"mu", "a", "b"})
    assert posterior.attrs["pareto_k"] < 0.3
    y, covariance = nested_law(silos)
    evidence = multivariate_normal(np.zeros(len(y)), covariance + 4).logpdf(y)
    assert posterior.attrs["log_evidence"] == pytest.approx(evidence, abs=0.01)


@pytest.mark.ci
def test_one_call_over_remote_silos_ends_with_weighed_draws():
    silos, mean, sd = nested_silos()
    posterior = fed.fit(nested, over(silos), num_draws=2000, progress_bar=False).posterior
    assert posterior.attrs["verdict"] == "sound"
    assert "HMC" not in posterior.attrs["report"]
    assert abs(float(posterior["mu"].mean()) - mean) < 4 * sd / 1000**0.5
    assert float(posterior["mu"].std()) == pytest.approx(sd, rel=4 / 1000**0.5)


@pytest.mark.ci
def test_silos_and_rows_are_left_out_exactly():
    silos, _, _ = nested_silos()
    idata = fed.fit(nested, over(silos), num_draws=4000, progress_bar=False)
    found = fed.check(idata, nested, silos)
    y, covariance = nested_law(silos)
    whole, north = covariance + 4, np.arange(len(y)) < 24
    for name, own in (("north", north), ("south", ~north)):
        gain = np.linalg.solve(whole[np.ix_(~own, ~own)], whole[np.ix_(~own, own)])
        law = multivariate_normal(
            gain.T @ y[~own], whole[np.ix_(own, own)] - whole[np.ix_(own, ~own)] @ gain
        )
        row = found.table.loc[name]
        assert abs(row["elpd"] - law.logpdf(y[own])) < 4 * row["se"] + 0.01
    inverse = np.linalg.inv(whole)
    variance = 1 / np.diag(inverse)  # of each row given all others
    each = -0.5 * ((inverse @ y) ** 2 * variance + np.log(2 * np.pi * variance))
    for name, own in (("north", north), ("south", ~north)):
        row = found.rows.loo.loc[("y", name)]
        # two sets of draws: each elpd has an error of about sqrt(p_loo / draws) times a few
        assert abs(row["elpd"] - each[own].sum()) < 4 * np.sqrt(row["p_loo"] * 2 / 4000)


@pytest.mark.ci
def test_a_silo_draws_its_latents_of_both_plates():
    """Means, sds, and the negative correlation of a school with its classes."""
    silos, mean, sd = nested_silos()
    draws = np.random.default_rng(0).normal(mean, sd, 20_000)
    idata = from_groups({"posterior": {"mu": draws[None]}})
    here = fed.local_latents(idata, nested, silos, num_draws=20_000).posterior
    found = np.concatenate([here[k].values.reshape(20_000, -1) for k in ("mu", "a", "b")], 1)
    pooled = silos.pooled
    of = pooled["pupils_of"]
    mean, covariance = exact_moments(pooled["y"], pooled["klass"][of], of)
    sds = np.sqrt(np.diag(covariance))
    assert (np.abs(found.mean(0) - mean) < 4 * sds / 20_000**0.5).all()
    correlations = covariance / np.outer(sds, sds)
    assert np.abs(np.corrcoef(found.T) - correlations).max() < 4 / 20_000**0.5
    np.testing.assert_allclose(found.std(0), sds, rtol=4 / 40_000**0.5)
    assert correlations[1, 6] < -0.3  # the control: of one school and its class


def series(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("days", y.shape[0], row_wise=False):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + jnp.cumsum(z), 1), obs=y)


def chained(y, klass, pupils_of, schools):
    """Nested plates whose inner elements depend on each other."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with fed.silo_plate("schools", schools.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with fed.silo_plate("classes", klass.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 0.5))
    with fed.silo_plate("pupils", y.shape[0]):
        mean = mu + a[klass[pupils_of]] + jnp.cumsum(b)[pupils_of]
        numpyro.sample("y", dist.Normal(mean, 0.7), obs=y)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda guide: fed.SFVI(nested, guide, optax.adam(0.1)), "in conducive rounds without"),
        (
            lambda guide: fed.ConduciveSFVI(nested, guide, optax.adam(0.1)),
            "in conducive rounds without",
        ),
        (lambda guide: SVI(nested, guide, optax.adam(0.1), Trace_ELBO()), "no law of local"),
    ],
    ids=["SFVI", "optimizer", "SVI"],
)
def test_fits_that_move_latents_refuse_it(fit, message):
    svi, (silos, _, _) = fit(fed.AutoSiloNormal(nested, marginal=True)), nested_silos()
    given = silos.pooled if isinstance(svi, SVI) else {"silos": silos}
    with pytest.raises(ValueError, match=message):
        svi.init(jax.random.key(0), **given)


def test_latents_of_other_plates_are_refused():
    silos = fed.Silos({"a": {"y": np.zeros(4)}, "b": {"y": np.ones(3)}})
    with pytest.raises(ValueError, match="two silo plates nested by index="):
        marginal(series).init(jax.random.key(0), silos)
    with pytest.raises(ValueError, match="two silo plates nested by index="):
        marginal(hierarchy).init(jax.random.key(0), hierarchy_silos(np.arange(9)))
    with pytest.raises(ValueError, match="the inner ones independent of each other"):
        marginal(chained).init(jax.random.key(0), nested_silos()[0])
    with pytest.raises(ValueError, match="expected no amortize="):
        fed.AutoSiloNormal(hierarchy, marginal=True, amortize={"z": lambda y: (y, y)})


@pytest.mark.ci
def test_over_a_wire_as_at_hand(tmp_path):
    silos, _, _ = nested_silos()
    remote = connect(
        Fits(silos, marginal(nested), tmp_path, lambda: marginal(nested)),
        nested,
        fit=marginal(nested),
    )
    found, here = (run(marginal(nested), where).params for where in (remote, silos))
    for name, value in here.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
