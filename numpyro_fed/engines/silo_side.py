"""A silo's side of the wire: it has the rows, answers calls, and keeps a record of all that left it."""

import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.engines.packing import pack, unpack
from numpyro_fed.engines.remote import Call, SiloAlone, Site, site_of, types_of
from numpyro_fed.engines.roster import as_values, fingerprint, from_values, versions
from numpyro_fed.engines.wire import ANSWERED, PROTOCOL, owned
from numpyro_fed.factorise import factorise
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
    :raises ValueError: for more than one silo.

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
        self.site: Site | None = None
        self._kinds: dict[int, Any] = {}  # of each slot the types, were there a row more
        self._grows: dict[Any, Any] = {}
        self._messages = 0
        if (self.folder / "open.bin").exists():
            self._open(unpack((self.folder / "open.bin").read_bytes()))

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; an error in words where there is none.

        Of an unforeseen error only its type leaves; the rest is in ``errors.log`` of the folder, since its text might quote rows.
        """
        started, what = time.time(), "?"
        try:
            request = unpack(data)
            what = str(request["what"])
            answer = {"hello": self._hello, "open": self._opened, "calls": self._calls}[what](request)
        except Refusal as error:
            answer = {"error": str(error)}
        except Exception as error:
            with (self.folder / "errors.log").open("a") as log:
                log.write(traceback.format_exc())
            answer = {"error": f"{type(error).__name__} while it answered; its own errors.log has more"}
        sent = pack(answer)
        self._note(started, what, data, sent, answer)
        return sent

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
        elif what == "calls":
            line["calls"] = self._asked
        with (self.folder / "audit.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["protocol"] != PROTOCOL:
            raise Refusal(
                f"the server speaks protocol {request['protocol']}, expected {PROTOCOL}; install one version of numpyro_fed everywhere"
            )
        return {"silos": as_values(self.silos), "versions": versions()}

    def _opened(self, request: dict[str, Any]) -> dict[str, Any]:
        model = self._open(request)
        self._write("open.bin", pack(request))
        return {"model": model}

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take the place that it has among all silos."""
        known = from_values(request["silos"])
        if self.name not in known.names:
            raise Refusal(f"expected to be among the silos, got {list(known.names)}")
        mine = {g: n[0] for g, n in self.silos.sizes.items()}
        theirs = {g: n[known.names.index(self.name)] for g, n in known.sizes.items()}
        if mine != theirs:
            raise Refusal(f"it has {mine} rows, the server says {theirs}")
        self.site = site_of(self.silos, self.name, known)
        self._own, self._wide = owned(self.factors, known, self.fit), _one_more(self.site)
        for place in self.folder.glob("slot-*.bin"):
            slot = int(place.stem.removeprefix("slot-"))
            self.site.kept[slot], self._kinds[slot] = unpack(place.read_bytes())
        self._known = known
        return fingerprint(self.factors, known, self.fit)

    def _calls(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.site is None:
            raise Refusal("it was asked before it was told of the others; connect first")
        if "independent" in request and self.fit is None:
            raise Refusal(
                "it has no such fit; expected connect(messenger, model, fit=...), and SiloSide(..., fit=...) of the same"
            )
        if "independent" in request and "plan" not in self._own:
            self._own["plan"] = self.fit.planned(self._known, request["independent"])
        inside, wide = request["calls"].tobytes(), {**self._own, "pad": largest(self._wide.rows)}
        self._asked = []
        replies = []
        for values, (wider, *_) in zip(unpack(inside, self._own), unpack(inside, wide), strict=True):
            call = Call(self.site.number, *values)
            self._asked.append(type(call.local).__name__)
            state = self._kept(call)
            self._allow(call, wider, state)
            reply, new = self.site.reply(call, state)
            replies.append([np.asarray(x) for x in jax.tree.leaves(reply)])
            if call.write is not None:
                self.site.kept[call.write] = new
                self._write(f"slot-{call.write}.bin", pack((new, self._kinds[call.write])))
        for slot in [*request["forget"], *(s for s in self.site.kept if s >> 32 not in request["live"])]:
            self._drop(slot)
        return {"replies": replies}

    def _kept(self, call: Call) -> Any:
        assert self.site is not None
        lost = [slot for slot in jax.tree.leaves(call.read) if slot not in self.site.kept]
        if lost:
            raise Refusal("what it kept for this run is gone; expected the folder of before")
        return jax.tree.map(self.site.kept.__getitem__, call.read)

    def _allow(self, call: Call, wider: Callable, state: Any) -> None:
        """Refuse what is not to be answered: a call that is none of those that are, a reply as long as there are rows.

        :param wider: its ``local``, were there a row more.
        :param state: what it starts from.
        """
        assert self.site is not None
        kind = type(call.local)
        if f"{kind.__module__}:{kind.__qualname__}" not in ANSWERED:
            raise Refusal(f"it does not answer {kind.__name__}; expected one of the calls that it knows")
        spec, wide = types_of(call.message), jax.tree.map(self._kinds.__getitem__, call.read)
        key = (call.local, str((spec, wide)))
        if key not in self._grows:
            now = self.site.type_of(call.local, spec, types_of(state))[0]
            then, new = self._wide.type_of(wider, spec, wide)
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
        if call.write is not None:
            self._kinds[call.write] = self._grows[key]

    def _drop(self, slot: int) -> None:
        assert self.site is not None
        self.site.kept.pop(slot, None)
        self._kinds.pop(slot, None)
        (self.folder / f"slot-{slot}.bin").unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        """A file as a whole, or not at all."""
        beside = self.folder / f"{name}.new"
        beside.write_bytes(data)
        os.replace(beside, self.folder / name)


def _one_more(site: Site) -> Site:
    """The site of the same silo, were the largest silo a row longer in each row group; of its rows types alone."""
    rows = site.rows
    sizes = {g: tuple(n + 1 for n in own) for g, own in rows.sizes.items()}
    aux = list(rows._aux()[:7])
    aux[4] = tuple(sorted(sizes.items()))
    specs = {k: jax.ShapeDtypeStruct((max(sizes[rows.group[k]]), *x.shape[1:]), x.dtype) for k, x in rows.rows.items()}
    order = {g: jax.ShapeDtypeStruct((max(own),), jnp.int32) for g, own in sizes.items()}
    return Site(
        site.number, SiloAlone.tree_unflatten(tuple(aux), (specs, order, {k: rows.shared[k] for k in rows._arrays}))
    )
