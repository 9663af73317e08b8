"""What comes back of a run over a network: chains and nodes, averages, ledgers, warnings."""

import warnings

import arviz as az
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from jax import random
from network_law import LOPSIDED, PERIODIC, SILOS, D, M, exact_law, run
from numpyro.infer import MCMC
from small_models import linear, linear_silos

import numpyro_fed as fed
from numpyro_fed._arviz import groups_of


@pytest.fixture(scope="module")
def fitted():
    kernel = fed.PushSumLangevin(linear, PERIODIC.with_link_failures(0.1), 0.002)
    return run(kernel, SILOS, 3, 400)


@pytest.mark.ci
def test_a_node_is_a_chain(fitted, tmp_path):
    idata = fed.to_inference_data(fitted, SILOS)
    assert idata.posterior.sizes["chain"] == 3 * M
    assert idata.posterior.node.values.tolist() == list(SILOS.names) * 3
    assert idata.posterior.network.values.tolist() == [0] * M + [1] * M + [2] * M
    assert {"consensus_error", "push_sum_weight", "step_size", "diverging"} <= set(
        idata.sample_stats
    )
    one = fed.to_inference_data(fitted, SILOS, node="silo 2")
    np.testing.assert_array_equal(one.posterior.beta, idata.posterior.beta[2::M])
    assert one.posterior.chain.values.tolist() == [0, 1, 2]
    assert {"log_likelihood", "observed_data"} <= set(groups_of(one))
    one.to_netcdf(tmp_path / "node.nc")
    assert az.from_netcdf(tmp_path / "node.nc").posterior.node.values.tolist() == ["silo 2"] * 3
    ratio = fed.compare(one, idata).table["sd_ratio"]
    assert (ratio.between(0.8, 1.25)).all()


def test_the_average_weighs_nodes_by_what_they_hold(fitted):
    idata = fed.to_inference_data(fitted, SILOS)
    average = fed.to_inference_data(fitted, SILOS, node="average")
    weight = idata.sample_stats.push_sum_weight.values.reshape(3, M, -1, 1)
    beta = idata.posterior.beta.values.reshape(3, M, -1, D)
    np.testing.assert_allclose(
        average.posterior.beta, (weight * beta).mean(1), rtol=1e-4, atol=1e-5
    )
    assert average.log_likelihood.y.shape == (3, 400, 30)


@pytest.mark.ci
def test_the_ledger_counts_links_that_worked():
    kernel = fed.PushSumLangevin(linear, fed.graphs.star(M), 0.001, gradient_tracking=True)
    mcmc = run(kernel, SILOS, 2, 30, num_warmup=10)
    ledger = kernel.ledger(mcmc.last_state)
    message = 4 * (2 * D + 1)
    assert ledger.rounds == ledger.gradient_evaluations == (80,) * M
    assert ledger.bytes_up == (80 * 3 * message, *[80 * message] * 3)
    assert ledger.bytes_down == ledger.bytes_up
    failing = fed.PushSumLangevin(linear, fed.graphs.star(M).with_link_failures(0.5), 0.001)
    lost = failing.ledger(run(failing, SILOS, 2, 190, num_warmup=10).last_state)
    assert sum(lost.bytes_up) == sum(lost.bytes_down)
    expected = 400 * 6 * 4 * (D + 1) / 2
    assert abs(sum(lost.bytes_up) - expected) < 4 * 4 * (D + 1) * np.sqrt(400 * 6) / 2
    gossip = fed.GossipLangevin(linear, fed.graphs.star(M))
    counted = gossip.ledger(run(gossip, SILOS, 1, 30, num_warmup=10).last_state)
    looks = 20 + 10
    assert counted.gradient_evaluations == (40 + 3 * looks,) * M
    assert counted.bytes_up == (
        40 * 3 * 4 * D + looks * 3 * D * 4,
        *[40 * 4 * D + looks * 3 * D * 4] * 3,
    )


@pytest.mark.ci
def test_one_kernel_serves_other_silos():
    """The hub is the first silo of whatever data it is given, or the silo of its name."""
    kernel = fed.PushSumLangevin(linear, fed.graphs.star(3), 1e-3)
    for sizes in ((3, 8, 5), (14, 4, 4)):
        silos = linear_silos(sizes, seed=sum(sizes))
        again = fed.PushSumLangevin(linear, fed.graphs.star(3), 1e-3)
        both = [np.asarray(run(k, silos, 1, 20).get_samples()["beta"]) for k in (kernel, again)]
        np.testing.assert_array_equal(*both)
    names = {"c": SILOS["silo 0"], "a": SILOS["silo 1"], "b": SILOS["silo 3"]}
    kernel.init(random.split(random.key(0), 3), 0, model_args=(fed.Silos(names),))
    assert kernel.graph.nodes == (0, 1, 2)


@pytest.mark.ci
@pytest.mark.parametrize("jit_model_args", [False, True])
def test_data_given_as_arguments_make_the_same_draws(jit_model_args):
    kernel = fed.PushSumLangevin(linear, PERIODIC, 1e-3, 2)
    mcmc = MCMC(
        kernel,
        num_warmup=5,
        num_samples=5,
        num_chains=M,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=jit_model_args,
    )
    for seed in (0, 5):
        silos = linear_silos(seed=seed)
        mcmc.run(random.key(0), silos)
        alone = run(fed.PushSumLangevin(linear, PERIODIC, 1e-3, 2), silos, 1, 5, num_warmup=5)
        np.testing.assert_allclose(
            mcmc.get_samples()["beta"], alone.get_samples()["beta"], rtol=1e-4, atol=1e-5
        )


def test_networks_do_not_depend_on_how_many_there_are():
    kernel = fed.PushSumLangevin(linear, PERIODIC.with_link_failures(0.2), 0.002)
    start = {"beta": jnp.ones((2 * M, D))}
    two = kernel.init(random.split(random.key(3), 2 * M), 0, start, model_args=(SILOS,))
    one = kernel.init(
        random.split(random.key(3), M), 0, {"beta": start["beta"][:M]}, model_args=(SILOS,)
    )
    one = one._replace(rng_key=two.rng_key)
    for _ in range(3):
        two, one = (kernel.sample(s, (SILOS,), {}) for s in (two, one))
    np.testing.assert_allclose(two.z["beta"][:M], one.z["beta"], rtol=1e-5)


@pytest.mark.ci
def test_run_goes_on_from_the_last_state():
    def one(num_samples):
        return run(
            fed.PushSumLangevin(linear, PERIODIC.with_link_failures(0.1), 0.002),
            SILOS,
            1,
            num_samples,
            num_warmup=0,
        )

    whole, half = one(8), one(4)
    state = half.last_state
    half.post_warmup_state = state
    half.run(state.rng_key, SILOS)
    # MCMC splits the key it is given, so that what comes after differs in its noise: time, weights
    # and counts go on
    assert int(half.last_state.i) == int(whole.last_state.i) == 8
    first = half.sampler.sample(
        state._replace(rng_key=random.split(state.rng_key, M)[0]), (SILOS,), {}
    )
    np.testing.assert_allclose(
        np.asarray(half.get_samples(group_by_chain=True)["beta"])[:, 0], first.z["beta"], rtol=1e-5
    )


def test_a_network_that_leaves_the_reals_is_undone_and_named():
    def far(count):
        return jnp.where(count < 100, 1e-3, 1e30)

    kernel = fed.PushSumLangevin(linear, fed.graphs.ring(M), far)
    mcmc = run(kernel, SILOS, 2, 50, num_warmup=80)
    diverging = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["diverging"])
    assert not diverging[:, :20].any()
    assert diverging[:, 25:].all()
    assert np.isfinite(mcmc.get_samples()["beta"]).all()
    with pytest.warns(
        UserWarning, match=r"left the reals; farthest from the average was node 'silo"
    ):
        fed.to_inference_data(mcmc, SILOS)


def downhill(num_nodes):
    """All send to node 0, and each to the next: push-sum weights halve from node to node."""
    graph = nx.DiGraph([(i, i + 1) for i in range(num_nodes - 1)])
    graph.add_edges_from((i, 0) for i in range(1, num_nodes))
    return graph


def test_a_small_push_sum_weight_is_reported_with_the_nodes_name():
    silos = linear_silos((3,) * 19)
    mcmc = run(fed.PushSumLangevin(linear, downhill(19), 1e-7), silos, 1, 20)
    with warnings.catch_warnings(record=True) as caught:  # its draws are off the average, too
        warnings.simplefilter("always")
        fed.to_inference_data(mcmc, silos, log_likelihood=False)
    assert any("push-sum weight of node 'silo 18' fell to" in str(w.message) for w in caught), (
        caught
    )
    with pytest.raises(ValueError, match=r"node 29 gives away nearly all .* weight falls to .*e-0"):
        fed.PushSumLangevin(linear, downhill(30), 1e-4)


@pytest.mark.ci
def test_the_sum_of_weights_does_not_drift():
    kernel = fed.PushSumLangevin(linear, fed.graphs.complete(M).with_link_failures(0.3), 1e-4)
    state = kernel.init(random.split(random.key(0), M), 0, model_args=(SILOS,))
    state = jax.lax.fori_loop(0, 100_000, lambda _, s: kernel.sample(s, (SILOS,), {}), state)
    assert float(state.nodes.weight.sum()) == pytest.approx(M, rel=3e-7)


@pytest.mark.ci
def test_nodes_that_disagree_in_the_mean_are_named():
    graph = fed.graphs.from_networkx(LOPSIDED)
    exact, cov = exact_law(SILOS, graph, 0.01)
    offsets = exact.reshape(M, D) - exact.reshape(M, D).mean(0)
    worst = np.abs(offsets / np.sqrt(np.diag(cov).reshape(M, D).mean(0))).max(1).argmax()
    mcmc = run(fed.PushSumLangevin(linear, graph, 0.01), SILOS, 4, 2000)
    with pytest.warns(
        UserWarning,
        match=f"node 'silo {worst}' is at least 0.\\d+ posterior sds off the average of all",
    ):
        fed.to_inference_data(mcmc, SILOS, log_likelihood=False)
