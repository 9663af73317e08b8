"""The models of decentralized Langevin dynamics.

Their references against other forms, and quick runs against the references.
"""

from pathlib import Path

import decentralized_linear_regression as regression
import gaussian_mixture_means as mixture
import matplotlib.pyplot as plt
import numpy as np
import pytest
from marks import heavy
from scipy import stats

# Linear regression


def test_wasserstein_is_the_cost_of_the_optimal_map() -> None:
    rng = np.random.default_rng(0)
    first, second = (a @ a.T for a in rng.normal(size=(2, 2, 2)))
    means = rng.normal(size=(2, 2))
    half = regression.root(first)
    back = np.linalg.inv(half)
    linear = (
        back @ regression.root(half @ second @ half) @ back
    )  # symmetric and positive: a gradient of a convex function
    np.testing.assert_allclose(linear @ first @ linear, second, rtol=1e-10)
    cost = ((means[0] - means[1]) ** 2).sum() + np.trace(
        (linear - np.eye(2)) @ first @ (linear - np.eye(2))
    )
    found = regression.wasserstein(means[0], first, (means[1], second))
    assert abs(found - np.sqrt(cost)) < 1e-10
    # negative control: the paper's formula
    printed = np.linalg.norm(means[0] - means[1]) + np.linalg.norm(half - regression.root(second))
    assert printed > 1.1 * found


def test_floor_is_what_draws_from_the_posterior_show() -> None:
    rng, size = np.random.default_rng(0), 400
    mean, covariance = regression.potentials().posterior
    draws = rng.multivariate_normal(mean, covariance, (size, 1, 1000))
    squares = regression.measured(draws)[:, 0] ** 2
    error = squares.std() / np.sqrt(len(squares))
    # 4 s.e., and 3 % for a posterior that is not round and W2 beyond its leading term
    assert abs(squares.mean() - regression.floor(size) ** 2) < 4 * error + 0.03 * squares.mean()


def moments(law: regression.Law) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances over sequences too, (T, m + 1, d)."""
    variance = np.diagonal(law.covariance, axis1=-2, axis2=-1).mean(1) + law.mean.var(1)
    return law.mean.mean(1), variance


@pytest.mark.parametrize("minibatch", [False, True], ids=["all rows", "minibatch"])
@pytest.mark.parametrize("name", heavy(regression.graphs(), "fixed", "30 % of links fail"))
def test_the_recursion_is_the_kernels_law(name: str, minibatch: bool) -> None:
    """Means and variances of nodes and average over 500 networks are within 4 s.e.

    There are 48 numbers of each; and the consensus error.
    """
    size, steps, at = 500, 40, np.array([0, 2, 9, 39])
    decay = (regression.potentials().scale, 50.0, 1.0)
    graph = regression.graphs()[name]
    run = regression.simulate(graph, decay, steps, size, minibatch)

    def worst(law: regression.Law) -> tuple[float, float]:
        mean, variance = (part[at] for part in moments(law))
        found = run.draws[:, :, at]
        far = (np.swapaxes(found.mean(0), 0, 1) - mean) / np.sqrt(variance / size)
        wide = (np.swapaxes(found.var(0, ddof=1), 0, 1) / variance - 1) / np.sqrt(2 / size)
        return float(np.abs(far).max()), float(np.abs(wide).max())

    law = regression.exact_law(graph, decay, steps, minibatch, 500 if graph.fails else 1)
    # sequences are a sample too, of as many as networks
    limit = 4 * (np.sqrt(2) if graph.fails else 1.0)
    assert max(worst(law)) < limit, worst(law)
    error, exact = run.consensus.mean(0).T[-1], law.consensus.mean(1)[-1]
    spread = run.consensus.std(0).T[-1] / np.sqrt(size)
    assert (np.abs(error - exact) < limit * spread).all(), (error, exact)
    # negative control: another graph, or twice the step, fails the same test
    other = regression.graphs()["periodic" if name == "fixed" else "fixed"]
    assert max(worst(regression.exact_law(other, decay, steps, minibatch))) > 1.2 * limit
    assert (
        max(worst(regression.exact_law(graph, (2 * decay[0], *decay[1:]), steps, minibatch)))
        > 1.2 * limit
    )


def test_constant_steps_and_steps_too_small_fall_short_of_the_rate() -> None:
    """Negative controls of the slopes below."""
    ring, scale = regression.graphs()["fixed"], regression.potentials().scale
    constant = regression.slope(
        regression.distance(regression.exact_law(ring, (0.1 * scale, 1.0, 1e-9), 1000))
    )
    assert (np.abs(constant) < 0.01).all()
    small = regression.slope(
        regression.distance(regression.exact_law(ring, (0.25 * scale, 1.0, 1.0), 1000))
    )
    assert (small > -0.5).all()


@pytest.mark.ci
def test_linear_regression_quick(tmp_path: Path) -> None:
    found = regression.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert list(found) == ["all rows", "minibatches of 1"]
    for table in found.values():
        exact = table.loc[list(regression.graphs())]
        assert (exact[["slope, nodes", "average"]] < -0.5).all(axis=None), table
        assert (exact["consensus"] < -0.8).all(), table
        assert (exact["t = 1,000"] < 0.02 * exact["t = 10"]).all(), table


# Gaussian mixture


def test_grid_is_the_models_posterior() -> None:
    truth, x = mixture.grid(80), mixture.data()[0].astype(float)

    def log_density(first: float, second: float) -> float:
        sd = np.sqrt(2.0)
        rows = 0.5 * stats.norm.pdf(x, first, sd) + 0.5 * stats.norm.pdf(x, first + second, sd)
        prior = stats.norm.logpdf(first, 0, np.sqrt(10.0)) + stats.norm.logpdf(second, 0, 1)
        return float(np.log(rows).sum() + prior)

    i, j, k = 28, 62, 18
    exact = log_density(truth.theta1[i], truth.theta2[j]) - log_density(
        truth.theta1[2 * i], truth.theta2[k]
    )
    assert abs(np.log(truth.probability[i, j] / truth.probability[2 * i, k]) - exact) < 1e-8
    finer = mixture.grid()
    assert abs(truth.weight - finer.weight) < 1e-3
    assert abs(truth.sd - finer.sd) < 1e-3
    edge = finer.probability[[0, -1]].sum() + finer.probability[:, [0, -1]].sum()
    assert edge < 1e-6


def test_relaxation_of_a_gaussian_is_its_largest_variance() -> None:
    theta1, theta2 = np.linspace(-2.4, 2.4, 120), np.linspace(-1.2, 1.2, 120)
    p = np.exp(-(theta1[:, None] ** 2) / (2 * 0.4**2) - theta2**2 / (2 * 0.2**2))
    assert abs(mixture.relaxation(mixture.Grid(theta1, theta2, p / p.sum())) / 0.4**2 - 1) < 0.01


def test_steps_fall_from_the_first_to_the_last() -> None:
    setting = mixture.Setting(1e-4, 10_000)
    a, b, gamma = setting.decay
    assert gamma == 0.65
    assert abs(a / b**gamma - 0.01) < 1e-12
    assert abs(a / (b + 10_000) ** gamma - 1e-4) < 1e-12


@pytest.mark.ci
@pytest.mark.usefixtures("optimized")
def test_gaussian_mixture_quick(tmp_path: Path) -> None:
    """Weights of the modes by start and by node are within 4 s.e.

    Beside that is what the diffusion itself still remembers of the start.
    """
    table, truth = mixture.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 10_000

    def strayed(row: int) -> bool:
        found = table.iloc[row]
        end = found["s / tau"]
        memory = (np.exp(-end / 2) - np.exp(-end)) / (
            end / 2
        )  # a mean over the second half of the time
        starts = np.array([found["start at (0, 1)"], found["start at (1, -1)"]])
        expected = truth.weight + memory * (np.array([1, 0]) - truth.weight)
        return bool((np.abs(starts - expected) > 4 * found["error of a start's"]).any())

    long = table.iloc[-1]
    assert not strayed(-1), table
    assert long["crossings"] > 1.5
    nodes = long[[f"P, node {i}" for i in range(4)]]
    assert (np.abs(nodes - truth.weight) < 4 * long["error of a start's"] / np.sqrt(2)).all(), table
    assert 0.95 < long["sd of |theta2|"] < 1.2  # steps of 0.005 and more
    assert (
        table["consensus"].diff().dropna() > 0
    ).all()  # the smaller last step has the smaller error
    # negative control: few steps end where they began, and weights are those of the start
    short = table.iloc[0]
    assert short["crossings"] < 0.2
    assert abs(short["start at (0, 1)"] - short["start at (1, -1)"]) > 0.9
    assert abs(short["start at (0, 1)"] - truth.weight) > 4 * long["error of a start's"]
