"""Record of a silo: a line for every message, of which calls are counted."""

import base64
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_fed.rounds.remote import Call
from numpyro_fed.rounds.serialization import name_of, outline

__all__ = ["Record", "outlined"]

_MAX_PATH = 200  # letters of a place within a message, whose keys the server chooses
_MAX_LISTED = 1_000  # numbers of an array that the record lists; of 10,000 that takes 10 ms
_MAX_RECORDED = 10_000  # numbers of an array that the record has in full


class Record:
    """File with a line for every message, and counts of its calls, also of other processes.

    :param place: the file.
    :ivar counts: calls of each kind, and ``"refused"`` connections.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.counts = place, Counter[str]()
        self._messages = 0
        self._recorded = -1  # bytes of the file that the counts are of
        self.look()

    def look(self) -> None:
        """Count anew, where another process has written since."""
        size = self.place.stat().st_size if self.place.exists() else 0
        if size != self._recorded:
            self._recorded, self.counts = size, _counted(self.place)

    def add(
        self,
        started: float,
        what: str,
        data: bytes,
        sent: bytes,
        answer: dict[str, Any],
        asked: list[dict[str, Any]],
    ) -> None:
        """Write a message's line, before its answer leaves.

        :param started: when it came, in seconds since 1970.
        :param what: its kind.
        :param asked: its calls, as of :func:`outlined`.
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
                if (
                    log.read() != b"\n"
                ):  # a line was broken off, which this one must not be a part of
                    log.write(b"\n")
            log.write(json.dumps(line).encode() + b"\n")
            self._recorded = log.tell()


def _arrays(answer: dict[str, Any]) -> list[list[Any]]:
    """Name, type and shape of every array of an answer."""
    leaves = jax.tree_util.tree_leaves_with_path(answer)
    return [
        [jax.tree_util.keystr(path), str(x.dtype), list(x.shape)]
        for path, x in leaves
        if hasattr(x, "dtype")
    ]


def outlined(call: Call, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as the silo's record has it.

    Settings, and what it was told, in full if short.
    """

    def told(x: Any) -> Any:
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        # of an array of no numbers the lists alone could be many
        count = math.prod(max(n, 1) for n in x.shape)
        if count <= _MAX_LISTED and x.dtype.kind in "biuf":
            return x.tolist()
        what = {"type": str(x.dtype), "shape": list(x.shape)}
        if count <= _MAX_RECORDED:
            return {**what, "base64": base64.b64encode(x.tobytes()).decode()}
        return {**what, "sha256": hashlib.sha256(x.tobytes()).hexdigest()}

    leaves = jax.tree_util.tree_leaves_with_path(call.message)
    return {
        "kind": name_of(type(call.local)),
        "settings": outline(call.local, own),
        "read": call.read,
        "write": call.write,
        "key": told(call.key),
        "told": {jax.tree_util.keystr(path)[:_MAX_PATH]: told(x) for path, x in leaves},
    }


def _counted(record: Path) -> Counter[str]:
    """Count a record's calls of each kind, and refused connections."""
    counts: Counter[str] = Counter()
    for text in record.read_text().splitlines() if record.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # broken off: nothing was answered after it
            continue
        counts.update(call["kind"] for call in line.get("calls", ()))
        counts["refused"] += line["what"] == "open" and "error" in line
    return counts
