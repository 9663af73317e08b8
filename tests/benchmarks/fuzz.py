"""Messages and replies that are not what was sent, and what a silo and a server make of them.

A short fit of each kind is made over bytes in this process, and of every type of message (hello,
open, each kind of call) one is kept with its reply and with the silo as it was before it answered.
Copies of them are then changed: bits flipped, bytes cut off, added or taken from another message,
and the parts of their text replaced by other numbers, types, shapes and classes, by parts nested
10,000 deep, or left out. In most cases the checksum is made right again, so that what is behind it
is reached.

A silo must return bytes for each; the server may raise ``ValueError`` or ``RuntimeError``.
One request in fifty is answered in earnest. In the answers to the others all numbers are zeros of
the right shapes, so that no program is compiled.

Each has a time limit (``SIGALRM``), and may take 64 MiB more than its message. Memory is the peak
of resident memory (``VmHWM``, which writing 5 to ``/proc/self/clear_refs`` sets back): it sees what
JAX and NumPy take beside Python's own objects, which tracemalloc does not, and costs microseconds.

    python tests/benchmarks/fuzz.py --count 100000 --seed 7 [--record NAME]
"""

import argparse
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import random
from record import record

sys.path.insert(0, str(Path(__file__).parents[1]))

from messages import INTERCEPTS, LINEAR, Fits, Messages, introduce
from small_models import intercepts, linear

import numpyro_fed as fed
from numpyro_fed.engines import wire
from numpyro_fed.rounds.serialization import _CLASSES, WIRE_DTYPES, pack, unpack
from numpyro_fed.rounds.worker import Call, SiloWorker, types_of

LIMIT = 30  # seconds for one message
MEMORY = 64 << 20  # bytes beyond the message
DEEP = 10_000
ODD = [
    10**30,
    2**63,
    2**31,
    10**9,
    129,
    2,
    1,
    0,
    -1,
    0.5,
    1e308,
    float("nan"),
    True,
    None,
    "",
    "text",
    [],
    {},
]
ADAM = optax.adam(0.05)


class TooLong(BaseException):
    """A message took longer than its limit; no ``except Exception`` takes it."""


class Case(NamedTuple):
    """What may be sent, and what becomes of it.

    :param type: name of the type of message.
    :param data: as it was sent.
    :param others: further messages, whose parts may be spliced in.
    :param take: makes of bytes what the receiver makes of them.
    """

    type: str
    data: bytes
    others: list[bytes]
    take: Callable[..., Any]


# Mutations


def parts(data: bytes) -> tuple[Any, bytes]:
    """Return the text of a packed value and the arrays' bytes."""
    stop = 28 + int.from_bytes(data[20:28], "little")
    return json.loads(data[28:stop]), data[stop:]


def sealed(body: bytes) -> bytes:
    """Return bytes whose checksum is right."""
    return b"fed2" + hashlib.blake2b(body, digest_size=16).digest() + body


def joined(tree: Any, rest: bytes, deep: bytes = b"") -> bytes:
    """Return a packed value of a text; the word DEEP in it stands for other text."""
    head = json.dumps(tree, separators=(",", ":")).encode().replace(b'"DEEP"', deep)
    return sealed(len(head).to_bytes(8, "little") + head + rest)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a text, as a container and a key."""
    for key in (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    ):
        yield tree, key
        yield from places(tree[key])


def raw(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Return bytes with some changed, cut off or added."""
    at = int(rng.integers(len(data))) if data else 0
    kind = rng.integers(4)
    if kind == 0:
        out = bytearray(data)
        for place in rng.integers(len(data), size=rng.integers(1, 9)) if data else ():
            out[place] ^= 1 << int(rng.integers(8))
        return bytes(out)
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + rng.bytes(int(rng.integers(1, 200))) + data[at:]
    return data[:at] + other[int(rng.integers(len(other))) :]


def structured(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Return a packed value some part of whose text is another."""
    tree, rest = parts(data)
    tree, deep = [tree], b""
    for _ in range(rng.integers(1, 4)):
        every = list(places(tree))
        inside, key = every[rng.integers(len(every))]
        old, kind = inside[key], rng.integers(8)
        if kind == 0 and isinstance(inside, dict):
            del inside[key]
        elif kind == 1 and isinstance(old, list) and len(old) > 0:
            inside[key] = old[1:] if rng.random() < 0.5 else [*old, old[-1]]
        elif kind == 2:
            donors = list(places([parts(other)[0]]))
            giver, which = donors[rng.integers(len(donors))]
            inside[key] = copy.deepcopy(giver[which])
        elif kind == 3:
            inside[key], word = "DEEP", [b'{"list":[', b"[", b'{"dict":{"a":'][rng.integers(3)]
            end = {b"[": b"]", b'{"list":[': b"]}", b'{"dict":{"a":': b"}}"}[word]
            deep = word * DEEP + b"1" + end * DEEP
        elif isinstance(old, str):
            words = [
                *WIRE_DTYPES,
                "object",
                "<f8",
                *_CLASSES,
                "factors",
                "config",
                "pad",
                "hello",
                "open",
                "calls",
            ]
            inside[key] = words[rng.integers(len(words))]
        else:
            inside[key] = copy.deepcopy(ODD[rng.integers(len(ODD))])
        if not tree:
            tree = [None]
    return joined(tree[0], rest, deep)


def numbers(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Return a packed value with other numbers in its arrays."""
    tree, rest = parts(data)
    out = np.frombuffer(rest[: len(rest) // 4 * 4], np.float32).copy()
    if out.size:
        values = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0, 1e-45, -1], np.float32)
        some = rng.integers(out.size, size=rng.integers(1, 5))
        out[some] = rng.choice(values, size=some.size)
    return joined(tree, out.tobytes() + rest[len(rest) // 4 * 4 :])


def mutated(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Return a message that is not what was sent."""
    kind = rng.random()
    if kind < 0.2:
        return raw(rng, data, other)
    if kind < 0.35:
        return sealed(raw(rng, data[20:], other[20:]))
    inner = b'"calls":{"array"' in data
    if inner and rng.random() < 0.7:  # the calls are a packed value within one
        request, its = unpack(data), unpack(other)
        own = request["calls"].tobytes()
        theirs = its["calls"].tobytes() if "calls" in its else own
        changed = (structured if rng.random() < 0.7 else numbers if rng.random() < 0.5 else raw)(
            rng, own, theirs
        )
        return pack({**request, "calls": np.frombuffer(changed, np.uint8)})
    return (structured if kind < 0.8 else numbers)(rng, data, other)


# What is recorded


def kind_of(data: bytes) -> str:
    """Return the type of a message."""
    request = unpack(data)
    if request["what"] != "calls":
        return str(request["what"])
    found = re.search(rb'"of":"(\w+Local)"', request["calls"].tobytes())
    return found.group(1).decode() if found else "forget"


def zeros(worker: SiloWorker, call: Call, state: Any) -> Any:
    """Return a reply and a new state of the right shapes."""
    types = worker.type_of(call.local, types_of(call.message), types_of(state))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), types)


class Snapshot:
    """A silo as it was before it answered: each taking of a message is by a copy of it."""

    def __init__(self, side: Any, folder: Path) -> None:
        self.side, self.folder = copy.copy(side), folder
        shutil.copytree(side.folder, folder)
        self.side.folder = folder
        # what an answer may change
        self.side.record, self.worker = copy.copy(side.record), side.worker
        self.side.record.counts = Counter(side.counts)
        self.kept = None if self.worker is None else dict(self.worker.kept)
        self.checks = copy.copy(self.side.checks)
        if self.checks is not None:
            self.checks.kept, self.checks.own = dict(self.checks.kept), dict(self.checks.own)
        self.histories = None if self.side.guard is None else dict(self.side.guard.histories)
        self.files = {
            p.name: (p.read_bytes(), p.stat().st_ino) for p in folder.iterdir() if p.is_file()
        }

    def answer(self, data: bytes, earnest: bool = True) -> bytes:
        """Return the answer, of a silo that has seen no other message since.

        :param earnest: whether its numbers are computed; else they are zeros.
        """
        side = copy.copy(self.side)
        side.record = copy.copy(self.side.record)
        side.record.place = self.folder / "audit.jsonl"
        side.record.counts = Counter(self.side.counts)
        if self.worker is not None:
            side.worker = copy.copy(self.worker)
            side.worker.kept = dict(self.kept)
            if not earnest:
                side.worker.reply = partial(zeros, side.worker)
            side.checks = copy.copy(self.checks)
            side.checks.worker = side.worker
            side.checks.kept, side.checks.own = dict(self.checks.kept), dict(self.checks.own)
        if side.guard is not None:
            side.guard = copy.copy(side.guard)
            side.guard.folder, side.guard.histories = self.folder, dict(self.histories)
        answer = side.answer(data)
        self._restore()
        return answer

    def _restore(self) -> None:
        """Bring the folder back: some files are replaced as a whole, others grow."""
        for name in set(self.files) - set(os.listdir(self.folder)):
            (self.folder / name).write_bytes(self.files[name][0])
        for file in [x for x in os.scandir(self.folder) if x.is_file()]:
            if file.name not in self.files:
                os.unlink(file.path)
                continue
            old, number = self.files[file.name]
            if file.inode() != number:
                Path(file.path).write_bytes(old)
                self.files[file.name] = old, file.inode()
            elif file.stat().st_size > len(old):
                os.truncate(file.path, len(old))


class Recorder:
    """A transport around one that keeps of each type one message with its silo, and its reply."""

    def __init__(self, name: str, inner: Messages, folder: Path) -> None:
        self.name, self.inner, self.folder, self.names = name, inner, folder, inner.names
        self.requests: dict[str, tuple[Snapshot, bytes]] = {}
        self.replies: dict[str, dict[str, bytes]] = {}

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        for who, data in messages.items():
            kind = kind_of(data)
            if kind not in self.requests:
                place = self.folder / f"{self.name} {kind}"
                self.requests[kind] = Snapshot(self.inner.sides[who], place), data
        out = self.inner.exchange(messages)
        kind = kind_of(next(iter(messages.values())))
        self.replies.setdefault(kind, out)
        return out


def chains(recorder: Recorder, kernel: Any, model: Callable) -> None:
    mcmc = fed.RemoteMCMC(kernel, num_warmup=2, num_samples=4, num_chains=2, progress_bar=False)
    mcmc.run(random.key(3), wire.connect(recorder, model))


def network(recorder: Recorder, kernel: Any, model: Callable) -> None:
    many = 2 * len(recorder.names)
    mcmc = fed.RemoteMCMC(kernel, num_warmup=2, num_samples=4, num_chains=many, progress_bar=False)
    mcmc.run(random.key(3), wire.connect(recorder, model))


def variational(recorder: Recorder, fit: Any, model: Callable) -> None:
    remote = wire.connect(recorder, model, fit=fit)
    result = fit.run(random.key(1), 3, remote, progress_bar=False)
    if fit.privacy is None:
        fed.to_inference_data(fit, result, remote, num_draws=100, resample=True)


def _fit(kind: str) -> Any:
    if kind == "private sums":
        privacy = fed.Privacy(4.0, 1e-5, 1.0, 5)
        return fed.SFVI(linear, fed.AutoSiloNormal(linear), ADAM, privacy=privacy, secure_sum=True)
    if kind == "averaging":
        return fed.SFVIAvg(intercepts, fed.AutoSiloNormal(intercepts), ADAM, num_local_steps=5)
    return fed.ConduciveSFVI(intercepts, fed.AutoSiloNormal(intercepts))


SETTINGS: dict[str, tuple[Callable, Callable, Any]] = {
    "chains": (chains, lambda: fed.FSGLD(intercepts), intercepts),
    "laplace": (chains, lambda: fed.FSGLD(linear, 0.01, surrogate="laplace"), linear),
    "hmc": (chains, lambda: fed.HMC(intercepts), intercepts),
    "network": (
        network,
        lambda: fed.PushSumLangevin(intercepts, fed.graphs.ring(3).with_link_failures(0.2), 0.01),
        intercepts,
    ),
    "private sums": (variational, lambda: _fit("private sums"), linear),
    "averaging": (variational, lambda: _fit("averaging"), intercepts),
    "conducive": (variational, lambda: _fit("conducive"), intercepts),
}


def recorded(name: str, folder: Path) -> list[Case]:
    """Make one short fit; return its types of message and of reply."""
    run, make, model = SETTINGS[name]
    silos, fitted = LINEAR if model is linear else INTERCEPTS, run is variational
    inner = Fits(silos, make(), folder, make) if fitted else Messages(silos, model, folder)
    if name == "private sums":
        introduce(folder, silos.names)
    recorder, taken, take = Recorder(name, inner, folder / "before"), {}, wire.Wire._take

    def noted(self: Any, who: str, data: bytes, mine: Any, kinds: Any, replies: Any) -> None:
        kind = re.sub(r"\(.*", "", type(self).__name__)
        taken.setdefault(
            hashlib.sha256(data).hexdigest(), (self, who, data, mine, kinds, len(replies), kind)
        )
        take(self, who, data, mine, kinds, replies)

    wire.Wire._take = noted  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of fits so short
            run(recorder, make(), model)
    finally:
        wire.Wire._take = take  # type: ignore[method-assign]
    everything = [data for _, data in recorder.requests.values()]
    cases = [
        Case(f"{name}: {kind}", data, everything, before.answer)
        for kind, (before, data) in recorder.requests.items()
    ]
    answers = [data for reply in recorder.replies.values() for data in reply.values()]
    for kind, reply in recorder.replies.items():
        who, data = next(iter(reply.items()))
        found = taken.get(hashlib.sha256(data).hexdigest())
        if kind in ("hello", "open"):
            if fitted or name == "chains":
                met = _met(recorder, kind, who, make, fitted, model)
                cases.append(Case(f"{name}: reply to {kind}", data, answers, met))
        elif found is not None:
            carrier, who, _, mine, kinds, many, _ = found

            def given(
                data: bytes,
                c: Any = carrier,
                w: str = who,
                m: Any = mine,
                k: Any = kinds,
                n: int = many,
            ) -> None:
                c.refused[w].clear()
                take(c, w, data, m, k, [None] * n)
                if c.refused[w]:  # with a warning, which is not an error
                    raise ValueError(f"silo {w!r}: {c.refused[w].pop()}")

            cases.append(Case(f"{name}: reply to {kind}", data, answers, given))
    return cases


def _met(
    recorder: Recorder, kind: str, who: str, make: Callable, fitted: bool, model: Callable
) -> Callable:
    """Return what meets silos one of whose answers is another."""
    fit = make() if fitted else None

    class Stub:
        names = recorder.names

        def __init__(self, data: bytes) -> None:
            self.data = data

        def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
            asked = kind_of(next(iter(messages.values())))
            return {**recorder.replies[asked], **({who: self.data} if asked == kind else {})}

    return lambda data: wire.connect(Stub(data), model, fit=fit)


# What happens


def memory(what: str) -> int:
    """Return VmRSS or VmHWM, in bytes."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) << 10 if found else 0


def became(case: Case, data: bytes, earnest: bool = True) -> tuple[str, str]:
    """Return what became of a message, and why that is wrong, or nothing."""

    def late(*_: Any) -> None:
        raise TooLong

    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    what = why = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            answer = case.take(data) if earnest else case.take(data, earnest=False)
        what = "taken"
        if "reply" not in case.type:
            said = (
                unpack(answer).get("error")
                if isinstance(answer, bytes)
                else f"{type(answer).__name__}"
            )
            unforeseen = re.match(r"(\w+) while it answered", said or "")
            what = "answered" if said is None else unforeseen.group(1) if unforeseen else "refused"
            why = "" if isinstance(answer, bytes) else f"returned {said}"
    except (ValueError, RuntimeError) as error:
        what = "refused"
        foreign = type(error).__module__ != "builtins" and not type(error).__module__.startswith(
            "numpyro_fed"
        )
        if (
            "reply" not in case.type
            or foreign
            or isinstance(error, RecursionError)
            or "silo" not in str(error)
        ):
            why = f"raised {type(error).__name__}: {str(error)[:200]}"
    except TooLong:
        why = f"took more than {LIMIT} s"
    except Exception as error:
        why = f"raised {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    grown = memory("VmHWM") - before - len(data)
    return what or "failed", why or (f"took {grown >> 20} MiB" if grown > MEMORY else "")


class Tally(NamedTuple):
    """What became of the messages of one type."""

    type: str
    count: int
    seconds: float
    slowest: float
    became: Counter[str]
    failures: list[str]


def fuzz(case: Case, count: int, seed: int, seconds: float = float("inf")) -> Tally:
    """Send mutations of one message; of each failure the number reproduces it."""
    failures, slowest, started, i, every = [], 0.0, time.monotonic(), 0, Counter[str]()
    for i in range(count):
        rng = np.random.default_rng(
            [seed, int(hashlib.sha256(case.type.encode()).hexdigest()[:8], 16), i]
        )
        data = mutated(rng, case.data, case.others[rng.integers(len(case.others))])
        begun = time.monotonic()
        what, why = became(case, data, "reply" in case.type or i % 50 == 0)
        every[what] += 1
        slowest = max(slowest, time.monotonic() - begun)
        if why:
            failures.append(f"seed {seed}, number {i}: {why}")
        if time.monotonic() - started > seconds:
            break
    return Tally(case.type, i + 1, time.monotonic() - started, slowest, every, failures)


class Liar(Messages):
    """A transport one of whose silos' replies are now and then others."""

    def __init__(self, *args: Any, seed: int, share: float) -> None:
        super().__init__(*args)
        self.rng, self.share, self.changed = np.random.default_rng(seed), share, 0

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        out = super().exchange(messages)
        who = self.names[0]
        stays = who in messages and kind_of(messages[who]) == "VisitLocal"
        if who in messages and self.rng.random() < (
            self.share if stays else self.share / 10
        ):  # all others are needed
            out[who] = mutated(self.rng, out[who], out[who])
            self.changed += 1
        return out


def whole_run(folder: Path, seed: int, share: float = 0.3) -> str:
    """Run chains over a silo whose replies are changed; return how it ended."""
    transport = Liar(INTERCEPTS, intercepts, folder, seed=seed, share=share)
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(intercepts), num_warmup=2, num_samples=20, num_chains=2, progress_bar=False
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            mcmc.run(random.key(3), wire.connect(transport, intercepts))
    except (ValueError, RuntimeError) as error:
        if "silo" not in str(error):
            raise
        return f"refused: {error}"
    got = mcmc.get_samples(group_by_chain=True)["mu"]
    assert got.shape == (2, 20), f"draws were lost: {got.shape}"
    return "draws" if np.isfinite(got).all() else "draws that are not finite"


def report(case: Case, count: int, args: argparse.Namespace) -> Tally:
    """Send changes of one message, and print what became of them."""
    tally = fuzz(case, count, args.seed, args.seconds)
    print(
        f"{tally.type:34} {tally.count:6}  {1e3 * tally.seconds / tally.count:7.2f} ms each, "
        f"slowest {tally.slowest:5.2f} s, {len(tally.failures)} failures; {dict(tally.became)}",
        flush=True,
    )
    for text in tally.failures[:5]:
        print(f"    {text}", flush=True)
    return tally


def table(tallies: list[Tally]) -> list[dict[str, Any]]:
    """Return a row for each type of message, of all fits that have it."""
    rows: dict[str, dict[str, Any]] = {}
    for tally in tallies:
        kind = tally.type.split(": ")[1]
        row = rows.setdefault(kind, {"type": kind, "changes": 0, "slowest": 0.0, "failures": 0})
        row["changes"] += tally.count
        row["slowest"] = max(row["slowest"], tally.slowest)
        row["failures"] += len(tally.failures)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Changed messages.")
    parser.add_argument(
        "--count", type=int, default=5_000, help="of each type, shared by the fits that have it"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="for each type of a fit, at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="types whose name has this")
    parser.add_argument("--fits", default=",".join(SETTINGS), help="with commas between")
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    start, tallies = time.time(), []
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for name in args.fits.split(","):
            (place := Path(folder, name)).mkdir()
            cases += [c for c in recorded(name, place) if args.only in c.type]
        fits = Counter(case.type.split(": ")[1] for case in cases)
        for case in cases:
            kind = case.type.split(": ")[1]
            tallies.append(report(case, -(-args.count // fits[kind]), args))
    rows = table(tallies)
    least = min(rows, key=lambda row: row["changes"])
    print(
        f"{len(rows)} types, {sum(row['changes'] for row in rows):,} changes, least "
        f"{least['changes']:,} ({least['type']}), {sum(row['failures'] for row in rows)} failures"
    )
    ends = Counter()
    for seed in range(args.seed, args.seed + 5):
        with tempfile.TemporaryDirectory() as folder:
            ends[whole_run(Path(folder), seed)] += 1
    print(dict(ends))
    if args.record:
        record(args.record, rows, start)


if __name__ == "__main__":
    main()
