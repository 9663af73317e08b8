r"""Steps per second of PushSumLangevin by number of nodes.

Beside them is push-sum Langevin dynamics written by hand in JAX.

    python tests/benchmarks/network_speed.py [--quick] [--nodes 4,16,64,256] [--turns 7]

Logistic regression with d = 20 coefficients and 500 rows a node, one network, all rows or
minibatches of 10. Node j sends to j + 1, j + 2 and j + 4 (modulo m); mixing by matrices or by
gathers; links fail one time in ten, or never. A step of the hand-written loop is
(numpyro_fed/decentralized/push_sum.py)

.. math::

    W = A X, \quad Y \leftarrow A Y, \quad Z = W / Y, \quad
    X \leftarrow W - \alpha \nabla U(Z) + \sqrt{2 \alpha}\, \xi

and nothing else: no sites, no diagnostics, no count of messages, no look for what is not finite.
Both forms are compiled whole, timed in turn in one process, and ratios taken within each turn; the
ratio is the hand-written form's time over the library's. While gradients dominate, microseconds for
each node and step do not depend on m.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed.decentralized.mixing import mixing

DIM, ROWS, ALPHA, FAILURE = 20, 500, 1e-4, 0.1
GOAL = 0.7
Run = Callable[[Array], Array]


def model(x, y=None):  # type: ignore[no-untyped-def]
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def data(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(nodes, ROWS, DIM)).astype(np.float32)
    return x, (x[..., 0] + rng.logistic(size=x.shape[:2]) > 0).astype(np.float32)


def graph_of(nodes: int, fails: bool) -> fed.graphs.TimeVaryingGraph:
    links = nx.DiGraph(
        [(j, (j + hop) % nodes) for j in range(nodes) for hop in (1, 2, 4) if hop % nodes]
    )
    ordered = nx.DiGraph()
    ordered.add_nodes_from(range(nodes))
    ordered.add_edges_from(links.edges)
    graph = fed.graphs.from_networkx(ordered)
    return graph.with_link_failures(FAILURE) if fails else graph


def library(nodes: int, batch: int | None, sparse: bool, fails: bool, steps: int) -> Run:
    """Return a run of MCMC, one program."""
    x, y = data(nodes)
    silos = fed.split(
        {"x": x.reshape(-1, DIM), "y": y.ravel()}, by=np.repeat(np.arange(nodes), ROWS)
    )
    kernel = fed.PushSumLangevin(model, graph_of(nodes, fails), ALPHA, batch)
    kernel.init(random.split(random.key(0), nodes), 0, model_args=(silos,))
    kernel._mixing = mixing(kernel.graph, both_ways=False, sparse=sparse)
    settings = {"num_chains": nodes, "chain_method": "vectorized", "progress_bar": False}

    @jax.jit
    def run(key: Array) -> Array:
        mcmc = MCMC(kernel, num_warmup=0, num_samples=steps, **settings)
        mcmc.run(key, silos)
        return mcmc.get_samples(group_by_chain=True)["w"]

    return run


def by_hand(nodes: int, batch: int | None, sparse: bool, fails: bool, steps: int) -> Run:
    """Return the same run by a scan."""
    x, y = map(jnp.asarray, data(nodes))
    graph = graph_of(nodes, fails)
    full = graph.matrix()
    senders = jnp.asarray(np.stack([np.flatnonzero(row) for row in graph.links[0]]))
    everyone = jnp.arange(nodes)[:, None]

    def mixer(key: Array) -> Callable[[Array], Array]:
        works = (
            random.uniform(key, senders.shape) >= FAILURE
            if fails
            else jnp.ones(senders.shape, bool)
        )
        degree = jnp.ones(nodes).at[senders].add(works)  # out-links that work, and itself
        weights, own = works / degree[senders], 1 / degree
        if sparse:
            return lambda v: own[:, None] * v + (weights[..., None] * v[senders]).sum(1)
        if not fails:
            return lambda v: jnp.asarray(full, v.dtype) @ v
        matrix = jnp.diag(own).at[everyone, senders].add(weights)
        return lambda v: matrix @ v

    def gradient(key: Array, w: Array) -> Array:
        if batch is None:
            rows, labels, scale = x, y, 1.0
        else:
            index = random.randint(key, (nodes, batch), 0, ROWS)
            rows, labels, scale = x[everyone, index], y[everyone, index], ROWS / batch
        left = labels - jax.nn.sigmoid(jnp.einsum("mnd,md->mn", rows, w))
        return scale * jnp.einsum("mnd,mn->md", rows, left) - w / nodes

    def step(state: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        key_links, key_batch, key_noise = random.split(key, 3)
        mix = mixer(key_links)
        mixed, weight = mix(state[0]), mix(state[1])
        position = mixed / weight
        noise = jnp.sqrt(2 * ALPHA) * random.normal(key_noise, position.shape)
        return (mixed + ALPHA * gradient(key_batch, position) + noise, weight), position

    @jax.jit
    def run(key: Array) -> Array:
        start, key = random.split(key)
        first = random.uniform(start, (nodes, DIM), minval=-2.0, maxval=2.0), jnp.ones((nodes, 1))
        return lax.scan(step, first, random.split(key, steps))[1].swapaxes(0, 1)

    return run


def seconds(run: Run, key: Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(key))
    return time.perf_counter() - start


def measure(
    nodes: int, batch: int | None, sparse: bool, fails: bool, steps: int, turns: int
) -> float:
    """Print a row; return the ratio."""
    forms = [form(nodes, batch, sparse, fails, steps) for form in (library, by_hand)]
    keys = random.split(random.key(1), turns + 1)
    compiling = [seconds(run, keys[0]) for run in forms]
    own, hand = np.array([[seconds(run, key) for run in forms] for key in keys[1:]]).T
    low, ratio, high = np.quantile(hand / own, [0.25, 0.5, 0.75])
    each = 1e6 * np.median(own) / steps
    print(
        f"{nodes:>5}  {'all' if batch is None else batch:>4}  {'sparse' if sparse else 'dense':<6} "
        f" {'yes' if fails else 'no':<5}"
        f"{1e6 / each:>10,.0f}{each / nodes:>11.2f}{1e6 * np.median(hand) / steps / nodes:>11.2f}"
        f"     {ratio:.2f} [{low:.2f}, {high:.2f}]{compiling[0]:>9.1f}{compiling[1]:>7.1f}",
        flush=True,
    )
    return float(ratio)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of push-sum by number of nodes.")
    parser.add_argument(
        "--quick", action="store_true", help="4 and 16 nodes, few steps: to see that it runs"
    )
    parser.add_argument("--nodes", default="4,16,64,256")
    parser.add_argument("--turns", type=int, default=7, help="how often each form is timed")
    args = parser.parse_args(arguments)
    sizes = [4, 16] if args.quick else [int(m) for m in args.nodes.split(",")]
    print(
        "nodes  rows  mixing  fails   steps/s  us/(node step): own, hand   hand/own [quartiles]   "
        "first call (s): own, hand"
    )
    ratios = []
    for batch, sparse, fails in itertools.product((None, 10), (False, True), (False, True)):
        for nodes in sizes:
            steps = (8_000 if batch is None else 80_000) // nodes // (10 if args.quick else 1)
            ratios.append(
                measure(nodes, batch, sparse, fails, steps, 3 if args.quick else args.turns)
            )
    short = sum(ratio < GOAL for ratio in ratios)
    print(
        f"goal {GOAL}: "
        f"{'reached' if not short else f'NOT reached in {short} of {len(ratios)} rows'}; least "
        f"{min(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
