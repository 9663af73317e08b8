"""Graphs that change with time: matrices, connectivity, rates, and what is refused."""

import networkx as nx
import numpy as np
import pytest

from numpyro_fed import graphs

EVERY = {
    "ring": graphs.ring(5),
    "star": graphs.star(4),
    "complete": graphs.complete(3),
    "almost_circular": graphs.almost_circular(),
    "erdos_renyi": graphs.erdos_renyi(5, 0.4),
    "geometric": graphs.geometric(6, 0.8),
    "networkx": graphs.from_networkx(nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("a", "c")])),
    "failing": graphs.ring(4).with_link_failures(0.3).with_node_dropout(0.1),
}


@pytest.mark.parametrize("name", EVERY)
def test_columns_sum_to_one_whatever_fails(name):
    graph, rng = EVERY[name], np.random.default_rng(0)
    assert graph.connectivity() <= graph.period
    assert 0 <= graph.contraction_rate() < 1
    for t in range(20):
        matrix = graph.draw(rng, t)
        np.testing.assert_allclose(matrix.sum(0), 1, rtol=1e-12)
        assert (np.diag(matrix) > 0).all()
        assert not matrix[(graph.matrix(t) == 0)].any()
    assert repr(graph).startswith(f"TimeVaryingGraph({graph.num_nodes} nodes")


def test_the_papers_matrix():
    """Equation 2: columns 1, 3 and 6 are split in two."""
    expected = np.eye(6)
    for sender, receiver in ((0, 1), (2, 3), (5, 0)):
        expected[sender, sender] = expected[receiver, sender] = 0.5
    np.testing.assert_array_equal(graphs.almost_circular().matrix(0), expected)


def test_links_point_from_sender_to_receiver():
    graph = graphs.from_networkx(nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("a", "c")]))
    np.testing.assert_allclose(
        graph.matrix(), [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    )


def test_the_smallest_window():
    def part(*edges):
        graph = nx.DiGraph(edges)
        graph.add_nodes_from(range(4))
        return graph

    assert graphs.ring(4).connectivity() == 1
    assert graphs.almost_circular().connectivity() == 2
    three = graphs.periodic([part((0, 1), (1, 2)), part((2, 3)), part((3, 0))])
    assert three.connectivity() == 3
    # a window must hold for every k: steps 0-1 are connected, steps 2-0 are not
    odd = graphs.periodic([part((0, 1), (1, 2)), part((2, 3), (3, 0)), part((0, 1))])
    assert odd.connectivity() == 3


@pytest.mark.parametrize("name", ["ring", "star", "almost_circular", "networkx"])
def test_the_contraction_rate_is_that_of_the_product(name):
    graph = EVERY[name]
    weight, spread = np.ones(graph.num_nodes), np.random.default_rng(1).normal(size=graph.num_nodes)
    growth, least = [], np.inf
    for t in range(400):
        spread -= spread.mean()  # A keeps sums; rounding does not quite
        weight, spread = graph.matrix(t) @ weight, graph.matrix(t) @ spread
        growth.append(np.log(np.linalg.norm(spread)))
        spread /= np.linalg.norm(spread)
        least = min(least, weight.min()) if t >= 200 else least
    assert graph.contraction_rate() == pytest.approx(np.exp(np.mean(growth[160:])), rel=0.01)
    assert weight.sum() == pytest.approx(graph.num_nodes)
    assert graph.least_weight()[0] == pytest.approx(least, rel=1e-6)


def test_failures_slow_the_contraction():
    rates = [graphs.ring(5).with_link_failures(p).contraction_rate() for p in (0.0, 0.3, 0.8)]
    assert rates == sorted(rates)
    assert rates[2] > 1.05 * rates[0]


@pytest.mark.parametrize("m", [4, 32, 200])
def test_added_variance_of_a_ring_in_closed_form(m):
    assert graphs.ring(m).added_variance() == pytest.approx((m - 1) * (m - 2) / (3 * m), rel=1e-9)
    assert graphs.ring(m).added_variance(tracking=True) == pytest.approx(
        (m - 1) * (m - 2) / (3 * m), rel=1e-9
    )
    assert graphs.complete(m).added_variance() == pytest.approx(0, abs=1e-9)


def test_added_variance_where_links_fail_is_more():
    values = [graphs.complete(5).with_link_failures(p).added_variance() for p in (0.0, 0.2, 0.5)]
    assert values == sorted(values)
    assert values[1] > 0.01


def test_failures_add_up():
    graph = (
        graphs.erdos_renyi(5, 0.4)
        .with_link_failures(0.5)
        .with_node_dropout(0.1)
        .with_node_dropout(0.2)
    )
    assert graph.link_failure == pytest.approx(1 - 0.4 * 0.5)
    assert graph.node_dropout == pytest.approx(1 - 0.9 * 0.8)


def test_numbered_nodes_in_another_order_are_sorted():
    graph = graphs.from_networkx(nx.DiGraph([(0, 2), (2, 1), (1, 0)]))
    assert graph.nodes == (0, 2, 1)
    by_name = graph.ordered(("2", "0", "1"))  # node 0 is the silo called "0", in the second place
    assert by_name.links[0, 0, 1]
    ordered = graph.ordered(("a", "b", "c"))
    assert ordered.links[0, 2, 0]
    assert ordered.links[0, 1, 2]
    assert ordered.links[0, 0, 1]


def test_gossip_matrices_are_doubly_stochastic():
    rng = np.random.default_rng(0)
    for graph in (
        graphs.star(5),
        graphs.geometric(6, 0.8).with_link_failures(0.4).with_node_dropout(0.2),
    ):
        for t in range(10):
            matrix = graph.draw(rng, t, gossip=True)
            np.testing.assert_allclose(matrix, matrix.T)
            np.testing.assert_allclose(matrix.sum(0), 1)
            assert (matrix >= 0).all()


def test_nodes_are_matched_to_silos_by_name():
    graph = graphs.from_networkx(nx.DiGraph([("rome", "bern"), ("bern", "oslo"), ("oslo", "rome")]))
    ordered = graph.ordered(("bern", "oslo", "rome"))
    assert ordered.nodes == ("bern", "oslo", "rome")
    assert ordered.links[0, 1, 0]  # bern sends to oslo
    assert ordered.links[0, 0, 2]
    assert ordered.links.sum() == 3
    assert graphs.ring(3).ordered(("x", "y", "z")).nodes == ("x", "y", "z")
    weights = graphs.from_matrices([[0.5, 0.2], [0.5, 0.8]], nodes=["b", "a"]).ordered(("a", "b"))
    np.testing.assert_allclose(weights.matrix(), [[0.8, 0.5], [0.2, 0.5]])


REFUSED = {
    "unreachable": (
        lambda: graphs.from_networkx(
            nx.DiGraph([("a", "b"), ("b", "c"), ("c", "b")])
        ).connectivity(),
        r"what node 'b' sends never reaches 'a'",
    ),
    "no graph": (lambda: graphs.periodic([]), "at least one graph"),
    "other nodes": (
        lambda: graphs.periodic([nx.DiGraph([(0, 1)]), nx.DiGraph([(0, 2)])]),
        r"got 0, 2 in graph 1",
    ),
    "columns": (
        lambda: graphs.from_matrices([[[0.5, 0.5], [0.5, 0.6]]]),
        r"columns that sum to one .* got 1.1 in column 1 of matrix 0",
    ),
    "rows instead": (lambda: graphs.from_matrices([[0.5, 0.5], [0.2, 0.8]]), "take the transpose"),
    "nothing kept": (
        lambda: graphs.from_matrices([[0.0, 1.0], [1.0, 0.0]]),
        "0 on the diagonal for node 0 of matrix 0",
    ),
    "negative": (lambda: graphs.from_matrices([[1.5, 0.0], [-0.5, 1.0]]), "shares >= 0, got -0.5"),
    "not square": (lambda: graphs.from_matrices([[1.0, 0.0]]), "square matrices"),
    "one node": (lambda: graphs.ring(1), "integer >= 2, got 1"),
    "text for a number": (lambda: graphs.ring("4"), "integer >= 2, got '4'"),
    "text for a probability": (
        lambda: graphs.ring(4).with_node_dropout("a"),
        "probability in .0, 1., got 'a'",
    ),
    "one graph": (
        lambda: graphs.periodic(nx.DiGraph([(0, 1), (1, 0)])),
        "a sequence of graphs, got one",
    ),
    "radius": (lambda: graphs.geometric(4, -1.0), "radius: expected a number > 0, got -1.0"),
    "probability": (lambda: graphs.ring(3).with_link_failures(1.0), r"\[0, 1\), got 1.0"),
    "labels": (
        lambda: graphs.from_networkx(nx.DiGraph([("a", "b"), ("b", "a")])).ordered(("a", "c")),
        "no silo is called 'b'",
    ),
    "number of nodes": (
        lambda: graphs.ring(3).ordered(("a", "b")),
        "each of the 2 silos, got 3 nodes",
    ),
    "no networkx graph": (
        lambda: graphs.from_networkx([(0, 1)]),
        "expected a networkx graph, got list",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_graphs_are_refused_in_words(name):
    make, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()
