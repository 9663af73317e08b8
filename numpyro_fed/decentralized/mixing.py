r"""Mixing matrices of a graph as arrays, by which nodes exchange messages.

In an exchange, every node receives a weighted sum of the others' numbers. :func:`mixing` turns a
:class:`~numpyro_fed.decentralized.graphs.TimeVaryingGraph` into arrays. :meth:`Mixing.links` draws
the working links of a step, and :meth:`Links.mix` applies the step's matrix to any numbers of the
nodes. Two rules make a matrix from links:

* *shares* (push-sum): a node splits its numbers evenly over itself and its working links; columns
  sum to one;
* *Metropolis weights* (gossip): :math:`W_{ij} = 1 / (1 + \max(d_i, d_j))` on links that work both
  ways; rows and columns sum to one.

Dense mixing multiplies matrices. Sparse mixing gathers from each node's in-neighbors, at a cost of
m times the largest in-degree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.decentralized.graphs import TimeVaryingGraph

# largest in-degree of sparse mixing, as a fraction of the nodes: with 256 nodes and 20 dimensions
# it took .7 of a dense product's time at 1/16, and 1.8 times it at 1/8; with 64 nodes .8 at 1/8
_SPARSE_BELOW = 1 / 8


class Links(NamedTuple):
    """Mixing matrix of one step.

    :param matrix: dense: ``(m, m)``; sparse: the weights of in-neighbors, ``(m, K)``.
    :param own: sparse: each node's weight of itself, ``(m,)``; dense: ``None``.
    :param senders: sparse: in-neighbors, ``(m, K)``; dense: ``None``.
    :param sent: messages that each node sent, ``(m,)``.
    :param received: messages that each node received, ``(m,)``.
    """

    matrix: Array
    own: Array | None
    senders: Array | None
    sent: Array
    received: Array

    def mix(self, x: Array) -> Array:
        """Return ``A x`` for ``x`` of shape ``(m, ...)``."""
        if self.senders is None or self.own is None:
            return jnp.tensordot(self.matrix, x, 1, precision=jax.lax.Precision.HIGHEST)
        flat = x.reshape(x.shape[0], -1)
        mixed = self.own[:, None] * flat + jnp.sum(self.matrix[..., None] * flat[self.senders], 1)
        return mixed.reshape(x.shape)


class Mixing(NamedTuple):
    """Arrays of a graph: each node's in-neighbors at each step of the period.

    They are padded to the largest number K of in-neighbors.

    :param senders: in-neighbors ``(B, m, K)``; padding has weight zero.
    :param weights: their weights without failures ``(B, m, K)``.
    :param own: each node's weight of itself ``(B, m)``.
    :param pair: number of the pair of nodes that a link joins, equal for both directions ``(B, m,
        K)``.
    :param dense: the matrices ``(B, m, m)``, or ``None`` for sparse mixing.
    :param link_failure: probability that a link fails at a step.
    :param node_dropout: probability that a node is offline at a step.
    """

    senders: Array
    weights: Array
    own: Array
    pair: Array
    dense: Array | None
    link_failure: Array
    node_dropout: Array

    def links(self, key: Array, t: Array, *, fails: bool, both_ways: bool) -> Links:
        """Return the matrix of step ``t``, with its failures.

        :param key: key of the failures.
        :param fails: whether anything may fail (static; if not, no random numbers are drawn).
        :param both_ways: gossip: a link fails in both directions, and rows of the matrix sum to
            one.
        """
        at = jnp.remainder(t, self.own.shape[0])
        senders, weights, own = self.senders[at], self.weights[at], self.own[at]
        if fails:
            alive = (weights > 0) & self._works(key, at, both_ways)
            weights, own = (
                _metropolis(alive, senders)
                if both_ways
                else _renormalized(alive, weights, own, senders)
            )
        alive = weights > 0
        received = jnp.sum(alive, 1, dtype=jnp.uint32)
        sent = jnp.zeros_like(received).at[senders].add(alive)
        if self.dense is None:
            return Links(weights, own, senders, sent, received)
        if not fails:
            return Links(self.dense[at], None, None, sent, received)
        nodes = jnp.arange(own.shape[0])
        matrix = (
            jnp.zeros_like(self.dense[0])
            .at[nodes[:, None], senders]
            .add(weights)
            .at[nodes, nodes]
            .add(own)
        )
        return Links(matrix, None, None, sent, received)

    def _works(self, key: Array, at: Array, both_ways: bool) -> Array:
        key_link, key_node = random.split(key)
        m, most = self.senders.shape[1:]
        # in gossip both directions of a link share one draw
        draws = (
            random.uniform(key_link, (m * m,))[self.pair[at]]
            if both_ways
            else random.uniform(key_link, (m, most))
        )
        up = random.uniform(key_node, (m,)) >= self.node_dropout
        return (draws >= self.link_failure) & up[:, None] & up[self.senders[at]]


def _renormalized(alive: Array, weights: Array, own: Array, senders: Array) -> tuple[Array, Array]:
    """Return the shares of the working links, scaled so that each sender's sum to one again."""
    weights = jnp.where(alive, weights, 0.0)
    total = own.at[senders].add(weights)
    return weights / total[senders], own / total


def _metropolis(alive: Array, senders: Array) -> tuple[Array, Array]:
    degree = jnp.sum(alive, 1)
    weights = jnp.where(alive, 1.0 / (1.0 + jnp.maximum(degree[:, None], degree[senders])), 0.0)
    return weights, 1.0 - jnp.sum(weights, 1)


def mixing(graph: TimeVaryingGraph, *, both_ways: bool, sparse: bool | None = None) -> Mixing:
    """Return a graph's arrays.

    :param both_ways: use Metropolis weights in place of equal shares.
    :param sparse: gather from in-neighbors, rather than multiply matrices; ``None``: sparse if no
        node has an eighth of all nodes as in-neighbors.
    """
    m, dtype = graph.num_nodes, jnp.result_type(float)
    most = max(1, int(graph.links.sum(2).max()))
    senders = np.zeros((graph.period, m, most), np.int32)
    weights, own = np.zeros(senders.shape), np.zeros(senders.shape[:2])
    matrices = np.stack([graph.matrix(t, gossip=both_ways) for t in range(graph.period)])
    for t, i in np.ndindex(graph.period, m):
        others = np.flatnonzero(graph.links[t, i])
        senders[t, i, : len(others)] = others
        weights[t, i, : len(others)] = matrices[t, i, others]
        own[t, i] = matrices[t, i, i]
    receivers = np.arange(m)[:, None]
    pair = np.minimum(receivers, senders) * m + np.maximum(receivers, senders)
    sparse = most < m * _SPARSE_BELOW if sparse is None else sparse
    return Mixing(
        jnp.asarray(senders),
        jnp.asarray(weights, dtype),
        jnp.asarray(own, dtype),
        jnp.asarray(pair, jnp.int32),
        None if sparse else jnp.asarray(matrices, dtype),
        jnp.asarray(graph.link_failure, dtype),
        jnp.asarray(graph.node_dropout, dtype),
    )
