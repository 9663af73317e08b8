"""Models whose rows depend on each other within a silo, as in risk sets."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from messages import Fits
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.density.check import FactorizationError, check_factorization
from numpyro_fed.density.factorize import factorize
from numpyro_fed.engines.wire import connect


def cox(x, time, event, stratum, strata, row_wise=False):
    """Cox's partial likelihood, stratified by silo."""
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    eta = x * beta
    log_risk = fed.log_risk(eta, time, stratum)
    with fed.silo_plate("patients", x.shape[0], row_wise=row_wise):
        numpyro.factor("partial", event * (eta - log_risk))


def frailty(x, time, event, stratum, strata, hospital, hospitals, row_wise=False):
    """Ranks of survival times within a silo, with a latent for each hospital."""
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with fed.silo_plate("hospitals", hospitals.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
    rank = ((time < time[:, None]) & (stratum == stratum[:, None])).sum(1)
    with fed.silo_plate("patients", x.shape[0], row_wise=row_wise):
        numpyro.sample("ranks", dist.Normal(beta * x + u[hospital], 1), obs=rank / 10)


def test_risk_sets_are_those_of_all_pairs():
    """Ties, strata in any order, one row alone; values and gradients."""
    rng = np.random.default_rng(0)
    eta = jnp.asarray(rng.normal(0, 3, 60))
    time = rng.integers(0, 9, 60) / 2
    strata = rng.permutation(np.repeat([3, 0, 7, 5], [30, 20, 9, 1]))
    at_risk = (time >= time[:, None]) & (strata == strata[:, None])

    def of_pairs(eta):
        return jax.nn.logsumexp(jnp.where(at_risk, eta, -jnp.inf), axis=1)

    found, slope = jax.vjp(
        jax.jit(lambda x: fed.log_risk(x, jnp.asarray(time), jnp.asarray(strata))), eta
    )
    expected, expected_slope = jax.vjp(of_pairs, eta)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    weights = jnp.asarray(rng.normal(size=60))
    np.testing.assert_allclose(slope(weights)[0], expected_slope(weights)[0], rtol=1e-4, atol=1e-5)


def cox_silos(sizes=(7, 4, 11), hospitals=False):
    """Make silos that are a stratum each, whose number is a row of the group ``strata``."""
    rng = np.random.default_rng(1)
    data = {}
    for s, n in enumerate(sizes):
        x = rng.normal(size=n)
        rows = {"x": x, "time": rng.exponential(np.exp(-0.7 * x)), "event": rng.random(n) < 0.7}
        data[f"silo {s}"] = {**rows, "stratum": np.zeros(n, int), "strata": np.zeros(1)}
        if hospitals:
            data[f"silo {s}"] |= {"hospital": np.arange(n) % 2, "hospitals": np.zeros(2)}
    patients = ("x", "time", "event", "stratum", *["hospital"] * hospitals)
    rows = dict.fromkeys(patients, "patients") | {"strata": "strata"}
    index = {"stratum": "strata"}
    if hospitals:
        rows, index = rows | {"hospitals": "hospitals"}, index | {"hospital": "hospitals"}
    return fed.Silos(data, rows=rows, index=index)


def partial_likelihood(silos, beta):
    """Return each silo's log partial likelihood at each of ``beta``, patient by patient."""
    out = []
    for name in silos.names:
        x, time, event = (np.asarray(silos[name][k], np.float64) for k in ("x", "time", "event"))
        eta = beta[:, None] * x
        risk = [np.log(np.exp(eta[:, time >= t]).sum(1)) for t in time]
        out.append((event * (eta - np.stack(risk, 1))).sum(1))
    return np.array(out)


@pytest.fixture(scope="module")
def exact():
    """Mean and sd of beta's posterior, by a grid."""
    grid = np.linspace(-5, 5, 2001)
    log_density = partial_likelihood(cox_silos(), grid).sum(0) - grid**2 / 2
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ grid
    return mean, np.sqrt(weights @ (grid - mean) ** 2)


def test_each_silo_has_its_own_risk_sets():
    silos = cox_silos()

    def terms(row_wise):
        factors = factorize(partial(cox, row_wise=row_wise), silos)

        def one(number):
            kwargs, weights = SiloView(silos, number, largest(silos)).whole()
            return factors.log_local({"beta": 0.3}, {}, kwargs, weights)

        every = jax.jit(jax.vmap(one))(jnp.arange(3))
        return [np.asarray(every), np.stack([*map(jax.jit(one), range(3))])]

    expected = partial_likelihood(silos, np.array([0.3]))[:, 0]
    for own in terms(False):
        np.testing.assert_allclose(own, expected, rtol=1e-5)
    control, _ = terms(True)
    assert (np.abs(control - expected) > 0.1).tolist() == [
        True,
        True,
        False,
    ]  # the largest is whole


def test_padding_is_refused_with_the_mend():
    with pytest.raises(FactorizationError, match=r"risk set.*row_wise=False"):
        fed.fit(partial(cox, row_wise=True), cox_silos(), progress_bar=False)


def test_a_model_that_ranks_across_silos_is_refused_still():
    def across(x, time, event, stratum, strata):
        cox(x, time, event, jnp.zeros_like(stratum), strata)

    with pytest.raises(FactorizationError, match="must not combine rows of different silos"):
        fed.fit(across, cox_silos(), progress_bar=False)


@pytest.mark.parametrize(
    "refused",
    [
        lambda silos: MCMC(
            fed.FSGLD(cox, batch_size=2), num_warmup=1, num_samples=1, progress_bar=False
        ).run(random.key(0), silos),
        lambda silos: fed.SFVI(cox, fed.AutoSiloNormal(cox), optax.adam(0.1), batch_size=2).run(
            random.key(0), 1, silos, progress_bar=False
        ),
    ],
    ids=["FSGLD", "SFVI"],
)
def test_minibatches_are_refused(refused):
    with pytest.raises(ValueError, match="row_wise=False"):
        refused(cox_silos())


@pytest.mark.ci
def test_fit_is_the_exact_posterior(exact):
    draws = fed.fit(cox, cox_silos(), progress_bar=False).posterior["beta"].values.ravel()
    error = exact[1] / np.sqrt(len(draws) / 2)  # weighed draws are worth about half
    assert abs(draws.mean() - exact[0]) < 4 * error
    assert abs(draws.std() / exact[1] - 1) < 4 / np.sqrt(len(draws))


@pytest.mark.ci
@pytest.mark.parametrize("kernel", [fed.FSGLD, fed.HMC])
def test_chains_have_the_exact_posterior(kernel, exact):
    mcmc = MCMC(
        kernel(cox),
        num_warmup=200,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), cox_silos())
    draws = mcmc.get_samples()["beta"]
    assert abs(draws.mean() - exact[0]) < 0.15 * exact[1]  # 4 errors of 700 effective draws
    assert abs(draws.std() / exact[1] - 1) < 0.12


def test_latents_beside_dependent_rows():
    silos = cox_silos(hospitals=True)
    check_factorization(factorize(frailty, silos), silos)
    with pytest.raises(FactorizationError, match="row_wise=False"):
        check_factorization(factorize(partial(frailty, row_wise=True), silos), silos)


@pytest.mark.ci
def test_over_a_wire_as_at_hand(tmp_path):
    silos = cox_silos()

    def make():
        return fed.ConduciveSFVI(cox, fed.AutoSiloNormal(cox))

    def run(silos):
        return make().run(random.key(0), 6, silos, progress_bar=False).params

    here, there = run(silos), run(connect(Fits(silos, make(), tmp_path, make), cox, fit=make()))
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
