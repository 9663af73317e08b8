"""Kernels over a network refuse bad input before anything is compiled; the errors name the mend."""

import warnings

import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from jax import random
from numpyro.infer import MCMC
from small_models import intercepts, intercepts_silos, linear, linear_silos

import numpyro_fed as fed

SILOS = linear_silos()
RING = fed.graphs.ring(4)


def start(kernel, silos=SILOS, chains=4, **init):
    return kernel.init(random.split(random.key(0), chains), 0, model_args=(silos,), **init)


REFUSED = {
    "graph of another size": (
        lambda: start(fed.PushSumLangevin(linear, fed.graphs.ring(3), 0.01)),
        "each of the 4 silos, got 3 nodes",
    ),
    "not connected": (
        lambda: fed.PushSumLangevin(linear, nx.DiGraph([(0, 1), (1, 2), (2, 3)]), 0.01),
        "what node 1 sends never reaches 0",
    ),
    "no graph": (
        lambda: fed.PushSumLangevin(linear, np.eye(4), 0.01),
        "graph: expected one of numpyro_fed.graphs or networkx, got ndarray",
    ),
    "step zero": (lambda: fed.PushSumLangevin(linear, RING, 0.0), "finite number > 0, got 0.0"),
    "step nothing": (
        lambda: fed.PushSumLangevin(linear, RING, None),
        "finite number > 0, got None",
    ),
    "steps of a list": (lambda: fed.SGLD(linear, [0.1, 0.2]), "finite number > 0, got .0.1, 0.2."),
    "schedule of SGLD": (
        lambda: fed.SGLD(linear, lambda t: -1.0),
        "finite numbers > 0, got -1 at step 0",
    ),
    "step of another kernel": (
        lambda: fed.PushSumLangevin(linear, RING, "auto"),
        "a schedule or \"adaptive\" for a network, got 'auto'",
    ),
    "schedule that ends": (
        lambda: fed.PushSumLangevin(linear, RING, optax.linear_schedule(0.1, 0.0, 100)),
        "finite numbers > 0, got 0 at step 1",
    ),
    "schedule of arrays": (
        lambda: fed.PushSumLangevin(linear, RING, lambda t: jnp.ones(2)),
        r"got an array of shape \(2,\) at step 0",
    ),
    "schedule that fails": (
        lambda: fed.PushSumLangevin(linear, RING, lambda: 0.1),
        "the schedule fails at step 0 .TypeError",
    ),
    "bias target": (
        lambda: fed.PushSumLangevin(linear, RING, fed.Step("adaptive", bias_target=1.0)),
        r"\(0, 1\), got 1.0",
    ),
    "noise correction": (
        lambda: fed.GossipLangevin(linear, RING, fed.Step(0.1, noise_correction=True)),
        "are for FSGLD, not for networks",
    ),
    "batch": (
        lambda: start(fed.PushSumLangevin(linear, RING, 0.01, 4)),
        "more than silo 'silo 0' has: 3 rows",
    ),
    "batch of elements": (
        lambda: start(
            fed.PushSumLangevin(intercepts, fed.graphs.ring(3), 0.01, 2), intercepts_silos(), 3
        ),
        r"batch_size=2 with local latents \['a'\] .* expected batch_size=None",
    ),
    "one chain": (
        lambda: start(fed.PushSumLangevin(linear, RING, 0.01), chains=1),
        "multiple of the 4 nodes, got 1; write MCMC",
    ),
    "chains": (
        lambda: start(fed.PushSumLangevin(linear, RING, 0.01), chains=6),
        "multiple of the 4 nodes, got 6",
    ),
    "start": (
        lambda: start(
            fed.PushSumLangevin(linear, RING, 0.01), init_params={"beta": jnp.zeros((4, 3))}
        ),
        "of shapes .* got",
    ),
    "start not finite": (
        lambda: start(
            fed.PushSumLangevin(linear, RING, 0.01), init_params={"beta": jnp.full((4, 2), jnp.nan)}
        ),
        "NaN or infinity at site 'beta'",
    ),
    "no silos": (
        lambda: fed.PushSumLangevin(linear, RING, 0.01).init(
            random.split(random.key(0), 4), 0, model_args=(np.ones(3),)
        ),
        "expected mcmc.run.rng_key, silos",
    ),
    "gossip, directed": (
        lambda: fed.GossipLangevin(linear, RING, 0.01),
        "links that work both ways",
    ),
    "gossip, matrices": (
        lambda: fed.GossipLangevin(linear, fed.graphs.from_matrices(np.full((4, 4), 0.25)), 0.01),
        "makes its weights itself",
    ),
    "decay": (
        lambda: fed.polynomial_decay(0.1, 0.0, 1.0),
        "offset: expected a finite number > 0, got 0.0",
    ),
    "node without rows": (
        lambda: fed.Silos({"a": {"y": np.ones(3)}, "b": {"y": np.ones(0)}}),
        "silo 'b' is empty",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name):
    make, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_single_sequential_chain_says_what_to_write():
    mcmc = MCMC(
        fed.PushSumLangevin(linear, RING, 0.01), num_warmup=1, num_samples=1, progress_bar=False
    )
    with pytest.raises(ValueError, match='num_chains=4, chain_method="vectorized"'):
        mcmc.run(random.key(0), SILOS)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (fed.polynomial_decay(0.1, 1.0, 1.5), "sum of all steps looks finite"),
        (optax.exponential_decay(0.1, 10, 0.99, end_value=1e-30), None),
        (fed.polynomial_decay(0.008, 12.0, 0.45), "sum of its squares looks infinite"),
        (fed.polynomial_decay(0.1, 1.0, 1.0), None),
        (fed.polynomial_decay(0.1, 1.0, 0.55), None),
        (optax.constant_schedule(0.01), None),
    ],
)
def test_schedules_that_look_wrong_are_warned_of(schedule, message):
    if message is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fed.PushSumLangevin(linear, RING, schedule)
    else:
        with pytest.warns(UserWarning, match=message):
            fed.PushSumLangevin(linear, RING, schedule)


def test_another_number_of_silos_needs_a_new_start():
    kernel = fed.PushSumLangevin(linear, RING, 0.01)
    state = start(kernel)
    with pytest.raises(ValueError, match="the state has 4 nodes, the data 3 silos"):
        kernel.sample(state, (linear_silos((3, 8, 5)),), {})


def test_a_node_is_asked_of_networks_only():
    mcmc = MCMC(fed.SGLD(linear, 0.01), num_warmup=1, num_samples=4, progress_bar=False)
    mcmc.run(random.key(0), SILOS)
    with pytest.raises(ValueError, match="node='silo 0' is for kernels over a network"):
        fed.to_inference_data(mcmc, SILOS, node="silo 0")
    network = MCMC(
        fed.PushSumLangevin(linear, RING, 0.001),
        num_warmup=1,
        num_samples=4,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    network.run(random.key(0), SILOS)
    with pytest.raises(ValueError, match=r'expected "average", or one of the silos .* got .oslo.'):
        fed.to_inference_data(network, SILOS, node="oslo")
