"""States and messages of conducive rounds."""

from typing import NamedTuple

from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.surrogates.natural_step import ApproxFactor, History
from numpyro_fed.vi.conducive.quasi_newton import Memory


@wire_name("ConduciveServer")
class Server(NamedTuple):
    """The server's state.

    :param params: global parameters (q(theta)'s, networks' and learned ones), unconstrained.
    :param average: ``None``; no average is kept.
    :param sites: the sum of the silos' approximate factors, whitened by q.
    :param values: each silo's last ``E_q[log p(y_s | theta)]``, ``(S,)``; zeros with secure sums.
    :param history: record of the steps before, for the acceleration.
    :param moved: sds that the last round's factors alone would move q, or a like measure of its
        spread, whichever is larger.
    :param held: rounds whose step was shortened, because the product of the factors was no Gaussian
        or too far away.
    :param i: rounds made.
    :param rng_key: key of the next round.
    """

    params: dict[str, Array]
    average: None
    sites: ApproxFactor
    values: Array
    history: History | Memory
    moved: Array
    held: Array
    i: Array
    rng_key: Array


@wire_name("ConduciveSiloState")
class SiloState(NamedTuple):
    """State of a silo, which never leaves it.

    :param params: its local map.
    :param base: the global parameters of its last round.
    :param site: its approximate factor, whitened by the q of its last round.
    :param missed: rounds without a finite reply.
    :param optim_state: the state of the optimizer of its copy of the global parameters.
    :param local_optim_state: the state of the optimizer of its own parameters.
    """

    params: PyTree
    base: dict[str, Array]
    site: ApproxFactor
    missed: Array
    optim_state: PyTree = None
    local_optim_state: PyTree = None


@wire_name("ConduciveMessage")
class Message(NamedTuple):
    """Message to every silo.

    :param params: the global parameters.
    :param turn: the round's number, where points or rows change from round to round.
    :param far: whether the round is far from the optimum, where fewer points do.
    :param total: the number of rows in all silos, in rounds with optimizers.
    """

    params: dict[str, Array]
    turn: Array | None
    far: Array | None
    total: Array | None


class Reply(NamedTuple):
    """Reply of a silo.

    :param value: ``E_q[log p(y_s | theta)]``.
    :param gained: the change of its approximate factor (of the precision the lower triangle).
    :param finite: whether all is finite.
    :param params: the global parameters that its optimizers move: its copy times its share of the
        rows.
    :param share: its share of the rows.
    """

    value: Array
    gained: ApproxFactor
    finite: Array
    params: dict[str, Array] | None = None
    share: Array | None = None
