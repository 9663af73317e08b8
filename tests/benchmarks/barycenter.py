"""Seconds of the barycenter of ten random Gaussians, ours and that of ott-jax.

    python tests/benchmarks/barycenter.py [--dims 100,784] [--double] [--turns 5]

Both are compiled beforehand and run in turn in one process; the fastest turn counts, above d = 500
a single one of ott's. Ours has to reach a relative residual of 1e-5. That of ott-jax 0.6 makes
five steps whatever its tolerance is (it looks for the change of the step that comes next), which is
enough here for 1e-5, if one more than it needs; the residuals that both reached are printed, from
one and the same formula in float64.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from ott.geometry import costs

from numpyro_fed.vi.barycenter import barycenter

NUMBER, RESIDUAL = 10, 1e-5
GOALS = {100: 2.0, 784: 5.0}


def gaussians(dim: int) -> tuple[Array, Array]:
    """Means and covariances, of scales some tenfold apart and condition numbers of some 30."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(NUMBER, dim, 2 * dim))
    covariances = root @ root.swapaxes(1, 2) / (2 * dim) * rng.gamma(3.0, size=(NUMBER, 1, 1))
    return jnp.asarray(rng.normal(size=(NUMBER, dim))), jnp.asarray(covariances)


def residual_of(covariance: Array, covariances: Array) -> float:
    """Return the relative residual of the fixed-point equation, in float64."""

    def root(matrix: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(matrix)
        return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T

    at = np.asarray(covariance, np.float64)
    half = root(at)
    mean = np.mean([root(half @ v @ half) for v in np.asarray(covariances, np.float64)], axis=0)
    return float(np.linalg.norm(at - mean) / np.linalg.norm(at))


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def report(dim: int, turns: int) -> str:
    """One line: seconds, residuals and the ratio."""
    means, covariances = gaussians(dim)

    @jax.jit
    def own(means: Array, covariances: Array) -> Array:
        return barycenter(means, covariances, tol=RESIDUAL).covariance

    jax.block_until_ready(own(means, covariances))
    points = jnp.concatenate([means, covariances.reshape(NUMBER, -1)], axis=1)

    def one(points: Array) -> Array:
        weights = jnp.full(NUMBER, 1 / NUMBER, points.dtype)
        return costs.Bures(dim).barycenter(weights, points)[0]

    theirs = jax.jit(one).lower(points).compile()
    result = theirs(points) if dim < 500 else None  # a first call, where it is cheap
    times: dict[str, list[float]] = {"own": [], "ott": []}
    for turn in range(turns):
        times["own"].append(seconds(lambda: own(means, covariances)))
        if dim < 500 or turn == 0:
            start = time.perf_counter()
            result = jax.block_until_ready(theirs(points))
            times["ott"].append(time.perf_counter() - start)
    assert result is not None
    reached = [
        residual_of(x, covariances)
        for x in (own(means, covariances), result[dim:].reshape(dim, dim))
    ]
    fastest = {name: min(all_times) for name, all_times in times.items()}
    ratio = fastest["ott"] / fastest["own"]
    line = (
        f"d = {dim:4d} {covariances.dtype}  ours {fastest['own']:8.4f} s (residual "
        f"{reached[0]:.1e})  "
    )
    line += f"ott {fastest['ott']:8.4f} s (residual {reached[1]:.1e})  ratio {ratio:6.2f}"
    if dim in GOALS:
        line += f"   goal {GOALS[dim]:g}: {'reached' if ratio >= GOALS[dim] else 'NOT reached'}"
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of the barycenter of Gaussians.")
    parser.add_argument("--dims", default="100,784", help="dimensions, with commas between")
    parser.add_argument("--double", action="store_true", help="in float64")
    parser.add_argument("--turns", type=int, default=5, help="how often each is timed")
    args = parser.parse_args(arguments)
    with jax.enable_x64(args.double):
        for dim in map(int, args.dims.split(",")):
            print(report(dim, args.turns), flush=True)


if __name__ == "__main__":
    main()
