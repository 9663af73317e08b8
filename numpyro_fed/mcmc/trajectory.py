r"""Hamiltonian Monte Carlo over silos as they are.

A draw is a trajectory of leapfrog steps (:mod:`numpyro_fed.mcmc.leapfrog`) with momenta that are
new, accepted with the probability :math:`\min(1, e^{-\Delta})`, where :math:`\Delta` is the change
of the sum of all energies. All chains share the step size and the length of their trajectories,
which changes from draw to draw. Both do not depend on the positions after the warm-up, so that the
posterior is invariant.

In the warm-up, step size and scales are learned from the draws of all chains, by the dual averaging
and the windows of NumPyro's NUTS. The server learns the covariance of theta, and each silo the sds
of its own latents.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc_util import build_adaptation_schedule, dual_averaging

from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, stack, to_pooled_order
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.mcmc.leapfrog import (
    Message,
    Place,
    SiloState,
    Walk,
    Welford,
    federated,
    first_local,
    moving,
    no_draws,
    root_of,
    to_sites,
    with_draws,
)
from numpyro_fed.rounds.inline import quick_jit, round_all
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.marginal import taken

Near = tuple[Array, Array]  # mean of an approximation, and root of its covariance

_MOST_STEPS = 128  # of a trajectory
_DIVERGED = 1000.0  # gain of energy above which a trajectory diverged, as in NumPyro
_FIRST_STEP, _NEAR_STEP = 0.1, 0.5
_FULL = 50  # most dimensions of theta whose covariance is learned, in place of their sds
# what to say of a start that is not finite
NO_START = (
    "the log density or its gradient is not finite at the start of a chain; expected init_params= "
    "where it is, or a model whose unconstrained sites may start near zero"
)


class HMCConfig(NamedTuple):
    """Static facts of a kernel.

    :param factors: the model's factors.
    :param length: mean length of a trajectory, in sds.
    :param target: mean acceptance probability that the step size aims at.
    :param num_warmup: draws of the warm-up.
    :param units: the units whose latents silos integrate out; ``None``: latents move.
    """

    factors: Factors
    length: float
    target: float
    num_warmup: int
    units: Units | None = None

    @property
    def moving(self) -> Factors:
        """The factors with the local sites that move."""
        return moving(self.factors, self.units)


@wire_name("HMCState")
class HMCState(NamedTuple):
    """State of :class:`HMC`. Without a leading axis where there is one chain, except in ``here``.

    :param i: draws made.
    :param z: unconstrained values of all latent sites, local ones in pooled order.
    :param accept_prob: acceptance probability of the last trajectory.
    :param diverging: whether its energy grew by more than 1,000, or was not finite.
    :param num_steps: its leapfrog steps, which are rounds.
    :param step_size: step size of the next trajectory, in sds.
    :param here: theta, with the log prior, and the gradient of all terms.
    :param accepted: chains whose last trajectory was accepted, which silos are still to hear.
    :param local: the silos' states, for each stack.
    :param root: root of the covariance of theta that scales its momentum.
    :param seen: statistics of theta's draws for the next root.
    :param dual: state of the step size's dual averaging.
    :param rounds: rounds made.
    :param rng_key: key of the next draw.
    """

    i: Array
    z: dict[str, Array]
    accept_prob: Array
    diverging: Array
    num_steps: Array
    step_size: Array
    here: Place
    accepted: Array
    local: list[SiloState]
    root: Array
    seen: Welford
    dual: tuple
    rounds: Array
    rng_key: Array


class Windows(NamedTuple):
    """Facts of each draw of the warm-up: whether it counts for scales, and whether these renew."""

    learns: np.ndarray
    renews: np.ndarray
    restarts: np.ndarray


def windows(num_warmup: int) -> Windows:
    """Return the windows of NumPyro's NUTS; the first and the last are for the step size alone."""
    made = Windows(*(np.zeros(num_warmup + 1, bool) for _ in range(3)))
    schedule = build_adaptation_schedule(num_warmup) if num_warmup else []
    for number, (start, end) in enumerate(schedule):
        if 0 < number < len(schedule) - 1:
            made.learns[start : end + 1] = True
            made.renews[end] = True
        made.restarts[end] = True
    return made


def _steps(config: HMCConfig, i: Array, step_size: Array) -> Array:
    """Return the number of leapfrog steps: its length varies by half, evenly over draws."""
    bits = (i.astype(jnp.uint32) >> jnp.arange(16)) & 1
    evenly = jnp.sum(bits * 0.5 ** (1 + jnp.arange(16)))  # van der Corput's sequence in base 2
    wanted = jnp.ceil(config.length * (0.5 + evenly) / step_size)
    return jnp.clip(wanted, 1, _MOST_STEPS).astype(jnp.int32)


def depart(config: HMCConfig, state: HMCState) -> tuple[Walk, Array, Array]:
    """Return the server at the start of a trajectory, its number of steps, and the rounds' key."""
    _, key_silos, key_momentum, _ = random.split(state.rng_key, 4)
    here, window = state.here, windows(config.num_warmup)
    told = jnp.clip(state.i - 1, 0, config.num_warmup)  # the draw that silos hear of now
    learns, renews = (jnp.asarray(x)[told] & (state.i > 0) for x in window[:2])
    first = jnp.array(True)
    asked = Message(here.at, state.step_size, first, state.accepted, learns, renews)
    momentum = random.normal(key_momentum, here.at.shape, here.at.dtype)
    walk = Walk(here, momentum, jnp.zeros_like(here.value), state.root, asked)
    return walk, _steps(config, state.i, state.step_size), key_silos


def arrive(
    config: HMCConfig, state: HMCState, begun: Walk, walk: Walk, num_steps: Array
) -> HMCState:
    """Accept the trajectory or not, and learn from it in the warm-up.

    The result has the silos' states and the positions ``z`` of before.

    :param begun: the server at the start of the trajectory.
    :param walk: the server at its end.
    """
    rng_key, _, _, key_accept = random.split(state.rng_key, 4)
    gained = (
        _kinetic(walk.momentum)
        - _kinetic(begun.momentum)
        - (walk.there.value - begun.there.value)
        + walk.gained
    )
    gained = jnp.where(jnp.isfinite(gained), gained, jnp.inf)
    accept_prob = jnp.minimum(1.0, jnp.exp(-gained))
    accepted = random.uniform(key_accept, accept_prob.shape) < accept_prob
    told = (accept_prob, gained > _DIVERGED, jnp.broadcast_to(num_steps, accepted.shape))
    single = state.accept_prob.ndim == 0
    accept, diverging, many = (x[0] for x in told) if single else told
    state = state._replace(
        i=state.i + 1,
        accept_prob=accept,
        diverging=diverging,
        num_steps=many,
        here=taken(accepted, walk.there, state.here),
        accepted=accepted,
        rounds=state.rounds + num_steps,
        rng_key=rng_key,
    )
    return _learned(config, state, accept_prob.mean())


def one_draw(config: HMCConfig, state: HMCState, silos: Silos) -> HMCState:
    """Make a trajectory of all chains over silos in this process, and accept it or not."""
    stacks, step = stack(silos), federated(config.factors, config.units, silos.shared)
    begun, num_steps, key = depart(config, state)

    def leap(_: Array, carry: tuple) -> tuple:
        walk, local = carry
        walk, _, local = round_all(step, key, walk, local, stacks)
        return walk, local

    walk, local = lax.fori_loop(0, num_steps, leap, (begun, state.local))
    new = arrive(config, state, begun, walk, num_steps)
    # silos hear of the acceptance with the next trajectory
    latents = [jax.vmap(taken, (None, 0, 0))(new.accepted, x.there, x.here).at for x in local]
    single = new.accept_prob.ndim == 0
    z = positions(config.moving, new.here.at, latents, silos, stacks, single)
    return new._replace(z=z, local=local)


def _kinetic(momentum: Array) -> Array:
    return 0.5 * jnp.sum(momentum**2, 1)


def _learned(config: HMCConfig, state: HMCState, accept_prob: Array) -> HMCState:
    """Return the state with what the warm-up learns from its last draw."""
    last, window = jnp.clip(state.i - 1, 0, config.num_warmup), windows(config.num_warmup)
    learns, renews, restarts = (jnp.asarray(x)[last] for x in window)
    init, update = dual_averaging()
    dual = update(config.target - accept_prob, state.dual)
    average = jnp.exp(dual[1])
    step_size = jnp.where(restarts, average, jnp.exp(dual[0]))
    again = init(jnp.log(10 * average))
    dual = jax.tree.map(lambda x, y: jnp.where(restarts, x, y), again, dual)
    seen = lax.cond(learns, with_draws, lambda seen, _: seen, state.seen, state.here.at)
    root = jnp.where(renews, root_of(seen), state.root)
    fresh = no_draws(len(root), root.ndim == 2)
    seen = jax.tree.map(lambda x, y: jnp.where(renews, x, y), fresh, seen)
    during = state.i <= config.num_warmup
    kept = state.step_size, state.dual, state.seen, state.root
    step_size, dual, seen, root = jax.tree.map(
        lambda x, y: jnp.where(during, x, y), (step_size, dual, seen, root), kept
    )
    return state._replace(step_size=step_size, dual=dual, seen=seen, root=root)


def positions(
    factors: Factors,
    theta: Array,
    latents: list[Array],
    silos: Silos,
    stacks: list[SiloRows],
    single: bool,
) -> dict[str, Array]:
    """Return unconstrained sites of all chains, local ones in pooled order.

    :param theta: shape ``(C, d)``.
    :param latents: for each stack ``(S, C, n)``.
    :param single: whether to leave out the axis of one chain.
    """
    groups = factors.local_groups()
    sites = [
        jax.vmap(jax.vmap(to_sites(factors, rows)), in_axes=1)(x)
        for x, rows in zip(latents, stacks, strict=True)
    ]  # (C, S, elements, ...)
    out = jax.vmap(factors.unravel)(theta)
    for site in factors.local_sites:
        group, count = groups[site.name], sum(silos.sizes[groups[site.name]])
        flat = jnp.zeros((len(theta), count, *site.shape), theta.dtype)
        for rows, x in zip(stacks, sites, strict=True):
            place = partial(to_pooled_order, rows=rows, group=group)
            flat = jax.vmap(lambda out, x, place=place: place(out, x=x))(flat, x[site.name])
        out[site.name] = jnp.moveaxis(flat, 1, 1 + site.axis if site.axis >= 0 else site.axis)
    return {k: x[0] for k, x in out.items()} if single else out


def _given(factors: Factors, z: dict[str, Array], rows: SiloRows) -> Array:
    """Return a stack's flat latents ``(S, C, n)`` at unconstrained sites of all chains."""
    groups = factors.local_groups()

    def one(z: dict[str, Array], order: dict[str, Array]) -> Array:
        sites = {
            s.name: jnp.moveaxis(z[s.name], s.axis, 0)[order[groups[s.name]]]
            for s in factors.local_sites
        }
        return ravel_pytree(sites)[0] if sites else jnp.zeros(0)

    return jax.vmap(jax.vmap(one, (0, None)), (None, 0))(z, rows.order)


def start_keys(key: Array) -> tuple[Array, Array, Array, Array]:
    """Return the keys of the draws, of theta's start, of the latents' starts, and of a round."""
    rng_key, key_theta, key_local, key_round = random.split(key, 4)
    return rng_key, key_theta, key_local, key_round


def first_theta(key: Array, shape: tuple[int, int], near: Near | None, reach: float) -> Array:
    """Draw the chains' starts ``(C, d)``: from an approximation, or uniformly on a cube.

    :param near: mean of the approximation and root of its covariance.
    :param reach: half of the cube's side.
    """
    if near is None:
        return reach * uniform(key, shape)
    return near[0] + jax.vmap(lambda x: matvec(near[1], x))(random.normal(key, shape))


def first_walk(theta: Array, near: Near | None = None) -> Walk:
    """Return the server before the round that evaluates the start, by a step of length zero.

    :param near: an approximation, whose root scales the momentum.
    """
    chains, dim = theta.shape
    zero, yes, no = jnp.zeros(chains, theta.dtype), jnp.array(True), jnp.array(False)
    root = (jnp.eye(dim) if dim <= _FULL else jnp.ones(dim)) if near is None else near[1]
    asked = Message(theta, jnp.zeros((), theta.dtype), yes, jnp.ones(chains, bool), no, no)
    still = jnp.zeros_like(theta)
    return Walk(Place(theta, zero, still), still, zero, root, asked)


def started(walk: Walk, rng_key: Array, single: bool, near: bool = False) -> HMCState:
    """Return the first state of the server, without positions ``z`` and silos' states.

    :param near: whether an approximation gave the start.
    """
    theta = walk.there.at
    axes = () if single else theta.shape[:1]
    step_size = jnp.asarray(_NEAR_STEP if near else _FIRST_STEP, theta.dtype)
    return HMCState(
        i=jnp.zeros((), jnp.int32),
        z={},
        accept_prob=jnp.zeros(axes, theta.dtype),
        diverging=jnp.zeros(axes, bool),
        num_steps=jnp.zeros(axes, jnp.int32),
        step_size=step_size,
        here=walk.there,
        accepted=jnp.ones(len(theta), bool),
        local=[],
        root=walk.root,
        seen=no_draws(theta.shape[1], walk.root.ndim == 2),
        dual=dual_averaging()[0](jnp.log(10 * step_size)),
        rounds=jnp.ones((), jnp.int32),
        rng_key=rng_key,
    )


def is_finite(numbers: PyTree) -> bool:
    """Return whether all numbers are finite; traced ones, of parallel chains, count as finite."""
    leaves = jax.tree.leaves(numbers)
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    return traced or all(np.isfinite(x).all() for x in leaves)


def uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Draw starts of unconstrained sites, on (-1, 1)."""
    return random.uniform(key, shape, minval=-1.0, maxval=1.0)


def num_latents(factors: Factors, rows: SiloRows) -> int:
    """Return the number of a silo's flat latents, padding included."""
    groups, pad = factors.local_groups(), dict(rows.pad)
    return sum(pad[groups[s.name]] * math.prod(s.shape) for s in factors.local_sites)


@quick_jit("config", "num_chains")
def first_state(
    config: HMCConfig,
    num_chains: int | None,
    key: Array,
    z: dict[str, Array] | None,
    silos: Silos,
    near: Near | None = None,
    reach: float = 1.0,
) -> HMCState:
    """Return the first state, at ``z`` or at uniform positions.

    :param num_chains: length of the axis of chains; ``None``: there is one chain, without an axis.
    :param near: mean of an approximation and root of its covariance, for theta's start.
    :param reach: largest coordinate of a uniform position.
    """
    factors, stacks, chains = config.moving, stack(silos), num_chains or 1
    rng_key, key_theta, key_local, key_round = start_keys(key)
    if z is not None and num_chains is None:
        z = {k: v[None] for k, v in z.items()}
    theta = (
        first_theta(key_theta, (chains, factors.dim), near, reach)
        if z is None
        else jax.vmap(factors.ravel)(z)
    )
    local = []
    for rows in stacks:
        shape = (chains, num_latents(factors, rows))
        start = (
            jax.vmap(lambda n, shape=shape: reach * uniform(random.fold_in(key_local, n), shape))(
                rows.number
            )
            if z is None
            else _given(factors, z, rows)
        )
        local.append(jax.vmap(first_local)(start))
    step = federated(config.factors, config.units, silos.shared)
    walk, _, local = round_all(step, key_round, first_walk(theta, near), local, stacks)
    single, at = num_chains is None, [x.there.at for x in local]
    placed = positions(factors, theta, at, silos, stacks, single)
    return started(walk, rng_key, single, near is not None)._replace(z=placed, local=local)
