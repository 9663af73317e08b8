"""Calls of variational fits to remote silos, and the states that silos keep."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloView
from numpyro_fed.privacy.differential import noised_exactly
from numpyro_fed.privacy.discrete_gaussian import Words
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.rounds.worker import rows_of
from numpyro_fed.vi import sfvi
from numpyro_fed.vi.algorithms import ALGORITHMS, own_params
from numpyro_fed.vi.config import FIT_CLASSES, FitConfig, FitTask
from numpyro_fed.vi.loop import VIState
from numpyro_fed.vi.setup import Setup


@wire_name("RemoteStates")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RemoteStates:
    """Stand-in for the states of remote silos, in the order of the stacks.

    :param slots: the number under which each silo keeps its state, ``(S,)``.
    :param costs: each silo's rounds, gradient evaluations, and bytes to it and from it, ``(S, 4)``.
    :param missed: number of each silo's replies that were not finite, ``(S,)``.
    :param token: the carrier's token.
    """

    slots: np.ndarray
    costs: np.ndarray
    missed: np.ndarray
    token: str = field(metadata={"static": True})


@dataclass(frozen=True)
class InitLocal(FitTask):
    """The call for a silo's first state, from the global parameters.

    :param config: the static facts.
    :param algorithm: name of the module of its functions.
    :param taken: whether the silo starts from its own parameters in the state that it reads, which
        another fit wrote.
    """

    wire_name = "InitLocal"
    leaves = "The silo makes its own first parameters, keeps them, and sends only a zero"
    numbers = ""
    ceiling = 1_000

    config: FitConfig
    algorithm: str
    taken: bool = False

    def __call__(
        self, key: Array, message: dict[str, Array], state: PyTree, view: SiloView
    ) -> tuple[Array, PyTree]:
        local = self.config.families[0].init_local(rows_of(view))
        if self.taken:
            taken = own_params(self.config, 0, state, message)
            got, expected = (jax.tree.map(jnp.shape, x) for x in (taken, local))
            if got != expected:
                raise ValueError(
                    "init_from: expected a result of the same model and guide, with local "
                    f"parameters of shapes {expected}, got {got}"
                )
            local = taken
        return jnp.zeros(()), ALGORITHMS[self.algorithm].init_silo(self.config, 0, message, local)


@dataclass(frozen=True)
class RoundLocal(FitTask):
    """The call for a silo's part of a round; fields as in :class:`InitLocal`.

    :param bare: in a fit with privacy, whether :meth:`private` adds the noise, in the silo.
    """

    wire_name = "RoundLocal"
    leaves = (
        "SFVI: the silo's part of the bound, and of the bound's gradient. SFVI-Avg: its bound, its "
        "number of rows, and the global parameters after its steps. Conducive rounds: its expected "
        "log likelihood, and the change of its approximate factor; with optimizers also its copies "
        "of the learned parameters, and its share of the rows. In each: whether all is finite"
    )
    numbers = (
        "for SFVI, up to 2 d numbers and the gradient in the message's network weights or guide "
        "parameters for each draw, and one for each learned parameter; for SFVI-Avg, one for "
        "each global parameter; for conducive rounds, d + d (d + 1) / 2 (diagonal: 2 d) and one "
        "for each learned parameter; and up to 3 more"
    )
    ceiling = 100_000
    message_classes = ("SFVIMessage", "SFVIAvgMessage", "ConduciveMessage", *FIT_CLASSES)

    config: FitConfig
    algorithm: str
    bare: bool = False

    @property
    def summed(self) -> bool:
        """Flag of masked replies, in fits with secure sums."""
        return self.config.secure_sum

    def __call__(
        self, key: Array, message: PyTree, state: PyTree, view: SiloView
    ) -> tuple[PyTree, PyTree]:
        local = ALGORITHMS[self.algorithm].local
        if self.bare and self.config.noise is not None:
            local = partial(sfvi.local, bare=True)
        return local(self.config, key, message, state, rows_of(view))

    def private(self, reply: PyTree, key: bytes) -> PyTree:
        assert self.config.noise is not None
        return sfvi.private(reply, partial(noised_exactly, self.config.noise, Words(key)))


def kept_by(state: Any, setup: Setup, name: str) -> RemoteStates:
    """Return the slots of a result's local states in the silos.

    :param name: the argument's name, for the message.
    :raises ValueError: for a result of other silos, or of silos in this process.
    """
    states, silos = state.silos if isinstance(state, VIState) else None, setup.parts[0]
    assert isinstance(silos, RemoteSilos)
    if (
        isinstance(states, RemoteStates)
        and states.token == silos.carrier.token
        and len(states.slots) == len(setup.names)
    ):
        return states
    raise ValueError(
        f"{name}: expected a result of a run over the same carrier, whose local parameters the "
        "silos keep, got one of other silos or of silos in this process"
    )
