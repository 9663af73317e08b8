"""Checks of a call before a silo answers it: settings, message, and the state that it reads."""

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed._typing import PyTree
from numpyro_fed.density.bounded_features import num_features
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.engines.limits import (
    MAX_JOINT,
    MAX_LATENTS,
    MAX_LEAVES,
    MAX_MAP,
    MAX_POINTS,
    MAX_PROGRAMS,
    MAX_SETTINGS,
    MAX_WALKS,
)
from numpyro_fed.rounds.serialization import fields_of, is_key, name_of, outline
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.rounds.worker import Call, SiloWorker, types_of
from numpyro_fed.surrogates.local_score import Message, points_at_once


class Refusal(ValueError):
    """Error with a text that the silo sends in place of an answer."""


class KeptState(NamedTuple):
    """Facts about a state that a silo keeps in a slot.

    :param kind: the kind of call that wrote it.
    :param wide: shapes and types that its arrays would have with one row more.
    :param size: bytes on disk.
    :param units: the units of latents of that call, as text.
    """

    kind: str
    wide: PyTree
    size: int
    units: str


class CallChecks:
    """Checks of calls by shapes and types, which read no number of the silo's rows.

    :param worker: worker of the silo, with its rows.
    :param wide: worker without rows, for silos with one row more each.
    :param own: objects that the server and the silo have, by name.
    :param rows: number of rows in all silos.
    :param algorithm: algorithm of the silo's fit, or ``None``.
    :param programs: the programs of this process, over all connections.
    """

    def __init__(
        self,
        worker: SiloWorker,
        wide: SiloWorker,
        own: dict[str, Hashable],
        rows: int,
        algorithm: str | None,
        programs: set[Hashable],
    ) -> None:
        self.worker, self.wide, self.own = worker, wide, own
        self.rows, self.algorithm, self.programs = rows, algorithm, programs
        self.kept: dict[int, KeptState] = {}
        self.messages: dict[str, PyTree] = {}  # types of a fit's messages, by kind of call
        self._grows: dict[tuple[SiloTask, str], PyTree] = {}

    def state(self, call: Call) -> PyTree:
        """Return the state that a call starts from.

        Each kind of call reads states of certain kinds alone. Otherwise a server could write a
        state by one kind of call, and read it by another.

        :raises Refusal: if the state is gone, or is of another kind or other units, and for the
            config of another fit.
        """
        fit = call.local.fit_config
        if fit is not None and fit is not self.own.get("config"):
            self._refused("a config of a fit")
        slots = call.read if isinstance(call.read, tuple) else (call.read,)
        writers = call.local.reads
        if call.read is not None and len(slots) != len(writers):
            raise Refusal(f"it starts from {len(slots)} states, expected {len(writers)}")
        for slot, kinds in zip(slots, writers, strict=False):
            if slot is None:
                continue
            if slot not in self.kept or slot not in self.worker.kept:
                raise Refusal("what it kept for this run is gone; expected the folder of before")
            if self.kept[slot].kind not in kinds:
                raise Refusal(
                    f"it starts from a state that {self.kept[slot].kind} wrote; "
                    f"expected one of {', '.join(kinds)}"
                )
            units = self.units(call.local)
            if self.kept[slot].units not in ("", units):
                raise Refusal(
                    "it starts from a state of other units of latents; expected those of the call "
                    "that wrote it"
                )
        return jax.tree.map(self.worker.kept.__getitem__, call.read)

    def units(self, task: SiloTask) -> str:
        """Return the units of a call's latents as text; empty for a call without any."""
        if task.fit_config is not None:
            return f"independent: {task.fit_config.families[0].group}"
        units = task.latent_units
        return "" if units is None else json.dumps(outline(units, self.own))

    def allow(self, call: Call, wider: Callable[[], SiloTask], state: PyTree) -> PyTree:
        """Refuse a call for its settings, its message, or a reply that grows with the rows.

        :param wider: a function that returns the call's task for one row more.
        :param state: the state that the call starts from.
        :return: types of the state that the call would write with one row more.
        :raises Refusal: with the reason.
        """
        kind = name_of(type(call.local))
        self._settings(call.local)
        odd = sorted(set(_classes(call.message)) - set(call.local.message_classes))
        if odd:
            raise Refusal(
                f"it tells {odd[0]}, which is no part of {kind}; expected one of "
                f"{', '.join(call.local.message_classes) or 'numbers alone'}"
            )
        if kind in self.messages and not _agrees(types_of(call.message), self.messages[kind]):
            raise Refusal(
                f"the message of {kind} has other parts or shapes than those of its fit; expected "
                "the guide, and the numbers of draws and parameters, that the silo has, too"
            )
        factors: Any = (fields_of(call.local) or {}).get("factors")
        if isinstance(call.message, Message) and not call.message.has_dim(factors.dim):
            raise Refusal(
                f"the message of {kind} has not {factors.dim} dimensions everywhere; expected "
                "those of its model"
            )
        if kind == "PilotLocal" and len(call.message[1]) > MAX_WALKS:
            raise Refusal(
                f"it is asked for {len(call.message[1]):,} walks; expected at most {MAX_WALKS}"
            )
        if call.local.fit_config is None and not isinstance(call.message, Message):
            self._check_shapes(kind, call.message)
        padded = max(n for _, n in self.worker.pad)
        if call.local.keeps and len(call.message.points) * padded > MAX_MAP:
            raise Refusal(
                f"it is asked for a local map at {len(call.message.points):,} points; expected at "
                f"most {MAX_MAP // padded:,}"
            )
        spec = types_of(call.message)
        wide = jax.tree.map(lambda slot: self.kept[slot].wide, call.read)
        key = (call.local, str((spec, wide)))
        if key not in self._grows:
            count_program(
                self.programs, (*key, self.worker.pad, jax.tree.structure(self.worker.silos))
            )
            now = self.worker.type_of(call.local, spec, types_of(state))[0]
            then, new = self.wide.type_of(wider(), spec, wide)
            pairs = zip(jax.tree.leaves(then), jax.tree.leaves(now), strict=True)
            grown = [f"{a.shape} for {b.shape}" for a, b in pairs if a.shape != b.shape]
            if grown:
                raise Refusal(
                    f"the reply to {kind} would be longer with one row more ({grown[0]}); "
                    "expected replies that are as long for any number of rows"
                )
            self._grows[key] = new
        return self._grows[key]

    def _check_shapes(self, kind: str, message: PyTree) -> None:
        """Refuse an array that would broadcast to sizes that no such message has."""
        factors, silos = self.own["factors"], len(self.worker.silos)
        assert isinstance(factors, Factors)
        axes = {factors.dim, silos, num_features(factors.dim)}
        for shape in map(np.shape, jax.tree.leaves(message)):
            if any(n not in axes and (i > 0 or n > MAX_WALKS) for i, n in enumerate(shape)):
                raise Refusal(
                    f"the message of {kind} has an array of shape {shape}; expected those of "
                    f"{factors.dim} dimensions and {silos} silos"
                )

    def _settings(self, part: object) -> None:
        """Refuse settings that single out rows, or that take too much memory or time.

        The factors of another model, fewer elements, and minibatches can single out rows.
        """
        if part is self.own.get("config"):
            return
        fields = (fields_of(part) or {}) if dataclasses.is_dataclass(part) else {}
        why = None
        if isinstance(part, Factors) and not any(part is own for own in self.own.values()):
            why = "a model"
        elif isinstance(part, Units) and part.pad != self.worker.pad:
            why = "a number of elements"
        elif type(part) is Units and part.group is None:
            most = min(MAX_JOINT, MAX_LATENTS // len(self.worker.silos))
            if part.dim > most:
                raise Refusal(
                    f"it is asked about {part.dim:,} latents as one unit, padded to the largest "
                    f"silo; expected at most {most:,}"
                )
        elif fields.get("algorithm", self.algorithm) != self.algorithm:
            why = "an algorithm"
        elif fields.get("batch") is not None or fields.get("num_kept", 1) != 1:
            why = "a minibatch"
        self._refused(why)
        padded = max(n for _, n in self.worker.pad)
        limits = {
            **MAX_SETTINGS,
            "networks": max(1, MAX_LATENTS // self.rows),
            "points_at_once": points_at_once(padded, fields.get("units")),
        }
        for setting, limit in limits.items():
            value = fields.get(setting, 0)
            if isinstance(value, int | float) and not 0 <= value <= limit:
                raise Refusal(f"it is asked with {setting}={value:,}; expected at most {limit:,}")
        if not isinstance(part, Factors):
            for value in fields.values():
                self._settings(value)

    @staticmethod
    def _refused(why: str | None) -> None:
        if why is not None:
            raise Refusal(
                f"it is asked with {why} that is not its own; expected calls of all its rows"
            )


def count_program(programs: set[Hashable], program: Hashable) -> None:
    """Count a program, which takes memory until the process ends.

    :raises Refusal: if there are too many.
    """
    if program not in programs and len(programs) >= MAX_PROGRAMS:
        raise Refusal(
            f"it has compiled {MAX_PROGRAMS} programs for calls of other settings or shapes; "
            "expected fewer, or a person at the silo who starts its process anew"
        )
    programs.add(program)


def _classes(value: object) -> Iterator[str]:
    """Yield the wire names of the classes in a value."""
    if isinstance(value, dict):
        for inside in value.values():
            yield from _classes(inside)
    elif isinstance(value, list) or type(value) is tuple:
        for inside in value:
            yield from _classes(inside)
    elif (fields := fields_of(value)) is not None:
        yield name_of(type(value))
        for inside in fields.values():
            yield from _classes(inside)


def _agrees(got: PyTree, expected: PyTree) -> bool:
    """Return whether shapes are the expected ones; where ``None`` is expected, any will do."""
    if type(expected) is tuple:
        pairs = zip(got, expected, strict=True)
        return type(got) is tuple and len(got) == len(expected) and all(_agrees(*x) for x in pairs)
    return expected is None or _shapes(got) == _shapes(expected)


def _shapes(tree: PyTree) -> list[tuple[tuple, tuple[int, ...]]]:
    return [(path, x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def slot_number(value: object) -> int:
    """Return the number of a slot.

    :raises ValueError: for a value that is no whole number >= 0.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"a slot is {str(value)[:30]}, expected a whole number")
    return value


def parsed(number: int, values: Any) -> Call:
    """Return a call from its parts, after checks of slots, key, and the numbers in its message.

    JAX accepts arrays of ``uint32`` as random keys, and the silo would not replace these by its
    own. The message may therefore have typed keys, and no unsigned numbers.

    :raises ValueError: naming the part that is wrong.
    """
    call = Call(number, *values)
    name_of(type(call.local))
    slots = call.read if type(call.read) is tuple else (call.read,)
    for slot in (*slots, call.write):
        if slot is not None:
            slot_number(slot)
    if not is_key(call.key) or call.key.shape != ():
        raise ValueError("its key is none; expected one typed random key")
    leaves = jax.tree.leaves(call.message)
    if len(leaves) > MAX_LEAVES:
        raise ValueError(f"it is told {len(leaves):,} arrays, expected at most {MAX_LEAVES:,}")
    for x in leaves:
        if not isinstance(x, np.ndarray | jax.Array | int | float):
            raise ValueError("it is told values that are no arrays of numbers")
        if isinstance(x, int) and abs(x) >= 1 << 31:
            raise ValueError("it is told whole numbers beyond 32 bits")
        if not is_key(x) and np.asarray(x).dtype.kind not in "bif":
            raise ValueError(
                f"it is told numbers of type {np.asarray(x).dtype}, expected signed ones"
            )
        if np.ndim(x) and np.shape(x)[0] > MAX_POINTS:
            raise ValueError(
                f"it is asked about {np.shape(x)[0]:,} points, expected at most {MAX_POINTS:,}"
            )
        if math.prod(np.shape(x)) == 0 and max(np.shape(x), default=0) > MAX_POINTS:
            raise ValueError(f"it is told an array of shape {np.shape(x)}, which has no numbers")
    return call
