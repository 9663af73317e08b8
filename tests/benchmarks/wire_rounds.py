"""Cost of the wire contract for a message, in one process and without a network.

Beside it is the same call without bytes. A silo receives n floats, which it keeps (on disk, over
the wire); and FSGLD's rounds of two chains on a small model.

    python tests/benchmarks/wire_rounds.py [--record NAME]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax import random
from record import record

sys.path.insert(0, str(Path(__file__).parents[1]))

import carried_fit
from small_models import linear

import numpyro_fed as fed
from numpyro_fed.engines.wire import connect
from numpyro_fed.mcmc.remote import TellLocal
from numpyro_fed.rounds.worker import Call

# axes that messages have in two dimensions: others are refused
SHAPES: tuple[tuple[int, ...], ...] = ((25, 4), (156, 8, 8), (244, 8, 8, 8, 8))


class InProcess:
    """A transport within this process."""

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self.names = names
        self.sides = {name: carried_fit.make_side(name, folder / name) for name in names}

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        return {name: self.sides[name].answer(data) for name, data in messages.items()}


def told(silos: fed.RemoteSilos, shape: tuple[int, ...], repeats: int) -> float:
    """Median milliseconds of a message of an array of floats to one silo."""
    message, times = random.normal(random.key(0), shape), []
    jax.block_until_ready(message)
    for _ in range(repeats):
        start = time.perf_counter()
        slot = silos.carrier.new_slot()
        silos.ask([Call(0, TellLocal(), random.key(0), message, None, slot)])
        times.append(time.perf_counter() - start)
        silos.carrier.forget([slot])
    return 1e3 * float(np.median(times))


def rounds(silos: fed.RemoteSilos, kernel: fed.FSGLD, num: int) -> float:
    """Milliseconds of a round of two chains."""
    mcmc = fed.RemoteMCMC(kernel, num_warmup=0, num_samples=num, num_chains=2, progress_bar=False)
    mcmc.run(random.key(0), silos)
    start = time.perf_counter()
    mcmc.run(random.key(1), silos)
    return 1e3 * (time.perf_counter() - start) / num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    start, rows, every = time.time(), [], carried_fit.silos()
    with tempfile.TemporaryDirectory() as folder:
        there = fed.RemoteSilos(every, fed.Loopback(every))
        wired = connect(InProcess(every.names, Path(folder)), linear)
        for shape in SHAPES:
            plain, bytewise = (told(silos, shape, args.repeats) for silos in (there, wired))
            what = f"{np.prod(shape):,} floats told"
            rows.append({"what": what, "plain": plain, "wire": bytewise})
        kernels = [fed.FSGLD(linear), fed.FSGLD(linear)]
        plain, bytewise = (
            rounds(s, k, args.rounds) for s, k in zip((there, wired), kernels, strict=True)
        )
        rows.append({"what": "a round of two chains", "plain": plain, "wire": bytewise})
    print("ms, median             without bytes   over the wire")
    for row in rows:
        print("{what:<22} {plain:>13.2f} {wire:>15.2f}".format_map(row))
    if args.record:
        record(args.record, rows, start)


if __name__ == "__main__":
    main()
