"""A silo's side of the wire: it has the rows, answers calls, and keeps a record of all that left it."""

import dataclasses
import hashlib
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_fed.density import Factors
from numpyro_fed.engines.closed import Closed
from numpyro_fed.engines.packing import outline, pack, unpack, write_whole
from numpyro_fed.engines.remote import Call, Site, nowhere, resized, site_of, types_of
from numpyro_fed.engines.roster import as_values, description, fingerprint, from_values, rows_hash, versions
from numpyro_fed.engines.wire import ANSWERED, PROTOCOL, owned
from numpyro_fed.factorise import factorise
from numpyro_fed.local_map import Units
from numpyro_fed.silos import Silos
from numpyro_fed.storage import largest

__all__ = ["Refusal", "SiloSide"]


class Refusal(ValueError):
    """What a silo says in words in place of an answer."""


class SiloSide:
    """Answers the server's messages from one silo's rows.

    What it keeps for itself (local latents, the local map, what it was told) lies in its folder, so that a new process with the same arguments goes on where
    another was killed; a message that comes twice is answered twice alike. A call is answered only if it is one of :data:`~numpyro_fed.engines.wire.ANSWERED`, and
    only if no array of its reply would grow with the number of rows. ``audit.jsonl`` in the folder has a line for every message.

    :param silos: one silo, with its rows.
    :param model: the marked model, as the server has it.
    :param folder: where it keeps its state; made if need be.
    :param public: as of the kernel.
    :param fit: the :class:`SFVI` or :class:`SFVIAvg` that it takes part in, as the server has it; chains need none.
    :raises ValueError: for more than one silo, and where the folder is of other rows, another model or other versions: a run that had begun would go on with
        others.

    Example::

        >>> import tempfile, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> from numpyro_fed.engines.silo_side import SiloSide
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> side = SiloSide(fed.Silos({"oslo": {"y": jnp.arange(5.0)}}), model, tempfile.mkdtemp())
        >>> side.name, len(side.answer(b"no message")) < 200
        ('oslo', True)
    """

    def __init__(
        self, silos: Silos, model: Callable, folder: str | Path, *, public: tuple[str, ...] = (), fit: Any = None
    ) -> None:
        if not isinstance(silos, Silos) or len(silos) != 1:
            raise ValueError(f"expected fed.Silos of one silo, got {silos!r}")
        self.silos, self.model, self.public, self.fit = silos, model, tuple(public), fit
        self.name = silos.names[0]
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.factors = factorise(model, silos, public=self.public)
        self.closed = Closed(self.folder, self.name, fit) if fit is not None and fit.closed else None
        self.site: Site | None = None
        self._kinds: dict[int, Any] = {}  # of each slot the types, were there a row more
        self._grows: dict[Any, Any] = {}
        self._messages = 0
        self._asked: list[Any] = []
        if (self.folder / "open.bin").exists():
            self._reopen(unpack((self.folder / "open.bin").read_bytes()))

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; an error in words where there is none.

        Of an unforeseen error only its type leaves; the rest is in ``errors.log`` of the folder, since its text might quote rows.
        """
        started, what = time.time(), "?"
        try:
            self._asked = []
            request = unpack(data)
            what = str(request["what"])
            answers = {"hello": self._hello, "values": self._values, "open": self._opened, "calls": self._calls}
            answer = answers[what](request)
        except Refusal as error:
            answer = {"error": str(error)}
        except Exception as error:
            self._log()
            answer = {"error": f"{type(error).__name__} while it answered; its own errors.log has more"}
        sent = pack(answer)
        self._note(started, what, data, sent, answer)
        return sent

    @property
    def answered(self) -> dict[str, tuple[str, str]]:
        """Of :data:`~numpyro_fed.engines.wire.ANSWERED` what this silo answers, with its fit or without one."""
        if self.closed is not None:
            return {call: what for call, what in ANSWERED.items() if call.split(":")[1] in self.closed.allowed}
        return {
            call: what
            for call, what in ANSWERED.items()
            if self.fit is not None or not call.startswith("numpyro_fed.vi.")
        }

    def will_leave(self, answer: dict[str, Any]) -> list[list[Any]]:
        """Name, type and shape of every array of an answer."""
        leaves = jax.tree_util.tree_leaves_with_path(answer)
        return [[jax.tree_util.keystr(path), str(x.dtype), list(x.shape)] for path, x in leaves if hasattr(x, "dtype")]

    def _note(self, started: float, what: str, data: bytes, sent: bytes, answer: dict[str, Any]) -> None:
        self._messages += 1
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(started)),
            "seconds": round(time.time() - started, 4),
            "message": self._messages,
            "what": what,
            "received": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "sent": {"bytes": len(sent), "sha256": hashlib.sha256(sent).hexdigest(), "arrays": self.will_leave(answer)},
        }
        if "error" in answer:
            line["error"] = answer["error"]
        if what == "calls":
            line["calls"] = self._asked
        with (self.folder / "audit.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["protocol"] != PROTOCOL:
            raise Refusal(
                f"the server speaks protocol {request['protocol']}, expected {PROTOCOL}; install one version of numpyro_fed everywhere"
            )
        return {"about": description(self.silos), "versions": versions()}

    def _values(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"silos": as_values(self.silos)}

    def _opened(self, request: dict[str, Any]) -> dict[str, Any]:
        model = self._open(request)
        assert self.site is not None
        if self.closed is not None:
            self._prove()
        write_whole(self.folder / "open.bin", pack({"request": request, **self._same(model)}))
        if request["fresh"]:
            for slot in list(self.site.kept):
                self._drop(slot)
        return {"model": model}

    def _same(self, model: dict[str, Any]) -> dict[str, Any]:
        """What has to be the same where a run goes on."""
        return {"rows": rows_hash(self.silos), "model": model, "versions": versions()}

    def _reopen(self, before: dict[str, Any]) -> None:
        """Go on where a former process was, from what it wrote when a server connected."""
        hint = (
            f"; expected those of the run that its folder {self.folder} is of: give another folder, or delete this one"
        )
        try:
            same = self._same(self._open(before["request"]))
        except Refusal as error:
            raise ValueError(f"silo {self.name!r}: {error}{hint}") from error
        for what, now in same.items():
            if before[what] != now:
                raise ValueError(f"silo {self.name!r}: other {what} than before{hint}")

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take the place that it has among all silos."""
        known = from_values(request["silos"])
        if self.name not in known.names:
            raise Refusal(f"expected to be among the silos, got {list(known.names)}")
        other = description(known)
        for what, own in description(self.silos).items():
            if what not in ("names", "sizes") and other[what] != own:
                raise Refusal(f"the server says {what} {other[what]}, it has {own}")
        mine = {g: n[0] for g, n in self.silos.sizes.items()}
        theirs = {g: n[known.names.index(self.name)] for g, n in known.sizes.items()}
        if mine != theirs:
            raise Refusal(f"it has {mine} rows, the server says {theirs}")
        self.site = site_of(self.silos, self.name, known)
        self._grows = {}  # types of another roster's padding
        self._own, self._wide = (
            owned(self.factors, known, self.fit),
            nowhere(resized(known, {g: [n + 1 for n in own] for g, own in known.sizes.items()})),
        )
        for place in self.folder.glob("slot-*.bin"):
            slot = int(place.stem.removeprefix("slot-"))
            self.site.kept[slot], self._kinds[slot] = unpack(place.read_bytes())
        self._known, self._server = known, request["server"]
        self._plan_for: bool | None = None
        if self.closed is not None:
            self._worded(self.closed.join, known.names, pack(as_values(known)))
        return fingerprint(self.factors, known, self.fit)

    def _prove(self) -> None:
        """The proof check of its own rows, for itself: nobody else may look at them. What is wrong may quote numbers, and stays."""
        try:
            self.fit.proved(self.silos)
        except ValueError as error:
            self._log()
            raise Refusal("its rows do not pass the proof check; its own errors.log has more") from error

    def _log(self) -> None:
        with (self.folder / "errors.log").open("a") as log:
            log.write(traceback.format_exc())

    def _calls(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.site is None:
            raise Refusal("it was asked before it was told of the others; connect first")
        if request["server"] != self._server:
            raise Refusal("another server has connected since; expected one at a time")
        if "independent" in request and self.fit is None:
            raise Refusal(
                "it has no such fit; expected connect(messenger, model, fit=...), and SiloSide(..., fit=...) of the same"
            )
        if "independent" in request and self._plan_for is not request["independent"]:
            self._plan_for = bool(request["independent"])
            self._own["plan"] = self.fit.planned(self._known, self._plan_for)
        inside, wide = request["calls"].tobytes(), {**self._own, "pad": largest(self._wide.rows)}
        replies = []
        for i, values in enumerate(unpack(inside, self._own)):
            call = Call(self.site.number, *values)
            settings = {} if call.local is None else outline(call.local, self._own)
            self._asked.append({"call": settings, "read": call.read, "write": call.write})
            state = self._kept(call)
            kind = self._allow(call, lambda i=i: unpack(inside, wide)[i][0], state)
            label = ""
            if self.closed is not None:
                call, label = self._worded(self.closed.admit, call, self._own, state, request.get("independent", True))
            reply, new = self.site.reply(call, state)
            if self.closed is None:
                replies.append([np.asarray(x) for x in jax.tree.leaves(reply)])
            else:
                replies.append(self._worded(self.closed.let_out, call.local, reply, label))
            if call.write is not None:
                write_whole(self.folder / f"slot-{int(call.write)}.bin", pack((new, kind)))
                self.site.kept[call.write], self._kinds[call.write] = new, kind
        for slot in request["forget"]:
            self._drop(int(slot))
        return {"replies": replies}

    @staticmethod
    def _worded(check: Callable, *args: Any) -> Any:
        """What it returns; its error in words is the silo's answer."""
        try:
            return check(*args)
        except ValueError as error:
            raise Refusal(str(error)) from error

    def _kept(self, call: Call) -> Any:
        assert self.site is not None
        lost = [slot for slot in jax.tree.leaves(call.read) if slot not in self.site.kept]
        if lost:
            raise Refusal("what it kept for this run is gone; expected the folder of before")
        return jax.tree.map(self.site.kept.__getitem__, call.read)

    def _allow(self, call: Call, wider: Callable, state: Any) -> Any:
        """Refuse what is not to be answered: a call that is none of those that are, one of some rows, a reply as long as there are rows.

        :param wider: makes its ``local``, were there a row more.
        :param state: what it starts from.
        :return: types of what it writes, were there a row more.
        """
        assert self.site is not None
        kind = type(call.local)
        if f"{kind.__module__}:{kind.__qualname__}" not in ANSWERED:
            raise Refusal(f"it does not answer {kind.__name__}; expected one of the calls that it knows")
        self._all_rows(call.local)
        spec, wide = types_of(call.message), jax.tree.map(self._kinds.__getitem__, call.read)
        key = (call.local, str((spec, wide)))
        if key not in self._grows:
            now = self.site.type_of(call.local, spec, types_of(state))[0]
            then, new = self._wide.type_of(wider(), spec, wide)
            grown = [
                f"{a.shape} for {b.shape}"
                for a, b in zip(jax.tree.leaves(then), jax.tree.leaves(now), strict=True)
                if a.shape != b.shape
            ]
            if grown:
                raise Refusal(
                    f"the reply to {kind.__name__} would be longer with one row more ({grown[0]}); expected replies that are as long for any number of rows"
                )
            self._grows[key] = new
        return self._grows[key]

    def _all_rows(self, part: Any) -> None:
        """Refuse settings that would single out rows: another model's factors, fewer elements, minibatches of the server's choosing."""
        assert self.site is not None
        why = None
        if isinstance(part, Factors) and not any(part is own for own in self._own.values()):
            why = "a model"
        elif isinstance(part, Units) and part.pad != largest(self.site.rows):
            why = "a number of elements"
        elif getattr(part, "algorithm", None) not in (None, getattr(self.fit, "algorithm", None)):
            why = "an algorithm"
        elif hasattr(part, "families"):
            if part is not self._own.get("plan"):
                why = "a plan of a fit"
            return self._refused(why)
        elif hasattr(part, "batch") and (part.batch is not None or getattr(part, "num_kept", 1) != 1):
            why = "a minibatch"
        self._refused(why)
        if dataclasses.is_dataclass(part) and not isinstance(part, Factors):
            for one in dataclasses.fields(part):
                self._all_rows(getattr(part, one.name))

    @staticmethod
    def _refused(why: str | None) -> None:
        if why is not None:
            raise Refusal(f"it is asked with {why} that is not its own; expected calls of all its rows")

    def _drop(self, slot: int) -> None:
        assert self.site is not None
        self.site.kept.pop(slot, None)
        self._kinds.pop(slot, None)
        (self.folder / f"slot-{slot}.bin").unlink(missing_ok=True)
