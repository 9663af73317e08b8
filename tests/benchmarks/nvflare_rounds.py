"""What a round costs over NVFLARE: ours by size of message, beside NVFLARE's own empty round.

    python tests/benchmarks/nvflare_rounds.py [--rounds 30] [--sizes 100 10000 1000000]
    [--simulator] [--record NAME]

A server and three clients are provisioned and started on this machine (mutual TLS, loopback).
"Empty" is a plain controller's ``broadcast_and_wait`` of an empty Shareable to an executor that
replies with one, with NVFLARE's own periods and with ours. "Ours" is ``Transport.exchange`` of so
many float32 each way. Medians of rounds after the first two. `--simulator` times the same in
NVFLARE's simulator too.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from record import record

from numpyro_fed.engines import nvflare as carrier

HERE = Path(__file__).resolve().parent
NAMES = ["s0", "s1", "s2"]
RUN, MAKE_ECHO = (
    f"{HERE.parent / 'nvflare_sides.py'}:{function}" for function in ("time_rounds", "make_echo")
)


class EmptyController(Controller):
    """Nothing but NVFLARE: empty rounds, whose times it writes to ``result.bin``."""

    def __init__(self, rounds: int, period: float) -> None:
        super().__init__(task_check_period=period)
        self.rounds = rounds

    def start_controller(self, fl_ctx) -> None:
        pass

    def stop_controller(self, fl_ctx) -> None:
        pass

    def process_result_of_unknown_task(self, *args, **kwargs) -> None:
        pass

    def control_flow(self, abort_signal, fl_ctx) -> None:
        times = []
        for _ in range(self.rounds + 2):
            start = time.perf_counter()
            self.broadcast_and_wait(
                Task("empty", Shareable()),
                fl_ctx,
                targets=NAMES,
                min_responses=len(NAMES),
                abort_signal=abort_signal,
            )
            times.append(time.perf_counter() - start)
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        kept = Path(workspace.get_run_dir(fl_ctx.get_job_id())) / "result.bin"
        kept.write_text(json.dumps({"empty": times[2:]}))


class EmptyExecutor(Executor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        return make_reply(ReturnCode.OK)


def empty_job(folder: Path, rounds: int, period: float | None) -> Path:
    """As ours, with another controller and executor.

    Without a period, all periods are NVFLARE's own.
    """
    carrier.write_job(folder, "none:none", "none:none", NAMES)
    server = folder / "server" / "config" / "config_fed_server.json"
    client = folder / "silo" / "config" / "config_fed_client.json"
    told, asked = json.loads(server.read_text()), json.loads(client.read_text())
    arguments = {"rounds": rounds, "period": 0.2 if period is None else period}
    told["workflows"] = [
        {"id": "empty", "path": "nvflare_rounds.EmptyController", "args": arguments}
    ]
    asked["executors"] = [
        {"tasks": ["empty"], "executor": {"path": "nvflare_rounds.EmptyExecutor", "args": {}}}
    ]
    if period is None:
        del told["server"], asked["default_task_fetch_interval"]
    server.write_text(json.dumps(told))
    client.write_text(json.dumps(asked))
    return folder


def row_of(name: str, times: list[float]) -> dict[str, Any]:
    """Return a row of the table, in seconds; print it."""
    row = {"round": name, "median": statistics.median(times), "low": min(times), "high": max(times)}
    print("{round:<40} {median:8.3f} s   ({low:.3f} to {high:.3f})".format_map(row), flush=True)
    return {**row, "rounds": len(times)}


def deployed(rounds: int, sizes: list[int], directory: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield each kind of round and its seconds."""
    sys.path.insert(0, str(HERE.parent))
    from nvflare_deployment import Deployment, free_port, provisioned

    kits = provisioned(directory / "ours", free_port(), allowed=["nvflare_rounds."])
    deployment = Deployment(kits)
    try:
        for site in ("localhost", *NAMES):
            deployment.start(site)
        deployment.wait_for(NAMES)

        def timed(job: Path) -> dict[str, list[float]]:
            status, result = deployment.fit(job, limit=550)
            if result is None:
                raise RuntimeError(f"{job.name}: {status}")
            return json.loads(result)

        stock = empty_job(directory / "stock", min(rounds, 10), None)
        yield "NVFLARE's empty round, its own periods", timed(stock)["empty"]
        empty = empty_job(directory / "empty", rounds, 0.05)
        yield "NVFLARE's empty round, periods of 0.05 s", timed(empty)["empty"]
        arguments = {"sizes": sizes, "rounds": rounds}
        job = carrier.write_job(directory / "job", RUN, MAKE_ECHO, NAMES, run_arguments=arguments)
        for size, times in timed(job).items():
            yield f"{int(size):,} floats", times
    finally:
        for site in list(deployment.processes):
            deployment.kill(site)


def simulated(rounds: int, sizes: list[int], directory: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield each kind of round in the simulator and its seconds."""
    arguments = {"sizes": sizes, "rounds": rounds}
    result = carrier.simulate(
        RUN, MAKE_ECHO, NAMES, directory / "simulator", run_arguments=arguments, timeout=550
    )
    for size, times in json.loads(result).items():
        yield f"{int(size):,} floats, simulator", times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=30, help="of each kind, after two that are not counted"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[100, 10_000, 1_000_000], help="numbers of float32"
    )
    parser.add_argument("--simulator", action="store_true", help="in NVFLARE's simulator as well")
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    start, kinds = time.time(), [deployed, simulated] if args.simulator else [deployed]
    with tempfile.TemporaryDirectory() as temporary:
        rows = [
            row_of(*found)
            for kind in kinds
            for found in kind(args.rounds, args.sizes, Path(temporary))
        ]
    if args.record:
        record(args.record, rows, start)
