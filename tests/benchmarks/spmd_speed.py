"""What JAX processes buy.

FSGLD's rounds a second with two silos in one process, and in two processes with one silo each.

    python tests/benchmarks/spmd_speed.py [--rounds 60] [--stay 40 200] [--record NAME]

Task b (logistic regression, d = 123, 26,000 rows) in two silos, all rows in each of so many
(`--stay`) local steps, four chains at distinct silos. "MCMC" is :class:`numpyro.infer.MCMC` in one
process. Times are of rounds alone, the second of two runs. Pinned, each process is held to a core
of its own, so that one process has one core. The goal is 1.5 times the rounds by two processes.
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from record import record

GOAL = 1.5  # of two processes over one


def one(process: int, processes: int, port: str, rounds: int, stay: int, in_mcmc: bool) -> None:
    from numpyro_fed.engines import spmd

    if not in_mcmc:
        spmd.initialize(f"127.0.0.1:{port}", processes, process)
    import jax
    from numpyro.infer import MCMC
    from tasks import logistic_model, task_b

    import numpyro_fed as fed

    pooled = task_b().silos.pooled
    rows = np.arange(len(pooled["y"]))
    silos = fed.split(
        {k: np.asarray(v) for k, v in pooled.items()}, by=np.where(rows % 2, "one", "two")
    )
    kernel = fed.FSGLD(logistic_model, num_local_steps=stay, selection="distinct")
    settings = {"num_warmup": 0, "num_samples": rounds, "num_chains": 4, "progress_bar": False}
    if in_mcmc:
        mcmc, where = MCMC(kernel, chain_method="vectorized", **settings), silos
    else:
        where = spmd.connect(spmd.dealt(silos, process, processes))
        mcmc = fed.RemoteMCMC(kernel, **settings)
    mcmc.run(jax.random.key(0), where)
    start = time.perf_counter()
    mcmc.run(jax.random.key(1), where)
    mean = float(np.asarray(mcmc.get_samples()["beta"]).mean())
    if process == 0:
        print(f"{rounds / (time.perf_counter() - start):.3f} {mean:.6f}", flush=True)


def measured(processes: int, rounds: int, stay: int, pinned: bool, in_mcmc: bool = False) -> float:
    """Return rounds a second, of all chains together."""
    from numpyro_fed.engines.spmd import _free_port

    own = [
        "--port",
        str(_free_port()),
        "--rounds",
        str(rounds),
        "--stay",
        str(stay),
        "--processes",
        str(processes),
        *["--mcmc"] * in_mcmc,
    ]
    cores = sorted(os.sched_getaffinity(0))
    started = []
    for i in range(processes):
        pin = ["taskset", "-c", str(cores[i % len(cores)])] if pinned else []
        command = [*pin, sys.executable, __file__, "--process", str(i), *own]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
    outputs = [p.communicate()[0] for p in started]
    if any(p.returncode for p in started):
        raise RuntimeError(f"a process failed: exit codes {[p.returncode for p in started]}")
    rate, mean = outputs[0].split()[-2:]
    name = "MCMC, one process" if in_mcmc else f"{processes} process" + "es" * (processes > 1)
    print(f"{name:<20} {float(rate):8.2f} rounds/s of 4 chains, mean {mean}", flush=True)
    return float(rate)


def row_of(rounds: int, stay: int, pinned: bool) -> dict[str, Any]:
    """Return a row of the table: rounds a second; print it."""
    setting = f"T = {stay}" + ", pinned" * pinned
    print(setting, flush=True)
    mcmc = measured(1, rounds, stay, pinned, in_mcmc=True)
    one, two = (measured(n, rounds, stay, pinned) for n in (1, 2))
    goal = "met" if two >= GOAL * one else "**missed**"
    print(f"two processes against one: {two / one:.2f}, {goal}", flush=True)
    return {
        "setting": setting,
        "mcmc": mcmc,
        "one": one,
        "two": two,
        "ratio": two / one,
        "goal": goal,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--stay", type=int, nargs="+", default=[40, 200], help="local steps")
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    parser.add_argument("--mcmc", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        one(args.process, args.processes, args.port, args.rounds, args.stay[0], args.mcmc)
    else:
        start = time.time()
        rows = [row_of(args.rounds, t, pinned) for t in args.stay for pinned in (True, False)]
        if args.record:
            record(args.record, rows, start)
