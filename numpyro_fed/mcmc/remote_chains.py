"""Rounds of chains that travel between remote silos.

In a round, each chain calls the silo that it visits.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from scipy.linalg import solve_triangular

from numpyro_fed._typing import Facts, PyTree
from numpyro_fed.data.views import SiloView
from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.config import KernelTask, LangevinConfig, Tuning
from numpyro_fed.mcmc.langevin import Chain, VisitStats, federated
from numpyro_fed.mcmc.visit import (
    Departure,
    LangevinState,
    arrive,
    chain_axes,
    depart,
    first_states,
    start_keys,
    wait,
)
from numpyro_fed.rounds.driver import Run
from numpyro_fed.rounds.inline import key_of
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.worker import Call

_FARTHEST = 1e3  # largest distance from the surrogate posterior's center, in its sds
_FARTHEST_VISIT = 1e6  # largest growth of a position in a visit, without surrogates


class RemoteSteps(NamedTuple):
    """Functions by which this process drives a kernel's rounds over remote silos.

    :param check: ``check(kernel, silos, num_chains)`` raises a ValueError for what is not built.
    :param start: ``start(kernel, keys, num_chains, num_warmup, silos) -> run``, for all chains.
        Slots are those of local latents: ``(C, S)`` for each chain and silo, ``(C, 1)`` for each
        node in its silo, ``(1, S)`` for all chains in each silo, or ``(C, 0)`` without any.
    :param step: ``step(kernel, run, silos) -> run``, one round. In ``run.record``, ``"told"`` has
        for each silo the slot with the kernel's numbers, and ``"bad"`` for each reply that does not
        count the silo's number and the fault.
    :param facts: ``facts(kernel)`` returns the facts by which a checkpoint recognizes the kernel.
    :param visits: True if a round visits only some silos, so that silent ones may be visited less.
    """

    check: Callable[..., None]
    start: Callable[..., Run]
    step: Callable[..., Run]
    facts: Callable[..., Facts]
    visits: bool


@singledispatch
def remote_steps(kernel: object) -> RemoteSteps:
    """Return the functions that drive a kernel over remote silos.

    Each type of kernel registers its own.

    :raises TypeError: for a kernel of another type.
    """
    raise TypeError(
        f"expected a fed.DSGLD, fed.FSGLD or fed.HMC, got {type(kernel).__name__}; or a "
        "fed.PushSumLangevin or fed.GossipLangevin"
    )


@dataclass(frozen=True)
class StartLocal(KernelTask):
    """Call that draws a chain's first coordinates of the silo's latents.

    They are the silo's part of a single draw for all silos.
    """

    wire_name = "StartLocal"
    leaves = "The silo draws its first local latents, keeps them, and sends only a zero"
    numbers = ""
    ceiling = 100_000
    reads = (("ScoreLocal",),)

    config: LangevinConfig

    def __call__(self, key: Array, message: None, rows: Any, view: SiloView) -> tuple[Array, Any]:
        """Return nothing but a zero, and the coordinates with the local map as the silo's state."""
        units, silos = self.config.units, view.silos
        assert units is not None
        if units.group is None:
            count, places = len(silos), view.number[None]
        else:
            sizes = np.asarray(silos.sizes[units.group])
            count = int(sizes.sum())
            first = jnp.asarray(np.cumsum(sizes) - sizes)[view.number]
            places = first + view.positions(units.group)
        eps = random.normal(key, (count, *rows.shape[1:]), jnp.result_type(float))[places]
        return jnp.zeros(()), (eps, rows)


@dataclass(frozen=True)
class VisitLocal(KernelTask):
    """Call that makes a chain's visit to the silo."""

    wire_name = "VisitLocal"
    leaves = (
        "The silo sends a chain's position and count of steps after the visit, two statistics "
        "of the visit, and the mean difference between its gradient and its surrogate's"
    )
    numbers = "2 d + 3 numbers in each visit"
    ceiling = 1_000_000
    message_classes = ("Chain",)
    reads = (("TellLocal",), ("StartLocal", "VisitLocal"))

    config: LangevinConfig

    def __call__(
        self, key: Array, message: Chain, state: tuple[Tuning, Any], view: SiloView
    ) -> tuple[Any, Any]:
        """Return the chain after its local steps, and its coordinates of the silo's latents.

        Shares of latents that moved stay in the silo. At positions of the server's choice they
        count the rows whose values lie beyond a threshold.
        """
        tuning, latents = state
        (chain, stats), kept = federated(self.config, tuning).local(key, message, latents, view)
        return (chain, stats._replace(accept_prob=None, stuck=None)), kept


@partial(jax.jit, static_argnames=("config", "num_silos"))
def _depart(
    config: LangevinConfig, state: LangevinState, num_silos: int
) -> tuple[Departure, list[tuple[Array, Chain]]]:
    """Choose the silos of all chains, and return each visit's key and the chain that travels."""
    axes = chain_axes(False)
    leave = jax.vmap(lambda s: depart(config, s, num_silos), in_axes=(axes,))(state)
    keys = jax.vmap(key_of)(leave.key, leave.number)
    return leave, [
        (keys[c], jax.tree.map(lambda x, c=c: x[c], leave.chain)) for c in range(len(keys))
    ]


@partial(jax.jit, static_argnames=("config",))
def _arrive(
    config: LangevinConfig,
    state: LangevinState,
    leave: Departure,
    reply: tuple[Chain, VisitStats],
    silent: Array,
) -> LangevinState:
    axes, (chain, stats) = chain_axes(False), reply
    moved = (1.0, 0.0) if config.units is None else (jnp.nan, jnp.nan)
    accept, stuck = (jnp.full_like(stats.cut_rate, x) for x in moved)
    reply = chain, stats._replace(accept_prob=accept, stuck=stuck)

    def one(
        state: LangevinState, leave: Departure, reply: tuple[Chain, VisitStats], silent: Array
    ) -> LangevinState:
        return wait(state, arrive(config, state, leave, *reply), leave.arrives, silent)

    return jax.vmap(one, in_axes=(axes, 0, 0, 0), out_axes=axes)(state, leave, reply, silent)


def _check(kernel: LangevinKernel, silos: RemoteSilos, num_chains: int) -> None:
    """Raise an error for options that are not built for remote silos."""
    options = kernel.options
    moments = isinstance(options.surrogate, str) and options.surrogate == "moments"
    refused = {
        "batch_size": (options.batch_size, options.batch_size is not None, "None"),
        "num_kept": (options.num_kept, options.num_kept != 1, "1"),
        "surrogate": (
            options.surrogate,
            moments,
            '"score", "laplace" or a fed.surrogates.Surrogates',
        ),
    }
    for name, (got, wrong, expected) in refused.items():
        if wrong:
            raise ValueError(f"{name}={got!r} is not built for remote silos; expected {expected}")


def _start(
    kernel: LangevinKernel, keys: Array, num_chains: int, num_warmup: int, silos: RemoteSilos
) -> Run:
    """Return all chains' first states, and the slots of the local latents that silos draw."""
    config, tuning = kernel.config, kernel.tuning
    here, distinct = replace(config, units=None), kernel.options.distinct  # latents are in silos
    state = first_states(here, distinct, keys, None, tuning, silos, None)
    slots = np.zeros((len(keys), 0), np.int64)
    if config.units is not None:
        assert tuning.latents is not None
        own = start_keys(keys, distinct)[0]
        keys_eps = jax.vmap(lambda key: random.split(key, 4)[2])(own)
        slots = np.array([[silos.carrier.new_slot() for _ in silos.names] for _ in keys])
        local, rows = StartLocal(config), tuning.latents.rows.slot
        pairs = zip(keys_eps, slots.tolist(), strict=True)
        silos.ask_for_sure(
            [
                Call(n, local, key, None, rows, slot)
                for key, row in pairs
                for n, slot in enumerate(row)
            ]
        )
    return Run(state, slots)


def _step(kernel: LangevinKernel, run: Run, silos: RemoteSilos) -> Run:
    """Make one round of all chains.

    Silos store new latents beside the old ones; the new ones count once the reply has come.
    """
    config, slots, tuning_slots = kernel.config, run.slots.copy(), run.record["told"]
    leave, each = _depart(config, run.state, len(silos))
    numbers, local, calls = np.asarray(leave.number).tolist(), VisitLocal(config), []
    for c, (n, (key, chain)) in enumerate(zip(numbers, each, strict=True)):
        old, new = (
            (None, None) if config.units is None else (int(slots[c, n]), silos.carrier.new_slot())
        )
        calls.append(Call(n, local, key, chain, (tuning_slots[n], old), new))
    replies = silos.ask(calls)
    wrong = [
        None
        if reply is None
        else _wrong(kernel, np.asarray(chain.theta), np.asarray(reply[0].theta))
        for reply, (_, chain) in zip(replies, each, strict=True)
    ]
    faults = [(n, what) for n, what in zip(numbers, wrong, strict=True) if what]
    silent = np.array(
        [reply is None or what is not None for reply, what in zip(replies, wrong, strict=True)]
    )
    if config.units is not None:
        for c, (call, missing) in enumerate(zip(calls, silent.tolist(), strict=True)):
            slots[c, call.number] = call.read[1] if missing else call.write
    filled = [
        _nothing(config, chain) if missing else x
        for x, (_, chain), missing in zip(replies, each, silent, strict=True)
    ]
    # NumPy stacks without programs to dispatch
    state = _arrive(config, run.state, leave, jax.tree.map(lambda *x: np.stack(x), *filled), silent)
    return run.after(state, slots, bad=[*run.record["bad"], *faults])


def _facts(kernel: LangevinKernel) -> Facts:
    """Return the numbers of a visit."""
    config = kernel.config
    return {
        "stays": re.sub(
            r"0x[0-9a-f]+", "", repr((config.num_local_steps, config.cut, config.schedule))
        )
    }


@remote_steps.register
def _(kernel: LangevinKernel) -> RemoteSteps:
    if kernel.pooled:
        return remote_steps.dispatch(object)(kernel)
    return RemoteSteps(_check, _start, _step, _facts, True)


def _wrong(kernel: LangevinKernel, before: np.ndarray, after: np.ndarray) -> str | None:
    """Return the fault in the position of a chain that came back, or ``None``.

    A silo undoes a visit with numbers that are not finite, so NaN in a reply is a fault.

    Distances are in sds of the surrogate posterior, along the kernel's coordinates. Without a
    preconditioner the sds are unknown, and a visit may multiply a position by a million. Beyond
    that, float32 has lost the position before the visit.
    """
    if not np.isfinite(after).all():
        return "NaN"
    loc, scale = kernel.tuning.loc, kernel.tuning.scale
    if scale is None:
        far = np.abs(after - before).max() > _FARTHEST_VISIT * max(1.0, float(np.abs(before).max()))
        return (
            f"positions more than {_FARTHEST_VISIT:,.0f} times as far as they had been"
            if far
            else None
        )
    away = after.astype(np.float64) - np.asarray(loc)
    root = np.asarray(scale, np.float64)
    sds = away / root if root.ndim == 1 else solve_triangular(root, away, lower=True)
    return f"positions farther than {_FARTHEST:,.0f} sds" if np.abs(sds).max() > _FARTHEST else None


def _nothing(config: LangevinConfig, chain: Chain) -> tuple[Chain, VisitStats]:
    """Return a placeholder for a missing reply."""
    zero: PyTree = np.zeros((), chain.theta.dtype)
    still: PyTree = np.zeros(chain.theta.shape, chain.theta.dtype) if config.cut else None
    finite: PyTree = np.array(False)
    return chain, VisitStats(zero, None, None, finite, still)
