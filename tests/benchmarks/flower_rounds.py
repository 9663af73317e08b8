"""What a round costs with Flower.

Messages of 1e2, 1e4 and 1e6 floats to each of some silos and back, beside Flower's own empty round.

    python tests/benchmarks/flower_rounds.py [--silos 3] [--rounds 10] [--deployed]

Medians, after a round that is not counted. The silos echo, so that nothing but carrying is
measured. "In process" is :class:`InProcessGrid`; with `--deployed` also a SuperLink and nodes on
this machine, with TLS and node authentication: nodes of one lasting process, and Flower's
SuperNodes, which start a process for every message.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from flower_deployment import Deployment
from flower_standin import client, measured

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


def show(name: str, found: dict[str, float]) -> None:
    print(f"{name:<16}" + "".join(f"{1e3 * x:14.2f}" for x in found.values()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--deployed",
        action="store_true",
        help="a SuperLink and nodes on this machine, too: minutes",
    )
    args = parser.parse_args()
    names = [f"silo{i}" for i in range(args.silos)]
    print(
        f"ms a round, {args.silos} silos   "
        + "Flower empty".rjust(6)
        + "".join(f"{n:10.0e} floats"[-14:] for n in FLOATS)
    )
    show("in process", in_process(names, args.rounds))
    if args.deployed:
        show("lasting nodes", deployed(names, args.rounds, True))
        show("SuperNodes", deployed(names, max(args.rounds // 3, 2), False))
