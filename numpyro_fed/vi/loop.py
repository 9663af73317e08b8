"""Rounds of a variational algorithm: when they stop, and why."""

import abc
import warnings
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.rounds.driver import Run, Slots, drive
from numpyro_fed.rounds.federated import Federated, Ledger
from numpyro_fed.rounds.remote import Carrier
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.rounds.worker import SiloError
from numpyro_fed.vi.algorithms import ALGORITHMS
from numpyro_fed.vi.participation import Participation
from numpyro_fed.vi.setup import Setup

# rounds in one program, between two checks of the losses: .1 to .3 s of six cities. If one is not
# finite, they are made again up to that round
CHUNK = 200
# sds that q may move in the last of converged conducive rounds, where the noise of a diagonal q's
# changing points leaves several hundredths
_LAST_MOVE = 0.05
# fewest rounds in each of the two mean losses that are compared: their difference has an sd of
# sqrt(2 / 250) = .09 of a loss's, so tol = .1 is for losses with an sd of about a nat
_WINDOW = 250


@wire_name("VIState")
class VIState(NamedTuple):
    """State of a federated variational algorithm after a round.

    :param server: the server's state.
    :param silos: for each stack of silos their states, which in a federation never leave them. For
        remote silos an :class:`~numpyro_fed.vi.remote.RemoteStates`.
    :param visits: number of rounds in which each silo took part, ``(S,)``, in the order of the
        stacks.
    """

    server: PyTree
    silos: PyTree
    visits: Array | np.ndarray


class Rounds(abc.ABC):
    """Rounds of an algorithm over silos, inline or remote.

    :param algorithm: its name in ``ALGORITHMS``.
    :param setup: the setup before the first round.
    :param who: the law of the silos that take part; ``None``: all do.
    :ivar at_once: most rounds that it makes in a call.
    :ivar slots: the fit's slots in remote silos.
    """

    at_once = CHUNK

    def __init__(self, algorithm: str, setup: Setup, who: Participation | None = None) -> None:
        self.algorithm, self.setup, self.who = algorithm, setup, who
        self.federated = ALGORITHMS[algorithm].federated
        self.slots = Slots(Carrier({}))

    def functions(self) -> Federated:
        """Return the algorithm as ``init / broadcast / local / merge``."""
        return self.federated(self.setup.config, self.setup.stacks)

    def first_server(self, rng_key: Array, params: dict[str, PyTree]) -> PyTree:
        """Return the server's first state, from global parameters, unconstrained."""
        return self.functions().init(rng_key, params)

    @abc.abstractmethod
    def start(self, rng_key: Array, params: dict[str, PyTree], local_params: PyTree) -> VIState:
        """Return the state before the first round.

        :param params: global parameters, unconstrained.
        :param local_params: the silos' own parameters.
        """

    @abc.abstractmethod
    def __call__(self, state: VIState, num: int) -> tuple[VIState, np.ndarray, np.ndarray]:
        """Make rounds.

        :return: the state; each round's loss; and for each round the silo whose numbers were not
            finite (-1: none, -2: the server).
        """

    @abc.abstractmethod
    def ledger(self, state: VIState, order: tuple[str, ...]) -> Ledger:
        """Return each silo's costs of the rounds so far, in this order of names."""

    def run_of(self, state: VIState) -> Run:
        """Return a run before its first round."""
        return Run(state, self.slots_of(state), 0, {"losses": np.zeros(0)})

    def slots_of(self, state: VIState) -> np.ndarray:
        """Return the slots of a state in remote silos."""
        return state.silos.slots if self.setup.remote else np.zeros(0, np.int64)

    def saved(self) -> Run | None:
        """Return the fit at its checkpoint, or ``None``."""
        return None


def run_rounds(
    rounds: Rounds, run: Run, num_rounds: int, tol: float | None, progress_bar: bool
) -> Run:
    """Make rounds until their number is reached, the loss has converged, or an error occurs.

    An error is a number that is not finite, Ctrl-C, or a failure of remote silos. Over remote silos
    any error after the first round keeps the rounds so far.

    :param run: the fit before these rounds.
    :param num_rounds: number of rounds, those of a checkpoint included.
    :param tol: largest change of the smoothed loss in a fit that has converged.
    """
    setup, look = rounds.setup, 1 if rounds.setup.config.conducive else CHUNK

    def ended(run: Run) -> bool:
        return tol is not None and run.made % look == 0 and _settled(setup, run, tol)

    def step(run: Run) -> Run:
        num = min(look, rounds.at_once, num_rounds - run.made)
        state, new, bad = rounds(run.state, num)
        stopped, note = None, run.note
        if (bad != -1).any():
            good = int(np.argmax(bad != -1))
            stopped = _not_finite(setup, int(bad[good]), run.made + good + 1)
            new, (state, _, _) = new[:good], rounds(run.state, good)
        elif np.isfinite(new).all():  # under privacy no bound leaves the silos
            note = f"loss {new.mean():.4g}"
        losses = np.concatenate([run.record["losses"], new])
        run = run.after(state, rounds.slots_of(state), len(new), losses=losses)
        return replace(run, stopped=stopped, note=note)

    title = "rounds" if tol is None else f"at most {num_rounds} rounds"
    slots = rounds.slots
    run, error = drive(
        run, step, num_rounds, slots=slots, progress_bar=progress_bar, ended=ended, title=title
    )
    if error is not None:
        run = replace(run, stopped=_reason(error, run.made, setup.remote))
        warnings.warn(
            f"{run.stopped}: the result of the first {run.made} rounds is returned; go on "
            "with init_state=result.state",
            stacklevel=3,
        )
    elif run.stopped is not None:
        warnings.warn(
            f"{run.stopped}; the fit stopped there, and its last finite state is returned. Lower "
            "the learning rate, or start nearer (init_loc_fn, init_scale)",
            stacklevel=3,
        )
    return run


def _reason(error: BaseException, made: int, remote: bool) -> str:
    """Return why rounds broke off, or raise the error where no rounds are to be kept."""
    if isinstance(error, KeyboardInterrupt):
        said = "interrupted"
    else:
        foreign = not isinstance(error, SiloError)
        if foreign and not (remote and made):
            raise error
        said = f"{type(error).__name__}: " * foreign + f"{error}, in round {made + 1}"
        if not made:
            raise RuntimeError(said) from None
    return said


def _not_finite(setup: Setup, silo: int, number: int) -> str:
    part = "the sum" if setup.config.secure_sum else "the server's part"
    where = f"silo {setup.names[silo]!r}" if silo >= 0 else part
    return f"the loss or its gradient was not finite in round {number}, first in {where}"


def _settled(setup: Setup, run: Run, tol: float) -> bool:
    if not setup.config.conducive:
        return _converged(run.record["losses"], tol)
    # a bound may be constant while q moves
    return float(run.state.server.moved) < _LAST_MOVE and _converged(run.record["losses"], tol, 1)


def _converged(losses: np.ndarray, tol: float, least: int = _WINDOW) -> bool:
    """Return whether the mean loss has converged.

    The mean losses of the last quarter of all rounds and of the quarter before then differ by less
    than ``tol``.

    :param least: least number of rounds in a quarter.
    """
    window = max(least, len(losses) // 4) if least > 1 else 1
    if len(losses) < 2 * window:
        return False
    return bool(abs(losses[-2 * window : -window].mean() - losses[-window:].mean()) < tol)
