"""Hamiltonian Monte Carlo whose silos integrate their latents out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from messages import in_order
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from small_models import intercepts, intercepts_posterior, intercepts_silos, scale_model

import numpyro_fed as fed
from numpyro_fed.data.views import stack
from numpyro_fed.density.factorize import factorize
from numpyro_fed.front import steps
from numpyro_fed.mcmc.checks import units_of
from numpyro_fed.mcmc.leapfrog import federated, first_local
from numpyro_fed.mcmc.trajectory import first_walk
from numpyro_fed.rounds.inline import round_all

CHAINS = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}


def test_a_round_brings_the_marginal_likelihoods_slope():
    silos = intercepts_silos()
    factors, stacks = factorize(intercepts, silos), stack(silos)
    theta = jnp.array([[-1.0], [0.5], [3.0]])
    local = [jax.vmap(first_local)(jnp.zeros((len(rows.number), 3, 0))) for rows in stacks]
    step = federated(factors, units_of(factors, silos), silos.shared)
    walk = round_all(step, random.key(0), first_walk(theta), local, stacks)[0]
    mean, covariance = intercepts_posterior(silos)
    exact = (mean[0] - theta) / covariance[0, 0]
    np.testing.assert_allclose(walk.there.slope, exact, rtol=1e-3)
    # the change of all energies, of theta's prior and of the silos, is that of the log density
    energy = walk.gained - walk.there.value
    exact = 0.5 * (theta[:, 0] - mean[0]) ** 2 / covariance[0, 0]
    np.testing.assert_allclose(energy - energy[0], exact - exact[0], rtol=1e-3, atol=1e-3)


@pytest.mark.ci
def test_draws_have_the_marginal_law_and_few_rounds():
    silos = intercepts_silos()
    mean, covariance = intercepts_posterior(silos)
    svi = fed.ConduciveSFVI(intercepts, fed.AutoSiloNormal(intercepts))
    result = svi.run(random.key(0), 20, silos, progress_bar=False)
    kernel = fed.HMC(intercepts, marginal=True, init_from=result)
    mcmc = MCMC(kernel, num_warmup=40, num_samples=1000, **CHAINS)
    mcmc.run(random.key(1), silos)
    assert list(mcmc.get_samples()) == ["mu"]
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
    # trajectories of two sds overshoot, so that means have more effective draws than squares
    ess, sd = effective_sample_size((mu - mu.mean()) ** 2), covariance[0, 0] ** 0.5
    assert abs(mu.mean() - mean[0]) < 4 * sd / np.sqrt(ess)
    assert abs(mu.std() / sd - 1) < 4 / np.sqrt(2 * ess)
    assert abs(mu.mean() - mean[0] - 0.3 * sd) > 4 * sd / np.sqrt(ess)  # the control
    assert kernel.ledger(mcmc.last_state).rounds[0] < 3.5 * 1040
    posterior = fed.to_inference_data(mcmc, silos).posterior  # with latents, given each draw
    a = posterior["a"].values
    assert a.shape == (4, 1000, 18)
    off = (a.mean((0, 1)) - mean[1:]) / np.sqrt(np.diag(covariance)[1:])
    assert np.abs(off).max() < 4.5 / np.sqrt(ess)
    np.testing.assert_array_equal(posterior["mu"].values, mu)


@pytest.mark.ci
def test_remote_silos_have_the_same_draws():
    silos = in_order(intercepts_silos())
    options = {"num_warmup": 10, "num_samples": 3, "num_chains": 2, "progress_bar": False}
    here = MCMC(fed.HMC(intercepts, marginal=True), chain_method="vectorized", **options)
    here.run(random.key(3), silos)
    there = fed.RemoteMCMC(fed.HMC(intercepts, marginal=True), **options)
    there.run(random.key(3), fed.RemoteSilos(silos, fed.Loopback(silos)))
    np.testing.assert_allclose(there.get_samples()["mu"], here.get_samples()["mu"], rtol=1e-3)


@pytest.mark.ci
def test_a_remote_fit_whose_weights_fail_goes_on(monkeypatch):
    silos = intercepts_silos()
    remote = fed.RemoteSilos(silos, fed.Loopback(silos))
    monkeypatch.setattr(steps, "POOR", -np.inf)
    found = fed.fit(intercepts, remote, num_draws=2000, progress_bar=False).posterior
    assert "HMC with latents integrated out, 64 chains" in found.attrs["report"]
    assert found.attrs["verdict"] == "sound"
    mean, covariance = intercepts_posterior(silos)
    assert abs(float(found["mu"].mean()) - mean[0]) < 0.15 * covariance[0, 0] ** 0.5


def test_what_is_refused_in_words():
    def joint(y, other):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z + z[other], 1), obs=y)

    data = {s: {"y": np.zeros(4) + ord(s), "other": np.array([1, 0, 3, 2])} for s in "ab"}
    silos = fed.Silos(data, rows={"y": "rows", "other": "rows"})
    kernel = fed.HMC(joint, marginal=True, validate=False)
    with (
        pytest.warns(UserWarning, match="are one unit"),
        pytest.raises(ValueError, match="marginal=True: latents of a silo depend on each other"),
    ):
        MCMC(kernel, num_warmup=1, num_samples=1, **CHAINS).run(random.key(0), silos)
    with pytest.raises(ValueError, match="init_from: expected the result of a variational fit"):
        fed.HMC(scale_model, init_from=3)
