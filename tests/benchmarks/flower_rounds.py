"""What a round costs with Flower.

Messages of 1e2, 1e4 and 1e6 floats to each of some silos and back, beside Flower's own empty round.

    python tests/benchmarks/flower_rounds.py [--silos 3] [--rounds 10] [--deployed] [--record NAME]

Medians, after a round that is not counted. The silos echo, so that nothing but carrying is
measured. "In process" is :class:`InProcessGrid`; with `--deployed` also a SuperLink and nodes on
this machine, with TLS and node authentication: nodes of one lasting process, one such node, and
Flower's SuperNodes, which start a process for every message.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from flower_deployment import Deployment
from flower_standin import client, measured
from record import record

from numpyro_fed.engines.flower import InProcessGrid, client_app

FLOATS = (100, 10_000, 1_000_000)


def in_process(names: list[str], rounds: int) -> dict[str, float]:
    def app(name: str):
        own = client_app(
            lambda context: type("Echo", (), {"name": name, "answer": lambda self, data: data})()
        )
        own._registered_funcs["query.empty"] = client._registered_funcs["query.empty"]
        return own

    return measured(InProcessGrid([app(name) for name in names]), names, FLOATS, rounds)


def deployed(names: list[str], rounds: int, lasting: bool) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as root,
        Deployment(Path(root), names, lasting=lasting) as running,
    ):
        out = running.run("measuring", rounds=rounds, floats=" ".join(map(str, FLOATS)))
        return running.result(out, rounds, 1500)["medians"]


def row_of(nodes: str, silos: int, found: dict[str, float]) -> dict[str, Any]:
    """Return a row of the table, in milliseconds; print it."""
    row = {f"ms_{name}": 1e3 * x for name, x in found.items()}
    print(f"{nodes:<14} {silos:3}" + "".join(f"{x:14.2f}" for x in row.values()), flush=True)
    return {"nodes": nodes, "silos": silos, **row}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--deployed",
        action="store_true",
        help="a SuperLink and nodes on this machine, too: minutes",
    )
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    start, names = time.time(), [f"silo{i}" for i in range(args.silos)]
    print("ms a round    silos  Flower empty" + "".join(f"{n:7.0e} floats" for n in FLOATS))
    rows = [row_of("in process", args.silos, in_process(names, args.rounds))]
    if args.deployed:
        for nodes, own, rounds in (
            ("lasting nodes", names, args.rounds),
            ("lasting nodes", names[:1], args.rounds),
            ("SuperNodes", names, max(args.rounds // 3, 2)),
        ):
            found = deployed(own, rounds, nodes == "lasting nodes")
            rows.append(row_of(nodes, len(own), found))
    if args.record:
        record(args.record, rows, start)
