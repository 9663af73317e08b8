"""Remote silos, whose rows the server does not have, and carriers of calls and replies.

The server knows the silos' names, numbers of rows, and the types of a row: :class:`RemoteSilos`. It
sends *calls* to the silos: a task, a key, a message. A
:class:`~numpyro_fed.rounds.worker.SiloWorker` answers them from its own rows, and keeps private
states (local latents, the local map) in numbered slots. The server sees only the numbers. A carrier
brings calls and replies across: :class:`Loopback` in one process, :mod:`numpyro_fed.engines.spmd`
over JAX processes.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np
from jax import Array, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.rounds.worker import (
    Call,
    SiloError,
    SiloWorker,
    type_of_array,
    types_of,
    worker_of,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Number of a slot, in place of the private states that silos keep in it."""

    slot: int = field(metadata={"static": True})


TRIES = 5  # times in all that a call without a reply is made


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
            for worker in self.workers.values():
                worker.kept.pop(slot, None)

    def position(self) -> dict[str, Any]:
        """Return the number of the next slot and the types in all slots, for a checkpoint."""
        return {"next": self.next_slot, "kinds": list(self._kinds.items())}

    def go_on(self, position: dict[str, Any]) -> None:
        """Continue from the position in a checkpoint."""
        self.next_slot = max(self.next_slot, position["next"])
        self._kinds |= dict(position["kinds"])

    def type_of(self, call: Call, worker: "SiloWorker") -> Any:
        """Return shapes and types of the reply to a call, without making the call.

        The carrier notes the types of the state that the call writes.

        :param worker: the worker of any silo; its rows may be types alone.
        """
        state = jax.tree.map(self._kinds.__getitem__, call.read)
        spec = types_of(call.message)
        key = (
            call.local,
            jax.tree.structure((spec, state)),
            tuple((x.shape, x.dtype) for x in jax.tree.leaves((spec, state))),
        )
        if key not in self._types:
            self._types[key] = worker.type_of(call.local, spec, state)
        reply, new = self._types[key]
        if call.write is not None:
            self._kinds[call.write] = new
        return reply


class Loopback(Carrier):
    """Carrier to silos in this process, each with its own rows and states, for tests."""

    def __init__(self, silos: Silos) -> None:
        super().__init__({n: worker_of(silos, name) for n, name in enumerate(silos.names)})
        self.silos = silos

    def check(self, check: Callable[[Silos], None]) -> None:
        """Check all silos in one call."""
        check(self.silos)

    def ask(self, calls: list[Call]) -> list[Any]:
        """Answer the calls one after another; every silo answers."""
        return [self.workers[call.number].answer(call) for call in calls]


class RemoteSilos(Silos):
    """Remote silos, in place of :class:`Silos` at a server that does not have the rows.

    :param known: names, sizes, row types and shared arguments of the silos; its rows are dropped.
    :param carrier: the carrier of calls and replies.
    :raises ValueError: for silos of several structures.
    """

    carrier: Carrier
    numbers: tuple[int, ...]  # the carrier's numbers of these silos

    def __init__(self, known: Silos, carrier: Carrier) -> None:
        if not isinstance(known, Silos):
            raise ValueError(
                f"expected fed.Silos, got {type(known).__name__}: remote silos of several "
                "structures are not built; give all silos one structure"
            )
        self.__dict__.update(known.__dict__)
        self.rows = {leaf: type_of_array(x) for leaf, x in known.rows.items()}
        self.order, self.carrier = {}, carrier
        self.numbers = tuple(range(len(known)))

    def among(self, names: Sequence[str]) -> "RemoteSilos":
        """Return some of the silos, by the same carrier."""
        spec = self.spec.among(names)
        sizes = dict(spec.sizes)
        rows = {
            leaf: jax.ShapeDtypeStruct((sum(sizes[self.group[leaf]]), *x.shape[1:]), x.dtype)
            for leaf, x in self.rows.items()
        }
        known = Silos.from_spec(spec, rows, {}, self.shared_arrays)
        some = RemoteSilos(known, self.carrier)
        some.numbers = tuple(self.numbers[self.names.index(name)] for name in names)
        return some

    def ask(self, calls: list[Call]) -> list[Any]:
        """Return the replies to calls; ``None`` for a silo that did not answer."""
        return self.carrier.ask([x._replace(number=self.numbers[x.number]) for x in calls])

    def ask_again(
        self, calls: list[Call], least: int | None = None
    ) -> tuple[list[Any], np.ndarray]:
        """Return replies, and how often each call was made.

        Calls without a reply are made up to five times in all, until enough replies have come. Each
        time a call must have the same reply.

        :param least: number of replies that are enough; by default all.
        :raises SiloError: naming the silos that did not answer.
        """
        replies, times = [None] * len(calls), np.zeros(len(calls), np.int64)
        silent, enough = [*range(len(calls))], len(calls) if least is None else least
        while silent and (not times.any() or len(calls) - len(silent) < enough):
            if times.max() == TRIES:
                lost = self._names_of([calls[i] for i in silent])
                raise SiloError(f"silos {lost} did not answer, asked {TRIES} times")
            for i, reply in zip(silent, self.ask([calls[i] for i in silent]), strict=True):
                replies[i] = reply
                times[i] += 1
            silent = [i for i in silent if replies[i] is None]
        return replies, times

    def ask_for_sure(self, calls: list[Call]) -> list[Any]:
        """Return the replies to calls of a fit's setup, which needs every silo.

        :raises RuntimeError: naming the silos that did not answer.
        """
        replies = self.ask(calls)
        silent = [call for call, reply in zip(calls, replies, strict=True) if reply is None]
        if silent:
            raise RuntimeError(
                f"silos {self._names_of(silent)} did not answer while the fit was prepared, which "
                "needs all of them; expected silos that are up: start again"
            )
        return replies

    def _names_of(self, calls: list[Call]) -> list[str]:
        return sorted({self.names[call.number] for call in calls})

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
        """Return shared arrays alone as leaves; types of rows and the carrier are static."""
        types = tuple(sorted(self.rows.items()))
        return ({}, {}, self.shared_arrays), (self.spec, types, self.carrier, self.numbers)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: tuple) -> Self:
        """Rebuild remote silos with types of rows in place of rows."""
        spec, types, carrier, numbers = aux
        self = cls.from_spec(spec, dict(types), {}, children[2])
        self.carrier, self.numbers = carrier, numbers
        return self


jax.tree_util.register_pytree_node(
    RemoteSilos,
    RemoteSilos.tree_flatten,
    lambda aux, children: RemoteSilos.tree_unflatten(aux, children),
)
