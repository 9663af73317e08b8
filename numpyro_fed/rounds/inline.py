"""Default engine: all silos in this process, rounds traced into one program.

A silo's key depends on the round's key and the silo's number, and not on the order of execution.
Other engines therefore draw the same.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import update_wrapper
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed._compat import QUICKLY
from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, SiloView, gather, largest, scatter, sweep
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask


class QuickProgram:
    """Jitted function of a few runs, compiled quickly.

    JAX takes options of the compiler at the top level alone. Within another program, such as
    that of parallel chains, the function is part of it.
    """

    def __init__(self, function: Callable, *static_argnames: str) -> None:
        update_wrapper(self, function)
        self.alone = jax.jit(function, static_argnames=static_argnames, compiler_options=QUICKLY)
        self._within = jax.jit(function, static_argnames=static_argnames)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = isinstance(jnp.zeros(()), jax.core.Tracer)
        return (self._within if traced else self.alone)(*args, **kwargs)


def quick_jit(*static_argnames: str) -> Callable[[Callable], QuickProgram]:
    """Make a function a :class:`QuickProgram`."""
    return lambda function: QuickProgram(function, *static_argnames)


def ask_all(
    local: SiloTask,
    key: Array,
    message: PyTree,
    silo_states: PyTree,
    silos: Silos,
    group: str | None,
) -> tuple[PyTree, PyTree]:
    """Send a message to every silo and collect the replies, vmapped over buckets of similar size.

    :param local: the task of each silo.
    :param silo_states: as for :func:`~numpyro_fed.data.views.sweep`.
    :return: replies stacked over silos, and the new silo states.
    """
    if isinstance(silos, RemoteSilos):
        return silos.ask_all(local, key, message, silo_states)
    return _ask_here(local, key, message, silo_states, silos, group)


def compile_ahead(
    pool: Executor,
    local: SiloTask,
    key: Array,
    message: PyTree,
    silo_states: PyTree,
    silos: Silos,
    group: str | None,
) -> None:
    """Compile the program of :func:`ask_all` in another thread, before it is called.

    XLA compiles a program on one core. Remote silos compile their own.
    """
    if not isinstance(silos, RemoteSilos):
        lowered = _ask_here.alone.lower(local, key, message, silo_states, silos, group)
        pool.submit(lowered.compile)


@quick_jit("local", "group")
def _ask_here(
    local: SiloTask,
    key: Array,
    message: PyTree,
    silo_states: PyTree,
    silos: Silos,
    group: str | None,
) -> tuple[PyTree, PyTree]:
    def one(view: SiloView, own: PyTree) -> tuple[PyTree, PyTree]:
        return local(random.fold_in(key, view.number), message, own, view)

    return sweep(one, silos, silo_states, group)


def round_one(
    algorithm: Federated,
    key: Array,
    server_state: PyTree,
    silo_states: PyTree,
    silos: Silos,
    number: Array,
    group: str | None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Run a round that addresses one silo; its number may be traced.

    :param silo_states: a pytree of rows. Its leading axis is over the elements of ``group``, silo
        after silo; if ``group`` is ``None``, over silos.
    :return: the new server state, the merge's info, and the silo states with the visited silo's
        rows replaced.
    """
    view = SiloView(silos, number, largest(silos))
    message = algorithm.broadcast(random.split(key)[0], server_state)
    key_local = key_of(key, number)
    if not jax.tree.leaves(silo_states):
        reply, _ = algorithm.local(key_local, message, silo_states, view)
    else:
        positions, mask = view.units(group)
        own = gather(silo_states, positions)
        reply, own = algorithm.local(key_local, message, own, view)
        silo_states = scatter(silo_states, positions, mask, own)
    server_state, info = algorithm.merge(server_state, reply)
    return server_state, info, silo_states


def key_of(key: Array, number: Array) -> Array:
    """Return the key of a silo in a round that addresses it alone."""
    return random.fold_in(random.split(key)[1], number)


def key_among(key: Array, part: int, number: Array) -> Array:
    """Return the key of a silo in a round that addresses all silos.

    :param part: number of the silo's structure.
    :param number: number of the silo within its structure.
    """
    return random.fold_in(random.fold_in(key, part), number)


def round_all(
    algorithm: Federated,
    key: Array,
    server_state: PyTree,
    silo_states: list,
    stacks: list[SiloRows],
    weights: Array | None = None,
) -> tuple[PyTree, PyTree, list]:
    """Run a round that addresses all silos, or those of nonzero weight.

    The silos are vmapped over stacks of equal shape.

    :param silo_states: for each stack a pytree with a leading axis over its silos; a scalar is the
        same in all of them.
    :param stacks: the silos' rows, from :func:`~numpyro_fed.data.views.stack`.
    :param weights: weights of the silos' replies, in the order of the stacks, ``(S,)``. A silo of
        weight zero keeps its state; this engine computes its reply nevertheless. ``None`` addresses
        all silos, and calls ``merge`` without weights.
    :return: the new server state, the merge's info, and the silo states.
    """
    message = algorithm.broadcast(key, server_state)
    replies, states, start = [], [], 0
    for rows, own in zip(stacks, silo_states, strict=True):

        def one(rows: SiloRows, own: PyTree) -> tuple[PyTree, PyTree]:
            return algorithm.local(key_among(key, rows.part, rows.number), message, own, rows)

        # a scalar is the same for all silos, and stays a scalar
        axes = jax.tree.map(lambda x: 0 if x.ndim else None, own)
        reply, new = jax.vmap(one, in_axes=(rows.axes, axes), out_axes=(0, axes))(rows, own)
        count = rows.number.shape[0]
        if weights is not None:
            asked = weights[start : start + count] > 0
            new = jax.tree.map(
                lambda x, y, a=asked: jnp.where(a.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, own
            )
        start += count
        replies.append(reply)
        states.append(new)
    collected = jax.tree.map(lambda *xs: jnp.concatenate(xs) if len(xs) > 1 else xs[0], *replies)
    merge = (server_state, collected) if weights is None else (server_state, collected, weights)
    server_state, info = algorithm.merge(*merge)
    return server_state, info, states
