"""Remote silos, whose rows the server does not have: calls, carriers and the workers of the silos.

The server knows the silos' names, numbers of rows, and the types of a row: :class:`RemoteSilos`. It
sends *calls* to the silos: an algorithm's ``local``, a key, a message. A :class:`SiloWorker`
answers them from its own rows. The worker keeps private states (local latents, the local map) in
numbered slots, and the server sees only the numbers. A carrier brings calls and replies across:
:class:`Loopback` in one process, :mod:`numpyro_fed.engines.spmd` over JAX processes.
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
from numpyro_fed.rounds.task import SiloTask

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
    """Number of a slot, in place of the private states that silos keep in it."""

    slot: int = field(metadata={"static": True})


class Call(NamedTuple):
    """Call of one silo.

    :param number: number of the silo.
    :param local: the task of the silo.
    :param key: key for the task.
    :param message: message for the task.
    :param read: slots of the states that the call starts from, as a pytree: one number, a tuple of
        numbers, or ``None``.
    :param write: slot for the silo's new private state, or ``None``. A slot is written once, so
        that a call may be made again.
    """

    number: int
    local: SiloTask
    key: Array
    message: Any
    read: Any = None
    write: int | None = None


_SMALL = 1 << 13  # rows up to which a silo is padded to the largest, so that silos share a program
TRIES = 5  # calls of a silent silo that the round needs


class SiloError(RuntimeError):
    """Error of a silo that refuses a call, with its reason, or that does not answer."""


class Carrier:
    """Carrier of calls to silos and of their replies.

    :param workers: workers of the silos in this process, by number.
    :ivar token: random name of the carrier; states in its slots are recognized by it.
    """

    guarded = False  # True if silos have guards, which add exact noise

    def __init__(self, workers: dict[int, "SiloWorker"]) -> None:
        self.workers = workers
        self.token = uuid.uuid4().hex
        self.next_slot = 0
        self._kinds: dict[int, Any] = {}  # types of the state in each slot
        self._types: dict[Any, Any] = {}

    def ask(self, calls: list[Call]) -> list[Any]:
        """Return the replies in the order of the calls; ``None`` for a silo that did not answer."""
        raise NotImplementedError

    def new_slot(self) -> int:
        """Return a new slot's number; each call that writes needs one of its own."""
        self.next_slot += 1
        return self.next_slot - 1

    def check(self, check: Callable[[Silos], None]) -> None:
        """Have each process check the rows of its own silos.

        :param check: a function that raises a ``ValueError`` for silos with wrong rows.
        """
        raise NotImplementedError

    def forget(self, slots: list[int], *, now: bool = False) -> None:
        """Have silos forget the states in some slots.

        :param now: whether to tell them at once, and not with their next call.
        """
        for slot in slots:
            self._kinds.pop(slot, None)
            for site in self.workers.values():
                site.kept.pop(slot, None)

    def position(self) -> dict[str, Any]:
        """Return the number of the next slot and the types in all slots, for a checkpoint."""
        return {"next": self.next_slot, "kinds": list(self._kinds.items())}

    def go_on(self, position: dict[str, Any]) -> None:
        """Continue from the position in a checkpoint."""
        self.next_slot = max(self.next_slot, position["next"])
        self._kinds |= dict(position["kinds"])

    def type_of(self, call: Call, site: "SiloWorker") -> Any:
        """Return shapes and types of the reply to a call, without making the call.

        The carrier notes the types of the state that the call writes.

        :param site: the worker of any silo; its rows may be types alone.
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


def _type(x: Any) -> Any:
    """Return the type of an array, or of a type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def types_of(tree: Any) -> Any:
    """Return shapes and types of a pytree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), tree)


class SiloAlone(Silos):
    """Rows of one silo, padded to the largest, and the sizes of all silos."""

    def offsets(self, group: str) -> np.ndarray:
        return np.zeros(len(self), int)


jax.tree_util.register_pytree_node(
    SiloAlone, SiloAlone.tree_flatten, lambda aux, children: SiloAlone.tree_unflatten(aux, children)
)


@partial(jax.jit, static_argnames=("local", "pad"))
def _answer(
    local: SiloTask, pad: tuple, key: Array, message: Any, state: Any, rows: SiloAlone, number: Any
) -> Any:
    return local(key, message, state, SiloView(rows, number, pad))


def rows_of(view: SiloView) -> SiloRows:
    """Return the rows of a worker's silo, padded, as arrays of their own."""
    silos = view.silos
    shared, static = split_shared(silos.shared)
    sizes = {group: view.size(group) for group, _ in view.pad}
    return SiloRows(silos.rows, shared, sizes, silos.order, view.number, static, view.pad)


class SiloWorker:
    """Worker of a silo, which has its rows and keeps its private states.

    :param number: number of the silo among all silos.
    :param rows: its rows.
    :param pad: number of rows in each row group after padding.
    """

    def __init__(self, number: int, rows: SiloAlone, pad: tuple[tuple[str, int], ...]) -> None:
        self.number, self.rows, self.pad = number, rows, pad
        self.kept: dict[int, Any] = {}

    def reply(self, call: Call, state: Any) -> tuple[Any, Any]:
        """Return the reply to a call, and the new private state."""
        number = np.int32(self.number)  # a JAX array would dispatch one more program
        return _answer(call.local, self.pad, call.key, call.message, state, self.rows, number)

    def type_of(self, local: SiloTask, message: Any, state: Any) -> tuple[Any, Any]:
        """Return shapes and types of the reply and of the new private state.

        :param local: the call's ``local``.
        :param message: shapes and types of its message.
        :param state: shapes and types of the state that it starts from.
        """
        number = jax.ShapeDtypeStruct((), jnp.int32)
        ask = partial(_answer, local, self.pad)
        found: tuple[Any, Any] = jax.eval_shape(
            ask, random.key(0), message, state, self.rows, number
        )
        return found

    def answer(self, call: Call) -> Any:
        """Return the reply to a call, and keep the new private state.

        :raises SiloError: naming the silo, if a state that the call starts from is gone.
        """
        if any(slot not in self.kept for slot in jax.tree.leaves(call.read)):
            raise SiloError(
                f"silo {self.rows.names[self.number]!r} no longer has the states of this run; "
                "expected the carrier, or the silo's folder, with which the run began: delete the "
                "checkpoint to start anew"
            )
        reply, new = self.reply(call, jax.tree.map(self.kept.__getitem__, call.read))
        if call.write is not None:
            self.kept[call.write] = new
        return reply


def worker_of(silos: Silos, name: str, known: Silos | None = None) -> SiloWorker:
    """Return the worker of one of the silos in this process.

    :param known: the facts about all silos, in whose order silos are numbered; by default
        ``silos``.
    """
    here, known = silos.names.index(name), silos if known is None else known
    number = known.names.index(name)
    rows: dict[str, Array] = {}
    order: dict[str, Array] = {}
    # a false size of another silo costs this one the time of a small silo at most
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
    alone = SiloAlone.from_spec(known.spec, rows, order, silos.shared_arrays)
    return SiloWorker(number, alone, pad)


def resized(known: Silos, sizes: Mapping[str, Sequence[int]]) -> Silos:
    """Return the facts about silos with other sizes and no rows.

    :param sizes: number of rows in each row group, by silo.
    """
    rows = {
        k: jax.ShapeDtypeStruct((sum(sizes[known.group[k]]), *x.shape[1:]), x.dtype)
        for k, x in known.rows.items()
    }
    return known.like(known.names, sizes, rows, {})


def typed_worker(known: Silos) -> SiloWorker:
    """Return a worker without rows, which gives shapes and types of replies alone."""
    most = largest(known)
    pad = dict(most)
    rows = {
        k: jax.ShapeDtypeStruct((pad[known.group[k]], *x.shape[1:]), x.dtype)
        for k, x in known.rows.items()
    }
    order = {g: jax.ShapeDtypeStruct((n,), jnp.int32) for g, n in pad.items()}
    return SiloWorker(0, SiloAlone.from_spec(known.spec, rows, order, known.shared_arrays), most)


class Loopback(Carrier):
    """Carrier to silos in this process, each with its own rows and states, for tests."""

    def __init__(self, silos: Silos) -> None:
        super().__init__({n: worker_of(silos, name) for n, name in enumerate(silos.names)})
        self.silos = silos

    def check(self, check: Callable[[Silos], None]) -> None:
        check(self.silos)

    def ask(self, calls: list[Call]) -> list[Any]:
        return [self.workers[call.number].answer(call) for call in calls]


class RemoteSilos(Silos):
    """Remote silos, in place of :class:`Silos` at a server that does not have the rows.

    :param known: names, sizes, row types and shared arguments of the silos; its rows are dropped.
    :param carrier: the carrier of calls and replies.
    :raises ValueError: for silos of several structures.
    """

    carrier: Carrier

    def __init__(self, known: Silos, carrier: Carrier) -> None:
        if not isinstance(known, Silos):
            raise ValueError(
                f"expected fed.Silos, got {type(known).__name__}: remote silos of several "
                "structures are not built; give all silos one structure"
            )
        self.__dict__.update(known.__dict__)
        self.rows = {leaf: _type(x) for leaf, x in known.rows.items()}
        self.order, self.carrier = {}, carrier

    def ask(self, calls: list[Call]) -> list[Any]:
        """Return the replies to calls; ``None`` for a silo that did not answer."""
        return self.carrier.ask(calls)

    def ask_again(self, calls: list[Call], all_needed: bool = True) -> tuple[list[Any], np.ndarray]:
        """Return replies, and how often each call was made; silent silos are called five times.

        A call that is made again must have the same reply.

        :param all_needed: whether every call needs a reply; otherwise one reply is enough.
        :raises SiloError: naming the silos that did not answer.
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
        """Return the replies to calls of a fit's setup, which needs every silo.

        :raises RuntimeError: naming the silos that did not answer.
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
        self, local: SiloTask, key: Array, message: Any, states: Kept | None
    ) -> tuple[Any, Kept | None]:
        """Call all silos, as :func:`numpyro_fed.rounds.inline.ask_all` does.

        New states stay in the silos, if ``local.keeps`` is true.
        """
        slot = self.carrier.new_slot() if local.keeps else None
        read = None if states is None else states.slot
        calls = [
            Call(n, local, random.fold_in(key, n), local.tell(message, n), read, slot)
            for n in range(len(self))
        ]
        replies = self.ask_for_sure(calls)
        return jax.tree.map(lambda *x: np.stack(x), *replies), None if slot is None else Kept(slot)

    @property
    def pooled(self) -> dict[str, Any]:
        """Raise a ``ValueError``: the rows of remote silos are not pooled."""
        raise ValueError(
            f"silos {list(self.names)} are remote, and their rows are not pooled; expected "
            "fed.Silos with its rows in this process"
        )

    def __getitem__(self, name: str) -> dict[str, Any]:
        raise ValueError(
            f"silo {name!r} is remote; expected fed.Silos with its rows in this process"
        )

    # In this pytree the shared arguments alone are arrays.

    def tree_flatten(self) -> tuple[tuple, Any]:
        types = tuple(sorted(self.rows.items()))
        return ({}, {}, self.shared_arrays), (self.spec, types, self.carrier)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: tuple) -> Self:
        spec, types, carrier = aux
        self = cls.from_spec(spec, dict(types), {}, children[2])
        self.carrier = carrier
        return self


jax.tree_util.register_pytree_node(
    RemoteSilos,
    RemoteSilos.tree_flatten,
    lambda aux, children: RemoteSilos.tree_unflatten(aux, children),
)
