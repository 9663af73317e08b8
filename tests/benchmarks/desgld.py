r"""GossipLangevin and PushSumLangevin against the package desgld.

Speed and error at equal numbers of gradients.

    python -m venv ELSEWHERE && ELSEWHERE/bin/pip install desgld==0.1.6
    python tests/benchmarks/desgld.py --desgld-python ELSEWHERE/bin/python [--quick]

desgld has requirements of its own (scikit-learn), so it lives in an environment of its own, outside
the checkout, and is run there by a subprocess, which times itself.

**Task.** The linear regression of desgld's documentation: x uniform on (0, 1), y = 3 x - 0.5 + U(0,
1), ten rows a node, an intercept, likelihood N(y | x'beta, 1), lam = 10; networks and weights of
its ``NetworkArchitecture`` with five nodes.

**Target.** desgld's gradient at a node sums b rows drawn with replacement and adds (2 / lam) beta.
It estimates the gradient of a posterior only where b is the number of rows at the node; then the m
nodes together have the prior N(0, lam / (2 m) I). Both packages are held against that Gaussian
posterior. desgld begins at N(0, I), ours uniformly on (-2, 2); the burn-in removes both.

**Where desgld errs**, beside the step size that both have: ``randint(0, len(y) - 1)`` never draws
the last row; the minibatch has noise although it has as many rows as the node; and nodes move in
turn, each seeing those before it already moved, so that the average gets more than 1/m of a node's
noise: its variance is too large. Ours takes all rows, and all nodes move at once.

GossipLangevin has Metropolis weights, PushSumLangevin desgld's own matrix. Errors are the largest
over coefficients, of the mean in posterior sds and of the sd as a ratio, of the worst node and of
the average of nodes: measured on all R networks together, with the Monte-Carlo error of the mean,
and of the *law*: all three are linear recursions with Gaussian noise, so the law of their draws is
known (desgld's without its minibatch noise). A node-gradient-step is one node's gradient, exchange
and noise.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

import numpyro_fed as fed

NODES, ROWS, LAM, ETA = 5, 10, 10.0, 0.005
BURN_IN = 0.1  # of all steps
GOAL = 20.0  # times desgld's steps per second

THEIRS = """
import random, sys, time
import numpy as np
from desgld import DeSGLD, NetworkArchitecture

given = np.load(sys.argv[1])
x, y, networks, steps = given["x"], given["y"], int(given["networks"]), int(given["steps"])
np.random.seed(0)
random.seed(0)
w = getattr(NetworkArchitecture(len(x)), str(given["architecture"]))()
eta, lam = float(given["eta"]), float(given["lam"])
shape = x.shape[-1], x.shape[1]
sampler = DeSGLD(len(x), networks, 1.0, eta, steps, *shape, lam, x, y, w, None, "linear")
start = time.perf_counter()
history, _ = sampler.vanila_desgld()
np.savez(sys.argv[2], seconds=time.perf_counter() - start, history=history, w=w)
"""


def data() -> tuple[np.ndarray, np.ndarray]:
    """Rows of every node: x (m, n, 2) with an intercept, y (m, n)."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(NODES, ROWS))
    return np.stack([np.ones_like(x), x], -1), 3 * x - 0.5 + rng.uniform(size=x.shape)


def model(x, y=None):  # type: ignore[no-untyped-def]
    prior = dist.Normal(0, (LAM / (2 * NODES)) ** 0.5)
    beta = numpyro.sample("beta", prior.expand([2]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def exact(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sds of the posterior."""
    x, y = x.reshape(-1, 2), y.ravel()
    covariance = np.linalg.inv(x.T @ x + 2 * NODES / LAM * np.eye(2))
    return covariance @ x.T @ y, np.sqrt(np.diag(covariance))


def law(name: str, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (2 m,) and covariance (2 m, 2 m) of the draws of all nodes, once the start is forgotten.

    They are those of ``X <- M X + b + N(0, Q)``: for desgld one such step for each node in turn; a
    draw of push-sum is ``w X``.
    """
    x, y = data()
    size, mix = 2 * NODES, np.kron(w, np.eye(2))
    if name == "desgld":  # the last row is never drawn, the others so much the oftener
        x, y, scale = x[:, :-1], y[:, :-1], ROWS / (ROWS - 1)
    else:
        scale = 1.0
    push = np.zeros((size, size))
    for i in range(NODES):
        push[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = ETA * (
            scale * x[i].T @ x[i] + 2 / LAM * np.eye(2)
        )
    pull = ETA * scale * np.einsum("mnd,mn->md", x, y).ravel()
    turns = [np.ones(size)]
    if name == "desgld":
        turns = [np.repeat(np.arange(NODES) == i, 2).astype(float) for i in range(NODES)]
    once = mix - push @ mix if name == "PushSumLangevin" else mix - push
    step, shift, noise = np.eye(size), np.zeros(size), np.zeros((size, size))
    for moves in turns:
        matrix = np.where(moves[:, None] > 0, once, np.eye(size))
        step, shift = matrix @ step, matrix @ shift + moves * pull
        noise = matrix @ noise @ matrix.T + 2 * ETA * np.diag(moves)
    mean = np.linalg.solve(np.eye(size) - step, shift)
    covariance = np.linalg.solve(np.eye(size**2) - np.kron(step, step), noise.ravel()).reshape(
        size, size
    )
    return (
        (mix @ mean, mix @ covariance @ mix.T) if name == "PushSumLangevin" else (mean, covariance)
    )


def errors_of_law(name: str, w: np.ndarray) -> list[float]:
    """Errors of mean and sd of the worst node, then of the average of nodes."""
    mean, sd = exact(*data())
    center, covariance = law(name, w)
    found: list[float] = []
    for part in (np.eye(2 * NODES), np.kron(np.ones((1, NODES)) / NODES, np.eye(2))):
        spread = np.sqrt(np.diag(part @ covariance @ part.T)).reshape(-1, 2)
        found += [
            np.abs(((part @ center).reshape(-1, 2) - mean) / sd).max(),
            np.abs(spread / sd - 1).max(),
        ]
    return found


def theirs(
    python: Path, architecture: str, networks: int, steps: int
) -> tuple[float, np.ndarray, np.ndarray]:
    """Seconds, draws (networks, nodes, steps, 2) and mixing matrix of desgld."""
    x, y = data()
    with tempfile.TemporaryDirectory() as folder:
        given, made = f"{folder}/given.npz", f"{folder}/made.npz"
        np.savez(
            given,
            x=x,
            y=y,
            networks=networks,
            steps=steps,
            eta=ETA,
            lam=LAM,
            architecture=architecture,
        )
        subprocess.run([str(python), "-c", THEIRS, given, made], check=True)
        found = np.load(made)
        return float(found["seconds"]), found["history"][1:].transpose(3, 1, 0, 2), found["w"]


def ours(kernel: MCMCKernel, networks: int, steps: int) -> tuple[float, float, np.ndarray]:
    """Time a run of ours.

    :return: seconds of a run, seconds more that the first took (compiling), and draws in the form
        of :func:`theirs`.
    """
    x, y = data()
    silos = fed.split({"x": x.reshape(-1, 2), "y": y.ravel()}, by=np.repeat(np.arange(NODES), ROWS))
    settings = {"num_chains": networks * NODES, "chain_method": "vectorized", "progress_bar": False}
    kernel.init(random.split(random.key(0), networks * NODES), 0, model_args=(silos,))

    @jax.jit
    def run(key: Array) -> Array:
        mcmc = MCMC(kernel, num_warmup=0, num_samples=steps, **settings)
        mcmc.run(key, silos)
        return mcmc.get_samples(group_by_chain=True)["beta"]

    first, _ = timed(run, random.key(1))
    second, draws = timed(run, random.key(2))
    return second, first - second, draws.reshape(networks, NODES, steps, 2)


def timed(run: Callable[[Array], Array], key: Array) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    draws = jax.block_until_ready(run(key))
    return time.perf_counter() - start, np.asarray(draws, np.float64)


def errors(draws: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> list[float]:
    """Error of mean, its Monte-Carlo standard error, and of sd.

    Of the worst node, then of the average of nodes.
    """
    draws = (draws[:, :, int(BURN_IN * draws.shape[2]) :] - mean) / sd
    found: list[float] = []
    for part in (draws, draws.mean(1, keepdims=True)):
        each = part.mean(2)  # (networks, nodes, 2)
        noise = each.std(0, ddof=1) / len(each) ** 0.5
        found += [np.abs(each.mean(0)).max(), noise.max(), np.abs(part.std((0, 2)) - 1).max()]
    return found


def row(
    name: str,
    w: np.ndarray,
    seconds: float,
    compiling: float,
    draws: np.ndarray,
    reference: float | None,
) -> float:
    """Print one; return its node-gradient-steps per second."""
    speed = np.prod(draws.shape[:3]) / seconds
    times = "" if reference is None else f"{speed / reference:.0f} x"
    line = f"  {name:<17}{draws.shape[0]:>3}{speed:>12,.0f}/s {times:>6}  {compiling:4.1f} s"
    if draws.shape[0] > 1:  # there is no Monte-Carlo error of one network
        numbers, exactly = errors(draws, *exact(*data())), errors_of_law(name, w)
        for k, j in ((0, 0), (3, 2)):
            line += f"   {numbers[k]:.3f} ± {numbers[k + 1]:.3f}, {100 * numbers[k + 2]:4.1f} %"
            line += f" (law {exactly[j]:.3f}, {100 * exactly[j + 1]:4.1f} %)"
    print(line, flush=True)
    return float(speed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="desgld against GossipLangevin and PushSumLangevin."
    )
    parser.add_argument(
        "--desgld-python", type=Path, required=True, help="the interpreter that has desgld"
    )
    parser.add_argument("--quick", action="store_true", help="few steps: to see that it runs")
    args = parser.parse_args(arguments)
    networks, steps = (4, 200) if args.quick else (20, 8_000)
    print(
        f"{NODES} nodes of {ROWS} rows, eta {ETA}, {networks} networks, {steps} steps, the first "
        "tenth dropped"
    )
    print(
        "R, node-gradient-steps/s, over desgld's, compiling; error of mean (sds) and sd: worst "
        "node; average of nodes"
    )
    for architecture, plain in (
        ("fully_connected", nx.complete_graph(NODES)),
        ("circular_network", nx.cycle_graph(NODES)),
    ):
        seconds, draws, w = theirs(args.desgld_python, architecture, networks, steps)
        print(
            f"{architecture}: desgld's weight of a link {w[0, 1]:.3f}, its largest column sum "
            f"{w.sum(0).max():.6f}"
        )
        reference = row("desgld", w, seconds, 0.0, draws, None)
        graph = fed.graphs.from_networkx(plain)
        forms = {
            "GossipLangevin": (fed.GossipLangevin(model, graph, ETA), graph.matrix(gossip=True)),
            "PushSumLangevin": (fed.PushSumLangevin(model, fed.graphs.from_matrices(w), ETA), w),
        }
        speeds = [
            row(name, v, *ours(k, r, steps), reference)
            for name, (k, v) in forms.items()
            for r in (networks, 1)
        ]
        least = min(speeds) / reference
        smaller = all(
            (np.array(errors_of_law(name, v)) < errors_of_law("desgld", w)).all()
            for name, (_, v) in forms.items()
        )
        print(
            f"  goal {GOAL:.0f} x: {'reached' if least >= GOAL else 'NOT reached'} (least "
            f"{least:.0f} x)"
        )
        print(f"  goal of smaller errors, by their laws: {'reached' if smaller else 'NOT reached'}")


if __name__ == "__main__":
    main()
