r"""Directed graphs for networks of nodes, whose links change with time and may fail.

A :class:`TimeVaryingGraph` repeats a period of directed graphs, whose links and nodes may fail at
random. At step t a node j has :math:`d_j(t)` links that work, itself included. It keeps one share
of its numbers and sends one along each of the other links:

.. math:: A_{ij}(t) = 1 / d_j(t) \quad\text{where j sends to i at step t, or } i = j .

The columns of :math:`A(t)` sum to one, and a node has to know only how many nodes it sends to.
Information reaches all nodes if the sequence is *B-strongly connected*: the links of every window
of B steps together make a strongly connected graph.

Reference: Kolesov, Kungurtsev (2020), Decentralized Langevin dynamics over a directed graph,
section 2; Nedić, Olshevsky (2015), Distributed optimization over time-varying directed graphs, IEEE
TAC 60(3).
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from numbers import Integral, Real

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.decentralized.time_varying import TimeVaryingGraph, shown

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


def _num_nodes(num_nodes: int) -> int:
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, Integral) or num_nodes < 2:
        raise ValueError(f"num_nodes: expected an integer >= 2, got {num_nodes!r}")
    return int(num_nodes)


def from_networkx(graph: nx.Graph) -> TimeVaryingGraph:
    """Return one graph for all steps; an undirected graph sends both ways.

    Weights of edges are not used, and loops are implied.
    """
    if not isinstance(graph, nx.Graph):
        raise TypeError(f"expected a networkx graph, got {type(graph).__name__}")
    _num_nodes(graph.number_of_nodes())
    links = nx.to_numpy_array(graph, weight=None).T > 0
    np.fill_diagonal(links, False)
    return TimeVaryingGraph(links[None], tuple(graph.nodes))


def periodic(graphs: Sequence[nx.Graph | TimeVaryingGraph]) -> TimeVaryingGraph:
    """Return graphs that follow one another and begin anew after the last.

    :param graphs: networkx graphs over the same nodes (as many steps as there are graphs), or
        time-varying ones.
    :raises ValueError: if there are none, or their nodes differ.

    Example::

        >>> import networkx as nx
        >>> from numpyro_fed import graphs
        >>> day = nx.DiGraph([("oslo", "rome"), ("rome", "bern")])
        >>> night = nx.DiGraph([("bern", "oslo")])
        >>> night.add_nodes_from(["rome"])
        >>> graph = graphs.periodic([day, night])
        >>> graph.connectivity()
        2
        >>> round(graph.contraction_rate(), 3)
        0.595
    """
    if isinstance(graphs, nx.Graph | TimeVaryingGraph):
        raise TypeError(
            "graphs: expected a sequence of graphs, got one; from_networkx(graph) is the same at "
            "every step"
        )
    parts = [g if isinstance(g, TimeVaryingGraph) else from_networkx(g) for g in graphs]
    if not parts:
        raise ValueError("graphs: expected at least one graph, got none")
    nodes = parts[0].nodes
    for number, part in enumerate(parts):
        if set(part.nodes) != set(nodes):
            raise ValueError(
                f"graphs: expected the same nodes at every step, {shown(nodes)}, got "
                f"{shown(part.nodes)} in graph {number}; add nodes without links by add_nodes_from"
            )
    if len({(p.link_failure, p.node_dropout) for p in parts}) > 1:
        raise ValueError(
            "graphs: expected equal probabilities of failure at every step; set them on the "
            "periodic graph"
        )
    if any(p.weights is not None for p in parts):
        raise ValueError(
            "graphs: expected graphs without matrices; matrices follow one another by "
            "from_matrices([first, second, ...])"
        )
    places = [[p.nodes.index(node) for node in nodes] for p in parts]
    links = np.concatenate([p.links[:, i][:, :, i] for p, i in zip(parts, places, strict=True)])
    return replace(parts[0], links=links)


def from_matrices(
    matrices: Sequence[ArrayLike], nodes: Sequence[Hashable] | None = None
) -> TimeVaryingGraph:
    """Return a graph with its own mixing matrices A, one for each step of the period.

    ``A[i, j]`` is the share of node j that goes to i.

    :raises ValueError: for matrices that are not square, or have negative entries or column sums
        other than one.
    """
    given = np.asarray(matrices, np.float64)
    given = given[None] if given.ndim == 2 else given
    if given.ndim != 3 or given.shape[1] != given.shape[2]:
        raise ValueError(
            f"matrices: expected square matrices of one size, got an array of shape {given.shape}"
        )
    m = _num_nodes(given.shape[1])
    if not (given >= 0).all():
        raise ValueError(f"matrices: expected shares >= 0, got {given.min():g}")
    sums = given.sum(1)
    off = np.abs(sums - 1) > 1e-6
    if off.any():
        t, j = np.argwhere(off)[0]
        rows = " Its rows do: take the transpose" if np.allclose(given[t].sum(1), 1) else ""
        raise ValueError(
            "matrices: expected columns that sum to one (what a node keeps and sends is all it "
            f"has), got {sums[t, j]:.6g} in column {j} of matrix {t}.{rows}"
        )
    kept = np.diagonal(given, axis1=1, axis2=2)
    if not (kept > 0).all():
        t, j = np.argwhere(kept <= 0)[0]
        raise ValueError(
            "matrices: expected every node to keep a share of its own, got 0 on the diagonal for "
            f"node {j} of matrix {t}"
        )
    links = (given > 0) & ~np.eye(m, dtype=bool)
    if nodes is not None and len(set(nodes)) != m:
        raise ValueError(f"nodes: expected {m} different labels, got {shown(nodes)}")
    return TimeVaryingGraph(
        links, tuple(range(m)) if nodes is None else tuple(nodes), given / sums[:, None]
    )


def ring(num_nodes: int) -> TimeVaryingGraph:
    """Return a ring: each node sends to the next, the last to the first."""
    return from_networkx(nx.cycle_graph(_num_nodes(num_nodes), create_using=nx.DiGraph))


def star(num_nodes: int) -> TimeVaryingGraph:
    """Return a star: node 0 and each other node send to each other."""
    return from_networkx(nx.star_graph(_num_nodes(num_nodes) - 1))


def complete(num_nodes: int) -> TimeVaryingGraph:
    """Return the complete graph: every node sends to every other."""
    return from_networkx(nx.complete_graph(_num_nodes(num_nodes)))


def almost_circular() -> TimeVaryingGraph:
    """Return the six nodes of Kolesov and Kungurtsev's figure 2.

    At even steps the links are those of the figure, 0 -> 1, 2 -> 3, 5 -> 0. At odd steps they are
    the others of the circle.
    """
    printed, others = nx.empty_graph(6, nx.DiGraph), nx.empty_graph(6, nx.DiGraph)
    printed.add_edges_from([(0, 1), (2, 3), (5, 0)])
    others.add_edges_from([(1, 2), (3, 4), (4, 5)])
    return periodic([printed, others])


def erdos_renyi(num_nodes: int, probability: float) -> TimeVaryingGraph:
    """Return a graph whose links are drawn anew and independently at every step.

    Each of the m (m - 1) links is there with this probability.
    """
    if not isinstance(probability, Real) or not 0 < probability <= 1:
        raise ValueError(f"probability: expected a number in (0, 1], got {probability!r}")
    return complete(num_nodes).with_link_failures(1 - probability)


def geometric(num_nodes: int, radius: float, seed: int = 0) -> TimeVaryingGraph:
    """Return a graph of nodes at random places of the unit square.

    Nodes send to the nodes within the radius.
    """
    if not isinstance(radius, Real) or not radius > 0:
        raise ValueError(f"radius: expected a number > 0, got {radius!r}")
    return from_networkx(nx.random_geometric_graph(_num_nodes(num_nodes), radius, seed=seed))
