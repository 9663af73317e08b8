"""Every algorithm over every engine.

How far draws and parameters are from those of the inline fit, and seconds.

    python tests/benchmarks/engines.py [--rounds 50] [--engines loopback spmd2 spmd4 wire flower
    nvflare] [--algorithms FSGLD push-sum ...] [--record NAME]

Four silos, a model with a latent for each patient (tests/every_fit.py), four chains (of push-sum
and gossip the four nodes of one network); variational fits by their global parameters and losses. A
cell is the largest difference to the inline fit of the same seed over all rounds, relative to the
largest entry, and the seconds of the fit with its setup and compilation (programs that
another process has compiled come from JAX's cache on disk); those of one engine follow each other
in one process. Above 1e-5 the exit code is 1. ``--keep`` leaves results in a folder, and
what is there is not run again; with ``--show`` nothing is run, and what is not there is said to be
missing.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import record

sys.path.insert(0, str(Path(__file__).parents[1]))

LIMIT = 1e-5
# processes compile the same programs: of each the first alone
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "numpyro_fed_engines")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
ENGINES = {
    "loopback": "Loopback",
    "spmd2": "2 JAX processes",
    "spmd4": "4 JAX processes",
    "wire": "bytes",
    "flower": "Flower, one process",
    "nvflare": "NVFLARE's simulator",
}


def inline_rounds(rounds: int, algorithms: list[str], folder: Path) -> dict:
    import every_fit

    return {name: every_fit.fitted(name, every_fit.silos(), rounds) for name in algorithms}


def loopback(rounds: int, algorithms: list[str], folder: Path) -> dict:
    import every_fit

    import numpyro_fed as fed

    silos = every_fit.silos()
    return {
        name: every_fit.fitted(name, fed.RemoteSilos(silos, fed.Loopback(silos)), rounds)
        for name in algorithms
    }


def one_process(
    process: int, processes: int, port: str, rounds: int, algorithms: list[str], out: str
) -> None:
    """Run a process's part; the silos are dealt so that they keep their order."""
    from numpyro_fed.engines import spmd

    spmd.initialize(f"127.0.0.1:{port}", processes, process)
    import every_fit

    each = len(every_fit.NAMES) // processes
    own = every_fit.silos(every_fit.NAMES[process * each : (process + 1) * each])
    found = {name: every_fit.fitted(name, spmd.connect(own), rounds) for name in algorithms}
    if process == 0:
        Path(out).write_bytes(every_fit.packed(found))


def processes(count: int, rounds: int, algorithms: list[str], folder: Path) -> dict:
    import every_fit

    from numpyro_fed.engines import spmd

    out = folder / f"{count}.npz"
    own = [
        "--processes",
        str(count),
        "--port",
        str(spmd._free_port()),
        "--rounds",
        str(rounds),
        "--out",
        str(out),
    ]
    own += ["--algorithms", *algorithms]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with (folder / f"{count}.log").open("w") as log:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--process", str(i), *own], env=environment, stderr=log
            )
            for i in range(count)
        ]
        codes = [p.wait() for p in started]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {(folder / f'{count}.log').read_text()[-600:]}")
    return every_fit.unpacked(out.read_bytes())


class InProcess:
    """A transport within this process."""

    def __init__(self, folder: Path) -> None:
        import every_fit

        self.names = every_fit.NAMES
        self.sides = {name: every_fit.make_side(name, folder / name) for name in self.names}

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        return {name: self.sides[name].answer(data) for name, data in messages.items()}


def wire(rounds: int, algorithms: list[str], folder: Path) -> dict:
    import every_fit

    return every_fit.over(InProcess(folder), rounds, algorithms)


def flower(rounds: int, algorithms: list[str], folder: Path) -> dict:
    import every_fit

    from numpyro_fed.engines.flower import Flower, InProcessGrid, client_app

    apps = [client_app(lambda _, n=n: every_fit.make_side(n, folder / n)) for n in every_fit.NAMES]
    return every_fit.over(Flower(InProcessGrid(apps), every_fit.NAMES), rounds, algorithms)


def nvflare(rounds: int, algorithms: list[str], folder: Path) -> dict:
    import every_fit

    from numpyro_fed.engines.nvflare import simulate

    arguments = {"rounds": rounds, "algorithms": algorithms}
    data = simulate(
        "every_fit:run",
        "every_fit:make_side",
        every_fit.NAMES,
        folder,
        run_arguments=arguments,
        patience=600.0,
    )
    return every_fit.unpacked(data)


def over_engine(engine: str, rounds: int, algorithms: list[str]) -> dict | str:
    """Return the results of all fits over one engine, or why there are none."""
    kinds = {
        "at hand": inline_rounds,
        "loopback": loopback,
        "wire": wire,
        "flower": flower,
        "nvflare": nvflare,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            if engine.startswith("spmd"):
                return processes(int(engine[4:]), rounds, algorithms, Path(folder))
            return kinds[engine](rounds, algorithms, Path(folder))
        except ImportError as error:
            return f"not installed ({str(error).rpartition(': ')[2]})"
        except Exception as error:  # the other engines have their turn
            return f"failed ({type(error).__name__}: {' '.join(str(error).split())[-300:]})"


def difference(found: dict, expected: dict) -> float:
    """Largest difference over all arrays, each relative to its largest entry."""
    names = [k for k in found if k != "seconds"]
    if any(found[k].shape != expected[k].shape for k in names):
        return np.inf
    apart = [np.abs(found[k] - expected[k]).max() / np.abs(expected[k]).max() for k in names]
    return float(np.nan_to_num(max(apart), nan=np.inf))


def row_of(name: str, found: dict[str, dict | str], expected: dict) -> tuple[dict[str, Any], bool]:
    """Return a row of the table, and whether it is as it should be; print it."""
    row, cells, good = {"algorithm": name, "hand_s": float(expected[name]["seconds"])}, [], True
    for engine, fits in found.items():
        if isinstance(fits, str) or name not in fits:
            cells.append(fits if isinstance(fits, str) else "not run")
            good &= cells[-1].startswith("not installed")
            continue
        apart, seconds = difference(fits[name], expected[name]), float(fits[name]["seconds"])
        row |= {engine: apart, f"{engine}_s": seconds}
        cells.append(f"{'bit for bit' if apart == 0 else f'{apart:.1e}'} ({seconds:.0f} s)")
        good &= apart <= LIMIT
    print(f"| {name} | {row['hand_s']:.0f} s | " + " | ".join(cells) + " |")
    return row, good


def collected(
    rounds: int, engines: list[str], algorithms: list[str], keep: Path | None, show: bool
) -> dict[str, dict | str]:
    """Return the results of the inline fits and of all engines, from a folder or new."""
    import every_fit

    found: dict[str, dict | str] = {}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    for engine in ("at hand", *engines):
        place = None if keep is None else keep / f"{engine} {rounds}.npz"
        before = (
            {} if place is None or not place.exists() else every_fit.unpacked(place.read_bytes())
        )
        left = [name for name in algorithms if name not in before]
        found[engine] = before
        if show or not left:
            continue
        print(f"{engine} ...", file=sys.stderr, flush=True)
        new = over_engine(engine, rounds, left)
        found[engine] = new if isinstance(new, str) else {**before, **new}
        if place is not None and isinstance(new, dict):
            place.write_bytes(every_fit.packed({**before, **new}))
    return found


def main(args: argparse.Namespace) -> int:
    start, rounds, engines = time.time(), args.rounds, args.engines
    found = collected(rounds, engines, args.algorithms, args.keep, args.show)
    expected = found.pop("at hand")
    if isinstance(expected, str):
        raise RuntimeError(f"at hand: {expected}")
    print(
        f"| {rounds} rounds | at hand | " + " | ".join(ENGINES[engine] for engine in engines) + " |"
    )
    print("|---" * (len(engines) + 2) + "|")
    rows = [row_of(name, found, expected) for name in args.algorithms]
    print(
        "| SGLD: needs all rows at one place, so that DSGLD is in its stead | runs |"
        + " cannot |" * len(engines)
    )
    if args.record:
        record(args.record, [row for row, _ in rows], start)
    return 0 if all(good for _, good in rows) else 1


if __name__ == "__main__":
    import every_fit as fits

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--algorithms", nargs="+", choices=fits.FITS, default=list(fits.FITS))
    parser.add_argument("--keep", type=Path, help="a folder")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        one_process(args.process, args.processes, args.port, args.rounds, args.algorithms, args.out)
    else:
        sys.exit(main(args))
