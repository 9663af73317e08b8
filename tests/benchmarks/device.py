"""`fed.fit`, FSGLD with 1,000 chains and SFVI at 10,000 silos on JAX's device, a GPU or the CPU.

    python tests/benchmarks/device.py            # the device that JAX picks
    JAX_PLATFORMS=cpu python tests/benchmarks/device.py

A row a job: seconds of the first call (compilation included) and of a second one; gigabytes that
the second at least has to move, and their share of what a copy of 2 GiB reaches in this process.
The gigabytes are those of the algorithm: rows of the minibatches that are read, and for SFVI the
parameters, gradients and Adam's moments of each round, read and written once. Work whose bytes are
not known beforehand (fits) has no share.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from first_answer import patients_model, rows_model
from numpyro.infer import MCMC
from sfvi_speed import DIM, data, ours

import numpyro_fed as fed


def made_up(rows: int, dim: int, silos: int, trials: int = 1, sd: float = 0.0) -> fed.Silos:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, dim)).astype(np.float32)
    logits = x @ np.linspace(-0.5, 0.5, dim) + sd * rng.normal(size=rows)
    y = rng.binomial(trials, 1 / (1 + np.exp(-logits)))
    return fed.split({"x": x, "y": y.astype(np.float32)}, by=np.arange(rows) % silos)


def bandwidth() -> float:
    """Return the bytes a second, read and written, of a copy of 2 GiB."""
    x = jnp.zeros(1 << 29, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        copy(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / min(seconds)


def chains(rows: int, batch: int | None) -> tuple[Callable, float]:
    """1,000 chains of 100 draws, and the bytes of the rows that they read."""
    silos, dim, steps, kept, many = made_up(rows, 20, 10), 20, 40, 100, 1000
    kernel = fed.FSGLD(rows_model, num_local_steps=steps, batch_size=batch)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=kept,
        num_chains=many,
        chain_method="vectorized",
        progress_bar=False,
    )

    def run() -> None:
        mcmc.run(jax.random.key(0), silos)
        jax.block_until_ready(mcmc.get_samples())

    read = many * kept * steps * (batch or rows // 10) * (dim + 1) * 4
    return run, float(read)


def fit(patients: int) -> tuple[Callable, float]:
    silos = made_up(patients, 3, 20, trials=5, sd=0.7)

    def run() -> None:
        found = fed.fit(patients_model, silos, progress_bar=False).posterior
        print("   ", found.attrs["verdict"])

    return run, 0.0


def variational(silos: int, rounds: int = 400) -> tuple[Callable, float]:
    rows = data(10_000)
    scan = ours(fed.split(rows, by=np.repeat(np.arange(silos), 10_000 // silos)), rounds)
    own = 10_000 * (2 + 2 * DIM)  # each row's mean and log scale, and their slopes in theta
    moved = rounds * 4 * (own * (2 + 2 * 2 + 2) + sum(x.size for x in rows.values()))
    return (lambda: jax.block_until_ready(scan())), float(moved)


JOBS: dict[str, Callable[[], tuple[Callable, float]]] = {
    "SFVI, 1 silo, 10,000 rows": lambda: variational(1),
    "SFVI, 10,000 silos": lambda: variational(10_000),
    "FSGLD, 1,000 chains, 100,000 rows, batch 50": lambda: chains(100_000, 50),
    "FSGLD, 1,000 chains, 10,000 rows, all of a silo": lambda: chains(10_000, None),
    "fed.fit, 111 patients": lambda: fit(111),
    "fed.fit, 10,000 patients": lambda: fit(10_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fits and chains on JAX's device.")
    parser.add_argument("--only", default="", help="jobs whose name has this")
    args = parser.parse_args()
    peak = bandwidth()
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}, a copy moves {peak / 1e9:,.0f} GB/s")
    for name in [n for n in JOBS if args.only in n]:
        run, moved = JOBS[name]()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        share = f"{moved / 1e9:8.1f} GB {moved / peak / seconds[1]:6.1%}" if moved else ""
        print(f"{name:48} {seconds[0]:7.1f} {seconds[1]:7.2f} s {share}", flush=True)


if __name__ == "__main__":
    main()
