r"""Part of a step that each node of a network computes for itself.

Node i holds silo i. Its part of the pooled log density is

.. math:: -U_i(\theta) = \log p(y_i, z_i \mid \theta) + \tfrac1m \log p(\theta),

so that the parts of all m nodes sum to the pooled one. As in FSGLD, local latents are in the
coordinates of the local map and move by Metropolis steps. The gradient is at fixed coordinates.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.mcmc.config import NodeConfig, Tuning
from numpyro_fed.mcmc.gradients import OpenSilo, pull_back, push, terms
from numpyro_fed.mcmc.langevin import move, pick_rows
from numpyro_fed.mcmc.local_moves import move_noise
from numpyro_fed.rounds.serialization import wire_name


@wire_name("NodeStates")
class Nodes(NamedTuple):
    """Numbers that the m nodes of one network hold.

    :param x: numbers that they mix: push-sum numerators, or positions of gossip ``(m, d)``.
    :param weight: push-sum weights y, which sum to m ``(m,)``.
    :param tracker: each node's share of the sum of all gradients, in whitened units ``(m,
        d)``, or ``None``.
    :param slope: the gradient that the tracker already holds ``(m, d)``, or ``None``.
    :param eps: coordinates of local latents, for each stack of silos ``(S, E, k)``, or ``None``.
        They never leave their node.
    """

    x: Array
    weight: Array
    tracker: Array | None
    slope: Array | None
    eps: list[Array] | None


def own_step(
    config: NodeConfig,
    tuning: Tuning,
    key: Array,
    positions: Array,
    eps: list[Array] | None,
    stacks: list[SiloRows],
) -> tuple[Array, list[Array] | None, Array]:
    """Make :func:`node_step` for all nodes.

    :return: gradients ``(m, d)``, coordinates, and mean acceptances ``(m,)``.
    """
    parts = _over_stacks(partial(node_step, config, tuning, key), tuning, positions, eps, stacks)
    new_eps = None if eps is None else [part[1] for part in parts]
    return (
        _in_order([part[0] for part in parts], stacks),
        new_eps,
        _in_order([part[2] for part in parts], stacks),
    )


def node_step(
    config: NodeConfig,
    tuning: Tuning,
    key: Array,
    rows: SiloRows,
    theta: Array,
    eps: Array | None,
    local_map: PyTree,
) -> tuple[Array, Array | None, Array]:
    """Move a node's local latents given its own position, then take its gradient.

    :param key: one key for all nodes of a network.
    :param theta: the node's position ``(d,)``.
    :param eps: private coordinates of its local latents ``(E, k)``, or ``None``.
    :param local_map: the silo's private local map.
    :return: the gradient, in whitened units ``(d,)``, the coordinates, and the mean
        acceptance (1 without any).
    """
    key_moves, key_batch = random.split(key)
    accepted = jnp.ones((), theta.dtype)
    if eps is not None:
        assert config.units is not None
        silo = _open(
            config, tuning, key_moves, rows, local_map
        )  # takes all rows, since local latents and minibatches exclude each other
        noise = jax.tree.map(lambda x: x[0], move_noise(config.units, key_moves, eps, rows, 1))
        eps, accepted = move(config, theta, eps, silo, rows, noise)
    return _gradient(config, tuning, key_batch, rows, theta, eps, local_map), eps, accepted


def add(tuning: Tuning, key: Array, step_size: Array, nodes: Nodes, slope: Array) -> Nodes:
    """Add each node's drift and noise to what it received.

    :param nodes: the nodes after the exchange.
    :param slope: their gradients ``(m, d)``.
    """
    if nodes.tracker is None or nodes.slope is None:
        return nodes._replace(
            x=nodes.x + kick(tuning, key, step_size, slope, jnp.ones_like(nodes.weight))
        )
    tracker = nodes.tracker + slope - nodes.slope
    moved = nodes.x + kick(tuning, key, step_size, tracker, nodes.weight)
    return nodes._replace(x=moved, tracker=tracker, slope=slope)


def kick(tuning: Tuning, key: Array, step_size: Array, drift: Array, share: Array) -> Array:
    """Return ``L (alpha drift + sqrt(2 alpha share) xi)`` of every node ``(m, d)``.

    Each node's noise comes from a key of its own.

    :param share: each node's share of the noise, ``(m,)`` with a sum of m.
    """

    def one(number: Array, drift: Array, share: Array) -> Array:
        xi = random.normal(random.fold_in(key, number), drift.shape, drift.dtype)
        return push(tuning, step_size * drift + jnp.sqrt(2 * step_size * share) * xi)

    return jax.vmap(one)(jnp.arange(drift.shape[0]), drift, share)


def gradients(
    config: NodeConfig,
    tuning: Tuning,
    key: Array,
    positions: Array,
    eps: list[Array] | None,
    stacks: list[SiloRows],
) -> Array:
    """Return ``- L' grad U_i`` of every node at its own position, ``(m, d)``.

    Each node draws a fresh minibatch if the config has minibatches.
    """
    return _in_order(
        _over_stacks(partial(_gradient, config, tuning, key), tuning, positions, eps, stacks),
        stacks,
    )


def _gradient(
    config: NodeConfig,
    tuning: Tuning,
    key: Array,
    rows: SiloRows,
    theta: Array,
    eps: Array | None,
    local_map: PyTree,
) -> Array:
    """Return ``- L' grad U_i`` of one node ``(d,)``."""
    share = 1.0 / config.num_nodes
    silo = _open(config, tuning, random.fold_in(key, rows.number), rows, local_map)

    def log_density(theta: Array) -> Array:
        log_prior, local = terms(config, theta, eps, silo, rows)
        return share * log_prior + local

    return pull_back(tuning, jax.grad(log_density)(theta))


def _open(
    config: NodeConfig, tuning: Tuning, key: Array, rows: SiloRows, local_map: PyTree
) -> OpenSilo:
    kwargs, weights = rows.whole()
    if config.batch is not None:
        group, size = config.batch
        index = pick_rows(key, (size,), rows.size(group))
        kwargs |= rows.take(config.factors.leaves(group), index)
        weights[group] = rows.size(group).astype(weights[group].dtype) / size
    latents = None if tuning.latents is None else tuning.latents._replace(rows=local_map)
    return OpenSilo(kwargs, weights, latents)


def _over_stacks(
    one: Callable, tuning: Tuning, positions: Array, eps: list[Array] | None, stacks: list[SiloRows]
) -> list:
    """Return ``one(rows, theta, eps, local_map)`` of every node, stack by stack."""
    out = []
    for k, rows in enumerate(stacks):
        own = None if eps is None else eps[k]
        local_map = None if tuning.latents is None else tuning.latents.rows[k]
        out.append(
            jax.vmap(one, in_axes=(rows.axes, 0, 0, 0))(
                rows, positions[rows.number], own, local_map
            )
        )
    return out


def _in_order(parts: list[Array], stacks: list[SiloRows]) -> Array:
    if len(parts) == 1:
        return parts[0]
    number = jnp.concatenate([rows.number for rows in stacks])
    together = jnp.concatenate(parts)
    return jnp.zeros_like(together).at[number].set(together)
