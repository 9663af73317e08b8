"""Record of a silo: a file with a line for every message, and counts of its calls."""

import base64
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.typing import ArrayLike

from numpyro_fed._typing import Facts, Json, Values
from numpyro_fed.rounds.serialization import is_key, name_of, outline, pack
from numpyro_fed.rounds.worker import Call

_MAX_PATH = 200  # letters of an array's path in a message; the server chooses the keys
_MAX_LISTED = 1_000  # numbers of an array that the record lists; 10,000 would take 10 ms
_MAX_RECORDED = 10_000  # numbers of an array that the record has in full, as base64: 53 kB
# numbers of a message that the record lists or has in full, in 2 to 4 MB; without the limit a
# message of 30 MiB made 223 MiB
_MAX_NUMBERS = 200_000
_ENTRY = 16  # numbers that take as much room as an array's name and type


class Record:
    """File with a line for every message, and counts of the calls of all processes.

    :param place: path of the file.
    :ivar counts: number of calls of each kind, and of ``"refused"`` connections.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.counts = place, Counter[str]()
        self._messages = 0
        self._recorded = -1  # bytes of the file when its calls were counted
        self.look()

    def look(self) -> None:
        """Count again if another process has written to the file."""
        size = self.place.stat().st_size if self.place.exists() else 0
        if size != self._recorded:
            self._recorded, self.counts = size, _counted(self.place)

    def add(
        self,
        started: float,
        what: str,
        data: bytes,
        sent: bytes,
        answer: Values,
        asked: list[Facts],
    ) -> None:
        """Write a message's line, before its answer leaves.

        :param started: time of its arrival, in seconds since 1970.
        :param what: its kind.
        :param data: the message.
        :param sent: the answer as bytes.
        :param answer: the answer.
        :param asked: its calls, as :func:`call_records` returns them.
        """
        self._messages += 1
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(started)),
            "seconds": round(time.time() - started, 4),
            "message": self._messages,
            "what": what,
            "received": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "sent": {
                "bytes": len(sent),
                "sha256": hashlib.sha256(sent).hexdigest(),
                "arrays": _arrays(answer),
            },
        }
        if "error" in answer:
            line["error"] = answer["error"]
        if what == "calls":
            line["calls"] = asked
        if what == "open" and "error" in answer:
            self.counts["refused"] += 1
        with self.place.open("a+b") as log:
            if log.tell():
                log.seek(-1, os.SEEK_END)
                if log.read() != b"\n":  # the last line was cut off; begin a new one
                    log.write(b"\n")
            log.write(json.dumps(line).encode() + b"\n")
            self._recorded = log.tell()


def _arrays(answer: Values) -> list[Json]:
    """Return name, type and shape of every array of an answer."""
    leaves = jax.tree_util.tree_leaves_with_path(answer)
    return [
        [jax.tree_util.keystr(path), str(x.dtype), list(x.shape)]
        for path, x in leaves
        if isinstance(x, np.ndarray)
    ]


def call_records(calls: Sequence[Call], own: Mapping[str, Hashable]) -> list[Facts]:
    """Return a message's calls for the silo's record: settings, slots, keys and messages.

    Arrays of up to 1,000 numbers are lists, those of up to 10,000 base64, longer ones hashes. After
    200,000 numbers of one message, each call's message is one hash.
    """
    out, left = [], _MAX_NUMBERS
    for call in calls:
        left -= sum(_ENTRY + np.size(x) for x in jax.tree.leaves(call.message))
        out.append(_outlined(call, own, in_full=left >= 0))
    return out


def _outlined(call: Call, own: Mapping[str, Hashable], in_full: bool) -> Facts:

    def told(x: ArrayLike) -> Json:
        if is_key(x):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        # an empty array of a long shape would have many lists
        count = math.prod(max(n, 1) for n in x.shape)
        if count <= _MAX_LISTED and x.dtype.kind in "biuf":
            return x.tolist()
        what: Facts = {"type": str(x.dtype), "shape": list(x.shape)}
        if count <= _MAX_RECORDED:
            return {**what, "base64": base64.b64encode(x.tobytes()).decode()}
        return {**what, "sha256": hashlib.sha256(x.tobytes()).hexdigest()}

    if in_full:
        leaves = jax.tree_util.tree_leaves_with_path(call.message)
        message = {jax.tree_util.keystr(path)[:_MAX_PATH]: told(x) for path, x in leaves}
    else:
        message = {"sha256": hashlib.sha256(pack(call.message)).hexdigest()}
    return {
        "kind": name_of(type(call.local)),
        "settings": outline(call.local, own),
        "read": call.read,
        "write": call.write,
        "key": told(call.key),
        "told": message,
    }


def _counted(record: Path) -> Counter[str]:
    """Count a record's calls of each kind, and refused connections."""
    counts: Counter[str] = Counter()
    if not record.exists():
        return counts
    with record.open() as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:  # cut off: the silo answered nothing after it
                continue
            counts.update(call["kind"] for call in line.get("calls", ()))
            counts["refused"] += line["what"] == "open" and "error" in line
    return counts
