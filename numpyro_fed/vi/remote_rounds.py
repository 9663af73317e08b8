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
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.privacy.secure_sum import opened
from numpyro_fed.rounds.checkpoint import Checkpoint
from numpyro_fed.rounds.driver import Run, Slots
from numpyro_fed.rounds.federated import LARGEST_FINITE, Cost, Ledger, message_bytes
from numpyro_fed.rounds.inline import key_among
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.worker import Call
from numpyro_fed.vi.algorithms import ALGORITHMS
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.loop import Rounds, VIState
from numpyro_fed.vi.participation import Participation, drawn
from numpyro_fed.vi.remote import InitLocal, RemoteStates, RoundLocal
from numpyro_fed.vi.setup import Setup


def _bounded(x: np.ndarray) -> np.ndarray:
    """Return numbers, with NaN in the place of those that are absurdly large."""
    return np.where(np.abs(x) > LARGEST_FINITE, np.nan, x) if x.dtype.kind == "f" else x


@partial(jax.jit, static_argnames=("federated", "config", "who"))
def _leave(
    federated: Callable,
    config: FitConfig,
    who: Participation | None,
    server: PyTree,
    stacks: list[SiloRows],
) -> tuple[PyTree, list[Array], Array | None]:
    """Return the message to all silos, each silo's key, and the weights of their replies."""
    key, weights = drawn(who, server.rng_key)
    message = federated(config, stacks).broadcast(key, server)
    keys = [jax.vmap(partial(key_among, key, rows.part))(rows.number) for rows in stacks]
    return message, [one[i] for one in keys for i in range(len(one))], weights


@partial(jax.jit, static_argnames=("federated", "config"))
def _merge(
    federated: Callable,
    config: FitConfig,
    server: PyTree,
    replies: PyTree,
    weights: PyTree,
    stacks: list[SiloRows],
) -> tuple[PyTree, PyTree]:
    merge = federated(config, stacks).merge
    return merge(server, replies) if weights is None else merge(server, replies, weights)


class RemoteRounds(Rounds):
    """Rounds over remote silos, with these parameters beside those of :class:`Rounds`.

    :param answering: the probability of each silo's answer, where it is known.
    :param checkpoint: the file for states.
    :param facts: the facts that distinguish this fit from others, for checkpoints.
    """

    at_once = 1

    def __init__(
        self,
        algorithm: str,
        setup: Setup,
        who: Participation | None = None,
        answering: Participation | None = None,
        checkpoint: Checkpoint | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(algorithm, setup, who)
        silos = setup.parts[0]
        assert isinstance(silos, RemoteSilos)
        self.silos, self.carrier, self.config = silos, silos.carrier, setup.config
        self.slots = Slots(self.carrier, checkpoint, facts)
        self.answering = None if answering is None else answering.probability
        self.numbers = np.concatenate([np.asarray(rows.number) for rows in setup.stacks]).tolist()
        self.local = RoundLocal(setup.config, algorithm)
        self.needs_all = ALGORITHMS[algorithm].adds_up or setup.config.secure_sum
        self.zeros: PyTree = None

    def start(
        self, rng_key: Array, params: dict[str, PyTree], local_params: RemoteStates | None
    ) -> VIState:
        """Have all silos write a first state, and return the state before the first round.

        :param local_params: the slots where silos find their own parameters to start from;
            ``None``: they start anew.
        """
        num = len(self.numbers)
        local = InitLocal(self.config, self.algorithm, local_params is not None)
        read = [None] * num if local_params is None else local_params.slots.tolist()
        key = jax.random.key(0)  # unused by the call
        with self.slots.writing():
            slots = [self.carrier.new_slot() for _ in self.numbers]
            calls = [
                Call(n, local, key, params, *places)
                for n, *places in zip(self.numbers, read, slots, strict=True)
            ]
            self.silos.ask_for_sure(calls)
        costs, missed = np.zeros((num, 4), np.int64), np.zeros(num, np.int64)
        states = RemoteStates(np.array(slots), costs, missed, self.carrier.token)
        return VIState(self.first_server(rng_key, params), states, np.zeros(num, np.int32))

    def __call__(self, state: VIState, num: int) -> tuple[VIState, np.ndarray, np.ndarray]:
        losses, bad = np.zeros(num), np.full(num, -1)
        for i in range(num):
            state, losses[i], bad[i] = self._round(state)
        return state, losses, bad

    def ledger(self, state: VIState, order: tuple[str, ...]) -> Ledger:
        rows = zip(self.setup.names, state.silos.costs, strict=True)
        costs = {name: Cost(*map(int, row)) for name, row in rows}
        return Ledger(order, *zip(*(costs[name] for name in order), strict=True))

    def saved(self) -> Run | None:
        """Return the fit at its checkpoint, or ``None``.

        :raises ValueError: where the checkpoint is of another fit.
        """
        values = self.slots.checkpoint.load(self.carrier)
        if values is None:
            return None
        self.slots.checkpoint.same_run(values, self.slots.facts)
        state = values["state"]
        state = state._replace(silos=replace(state.silos, token=self.carrier.token))
        self.slots.resume(state.silos.slots, values.get("spent", []))
        losses = np.array(values["losses"])
        return Run(state, state.silos.slots, len(losses), {"losses": losses})

    def _round(self, state: VIState) -> tuple[VIState, float, int]:
        """Make one round; return the state, the loss, and the silo that was not finite."""
        old, stacks = state.silos, self.setup.stacks
        message, keys, weights = _leave(self.federated, self.config, self.who, state.server, stacks)
        weights = np.ones(len(keys)) if weights is None else np.asarray(weights)
        called = np.flatnonzero(weights > 0).tolist()
        write = old.slots.copy()
        write[called] = [self.carrier.new_slot() for _ in called]
        calls = [
            Call(self.numbers[i], self.local, keys[i], message, int(old.slots[i]), int(write[i]))
            for i in called
        ]
        least = 0 if self.answering is not None else len(calls) if self.needs_all else 1
        replies, times = self.silos.ask_again(calls, least)
        answered = np.zeros(len(keys), bool)
        answered[called] = [reply is not None for reply in replies]
        # where no silo is called, one is asked for its form and keeps no state
        blank = self._blank(
            replies,
            calls or [Call(self.numbers[0], self.local, keys[0], message, int(old.slots[0]))],
        )
        each = [blank] * len(keys)
        for i, reply in zip(called, replies, strict=True):
            each[i] = blank if reply is None else reply
        collected = jax.tree.map(lambda *x: np.stack(x), *each)  # in NumPy, to dispatch no program
        collected = opened(collected, np.dtype(jnp.result_type(float)))
        collected = jax.tree.map(_bounded, collected)
        known = self._weights(weights, answered)
        server, info = _merge(self.federated, self.config, state.server, collected, known, stacks)
        costs = old.costs.copy()
        costs[called] += self._costs(message, blank, times, answered[called])
        new = replace(
            old,
            slots=np.where(answered, write, old.slots),
            costs=costs,
            missed=old.missed + (answered & ~collected.finite),
        )
        bad = -1 if info.finite else self._first_bad(int(info.silo), collected)
        return VIState(server, new, state.visits + answered.astype(np.int32)), float(info.loss), bad

    def _first_bad(self, silo: int, replies: PyTree) -> int:
        """Return the silo whose numbers were not finite; -2 for the server, and for a sum.

        :param silo: the first silo that says so, or -1.
        """
        # a sum does not show which silo it was
        if self.config.secure_sum and len(self.numbers) > len(replies.finite):
            return -2
        if silo < 0:  # a silo may report finite numbers wrongly
            # under privacy the value is NaN
            numbers = jax.tree.leaves(replies._replace(value=()))
            odd = np.any([~np.isfinite(x).reshape(len(x), -1).all(1) for x in numbers], axis=0)
            silo = int(odd.argmax()) if odd.any() else -2
        return silo

    def _blank(self, replies: list[PyTree], calls: list[Call]) -> PyTree:
        """Return a reply of zeros.

        If no reply has come yet, silos are asked for one whose numbers are not used.
        """
        if self.zeros is None:
            if all(reply is None for reply in replies):
                replies, _ = self.silos.ask_again(calls, 1)
            self.zeros = jax.tree.map(
                np.zeros_like, next(reply for reply in replies if reply is not None)
            )
        return self.zeros

    def _weights(self, weights: np.ndarray, answered: np.ndarray) -> np.ndarray | None:
        """Return the weights of the replies; ``None`` where all count once."""
        if self.answering is not None:
            weights = weights / self.answering
        elif self.who is None and answered.all():
            return None
        return np.where(answered, weights, 0.0).astype(jnp.result_type(float))

    def _costs(
        self, message: PyTree, reply: PyTree, times: np.ndarray, answered: np.ndarray
    ) -> np.ndarray:
        down, up = message_bytes(message), message_bytes(reply)
        evaluations = self.config.evaluations(0)
        return np.stack([times, answered * evaluations, times * down, answered * up], axis=1)
