"""Worker of a silo: it has the rows, keeps private states, and answers calls."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed._typing import AnyArray, PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SMALL, SiloRows, SiloView, largest, split_shared
from numpyro_fed.rounds.task import SiloTask


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
    message: PyTree
    read: PyTree = None
    write: int | None = None


class SiloError(RuntimeError):
    """Error of a silo that refuses a call, with its reason, or that does not answer."""


def type_of_array(x: AnyArray | jax.ShapeDtypeStruct) -> PyTree:
    """Return the type of an array, or of a type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def types_of(tree: PyTree) -> PyTree:
    """Return shapes and types of a pytree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), tree)


class SiloAlone(Silos):
    """Rows of one silo, and the sizes of all silos.

    Rows are padded to those of the largest silo, up to 8,192.
    """

    def offsets(self, group: str) -> np.ndarray:
        return np.zeros(len(self), int)


jax.tree_util.register_pytree_node(
    SiloAlone, SiloAlone.tree_flatten, lambda aux, children: SiloAlone.tree_unflatten(aux, children)
)


@partial(jax.jit, static_argnames=("local", "pad"))
def _answer(
    local: SiloTask,
    pad: tuple,
    key: Array,
    message: PyTree,
    state: PyTree,
    rows: SiloAlone,
    number: Array,
) -> tuple[PyTree, PyTree]:
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
    :param silos: its rows, and the sizes of all silos.
    :param pad: number of rows in each row group after padding.
    """

    def __init__(self, number: int, silos: SiloAlone, pad: tuple[tuple[str, int], ...]) -> None:
        self.number, self.silos, self.pad = number, silos, pad
        self.kept: dict[int, PyTree] = {}

    def reply(self, call: Call, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the reply to a call, and the new private state."""
        number = np.int32(self.number)  # a JAX array would dispatch one more program
        return _answer(call.local, self.pad, call.key, call.message, state, self.silos, number)

    def type_of(self, local: SiloTask, message: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return shapes and types of the reply and of the new private state.

        :param local: the call's ``local``.
        :param message: shapes and types of its message.
        :param state: shapes and types of the state that it starts from.
        """
        number = jax.ShapeDtypeStruct((), jnp.int32)
        ask = partial(_answer, local, self.pad)
        reply, new = jax.eval_shape(ask, random.key(0), message, state, self.silos, number)
        return reply, new

    def answer(self, call: Call) -> PyTree:
        """Return the reply to a call, and keep the new private state.

        :raises SiloError: naming the silo, if a state that the call starts from is gone.
        """
        if any(slot not in self.kept for slot in jax.tree.leaves(call.read)):
            raise SiloError(
                f"silo {self.silos.names[self.number]!r} no longer has the states of this run; "
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
    # silos are padded to the largest up to SMALL rows, so that they share a program; a false size
    # of another silo costs this one the time of so many rows at most
    pad = tuple((g, max(n[number], min(max(n), SMALL))) for g, n in known.sizes.items())
    for group, count in pad:
        inside = np.minimum(np.arange(count), known.sizes[group][number] - 1)
        places = silos.offsets(group)[here] + inside
        # in NumPy, as JAX would compile for each shape
        order[group] = jnp.asarray(
            np.asarray(silos.order[group])[places]
            if known is silos
            else known.offsets(group)[number] + inside,
            jnp.int32,
        )
        rows |= {
            leaf: jnp.asarray(np.asarray(x)[places])
            for leaf, x in silos.rows.items()
            if silos.group[leaf] == group
        }
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
