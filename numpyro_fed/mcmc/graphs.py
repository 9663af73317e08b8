r"""Directed graphs that change with time and lose links: who can send to whom, step by step.

A :class:`TimeVaryingGraph` is a period of directed graphs, repeated, whose links and nodes may fail at random. At step t a node
with :math:`d_j(t)` links that work (itself included) keeps one share of what it holds and sends one along each of the others:

.. math:: A_{ij}(t) = 1 / d_j(t) \quad\text{where j sends to i at step t, or } i = j,

so that the columns of :math:`A(t)` sum to one and a node has to know only how many it sends to. Information reaches all nodes where the
sequence is *B-strongly connected*: the links of every window of B steps together make a strongly connected graph.

Reference: Kolesov, Kungurtsev (2020), Decentralized Langevin dynamics over a directed graph, section 2; Nedić, Olshevsky (2015),
Distributed optimization over time-varying directed graphs, IEEE TAC 60(3).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "TimeVaryingGraph",
    "almost_circular",
    "complete",
    "erdos_renyi",
    "from_matrices",
    "from_networkx",
    "geometric",
    "periodic",
    "ring",
    "star",
]

_SETTLED = 1000  # steps after which a periodic sequence has settled
_SIMULATED = 2000  # steps of a random sequence from which averages are taken


@dataclass(frozen=True, eq=False, repr=False)
class TimeVaryingGraph:
    """A periodic sequence of directed graphs, whose links and nodes may fail at random; made by the functions of this module.

    :ivar links: which links there are, shape ``(period, m, m)``; ``[t, i, j]``: at steps t, t + period, ... node j sends to node i.
    :ivar nodes: the nodes' labels; a graph whose labels are silo names is matched to silos by name, one labelled 0 ... m - 1 by place.
    :ivar weights: column-stochastic matrices ``(period, m, m)`` in place of equal shares, or ``None``.
    :ivar link_failure: probability that a link does not work at a step, each by itself.
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
        """m."""
        return len(self.nodes)

    @property
    def fails(self) -> bool:
        """Whether links or nodes fail at random."""
        return self.link_failure > 0 or self.node_dropout > 0

    @property
    def is_symmetric(self) -> bool:
        """Whether every link has its way back at the same step, as gossip needs it."""
        return bool((self.links == np.swapaxes(self.links, 1, 2)).all())

    def __repr__(self) -> str:
        fails = "".join(
            f", {name} {p:g}"
            for name, p in (("link_failure", self.link_failure), ("node_dropout", self.node_dropout))
            if p
        )
        counts = "/".join(str(int(n)) for n in self.links.sum((1, 2))[:6]) + ("/..." if self.period > 6 else "")
        return f"TimeVaryingGraph({self.num_nodes} nodes, period {self.period}, {counts} links{fails})"

    def with_link_failures(self, probability: float) -> "TimeVaryingGraph":
        """The same links, each of which fails at each step with this probability, independently.

        :raises ValueError: for a probability outside [0, 1).
        """
        return replace(self, link_failure=_probability("link failures", probability))

    def with_node_dropout(self, probability: float) -> "TimeVaryingGraph":
        """The same nodes, each of which is offline at each step with this probability: it keeps what it has, and goes on sampling.

        :raises ValueError: for a probability outside [0, 1).
        """
        return replace(self, node_dropout=_probability("node dropout", probability))

    def ordered(self, names: Sequence[str]) -> "TimeVaryingGraph":
        """The graph with its nodes in the order of silos of these names.

        :raises ValueError: when the numbers of nodes and silos differ, or labels are neither the silos' names nor numbers.
        """
        if self.num_nodes != len(names):
            raise ValueError(
                f"graph: expected one node for each of the {len(names)} silos, got {self.num_nodes} nodes, "
                f"{_shown(self.nodes)}"
            )
        if self.nodes == tuple(range(len(names))):
            return replace(self, nodes=tuple(names))
        if set(self.nodes) != set(names):
            unknown, missing = sorted(set(map(str, self.nodes)) - set(names)), sorted(set(names) - set(self.nodes))
            raise ValueError(
                f"graph: expected nodes labelled with the silos' names, or with 0 ... {len(names) - 1} in their order; "
                f"no silo is called {_shown(unknown)}, and silos {_shown(missing)} are no nodes"
            )
        place = [self.nodes.index(name) for name in names]
        weights = None if self.weights is None else self.weights[:, place][:, :, place]
        return replace(self, nodes=tuple(names), links=self.links[:, place][:, :, place], weights=weights)

    def matrix(self, t: int = 0, *, gossip: bool = False) -> np.ndarray:
        """The column-stochastic mixing matrix A(t) where nothing fails, ``(m, m)``; for gossip that of Metropolis weights."""
        if gossip:
            return metropolis(self.links[t % self.period])
        return shares(self.links[t % self.period]) if self.weights is None else self.weights[t % self.period]

    def connectivity(self) -> int:
        """The smallest B such that the links of steps kB ... (k + 1)B - 1 are strongly connected for every k >= 0.

        Of links that fail at random those count that may work: they do, infinitely often.

        :raises ValueError: when there is no such B, naming the nodes that cannot be reached, and from where.
        """
        self._check_union()
        for window in range(1, 2 * self.period + 1):
            starts = range(0, math.lcm(window, self.period), window)
            if all(self._strongly_connected(range(start, start + window)) for start in starts):
                return window
        return 2 * self.period  # such a window holds a whole period

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
                    f"graph: not strongly connected over its period of {self.period} step(s), so it is B-strongly connected for "
                    f"no B: what node {self.nodes[node]!r} sends never reaches "
                    f"{_shown([self.nodes[i] for i in sorted(lost)])}. Expected a path from every node to every other"
                )

    def contraction_rate(self) -> float:
        r"""The factor per step by which disagreement between nodes shrinks, in [0, 1).

        For a periodic sequence the modulus of the second eigenvalue of :math:`A(B) \cdots A(1)`, to the power 1/B; with
        random failures the growth rate of the second singular direction of the product, from 2,000 simulated steps.
        """
        m = self.num_nodes
        if self.fails:
            rng, vector, growth = np.random.default_rng(0), np.random.default_rng(1).normal(size=m), 0.0
            for t in range(_SIMULATED):
                vector -= vector.mean() * 1.0  # A is column-stochastic: sums of zero stay so
                vector = self.draw(rng, t) @ vector
                norm = np.linalg.norm(vector)
                if norm == 0:
                    return 0.0
                growth, vector = growth + math.log(norm), vector / norm
            return math.exp(growth / _SIMULATED)
        product = np.eye(m)
        for t in range(self.period):
            product = self.matrix(t) @ product
        return float(np.sort(np.abs(np.linalg.eigvals(product)))[-2] ** (1 / self.period)) if m > 1 else 0.0

    def draw(self, rng: np.random.Generator, t: int, *, gossip: bool = False) -> np.ndarray:
        """A random mixing matrix of step t."""
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

    def disagreement(self, *, gossip: bool = False) -> float:
        r"""Variance of the worst node's distance from the average, in units of the noise that every node adds at a step.

        Push-sum's nodes are at :math:`Z_i = \bar X` plus what is left of earlier noise: with
        :math:`C \leftarrow A C A^\top + (I - y 1^\top / m)(I - y 1^\top / m)^\top` the covariance of :math:`X - y \bar X`, this is the largest
        entry of :math:`A C A^\top` over :math:`y^2`, in the mean over steps. Gossip's nodes have their last noise too: the largest of C.
        """
        rng, m = np.random.default_rng(0), self.num_nodes
        weight, spread, seen = np.ones(m), np.zeros((m, m)), []
        for t in range(_SIMULATED if self.fails else max(_SETTLED, self.period)):
            matrix = self.draw(rng, t, gossip=gossip)
            weight, spread = matrix @ weight, matrix @ spread @ matrix.T
            fresh = np.eye(m) - np.outer(weight, np.ones(m)) / m
            seen.append(np.diag(spread + fresh @ fresh.T) if gossip else np.diag(spread) / weight**2)
            spread += fresh @ fresh.T
        return float(np.mean(seen[len(seen) // 2 :], axis=0).max())

    def least_weight(self) -> tuple[float, Hashable]:
        """The least push-sum weight that a node is left with in the long run, and that node.

        Weights sum to m. A node that gives away much and hears little has a small one, and its draws are X / Y.
        """
        product = np.eye(self.num_nodes)
        for t in range(self.period):
            product = self.matrix(t) @ product
        weight = np.linalg.matrix_power(product, 1 << 16).mean(1) * self.num_nodes
        least = np.full(self.num_nodes, np.inf)
        for t in range(self.period):
            weight = self.matrix(t) @ weight
            least = np.minimum(least, weight)
        return float(least.min()), self.nodes[int(least.argmin())]

    def plot(self) -> "Figure":
        """Draw the graphs of the period, one beside the other."""
        import matplotlib.pyplot as plt

        columns = min(self.period, 4)
        rows = -(-self.period // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 3 * rows), squeeze=False, layout="constrained")
        labels = dict(enumerate(map(str, self.nodes)))
        place = nx.circular_layout(range(self.num_nodes))
        size = 500 if max(map(len, labels.values())) <= 3 else 1200
        for t, axis in enumerate(axes.flat):
            axis.set_axis_off()
            if t >= self.period:
                continue
            graph = nx.from_numpy_array(self.links[t].T, create_using=nx.DiGraph)
            style = "dashed" if self.fails else "solid"
            nx.draw_networkx(
                graph, place, ax=axis, labels=labels, node_size=size, node_color="#cfe0f3", edgecolors="#335", font_size=8,
                style=style, connectionstyle="arc3,rad=0.12",
            )  # fmt: skip
            axis.margins(0.2)
            if self.period > 1:
                axis.set_title(f"step {t} of {self.period}")
        if self.fails:
            figure.suptitle(f"links fail with p = {self.link_failure:g}, nodes with p = {self.node_dropout:g}")
        return figure


def shares(links: np.ndarray) -> np.ndarray:
    """Equal shares of a node's out-links and itself: the column-stochastic matrix of one graph ``(m, m)``."""
    whole = links | np.eye(len(links), dtype=bool)
    return whole / whole.sum(0)


def metropolis(links: np.ndarray) -> np.ndarray:
    """Metropolis weights of links that work both ways: a symmetric, doubly stochastic matrix ``(m, m)``."""
    degree = links.sum(1)
    matrix = links / (1.0 + np.maximum(degree[:, None], degree))
    return matrix + np.diag(1 - matrix.sum(1))


def _probability(what: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"{what}: expected a probability in [0, 1), got {value!r}")
    return float(value)


def _shown(items: Any) -> str:
    items = list(items)
    return ", ".join(map(repr, items[:6])) + (f" and {len(items) - 6} more" if len(items) > 6 else "")


def _num_nodes(num_nodes: int) -> int:
    if isinstance(num_nodes, bool) or int(num_nodes) != num_nodes or num_nodes < 2:
        raise ValueError(f"num_nodes: expected an integer >= 2, got {num_nodes!r}")
    return int(num_nodes)


def from_networkx(graph: nx.Graph) -> TimeVaryingGraph:
    """One graph for all steps; an undirected one sends both ways. Weights of edges are not used, loops are implied."""
    if not isinstance(graph, nx.Graph):
        raise TypeError(f"expected a networkx graph, got {type(graph).__name__}")
    _num_nodes(graph.number_of_nodes())
    links = nx.to_numpy_array(graph, weight=None).T > 0
    np.fill_diagonal(links, False)
    return TimeVaryingGraph(links[None], tuple(graph.nodes))


def periodic(graphs: Sequence[nx.Graph | TimeVaryingGraph]) -> TimeVaryingGraph:
    """Graphs that follow one another, and begin anew after the last.

    :param graphs: networkx graphs over the same nodes (as many steps as there are graphs), or time-varying ones.
    :raises ValueError: when there are none, or their nodes differ.

    Example::

        >>> import networkx as nx
        >>> from numpyro_fed import graphs
        >>> day, night = nx.DiGraph([("oslo", "rome"), ("rome", "bern")]), nx.DiGraph([("bern", "oslo")])
        >>> night.add_nodes_from(["rome"])
        >>> graph = graphs.periodic([day, night])
        >>> graph.connectivity()
        2
        >>> round(graph.contraction_rate(), 3)
        0.794
    """
    parts = [g if isinstance(g, TimeVaryingGraph) else from_networkx(g) for g in graphs]
    if not parts:
        raise ValueError("graphs: expected at least one graph, got none")
    nodes = parts[0].nodes
    for number, part in enumerate(parts):
        if set(part.nodes) != set(nodes):
            raise ValueError(
                f"graphs: expected the same nodes at every step, {_shown(nodes)}, got {_shown(part.nodes)} in graph {number}; "
                "add nodes without links by add_nodes_from"
            )
    if len({(p.link_failure, p.node_dropout) for p in parts}) > 1:
        raise ValueError(
            "graphs: expected equal probabilities of failure at every step; give them to the periodic graph"
        )
    if any(p.weights is not None for p in parts):
        raise ValueError("graphs: matrices follow one another by from_matrices([first, second, ...])")
    places = [[p.nodes.index(node) for node in nodes] for p in parts]
    links = np.concatenate([p.links[:, i][:, :, i] for p, i in zip(parts, places, strict=True)])
    return replace(parts[0], links=links)


def from_matrices(matrices: Sequence[Any], nodes: Sequence[Hashable] | None = None) -> TimeVaryingGraph:
    """Mixing matrices A of one's own, one for each step of the period: ``A[i, j]`` is the share of node j that goes to i.

    :raises ValueError: for matrices that are not square, have negative entries, or columns that do not sum to one.
    """
    given = np.asarray(matrices, np.float64)
    given = given[None] if given.ndim == 2 else given
    if given.ndim != 3 or given.shape[1] != given.shape[2]:
        raise ValueError(f"matrices: expected square matrices of one size, got an array of shape {given.shape}")
    m = _num_nodes(given.shape[1])
    if not (given >= 0).all():
        raise ValueError(f"matrices: expected shares >= 0, got {given.min():g}")
    sums = given.sum(1)
    off = np.abs(sums - 1) > 1e-6
    if off.any():
        t, j = np.argwhere(off)[0]
        rows = " Its rows do: take the transpose" if np.allclose(given[t].sum(1), 1) else ""
        raise ValueError(
            f"matrices: expected columns that sum to one (what a node keeps and sends is all it has), got {sums[t, j]:.6g} in column "
            f"{j} of matrix {t}.{rows}"
        )
    links = (given > 0) & ~np.eye(m, dtype=bool)
    if nodes is not None and len(set(nodes)) != m:
        raise ValueError(f"nodes: expected {m} different labels, got {_shown(nodes)}")
    return TimeVaryingGraph(links, tuple(range(m)) if nodes is None else tuple(nodes), given / sums[:, None])


def ring(num_nodes: int) -> TimeVaryingGraph:
    """Each node sends to the next, the last to the first."""
    return from_networkx(nx.cycle_graph(_num_nodes(num_nodes), create_using=nx.DiGraph))


def star(num_nodes: int) -> TimeVaryingGraph:
    """Node 0 and the others send to each other; the others do not among themselves."""
    return from_networkx(nx.star_graph(_num_nodes(num_nodes) - 1))


def complete(num_nodes: int) -> TimeVaryingGraph:
    """Every node sends to every other."""
    return from_networkx(nx.complete_graph(_num_nodes(num_nodes)))


def almost_circular() -> TimeVaryingGraph:
    """The paper's six nodes (figure 2): at even steps the printed links 0 -> 1, 2 -> 3, 5 -> 0, at odd steps the others of the circle."""
    printed = nx.DiGraph([(0, 1), (2, 3), (5, 0)])
    others = nx.DiGraph([(1, 2), (3, 4), (4, 5)])
    ordered = []
    for part in (printed, others):
        graph = nx.DiGraph()
        graph.add_nodes_from(range(6))
        graph.add_edges_from(part.edges)
        ordered.append(graph)
    return periodic(ordered)


def erdos_renyi(num_nodes: int, probability: float) -> TimeVaryingGraph:
    """At every step each of the m (m - 1) links is there with this probability, anew and independently."""
    if not 0 < probability <= 1:
        raise ValueError(f"probability: expected a number in (0, 1], got {probability!r}")
    return complete(num_nodes).with_link_failures(1 - probability)


def geometric(num_nodes: int, radius: float, seed: int = 0) -> TimeVaryingGraph:
    """Nodes at random places of the unit square send to those within the radius."""
    return from_networkx(nx.random_geometric_graph(_num_nodes(num_nodes), radius, seed=seed))
