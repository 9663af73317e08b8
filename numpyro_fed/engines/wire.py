"""The wire contract: what the server of a federation says to silos and hears from them, as bytes.

A carrier between organisations brings bytes to a silo by name, and bytes back (:class:`Messenger`). First silos say what they are (names and numbers of
rows, types, shared arguments), then each is told of the others and says which model it has: its program, and versions. After that all messages are calls, of
:data:`ANSWERED` alone, and replies, whose shapes and types the server knows beforehand. Nothing is pickled. The silo's side is :mod:`numpyro_fed.engines.silo_side`.
"""

import secrets
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from numpyro_fed.density import Factors
from numpyro_fed.engines.packing import pack, unpack
from numpyro_fed.engines.remote import Call, Carrier, RemoteSilos, SiloError, nowhere
from numpyro_fed.engines.roster import (
    as_values,
    description,
    fingerprint,
    fit_together,
    from_values,
    known_of,
    versions,
)
from numpyro_fed.engines.secure_sum import types_masked
from numpyro_fed.factorise import factorise
from numpyro_fed.silos import Silos
from numpyro_fed.storage import largest

__all__ = ["ANSWERED", "Messenger", "Traffic", "Wire", "connect", "owned"]

PROTOCOL = 1

# what a silo answers: what its reply holds, and how many numbers that is, for d global parameters
ANSWERED = {
    "numpyro_fed.proof:OwnTerm": ("log density of its rows at one point, its gradient's norm, and log p(theta)", "3"),
    "numpyro_fed.proof:LeakageLocal": ("how far elements of its plates depend on each other", "1"),
    "numpyro_fed.proof:BatchGap": ("how far terms of a minibatch are from the same rows' terms", "1"),
    "numpyro_fed.surrogates.local_score:ScoreLocal": (
        "its surrogate: gradient and precision of its log marginal likelihood, fitted at the server's points, and its values there",
        "d + d^2 (beyond 500 dimensions 2 d), one for each point; where d <= 16 in the last rounds d (1 + 2 d + d (d + 1) / 2) more",
    ),
    "numpyro_fed.surrogates.laplace:LaplaceLocal": (
        "gradient and precision of its log marginal likelihood at one point, and its value",
        "d + d^2",
    ),
    "numpyro_fed.mcmc.pilot:PilotLocal": (
        "means and norms of what its surrogate lacks, on 32 walks",
        "64 d, and up to 64 for each walk",
    ),
    "numpyro_fed.vi.remote:InitLocal": ("nothing: it makes its own first parameters, and keeps them", ""),
    "numpyro_fed.vi.remote:RoundLocal": (
        "SFVI: its part of the bound and of its gradient; SFVI-Avg: global parameters after its steps; conducive rounds: its site's natural parameters, its part of the bound, and with optimisers its copies of learned parameters",
        "2 d for each draw, and as many as learned parameters; as many as global parameters; d + d (d + 1) / 2 (diagonal: 2 d)",
    ),
    "numpyro_fed.vi.draws:EstimateLocal": (
        "estimates of its log likelihood at the server's draws",
        "1 for each draw, and its worst k",
    ),
    "numpyro_fed.mcmc.remote:TellLocal": ("nothing: it keeps surrogates and step size", ""),
    "numpyro_fed.mcmc.remote_chains:StartLocal": ("nothing: it draws its first local latents, and keeps them", ""),
    "numpyro_fed.mcmc.remote_chains:StayLocal": (
        "a chain's position after its stay, four statistics, and the mean of what its surrogate lacks",
        "2 d + 5 in each visit",
    ),
    "numpyro_fed.mcmc.remote_network:NodeStartLocal": ("nothing: it draws its first local latents, and keeps them", ""),
    "numpyro_fed.mcmc.remote_network:NodeLocal": (
        "gradient of its part of the potential at its node's position, and the acceptance of its local moves",
        "d + 1 in each step of each network",
    ),
}


class Messenger(Protocol):
    """What carries bytes: one message to each named silo, and replies by name; of a silo that did not answer in time there is none.

    A message may arrive twice: silos then answer the same.
    """

    names: tuple[str, ...]

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        """Replies to messages."""
        ...


class Traffic(NamedTuple):
    """What went over the wire to one silo and back: messages, and bytes of both directions."""

    messages: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


def owned(factors: Factors, known: Silos, fit: Any) -> dict[str, Any]:
    """What both sides have of their own, by the name that it has on the wire."""
    learned = {} if fit is None else {"factors of the fit": fit.factored(known)}
    return {**learned, "factors": factors, "pad": largest(known)}


class Wire(Carrier):
    """The server's side of the wire.

    A reply of another type than the call's, or one that cannot be read, counts as none, with a warning that names the silo.

    :param messenger: what carries bytes.
    :param known: what is known of all silos.
    :param model: the marked model, as every silo has it.
    :param public: as of the kernel.
    :param fit: the :class:`SFVI` or :class:`SFVIAvg` that goes over this wire, if one does.
    :ivar traffic: by silo, messages and bytes that went over the wire.
    :ivar refused: by silo, why replies were refused.
    """

    def __init__(
        self, messenger: Messenger, known: Silos, model: Callable, public: tuple[str, ...] = (), fit: Any = None
    ) -> None:
        super().__init__({})
        self.messenger, self.names = messenger, known.names
        self.traffic = {name: Traffic() for name in known.names}
        self.refused: dict[str, list[str]] = {name: [] for name in known.names}
        self.factors = factorise(model, known, public=public)
        self._own = owned(self.factors, known, fit)
        self._any = nowhere(known)
        self.server = secrets.randbits(31)
        self.next_slot = self.server << 32  # so that slots of two servers do not meet
        self._owners: dict[int, list[int]] = {}  # silos that keep something under a slot
        self._forget: dict[int, list[int]] = {n: [] for n in range(len(self.names))}

    def ask(self, calls: list[Call]) -> list[Any]:
        """The calls of one silo go in one message."""
        kinds = [self.type_of(call, self._any) for call in calls]
        kinds = [types_masked(k) if getattr(c.local, "summed", False) else k for c, k in zip(calls, kinds, strict=True)]
        of: dict[int, list[int]] = {}
        for i, call in enumerate(calls):
            of.setdefault(call.number, []).append(i)
            if call.write is not None:
                self._owners.setdefault(call.write, []).append(call.number)
        messages = {self.names[n]: self._message(n, [calls[i] for i in mine]) for n, mine in of.items()}
        answers = self.messages(messages)
        replies: list[Any] = [None] * len(calls)
        for n, mine in of.items():
            name = self.names[n]
            if name in answers:
                self._take(name, answers[name], mine, kinds, replies)
                if all(replies[i] is not None for i in mine):  # else what it was to forget it may not have come to
                    self._forget[n].clear()
        return replies

    def messages(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        """Exchange messages, and count them."""
        answers = self.messenger.exchange(messages)
        for name, data in messages.items():
            old, up = self.traffic[name], len(answers.get(name, b""))
            self.traffic[name] = Traffic(old.messages + 1, old.bytes_down + len(data), old.bytes_up + up)
        return answers

    def forget(self, slots: list[int], *, now: bool = False) -> None:
        super().forget(slots)
        for slot in slots:
            for number in set(self._owners.pop(slot, [])):
                self._forget[number].append(slot)
        if now:
            self.messages({self.names[n]: self._message(n, []) for n, own in self._forget.items() if own})

    def position(self) -> dict[str, Any]:
        return {**super().position(), "owners": list(self._owners.items())}

    def go_on(self, position: dict[str, Any]) -> None:
        super().go_on({**position, "next": self.next_slot})
        self._owners |= dict(position["owners"])

    def _message(self, number: int, calls: list[Call]) -> bytes:
        head: dict[str, Any] = {"what": "calls", "server": self.server, "forget": list(self._forget[number])}
        own = self._own
        for call in calls:
            plan: Any = getattr(call.local, "plan", None)
            if hasattr(plan, "families"):  # of a variational fit, which silos make for themselves
                own = {**own, "plan": plan}
                head["independent"] = plan.families[0].group is not None
        try:
            inside = pack([(c.local, c.key, c.message, c.read, c.write) for c in calls], own)
        except TypeError as error:
            raise ValueError(
                f"what {type(calls[0].local).__name__} needs cannot go over a wire ({error}); expected the model, and the fit, that silos were connected "
                "with: connect(messenger, model, fit=...), and step sizes that are numbers or schedules of fed, not functions"
            ) from error
        return pack({**head, "calls": np.frombuffer(inside, np.uint8)})

    def _take(self, name: str, data: bytes, mine: list[int], kinds: list[Any], replies: list[Any]) -> None:
        """Put a silo's replies in their places, or none of them."""
        most = sum(x.size * x.dtype.itemsize + 200 for i in mine for x in jax.tree.leaves(kinds[i])) + 10_000
        try:
            if len(data) > most:
                raise ValueError(f"{len(data):,} bytes, expected at most {most:,}")
            answer = unpack(data)
            if not isinstance(answer, dict) or not {"error", "replies"} & set(answer):
                raise ValueError("neither replies nor an error")
            if "error" in answer:
                raise SiloError(f"silo {name!r}: {str(answer['error'])[:2000]}")
            for i, leaves in zip(mine, answer["replies"], strict=True):
                replies[i] = _checked(leaves, kinds[i])
        except (ValueError, TypeError) as error:
            for i in mine:
                replies[i] = None
            if not self.refused[name]:
                warnings.warn(f"silo {name!r} sent what is no reply ({error}); it counts as not answered", stacklevel=2)
            self.refused[name].append(str(error))


def _checked(leaves: Any, kind: Any) -> Any:
    """A reply whose arrays are of the types expected, in their tree."""
    expected, tree = jax.tree.flatten(kind)
    got = [(str(np.dtype(x.dtype)), x.shape) if isinstance(x, np.ndarray) else type(x).__name__ for x in leaves]
    wanted = [(str(np.dtype(x.dtype)), x.shape) for x in expected]
    if got != wanted:
        raise ValueError(f"arrays {got}, expected {wanted}")
    return jax.tree.unflatten(tree, leaves)


def connect(
    messenger: Messenger, model: Callable, *, public: tuple[str, ...] = (), fit: Any = None, fresh: bool = False
) -> RemoteSilos:
    """Meet the silos: what they are, and whether they have the same model and versions.

    :param messenger: brings bytes to silos of known names.
    :param model: the marked model.
    :param public: as of the kernel.
    :param fit: the :class:`SFVI` or :class:`SFVIAvg` that is to go over this wire, which silos have, too; with the model as ``fit.model``.
    :param fresh: whether silos are to forget what they keep for servers before this one, whose checkpoints are of no use then.
    :raises ValueError: naming the silo and what is different.
    :raises RuntimeError: naming silos that did not answer.
    """
    mine = versions()
    hello = _all(messenger, {name: pack({"what": "hello", "protocol": PROTOCOL}) for name in messenger.names})
    for name, answer in hello.items():
        _same("version", name, answer["versions"], mine)
    for name, answer in hello.items():
        if answer["about"]["names"] != [name]:
            raise ValueError(
                f"silo {name!r} says that it is {answer['about']['names']}; expected one silo, of this name"
            )
    who = [f"silo {name!r}" for name in hello]
    fit_together([answer["about"] for answer in hello.values()], who)
    # shared arguments by value, of which all have the same
    values = _all(messenger, {name: pack({"what": "values"}) for name in messenger.names})
    told = [from_values(answer["silos"]) for answer in values.values()]
    known = known_of(told[0], [description(silos) for silos in told], who)
    carrier = Wire(messenger, known, model, public, fit)
    model_here = fingerprint(carrier.factors, known, fit)
    told_all = pack({"what": "open", "silos": as_values(known), "server": carrier.server, "fresh": fresh})
    opened = _all(messenger, dict.fromkeys(known.names, told_all))
    for name, answer in opened.items():
        _same("model", name, answer["model"], model_here)
    return RemoteSilos(known, carrier)


def _same(what: str, name: str, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    for key, expected in mine.items():
        if theirs.get(key) != expected:
            raise ValueError(f"silo {name!r} has another {what}: {key} {theirs.get(key)}, expected {expected}")


def _all(messenger: Messenger, messages: dict[str, bytes]) -> dict[str, Any]:
    """Answers of all silos, in their order."""
    answers = messenger.exchange(messages)
    lost = [name for name in messages if name not in answers]
    if lost:
        raise RuntimeError(f"silos {lost} did not answer; expected silos that are up, under these names")
    out = {}
    for name in messages:
        try:
            answer = unpack(answers[name])
        except ValueError as error:
            raise ValueError(f"silo {name!r} sent what is no answer: {error}") from error
        if not isinstance(answer, dict) or "error" in answer:
            raise ValueError(
                f"silo {name!r}: {answer['error'] if isinstance(answer, dict) else 'no answer to the question'}"
            )
        out[name] = answer
    return out
