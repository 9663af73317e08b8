"""Kill silos and servers at random moments, some with a full disk, and compare the draws.

Server and silos are processes of their own, which speak over sockets. In each trial a silo, the
server, or both are ended by SIGKILL at a random moment, and started again with the folders of
before. In some the disk of the server, or of one silo, is full from a random moment on, for some
seconds. A trial ends well if the draws are those of the undisturbed run, bit for bit. It also ends
well if the run's error says that it did not end, and its draws are the first of these.

    python tests/benchmarks/faults.py [--trials 40] [--record NAME]
"""

import argparse
import contextlib
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from record import record

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_models import intercepts, intercepts_silos

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect

CHAINS = 2
NAMES: tuple[str, ...] = ("0", "1", "2")
PATIENCE = 20.0  # seconds that a server waits for a silo
SAME = "the undisturbed draws"
SLOWLY = 0.03  # seconds that a message takes, so that moments are many


def silos() -> fed.Silos:
    """Return groups with intercepts of their own, so that silos have a state to lose."""
    pooled = intercepts_silos()
    data = {name: {k: np.asarray(v) for k, v in pooled[name].items()} for name in pooled.names}
    return fed.Silos(data, rows=dict(pooled.group), index=dict(pooled.index))


def process(work: Callable[[], None], log: Path) -> int:
    """Fork: what is imported is imported once. No program of JAX has run here."""
    pid = os.fork()
    if pid:
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        work()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def received(link: socket.socket) -> bytes:
    """One message: its length, and itself."""
    with link.makefile("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        data = stream.read(size)
    if not data or len(data) < size:
        raise ConnectionError("broken off")
    return data


def sent(link: socket.socket, data: bytes) -> None:
    link.sendall(len(data).to_bytes(8, "little") + data)


def serve(name: str, place: Path, folder: Path) -> None:
    """Answer as a silo; where it cannot go on it ends, and is started again."""
    every, parent = silos(), os.getppid()
    rows = {name: {k: np.asarray(v) for k, v in every[name].items()}}
    side = SiloSide(
        fed.Silos(rows, rows=dict(every.group), index=dict(every.index)),
        intercepts,
        folder,
        own_keys=False,
    )
    with socket.socket(socket.AF_UNIX) as door:
        place.unlink(missing_ok=True)
        door.bind(str(place))
        door.listen()
        door.settimeout(1.0)
        while os.getppid() == parent:  # else nobody is there to end it
            try:
                link, _ = door.accept()
            except TimeoutError:
                continue
            link.settimeout(PATIENCE)
            with link, contextlib.suppress(ConnectionError):
                sent(link, side.answer(received(link)))


class Sockets:
    """A transport that tries until a silo answers, or for some seconds."""

    def __init__(self, folder: Path) -> None:
        self.names, self.folder = NAMES, folder

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        with (self.folder / "messages").open("ab") as count:
            count.write(b".")
        time.sleep(SLOWLY)
        return {name: self.ask(name, data) for name, data in messages.items()}

    def ask(self, name: str, data: bytes) -> bytes:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as link:
                    link.settimeout(PATIENCE)
                    link.connect(str(self.folder / f"{name}.door"))
                    sent(link, data)
                    return received(link)
            except (ConnectionError, FileNotFoundError, TimeoutError) as error:
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"silo {name!r} has not answered for {PATIENCE:.0f} seconds"
                    ) from error
                time.sleep(0.1)


def draw(remote: fed.RemoteSilos, out: Path, rounds: int, checkpoint: Path | None = None) -> None:
    """Draws of a run, in a file, which is whole or not there; what it warns of in another."""
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(intercepts),
        num_warmup=0,
        num_samples=rounds,
        num_chains=CHAINS,
        progress_bar=False,
        checkpoint=checkpoint,
        checkpoint_every=4,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), remote)
    out.with_suffix(".txt").write_text("\n".join(str(w.message) for w in said))
    np.save(out.with_suffix(".new.npy"), np.asarray(mcmc.get_samples(group_by_chain=True)["mu"]))
    out.with_suffix(".new.npy").rename(out)


def undisturbed(out: Path, rounds: int) -> None:
    every = silos()
    draw(fed.RemoteSilos(every, fed.Loopback(every)), out, rounds)


class Disk:
    """Folder whose disk is filled.

    It is a small file system of its own where one may be mounted. Otherwise no process may write
    files there.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True
        )
        self.mounted = mounted.returncode == 0

    def limit(self, pid: int, full: bool) -> None:
        """Change what a process may write, where nothing is mounted."""
        if not self.mounted:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))

    def fill(self, pid: int) -> None:
        self.limit(pid, True)
        if self.mounted:
            with (
                contextlib.suppress(OSError),
                (self.place / "ballast").open("wb", buffering=0) as out,
            ):
                while True:
                    out.write(bytes(4096))

    def free(self, pid: int) -> None:
        self.limit(pid, False)
        (self.place / "ballast").unlink(missing_ok=True)

    def end(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", self.place], check=True)


class Trial:
    """Processes of a run, and what is done to them.

    :param messages: of an undisturbed run.
    """

    def __init__(self, place: Path, rounds: int, messages: int, rng: np.random.Generator) -> None:
        self.place, self.rounds, self.messages, self.rng = place, rounds, messages, rng
        self.made: list[str] = []  # what was done to it
        self.disks = {who: Disk(place / f"disk of {who}") for who in ("server", *NAMES)}
        self.pids = {who: self.start(who) for who in ("server", *NAMES)}

    def start(self, who: str) -> int:
        folder, log = self.disks[who].place, self.place / f"{who}.log"
        if who == "server":

            def run() -> None:
                draw(
                    connect(Sockets(self.place), intercepts),
                    self.place / "draws.npy",
                    self.rounds,
                    folder / "checkpoint",
                )

            return process(run, log)
        return process(lambda: serve(who, self.place / f"{who}.door", folder), log)

    def ended(self, who: str) -> bool:
        """Whether a process has; it is then waited for."""
        if self.pids[who] and os.waitpid(self.pids[who], os.WNOHANG)[0]:
            self.pids[who] = 0
        return not self.pids[who]

    def count(self) -> int:
        """Messages so far."""
        place = self.place / "messages"
        return place.stat().st_size if place.exists() else 0

    def kill(self, who: str) -> None:
        if not self.ended(who):
            self.made.append(f"{who} killed")
            os.kill(self.pids[who], signal.SIGKILL)
            os.waitpid(self.pids[who], 0)
            self.pids[who] = 0

    def go(self, victims: list[str], full: str | None) -> None:
        """Run until the server has ended for good.

        Every process that ended is started again, a server four times.
        """
        begin, starts, freed = time.monotonic(), 0, 0.0
        kills = [(self.rng.uniform(0, self.messages), who) for who in victims]
        fill = math.inf if full is None else self.rng.uniform(0, 0.8 * self.messages)
        while time.monotonic() < begin + 400:
            made = self.count()
            for kill in [k for k in kills if k[0] < made]:
                kills.remove(kill)
                time.sleep(self.rng.uniform(0, 2 * SLOWLY))
                self.kill(kill[1])
            if full and fill < made and not self.ended(full):
                self.disks[full].fill(self.pids[full])
                self.made.append(f"disk of {full} full")
                fill, freed = math.inf, time.monotonic() + self.rng.uniform(0.5, 8.0)
            if full and freed and freed < time.monotonic():
                self.disks[full].free(self.pids[full] or os.getpid())
                freed = 0.0
            for who in NAMES:
                if self.ended(who):
                    self.pids[who] = self.start(who)
                    time.sleep(0.2)
            if self.ended("server"):
                if (self.place / "draws.npy").exists():
                    return
                starts += 1
                if starts > 4:
                    return
                self.pids["server"] = self.start("server")
            time.sleep(0.01)

    def outcome(self, expected: np.ndarray) -> str:
        """Return the outcome of the trial."""
        place = self.place / "draws.npy"
        if not place.exists():
            log = (self.place / "server.log").read_text().strip().splitlines()
            return (
                f"refused: {log[-1]}"
                if log and log[-1].startswith(("ValueError", "RuntimeError", "SiloError"))
                else f"NO WORDS: {log[-1:]}"
            )
        got = np.load(place)
        if got.shape == expected.shape:
            return SAME if (got == expected).all() else "WRONG DRAWS"
        said = place.with_suffix(".txt").read_text()
        same = "are kept" in said and (got == expected[:, : got.shape[1]]).all()
        return f"the first {got.shape[1]}, in words: {said[-200:]}" if same else "WRONG DRAWS"

    def end(self) -> None:
        for who in self.pids:
            self.kill(who)
        for disk in self.disks.values():
            disk.end()


def one_trial(
    number: int, folder: Path, rounds: int, messages: int, rng: np.random.Generator
) -> tuple[Trial, dict[str, Any]]:
    """Make a trial; return it, and what was done to it for how many seconds."""
    silo, start = str(rng.choice(NAMES)), time.monotonic()
    folder.mkdir()
    victims = [] if number < 0 else [[silo], ["server"], [silo, "server"]][number % 3]
    full = (
        None
        if number < 0 or number % 4 != 3
        else ("server", str(rng.choice(NAMES)))[number // 4 % 2]
    )
    trial = Trial(folder, rounds, messages, rng)
    try:
        trial.go(victims, full)
        made = ", ".join(trial.made) or "undisturbed"
    finally:
        trial.end()
    killed = " and ".join("server" if who == "server" else "silo" for who in victims)
    disk = {None: "", "server": "server"}.get(full, "silo")
    seconds = time.monotonic() - start
    return trial, {"made": made, "killed": killed, "disk": disk, "seconds": seconds}


def table(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of trial."""
    rows = []
    for killed, disk in sorted({(x["killed"], x["disk"]) for x in trials}):
        own = [x for x in trials if (x["killed"], x["disk"]) == (killed, disk)]
        row = {"killed": killed, "disk": disk, "trials": len(own)}
        row["same"] = sum(x["outcome"] == SAME for x in own)
        seconds = [x["seconds"] for x in own]
        rows.append({**row, "low": min(seconds), "high": max(seconds)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # processes are ended, and disks unmounted
    rng, trials, began = np.random.default_rng(args.seed), [], time.time()
    with tempfile.TemporaryDirectory() as place:
        jax.config.update("jax_compilation_cache_dir", f"{place}/programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        file = Path(place) / "expected.npy"
        os.waitpid(process(lambda: undisturbed(file, args.rounds), Path(place) / "log"), 0)
        expected = np.load(file)
        messages = 0
        for number in range(-1, args.trials):  # the first is not disturbed, to be counted
            trial, facts = one_trial(number, Path(place) / str(number), args.rounds, messages, rng)
            outcome = trial.outcome(expected)
            if number < 0:
                messages, disk = trial.count(), trial.disks["server"].mounted
                print(
                    "full disks:",
                    "a file system of 4 MB" if disk else "RLIMIT_FSIZE of the process",
                )
            else:
                trials.append({**facts, "outcome": outcome.split(":")[0]})
            print(
                f"trial {number + 1}: {facts['made']} ({facts['seconds']:.0f} s): {outcome}",
                flush=True,
            )
    ends = Counter(x["outcome"] for x in trials)
    for outcome, count in ends.items():
        print(f"{count} of {args.trials}: {outcome}")
    if args.record:
        record(args.record, table(trials), began)
    wrong = [o for o in ends if o.startswith(("WRONG", "NO WORDS"))]
    return 1 if wrong or sum(ends.values()) != args.trials else 0


if __name__ == "__main__":
    sys.exit(main())
