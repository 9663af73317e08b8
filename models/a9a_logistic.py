"""Logistic regression on a9a over a directed graph of four nodes.

The runs measure the ROC-AUC within one epoch, and the whole posterior. The data a9a hold 32,561
people with 123 binary features, and whether they earn above 50,000 dollars. Four fifths of the
rows, dealt at random in equal shares, belong to the nodes. AUC is taken on the others.

**The paper's run** (:func:`epoch`): prior Laplace(0, 1), alpha(t) = 0.008 / (12 + t)^0.45, 1,632
steps with minibatches of 4 rows per node, which is an epoch. The paper does not say which links
there are. Here the nodes send around a directed circle, in one order at even steps and in another
at odd ones. Where links of such a circle fail, a node that hears nothing for a while has a small
push-sum weight, and the quotient by it shows as spikes. The exponent 0.45 is below 1/2, so the
squares of the steps have an infinite sum, and the library warns. With gradients of 4 rows in 6,512
the draws of one epoch are far more dispersed than the posterior.

**Which AUC.** A node's *current position* is one draw, and the paper shows a curve of it. It does
not tend to the AUC of the posterior mean w-bar. A draw w-bar + e ranks people by x'w-bar + x'e, and
the second part is noise to the ranking. An average of draws has less of it, and so does the average
of nodes as far as their noise differs. Here the *running mean* takes the second half of the draws
so far. The AUC of the posterior mean and that of the posterior-averaged prediction E[sigmoid(x'w)]
are nearly the same. The sigmoid changes the order of two people only where their spread of x'w
differs.

**The reference** is NUTS on all training rows (:func:`reference`). Its mass matrix is the
covariance of a Laplace approximation under the normal prior of the same variance, so that warm-up
has only the step size to find.

**The whole posterior** (:func:`agreement`): 2,000 of the rows, an intercept and 123 coefficients
with prior Normal(0, 1); full gradients in the coordinates of the surrogate posterior, at a step
size from warm-up. Every node of 16 networks is compared with pooled NUTS.

Reference: Kolesov, Kungurtsev (2020), Decentralized Langevin dynamics over a directed graph,
section 6.4, figure 5.
"""

import argparse
import gzip
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from _data import path
from numpyro.infer import MCMC, NUTS, init_to_value

import numpyro_fed as fed

NODES, NUM_FEATURES, BATCH_SIZE = 4, 123, 4
ALPHA = (0.008, 12.0, 0.45)
PAPER, PAPER_STEPS = 0.8476, 1632  # AUC of the nodes' average after PAPER_STEPS
GRAPH = fed.graphs.periodic(
    [nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0)]), nx.DiGraph([(0, 2), (2, 1), (1, 3), (3, 0)])]
)
Rows = tuple[np.ndarray, np.ndarray]


class Curves(NamedTuple):
    """AUCs on held-out rows after each of ``steps``.

    The last of five columns is the average of nodes.
    """

    steps: np.ndarray
    current: np.ndarray
    running: np.ndarray


class Pooled(NamedTuple):
    """AUCs of the pooled posterior.

    They are those of its mean, of the averaged prediction, and of single draws (mean, sd).
    """

    mean: float
    prediction: float
    draw: tuple[float, float]


class Result(NamedTuple):
    """Result of :func:`main`.

    It holds the curves, the pooled reference, and a comparison with NUTS for each node.
    """

    curves: Curves
    pooled: Pooled
    nodes: dict[str, fed.Comparison]


def read_libsvm(lines: Iterable[str], num_features: int) -> Rows:
    """Return dense features and labels 0/1 of LIBSVM text.

    A line is ``label index:value ...``, indices from 1.
    """
    label, row, column, value = [], [], [], []
    for number, line in enumerate(line for line in lines if line.strip()):
        first, *pairs = line.split()
        label.append(float(first) > 0)
        for pair in pairs:
            index, _, x = pair.partition(":")
            row.append(number)
            column.append(int(index) - 1)
            value.append(float(x))
    features = np.zeros((len(label), num_features), np.float32)
    features[row, column] = value
    return features, np.array(label, np.float32)


def data(num_rows: int | None = None, seed: int = 0) -> tuple[Rows, Rows]:
    """Return rows to train on and rows held out.

    They are four fifths (a multiple of the nodes) and a fifth of a shuffle.
    """
    place = path(
        "a9a",
        "a9a.gz",
        "LIBSVM's page of binary data sets (a9a, compressed by gzip)",
        "32,561 lines '-1 3:1 11:1 ...' of 123 features, 7,841 of them +1",
    )
    with gzip.open(place, "rt") as lines:
        x, y = read_libsvm(lines, NUM_FEATURES)
    order = np.random.default_rng(seed).permutation(len(y))[:num_rows]
    cut = len(order) * 4 // 5 // NODES * NODES
    train, test = order[:cut], order[cut:]
    return (x[train], y[train]), (x[test], y[test])


def silos(train: Rows) -> fed.Silos:
    """Return equal shares; the rows are shuffled already."""
    x, y = train
    return fed.split({"x": x, "y": y}, by=np.repeat(np.arange(NODES), len(y) // NODES))


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Return the probability that a positive row scores above a negative one (Mann-Whitney's U).

    Ties count by half.
    """
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # mean rank of equal scores, from 1
    positive = label > 0
    n = int(positive.sum())
    u = rank[place[positive]].sum() - n * (n + 1) / 2
    return float(u / (n * (len(label) - n)))


def model(x, y=None):  # type: ignore[no-untyped-def]
    w = numpyro.sample("w", dist.Laplace(0, 1).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("people", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def smooth_model(x, y=None):  # type: ignore[no-untyped-def]
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("people", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def epoch(train: Rows, test: Rows, num_steps: int) -> Curves:
    """Run one network as the paper does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step_size falls like")  # the paper chose this exponent
        kernel = fed.PushSumLangevin(model, GRAPH, fed.polynomial_decay(*ALPHA), BATCH_SIZE)
    mcmc = MCMC(
        kernel, num_warmup=0, num_samples=num_steps, num_chains=NODES, chain_method="vectorized"
    )
    mcmc.run(jax.random.key(0), silos(train))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    draws = np.concatenate([draws, draws.mean(0, keepdims=True)])
    total = np.concatenate([np.zeros_like(draws[:, :1]), draws.cumsum(1)], axis=1)
    steps = np.unique(np.append(np.arange(1, num_steps, max(1, num_steps // 200)), num_steps))
    current = [[auc(test[0] @ w, test[1]) for w in draws[:, t - 1]] for t in steps]
    means = [(total[:, t] - total[:, t // 2]) / (t - t // 2) for t in steps]
    return Curves(
        steps,
        np.array(current),
        np.array([[auc(test[0] @ w, test[1]) for w in mean] for mean in means]),
    )


def laplace(x: np.ndarray, y: np.ndarray, variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Find mode and covariance under the prior N(0, variance I), by Newton's method in float64."""
    x, w, precision = x.astype(np.float64), np.zeros(x.shape[1]), np.eye(x.shape[1]) / variance
    for _ in range(25):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + precision
        w = w + np.linalg.solve(hessian, x.T @ (y - p) - precision @ w)
    return w, np.linalg.inv(hessian)


def reference(
    model: Callable, rows: Rows, variance: float, num_warmup: int, num_samples: int, num_chains: int
) -> np.ndarray:
    """Run pooled NUTS with the mass matrix of :func:`laplace`; draws are ``(chains, draws, d)``."""
    mode, covariance = laplace(*rows, variance)
    kernel = NUTS(
        model,
        dense_mass=True,
        inverse_mass_matrix=jnp.asarray(covariance),
        adapt_mass_matrix=False,
        init_strategy=init_to_value(values={"w": jnp.asarray(mode)}),
    )
    settings = {"num_chains": num_chains, "chain_method": "vectorized"}
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **settings)
    mcmc.run(jax.random.key(1), *rows)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["w"])


def pooled(train: Rows, test: Rows, num_warmup: int, num_samples: int) -> Pooled:
    """Return AUCs of the posterior of all training rows."""
    # Laplace(0, 1) has variance 2
    draws = reference(model, train, 2.0, num_warmup, num_samples, 1)[0].astype(np.float64)
    logits = test[0] @ draws.T
    prediction = (1 / (1 + np.exp(-logits))).mean(1)
    each = [auc(one, test[1]) for one in logits.T[:: max(1, num_samples // 100)]]
    return Pooled(
        auc(logits.mean(1), test[1]),
        auc(prediction, test[1]),
        (float(np.mean(each)), float(np.std(each))),
    )


def agreement(
    train: Rows, networks: int, steps: tuple[int, int], thinning: int, nuts_draws: tuple[int, int]
) -> dict[str, fed.Comparison]:
    """Compare every node of the smooth model with pooled NUTS.

    ``steps`` and ``nuts_draws`` are pairs: those of warm-up, and those after it.
    """
    train = np.column_stack([np.ones_like(train[1]), train[0]]), train[1]
    rows = silos(train)
    kernel = fed.PushSumLangevin(smooth_model, fed.graphs.ring(NODES), fed.Step("adaptive"))
    settings = {"num_chains": networks * NODES, "chain_method": "vectorized"}
    mcmc = MCMC(kernel, num_warmup=steps[0], num_samples=steps[1], thinning=thinning, **settings)
    mcmc.run(jax.random.key(2), rows)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    nuts = {"w": reference(smooth_model, train, 1.0, *nuts_draws, 4)}
    return {
        name: fed.compare({"w": draws[i::NODES]}, nuts, mean_tolerance=0.15)
        for i, name in enumerate(rows.names)
    }


def plot(found: Curves, whole: Pooled, place: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, title, values in zip(
        axes, ("current position", "mean of the second half so far"), found[1:], strict=True
    ):
        for node in range(NODES):
            axis.plot(found.steps, values[:, node], linewidth=1, label=f"node {node}")
        axis.plot(found.steps, values[:, -1], color="black", linewidth=1, label="average of nodes")
        axis.axhline(PAPER, color="gray", linestyle="dashed", label=f"the paper's average, {PAPER}")
        axis.axhline(
            whole.mean,
            color="gray",
            linestyle="dotted",
            label=f"pooled posterior mean, {whole.mean:.4f}",
        )
        axis.set(title=title, xlabel="steps", ylim=(0.8, 0.91))
    axes[0].set_ylabel("ROC-AUC on held-out rows")
    axes[1].legend(loc="lower right")
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> Result:
    """Print both parts, and draw the figure."""
    parser = argparse.ArgumentParser(description="a9a over a directed graph of four nodes.")
    parser.add_argument("--quick", action="store_true", help="5,000 rows, few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures/a9a_logistic.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    train, test = data(5_000 if args.quick else None)
    curves = epoch(
        train, test, len(train[1]) // (NODES * BATCH_SIZE) if args.quick else PAPER_STEPS
    )
    whole = pooled(train, test, *((50, 100) if args.quick else (100, 300)))
    print(
        f"ROC-AUC on {len(test[1]):,} rows after {curves.steps[-1]:,} steps; the paper's average "
        f"of nodes: {PAPER}"
    )
    print("                       " + "".join(f"node {k}  " for k in range(NODES)) + "average")
    for name, values in (
        ("current position", curves.current[-1]),
        ("running mean", curves.running[-1]),
    ):
        print(f"{name:<22}" + "".join(f"{value:8.4f}" for value in values))
    print(
        f"pooled NUTS: posterior mean {whole.mean:.4f}, averaged prediction "
        f"{whole.prediction:.4f}, "
        f"single draws {whole.draw[0]:.4f} ± {whole.draw[1]:.4f}"
    )
    plot(curves, whole, args.figure)
    print(f"figure written to {args.figure}")

    few = (train[0][:400], train[1][:400]) if args.quick else (train[0][:2_000], train[1][:2_000])
    sizes = (
        (8, (300, 1_500), 15, (50, 100)) if args.quick else (16, (1_000, 60_000), 50, (150, 1_500))
    )
    nodes = agreement(few, *sizes)
    print(f"{len(few[1]):,} rows, 124 coefficients, each node's draws beside pooled NUTS")
    for name, comparison in nodes.items():
        table = comparison.table
        print(
            f"node {name}: largest error {table['error'].max():.3f} sd ± "
            f"{table['mcse'].max():.3f}, sd ratios "
            f"{table['sd_ratio'].min():.3f} to {table['sd_ratio'].max():.3f}, smallest ESS "
            f"{table['ess_bulk'].min():.0f}; "
            f"{comparison.closing_line()}"
        )
    return Result(curves, whole, nodes)


if __name__ == "__main__":
    main()
