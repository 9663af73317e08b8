"""Work of a silo in one call: the base class of all tasks, and their registry."""

import abc
from collections.abc import Hashable, Sequence
from typing import ClassVar, Protocol

from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloView
from numpyro_fed.rounds import serialization

TASKS: dict[str, type["SiloTask"]] = {}  # what a silo answers over a wire, by wire name


class Grouped(Protocol):
    """Variational family, by what a wire tells of it: the row group of its units."""

    @property
    def group(self) -> str | None: ...


class FitFacts(Hashable, Protocol):
    """Static facts of a variational fit, by what a wire tells of them."""

    @property
    def families(self) -> Sequence[Grouped]: ...


class SiloTask(abc.ABC):
    """Task of a silo in a call.

    Subclasses are frozen data classes, whose fields are settings. Equal tasks share a program.

    A task with a ``wire_name`` is in the registry :data:`TASKS`, and silos answer it over a wire.
    Its class attributes are what a silo checks, and what a person at the silo reads.

    :cvar wire_name: name on the wire and in files, which never changes.
    :cvar leaves: contents of the reply, as a sentence for a person at the silo.
    :cvar numbers: count of the numbers in the reply, for d global parameters.
    :cvar ceiling: default for the largest number of such calls that a silo answers in one study.
    :cvar message_classes: wire names of the classes that the message may hold, beside numbers.
    :cvar reads: for each state that it starts from, the tasks that may have written it.
    :cvar methods: methods whose runs make such calls: ``"chains"``, ``"hmc"``, ``"network"`` and
        ``"fit"``. A silo that knows no variational fit does not answer those of fits alone.
    """

    wire_name: ClassVar[str]
    leaves: ClassVar[str]
    numbers: ClassVar[str]
    ceiling: ClassVar[int]
    message_classes: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[tuple[str, ...], ...]] = ((),)
    methods: ClassVar[tuple[str, ...]] = ("chains",)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "wire_name" in vars(cls):
            TASKS[cls.wire_name] = serialization.wire_name(cls.wire_name)(cls)

    @abc.abstractmethod
    def __call__(
        self, key: Array, message: PyTree, state: PyTree, view: SiloView
    ) -> tuple[PyTree, PyTree]:
        """Return the reply, which leaves the silo, and the new state, which stays there."""

    def tell(self, message: PyTree, number: int) -> PyTree:
        """Return the part of a message to all silos that one silo receives."""
        return message

    def private(self, reply: PyTree, key: bytes) -> PyTree:
        """Return a reply with exact noise, as it leaves a silo in a fit with privacy.

        :param key: 32 secret bytes, for this call alone.
        :raises NotImplementedError: for a task that such a fit does not have.
        """
        raise NotImplementedError(f"{type(self).__name__} has no private reply")

    @property
    def keeps(self) -> bool:
        """True if :func:`ask_all` has the silo keep the new state; other calls name a slot."""
        return False

    @property
    def summed(self) -> bool:
        """Flag of masked replies: over a wire the server sees only their sum."""
        return False

    @property
    def latent_units(self) -> Hashable | None:
        """Units of latents that the task moves or integrates out, or ``None``."""
        return None

    @property
    def fit_config(self) -> FitFacts | None:
        """Static facts of the variational fit, which the silo has too; otherwise ``None``."""
        return None
