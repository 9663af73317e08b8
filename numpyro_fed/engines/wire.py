"""Wire between the server of a federation and its silos: the messages, as bytes.

A :class:`Transport` brings bytes to a silo by name, and bytes back. First each silo describes
itself: name, numbers of rows, names and types of arguments, versions. Then the server sends each
the list of all silos and the values of shared arguments, and the silo answers with its model's
fingerprint. All further messages are calls in :data:`~numpyro_fed.rounds.task.TASKS`, and
replies with shapes and types that the server expects. Nothing is pickled. The silo's side is
:mod:`numpyro_fed.engines.silo_side`.
"""

import secrets
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from numpyro_fed._typing import Column, Facts, PyTree, Values
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import largest
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.fingerprint import (
    Described,
    as_values,
    checked,
    fingerprint,
    joined_spec,
    versions,
)
from numpyro_fed.engines.side import printable
from numpyro_fed.privacy.guard import Guarded
from numpyro_fed.privacy.secure_sum import types_masked
from numpyro_fed.rounds.remote import Carrier, RemoteSilos
from numpyro_fed.rounds.serialization import pack, unpack
from numpyro_fed.rounds.task import FitFacts
from numpyro_fed.rounds.worker import Call, SiloError, typed_worker

PROTOCOL = 2
# bytes of a silo's answer while it connects: about 100 for each argument and site, of which there
# are tens
_MAX_ANSWER = 1 << 22


class Transport(Protocol):
    """Transport of bytes: one message to each silo, and replies by name.

    A message may arrive twice; the silo then answers the same.
    """

    names: tuple[str, ...]

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        """Return the replies by name, without those of silos that did not answer in time."""
        ...


class Fit(Described, Guarded, Protocol):
    """Variational fit, by what a wire's two sides ask of it."""

    algorithm: str

    @property
    def rounds_only(self) -> bool: ...

    def factored(self, known: Silos) -> Factors: ...

    def planned(self, known: Silos, independent: bool) -> FitFacts: ...

    def messages(self, config: Any, known: Silos) -> dict[str, PyTree]: ...

    def num_parameters(self, silos: Silos) -> int: ...

    def check_factors(self, silos: Silos) -> None: ...


class Traffic(NamedTuple):
    """Traffic of one silo over the wire: number of messages, and bytes both ways."""

    messages: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


def owned(factors: Factors, known: Silos, fit: Fit | None, pad: tuple) -> dict[str, Hashable]:
    """Return the objects that both sides have, by their names on the wire.

    :param factors: factors of the model.
    :param known: the facts about all silos.
    :param fit: the variational fit, or ``None``.
    :param pad: number of rows in each row group after padding.
    """
    learned = {} if fit is None else {"factors of the fit": fit.factored(known)}
    return {**learned, "factors": factors, "pad": pad}


class Wire(Carrier):
    """Carrier over a wire, at the server.

    A reply of another type than the call's counts as none, and so does a reply that cannot be read.
    The first of a silo raises a warning.

    :param transport: transport of bytes.
    :param known: the facts about all silos.
    :param model: the marked model, which every silo has.
    :param public: public arguments, as in the kernel.
    :param fit: the variational fit over this wire, or ``None``.
    :param server: number of the server; by default it is drawn.
    :ivar traffic: messages and bytes over the wire, by silo.
    :ivar refused: reasons for which replies did not count, by silo.
    """

    guarded = True

    def __init__(
        self,
        transport: Transport,
        known: Silos,
        model: Callable,
        public: tuple[str, ...] = (),
        fit: Fit | None = None,
        server: int | None = None,
    ) -> None:
        super().__init__({})
        self.transport, self.names = transport, known.names
        self.traffic = {name: Traffic() for name in known.names}
        self.refused: dict[str, list[str]] = {name: [] for name in known.names}
        self.factors = factorize(model, known, public=public)
        self._own = owned(self.factors, known, fit, largest(known))
        self._any = typed_worker(known)
        self.server = secrets.randbits(31) if server is None else server
        self.next_slot = self.server << 32  # so that slots of two servers do not meet
        self._owners: dict[int, list[int]] = {}  # silos with a state in each slot
        self._forget: dict[int, list[int]] = {n: [] for n in range(len(self.names))}

    def check(self, check: Callable[[Silos], None]) -> None:
        """Do nothing, since silos check their own rows when a server connects."""

    def ask(self, calls: list[Call]) -> list[PyTree]:
        """Send each silo its calls in one message, and return the replies."""
        kinds = [self.type_of(call, self._any) for call in calls]
        kinds = [
            types_masked(k) if c.local.summed else k for c, k in zip(calls, kinds, strict=True)
        ]
        of: dict[int, list[int]] = {}
        for i, call in enumerate(calls):
            of.setdefault(call.number, []).append(i)
            if call.write is not None:
                self._owners.setdefault(call.write, []).append(call.number)
        messages = {
            self.names[n]: self._message(n, [calls[i] for i in mine]) for n, mine in of.items()
        }
        answers = self.messages(messages)
        replies: list[PyTree] = [None] * len(calls)
        for n, mine in of.items():
            name = self.names[n]
            if name in answers:
                self._take(name, answers[name], mine, kinds, replies)
                if all(
                    replies[i] is not None for i in mine
                ):  # otherwise it may not have received the list
                    self._forget[n].clear()
        return replies

    def messages(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        """Exchange messages, count them, and return the answers."""
        answers = self.transport.exchange(messages)
        for name, data in messages.items():
            old, up = self.traffic[name], len(answers.get(name, b""))
            self.traffic[name] = Traffic(
                old.messages + 1, old.bytes_down + len(data), old.bytes_up + up
            )
        return answers

    def forget(self, slots: list[int], *, now: bool = False) -> None:
        """Note slots for the next message to their silos, or send them ``now``."""
        super().forget(slots)
        for slot in slots:
            for number in set(self._owners.pop(slot, [])):
                self._forget[number].append(slot)
        if now:
            self.messages(
                {self.names[n]: self._message(n, []) for n, own in self._forget.items() if own}
            )

    def position(self) -> Values:
        """Return the carrier's position with the silos of each slot."""
        return {**super().position(), "owners": list(self._owners.items())}

    def go_on(self, position: Values) -> None:
        """Continue from a checkpoint, but with the slots that this connection was given."""
        super().go_on({**position, "next": self.next_slot})
        self._owners |= dict(position["owners"])

    def _message(self, number: int, calls: list[Call]) -> bytes:
        head: Values = {
            "what": "calls",
            "server": self.server,
            "forget": list(self._forget[number]),
        }
        own = self._own
        for call in calls:
            config = call.local.fit_config
            if config is not None:  # silos have it, too
                own = {**own, "config": config}
                head["independent"] = config.families[0].group is not None
        try:
            inside = pack([(c.local, c.key, c.message, c.read, c.write) for c in calls], own)
        except TypeError as error:
            raise ValueError(
                f"what {type(calls[0].local).__name__} needs cannot go over a wire ({error}); "
                "expected the model, and the fit, that silos were connected with: "
                "connect(transport, model, fit=...), and step sizes that are numbers or schedules "
                "of fed, not functions"
            ) from error
        return pack({**head, "calls": np.frombuffer(inside, np.uint8)})

    def _take(
        self, name: str, data: bytes, mine: list[int], kinds: list[PyTree], replies: list[PyTree]
    ) -> None:
        """Put all replies of a silo in their places, or none if one is wrong."""
        most = (
            sum(x.size * x.dtype.itemsize + 200 for i in mine for x in jax.tree.leaves(kinds[i]))
            + 10_000
        )
        try:
            if len(data) > most:
                raise ValueError(f"{len(data):,} bytes, expected at most {most:,}")
            answer = unpack(data, keys=False)
            if not isinstance(answer, dict) or not {"error", "replies"} & set(answer):
                raise ValueError("neither replies nor an error")
            if "error" in answer:
                raise SiloError(f"silo {name!r}: {printable(answer['error'])}")
            for i, leaves in zip(mine, answer["replies"], strict=True):
                replies[i] = _checked(leaves, kinds[i])
        except (ValueError, TypeError) as error:
            for i in mine:
                replies[i] = None
            if not self.refused[name]:
                warnings.warn(
                    f"silo {name!r} sent what is no reply ({printable(error)}); it counts as not "
                    "answered",
                    stacklevel=2,
                )
            self.refused[name].append(printable(error))


def _checked(leaves: list, kind: PyTree) -> PyTree:
    """Return a reply as a pytree.

    :raises ValueError: if its arrays are not of the expected shapes and types.
    """
    expected, tree = jax.tree.flatten(kind)
    got = [
        (str(np.dtype(x.dtype)), x.shape) if isinstance(x, np.ndarray) else type(x).__name__
        for x in leaves
    ]
    wanted = [(str(np.dtype(x.dtype)), x.shape) for x in expected]
    if got != wanted:
        raise ValueError(f"arrays {got}, expected {wanted}")
    return jax.tree.unflatten(tree, leaves)


def connect(
    transport: Transport,
    model: Callable,
    *,
    shared: Mapping[str, Column] | None = None,
    public: tuple[str, ...] = (),
    fit: Fit | None = None,
    fresh: bool = False,
    server: int | None = None,
    max_rows: int = 10_000_000,
) -> RemoteSilos:
    """Connect to silos over a transport, and check that all have the same model and versions.

    :param transport: transport of bytes to silos by name.
    :param model: the marked model.
    :param shared: values of the shared arguments (without rows, the same in all silos). Silos
        compare them with their own, and send none.
    :param public: public arguments, as in the kernel.
    :param fit: the variational fit over this wire, with the model as
        ``fit.model``. Silos have the same one.
    :param fresh: whether silos forget their states for servers before this one. Checkpoints of
        these servers are then of no use.
    :param server: number of the server, for a transport that repeats its messages when it goes on
        (:class:`~numpyro_fed.engines.study.StudyFolder`). By default it is drawn anew.
    :param max_rows: largest number of rows in a row group that a silo may report.
    :return: the silos, in place of :class:`Silos`.
    :raises ValueError: naming the silo and the difference.
    :raises RuntimeError: naming the silos that did not answer.
    """
    mine, shared = versions(), dict(shared or {})
    hello = _all(
        transport, {name: pack({"what": "hello", "protocol": PROTOCOL}) for name in transport.names}
    )
    for name, answer in hello.items():
        _same("version", name, answer.get("versions"), mine)
    who = [f"silo {name!r}" for name in hello]
    told = [
        checked(answer.get("about"), party, max_rows)
        for answer, party in zip(hello.values(), who, strict=True)
    ]
    for name, about in zip(hello, told, strict=True):
        if about["names"] != [name]:
            raise ValueError(
                f"silo {name!r} says that it is {about['names']}; expected one silo, of this name"
            )
        if set(about["shared"]) != set(shared):
            raise ValueError(
                f"silo {name!r} has the shared arguments {sorted(about['shared'])}, the server "
                f"{sorted(shared)}; expected the same: "
                "connect(..., shared={argument: value}), or an entry in rows= for what is a silo's "
                "own"
            )
    known = joined_spec(told, who, shared)
    carrier = Wire(transport, known, model, public, fit, server)
    model_here = fingerprint(carrier.factors, known, fit)
    told_all = pack(
        {"what": "open", "silos": as_values(known), "server": carrier.server, "fresh": fresh}
    )
    opened = _all(transport, dict.fromkeys(known.names, told_all))
    for name, answer in opened.items():
        _same("model", name, answer.get("model"), model_here)
    return RemoteSilos(known, carrier)


def _same(what: str, name: str, theirs: object, mine: Facts) -> None:
    if not isinstance(theirs, dict):
        raise ValueError(f"silo {name!r} does not say which {what} it has; expected {sorted(mine)}")
    for key, expected in mine.items():
        if theirs.get(key) != expected:
            raise ValueError(
                f"silo {name!r} has another {what}: {key} {printable(theirs.get(key))}, "
                f"expected {expected}; give all parties the same"
            )


def _all(transport: Transport, messages: dict[str, bytes]) -> dict[str, Values]:
    """Return the answers of all silos, in the order of the messages.

    :raises ValueError: naming the silo, for an error of a silo or an answer that cannot be read.
    :raises RuntimeError: naming the silos that did not answer.
    """
    answers = transport.exchange(messages)
    lost = [name for name in messages if name not in answers]
    if lost:
        raise RuntimeError(
            f"silos {lost} did not answer; expected silos that are up, under these names"
        )
    out = {}
    for name in messages:
        try:
            if len(answers[name]) > _MAX_ANSWER:
                raise ValueError(f"{len(answers[name]):,} bytes, expected at most {_MAX_ANSWER:,}")
            answer = unpack(answers[name], keys=False)
        except ValueError as error:
            raise ValueError(f"silo {name!r} sent what is no answer: {printable(error)}") from error
        if not isinstance(answer, dict):
            raise ValueError(
                f"silo {name!r} sent what is no answer: {type(answer).__name__}, expected a "
                "dictionary"
            )
        if "error" in answer:
            raise ValueError(f"silo {name!r}: {printable(answer['error'])}")
        if any(np.ndim(x) for x in jax.tree.leaves(answer)):
            raise ValueError(
                f"silo {name!r} sent what is no answer: an array, expected texts and numbers"
            )
        out[name] = answer
    return out
