"""A silo's side of the wire.

It has the rows, answers calls, and keeps a record of all that left it.
"""

import dataclasses
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_fed.data.silos import Silos
from numpyro_fed.density.check import ProofError, prove_own
from numpyro_fed.density.factorize import factorise
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.fingerprint import (
    checked,
    description,
    fingerprint,
    from_values,
    rows_hash,
    versions,
)
from numpyro_fed.density.local_map import Units
from numpyro_fed.engines.answers import (
    ANSWERED,
    FIT_CALLS,
    MAX_MESSAGE,
    MAX_POINTS,
    MAX_REFUSED,
    MAX_ROWS,
    MAX_SETTINGS,
    MAX_SLOTS,
)
from numpyro_fed.engines.record import Record, outlined
from numpyro_fed.engines.wire import PROTOCOL, owned
from numpyro_fed.privacy.data_guards import Guards
from numpyro_fed.privacy.guard import Closed
from numpyro_fed.privacy.own_keys import hashed, secret_of, with_own_keys
from numpyro_fed.rounds.files import read_sealed, write_sealed
from numpyro_fed.rounds.remote import Call, Site, nowhere, resized, site_of, types_of
from numpyro_fed.rounds.serialization import name_of, pack, unpack

__all__ = ["Refusal", "SiloSide"]


class Refusal(ValueError):
    """Words that a silo says in place of an answer."""


class SiloSide:
    """Answers the server's messages from one silo's rows.

    What it keeps for itself (local latents, the local map, what it was told) lies in its folder, so
    that a new process with the same arguments goes on where another was killed. A message that
    comes twice is answered twice alike. A call is answered if its kind is in
    :data:`~numpyro_fed.engines.answers.ANSWERED`, its ceiling is not reached in this folder, and no
    array of its reply would grow with the number of rows. Before the first call the silo checks the
    model on its own rows, cut in two. ``audit.jsonl`` in the folder has a line for every message,
    with the positions that were asked about.

    :param silos: one silo, with its rows.
    :param model: the marked model, as the server has it.
    :param folder: where it keeps its state; made if need be.
    :param public: as of the kernel.
    :param fit: the :class:`SFVI` or :class:`SFVIAvg` that it takes part in, as the server has it;
        chains need none.
    :param guards: what the rows must be (:class:`Guards`); by default nothing.
    :param ceilings: for a kind of call, how many are answered in all; by default those of the list.
    :param own_keys: whether the silo draws by keys of its own, which gives draws of the same law as
        at hand. By the server's keys draws are those at hand, but a server that lies can solve for
        single rows. Fits with privacy or sums always draw by the silo's own.
    :raises ValueError: for more than one silo, rows that a guard refuses, and a folder of other
        rows, another model or other versions, with which a run that had begun must not go on.

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
        self,
        silos: Silos,
        model: Callable,
        folder: str | Path,
        *,
        public: tuple[str, ...] = (),
        fit: Any = None,
        guards: Guards | None = None,
        ceilings: Mapping[str, int] | None = None,
        own_keys: bool = True,
    ) -> None:
        if not isinstance(silos, Silos) or len(silos) != 1:
            raise ValueError(f"expected fed.Silos of one silo, got {silos!r}")
        self.silos, self.model, self.public, self.fit = silos, model, tuple(public), fit
        self.name = silos.names[0]
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.factors = factorise(model, silos, public=self.public)
        if guards is not None:
            guards.check(silos, self.factors.dim + (0 if fit is None else fit.num_learned(silos)))
        self.ceilings = {
            kind: answer.most for kind, answer in ANSWERED.items()
        } | _checked_ceilings(ceilings)
        self.record = Record(self.folder / "audit.jsonl")
        self._proved = False
        self.closed = (
            Closed(self.folder, self.name, fit) if fit is not None and fit.closed else None
        )
        self.secret = secret_of(self.folder) if own_keys and self.closed is None else None
        self.site: Site | None = None
        self._kinds: dict[int, Any] = {}  # of each slot the types, were there a row more
        self._grows: dict[Any, Any] = {}
        self._asked: list[Any] = []
        if (self.folder / "open.bin").exists():
            self._reopen(unpack(read_sealed(self.folder / "open.bin", "open")))

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; an error in words where there is none.

        Of an unforeseen error only its type leaves; the rest is in ``errors.log`` of the folder,
        since its text might quote rows.
        """
        started, what = time.time(), "?"
        try:
            self._asked = []
            self.record.look()
            if len(data) > MAX_MESSAGE:
                raise Refusal(f"a message of {len(data):,} bytes; expected at most {MAX_MESSAGE:,}")
            try:
                request = unpack(data)
            except ValueError as error:
                raise Refusal(str(error)) from error
            answers = {"hello": self._hello, "open": self._opened, "calls": self._calls}
            # a list: what a stranger sends need not be hashable
            if not isinstance(request, dict) or request.get("what") not in list(answers):
                raise Refusal(f"expected a message of one of the kinds {list(answers)}")
            what = request["what"]
            answer = answers[what](request)
        except Refusal as error:
            answer = {"error": str(error)}
        except Exception as error:
            self._log()
            answer = {
                "error": f"{type(error).__name__} while it answered; its own errors.log has more"
            }
        if "error" in answer:  # which may quote what it was sent
            answer["error"] = answer["error"][:2000]
        sent = pack(answer)
        self.record.add(started, what, data, sent, answer, self._asked)
        return sent

    @property
    def counts(self) -> Counter[str]:
        """Calls of each kind that the record has, and refused connections."""
        return self.record.counts

    @property
    def own_keys(self) -> bool:
        """True where it draws by keys that no server knows."""
        return self.closed is not None or self.secret is not None

    @property
    def answered(self) -> tuple[str, ...]:
        """The kinds of call that this silo answers, with its fit or without one."""
        if self.closed is not None:
            return tuple(kind for kind in ANSWERED if kind in self.closed.allowed)
        return tuple(kind for kind in ANSWERED if self.fit is not None or kind not in FIT_CALLS)

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("protocol") != PROTOCOL:
            raise Refusal(
                f"the server speaks protocol {str(request.get('protocol'))[:20]}, expected "
                f"{PROTOCOL}; install one "
                "version of numpyro_fed everywhere"
            )
        return {"about": description(self.silos), "versions": versions()}

    def _opened(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.counts["refused"] >= MAX_REFUSED:
            raise Refusal(
                f"it has refused {MAX_REFUSED} connections, each of which could be a guess at what "
                "it has; expected a "
                "person at the silo to look at its audit.jsonl, and to start it with a new folder"
            )
        self._prove()
        model = self._open(request)
        assert self.site is not None
        write_sealed(
            self.folder / "open.bin", pack({"request": request, **self._same(model)}), "open"
        )
        if request["fresh"]:
            for slot in list(self.site.kept):
                self._drop(slot)
        return {"model": model}

    def _same(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return what has to be the same where a run goes on."""
        return {"rows": rows_hash(self.silos), "model": model, "versions": versions()}

    def _reopen(self, before: dict[str, Any]) -> None:
        """Go on where a former process was, from what it wrote when a server connected."""
        hint = f"; expected those of the run that its folder {self.folder} is of: give another folder, or delete this one"
        try:
            same = self._same(self._open(before["request"]))
        except Refusal as error:
            raise ValueError(f"silo {self.name!r}: {error}{hint}") from error
        for what, now in same.items():
            if before[what] != now:
                raise ValueError(f"silo {self.name!r}: other {what} than before{hint}")

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take the place that it has among all silos."""
        try:
            known = from_values(request["silos"])
            other = checked(description(known, values=True), "the server's list", MAX_ROWS)
            if sum(sum(n) for n in known.sizes.values()) > MAX_ROWS:
                raise ValueError("too many rows")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise Refusal(
                "the server says of the silos what is not put together as that"
            ) from error
        if type(request.get("server")) is not int or type(request.get("fresh")) is not bool:
            raise Refusal("the server says of itself what is not put together as that")
        if self.name not in known.names:
            raise Refusal(f"expected to be among the silos, got {list(known.names)}")
        for what, own in description(self.silos, values=True).items():
            if what == "shared" and other[what] != own:
                odd = sorted(k for k in {*own, *other[what]} if own.get(k) != other[what].get(k))
                raise Refusal(
                    f"the server has other values than it of {odd}, which without rows= count as "
                    "shared arguments, the "
                    "same everywhere; expected the same value, or an entry in rows= for what is a "
                    "silo's own"
                )
            if what not in ("names", "sizes") and other[what] != own:
                raise Refusal(f"the server says {what} {other[what]}, it has {own}")
        mine = {g: n[0] for g, n in self.silos.sizes.items()}
        theirs = {g: n[known.names.index(self.name)] for g, n in known.sizes.items()}
        if mine != theirs:
            raise Refusal(f"it has {mine} rows, the server says {theirs}")
        try:
            model = fingerprint(self.factors, known, self.fit)
            site = site_of(self.silos, self.name, known)
            both = owned(self.factors, known, self.fit, site.pad)
            wide = nowhere(
                resized(known, {g: [n + 1 for n in sizes] for g, sizes in known.sizes.items()})
            )
        except (
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
        ) as error:  # of what the server says
            self._log()
            said = "the server says of the silos what does not fit the model; its own errors.log has more"
            raise Refusal(said) from error
        kinds: dict[int, Any] = {}
        for place in self.folder.glob("slot-*.bin"):
            slot = int(place.stem.removeprefix("slot-"))
            site.kept[slot], kinds[slot] = unpack(read_sealed(place, "slot"))
        if self.closed is not None:
            self._worded(self.closed.join, known.names, pack(request["silos"]))
        # all or nothing: a server that was refused must not have its calls answered
        self.site, self._kinds, self._own, self._wide = site, kinds, both, wide
        self._grows = {}  # types of another roster's padding
        self._known, self._server = known, request["server"]
        self._plan_for: bool | None = None
        return model

    def _prove(self) -> None:
        """Check the model on its own rows, once.

        What kind of thing is wrong leaves, and no number.
        """
        if self._proved:
            return
        try:
            if self.fit is None:
                prove_own(self.factors, self.silos)
            else:
                self.fit.proved(self.silos)
        except ProofError as error:
            self._log()
            raise Refusal(f"{error.plain}; its own errors.log has more") from error
        self._proved = True

    def _log(self) -> None:
        with (self.folder / "errors.log").open("a") as log:
            log.write(traceback.format_exc())

    def _calls(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.site is None:
            raise Refusal("it was asked before it was told of the others; connect first")
        if request.get("server") != self._server:
            raise Refusal("another server has connected since; expected one at a time")
        if "independent" in request and self.fit is None:
            raise Refusal(
                "it has no such fit; expected connect(messenger, model, fit=...), and "
                "SiloSide(..., fit=...) of the same"
            )
        independent = request.get("independent")
        if independent is not None and type(independent) is not bool:
            raise Refusal(
                "it is told what is no answer to whether elements are independent; expected True "
                "or False"
            )
        if independent is not None and self._plan_for is not independent:
            self._plan_for = independent
            self._own["plan"] = self.fit.planned(self._known, self._plan_for)
        try:
            inside, forget = request["calls"].tobytes(), [_slot(n) for n in request["forget"]]
            wide = {**self._own, "pad": self._wide.pad}
            calls = [_call(self.site.number, values) for values in unpack(inside, self._own)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refusal(f"its calls are not put together as calls ({error})") from error
        replies = []
        for i, call in enumerate(calls):
            self._within_ceilings(call)
            self._asked.append(outlined(call, self._own))
            state = self._kept(call)
            kind = self._allow(call, lambda i=i: unpack(inside, wide)[i][0], state)
            ticket: Any = None
            if self.closed is not None:
                if independent is None and name_of(type(call.local)) in self.closed.allowed:
                    raise Refusal(
                        "it is not told whether elements are independent; expected True or False"
                    )
                call, ticket = self._worded(self.closed.admit, call, self._own, state, independent)
            elif self.secret is not None:
                told = pack((call.local, call.key, call.message, independent), self._own)
                call = with_own_keys(call, self.secret, hashed(told, pack(state)))
            reply, new = self.site.reply(call, state)
            if self.closed is None:
                replies.append([np.asarray(x) for x in jax.tree.leaves(reply)])
            else:
                replies.append(self._worded(self.closed.let_out, call.local, reply, ticket))
            if call.write is not None:
                write_sealed(self.folder / f"slot-{call.write}.bin", pack((new, kind)), "slot")
                self.site.kept[call.write], self._kinds[call.write] = new, kind
        for slot in forget:
            self._drop(slot)
        return {"replies": replies}

    def _within_ceilings(self, call: Call) -> None:
        """Count a call, or refuse it."""
        assert self.site is not None
        kind = name_of(type(call.local))
        if kind not in ANSWERED or (self.fit is None and kind in FIT_CALLS):
            raise Refusal(f"it does not answer {kind}; expected one of the calls that it knows")
        if self.counts[kind] >= self.ceilings[kind]:
            raise Refusal(
                f"it has answered {self.counts[kind]:,} calls of kind {kind}, its ceiling for a "
                "study; expected fewer, or a "
                f"person at the silo who allows more (numpyro-fed silo --ceiling {kind}=N)"
            )
        if call.write is not None and len(self.site.kept) >= MAX_SLOTS:
            raise Refusal(
                f"it keeps {MAX_SLOTS:,} states; expected a server that has it forget some"
            )
        self.counts[kind] += 1

    @staticmethod
    def _worded(check: Callable, *args: Any) -> Any:
        """Return what a check does; its error in words is the silo's answer."""
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
        """Refuse a call of some rows alone, and one whose reply would be longer with one row more.

        :param wider: makes its ``local``, were there a row more.
        :param state: what it starts from.
        :return: types of what it writes, were there a row more.
        """
        assert self.site is not None
        self._all_rows(call.local)
        spec, wide = types_of(call.message), jax.tree.map(self._kinds.__getitem__, call.read)
        key = (call.local, str((spec, wide)))
        if key not in self._grows:
            try:
                now = self.site.type_of(call.local, spec, types_of(state))[0]
                then, new = self._wide.type_of(wider(), spec, wide)
            except Exception as error:  # of types alone: no number of its rows is looked at
                self._log()
                raise Refusal(
                    f"what it is told does not fit {type(call.local).__name__} (numbers, shapes or "
                    "settings that are "
                    "not those of its model); its own errors.log has more"
                ) from error
            grown = [
                f"{a.shape} for {b.shape}"
                for a, b in zip(jax.tree.leaves(then), jax.tree.leaves(now), strict=True)
                if a.shape != b.shape
            ]
            if grown:
                raise Refusal(
                    f"the reply to {type(call.local).__name__} would be longer with one row more "
                    f"({grown[0]}); expected replies that are as long for any number of rows"
                )
            self._grows[key] = new
        return self._grows[key]

    def _all_rows(self, part: Any) -> None:
        """Refuse settings that would single out rows.

        Another model's factors, fewer elements, minibatches of the server's choosing.
        """
        assert self.site is not None
        why = None
        if isinstance(part, Factors) and not any(part is own for own in self._own.values()):
            why = "a model"
        elif isinstance(part, Units) and part.pad != self.site.pad:
            why = "a number of elements"
        elif getattr(part, "algorithm", None) not in (None, getattr(self.fit, "algorithm", None)):
            why = "an algorithm"
        elif hasattr(part, "families"):
            if part is not self._own.get("plan"):
                why = "a plan of a fit"
            return self._refused(why)
        elif hasattr(part, "batch") and (
            part.batch is not None or getattr(part, "num_kept", 1) != 1
        ):
            why = "a minibatch"
        self._refused(why)
        for setting, most in MAX_SETTINGS.items():
            value = getattr(part, setting, 0)
            if isinstance(value, int | float) and not 0 <= value <= most:
                raise Refusal(f"it is asked with {setting}={value:,}; expected at most {most:,}")
        if dataclasses.is_dataclass(part) and not isinstance(part, Factors):
            for one in dataclasses.fields(part):
                self._all_rows(getattr(part, one.name))

    @staticmethod
    def _refused(why: str | None) -> None:
        if why is not None:
            raise Refusal(
                f"it is asked with {why} that is not its own; expected calls of all its rows"
            )

    def _drop(self, slot: int) -> None:
        assert self.site is not None
        self.site.kept.pop(slot, None)
        self._kinds.pop(slot, None)
        (self.folder / f"slot-{slot}.bin").unlink(missing_ok=True)


def _slot(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"a slot is {str(value)[:30]}, expected a whole number")
    return value


def _call(number: int, values: Any) -> Call:
    """A call whose slots are numbers, of as many points as may be asked about at one time."""
    call = Call(number, *values)
    name_of(type(call.local))
    jax.tree.map(_slot, call.read)
    if call.write is not None:
        _slot(call.write)
    if not all(
        isinstance(x, np.ndarray | jax.Array | int | float) for x in jax.tree.leaves(call.message)
    ):
        raise ValueError("it is told what are no arrays of numbers")
    if any(isinstance(x, int) and abs(x) >= 1 << 31 for x in jax.tree.leaves(call.message)):
        raise ValueError("it is told whole numbers beyond 32 bits")
    sizes = [np.shape(x)[0] for x in jax.tree.leaves(call.message) if np.ndim(x)]
    if max(sizes, default=0) > MAX_POINTS:
        raise ValueError(
            f"it is asked about {max(sizes):,} points, expected at most {MAX_POINTS:,}"
        )
    return call


def _checked_ceilings(ceilings: Mapping[str, int] | None) -> dict[str, int]:
    for kind, most in (ceilings or {}).items():
        if kind not in ANSWERED or type(most) is not int or most < 0:
            raise ValueError(
                f"ceilings: expected whole numbers for some of {list(ANSWERED)}, got {kind!r}: "
                f"{most!r}"
            )
    return dict(ceilings or {})
