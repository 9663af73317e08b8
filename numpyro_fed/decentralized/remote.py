"""Networks of nodes over remote silos: a step calls every node, and this process relays messages.

The driver holds what nodes mix (X, Y, trackers), and applies A(t) like a relay of all messages. A
node takes its gradient, and moves its local latents, where its rows are. Keys are those of
:func:`numpyro_fed.decentralized.networks.advance`, so draws are those of inline silos.

The driver sees every node's position and gradient at every step. Over links without a server, only
out-neighbors see something, and they see it mixed.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed._typing import Facts
from numpyro_fed.data.views import SiloView, buckets
from numpyro_fed.decentralized._kernel import NetworkKernel
from numpyro_fed.decentralized.networks import Exchanged, NetworkState, exchange, next_state
from numpyro_fed.decentralized.nodes import node_step
from numpyro_fed.mcmc.config import KernelTask, NetworkConfig, NodeConfig, Tuning
from numpyro_fed.mcmc.remote_chains import RemoteSteps, remote_steps
from numpyro_fed.rounds.driver import Run
from numpyro_fed.rounds.federated import LARGEST_FINITE
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.worker import Call, rows_of


@dataclass(frozen=True)
class NodeStartLocal(KernelTask):
    """Call that draws a node's first coordinates of its latents.

    They are the node's part of a single draw for all nodes. Nothing leaves the silo.

    :param config: the static facts.
    :param networks: number of networks.
    """

    wire_name = "NodeStartLocal"
    methods = ("network",)
    leaves = "The silo draws its first local latents, keeps them, and sends only a zero"
    numbers = ""
    ceiling = 100_000
    reads = (("ScoreLocal",),)

    config: NodeConfig
    networks: int

    def __call__(self, key: Array, message: Array, rows: Any, view: SiloView) -> tuple[Array, Any]:
        """Draw the coordinates; the message is the number of the node's network."""
        assert self.config.units is not None
        group, shown = self.config.units.group, np.arange(rows.shape[0])
        stacks, drawn = np.zeros(len(view.silos), np.int32), []
        for k, (numbers, pad) in enumerate(buckets(view.silos)):
            count = 1 if group is None else dict(pad)[group]
            shape = (self.networks, len(numbers), count, *rows.shape[1:])
            eps = random.normal(random.fold_in(key, k), shape, jnp.result_type(float))
            place = np.zeros(len(view.silos), np.int32)
            place[numbers], stacks[numbers] = np.arange(len(numbers)), k
            drawn.append(
                eps[message, jnp.asarray(place)[view.number]][np.minimum(shown, count - 1)]
            )
        return jnp.zeros(()), (jnp.stack(drawn)[jnp.asarray(stacks)[view.number]], rows)


@dataclass(frozen=True)
class NodeLocal(KernelTask):
    """Call that makes a node's part of a step, at the position ``(d,)`` in the message.

    It runs :func:`numpyro_fed.decentralized.nodes.node_step`. What leaves the silo: its gradient
    ``(d,)``, in whitened units.
    """

    wire_name = "NodeLocal"
    methods = ("network",)
    leaves = "The silo sends the gradient of its part of the potential at its node's position"
    numbers = "d numbers in each step of each network"
    ceiling = 1_000_000
    reads = (("TellLocal",), ("NodeStartLocal", "NodeLocal"))

    config: NodeConfig

    def __call__(
        self, key: Array, message: Array, state: tuple[Tuning, Any], view: SiloView
    ) -> tuple[Any, Any]:
        """Return the gradient, and the local latents after their moves."""
        tuning, latents = state
        eps, local_map = (None, None) if latents is None else latents
        slope, eps, _ = node_step(self.config, tuning, key, rows_of(view), message, eps, local_map)
        return slope, (None if latents is None else (eps, local_map))


def _check(kernel: NetworkKernel, silos: RemoteSilos, num_chains: int) -> None:
    """Raise an error, before any call, for what is not built for remote silos."""
    kernel.check_chains(num_chains, len(silos))
    if kernel.learns_step_size:
        raise ValueError(
            "step_size='adaptive' is not built for remote silos; expected a number, or a schedule "
            "(fed.polynomial_decay). To learn a number, run in this process with synthetic data of "
            "as many silos and rows"
        )
    if kernel.batch_size is not None:
        raise ValueError(
            f"batch_size={kernel.batch_size} is not built for remote silos; expected None"
        )


def _start(
    kernel: NetworkKernel, rng_key: Array, num_chains: int, num_warmup: int, silos: RemoteSilos
) -> Run:
    """Return the first state, and the slots in which nodes store their local latents.

    The slots are ``(C, 1)``, or ``(C, 0)`` without any.
    """
    state, key_eps = kernel.first_state(rng_key, num_chains, 0, None, silos)
    config, latents, m = kernel.config, kernel.tuning.latents, len(silos)
    if config.units is None or latents is None:
        return Run(state, np.zeros((num_chains, 0), np.int64))
    slots = np.array([[silos.carrier.new_slot()] for _ in range(num_chains)])
    local, rows = NodeStartLocal(config.node, num_chains // m), latents.rows.slot
    nodes = enumerate(slots[:, 0].tolist())
    silos.ask_for_sure(
        [Call(c % m, local, key_eps, np.int32(c // m), rows, slot) for c, slot in nodes]
    )
    return Run(state, slots)


@partial(jax.jit, static_argnames=("config",))
def _leave(config: NetworkConfig, state: NetworkState) -> tuple[Exchanged, list[Array]]:
    """Exchange, and return what nodes hold, and the key of each network's nodes."""
    sent = exchange(config, state)
    return sent, [sent.key_own[r] for r in range(len(sent.position))]


@partial(jax.jit, static_argnames=("config",))
def _arrive(
    config: NetworkConfig, state: NetworkState, sent: Exchanged, slope: Array, accepted: Array
) -> NetworkState:
    return next_state(config, state, sent, slope, accepted, None, [])


def _step(kernel: NetworkKernel, run: Run, silos: RemoteSilos) -> Run:
    """Make one step of every network.

    Nodes store new latents beside the old ones; the new ones count if their network's step does. A
    step with numbers that are not finite, or beyond 1e18, is undone. How many local moves were
    accepted stays in the silos.

    :raises SiloError: with the names of silos that did not answer five calls, since a network's
        step needs all gradients.
    """
    config, m, slots, tuning_slots = kernel.config, len(silos), run.slots, run.record["told"]
    sent, keys = _leave(config, run.state)
    positions = np.asarray(sent.position).reshape(len(slots), -1)
    local, calls = NodeLocal(config.node), []
    for c, position in enumerate(positions):
        old, new = (
            (None, None) if config.units is None else (int(slots[c, 0]), silos.carrier.new_slot())
        )
        calls.append(Call(c % m, local, keys[c // m], position, (tuning_slots[c % m], old), new))
    replies, _ = silos.ask_again(calls)
    slope, shape = np.stack(replies), sent.position.shape
    absurd = ~(np.abs(slope) < LARGEST_FINITE).all(1)  # or NaN
    slope[absurd] = np.nan
    faults = [(c % m, "gradients that are NaN or beyond 1e18") for c in np.flatnonzero(absurd)]
    accepted = np.full(shape[:2], np.nan if config.units is not None else 1.0, slope.dtype)
    # NumPy stacks without programs to dispatch
    state = _arrive(config, run.state, sent, slope.reshape(shape), accepted)
    if config.units is not None:
        written = np.array([[call.write] for call in calls])
        slots = np.where(np.asarray(state.diverging)[:, None], slots, written)
    return run.after(state, slots, bad=[*run.record["bad"], *faults])


def _facts(kernel: NetworkKernel) -> Facts:
    """Return the links with their weights, the schedule and the algorithm."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(kernel.mixing)]
    exchanged: Callable = kernel.config.exchange
    return {
        "graph": hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest(),
        "algorithm": [exchanged.__name__, kernel.tracking],
        "stays": re.sub(r"0x[0-9a-f]+", "", repr((kernel.config.schedule,))),
    }


@remote_steps.register
def _(kernel: NetworkKernel) -> RemoteSteps:
    return RemoteSteps(_check, _start, _step, _facts, False)
