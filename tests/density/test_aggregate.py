"""Published results: their log likelihoods, and posteriors with them by every algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS
from scipy import stats

import numpyro_fed as fed
from numpyro_fed.density.check import check_factorization
from numpyro_fed.density.factorize import factorize

RNG = np.random.default_rng(0)
Y = RNG.normal(1.5, 1, 90)
# a third silo with 40 rows of its own has published its mean
OWN = RNG.normal(1.5, 1, 40)
BERGEN = fed.Aggregate(mean=OWN.mean(), cov=1 / 40)
SILOS = fed.split({"y": Y.astype(np.float32)}, by=np.repeat(["oslo", "rome"], [50, 40]))


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    BERGEN("bergen", mu)
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


PRECISION = 130 + 0.01
MEAN = (Y.sum() + OWN.sum()) / PRECISION


def added(aggregate, *values):
    """Return what an aggregate adds to a model's density."""

    @jax.jit
    def log_prob(values):
        site = numpyro.handlers.trace(aggregate).get_trace("it", *values)["it"]
        return site["fn"].log_prob(site["value"])

    return float(log_prob(values))


def test_an_estimate_counts_as_its_normal_law():
    cov = np.array([[0.5, 0.2], [0.2, 0.3]])
    aggregate = fed.Aggregate(mean=[1.0, -1.0], cov=cov)
    with jax.enable_x64(True):
        found = added(aggregate, jnp.array([0.3, 0.1]))
    assert found == pytest.approx(stats.multivariate_normal([0.3, 0.1], cov).logpdf([1, -1]))


def test_sums_of_a_linear_model_are_its_likelihood():
    x, beta = RNG.normal(size=(30, 3)), np.array([1.0, -2.0, 0.5])
    y = 1000 + x @ beta + RNG.normal(size=30)
    x[:, 0] = 1
    aggregate = fed.Aggregate(xtx=x.T @ x, xty=x.T @ y, yty=y @ y, rows=30)
    for at, sigma in ((np.array([999.0, -2.0, 0.4]), 1.3), (np.array([1001.0, -1.0, 0.0]), 0.8)):
        with jax.enable_x64(True):
            found = added(aggregate, jnp.asarray(at), jnp.asarray(sigma))
        assert found == pytest.approx(stats.norm(x @ at, sigma).logpdf(y).sum(), rel=1e-9)
        single = added(aggregate, jnp.asarray(at, jnp.float32), jnp.asarray(sigma, jnp.float32))
        assert single == pytest.approx(found, rel=1e-4)  # in spite of sums of 3e7


def test_a_profile_is_a_spline_and_lines_beyond():
    grid = np.linspace(-2, 3, 21)
    truth = lambda b: 30 * b - 50 * np.log1p(np.exp(b))  # noqa: E731
    aggregate = fed.Aggregate(grid=grid, log_likelihood=truth(grid))
    with jax.enable_x64(True):
        at = np.array([-1.7, -0.33, 0.4, 1.11, 2.9])
        found = np.array([added(aggregate, jnp.asarray(b)) for b in at])
        np.testing.assert_allclose(found - found[2], truth(at) - truth(at[2]), atol=2e-3)
        slope = jax.grad(lambda b: aggregate._law.log_likelihood(b))
        for b, inside in ((-9.0, -2.0), (8.0, 3.0)):
            assert slope(b) == pytest.approx(30 - 50 / (1 + np.exp(-inside)), rel=0.02)


def test_it_is_a_part_of_the_global_density():
    factors = factorize(model, SILOS)
    with jax.enable_x64(True):
        for mu in (0.0, 2.0):
            expected = stats.norm(0, 10).logpdf(mu) + stats.norm(mu, 40**-0.5).logpdf(OWN.mean())
            found = factors.log_prior({"mu": jnp.asarray(mu)}, {})
            assert float(found) == pytest.approx(expected, rel=1e-6)
    check_factorization(factors, SILOS)


@pytest.mark.ci
def test_sfvi_takes_the_steps_that_it_takes_with_the_rows():
    def with_rows(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    silos = fed.Silos({**{n: SILOS[n] for n in SILOS.names}, "bergen": {"y": np.float32(OWN)}})
    with_it, without = (
        fed.SFVI(m, fed.AutoSiloNormal(m), optax.adam(0.05)).run(
            jax.random.key(0), 100, s, progress_bar=False
        )
        for m, s in ((model, SILOS), (with_rows, silos))
    )
    for name, value in without.params.items():
        np.testing.assert_allclose(with_it.params[name], value, rtol=1e-4)


def test_conducive_rounds_have_the_posterior_of_all_rows():
    svi = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))
    params = svi.run(jax.random.key(0), 10, SILOS, progress_bar=False).params
    assert params["auto_loc"][0] == pytest.approx(MEAN, abs=1e-4)
    assert params["auto_scale_tril"][0, 0] == pytest.approx(PRECISION**-0.5, rel=1e-3)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["fit", "FSGLD", "HMC", "remote", "NUTS"])
def test_every_algorithm_has_that_posterior(name):
    """Means are within 4 Monte-Carlo errors; without the aggregate they would be 11 errors off."""
    key, options = jax.random.key(0), {"num_warmup": 300, "num_samples": 2000}
    remote = fed.RemoteSilos(SILOS, fed.Loopback(SILOS))
    if name in ("fit", "remote"):
        draws = fed.fit(model, SILOS if name == "fit" else remote, progress_bar=False).posterior
        draws = draws["mu"].to_numpy()
    else:
        kernel = NUTS(model) if name == "NUTS" else getattr(fed, name)(model)
        mcmc = MCMC(kernel, progress_bar=False, **options)
        mcmc.run(key, **SILOS.pooled) if name == "NUTS" else mcmc.run(key, SILOS)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
    size = float(numpyro.diagnostics.effective_sample_size(draws.reshape(-1, draws.shape[-1])))
    size, sd = max(size, 100), PRECISION**-0.5
    bias = 0.05 if name == "FSGLD" else 0.0  # of a step
    assert abs(draws.mean() - MEAN) < (4 / size**0.5 + bias) * sd
    assert draws.std() / sd == pytest.approx(1, abs=4 / (2 * size) ** 0.5 + bias)
    alone = Y.sum() / (90 + 0.01)
    assert abs(alone - MEAN) > (4 / size**0.5 + bias) * sd  # the control


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"expected one of \('mean', 'cov'\), .* got \(\)"),
        ({"mean": 1.0}, r"got \('mean',\)"),
        ({"mean": 1.0, "cov": 1.0, "rows": 3}, r"got \('mean', 'cov', 'rows'\)"),
        ({"mean": [1.0, 2.0], "cov": [1.0, 2.0]}, r"cov: expected a symmetric matrix \(2, 2\)"),
        ({"mean": 1.0, "cov": -1.0}, "cov: expected a positive definite matrix, .* -1"),
        ({"mean": np.nan, "cov": 1.0}, "mean: expected finite numbers"),
        ({"grid": [0.0, 1, 2], "log_likelihood": [0.0, 1, 0]}, "at least 4 increasing numbers"),
        ({"grid": [0.0, 1, 2, 3], "log_likelihood": [0.0, 1, 0]}, r"4 numbers, got shape \(3,\)"),
        ({"grid": [0.0, 1, 2, 3], "log_likelihood": [0, 1, 2, 3]}, "at the end 3; take a wider"),
        ({"xtx": 2.0, "xty": 4.0, "yty": 1.0, "rows": 3}, "residual sum of squares is -7"),
    ],
)
def test_results_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        fed.Aggregate(**given)


def test_calls_that_are_refused():
    with pytest.raises(ValueError, match="'it': the published result is of 1 numbers, got 2"):
        added(BERGEN, jnp.ones(2))
    with pytest.raises(ValueError, match="'it': expected one value, got 2 values"):
        added(BERGEN, 1.0, 1.0)

    def inside(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with fed.silo_plate("rows", y.shape[0]):
            BERGEN("bergen", mu)
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    with pytest.raises(ValueError, match="'bergen' is inside the silo plate 'rows'; expected it"):
        factorize(inside, SILOS)
    assert repr(BERGEN) == "Aggregate(estimate of 1 numbers)"
