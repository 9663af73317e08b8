"""Many silos: in this process (inline), and as clients of Flower in this process.

The same draws, seconds and memory of each.

    python tests/benchmarks/many_silos.py [--silos 100] [--record NAME]

It needs numpyro-fed[flower].
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from jax import random
from numpyro.infer import MCMC
from record import record

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_models import linear

import numpyro_fed as fed
from numpyro_fed.engines.flower import Flower, InProcessGrid, client_app
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect


def made_up(num: int) -> fed.Silos:
    """Silos of 5 to 40 rows."""
    rng = np.random.default_rng(0)
    data = {}
    for i in range(num):
        x = rng.normal(size=(int(rng.integers(5, 41)), 2)).astype(np.float32)
        data[f"s{i:03}"] = {
            "x": x,
            "y": (x @ [1.0, -0.5] + 0.5 * rng.normal(size=len(x))).astype(np.float32),
        }
    return fed.Silos(data)


def memory() -> float:
    """Return the most memory that this process has had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    silos, runs = (
        made_up(args.silos),
        {"num_warmup": 0, "num_samples": args.rounds, "num_chains": 2, "progress_bar": False},
    )
    began, before, start = time.time(), memory(), time.perf_counter()
    mcmc = MCMC(fed.FSGLD(linear), chain_method="vectorized", **runs)
    mcmc.run(random.key(0), silos)
    expected = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
    row = {"silos": args.silos, "rounds": args.rounds, "seconds": time.perf_counter() - start}
    row["mib"] = memory() - before
    before, start = memory(), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        sides = {}
        for name in silos.names:
            rows = {k: np.asarray(v) for k, v in silos[name].items()}
            sides[name] = SiloSide(
                fed.Silos({name: rows}), linear, Path(place) / name, own_keys=False
            )
        grid = InProcessGrid([client_app(lambda _, side=side: side) for side in sides.values()])
        remote = fed.RemoteMCMC(fed.FSGLD(linear), **runs)
        remote.run(random.key(0), connect(Flower(grid, silos.names), linear))
        row["flower_seconds"] = time.perf_counter() - start
    row["flower_mib"] = memory() - before
    got = np.asarray(remote.get_samples(group_by_chain=True)["beta"])
    row["apart"] = float(np.abs(got - expected).max() / np.abs(expected).max())
    print(
        "inline {seconds:.1f} s, {mib:.0f} MiB more than before; Flower's clients "
        "{flower_seconds:.1f} s, {flower_mib:.0f} MiB; largest difference of a draw, relative, "
        "{apart:.1e}".format_map(row)
    )
    if args.record:
        record(args.record, [row], began)


if __name__ == "__main__":
    main()
