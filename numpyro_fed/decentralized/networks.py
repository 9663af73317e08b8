"""State and step of networks of nodes, for any algorithm of the nodes."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed.data.views import SiloRows, to_pooled_order
from numpyro_fed.decentralized.mixing import Mixing
from numpyro_fed.decentralized.nodes import Nodes, add, gradients, own_step
from numpyro_fed.mcmc.adaptation import Adaptation, adapt, first_looks
from numpyro_fed.mcmc.config import NetworkConfig, Tuning
from numpyro_fed.mcmc.gradients import push
from numpyro_fed.rounds.serialization import wire_name

# least push-sum weight, where the mean is one: float32 rounds what comes from nodes of weight one
# by 6e-8, 6 % of so small a weight
LEAST_WEIGHT = 1e-6


@wire_name("NetworkState")
class NetworkState(NamedTuple):
    """State of R networks of m nodes after a step.

    Chains are nodes, ``C = R m``, network after network.

    :param i: number of steps made.
    :param z: all latent sites in unconstrained space ``(C, ...)``: global ones at each node's own
        position; local ones in pooled order, each from its own node.
    :param nodes: what the nodes hold, ``(R, m, ...)``.
    :param push_sum_weight: Y, ``(C,)``; ones for gossip.
    :param consensus_error: squared distance of each node's global position from the network's
        average, ``(C,)``.
    :param diverging: whether the network's step was undone, since a number was not finite or a
        push-sum weight fell below 1e-6, ``(C,)``.
    :param local_accept_prob: mean acceptance of a node's local moves (1 without any), ``(C,)``.
    :param step_size: alpha of this step, ``(C,)``.
    :param sent: number of messages that each node has sent, ``(C,)``.
    :param received: number of messages that each node has received, ``(C,)``.
    :param adaptation: the adaptive step size's memory, or ``None``.
    :param rng_key: one key for all networks.
    :param tuning: the numbers of the kernel.
    :param mixing: the graph's arrays.
    """

    i: Array
    z: dict[str, Array]
    nodes: Nodes
    push_sum_weight: Array
    consensus_error: Array
    diverging: Array
    local_accept_prob: Array
    step_size: Array
    sent: Array
    received: Array
    adaptation: Adaptation | None
    rng_key: Array
    tuning: Tuning
    mixing: Mixing


class Exchanged(NamedTuple):
    """Networks after an exchange, before their nodes add their own drift and noise.

    :param rng_key: key of the next steps.
    :param key_own: key of each network's local moves and minibatches ``(R,)``.
    :param key_noise: key of each network's noise ``(R,)``.
    :param step_size: alpha of this step.
    :param nodes: what nodes hold, ``(R, m, ...)``.
    :param position: where nodes take their gradients, ``(R, m, d)``.
    :param sent: number of messages that each node sent in this exchange ``(R, m)``.
    :param received: number of messages that each node received in this exchange ``(R, m)``.
    """

    rng_key: Array
    key_own: Array
    key_noise: Array
    step_size: Array
    nodes: Nodes
    position: Array
    sent: Array
    received: Array


@partial(jax.jit, static_argnames=("config",))
def advance(config: NetworkConfig, state: NetworkState, stacks: list[SiloRows]) -> NetworkState:
    """Make one step of every network."""
    if state.adaptation is not None:
        _, key = random.split(state.rng_key)
        look = _learn(
            config, state.tuning, state.adaptation, random.fold_in(key, 0), state.nodes, stacks
        )
        state = state._replace(adaptation=look)
    sent = exchange(config, state)

    def own(key: Array, position: Array, eps: list[Array] | None) -> tuple:
        return own_step(config, state.tuning, key, position, eps, stacks)

    slope, eps, accepted = jax.vmap(own)(sent.key_own, sent.position, state.nodes.eps)
    return next_state(config, state, sent, slope, accepted, eps, stacks)


def exchange(config: NetworkConfig, state: NetworkState) -> Exchanged:
    """Let nodes send and receive."""
    rng_key, key = random.split(state.rng_key)

    def one(number: Array, nodes: Nodes) -> tuple:
        key_links, key_step = random.split(random.fold_in(key, number + 1))
        key_own, key_noise = random.split(key_step)
        links = state.mixing.links(
            key_links, state.i, fails=config.fails, both_ways=config.both_ways
        )
        return key_own, key_noise, *config.exchange(links, nodes), links.sent, links.received

    networks = jnp.arange(state.nodes.x.shape[0])
    key_own, key_noise, nodes, position, sent, received = jax.vmap(one)(networks, state.nodes)
    alpha = current_step_size(config, state)
    return Exchanged(rng_key, key_own, key_noise, alpha, nodes, position, sent, received)


def next_state(
    config: NetworkConfig,
    state: NetworkState,
    sent: Exchanged,
    slope: Array,
    accepted: Array,
    eps: list[Array] | None,
    stacks: list[SiloRows],
) -> NetworkState:
    """Return the state after a step, from the nodes' own results.

    :param slope: the nodes' gradients ``(R, m, d)``.
    :param accepted: mean acceptances of their local moves ``(R, m)``.
    :param eps: new coordinates of their local latents, or ``None`` if this process holds none.
    """
    alpha, position = sent.step_size, sent.position

    def one(key: Array, nodes: Nodes, slope: Array) -> tuple[Nodes, Array]:
        new = add(state.tuning, key, alpha, nodes, slope)
        # a number that is not finite soon reaches all nodes, so undo a network's step as a whole
        return new, jnp.isfinite(new.x).all() & (new.weight > LEAST_WEIGHT).all()

    new, good = jax.vmap(one)(sent.key_noise, sent.nodes._replace(eps=eps), slope)

    def kept(new: Array, old: Array) -> Array:
        return jnp.where(good.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    nodes = jax.tree.map(kept, new, state.nodes)
    # rounding of A's columns adds up to a tenth in 1e6 steps of failing links; Z does not depend on
    # the common factor
    scale = position.shape[1] / jnp.sum(nodes.weight, 1)
    nodes = nodes._replace(x=nodes.x * scale[:, None, None], weight=nodes.weight * scale[:, None])
    chains = state.push_sum_weight.shape
    old = flat(config, state.z).reshape(position.shape)
    position = kept(position, old)
    # the average of W, since Y of this step weighs the positions of this step
    average = jnp.mean(nodes.weight[..., None] * position, axis=1, keepdims=True)
    return state._replace(
        i=state.i + 1,
        z=sites(config, state.tuning, position, nodes.eps, stacks),
        nodes=nodes,
        push_sum_weight=nodes.weight.reshape(chains),
        consensus_error=jnp.sum((position - average) ** 2, -1).reshape(chains),
        diverging=jnp.repeat(~good, position.shape[1]),
        local_accept_prob=accepted.reshape(chains),
        step_size=jnp.broadcast_to(alpha, chains),
        sent=state.sent + sent.sent.reshape(chains),
        received=state.received + sent.received.reshape(chains),
        rng_key=sent.rng_key,
    )


def current_step_size(config: NetworkConfig, state: NetworkState) -> Array:
    """Return alpha of the next step."""
    if state.adaptation is not None:
        return state.adaptation.step_size
    size = state.tuning.step_size
    return size if config.schedule is None else jnp.asarray(config.schedule(state.i), size.dtype)


def _learn(
    config: NetworkConfig,
    tuning: Tuning,
    adaptation: Adaptation,
    key: Array,
    nodes: Nodes,
    stacks: list[SiloRows],
) -> Adaptation:
    """Measure curvature, in whitened units, and gradient noise of the first network.

    The look is at the average of its nodes.
    """
    keys = random.split(key)
    first = jax.tree.map(lambda x: x[0], nodes)
    average = first.x.mean(0)

    def estimate(u: Array) -> tuple[Array, Array]:
        theta = average + push(tuning, u)
        positions = jnp.broadcast_to(theta, (config.num_nodes, *theta.shape))
        both = [
            gradients(config, tuning, keys[k], positions, first.eps, stacks).sum(0) for k in (0, 1)
        ]
        return both[0], both[1]

    return adapt(adaptation, estimate, jnp.zeros_like(average))


def flat(config: NetworkConfig, z: Mapping[str, Array]) -> Array:
    """Return the global positions ``(C, d)``."""
    return jax.vmap(config.factors.ravel)(
        {name: z[name] for name, _ in config.factors.global_sites}
    )


def sites(
    config: NetworkConfig,
    tuning: Tuning,
    position: Array,
    eps: list[Array] | None,
    stacks: list[SiloRows],
) -> dict[str, Array]:
    """Return all latent sites ``(C, ...)`` at positions ``(R, m, d)`` and coordinates."""
    theta = position.reshape(-1, position.shape[-1])
    shared = jax.vmap(config.factors.unravel)(theta)
    if config.units is None or eps is None:
        return shared
    units, latents = config.units, tuning.latents
    assert latents is not None
    groups = config.factors.local_groups()
    size = dict(config.totals)

    def one(position: Array, eps: list[Array]) -> dict[str, Array]:
        out: dict[str, Array] = {}
        for k, rows in enumerate(stacks):
            u = jax.vmap(latents.u)(position[rows.number])
            z = jax.vmap(lambda own, u, e: own.forward(u, e))(latents.rows[k], u, eps[k])
            for name, x in jax.vmap(units.to_sites)(z).items():
                empty = jnp.zeros((size[groups[name]], *x.shape[2:]), x.dtype)
                out[name] = to_pooled_order(out.get(name, empty), rows, groups[name], x)
        return {s.name: jnp.moveaxis(out[s.name], 0, s.axis) for s in config.factors.local_sites}

    local = jax.vmap(one)(position, eps)
    return {**shared, **{k: jnp.repeat(v, position.shape[1], axis=0) for k, v in local.items()}}


@partial(jax.jit, static_argnames=("config",))
def look_around(
    config: NetworkConfig,
    tuning: Tuning,
    first: Adaptation,
    key: Array,
    nodes: Nodes,
    stacks: list[SiloRows],
) -> Adaptation:
    """Look at the start, before the first step of the networks."""
    return first_looks(
        first, lambda i, a: _learn(config, tuning, a, random.fold_in(key, i), nodes, stacks)
    )
