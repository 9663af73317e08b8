"""Two means of a Gaussian mixture on four nodes: push-sum Langevin on two modes.

    x_i ~ 1/2 N(theta1, 2) + 1/2 N(theta1 + theta2, 2),   theta1 ~ N(0, 10),   theta2 ~ N(0, 1)
    (variances),

The 800 rows are drawn at theta = (0, 1). The likelihood is the same at (1, -1), where the
components have changed names, so the posterior has two modes of nearly equal weight. The truth
comes from a grid (:func:`grid`).

**Moves between modes.** Half of the networks start around one mode, and half around the other. The
halves are counted apart, so that no lucky start can give the weights. The average of the nodes is
Langevin dynamics with steps alpha / m. After the time s = sum alpha / m it remembers a share exp(-s
/ tau) of its start; tau comes from the grid too (:func:`relaxation`). Data sets differ: over seeds
0, 1, 2, 3 the log density at theta2 = 0 lies 0.7, 0.7, 4.9 and 2.7 below the modes'. Seed 3 is
chosen, whose modes are near the true (0, 1) and (1, -1).

**Step sizes** alpha = a / (b + t)^0.65 fall from 0.01 to a last one. The paper's last step is
0.0001, and it does not say after how many steps. In 10,000 of them s is a sixth of tau, and a
network stays in the mode in which it began. More time mends it, by steps that fall less or by more
steps.

Larger steps have their price. Nodes of different silos disagree by O(alpha), more so around (1,
-1), and the average is drawn there. With steps from 0.01 to 0.005, P(theta2 > 0) comes out near
0.46 where the grid has 0.51 (Monte-Carlo error 0.03 of 128 networks). With
``gradient_tracking=True``, under which silos' differences cancel, it is 0.51.

Draws are weighted by their step sizes (Welling and Teh), so that means over draws are means over
the time s. The first half of s is left out.

References: Kolesov, Kungurtsev (2020), Decentralized Langevin dynamics over a directed graph,
section 6.3, figure 4; Welling, Teh (2011), Bayesian learning via stochastic gradient Langevin
dynamics, section 5.1.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC
from scipy import sparse

import numpyro_fed as fed

NUM_NODES, NUM_ROWS = 4, 200
VARIANCE = 2.0
FIRST, POWER = 0.01, 0.65  # first step size; gamma
MODES = np.array([[0.0, 1.0], [1.0, -1.0]])


def data(seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, and the node of each."""
    rng, n = np.random.default_rng(seed), NUM_NODES * NUM_ROWS
    x = rng.normal(size=n) * np.sqrt(VARIANCE) + rng.integers(0, 2, n)
    return x.astype(np.float32), np.repeat(np.arange(NUM_NODES), NUM_ROWS)


def silos() -> fed.Silos:
    x, node = data()
    return fed.split({"x": x}, by=node)


def model(x):  # type: ignore[no-untyped-def]
    theta1 = numpyro.sample("theta1", dist.Normal(0, jnp.sqrt(10.0)))
    theta2 = numpyro.sample("theta2", dist.Normal(0, 1))
    with fed.silo_plate("rows", x.shape[0]):
        components = dist.Normal(jnp.stack([theta1, theta1 + theta2]), jnp.sqrt(VARIANCE))
        halves = dist.Categorical(probs=jnp.array([0.5, 0.5]))
        numpyro.sample("x", dist.MixtureSameFamily(halves, components), obs=x)


def graph() -> fed.graphs.TimeVaryingGraph:
    """Return two halves of a ring by turns, neither of which connects the nodes."""
    return fed.graphs.periodic([nx.DiGraph([(0, 1), (2, 3)]), nx.DiGraph([(1, 2), (3, 0)])])


class Grid(NamedTuple):
    """Posterior on a grid.

    It holds coordinates, and the probability of each grid point ``(n, n)``, theta1 first.
    """

    theta1: np.ndarray
    theta2: np.ndarray
    probability: np.ndarray

    @property
    def weight(self) -> float:
        """P(theta2 > 0)."""
        return float(self.probability[:, self.theta2 > 0].sum())

    @property
    def sd(self) -> float:
        """Standard deviation of |theta2|."""
        marginal, size = self.probability.sum(0), np.abs(self.theta2)
        return float(np.sqrt(marginal @ size**2 - (marginal @ size) ** 2))


def grid(n: int = 160) -> Grid:
    theta1, theta2 = np.linspace(-1.2, 2.2, n), np.linspace(-2.2, 2.2, n)
    first, second = np.meshgrid(theta1, theta2, indexing="ij")
    log_p = -(first**2) / 20 - second**2 / 2
    for x in data()[0].astype(np.float64):
        scale = 2 * VARIANCE
        log_p += np.logaddexp(-((x - first) ** 2) / scale, -((x - first - second) ** 2) / scale)
    p = np.exp(log_p - log_p.max())
    return Grid(theta1, theta2, p / p.sum())


def relaxation(grid: Grid) -> float:
    """Return tau, the relaxation time of Langevin diffusion on this posterior.

    It is minus one over the largest nonzero eigenvalue of the diffusion's generator.

    On the grid the diffusion is a jump process of rates sqrt(p_j / p_i) / h^2 between neighbors. It
    is reversible: its symmetric form has 1 / h^2 beside the diagonal.
    """
    inside = grid.probability > 1e-11 * grid.probability.max()
    number, log_p = (
        np.full(inside.shape, -1),
        np.log(grid.probability, where=inside, out=np.zeros(inside.shape)),
    )
    number[inside] = np.arange(inside.sum())
    rate = np.zeros((0, 3))
    for axis, theta in enumerate((grid.theta1, grid.theta2)):
        low, high = (
            np.take(number, np.arange(k, len(theta) - 1 + k), axis).ravel() for k in (0, 1)
        )
        both = (low >= 0) & (high >= 0)
        rate = np.vstack(
            [rate, np.c_[low[both], high[both], np.full(both.sum(), (theta[1] - theta[0]) ** -2)]]
        )
    low, high = rate[:, :2].T.astype(int)
    up = np.exp((log_p[inside][high] - log_p[inside][low]) / 2)
    leave = np.bincount(low, rate[:, 2] * up, inside.sum()) + np.bincount(
        high, rate[:, 2] / up, inside.sum()
    )
    beside = sparse.coo_array((rate[:, 2], (low, high)), (len(leave), len(leave)))
    generator = (beside + beside.T - sparse.diags_array(leave)).tocsc()
    values = sparse.linalg.eigsh(generator, k=2, sigma=1e-3, return_eigenvectors=False)
    return float(-1 / values.min())


class Setting(NamedTuple):
    """Settings of a run: its last step size, its number of steps, and gradient tracking.

    With tracking, nodes track the sum of all gradients.
    """

    last: float
    num_steps: int
    tracked: bool = False

    @property
    def decay(self) -> tuple[float, float, float]:
        """Constants a, b and gamma of steps that fall from ``FIRST`` to ``last``."""
        offset = self.num_steps / ((FIRST / self.last) ** (1 / POWER) - 1)
        return FIRST * offset**POWER, offset, POWER

    @property
    def label(self) -> str:
        return f"to {self.last:g}, {self.num_steps:,} steps{', tracked' if self.tracked else ''}"


class Run(NamedTuple):
    """Draws of R networks, every tenth; even ones start around the first mode, odd ones the second.

    :ivar theta: draws ``(R, m, T, 2)``.
    :ivar consensus: squared distances from the average ``(R, m, T)``.
    :ivar step_size: ``(T,)``.
    :ivar time: s ``(T,)``.
    """

    theta: np.ndarray
    consensus: np.ndarray
    step_size: np.ndarray
    time: np.ndarray

    def weights(self) -> np.ndarray:
        """Return weights of draws in means over the second half of the time, ``(T,)``."""
        late = self.step_size * (self.time > self.time[-1] / 2)
        return late / late.sum()

    def occupation(self) -> np.ndarray:
        """Return the share of time that each node of each network has theta2 > 0, ``(R, m)``."""
        return (self.theta[..., 1] > 0) @ self.weights()

    def crossings(self) -> np.ndarray:
        """Count each network's crossings between theta2 > 1/2 and theta2 < -1/2, ``(R,)``.

        Its first node counts.
        """
        sides = [path[np.abs(path) > 0.5] > 0 for path in self.theta[:, 0, :, 1]]
        return np.array([np.count_nonzero(np.diff(side)) for side in sides])

    def sd(self) -> np.ndarray:
        """Return the sd of |theta2| at every node."""
        size, weights = np.abs(self.theta[..., 1]), self.weights() / len(self.theta)
        mean = np.einsum("rmt,t->m", size, weights)
        return np.sqrt(np.einsum("rmt,t->m", size**2, weights) - mean**2)


def simulate(setting: Setting, num_networks: int, thinning: int = 10) -> Run:
    """Run networks of the kernel, each node from a random point around its network's mode."""
    kernel = fed.PushSumLangevin(
        model, graph(), fed.polynomial_decay(*setting.decay), gradient_tracking=setting.tracked
    )
    chains = num_networks * NUM_NODES
    settings = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=0, num_samples=setting.num_steps, thinning=thinning, **settings)
    mode = np.repeat(np.arange(num_networks) % 2, NUM_NODES)
    start = MODES[mode] + 0.2 * np.random.default_rng(0).normal(size=(chains, 2))
    first = {
        "theta1": jnp.asarray(start[:, 0], jnp.float32),
        "theta2": jnp.asarray(start[:, 1], jnp.float32),
    }
    mcmc.run(
        jax.random.key(0), silos(), init_params=first, extra_fields=("consensus_error", "step_size")
    )
    draws, fields = (
        mcmc.get_samples(group_by_chain=True),
        mcmc.get_extra_fields(group_by_chain=True),
    )
    theta = np.stack([draws["theta1"], draws["theta2"]], -1).reshape(num_networks, NUM_NODES, -1, 2)
    steps = np.asarray(fields["step_size"][0], np.float64)
    consensus = np.asarray(fields["consensus_error"]).reshape(theta.shape[:3])
    return Run(theta, consensus, steps, thinning * np.cumsum(steps) / NUM_NODES)


def table(runs: dict[Setting, Run], truth: Grid, tau: float) -> pd.DataFrame:
    """Return a row per run.

    Its columns are time in units of tau, crossings, P(theta2 > 0) at each node and by start with
    Monte-Carlo errors, spread, and consensus.
    """
    rows = {}
    for setting, run in runs.items():
        share = run.occupation()
        starts = {"start at (0, 1)": share[::2].mean(1), "start at (1, -1)": share[1::2].mean(1)}
        rows[setting.label] = {
            "s / tau": run.time[-1] / tau,
            "crossings": run.crossings().mean(),
            **{f"P, node {i}": share[:, i].mean() for i in range(NUM_NODES)},
            **{name: part.mean() for name, part in starts.items()},
            "error of a start's": max(
                part.std(ddof=1) / np.sqrt(len(part)) for part in starts.values()
            ),
            "sd of |theta2|": run.sd().max() / truth.sd,
            "consensus": run.consensus[..., -1].mean(),
        }
    return pd.DataFrame(rows).T


def plot(runs: dict[Setting, Run], truth: Grid, tau: float, place: Path) -> None:
    """Draw figure 4 for the last run: node draws on the grid's contours, and consensus errors.

    A third part shows how starts are forgotten.
    """
    run = list(runs.values())[-1]
    figure, axes = plt.subplots(2, 3, figsize=(13, 8), layout="constrained")
    rng, networks = np.random.default_rng(0), len(run.theta)
    levels = truth.probability.max() * np.exp([-4.5, -2.0, -0.5])
    for i, axis in enumerate(axes.flat[:NUM_NODES]):
        # 3,000 draws, by their weights
        some = rng.choice(len(run.time), 3000, p=run.weights())
        theta = run.theta[rng.integers(0, networks, 3000), i, some]
        axis.scatter(theta[:, 0], theta[:, 1], s=3, alpha=0.4, lw=0)
        axis.contour(
            truth.theta1, truth.theta2, truth.probability.T, levels, colors="black", linewidths=1
        )
        share = run.occupation()[:, i].mean()
        axis.set(xlim=(-1, 2), ylim=(-2, 2), xlabel="θ1", ylabel="θ2")
        axis.set_title(f"node {i}: P(θ2 > 0) = {share:.2f}, grid {truth.weight:.2f}")
    blocks = [part for part in np.array_split(np.arange(len(run.time)), 100)]
    for i in range(NUM_NODES):
        error = [run.consensus[:, i, part].mean() for part in blocks]
        axes[1, 1].semilogy(
            [10 * part.mean() for part in blocks], error, color=f"C{i}", lw=1, label=f"node {i}"
        )
    axes[1, 1].set(xlabel="t", title="E |node - average|²")
    axes[1, 1].legend()
    every = max(1, len(run.time) // 200)
    for k, (color, mode) in enumerate(zip(("C0", "C1"), MODES, strict=True)):
        right = (run.theta[k::2, 0, :, 1] > 0).mean(0)
        forgets = truth.weight + (1 - k - truth.weight) * np.exp(-run.time / tau)
        axes[1, 2].plot(
            run.time[::every],
            right[::every],
            color=color,
            lw=1,
            label=f"start at ({mode[0]:g}, {mode[1]:g})",
        )
        axes[1, 2].plot(run.time[::every], forgets[::every], color=color, ls="--", lw=1)
    paper = next(iter(runs.values()))
    axes[1, 2].axvline(paper.time[-1], color="gray", ls=":", label="end of the paper's steps")
    axes[1, 2].set(xlabel="time s", ylim=(0, 1), title="θ2 > 0 by start (dashed: diffusion)")
    axes[1, 2].legend()
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> tuple[pd.DataFrame, Grid]:
    """Print a table of runs, draw the figure, and return the table and the truth."""
    parser = argparse.ArgumentParser(description="The means of a Gaussian mixture, on four nodes.")
    parser.add_argument("--quick", action="store_true", help="few steps and networks")
    parser.add_argument("--figure", type=Path, default=Path("figures/gaussian_mixture_means.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()
    truth = grid()
    tau = relaxation(truth)
    print(f"grid: P(theta2 > 0) = {truth.weight:.3f}; tau = {tau:.2f}")
    settings: tuple[Setting, ...] = (Setting(1e-4, 2_000), Setting(5e-3, 10_000, tracked=True))
    if not args.quick:
        settings = (
            Setting(1e-4, 10_000),
            Setting(5e-3, 20_000),
            Setting(5e-3, 20_000, True),
            Setting(1e-3, 60_000),
        )
    num_networks = 64 if args.quick else 128
    runs = {setting: simulate(setting, num_networks) for setting in settings}
    found = table(runs, truth, tau)
    print(f"{num_networks} networks; steps from {FIRST:g}")
    print(found.T.map("{:.3g}".format).to_string())
    plot(runs, truth, tau, args.figure)
    print(f"figure written to {args.figure}")
    return found, truth


if __name__ == "__main__":
    main()
