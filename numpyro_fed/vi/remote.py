"""Variational rounds over remote silos: the same rounds, driven from the host.

A round is one call of each silo that takes part. A silo keeps its states under numbers (slots). It
starts from the state in one slot and writes the new state to another. When the reply has come, the
server takes the new slot for the silo's state. So a lost reply leaves no trace, and a repeated call
has the same answer. A result's states are not changed by fits that go on from it.

SFVI adds gradients up, and leaving out a silo without a known probability would bias their sum. So
silos that do not answer are asked again; if they stay silent, the fit stops with the rounds so far.
Where the probability of an answer is known (``answering``), missing replies count zero and the
others one over it. SFVI-Avg averages over the silos that answered, as over those that take part. In
conducive rounds the last approximate factors of the others stay in the product.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.data.views import SiloRows, SiloView
from numpyro_fed.privacy.differential import noised_exactly
from numpyro_fed.privacy.discrete_gaussian import Words
from numpyro_fed.privacy.secure_sum import opened
from numpyro_fed.rounds.checkpoint import Checkpoint
from numpyro_fed.rounds.federated import Cost, Ledger, message_bytes
from numpyro_fed.rounds.inline import key_among
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.rounds.worker import Call, rows_of
from numpyro_fed.vi import sfvi
from numpyro_fed.vi.algorithms import ALGORITHMS, own_params
from numpyro_fed.vi.config import FIT_CLASSES, FIT_TASKS, FitConfig
from numpyro_fed.vi.loop import Participation, VIState, drawn
from numpyro_fed.vi.setup import Setup

__all__ = ["InitLocal", "RemoteRounds", "RemoteStates", "RoundLocal", "kept_by", "ledger_of_calls"]


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
class InitLocal(SiloTask):
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
    reads = (FIT_TASKS,)
    needs_fit = True

    config: FitConfig
    algorithm: str
    taken: bool = False

    @property
    def fit_config(self) -> FitConfig:
        """Static facts of the fit, which are those of the call."""
        return self.config

    def __call__(
        self, key: Array, message: dict[str, Array], state: Any, view: SiloView
    ) -> tuple[Array, Any]:
        """Return nothing but a zero, and the silo's first state.

        :raises ValueError: if the state that it reads has parameters of other shapes.
        """
        local = self.config.families[0].init_local(rows_of(view))
        if self.taken:
            own = own_params(self.config, 0, state, message)
            got, expected = (jax.tree.map(jnp.shape, x) for x in (own, local))
            if got != expected:
                raise ValueError(
                    "init_from: expected a result of the same model and guide, with local "
                    f"parameters of shapes {expected}, got {got}"
                )
            local = own
        return jnp.zeros(()), ALGORITHMS[self.algorithm].init_silo(self.config, 0, message, local)


@dataclass(frozen=True)
class RoundLocal(SiloTask):
    """The call for a silo's part of a round; fields as in :class:`InitLocal`.

    :param bare: in a fit with privacy, whether :meth:`private` adds the noise, in the silo.
    """

    wire_name = "RoundLocal"
    leaves = (
        "The silo sends, in SFVI, its part of the bound and of the bound's gradient; in SFVI- "
        "Avg, its bound, its number of rows and the global parameters after its steps; in "
        "conducive rounds, its expected log likelihood, the change of its approximate factor, "
        "and with optimizers its copies of the learned parameters and its share of the rows; and "
        "in each, whether all is finite"
    )
    numbers = (
        "for SFVI, up to 2 d numbers and the gradient in the message's network weights or guide "
        "parameters for each draw, and one for each learned parameter; for SFVI-Avg, one for "
        "each global parameter; for conducive rounds, d + d (d + 1) / 2 (diagonal: 2 d) and one "
        "for each learned parameter; and up to 3 more"
    )
    ceiling = 100_000
    message_classes = ("SFVIMessage", "SFVIAvgMessage", "ConduciveMessage", *FIT_CLASSES)
    reads = (FIT_TASKS,)
    needs_fit = True

    config: FitConfig
    algorithm: str
    bare: bool = False

    @property
    def summed(self) -> bool:
        """Flag of masked replies, in fits with secure sums."""
        return self.config.secure_sum

    @property
    def fit_config(self) -> FitConfig:
        """Static facts of the fit, which are those of the call."""
        return self.config

    def __call__(self, key: Array, message: Any, state: Any, view: SiloView) -> tuple[Any, Any]:
        """Return the reply of the algorithm's ``local``, and the silo's new state."""
        local = ALGORITHMS[self.algorithm].local
        if self.bare and self.config.noise is not None:
            local = partial(sfvi.local, bare=True)
        return local(self.config, key, message, state, rows_of(view))

    def private(self, reply: Any, key: bytes) -> Any:
        """Return a bare reply with exact noise."""
        assert self.config.noise is not None
        return sfvi.private(reply, partial(noised_exactly, self.config.noise, Words(key)))


_LARGEST = 1e18  # of a reply's numbers: optimizers square them, in float32


def _bounded(x: np.ndarray) -> np.ndarray:
    """Return numbers, with NaN in the place of those that are absurdly large."""
    return np.where(np.abs(x) > _LARGEST, np.nan, x) if x.dtype.kind == "f" else x


@partial(jax.jit, static_argnames=("federated", "config", "who"))
def _leave(
    federated: Callable,
    config: FitConfig,
    who: Participation | None,
    server: Any,
    stacks: list[SiloRows],
) -> tuple[Any, list[Array], Array | None]:
    """Return the message to all silos, each silo's key, and the weights of their replies."""
    key, weights = drawn(who, server)
    message = federated(config, stacks).broadcast(key, server)
    keys = [jax.vmap(partial(key_among, key, rows.part))(rows.number) for rows in stacks]
    return message, [one[i] for one in keys for i in range(len(one))], weights


@partial(jax.jit, static_argnames=("federated", "config"))
def _merge(
    federated: Callable,
    config: FitConfig,
    server: Any,
    replies: Any,
    weights: Any,
    stacks: list[SiloRows],
) -> tuple[Any, Any]:
    merge = federated(config, stacks).merge
    return merge(server, replies) if weights is None else merge(server, replies, weights)


class RemoteRounds:
    """Rounds over remote silos: ``rounds(state, num) -> (state, losses, bad)``.

    The results are those of :func:`~numpyro_fed.vi.loop.inline_rounds`.

    :param algorithm: name of the module of its functions: ``"sfvi"``, ``"sfvi_avg"`` or
        ``"conducive"``.
    :param federated: the algorithm.
    :param prepared: the setup before the first round.
    :param who: the law of the silos that take part.
    :param answering: the probability of each silo's answer, where it is known.
    :param checkpoint: the file for states.
    :param facts: the facts that distinguish this fit from others, for checkpoints.
    """

    def __init__(
        self,
        algorithm: str,
        federated: Callable,
        setup: Setup,
        who: Participation | None = None,
        answering: Participation | None = None,
        checkpoint: Checkpoint | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.checkpoint, self.facts = checkpoint or Checkpoint(None, 1), facts or {}
        self.losses: list[float] = []
        self.saved_slots: set[int] = set()
        self.algorithm, self.federated, self.setup, self.who = (
            algorithm,
            federated,
            setup,
            who,
        )
        silos = setup.parts[0]
        assert isinstance(silos, RemoteSilos)
        self.silos, self.carrier = silos, silos.carrier
        self.written: set[int] = set()  # slots to forget when the state no longer holds them
        self.numbers = np.concatenate([np.asarray(rows.number) for rows in setup.stacks]).tolist()
        self.local = RoundLocal(setup.config, algorithm)
        self.answering = None if answering is None else answering.probability
        self.zeros: Any = None

    def start(self, server: Any, params: dict[str, Array], taken: RemoteStates | None) -> VIState:
        """Have all silos write a first state, and return the state before the first round.

        :param params: global parameters, unconstrained.
        :param taken: the slots where silos find their own parameters to start from; ``None``: they
            start anew.
        """
        num, local = (
            len(self.numbers),
            InitLocal(self.setup.config, self.algorithm, taken is not None),
        )
        read = [None] * num if taken is None else taken.slots.tolist()
        key = jax.random.key(0)  # unused by the call
        slots = [self.carrier.new_slot() for _ in self.numbers]
        calls = [
            Call(n, local, key, params, *own)
            for n, *own in zip(self.numbers, read, slots, strict=True)
        ]
        try:
            self.silos.ask_for_sure(calls)
        except BaseException:
            self.carrier.forget(slots)
            raise
        zeros = np.zeros(num, np.int64)
        kept = RemoteStates(
            np.array(slots), np.zeros((num, 4), np.int64), zeros, self.carrier.token
        )
        return VIState(server, kept, np.zeros(num, np.int32))  # type: ignore[arg-type]

    def __call__(self, state: VIState, num: int) -> tuple[VIState, np.ndarray, np.ndarray]:
        """Make ``num`` rounds, and write the checkpoints that are due between them."""
        losses, bad = np.zeros(num), np.full(num, -1)
        for i in range(num):
            self.tidy(state)
            state, losses[i], bad[i] = self._round(state)
            if bad[i] == -1:
                self._save(state, losses[i])
        return state, losses, bad

    def _save(self, state: VIState, loss: float) -> None:
        """Write a checkpoint, if one is due; silos keep the states that it names until the next."""
        self.losses.append(float(loss))
        if self.checkpoint.due(len(self.losses), 0):
            values = {"state": state, "losses": np.array(self.losses), **self.facts}
            if self.checkpoint.save(values, self.carrier):
                self.saved_slots = set(state.silos.slots.tolist())  # type: ignore[attr-defined]

    def saved(self) -> tuple[VIState, np.ndarray] | None:
        """Return state and losses of a checkpoint of this fit, or ``None``.

        :raises ValueError: where the checkpoint is of another fit.
        """
        found = self.checkpoint.load(self.carrier)
        if found is None:
            return None
        self.checkpoint.same_run(found, self.facts)
        state, losses = found["state"], np.array(found["losses"])
        state = state._replace(silos=replace(state.silos, token=self.carrier.token))
        self.losses, self.saved_slots = losses.tolist(), set(state.silos.slots.tolist())
        return state, losses

    def owns(self, state: VIState) -> None:
        """Take over a state that no one else holds, as one that these rounds wrote."""
        self.written.update(state.silos.slots.tolist())  # type: ignore[attr-defined]

    def tidy(self, state: VIState) -> None:
        """Have silos forget states that these rounds wrote and that are no longer needed.

        These are states of earlier rounds, and of replies that were lost.
        """
        spent = self.written.difference(
            state.silos.slots.tolist(),  # type: ignore[attr-defined]
            self.saved_slots,
        )
        self.carrier.forget(sorted(spent))
        self.written -= spent

    def _round(self, state: VIState) -> tuple[VIState, float, int]:
        """Make one round; return the state, the loss, and the silo that was not finite."""
        kept: RemoteStates = state.silos  # type: ignore[assignment]
        message, keys, weights = _leave(
            self.federated, self.setup.config, self.who, state.server, self._stacks
        )
        weights = np.ones(len(keys)) if weights is None else np.asarray(weights)
        asked = np.flatnonzero(weights > 0).tolist()
        write = kept.slots.copy()
        write[asked] = [self.carrier.new_slot() for _ in asked]
        self.written.update(write[asked].tolist())
        calls = [
            Call(self.numbers[i], self.local, keys[i], message, int(kept.slots[i]), int(write[i]))
            for i in asked
        ]
        replies, times = self._answers(calls)
        came = np.zeros(len(keys), bool)
        came[asked] = [reply is not None for reply in replies]
        # where no silo is asked, one is asked for its form and keeps no state
        blank = self._blank(
            replies,
            calls or [Call(self.numbers[0], self.local, keys[0], message, int(kept.slots[0]))],
        )
        each = [blank] * len(keys)
        for i, reply in zip(asked, replies, strict=True):
            each[i] = blank if reply is None else reply
        collected = jax.tree.map(lambda *x: np.stack(x), *each)  # in NumPy, to dispatch no program
        collected = opened(collected, np.dtype(jnp.result_type(float)))
        collected = jax.tree.map(_bounded, collected)
        server, info = _merge(
            self.federated,
            self.setup.config,
            state.server,
            collected,
            self._weights(weights, came),
            self._stacks,
        )
        loss, finite, silo = (np.asarray(x) for x in info)
        costs = kept.costs.copy()
        costs[asked] += self._costs(message, blank, times, came[asked])
        missed = kept.missed + (came & ~collected.finite)
        new = replace(kept, slots=np.where(came, write, kept.slots), costs=costs, missed=missed)
        # a sum does not show which silo it was
        alone = self.setup.config.secure_sum and len(self.numbers) > len(collected.finite)
        if not finite and silo < 0 and not alone:  # a silo may report finite numbers wrongly
            # under privacy the value is NaN
            numbers = jax.tree.leaves(collected._replace(value=()))
            odd = np.any([~np.isfinite(x).reshape(len(x), -1).all(1) for x in numbers], axis=0)
            silo = odd.argmax() if odd.any() else silo
        bad = -1 if finite else (-2 if silo < 0 or alone else int(silo))
        return (
            VIState(server, new, state.visits + came.astype(np.int32)),  # type: ignore[arg-type]
            float(loss),
            bad,
        )

    @property
    def _stacks(self) -> list[SiloRows]:
        return self.setup.stacks

    @property
    def _needs_all(self) -> bool:
        """Flag of rounds that need all replies; for the others one is enough."""
        return self.algorithm == "sfvi" or self.setup.config.secure_sum

    def _answers(self, calls: list[Call]) -> tuple[list[Any], np.ndarray]:
        """Return the replies, and the number of times that each silo was asked."""
        if self.answering is not None:
            return list(self.silos.ask(calls)) if calls else [], np.ones(len(calls), np.int64)
        return self.silos.ask_again(calls, all_needed=self._needs_all)

    def _blank(self, replies: list[Any], calls: list[Call]) -> Any:
        """Return a reply of zeros.

        If no reply has come yet, silos are asked for one whose numbers are not used.
        """
        if self.zeros is None:
            if all(reply is None for reply in replies):
                replies, _ = self.silos.ask_again(calls, all_needed=False)
            self.zeros = jax.tree.map(
                np.zeros_like, next(reply for reply in replies if reply is not None)
            )
        return self.zeros

    def _weights(self, weights: np.ndarray, came: np.ndarray) -> np.ndarray | None:
        """Return the weights of the replies; ``None`` where all count once."""
        if self.answering is not None:
            weights = weights / self.answering
        elif self.who is None and came.all():
            return None
        return np.where(came, weights, 0.0).astype(jnp.result_type(float))

    def _costs(self, message: Any, reply: Any, times: np.ndarray, came: np.ndarray) -> np.ndarray:
        down, up = message_bytes(message), message_bytes(reply)
        evaluations = self.setup.config.evaluations(0)
        return np.stack([times, came * evaluations, times * down, came * up], axis=1)


def kept_by(state: Any, setup: Setup, name: str) -> RemoteStates:
    """Return the slots of a result's local states in the silos.

    :param name: the argument's name, for the message.
    :raises ValueError: for a result of other silos, or of silos in this process.
    """
    kept, carrier = (
        getattr(state, "silos", None),
        setup.parts[0].carrier,  # type: ignore[attr-defined]
    )
    if (
        isinstance(kept, RemoteStates)
        and kept.token == carrier.token
        and len(kept.slots) == len(setup.names)
    ):
        return kept
    raise ValueError(
        f"{name}: expected a result of a run over the same carrier, whose local parameters the "
        "silos keep, got one of other silos or of silos in this process"
    )


def ledger_of_calls(state: VIState, names: tuple[str, ...], order: tuple[str, ...]) -> Ledger:
    """Return each silo's costs of the rounds so far, from its calls and replies.

    :param names: the silos' names, in the order of the stacks.
    :param order: their order in the ledger.
    """
    kept: RemoteStates = state.silos  # type: ignore[assignment]
    costs = {name: Cost(*map(int, row)) for name, row in zip(names, kept.costs, strict=True)}
    return Ledger(order, *zip(*(costs[name] for name in order), strict=True))
