"""Periodic sequences of directed graphs, and their properties before any message.

:mod:`numpyro_fed.decentralized.graphs` makes them.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import networkx as nx
import numpy as np

from numpyro_fed.decentralized.added_variance import (
    SEEN_STEPS,
    excess_variance,
    product,
    stationary_weight,
)

# steps of the random sequence that measures a rate: from seed to seed the rate of four nodes, .73,
# has an sd of .002, that of eight, .93, of .0005
_SIMULATED = 2000
# random sequences whose median stands for the added variance: other nine moved it by 10 % (sd) for
# four nodes, by 2 % for eight
_SEQUENCES = 9


@dataclass(frozen=True, eq=False, repr=False)
class TimeVaryingGraph:
    """Periodic sequence of directed graphs, whose links and nodes may fail at random.

    The functions of :mod:`numpyro_fed.graphs` make it.

    :ivar links: which links there are, shape ``(period, m, m)``; ``[t, i, j]``: at steps t, t +
        period, ... node j sends to node i.
    :ivar nodes: the nodes' labels. If all labels (as text) are silo names, they match silos by
        name; otherwise labels 0 ... m - 1 match silos by place.
    :ivar weights: column-stochastic matrices ``(period, m, m)`` in place of equal shares, or
        ``None``.
    :ivar link_failure: probability that a link does not work at a step, independently of others.
    :ivar node_dropout: probability that a node neither sends nor receives at a step.
    """

    links: np.ndarray
    nodes: tuple[Hashable, ...]
    weights: np.ndarray | None = None
    link_failure: float = 0.0
    node_dropout: float = 0.0

    @property
    def period(self) -> int:
        """Number of steps after which the sequence begins anew."""
        return len(self.links)

    @property
    def num_nodes(self) -> int:
        """Number m of nodes."""
        return len(self.nodes)

    @property
    def fails(self) -> bool:
        """True if links or nodes fail at random."""
        return self.link_failure > 0 or self.node_dropout > 0

    @property
    def is_symmetric(self) -> bool:
        """True if every link has its way back at the same step, as gossip needs."""
        return bool((self.links == np.swapaxes(self.links, 1, 2)).all())

    def __repr__(self) -> str:
        fails = "".join(
            f", {name} {p:g}"
            for name, p in (
                ("link_failure", self.link_failure),
                ("node_dropout", self.node_dropout),
            )
            if p
        )
        counts = "/".join(str(int(n)) for n in self.links.sum((1, 2))[:6]) + (
            "/..." if self.period > 6 else ""
        )
        return (
            f"TimeVaryingGraph({self.num_nodes} nodes, period {self.period}, {counts} links{fails})"
        )

    def with_link_failures(self, probability: float) -> "TimeVaryingGraph":
        """Return a graph whose links each fail at each step with this probability.

        Failures are independent of each other, and of failures that the graph had before.

        :raises ValueError: for a probability outside [0, 1).
        """
        return replace(
            self,
            link_failure=_either(self.link_failure, _probability("link failures", probability)),
        )

    def with_node_dropout(self, probability: float) -> "TimeVaryingGraph":
        """Return a graph whose nodes are each offline at each step with this probability.

        An offline node keeps what it holds, and goes on sampling.

        :raises ValueError: for a probability outside [0, 1).
        """
        return replace(
            self, node_dropout=_either(self.node_dropout, _probability("node dropout", probability))
        )

    def ordered(self, names: Sequence[str]) -> "TimeVaryingGraph":
        """Return the graph with its nodes in the order of silos of these names.

        :raises ValueError: if the numbers of nodes and silos differ, or labels are neither the
            silos' names nor numbers.
        """
        if self.num_nodes != len(names):
            raise ValueError(
                f"graph: expected one node for each of the {len(names)} silos, got "
                f"{self.num_nodes} nodes, {shown(self.nodes)}"
            )
        labels: tuple[Hashable, ...] = tuple(map(str, self.nodes))
        if set(labels) != set(names) and set(self.nodes) == set(range(len(names))):
            labels = tuple(names[i] for i in self.nodes)  # type: ignore[call-overload]
        if set(labels) != set(names):
            unknown = [node for node in labels if node not in names]
            missing = [name for name in names if name not in labels]
            raise ValueError(
                "graph: expected nodes labeled with the silos' names, or with 0 ... "
                f"{len(names) - 1} in their order; no silo is called {shown(unknown)}, and no node "
                f"{shown(missing)}"
            )
        place = [labels.index(name) for name in names]
        weights = None if self.weights is None else self.weights[:, place][:, :, place]
        return replace(
            self, nodes=tuple(names), links=self.links[:, place][:, :, place], weights=weights
        )

    def matrix(self, t: int = 0, *, gossip: bool = False) -> np.ndarray:
        """Return the column-stochastic mixing matrix A(t) without failures, ``(m, m)``.

        For gossip it is the matrix of Metropolis weights.
        """
        if gossip:
            return metropolis(self.links[t % self.period])
        return (
            shares(self.links[t % self.period])
            if self.weights is None
            else self.weights[t % self.period]
        )

    def connectivity(self) -> int:
        """Return the smallest B for which the sequence is B-strongly connected.

        The links of steps kB ... (k + 1)B - 1 are then strongly connected for every k >= 0. Links
        that fail at random count, since they work infinitely often.

        :raises ValueError: if there is no such B, with the nodes that messages cannot reach, and
            from where.
        """
        self._check_union()
        for window in range(1, self.period):
            starts = range(0, math.lcm(window, self.period), window)
            if all(self._strongly_connected(range(start, start + window)) for start in starts):
                return window
        return self.period

    def _strongly_connected(self, steps: range) -> bool:
        union = self.links[[t % self.period for t in steps]].any(0)
        return nx.is_strongly_connected(nx.from_numpy_array(union.T, create_using=nx.DiGraph))

    def _check_union(self) -> None:
        union = nx.from_numpy_array(self.links.any(0).T, create_using=nx.DiGraph)
        if nx.is_strongly_connected(union):
            return
        everyone = set(union)
        for node in union:
            lost = everyone - nx.descendants(union, node) - {node}
            if lost:
                raise ValueError(
                    f"graph: not strongly connected over its period of {self.period} step(s), so "
                    f"it is B-strongly connected for no B: what node {self.nodes[node]!r} sends "
                    "never reaches "
                    f"{shown([self.nodes[i] for i in sorted(lost)])}. Expected a path from every "
                    "node to every other"
                )

    def contraction_rate(self, *, gossip: bool = False) -> float:
        r"""Return the factor per step by which disagreement of nodes shrinks, in [0, 1).

        For a periodic sequence it is the modulus of the second eigenvalue of :math:`A(B) \cdots
        A(1)`, to the power 1/B. With random failures it is the growth rate of the second singular
        direction of the product, from 2,000 simulated steps.
        """
        if self.fails:
            rng, vector, growth = (
                np.random.default_rng(0),
                np.random.default_rng(1).normal(size=self.num_nodes),
                0.0,
            )
            for t in range(_SIMULATED):
                vector -= vector.mean()  # A is column-stochastic, so it keeps sums of zero
                vector = self.draw(rng, t, gossip=gossip) @ vector
                norm = np.linalg.norm(vector)
                if norm == 0:
                    return 0.0
                growth, vector = growth + math.log(norm), vector / norm
            return math.exp(growth / _SIMULATED)
        values = np.linalg.eigvals(product(self._period(gossip)))
        return float(np.sort(np.abs(values))[-2] ** (1 / self.period))

    def _period(self, gossip: bool = False) -> list[np.ndarray]:
        return [self.matrix(t, gossip=gossip) for t in range(self.period)]

    def _sequence(self, seed: int, num_steps: int, gossip: bool) -> Iterator[np.ndarray]:
        """Draw the random mixing matrices of some steps, one by one."""
        rng = np.random.default_rng(seed)
        for t in range(num_steps):
            yield self.draw(rng, t, gossip=gossip)

    def draw(self, rng: np.random.Generator, t: int, *, gossip: bool = False) -> np.ndarray:
        """Draw a random mixing matrix of step t."""
        if not self.fails:
            return self.matrix(t, gossip=gossip)
        up = rng.random(self.num_nodes) >= self.node_dropout
        works = rng.random((self.num_nodes, self.num_nodes)) >= self.link_failure
        if gossip:  # a link fails in both directions
            works = np.triu(works) | np.triu(works).T
        alive = self.links[t % self.period] & works & up & up[:, None]
        if gossip:
            return metropolis(alive)
        kept = np.where(alive | np.eye(self.num_nodes, dtype=bool), self.matrix(t), 0.0)
        return kept / kept.sum(0)

    def added_variance(self, *, gossip: bool = False, tracking: bool = False) -> float:
        """Return the excess variance of the worst node over the target, for small steps.

        The unit is the noise that every node adds at a step;
        :mod:`numpyro_fed.decentralized.added_variance` derives it. Where links fail, the excess is
        itself random with a heavy tail, since a node cut off for a while has a tiny weight. The
        result is then the median over nine random sequences of the mean over 100 steps, and no more
        than a guide.
        """
        seeds = range(_SEQUENCES if self.fails else 0)
        sequences = [self._sequence(seed, 2 * SEEN_STEPS, gossip) for seed in seeds]
        return excess_variance(self._period(gossip), sequences, gossip=gossip, tracking=tracking)

    def least_weight(self) -> tuple[float, Hashable]:
        """Return the least push-sum weight in the long run without failures, and its node.

        Weights sum to m. A node that gives away much and receives little has a small weight, and
        its draws are X / Y.
        """
        weight = stationary_weight(product(self._period()))
        least = np.full(self.num_nodes, np.inf)
        for matrix in self._period():
            weight = matrix @ weight
            least = np.minimum(least, weight)
        return float(least.min()), self.nodes[int(least.argmin())]


def shares(links: np.ndarray) -> np.ndarray:
    """Return the column-stochastic matrix ``(m, m)`` of equal shares of one graph.

    A node's shares go to itself and along its out-links.
    """
    whole = links | np.eye(len(links), dtype=bool)
    return whole / whole.sum(0)


def metropolis(links: np.ndarray) -> np.ndarray:
    """Return the matrix ``(m, m)`` of Metropolis weights of links that work both ways.

    It is symmetric and doubly stochastic.
    """
    degree = links.sum(1)
    matrix = links / (1.0 + np.maximum(degree[:, None], degree))
    return matrix + np.diag(1 - matrix.sum(1))


def _probability(what: str, value: float) -> float:
    if not isinstance(value, Real) or not 0 <= value < 1:
        raise ValueError(f"{what}: expected a probability in [0, 1), got {value!r}")
    return float(value)


def _either(first: float, second: float) -> float:
    """Return the probability that at least one of two independent failures happens."""
    return 1 - (1 - first) * (1 - second)


def shown(items: Iterable) -> str:
    """Return the first few items as text, for messages."""
    items = list(items)
    return ", ".join(map(repr, items[:6])) + (
        f" and {len(items) - 6} more" if len(items) > 6 else ""
    )
