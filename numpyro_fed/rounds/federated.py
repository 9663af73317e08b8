r"""Contract between an algorithm and the engine that carries its messages.

Every algorithm of the library is a :class:`Federated`: four pure functions over pytrees. A *round*
is

.. code-block:: text

    server    message = broadcast(key, server_state)
    silo s    reply, silo_state = local(key_s, message, silo_state, view)        beside the data
    server    server_state, info = merge(server_state, replies)

Only ``message`` and ``reply`` enter and leave a silo. ``silo_state`` (local latents, their
coordinates) stays in it. An engine (:mod:`numpyro_fed.engines`) decides where ``local`` runs. A
round addresses all silos, or the one that a chain visits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from numpyro_fed._typing import AnyArray, PyTree

# larger numbers of a silo count as not finite: float32 still holds the square, 1e36 of 3e38
LARGEST_FINITE = 1e18


class Federated(NamedTuple):
    """Algorithm as ``init / broadcast / local / merge``.

    * ``init(key, ...) -> server_state``
    * ``broadcast(key, server_state) -> message``
    * ``local(key, message, silo_state, view) -> (reply, silo_state)``, with ``view`` a
      :class:`~numpyro_fed.data.views.SiloView` or :class:`~numpyro_fed.data.views.SiloRows`
    * ``merge(server_state, replies) -> (server_state, info)``. If the round addressed all silos,
      ``replies`` have a leading axis over silos. An algorithm for all silos can take ``weights`` of
      the replies ``(S,)`` as a third argument, zero for a silo that did not answer.
    """

    init: Callable[..., PyTree]
    broadcast: Callable[..., PyTree]
    local: Callable[..., tuple[PyTree, PyTree]]
    merge: Callable[..., tuple[PyTree, PyTree]]


def message_bytes(message: PyTree) -> int:
    """Return the size of a message's arrays in bytes; shapes and types suffice."""
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(message)
        if isinstance(x, AnyArray | np.generic | jax.ShapeDtypeStruct)
    )


class Cost(NamedTuple):
    """Cost of a step of a fit to each silo: rounds, gradient evaluations, bytes both ways."""

    rounds: int = 0
    gradient_evaluations: int = 0
    bytes_down: int = 0
    bytes_up: int = 0

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: int) -> "Cost":
        """Return the cost of ``number`` such steps."""
        return Cost(*(number * a for a in self))


@dataclass(frozen=True)
class Ledger:
    """Costs of a fit to each silo, in the order of ``silos``.

    :param silos: names of the silos.
    :param rounds: rounds in which the silo was addressed.
    :param gradient_evaluations: evaluations of the gradient of the silo's term; a minibatch counts
        as one.
    :param bytes_down: bytes sent to the silo.
    :param bytes_up: bytes that left the silo.
    """

    silos: tuple[str, ...]
    rounds: tuple[int, ...]
    gradient_evaluations: tuple[int, ...]
    bytes_down: tuple[int, ...]
    bytes_up: tuple[int, ...]

    def after(self, cost: Cost) -> "Ledger":
        """Return the ledger after a step of this cost to every silo."""
        costs = {k: tuple(n + x for n in getattr(self, k)) for k, x in cost._asdict().items()}
        return replace(self, **costs)

    def of_each(self, silos: tuple[str, ...]) -> "Ledger":
        """Return the ledger of a single silo as that of several, each at its cost."""
        costs = (getattr(self, name) * len(silos) for name in Cost._fields)
        return Ledger(silos, *costs)

    def plus(self, *others: "Ledger") -> "Ledger":
        """Return the sum with ledgers of the same silos."""
        every = (self, *others)
        costs = (
            tuple(int(sum(n)) for n in zip(*(getattr(x, name) for x in every), strict=True))
            for name in Cost._fields
        )
        return Ledger(self.silos, *costs)

    def __repr__(self) -> str:
        width = max(5, *(len(n) for n in self.silos))
        head = f"{'silo':<{width}} {'rounds':>9} {'gradients':>12} {'kB down':>10} {'kB up':>10}"
        columns = zip(
            self.silos,
            self.rounds,
            self.gradient_evaluations,
            self.bytes_down,
            self.bytes_up,
            strict=True,
        )
        lines = [
            f"{name:<{width}} {rounds:>9,} {gradients:>12,} {down / 1e3:>10,.1f} {up / 1e3:>10,.1f}"
            for name, rounds, gradients, down, up in columns
        ]
        return "\n".join([head, *lines])
