"""What the Bayesian network of 30 x 90,000 x 18 costs.

Memory, compiling, and steps against hand-written JAX.

    python tests/benchmarks/mlp_cost.py [--quick]

Memory and compiling are those of ``models/bayesian_mlp.py``'s model, a flax.nnx module, in a
process of its own for each kernel, run as ``memory.py`` says (JAX's simplified constants). Steps
are timed in turn in one process: DSGLD and FSGLD with diagonal surrogates through NumPyro's MCMC on
the nnx module, and both updates of the same model in hand-written JAX in block form (rows of the
silo, noise of a visit drawn in one go), as in ``tasks.py``.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from memory import FLAG, MIB, peak
from numpyro.infer import MCMC
from speed import compiled_run, in_turn, quartiles, verdict
from tasks import mlp

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import _binary_silos as labels
import bayesian_mlp as network

VISIT, BATCH, STEP = network.VISIT, network.BATCH_SIZE, 1e-8


def kernel_of(name: str, silos: fed.Silos) -> fed.DSGLD | fed.FSGLD:
    if name == "DSGLD":
        return fed.DSGLD(network.model, STEP, VISIT, BATCH)
    shape = (len(silos), sum(v.size for v in network.start(labels.FEATURES, 0).values()))
    flat = fed.surrogates.analytic(silos, np.zeros(shape), np.ones(shape))
    return fed.FSGLD(
        network.model, fed.Step(STEP, preconditioner=None), VISIT, BATCH, surrogate=flat
    )


def child(name: str, size: int) -> None:
    """MiB of the data, of the samples and of the peaks.

    Processor seconds from the kernel to the first 500 rounds, and of 500 more.
    """
    imported = peak()
    silos, _ = labels.simulated(0.5, size=size)
    made = peak()
    mcmc = MCMC(kernel_of(name, silos), num_warmup=0, num_samples=500, progress_bar=False)
    start, begin = network.start(labels.FEATURES, 0), time.process_time()
    seconds = []
    for seed in range(2):
        mcmc.run(random.key(seed), silos, init_params=start)
        jax.block_until_ready(mcmc.get_samples())
        seconds.append(time.process_time() - begin)
    samples = sum(v.nbytes for v in mcmc.get_samples().values())
    data = sum(v.nbytes for v in jax.tree.leaves(silos))
    print(data / MIB, samples / MIB, imported, made, peak(), seconds[0], seconds[1] - seconds[0])


def by_hand(silos: fed.Silos, rounds: int, conducive: bool) -> Callable[[Array], Any]:
    """Run visits to silos of equal size: the block form of tasks.py, one silo's rows a block."""
    data = {k: jnp.stack([jnp.asarray(silos[name][k]) for name in silos.names]) for k in ("x", "y")}
    count, size = data["y"].shape
    pairs = [("kernel", "bias")] * 4
    first = {k: jnp.asarray(v) for k, v in network.start(labels.FEATURES, 0).items()}
    theta, unravel = jax.flatten_util.ravel_pytree(first)
    own_precision, own_shift = jnp.ones((count, theta.size)), jnp.zeros((count, theta.size))

    def log_density(theta: Array, x: Array, y: Array) -> Array:
        sites = unravel(theta)
        layers = [
            tuple(sites[f"net/layers.{i}.{name}"] for name in pair) for i, pair in enumerate(pairs)
        ]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(mlp(layers, x)), y[:, None], 1).sum()
        return -0.5 * jnp.sum(theta**2) + count * size / BATCH * log_p

    @jax.jit
    def run(key: Array, data: dict[str, Array], shift: Array, precision: Array) -> Array:
        sums = shift.sum(0), precision.sum(0)

        def stay(theta: Array, key: Array) -> tuple[Array, Array]:
            key_silo, key_rows, key_noise = random.split(key, 3)
            s = random.randint(key_silo, (), 0, count)
            index = random.bits(key_rows, (VISIT, BATCH), jnp.uint32) % size
            rows, xi = (
                {k: v[s, index] for k, v in data.items()},
                random.normal(key_noise, (VISIT, theta.size)),
            )
            net_shift, net_precision = sums[0] - count * shift[s], sums[1] - count * precision[s]

            def step(theta: Array, drawn: tuple) -> tuple[Array, None]:
                x, y, xi = drawn
                slope = jax.grad(log_density)(theta, x, y)
                if conducive:
                    slope = slope + net_shift - net_precision * theta
                return theta + 0.5 * STEP * slope + jnp.sqrt(STEP) * xi, None

            theta, _ = lax.scan(step, theta, (rows["x"], rows["y"], xi))
            return theta, theta

        return lax.scan(stay, theta, random.split(key, rounds))[1]

    return lambda key: run(key, data, own_shift, own_precision)


def steps(size: int, rounds: int, turns: int) -> None:
    silos, _ = labels.simulated(0.5, size=size)
    forms = {
        f"{name}, by hand": by_hand(silos, rounds, name == "FSGLD") for name in ("DSGLD", "FSGLD")
    }
    forms |= {
        name: compiled_run(kernel_of(name, silos), silos, rounds) for name in ("DSGLD", "FSGLD")
    }
    times = in_turn(forms, turns)
    for name, own in times.items():
        print(f"{name:<18}{1e6 * np.median(own) / (rounds * VISIT):8.1f} us a step")
    for name in ("DSGLD", "FSGLD"):
        ratio = times[f"{name}, by hand"] / times[name]
        print(
            f"{name}, steps/s over hand-written {quartiles(ratio)}   "
            f"{verdict(bool(np.median(ratio) >= 0.9), '0.9')}"
        )
    ratio = times["FSGLD"] / times["DSGLD"]
    print(
        f"FSGLD diagonal, time over DSGLD {quartiles(ratio)}   "
        f"{verdict(bool(np.median(ratio) <= 1.1), '1.1')}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Memory, compiling and steps of the Bayesian network at full size."
    )
    parser.add_argument("--quick", action="store_true", help="a hundredth of the rows, few turns")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        return child(args.child[0], int(args.child[1]))
    size = 900 if args.quick else labels.NUM_ROWS
    for name in ("DSGLD", "FSGLD"):
        command = [sys.executable, __file__, "--child", name, str(size)]
        done = subprocess.run(
            command, env={**os.environ, FLAG: "1"}, check=True, text=True, capture_output=True
        )
        data, samples, imported, made, most, first, second = map(float, done.stdout.split())
        goal = data + 2.5 * samples + 600
        print(
            f"{name}: data {data:.0f} MiB, samples {samples:.1f}, peak {most:.0f} (modules "
            f"imported {imported:.0f}, data made {made:.0f}); "
            f"{verdict(most <= goal, f'{goal:.0f}')}"
        )
        print(
            f"{name}: first run of 500 rounds {first:.1f} s of processor time, the second "
            f"{second:.1f} s: set-up and compiling "
            f"{first - second:.1f} s at least; {verdict(first <= 30, '30 s')} with the rounds",
            flush=True,
        )
    steps(size, 25, 5 if args.quick else 31)


if __name__ == "__main__":
    main()
