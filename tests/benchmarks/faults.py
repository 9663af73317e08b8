"""Silos that are killed at random points, and servers: are the draws those of an undisturbed run?

Each silo is a process of its own, with its rows and its folder; messages go through pipes. In each trial one is ended by SIGKILL, at a random message, before it was
asked, while it answers, or after; a new process with the same folder takes its place. In further trials the server goes away between two rounds, and another goes on
from its checkpoint.

    python tests/benchmarks/faults.py --trials 20
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from jax import random

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_models import intercepts, intercepts_silos

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect

ROUNDS, CHAINS = 30, 2


def silos() -> fed.Silos:
    """Groups with intercepts of their own, so that silos have a state to lose."""
    pooled = intercepts_silos()
    data = {name: {k: np.asarray(v) for k, v in pooled[name].items()} for name in pooled.names}
    return fed.Silos(data, rows=dict(pooled.group), index=dict(pooled.index))


def one_side(name: str, folder: str) -> SiloSide:
    """One silo's side."""
    every = silos()
    rows = {name: {k: np.asarray(v) for k, v in every[name].items()}}
    return SiloSide(fed.Silos(rows, rows=dict(every.group), index=dict(every.index)), intercepts, folder)


def serve(name: str, folder: str) -> None:
    """A silo's process: lengths and messages from its input, answers to its output."""
    side = one_side(name, folder)
    while head := sys.stdin.buffer.read(8):
        answer = side.answer(sys.stdin.buffer.read(int.from_bytes(head, "little")))
        sys.stdout.buffer.write(len(answer).to_bytes(8, "little") + answer)
        sys.stdout.buffer.flush()


class Pipes:
    """A messenger over pipes, one of whose silos is killed at one message."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder, self.names, self.made = folder, names, 0
        self.processes = {name: self.start(name) for name in names}
        self.victim, self.at, self.delay, self.kills = "", -1, 0.0, 0

    def start(self, name: str) -> subprocess.Popen:
        command = [sys.executable, __file__, "--serve", name, "--folder", str(self.folder / name)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        self.made += 1
        out = {}
        for name, data in messages.items():
            if name == self.victim and self.made >= self.at and not self.kills:
                self.kill(name, data)
            out[name] = self.ask(name, data)
        return out

    def ask(self, name: str, data: bytes) -> bytes:
        process = self.processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
        return process.stdout.read(int.from_bytes(process.stdout.read(8), "little"))

    def kill(self, name: str, data: bytes) -> None:
        """While it answers, after some milliseconds; it may have answered, or not begun."""
        process = self.processes[name]
        assert process.stdin is not None
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
        time.sleep(self.delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.kills += 1
        self.processes[name] = self.start(name)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def drawn(remote: fed.RemoteSilos, checkpoint: Path | None = None) -> np.ndarray:
    """Draws of the run."""
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(intercepts),
        num_warmup=0,
        num_samples=ROUNDS,
        num_chains=CHAINS,
        progress_bar=False,
        checkpoint=checkpoint,
        checkpoint_every=4,
    )
    mcmc.run(random.key(0), remote)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])


class Gone(Exception):
    """The server is no more."""


def server_dies(messenger: Pipes, at: int, folder: Path) -> np.ndarray:
    """Draws of a run whose server goes away at a message, and of the one that goes on."""
    original = messenger.exchange
    made = 0

    def exchange(messages: dict[str, bytes]) -> dict[str, bytes]:
        nonlocal made
        made += 1
        out = original(messages)
        if made == at:
            raise Gone
        return out

    messenger.exchange = exchange  # type: ignore[method-assign]
    with contextlib.suppress(Gone):
        drawn(connect(messenger, intercepts), folder / "checkpoint")
    messenger.exchange = original  # type: ignore[method-assign]
    return drawn(connect(messenger, intercepts), folder / "checkpoint")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder)
        return 0
    rng, every = np.random.default_rng(args.seed), silos()
    expected = drawn(fed.RemoteSilos(every, fed.Loopback(every)))
    equal = {"a silo": 0, "the server": 0}
    for trial in range(args.trials):
        with tempfile.TemporaryDirectory() as place:
            messenger = Pipes(Path(place), every.names)
            who = "the server" if trial % 4 == 3 else "a silo"
            at = int(rng.integers(3, 16 + ROUNDS))
            try:
                if who == "a silo":
                    messenger.victim, messenger.at = str(rng.choice(every.names)), at
                    messenger.delay = float(rng.choice([0.0, 0.002, 0.01, 0.1]))
                    got = drawn(connect(messenger, intercepts))
                    assert messenger.kills == 1, "nobody was killed"
                else:
                    got = server_dies(messenger, at, Path(place))
            finally:
                messenger.end()
            same = bool((got == expected).all())
            equal[who] += same
            print(f"trial {trial}: {who} at message {at}, draws equal: {same}", flush=True)
    trials = {"a silo": args.trials - args.trials // 4, "the server": args.trials // 4}
    for who, n in trials.items():
        print(f"{who} killed: {equal[who]} of {n} runs have the draws of the undisturbed one, bit for bit")
    return 0 if equal == trials else 1


if __name__ == "__main__":
    sys.exit(main())
