"""Hamiltonian Monte Carlo over remote silos: each leapfrog step calls every silo once."""

import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed._typing import Facts, PyTree
from numpyro_fed.data.views import SiloView
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.mcmc.leapfrog import (
    Message,
    Reply,
    SiloState,
    Walk,
    broadcast,
    first_local,
    local,
    merge,
    moving,
)
from numpyro_fed.mcmc.remote_chains import RemoteSteps, remote_steps
from numpyro_fed.mcmc.trajectory import (
    NO_START,
    HMCConfig,
    HMCState,
    arrive,
    depart,
    first_theta,
    first_walk,
    is_finite,
    num_latents,
    start_keys,
    started,
    uniform,
)
from numpyro_fed.rounds.driver import Run
from numpyro_fed.rounds.federated import LARGEST_FINITE
from numpyro_fed.rounds.inline import key_among
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.rounds.worker import Call, rows_of


@dataclass(frozen=True)
class LeapfrogStartLocal(SiloTask):
    """Call that draws all chains' first latents of the silo.

    :param factors: the model's factors.
    :param units: the units whose latents the silo integrates out.
    """

    wire_name = "LeapfrogStartLocal"
    methods = ("hmc",)
    leaves = "The silo draws its first local latents, keeps them, and sends only a zero"
    numbers = ""
    ceiling = 1_000

    factors: Factors
    units: Units | None

    def __call__(
        self, key: Array, message: Array, state: None, view: SiloView
    ) -> tuple[Array, SiloState]:
        """Draw the latents; the message is theta ``(C, d)``."""
        latents = num_latents(moving(self.factors, self.units), rows_of(view))
        shape = (len(message), latents)
        return jnp.zeros(()), first_local(uniform(random.fold_in(key, view.number), shape))


@dataclass(frozen=True)
class LeapfrogLocal(SiloTask):
    """Call that makes the silo's part of a leapfrog step of all chains.

    :param factors: the model's factors.
    :param units: the units whose latents the silo integrates out; ``None``: latents move.
    """

    wire_name = "LeapfrogLocal"
    methods = ("hmc",)
    leaves = (
        "The silo sends the gradient of its log likelihood at the server's positions, at its own "
        "latents or with them integrated out, and the change of its energy"
    )
    numbers = "d + 1 numbers for each chain in each step"
    ceiling = 1_000_000
    message_classes = ("LeapfrogMessage",)
    reads = (("LeapfrogStartLocal", "LeapfrogLocal"),)

    factors: Factors
    units: Units | None

    def __call__(
        self, key: Array, message: Message, state: SiloState, view: SiloView
    ) -> tuple[Reply, SiloState]:
        """Return the gradient and the change of the energy, and the latents after the step."""
        return local(self.factors, self.units, key, message, state, rows_of(view))


def _check(kernel: HMC, silos: RemoteSilos, num_chains: int) -> None:
    """Accept all options."""


def _facts(kernel: HMC) -> Facts:
    """Return the numbers of a trajectory."""
    return {"stays": re.sub(r"0x[0-9a-f]+", "", repr(kernel.config[1:]))}


_broadcast = jax.jit(partial(broadcast, None))


@partial(jax.jit, static_argnames=("factors",))
def _merge(factors: Factors, shared: PyTree, walk: Walk, replies: Reply) -> Walk:
    return merge(factors, shared, walk, replies)[0]


_depart = jax.jit(depart, static_argnames=("config",))


@partial(jax.jit, static_argnames=("config",))
def _arrive(config: HMCConfig, state: HMCState, begun: Walk, walk: Walk, num: Array) -> HMCState:
    state = arrive(config, state, begun, walk, num)
    return state._replace(z=jax.vmap(config.factors.unravel)(state.here.at))


def _keys(key: Array, silos: RemoteSilos) -> list[Array]:
    """Return the silos' keys of a trajectory."""
    return [key_among(key, 0, jnp.asarray(n)) for n in range(len(silos))]


def _leap(
    config: HMCConfig, keys: list[Array], walk: Walk, slots: list[int], silos: RemoteSilos
) -> tuple[Walk, list[int]]:
    """Make a leapfrog step; return the server and the slots of the silos' new states.

    :raises SiloError: with the names of silos that did not answer five calls.
    """
    message, task = _broadcast(walk), LeapfrogLocal(config.factors, config.units)
    new = [silos.carrier.new_slot() for _ in slots]
    each = zip(keys, slots, new, strict=True)
    calls = [Call(n, task, own, message, *places) for n, (own, *places) in enumerate(each)]
    replies, _ = silos.ask_again(calls)
    replies = jax.tree.map(lambda *x: np.stack(x), *replies)  # without a program to dispatch
    # an absurd number ends in a trajectory that is refused
    replies = jax.tree.map(lambda x: np.where(np.abs(x) < LARGEST_FINITE, x, np.nan), replies)
    return _merge(config.factors, silos.shared, walk, replies), new


def _start(kernel: HMC, keys: Array, num_chains: int, num_warmup: int, silos: RemoteSilos) -> Run:
    """Return all chains' first state, and the slots ``(1, S)`` of the silos' latents."""
    kernel.set_warmup(num_warmup)
    config, near = kernel.config, kernel.near
    rng_key, key_theta, key_local, key_round = start_keys(keys[0])
    theta = first_theta(key_theta, (num_chains, config.factors.dim), near, 1.0)
    slots = [silos.carrier.new_slot() for _ in silos.names]
    begin = LeapfrogStartLocal(config.factors, config.units)
    silos.ask_for_sure(
        [Call(n, begin, key_local, theta, None, slot) for n, slot in enumerate(slots)]
    )
    walk, new = _leap(config, _keys(key_round, silos), first_walk(theta, near), slots, silos)
    silos.carrier.forget(slots)
    if not is_finite(walk.there):
        raise ValueError(NO_START)
    return Run(started(walk, rng_key, False, near is not None), np.array([new]))


def _step(kernel: HMC, run: Run, silos: RemoteSilos) -> Run:
    """Make a trajectory of all chains.

    Silos keep the state of its start until the next.
    """
    config, before = kernel.config, run.slots[0].tolist()
    begun, num_steps, key = _depart(config, run.state)
    keys, walk, slots = _keys(key, silos), begun, before
    for _ in range(int(num_steps)):
        walk, new = _leap(config, keys, walk, slots, silos)
        if slots is not before:
            silos.carrier.forget(slots)
        slots = new
    state = _arrive(config, run.state, begun, walk, num_steps)
    return run.after(state, np.array([slots]))


@remote_steps.register
def _(kernel: HMC) -> RemoteSteps:
    return RemoteSteps(_check, _start, _step, _facts, False)
