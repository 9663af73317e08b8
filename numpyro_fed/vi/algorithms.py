"""Variational algorithms by name, and the silos' own parameters in the states that they write."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.vi import sfvi, sfvi_avg
from numpyro_fed.vi.conducive import rounds as conducive
from numpyro_fed.vi.config import FitConfig


class Algorithm(NamedTuple):
    """Functions of an algorithm.

    :param federated: returns ``init / broadcast / local / merge`` for a config and stacks of silos.
    :param init_silo: returns a silo's first state from the global parameters and its own.
    :param local: makes a silo's part of a round.
    :param adds_up: True if a round adds replies up, and so needs those of all silos. Averages and
        products need one.
    """

    federated: Callable[[FitConfig, list[SiloRows]], Federated]
    init_silo: Callable[[FitConfig, int, dict[str, Array], PyTree], PyTree]
    local: Callable[[FitConfig, Array, PyTree, PyTree, SiloRows], tuple[PyTree, PyTree]]
    adds_up: bool


ALGORITHMS = {
    "sfvi": Algorithm(sfvi.federated, sfvi.init_silo, sfvi.local, True),
    "sfvi_avg": Algorithm(sfvi_avg.federated, sfvi_avg.init_silo, sfvi_avg.local, False),
    "conducive": Algorithm(conducive.federated, conducive.init_silo, conducive.local, False),
}


def own_params(
    config: FitConfig, part: int, state: PyTree, params: dict[str, Array], averaged: bool = True
) -> PyTree:
    """Return a silo's own parameters, from a state that any of the algorithms wrote.

    SFVI keeps their tail average. The others keep those of the silo's last round, which are
    rewritten for coordinates whitened by ``params``.

    :param params: global parameters, unconstrained.
    :param averaged: whether to take the tail average where there is one.
    """
    if isinstance(state, sfvi.SiloState):
        return state.average if averaged else state.params
    if not config.families[part].has_local:
        return state.params
    base = config.constrain(state.base)
    return config.normal(part).rebased(state.params, base, config.constrain(params))
