"""Rounds of a variational algorithm: who takes part, and when to stop.

For silos in this process, also how rounds are made and their costs.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from tqdm.auto import tqdm

from numpyro_fed.data.views import SiloRows
from numpyro_fed.rounds.federated import Cost, Ledger, message_bytes
from numpyro_fed.rounds.inline import round_all
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.rounds.worker import SiloError
from numpyro_fed.vi.config import FitConfig

__all__ = [
    "Participation",
    "VIState",
    "advance",
    "answering_of",
    "drawn",
    "in_step",
    "inline_rounds",
    "ledger",
    "participation_of",
    "run_rounds",
]

_CHUNK = 200  # rounds between two checks of the losses
_STILL = 0.05  # sds that q may move in the last of converged conducive rounds
_WINDOW = 250  # fewest rounds in each of the two mean losses that are compared


@wire_name("VIState")
class VIState(NamedTuple):
    """State of a federated variational algorithm after a round.

    :param server: the server's state.
    :param silos: for each stack of silos their states, which in a federation never leave them. For
        remote silos an :class:`~numpyro_fed.vi.remote.RemoteStates`.
    :param visits: number of rounds in which each silo took part, ``(S,)``, in the order of the
        stacks.
    """

    server: Any
    silos: tuple[Any, ...]
    visits: Array


@dataclass(frozen=True)
class Participation:
    """Law of the silos that take part in a round.

    :param count: number of silos, drawn uniformly without replacement; ``None``: each silo takes
        part independently, with its probability.
    :param probability: each silo's probability of taking part, ``(S,)``.
    """

    count: int | None
    probability: np.ndarray

    def weights(self, key: Array) -> Array:
        """Draw the Horvitz-Thompson weights of a round's replies.

        A weight is zero, or one over the silo's probability.
        """
        probability = jnp.asarray(self.probability, jnp.result_type(float))
        if self.count is None:
            asked = random.uniform(key, probability.shape) < probability
        else:
            asked = random.permutation(key, len(self.probability)) < self.count
        return jnp.where(asked, 1 / probability, 0.0)

    def __hash__(self) -> int:
        return hash((self.count, self.probability.tobytes()))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Participation) and self.count == other.count
        return same and np.array_equal(
            self.probability,
            other.probability,  # type: ignore[attr-defined]
        )


def answering_of(
    value: Any, names: tuple[str, ...], remote: bool, adds_up: bool
) -> Participation | None:
    """Return the probabilities that ``answering=`` means.

    :param names: the silos' names, in the order of the stacks.
    :param remote: whether the silos are remote.
    :param adds_up: whether the algorithm adds replies up, and does not average them.
    :raises ValueError: for inline silos, averages, and values out of range.
    """
    if value is None:
        return None
    if not remote:
        raise ValueError(
            f"answering={value!r}: silos in this process always answer; expected None, or "
            "participation="
        )
    if not adds_up:
        raise ValueError(
            f"answering={value!r} is for fed.SFVI; expected None, since other fits average over "
            "the silos that answered"
        )
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number and not isinstance(value, Mapping):
        raise ValueError(
            f"answering: expected a probability, or one for each silo's name, got {value!r}"
        )
    return participation_of(dict.fromkeys(names, value) if number else value, names, "answering")


def participation_of(
    value: Any, names: tuple[str, ...], argument: str = "participation"
) -> Participation | None:
    """Return the law that ``participation=`` means.

    :param names: the silos' names, in the order of the stacks.
    :param argument: the argument's name, for the messages.
    :raises ValueError: for names that are not the silos', and for values out of range.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        unknown, lacking = sorted(set(value) - set(names)), sorted(set(names) - set(value))
        if unknown or lacking:
            raise ValueError(
                f"{argument}: expected a probability for every silo, got unknown silos {unknown}, "
                f"none for {lacking}"
            )
        probability = np.array([float(value[name]) for name in names])
        wrong = ~((probability > 0) & (probability <= 1))
        if wrong.any():
            name = names[int(np.argmax(wrong))]
            raise ValueError(
                f"{argument}: expected probabilities in (0, 1], got {value[name]} for silo "
                f"{name!r}; a silo that "
                "never takes part does not count in the posterior: leave it out of the data"
            )
        return Participation(None, probability)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.number)
        or not 0 < value <= 1
    ):
        raise ValueError(
            "participation: expected the fraction of silos in a round, in (0, 1], or a "
            "probability for each silo's name, "
            f"got {value!r}"
        )
    count = max(1, round(float(value) * len(names)))
    return (
        None
        if count == len(names)
        else Participation(count, np.full(len(names), count / len(names)))
    )


def in_step(config: FitConfig, first: Callable, local: Any) -> Any:
    """Return the first states of a stack of silos.

    An optimizer's clock is the same number in all silos while all take part. It is then stored once
    for the stack.
    """
    states = jax.jit(jax.vmap(first))(local)
    own = config.conducive or not (_keeps_time(config.optim) and _keeps_time(config.local_optim))
    # clocks may differ: a conducive silo whose numbers are not finite does not advance its clock
    if config.optim is not None and own:
        return states
    clocks = jax.tree.map(_is_clock, jax.eval_shape(first, jax.tree.map(lambda x: x[0], local)))
    return jax.tree.map(lambda x, clock: x[0] if clock else x, states, clocks)


def _is_clock(x: Any) -> bool:
    return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def _keeps_time(optim: Any) -> bool:
    """Return whether an optimizer's clocks do not depend on gradients.

    Those of ``optax.apply_if_finite`` do.
    """
    params = {"": jnp.zeros((2, 1))}
    try:
        clocks = jax.tree.map(_is_clock, optim.init({"": params[""][0]}))
        state = jax.tree.map(
            lambda x, clock: x[0] if clock else x, jax.vmap(optim.init)(params), clocks
        )
        axes = jax.tree.map(lambda clock: None if clock else 0, clocks)
        jax.eval_shape(
            jax.vmap(optim.update, in_axes=(0, axes, 0), out_axes=(0, axes)), params, state, params
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ):
        # an optimizer that knows parameters by name also fails; each silo then has its own clock
        return False
    return True


def _own_clocks(state: VIState, stacks: list[SiloRows]) -> VIState:
    """Return the state with a clock for each silo, for rounds that not all silos take part in."""

    def each(own: Any, rows: SiloRows) -> Any:
        return jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, rows.number.shape), own)

    return state._replace(
        silos=tuple(each(own, rows) for own, rows in zip(state.silos, stacks, strict=True))
    )


def drawn(who: Participation | None, server: Any) -> tuple[Array, Array | None]:
    """Return the key of a round, and the weights of the silos' replies in it."""
    key_who, key_round = random.split(random.fold_in(server.rng_key, 1))
    return key_round, None if who is None else who.weights(key_who)


def advance(
    federated: Callable,
    config: FitConfig,
    who: Participation | None,
    state: VIState,
    stacks: list[SiloRows],
) -> tuple[VIState, Any]:
    """Make one round."""
    key_round, weights = drawn(who, state.server)
    algorithm = federated(config, stacks)
    server, info, silos = round_all(
        algorithm, key_round, state.server, list(state.silos), stacks, weights
    )
    asked = (
        jnp.ones_like(state.visits) if weights is None else (weights > 0).astype(state.visits.dtype)
    )
    return VIState(server, tuple(silos), state.visits + asked), info


@partial(jax.jit, static_argnames=("federated", "config", "who"))
def _chunk(
    federated: Callable,
    config: FitConfig,
    who: Participation | None,
    state: VIState,
    stacks: list[SiloRows],
    num: Array,
) -> tuple[VIState, Array, Array]:
    """Make up to ``_CHUNK`` rounds.

    :return: the state; each round's loss; and for each round the silo whose numbers were not finite
        (-1: none, -2: the server).
    """

    def body(i: Array, carry: tuple) -> tuple:
        state, losses, bad = carry
        state, info = advance(federated, config, who, state, stacks)
        where = jnp.where(info.finite, -1, jnp.where(info.silo < 0, -2, info.silo))
        return state, losses.at[i].set(info.loss), bad.at[i].set(where)

    losses, bad = jnp.zeros(_CHUNK, jnp.result_type(float)), jnp.full(_CHUNK, -1, jnp.int32)
    return lax.fori_loop(0, num, body, (state, losses, bad))


def inline_rounds(
    federated: Callable, config: FitConfig, who: Participation | None, stacks: list[SiloRows]
) -> Callable:
    """Return a function that makes up to ``_CHUNK`` rounds over silos in this process.

    It is ``advance_by(state, num) -> (state, losses, bad)``.
    """

    def advance_by(state: VIState, num: int) -> tuple[VIState, np.ndarray, np.ndarray]:
        state = state if who is None else _own_clocks(state, stacks)
        state, new, bad = _chunk(federated, config, who, state, stacks, jnp.asarray(num, jnp.int32))
        return state, np.asarray(new)[:num], np.asarray(bad)[:num]

    return advance_by


def run_rounds(
    advance_by: Callable,
    config: FitConfig,
    state: VIState,
    names: tuple[str, ...],
    num_rounds: int,
    tol: float | None,
    progress_bar: bool,
    at_once: int = _CHUNK,
    before: np.ndarray | None = None,
) -> tuple[VIState, np.ndarray, str | None]:
    """Make rounds until their number is reached, the loss has converged, or an error occurs.

    An error is a number that is not finite, Ctrl-C, or a failure of remote silos.

    :param advance_by: makes that many rounds. It returns the state, the losses, and for each round
        the silo whose numbers were not finite (-1: none, -2: the server).
    :param tol: largest change of the smoothed loss in a fit that has converged.
    :param at_once: most rounds that it makes in a call.
    :param before: for remote silos, losses of rounds that were made before; they count toward
        ``num_rounds``. With it, any error after the first round keeps the rounds so far.
    :return: the state, all losses, and the reason if the rounds broke off.
    """
    losses, look = np.zeros(0) if before is None else before, 1 if config.conducive else _CHUNK

    # checked before a round, so that a fit that goes on from a checkpoint ends at the same round
    def converged() -> bool:
        # a bound may be constant while q moves
        moved = float(state.server.moved) if config.conducive else 0.0
        least = 1 if config.conducive else _WINDOW
        return (
            tol is not None
            and moved < _STILL
            and len(losses) % look == 0
            and _converged(losses, tol, least)
        )

    with tqdm(total=num_rounds, initial=len(losses), disable=not progress_bar) as bar:
        while len(losses) < num_rounds and not converged():
            last = state
            try:
                state, new, bad = advance_by(last, min(look, at_once, num_rounds - len(losses)))
            except (KeyboardInterrupt, Exception) as stopped:
                said = "interrupted"
                if not isinstance(stopped, KeyboardInterrupt):
                    foreign = not isinstance(stopped, SiloError)
                    if foreign and (before is None or not len(losses)):
                        raise
                    said = (
                        f"{type(stopped).__name__}: " * foreign
                        + f"{stopped}, in round {len(losses) + 1}"
                    )
                    if not len(losses):
                        raise RuntimeError(said) from None
                warnings.warn(
                    f"{said}: the result of the first {len(losses)} rounds is returned; go on "
                    "with init_state=result.state",
                    stacklevel=3,
                )
                return last, losses, said
            if (bad != -1).any():
                good = int(np.argmax(bad != -1))
                part = "the sum" if config.secure_sum else "the server's part"
                where = f"silo {names[bad[good]]!r}" if bad[good] >= 0 else part
                said = (
                    "the loss or its gradient was not finite in round "
                    f"{len(losses) + good + 1}, first in {where}"
                )
                warnings.warn(
                    f"{said}; the fit stopped there, and its last finite state is returned. Lower "
                    "the learning rate, or start nearer (init_loc_fn, init_scale)",
                    stacklevel=3,
                )
                state, _, _ = advance_by(last, good)
                return state, np.concatenate([losses, new[:good]]), said
            losses = np.concatenate([losses, new])
            bar.update(len(new))
            if np.isfinite(new).all():  # under privacy no bound leaves the silos
                bar.set_postfix_str(f"loss {new.mean():.4g}", refresh=False)
    return state, losses, None


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


def ledger(
    federated: Callable,
    config: FitConfig,
    state: VIState,
    stacks: list[SiloRows],
    names: tuple[str, ...],
    order: tuple[str, ...],
) -> Ledger:
    """Return each silo's costs of the rounds so far.

    :param names: the silos' names, in the order of the stacks.
    :param order: their order in the ledger.
    """
    algorithm = federated(config, stacks)
    visits = dict(zip(names, np.asarray(state.visits), strict=True))
    costs: dict[str, Cost] = {}
    start = 0
    for rows, own in zip(stacks, state.silos, strict=True):
        first = jax.tree.map(lambda x: x[0] if x.ndim else x, own)

        def one(server: Any, own: Any, rows: SiloRows = rows) -> tuple[Any, Any]:
            alone = jax.tree.map(
                lambda x, axis: x if axis is None else x[0],
                rows,
                rows.axes,
                is_leaf=lambda x: x is None,
            )
            message = algorithm.broadcast(random.key(0), server)
            return message, algorithm.local(random.key(0), message, own, alone)[0]

        message, reply = jax.eval_shape(one, state.server, first)
        each = Cost(1, config.evaluations(rows.part), message_bytes(message), message_bytes(reply))
        count = rows.number.shape[0]
        costs |= {name: each.times(int(visits[name])) for name in names[start : start + count]}
        start += count
    return Ledger(order, *zip(*(costs[name] for name in order), strict=True))
