"""Rounds of a variational algorithm: who takes part, when to stop.

In one process how they are made, and what they cost.
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
from numpyro_fed.rounds.remote import SiloError
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.vi.config import Plan

__all__ = [
    "Participation",
    "VIState",
    "advance",
    "answering_of",
    "at_hand",
    "drawn",
    "in_step",
    "ledger",
    "participation_of",
    "run_rounds",
]

_CHUNK = 200  # rounds between two looks at the losses
_STILL = 0.05  # sds
_WINDOW = 250  # fewest rounds whose mean losses are compared


@wire_name("VIState")
class VIState(NamedTuple):
    """State of a federated variational algorithm after a round.

    :param server: the server's state.
    :param silos: for each stack of silos their states, which in a federation never leave them; of
        silos elsewhere a :class:`~numpyro_fed.vi.remote.Elsewhere`.
    :param visits: rounds in which each silo took part, ``(S,)``, in the order of the stacks.
    """

    server: Any
    silos: tuple[Any, ...]
    visits: Array


@dataclass(frozen=True)
class Participation:
    """Which silos take part in a round.

    :param count: so many, uniformly without replacement; ``None``: each independently with its
        probability.
    :param probability: of each silo's taking part, ``(S,)``.
    """

    count: int | None
    probability: np.ndarray

    def weights(self, key: Array) -> Array:
        """Horvitz-Thompson weights of a round's replies: zero, or one over the probability."""
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
        return same and np.array_equal(self.probability, other.probability)  # type: ignore[attr-defined]


def answering_of(
    value: Any, names: tuple[str, ...], elsewhere: bool, adds_up: bool
) -> Participation | None:
    """The probabilities that ``answering=`` means, or an error in words.

    :param names: of the silos, in the order of the stacks.
    :param elsewhere: whether the silos' rows are.
    :param adds_up: whether replies are added up, and not averaged.
    """
    if value is None:
        return None
    if not elsewhere:
        raise ValueError(
            f"answering={value!r}: silos at hand always answer; expected None, or participation="
        )
    if not adds_up:
        raise ValueError(
            f"answering={value!r} is for fed.SFVI; expected None: averages are of the silos that "
            "answered"
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
    """The rule that ``participation=`` means, or an error in words.

    :param names: of the silos, in the order of the stacks.
    :param argument: the name that it was given under.
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
                "never takes part has no say in the posterior: leave it out of the data"
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


def in_step(plan: Plan, first: Callable, local: Any) -> Any:
    """The first states of a stack of silos.

    What is one number in each (an optimiser's clock) is one for all, while all take part.
    """
    states = jax.jit(jax.vmap(first))(local)
    own = plan.conducive or not (_keeps_time(plan.optim) and _keeps_time(plan.local_optim))
    if (
        plan.optim is not None and own
    ):  # a conducive silo whose numbers are not finite keeps its clock
        return states
    clocks = jax.tree.map(_is_clock, jax.eval_shape(first, jax.tree.map(lambda x: x[0], local)))
    return jax.tree.map(lambda x, clock: x[0] if clock else x, states, clocks)


def _is_clock(x: Any) -> bool:
    return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def _keeps_time(optim: Any) -> bool:
    """Whether an optimiser's clocks do not depend on gradients (those of ``optax.apply_if_finite``
    do).
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
    ):  # also of one that knows parameters by name: then each silo has its own
        return False
    return True


def _own_clocks(state: VIState, stacks: list[SiloRows]) -> VIState:
    """The state with a clock for each silo, for rounds in which not all take part."""

    def each(own: Any, rows: SiloRows) -> Any:
        return jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, rows.number.shape), own)

    return state._replace(
        silos=tuple(each(own, rows) for own, rows in zip(state.silos, stacks, strict=True))
    )


def drawn(who: Participation | None, server: Any) -> tuple[Array, Array | None]:
    """The key of a round, and the weights of the silos' replies in it."""
    key_who, key_round = random.split(random.fold_in(server.rng_key, 1))
    return key_round, None if who is None else who.weights(key_who)


def advance(
    federated: Callable,
    plan: Plan,
    who: Participation | None,
    state: VIState,
    stacks: list[SiloRows],
) -> tuple[VIState, Any]:
    """One round."""
    key_round, weights = drawn(who, state.server)
    algorithm = federated(plan, stacks)
    server, info, silos = round_all(
        algorithm, key_round, state.server, list(state.silos), stacks, weights
    )
    asked = (
        jnp.ones_like(state.visits) if weights is None else (weights > 0).astype(state.visits.dtype)
    )
    return VIState(server, tuple(silos), state.visits + asked), info


@partial(jax.jit, static_argnames=("federated", "plan", "who"))
def _chunk(
    federated: Callable,
    plan: Plan,
    who: Participation | None,
    state: VIState,
    stacks: list[SiloRows],
    num: Array,
) -> tuple[VIState, Array, Array]:
    """Up to ``_CHUNK`` rounds: the state, each round's loss, and the silo that was not finite (-1.

    None, -2: the server).
    """

    def body(i: Array, carry: tuple) -> tuple:
        state, losses, bad = carry
        state, info = advance(federated, plan, who, state, stacks)
        where = jnp.where(info.finite, -1, jnp.where(info.silo < 0, -2, info.silo))
        return state, losses.at[i].set(info.loss), bad.at[i].set(where)

    losses, bad = jnp.zeros(_CHUNK, jnp.result_type(float)), jnp.full(_CHUNK, -1, jnp.int32)
    return lax.fori_loop(0, num, body, (state, losses, bad))


def at_hand(
    federated: Callable, plan: Plan, who: Participation | None, stacks: list[SiloRows]
) -> Callable:
    """What makes up to ``_CHUNK`` rounds in this process.

    ``advance_by(state, num) -> (state, losses, bad)``.
    """

    def advance_by(state: VIState, num: int) -> tuple[VIState, np.ndarray, np.ndarray]:
        state = state if who is None else _own_clocks(state, stacks)
        state, new, bad = _chunk(federated, plan, who, state, stacks, jnp.asarray(num, jnp.int32))
        return state, np.asarray(new)[:num], np.asarray(bad)[:num]

    return advance_by


def run_rounds(
    advance_by: Callable,
    plan: Plan,
    state: VIState,
    names: tuple[str, ...],
    num_rounds: int,
    tol: float | None,
    progress_bar: bool,
    at_once: int = _CHUNK,
    before: np.ndarray | None = None,
) -> tuple[VIState, np.ndarray, str | None]:
    """Rounds until ``num_rounds``, until the smoothed loss falls by less than ``tol``, one is not
    finite, or Ctrl-C.

    :param advance_by: makes so many rounds; returns the state, their losses, and for each the silo
        that was not finite (-1: none, -2: the server).
    :param at_once: most rounds that it makes in a call.
    :param before: of silos elsewhere, losses of rounds that were made before, of ``num_rounds``;
        there any error after a round keeps what there is.
    :return: the state, all losses, and where the rounds broke off why, in words.
    """
    losses, look = np.zeros(0) if before is None else before, 1 if plan.conducive else _CHUNK

    # looked at before a round, so that a fit that goes on from a checkpoint ends where it would
    # have
    def settled() -> bool:
        moved = (
            float(state.server.moved) if plan.conducive else 0.0
        )  # a bound may stand still while q moves
        least = 1 if plan.conducive else _WINDOW
        return (
            tol is not None
            and moved < _STILL
            and len(losses) % look == 0
            and _settled(losses, tol, least)
        )

    with tqdm(total=num_rounds, initial=len(losses), disable=not progress_bar) as bar:
        while len(losses) < num_rounds and not settled():
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
                part = "the sum" if plan.secure_sum else "the server's part"
                where = f"silo {names[bad[good]]!r}" if bad[good] >= 0 else part
                said = f"the loss or its gradient was not finite in round {len(losses) + good + 1}, first in {where}"
                warnings.warn(
                    f"{said}; the fit stopped there, and its last finite state is returned. Lower "
                    "the learning rate, or start nearer (init_loc_fn, init_scale)",
                    stacklevel=3,
                )
                state, _, _ = advance_by(last, good)
                return state, np.concatenate([losses, new[:good]]), said
            losses = np.concatenate([losses, new])
            bar.update(len(new))
            if np.isfinite(new).all():  # under privacy no bound is told
                bar.set_postfix_str(f"loss {new.mean():.4g}", refresh=False)
    return state, losses, None


def _settled(losses: np.ndarray, tol: float, least: int = _WINDOW) -> bool:
    """Whether the mean loss of the last quarter of all rounds, at least so many, is within ``tol``
    of that of the quarter before.
    """
    window = max(least, len(losses) // 4) if least > 1 else 1
    if len(losses) < 2 * window:
        return False
    return bool(abs(losses[-2 * window : -window].mean() - losses[-window:].mean()) < tol)


def ledger(
    federated: Callable,
    plan: Plan,
    state: VIState,
    stacks: list[SiloRows],
    names: tuple[str, ...],
    order: tuple[str, ...],
) -> Ledger:
    """What the rounds so far cost each silo.

    :param names: of the silos in the order of the stacks.
    :param order: in which the ledger lists them.
    """
    algorithm = federated(plan, stacks)
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
        each = Cost(1, plan.evaluations(rows.part), message_bytes(message), message_bytes(reply))
        count = rows.number.shape[0]
        costs |= {name: each.times(int(visits[name])) for name in names[start : start + count]}
        start += count
    return Ledger(order, *zip(*(costs[name] for name in order), strict=True))
