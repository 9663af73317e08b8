"""Kernels over networks on the model shapes of the registry.

Starts, positions and draws of all sites.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import MCMC
from registry import ENTRIES

import numpyro_fed as fed
from numpyro_fed.decentralized.nodes import gradients
from numpyro_fed.density.factors import pooled_log_density


@pytest.mark.ci
@pytest.mark.parametrize("name", ["constrained_globals", "pupils_in_classes_in_schools"])
def test_starts_are_kept_and_draws_are_in_their_supports(name):
    entry = ENTRIES[name]
    silos = entry.silos()
    m = len(silos)
    kernel = fed.PushSumLangevin(entry.model, fed.graphs.complete(m), 1e-4)
    mcmc = MCMC(
        kernel,
        num_warmup=2,
        num_samples=8,
        num_chains=2 * m,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), silos)
    draws = mcmc.get_samples(group_by_chain=True)
    sites = {n for n, _ in kernel.factors.global_sites} | {
        s.name for s in kernel.factors.local_sites
    }
    assert sites <= set(draws)
    assert all(np.isfinite(v).all() for v in draws.values())
    assert not np.asarray(mcmc.get_extra_fields()["diverging"]).any()
    # values that are given come back, local ones through the coordinates of their own node
    first = mcmc.last_state.z
    local = {s.name for s in kernel.factors.local_sites}
    given = {k: v + (0 if k in local else 0.1) for k, v in first.items()}
    state = kernel.init(random.split(random.key(1), 2 * m), 0, given, model_args=(silos,))
    for site, value in given.items():
        np.testing.assert_allclose(state.z[site], value, rtol=2e-3, atol=2e-3)
    idata = fed.to_inference_data(mcmc, silos, node="average", log_likelihood=False)
    assert idata.posterior.sizes["chain"] == 2
    assert set(idata.posterior) >= sites


@pytest.mark.ci
@pytest.mark.parametrize("name", ["constrained_globals", "logistic", "dirichlet"])
def test_gradients_of_nodes_sum_to_the_pooled_one(name):
    entry = ENTRIES[name]
    silos = entry.silos()
    m = len(silos)
    kernel = fed.PushSumLangevin(entry.model, fed.graphs.complete(m), 1e-4)
    state = kernel.init(random.split(random.key(0), m), 0, model_args=(silos,))
    factors = kernel.factors
    theta = 0.3 * random.normal(random.key(1), (factors.dim,))
    positions = jnp.broadcast_to(theta, (m, factors.dim))
    total = gradients(
        kernel._config,
        kernel._tuning,
        random.key(0),
        positions,
        state.nodes.eps,
        kernel._rows(silos),
    ).sum(0)
    expected = jax.grad(lambda t: pooled_log_density(entry.model, silos, factors.unravel(t)))(theta)
    np.testing.assert_allclose(
        total, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max())
    )
