"""Bayesian linear regression on four nodes: push-sum Langevin's distance from the exact posterior.

Four nodes have 200 rows each, y = X w + delta, with standard normal noise and prior, and two
weights. The posterior is Gaussian and known. The law of all that the nodes hold at step t, given
the matrices A(t), is known too. The algorithm is linear, so that means and covariances follow a
recursion (:func:`exact_law`). With all rows the law is Gaussian. With minibatches the noise of
gradients depends on the position. The recursion then has the first two moments only, which bound
the distance from below (Gelbrich 1990). The kernel itself runs beside it, as many independent
networks at once.

W2 is the Wasserstein distance of two Gaussians (:func:`wasserstein`; Bures),

    W2^2 = |m1 - m2|^2 + tr(S1 + S2 - 2 (S2^1/2 S1 S2^1/2)^1/2).

The paper prints |m1 - m2| + |S1^1/2 - S2^1/2|. This is a sum where the root of a sum of squares
should be, and its second term is right only where S1 and S2 commute. It is not W2 in general.

**Expected rate.** The average moves by Langevin steps of alpha / m on U. With alpha(t) = alpha0 /
(1 + t) it forgets its start like t^-c (its covariance like t^-2c). Here c = alpha0 mu / m, and mu
is the least eigenvalue of U's Hessian. Steps and disagreement put the covariance off by O(alpha) =
O(1 / t), and the mean where silos differ. So W2 falls like t^-min(c, 1). The paper's theorem 5.7
promises t^-(1/2 - gamma) where c > 1/2 - gamma (in its notation without the 1/m). Its other
condition, alpha0 <= 1 / (2 max(mu, L)), asks for c <= 1/2. Here c = 2: until the 1 / t takes over,
W2 falls faster.

**Links that fail at random.** Each drawn sequence of matrices has its own law, and the median over
sequences is shown. The theorem does not cover them, because no window of B steps connects the nodes
for certain. A node that hears nothing for k steps while it sends has a push-sum weight of 2^-k, and
steps 2^k times as long. Such outages become rare faster than steps become small, so almost every
sequence converges. The rarest sequences, however, rule a mean of squares over sequences. Hence
steps start small (offset b = 50), which minibatches of one row need too.

References: Kolesov, Kungurtsev (2020), Decentralized Langevin dynamics over a directed graph,
section 6.2, figure 3, theorem 5.7; Gelbrich (1990), Math. Nachr. 147, 185-203.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC

import numpyro_fed as fed

NUM_NODES, NUM_ROWS, DIM = 4, 200, 2
STEEPNESS, OFFSET = 2.0, 50.0  # c, and b of the steps a / (b + t)
Decay = tuple[float, float, float]


def data(seed: int = 0, num_nodes: int = NUM_NODES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features ``(200 m, 2)``, targets, and the node of each row."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=DIM)
    x = rng.normal(size=(num_nodes * NUM_ROWS, DIM))
    y = x @ weights + rng.normal(size=len(x))
    return x.astype(np.float32), y.astype(np.float32), np.repeat(np.arange(num_nodes), NUM_ROWS)


def silos() -> fed.Silos:
    x, y, node = data()
    return fed.split({"x": x, "y": y}, by=node)


def model(x, y=None):  # type: ignore[no-untyped-def]
    w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def graphs() -> dict[str, fed.graphs.TimeVaryingGraph]:
    """Return a ring, its two halves by turns, and a ring with links that fail.

    Neither half connects the nodes.
    """
    ring = fed.graphs.ring(NUM_NODES)
    halves = [nx.DiGraph([(0, 1), (2, 3)]), nx.DiGraph([(1, 2), (3, 0)])]
    return {
        "fixed": ring,
        "periodic": fed.graphs.periodic(halves),
        "30 % of links fail": ring.with_link_failures(0.3),
    }


class Potentials(NamedTuple):
    """Potentials U_i(w) = w' H_i w / 2 - b_i' w of every node, and its rows for minibatch noise."""

    hessian: np.ndarray
    slope: np.ndarray
    x: np.ndarray
    y: np.ndarray

    @property
    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the posterior."""
        covariance = np.linalg.inv(self.hessian.sum(0))
        return covariance @ self.slope.sum(0), covariance

    @property
    def scale(self) -> float:
        """Step constant alpha0 of c = 1: m / mu."""
        return float(len(self.hessian) / np.linalg.eigvalsh(self.hessian.sum(0))[0])

    def noise(self, node: int, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """Return the covariance of a node's gradient from one row, at positions of this law."""
        x, residual = self.x[node], mean @ self.x[node].T - self.y[node]
        squares = residual**2 + np.einsum("ni,...ij,nj->...n", x, covariance, x)
        gradient = (
            self.hessian[node] @ mean[..., None]
            - self.slope[node][:, None]
            - mean[..., None] / len(self.hessian)
        )
        spread = self.hessian[node] - np.eye(DIM) / len(self.hessian)
        second = gradient @ np.swapaxes(gradient, -1, -2) + spread @ covariance @ spread
        return NUM_ROWS * np.einsum("...n,ni,nj->...ij", squares, x, x) - second


def potentials(num_nodes: int = NUM_NODES) -> Potentials:
    each = data(num_nodes=num_nodes)
    x, y, _ = (v.astype(np.float64).reshape(num_nodes, NUM_ROWS, -1) for v in each)
    hessian = np.swapaxes(x, 1, 2) @ x + np.eye(DIM) / num_nodes
    return Potentials(hessian, (np.swapaxes(x, 1, 2) @ y)[..., 0], x, y[..., 0])


class Law(NamedTuple):
    """Law of the draws of m nodes and, last, of their average, at T steps.

    It is the law given each of S sequences of matrices.

    :ivar mean: ``(T, S, m + 1, d)``.
    :ivar covariance: ``(T, S, m + 1, d, d)``.
    :ivar consensus: mean squared distance of each node from the average ``(T, S, m)``.
    """

    mean: np.ndarray
    covariance: np.ndarray
    consensus: np.ndarray


def exact_law(
    graph: fed.graphs.TimeVaryingGraph,
    decay: Decay,
    num_steps: int,
    minibatch: bool = False,
    num_sequences: int = 1,
) -> Law:
    """Return the law of the first, second, ... draw of chains that start from the prior.

    :param decay: a, b and gamma of the step sizes.
    :param minibatch: take gradients from one row in place of all.
    """
    m, d, s = graph.num_nodes, DIM, num_sequences
    u = potentials(m)
    rngs = [np.random.default_rng(k) for k in range(s)]
    weight, mean, eye = np.ones((s, m, 1)), np.zeros((s, m * d, 1)), np.eye(m * d)
    covariance = np.broadcast_to(eye, (s, m * d, m * d))
    hessian = np.zeros((m * d, m * d))
    for i in range(m):
        hessian[i * d : i * d + d, i * d : i * d + d] = u.hessian[i]
    found = []
    for t in range(num_steps):
        alpha = decay[0] / (decay[1] + t) ** decay[2]
        shares = np.stack([graph.draw(rng, t) for rng in rngs])
        a = np.einsum("sij,kl->sikjl", shares, np.eye(d)).reshape(s, m * d, m * d)
        weight = shares @ weight
        divide = np.repeat(1 / weight[..., 0], d, -1)
        mean, covariance = a @ mean, a @ covariance @ np.swapaxes(a, 1, 2)
        found.append(_positions(mean, covariance, divide))
        noise = 2 * alpha * np.tile(eye, (s, 1, 1))
        if minibatch:
            z, spread = mean[..., 0] * divide, covariance * divide[:, None] * divide[..., None]
            for i in range(m):
                at = slice(i * d, i * d + d)
                noise[:, at, at] += alpha**2 * u.noise(i, z[:, at], spread[:, at, at])
        step = eye - alpha * hessian * divide[:, None]
        mean = step @ mean + alpha * u.slope.reshape(-1, 1)
        covariance = step @ covariance @ np.swapaxes(step, 1, 2) + noise
    return Law(*(np.stack(part) for part in zip(*found, strict=True)))


def _positions(
    mean: np.ndarray, covariance: np.ndarray, divide: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the law of each node's X / Y and of the average, and E |Z_i - average|^2.

    They follow from the law of what nodes mix.
    """
    s, m, d = len(mean), divide.shape[1] // DIM, DIM
    average = np.tile(np.eye(d) / m, (1, m))
    each = (np.eye(m * d) * divide[..., None]).reshape(s, m, d, m * d)
    maps = np.concatenate([each, np.broadcast_to(average, (s, 1, d, m * d))], 1)
    apart = each - average
    spread, off = (k @ covariance[:, None] @ np.swapaxes(k, -1, -2) for k in (maps, apart))
    squares = ((apart @ mean[:, None]) ** 2).sum((-1, -2))
    return (maps @ mean[:, None])[..., 0], spread, squares + np.trace(off, axis1=-2, axis2=-1)


def root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))[..., None, :]) @ np.swapaxes(vectors, -1, -2)


def wasserstein(
    mean: np.ndarray, covariance: np.ndarray, posterior: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Return W2 between Gaussians of these means and covariances and the posterior."""
    half = root(posterior[1])
    cross = root(half @ covariance @ half)
    bures = np.trace(covariance + posterior[1] - 2 * cross, axis1=-2, axis2=-1)
    return np.sqrt(np.maximum(((mean - posterior[0]) ** 2).sum(-1) + bures, 0))


def distance(law: Law) -> np.ndarray:
    """Return W2 of every node and the average, ``(T, m + 1)``.

    It is the median over sequences of W2 given the sequence.
    """
    posterior = potentials(law.mean.shape[2] - 1).posterior
    return np.median(wasserstein(law.mean, law.covariance, posterior), 1)


def slope(values: np.ndarray) -> np.ndarray:
    """Return slopes of log values against log t over the last decade.

    The values of steps 1, 2, ... are along the first axis.
    """
    start = len(values) // 10
    log_t = np.log(np.arange(start, len(values)) + 1)
    return np.polyfit(log_t, np.log(values[start:]), 1)[0]


class Run(NamedTuple):
    """Draws and consensus errors of R networks.

    Draws are those of the nodes and, last, their average ``(R, m + 1, T, d)``; consensus errors are
    ``(R, m, T)``.
    """

    draws: np.ndarray
    consensus: np.ndarray


def simulate(
    graph: fed.graphs.TimeVaryingGraph,
    decay: Decay,
    num_steps: int,
    num_networks: int,
    minibatch: bool = False,
) -> Run:
    """Run networks of the kernel, from starts drawn from the prior."""
    kernel = fed.PushSumLangevin(
        model, graph, fed.polynomial_decay(*decay), 1 if minibatch else None
    )
    settings = {
        "num_chains": num_networks * NUM_NODES,
        "chain_method": "vectorized",
        "progress_bar": False,
    }
    mcmc = MCMC(kernel, num_warmup=0, num_samples=num_steps, **settings)
    start = {"w": jax.random.normal(jax.random.key(1), (num_networks * NUM_NODES, DIM))}
    mcmc.run(
        jax.random.key(0),
        silos(),
        init_params=start,
        extra_fields=("consensus_error", "push_sum_weight"),
    )
    fields = {
        "w": mcmc.get_samples(group_by_chain=True)["w"],
        **mcmc.get_extra_fields(group_by_chain=True),
    }
    w, error, weight = (
        np.asarray(fields[name], np.float64).reshape(
            num_networks, NUM_NODES, *fields[name].shape[1:]
        )
        for name in ("w", "consensus_error", "push_sum_weight")
    )
    average = (weight[..., None] * w).mean(1, keepdims=True)
    return Run(np.concatenate([w, average], 1), error)


def measured(draws: np.ndarray) -> np.ndarray:
    """Return W2 of every node and the average, from draws over networks, ``(steps, m + 1)``.

    It is about :func:`floor` for the posterior itself.
    """
    mean = draws.mean(0)
    apart = draws - mean
    covariance = np.einsum("rntd,rnte->tnde", apart, apart) / (len(draws) - 1)
    return wasserstein(np.swapaxes(mean, 0, 1), covariance, potentials().posterior)


def floor(num_networks: int) -> float:
    """Return the value of :func:`measured` for R draws from the posterior itself.

    It is sd sqrt((d + d (d + 1) / 4) / R) for a round posterior.
    """
    variance = np.trace(potentials().posterior[1]) / DIM
    return float(np.sqrt(variance * (DIM + DIM * (DIM + 1) / 4) / num_networks))


def table(laws: dict[str, Law], runs: dict[str, Run]) -> pd.DataFrame:
    """Return W2 of the worst node at t = 10, 100, ..., exact and measured, by graph.

    Slopes of the worst node and of the average follow.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, law in laws.items():
        exact = distance(law)
        parts = {name: exact} | (
            {f"{name}, measured": measured(runs[name].draws)} if name in runs else {}
        )
        for row, w2 in parts.items():
            rows[row] = {
                f"t = {10**k:,}": w2[10**k - 1, :-1].max() for k in range(1, 7) if 10**k <= len(w2)
            }
        slopes, consensus = slope(exact), slope(np.median(law.consensus, 1))
        rows[name] |= {
            "slope, nodes": slopes[:-1].max(),
            "average": slopes[-1],
            "consensus": consensus.max(),
        }
    return pd.DataFrame(rows).T


def plot(law: Law, run: Run, title: str, place: Path) -> None:
    """Draw figure 3: W2 and consensus error of every node, exact and of the kernel's networks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    exact, consensus = distance(law), np.median(law.consensus, 1)
    found, networks, num_networks = measured(run.draws), run.consensus.mean(0).T, len(run.draws)
    # every second step, as push-sum weights change from one step to the next
    t, few = (
        np.unique(2 * np.geomspace(1, n // 2, k).astype(int))
        for n, k in ((len(exact), 80), (len(found), 20))
    )
    for i in range(NUM_NODES):
        color = f"C{i}"
        left.loglog(t, exact[t - 1, i], color=color, lw=1, label=f"node {i}")
        left.loglog(few, found[few - 1, i], "o", ms=4, mfc="none", color=color)
        right.loglog(t, consensus[t - 1, i], color=color, lw=1, label=f"node {i}")
        right.loglog(few, networks[few - 1, i], "o", ms=4, mfc="none", color=color)
    left.loglog(t, exact[t - 1, -1], "k--", lw=1, label="average")
    left.axhline(
        floor(num_networks), color="gray", ls=":", label=f"{num_networks} exact draws would show"
    )
    late = t >= 200
    left.loglog(
        t[late], 2 * exact[199, 0] * (t[late] / 200.0) ** -0.5, color="gray", lw=1, label="t^(-1/2)"
    )
    right.loglog(
        t[late], 3 * consensus[199, 0] * 200.0 / t[late], color="gray", lw=1, label="1 / t"
    )
    left.set(xlabel="t", title="W2 to the posterior (circles: networks of the kernel)")
    right.set(xlabel="t", title="E |node - average|²")
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.suptitle(title)
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, pd.DataFrame]:
    """Print tables by graph for all rows and minibatches, draw the figure, return the tables."""
    parser = argparse.ArgumentParser(
        description="Decentralized linear regression: W2 to the posterior over steps."
    )
    parser.add_argument("--quick", action="store_true", help="few steps and networks")
    parser.add_argument(
        "--figure", type=Path, default=Path("figures/decentralized_linear_regression.png")
    )
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()
    num_steps, run_steps, num_networks, num_sequences = (
        (1000, 300, 100, 5) if args.quick else (10_000, 1000, 500, 20)
    )
    print(
        f"W2 of the worst node; measured from {num_networks} networks it is at least about "
        f"{floor(num_networks):.4f}"
    )

    decay, tables = (STEEPNESS * potentials().scale, OFFSET, 1.0), {}
    for variant, minibatch in (("all rows", False), ("minibatches of 1", True)):
        laws = {
            name: exact_law(graph, decay, num_steps, minibatch, num_sequences if graph.fails else 1)
            for name, graph in graphs().items()
        }
        runs = {
            name: simulate(graph, decay, run_steps, num_networks, minibatch)
            for name, graph in graphs().items()
            if name == "periodic" or not args.quick
        }
        tables[variant] = table(laws, runs)
        print(f"\n{variant}; slopes over the last decade of t, the paper's rate is -1/2")
        print(tables[variant].map("{:.3g}".format).replace("nan", "").to_string())
    plot(
        laws["periodic"],
        runs["periodic"],
        "Links that change at every step, minibatches of one row",
        args.figure,
    )
    print(f"figure written to {args.figure}")
    return tables


if __name__ == "__main__":
    main()
