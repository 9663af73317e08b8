"""Silos whose rows are elsewhere.

What the server knows of them, how it asks them, and what answers there.

The server knows names, numbers of rows, and the types of a row: :class:`RemoteSilos`. All that it
wants of the rows it asks for by *calls*: an algorithm's ``local``, a key, a message. A
:class:`SiloWorker` answers them from its own rows; what is private to it (local latents, the local map)
it keeps in numbered slots, of which the server only ever sees the numbers. A carrier brings calls
and replies across: :class:`Loopback` in one process, :mod:`numpyro_fed.engines.spmd` over JAX
processes.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, SiloView, largest, split_shared

__all__ = [
    "Call",
    "Carrier",
    "Kept",
    "Loopback",
    "RemoteSilos",
    "SiloError",
    "SiloWorker",
    "resized",
    "rows_of",
    "typed_worker",
    "types_of",
    "worker_of",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Number that stands, at the server, for what silos keep for themselves."""

    slot: int = field(metadata={"static": True})


class Call(NamedTuple):
    """Question to one silo.

    :param number: the silo's.
    :param local: hashable ``local(key, message, state, view) -> (reply, state)``.
    :param key: as the silo is to use it.
    :param message: what it is told.
    :param read: slots of what it starts from, as a pytree: a number, some numbers, or ``None``.
    :param write: slot where it keeps its new private state. A slot is written once, so that a call
        may be made again.
    """

    number: int
    local: Callable
    key: Array
    message: Any
    read: Any = None
    write: int | None = None


_SMALL = 1 << 13  # rows up to which a silo is padded to the largest, so that silos share a program
TRIES = 5  # times that a silo is asked that a round cannot do without


class SiloError(RuntimeError):
    """Error of a silo that says in words why it does not answer, or stays silent."""


class Carrier:
    """Brings calls to silos and replies back.

    :param sites: those of this process, by number.
    :ivar token: a name of its own, by which states that are kept under its slots are known.
    """

    guarded = False  # whether silos have guards, which add exact noise

    def __init__(self, workers: dict[int, "SiloWorker"]) -> None:
        self.workers = workers
        self.token = uuid.uuid4().hex
        self.next_slot = 0
        self._kinds: dict[int, Any] = {}  # of what each slot holds
        self._types: dict[Any, Any] = {}

    def ask(self, calls: list[Call]) -> list[Any]:
        """The replies in the order of the calls; ``None`` for a silo that did not answer."""
        raise NotImplementedError

    def new_slot(self) -> int:
        """A number under which a silo keeps something; no two calls that write have the same."""
        self.next_slot += 1
        return self.next_slot - 1

    def check(self, check: Callable[[Silos], None]) -> None:
        """Have the silos' rows checked where they are trusted with it.

        :param check: raises a ValueError for silos whose rows are wrong.
        """
        raise NotImplementedError

    def forget(self, slots: list[int], *, now: bool = False) -> None:
        """Have silos forget what they keep under some numbers.

        :param now: not only when they are asked next.
        """
        for slot in slots:
            self._kinds.pop(slot, None)
            for site in self.workers.values():
                site.kept.pop(slot, None)

    def position(self) -> dict[str, Any]:
        """The count of slots and what they hold, for a checkpoint."""
        return {"next": self.next_slot, "kinds": list(self._kinds.items())}

    def go_on(self, position: dict[str, Any]) -> None:
        """Count on from a checkpoint."""
        self.next_slot = max(self.next_slot, position["next"])
        self._kinds |= dict(position["kinds"])

    def type_of(self, call: Call, site: "SiloWorker") -> Any:
        """Shapes and types of the reply to a call, which any silo's site tells, without asking it.

        What the call writes is noted.

        :param site: one whose rows may be types alone.
        """
        state = jax.tree.map(self._kinds.__getitem__, call.read)
        spec = types_of(call.message)
        key = (
            call.local,
            jax.tree.structure((spec, state)),
            tuple((x.shape, x.dtype) for x in jax.tree.leaves((spec, state))),
        )
        if key not in self._types:
            self._types[key] = site.type_of(call.local, spec, state)
        reply, new = self._types[key]
        if call.write is not None:
            self._kinds[call.write] = new
        return reply


def types_of(tree: Any) -> Any:
    """Shapes and types of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), tree)


class SiloAlone(Silos):
    """The rows of one silo, padded to the largest, under its own number.

    Of the others their sizes are known.
    """

    def offsets(self, group: str) -> np.ndarray:
        return np.zeros(len(self), int)


jax.tree_util.register_pytree_node(
    SiloAlone, SiloAlone.tree_flatten, lambda aux, children: SiloAlone.tree_unflatten(aux, children)
)


@partial(jax.jit, static_argnames=("local", "pad"))
def _answer(
    local: Callable, pad: tuple, key: Array, message: Any, state: Any, rows: SiloAlone, number: Any
) -> Any:
    return local(key, message, state, SiloView(rows, number, pad))


def rows_of(view: SiloView) -> SiloRows:
    """Return a site's rows, which lie padded already, as arrays of their own."""
    silos = view.silos
    shared, static = split_shared(silos.shared)
    sizes = {group: view.size(group) for group, _ in view.pad}
    return SiloRows(silos.rows, shared, sizes, silos.order, view.number, static, view.pad)


class SiloWorker:
    """A silo's side: its rows, and what it keeps for itself.

    :param number: its place among all silos.
    :param rows: its rows.
    :param pad: to how many rows of each row group they are padded.
    """

    def __init__(self, number: int, rows: SiloAlone, pad: tuple[tuple[str, int], ...]) -> None:
        self.number, self.rows, self.pad = number, rows, pad
        self.kept: dict[int, Any] = {}

    def reply(self, call: Call, state: Any) -> tuple[Any, Any]:
        """The reply to a call, and the new private state."""
        number = np.int32(self.number)  # an array of JAX's would be one more program to dispatch
        return _answer(call.local, self.pad, call.key, call.message, state, self.rows, number)

    def type_of(self, local: Callable, message: Any, state: Any) -> tuple[Any, Any]:
        """Shapes and types of a reply and of the new private state, of a message's and of the old
        one's.
        """
        number = jax.ShapeDtypeStruct((), jnp.int32)
        ask = partial(_answer, local, self.pad)
        found: tuple[Any, Any] = jax.eval_shape(
            ask, random.key(0), message, state, self.rows, number
        )
        return found

    def answer(self, call: Call) -> Any:
        """The reply to a call; the new private state stays here."""
        if any(slot not in self.kept for slot in jax.tree.leaves(call.read)):
            raise SiloError(
                f"silo {self.rows.names[self.number]!r} has nothing of what this run kept there; "
                "expected the carrier, or the silo's folder, of before: delete the "
                "checkpoint to start anew"
            )
        reply, new = self.reply(call, jax.tree.map(self.kept.__getitem__, call.read))
        if call.write is not None:
            self.kept[call.write] = new
        return reply


def worker_of(silos: Silos, name: str, known: Silos | None = None) -> SiloWorker:
    """The site of one of the silos at hand.

    :param known: what is known of all silos, in whose order it is numbered; by default ``silos``
        are all there are.
    """
    here, known = silos.names.index(name), silos if known is None else known
    number = known.names.index(name)
    rows: dict[str, Array] = {}
    order: dict[str, Array] = {}
    # what another silo says of its size costs this one no more than a small silo's time
    pad = tuple((g, max(n[number], min(max(n), _SMALL))) for g, n in known.sizes.items())
    for group, count in pad:
        inside = np.minimum(np.arange(count), known.sizes[group][number] - 1)
        own = silos.offsets(group)[here] + inside
        order[group] = (
            silos.order[group][own]
            if known is silos
            else jnp.asarray(known.offsets(group)[number] + inside, jnp.int32)
        )
        rows |= {leaf: x[own] for leaf, x in silos.rows.items() if silos.group[leaf] == group}
    shared = {k: silos.shared[k] for k in silos._arrays}
    return SiloWorker(
        number, SiloAlone.tree_unflatten(tuple(known._aux()[:7]), (rows, order, shared)), pad
    )


def resized(known: Silos, sizes: Mapping[str, Sequence[int]]) -> Silos:
    """Return what is known of silos, were they of other sizes; of rows types alone.

    :param sizes: of each row group, by silo.
    """
    rows = {
        k: jax.ShapeDtypeStruct((sum(sizes[known.group[k]]), *x.shape[1:]), x.dtype)
        for k, x in known.rows.items()
    }
    return known.like(known.names, sizes, rows, {})


def typed_worker(known: Silos) -> SiloWorker:
    """A site of which types alone are known.

    What it would answer to a call has shapes and types.
    """
    most = largest(known)
    pad = dict(most)
    rows = {
        k: jax.ShapeDtypeStruct((pad[known.group[k]], *x.shape[1:]), x.dtype)
        for k, x in known.rows.items()
    }
    order = {g: jax.ShapeDtypeStruct((n,), jnp.int32) for g, n in pad.items()}
    shared = {k: known.shared[k] for k in known._arrays}
    return SiloWorker(
        0, SiloAlone.tree_unflatten(tuple(known._aux()[:7]), (rows, order, shared)), most
    )


class Loopback(Carrier):
    """Carrier to silos that are all in this process, each with its own rows and state.

    For tests.
    """

    def __init__(self, silos: Silos) -> None:
        super().__init__({n: worker_of(silos, name) for n, name in enumerate(silos.names)})
        self.silos = silos

    def check(self, check: Callable[[Silos], None]) -> None:
        check(self.silos)

    def ask(self, calls: list[Call]) -> list[Any]:
        return [self.workers[call.number].answer(call) for call in calls]


class RemoteSilos(Silos):
    """Silos whose rows are elsewhere, as the server knows them. Takes the place of :class:`Silos`.

    :param known: names, sizes, row types and shared arguments; of its rows nothing is kept.
    :param carrier: what asks the silos.
    """

    carrier: Carrier

    def __init__(self, known: Silos, carrier: Carrier) -> None:
        if not isinstance(known, Silos):
            raise ValueError(
                f"expected fed.Silos, got {type(known).__name__}: silos elsewhere are of one "
                "structure, as what differs between structures is not built there"
            )
        self.__dict__.update(known.__dict__)
        self.rows = {leaf: jax.ShapeDtypeStruct(x.shape, x.dtype) for leaf, x in known.rows.items()}  # type: ignore[misc]
        self.order, self.carrier = {}, carrier

    def ask(self, calls: list[Call]) -> list[Any]:
        """Replies to calls, ``None`` where a silo did not answer."""
        return self.carrier.ask(calls)

    def ask_again(self, calls: list[Call], all_needed: bool = True) -> tuple[list[Any], np.ndarray]:
        """Return replies, and how often each call was made: silent silos are asked five times.

        The calls have to have the same answers when they are made again.

        :param all_needed: whether each has to be answered, or one is enough.
        :raises SiloError: naming the silos that did not.
        """
        replies, times = list(self.ask(calls)) if calls else [], np.ones(len(calls), np.int64)
        for left in range(TRIES - 1, -1, -1):
            silent = [i for i, reply in enumerate(replies) if reply is None]
            if not silent or not (all_needed or len(silent) == len(calls)):
                break
            if not left:
                lost = sorted({self.names[calls[i].number] for i in silent})
                raise SiloError(f"silos {lost} did not answer, asked {TRIES} times")
            for i, reply in zip(silent, self.ask([calls[i] for i in silent]), strict=True):
                replies[i] = reply
                times[i] += 1
        return replies, times

    def ask_for_sure(self, calls: list[Call]) -> list[Any]:
        """Replies to calls that have to be answered while a fit is prepared.

        :raises RuntimeError: naming the silos that did not.
        """
        replies = self.ask(calls)
        lost = sorted(
            {
                self.names[call.number]
                for call, reply in zip(calls, replies, strict=True)
                if reply is None
            }
        )
        if lost:
            raise RuntimeError(
                f"silos {lost} did not answer while the fit was prepared, which needs all of them; "
                "expected silos that are up: start again"
            )
        return replies

    def ask_all(
        self, local: Callable, key: Array, message: Any, states: Kept | None
    ) -> tuple[Any, Kept | None]:
        """Ask all silos, as :func:`numpyro_fed.rounds.inline.ask_all` does.

        New states stay in the silos, of a ``local`` that ``keeps`` them.
        """
        tell = getattr(local, "tell", lambda message, number: message)
        slot = self.carrier.new_slot() if getattr(local, "keeps", False) else None
        read = None if states is None else states.slot
        calls = [
            Call(n, local, random.fold_in(key, n), tell(message, n), read, slot)
            for n in range(len(self))
        ]
        replies = self.ask_for_sure(calls)
        return jax.tree.map(lambda *x: np.stack(x), *replies), None if slot is None else Kept(slot)

    @property
    def pooled(self) -> dict[str, Any]:
        """Refused: rows stay where they are."""
        raise ValueError(
            f"the rows of {list(self.names)} are elsewhere, and are not pooled; expected fed.Silos "
            "at hand"
        )

    def __getitem__(self, name: str) -> dict[str, Any]:
        raise ValueError(f"the rows of silo {name!r} are elsewhere; expected fed.Silos at hand")

    # As a pytree only its shared arguments are arrays.

    def _aux(self) -> tuple:
        specs = tuple(sorted(self.rows.items()))
        return (*super()._aux(), (specs, self.carrier))

    def tree_flatten(self) -> tuple[tuple, tuple]:
        return ({}, {}, {k: self.shared[k] for k in self._arrays}), self._aux()

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> Self:
        self = super().tree_unflatten(aux[:-1], children)
        specs, self.carrier = aux[-1]
        self.rows, self.order = dict(specs), {}
        return self


jax.tree_util.register_pytree_node(
    RemoteSilos,
    RemoteSilos.tree_flatten,
    lambda aux, children: RemoteSilos.tree_unflatten(aux, children),
)
