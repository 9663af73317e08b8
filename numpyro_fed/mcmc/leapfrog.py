r"""Leapfrog steps over silos: the server moves theta, and each silo moves its own latents, in step.

With :math:`U(\theta, z) = -\log p(\theta) - \sum_s \log p(y_s, z_s \mid \theta)` and momenta
:math:`p, q_s \sim N(0, I)`, a step of size h in coordinates :math:`\theta = L u` and
:math:`z_s = D_s v_s` is

.. math::
    p &\leftarrow p - \tfrac h2 L^\top \nabla_\theta U, \quad
        q_s \leftarrow q_s - \tfrac h2 D_s \nabla_{z_s} U \\
    \theta &\leftarrow \theta + h L p, \quad z_s \leftarrow z_s + h D_s q_s

and the first line once more at the new point (Neal 2011, equations 2.28 to 2.30). It is the
leapfrog step of the pooled posterior, whatever the partition. A step is one round:

.. code-block:: text

    server    sends theta
    silo s    moves its latents, and returns the gradient of log p(y_s, z_s | theta) in theta, and
              the change of its energy since the start of the trajectory

What leaves a silo in a round: ``d + 1`` numbers for each chain. Latents and their momenta stay.

Where a silo integrates its latents out, its part of U is :math:`-\log p(y_s \mid \theta)`
(:mod:`numpyro_fed.surrogates.marginal`), and it moves nothing. Theta then has few dimensions of an
even scale, so that a trajectory takes few steps.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc_util import welford_covariance

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.local_score import Message as ScoreMessage
from numpyro_fed.surrogates.local_score import marginal_score, points_at_once
from numpyro_fed.surrogates.marginal import taken

Welford = tuple[Array, Array, Array]  # mean, sum of squares and count, as NumPyro has them


@wire_name("Place")
class Place(NamedTuple):
    """Positions of all chains, with a part of the log density and its gradient.

    :param at: positions ``(C, n)``, unconstrained.
    :param value: log density ``(C,)``: the server's is the prior, a silo's is
        ``log p(y_s, z_s | theta)``.
    :param slope: gradient in ``at`` ``(C, n)``: the server's is of all terms.
    """

    at: Array
    value: Array
    slope: Array


@wire_name("LeapfrogMessage")
class Message(NamedTuple):
    """Message to every silo.

    :param theta: positions ``(C, d)``.
    :param step_size: h.
    :param first: whether the step is the first of a trajectory.
    :param accepted: chains ``(C,)`` whose last trajectory was accepted. Read in a first step.
    :param learns: whether the draws that end the last trajectory count for the silo's scales.
    :param renews: whether the silo's scales are those of the draws that count so far.
    """

    theta: Array
    step_size: Array
    first: Array
    accepted: Array
    learns: Array
    renews: Array


@wire_name("LeapfrogReply")
class Reply(NamedTuple):
    """Reply of a silo.

    :param slope: gradient of ``log p(y_s, z_s | theta)`` in theta, ``(C, d)``.
    :param gained: change of the silo's energy since the start of the trajectory, ``(C,)``.
    """

    slope: Array
    gained: Array


@wire_name("LeapfrogState")
class SiloState(NamedTuple):
    """State of a silo, which never leaves it.

    :param here: its latents at the last draw.
    :param there: its latents at the end of the trajectory so far.
    :param momentum: momenta ``(C, n)``; zero for padding.
    :param energy: its energy at the start of the trajectory, ``(C,)``.
    :param scale: D, ``(n,)``.
    :param seen: statistics of draws for the next D.
    """

    here: Place
    there: Place
    momentum: Array
    energy: Array
    scale: Array
    seen: Welford


class Walk(NamedTuple):
    """State of the server in a trajectory.

    :param there: positions of theta.
    :param momentum: p, ``(C, d)``.
    :param gained: change of the silos' energies since the start, ``(C,)``.
    :param root: L, ``(d, d)`` or its diagonal.
    :param asked: the next message, but for its positions.
    """

    there: Place
    momentum: Array
    gained: Array
    root: Array
    asked: Message


def federated(factors: Factors, units: Units | None, shared: dict[str, PyTree]) -> Federated:
    """Return a leapfrog step as ``init / broadcast / local / merge``.

    :param units: the units whose latents silos integrate out; ``None``: latents move.
    :param shared: the shared arguments, from which the server computes the prior.
    """
    return Federated(
        first_local, broadcast, partial(local, factors, units), partial(merge, factors, shared)
    )


def to_sites(factors: Factors, rows: SiloRows) -> Callable[[Array], dict[str, Array]]:
    """Return the map from a silo's flat latents ``(n,)`` to its sites, elements first."""
    groups, pad = factors.local_groups(), dict(rows.pad)
    blank = {s.name: jnp.zeros((pad[groups[s.name]], *s.shape)) for s in factors.local_sites}
    return ravel_pytree(blank)[1]


def owned(factors: Factors, rows: SiloRows) -> Array:
    """Return a mask ``(n,)`` of a silo's flat latents that are not padding."""
    groups, pad = factors.local_groups(), dict(rows.pad)
    mask = {
        s.name: jnp.broadcast_to(
            rows.mask(groups[s.name]).reshape(-1, *[1] * len(s.shape)),
            (pad[groups[s.name]], *s.shape),
        )
        for s in factors.local_sites
    }
    return ravel_pytree(mask)[0].astype(bool)


def first_local(latents: Array) -> SiloState:
    """Return a silo's first state, at its latents ``(C, n)``, unconstrained."""
    zero, size = jnp.zeros(latents.shape[:1], latents.dtype), latents.shape[1]
    here = Place(latents, zero, jnp.zeros_like(latents))
    scale = jnp.ones(size, latents.dtype)
    return SiloState(here, here, jnp.zeros_like(latents), zero, scale, no_draws(size))


def no_draws(size: int, full: bool = False) -> Welford:
    """Return the statistics of no draws of ``size`` numbers."""
    return welford_covariance(diagonal=not full)[0](size)


def with_draws(seen: Welford, draws: Array) -> Welford:
    """Return the statistics with further draws ``(C, n)``."""
    update = welford_covariance(diagonal=seen[1].ndim == 1)[1]
    return lax.fori_loop(0, len(draws), lambda c, seen: update(draws[c], seen), seen)


def root_of(seen: Welford) -> Array:
    """Return a root of the draws' covariance, regularized as in Stan; full or diagonal."""
    mean, squares, count = seen
    share = count / (count + 5.0)
    cov = share * squares / jnp.maximum(count - 1, 1)
    if squares.ndim == 1:
        return jnp.sqrt(cov + 1e-3 * (1 - share))
    return jnp.linalg.cholesky(cov + 1e-3 * (1 - share) * jnp.eye(len(mean), dtype=mean.dtype))


def broadcast(key: Array | None, walk: Walk) -> Message:
    """Move theta; no key is needed."""
    del key
    return walk.asked._replace(theta=_moved(walk, _half(walk, walk.momentum)))


def _half(walk: Walk, momentum: Array) -> Array:
    """Return the momentum after half a step at the server's place."""
    slope = jax.vmap(lambda x: matvec(walk.root.T, x))(walk.there.slope)
    return momentum + 0.5 * walk.asked.step_size * slope


def _moved(walk: Walk, momentum: Array) -> Array:
    move = jax.vmap(lambda x: matvec(walk.root, x))(momentum)
    return walk.there.at + walk.asked.step_size * move


def local(
    factors: Factors,
    units: Units | None,
    key: Array,
    message: Message,
    state: SiloState,
    rows: SiloRows,
) -> tuple[Reply, SiloState]:
    """Move a silo's latents, and return its gradient in theta and the change of its energy."""
    begun = partial(_begun, key, message, owned(moving(factors, units), rows))
    state = lax.cond(message.first, begun, lambda state: state, state)
    half = state.momentum + 0.5 * message.step_size * state.scale * state.there.slope
    at = state.there.at + message.step_size * state.scale * half

    if units is None:
        value, slope, own_slope = _with_latents(factors, message.theta, at, rows)
    else:
        value, slope = _without_latents(factors, units, message.theta, rows)
        own_slope = at  # of no latents
    momentum = half + 0.5 * message.step_size * state.scale * own_slope
    gained = 0.5 * jnp.sum(momentum**2, 1) - value - state.energy
    there = Place(at, value, own_slope)
    return Reply(slope, gained), state._replace(there=there, momentum=momentum)


def moving(factors: Factors, units: Units | None) -> Factors:
    """Return the factors with the local sites that move: none where they are integrated out."""
    return factors if units is None else replace(factors, local_sites=())


def _with_latents(
    factors: Factors, theta: Array, z: Array, rows: SiloRows
) -> tuple[Array, Array, Array]:
    """Return log p(y_s, z_s | theta) of all chains, and its slopes in theta and z."""
    kwargs, weights = rows.whole()
    sites = to_sites(factors, rows)

    def log_density(theta: Array, z: Array) -> Array:
        return factors.log_local(factors.unravel(theta), sites(z), kwargs, weights)

    each = jax.vmap(jax.value_and_grad(log_density, argnums=(0, 1)))
    value, slopes = each(theta, z)
    return value, *slopes


def _without_latents(
    factors: Factors, units: Units, theta: Array, rows: SiloRows
) -> tuple[Array, Array]:
    """Return log p(y_s | theta) of all chains, and its slope in theta."""
    dim = theta.shape[1]
    here = ScoreMessage(jnp.zeros(dim), jnp.ones(dim), theta, jnp.ones(len(theta)))
    at = marginal_score(factors, units, here, rows)
    together = points_at_once(max(n for _, n in rows.pad), units)
    value, slope, _ = lax.map(at, theta, batch_size=min(together, len(theta)))
    return value, slope


def _begun(key: Array, message: Message, own: Array, state: SiloState) -> SiloState:
    """Return the state at the start of a trajectory, with new momenta."""
    here = taken(message.accepted, state.there, state.here)
    seen = lax.cond(message.learns, with_draws, lambda seen, _: seen, state.seen, here.at)
    scale = jnp.where(message.renews, root_of(seen), state.scale)
    fresh = no_draws(len(scale))
    seen = jax.tree.map(lambda x, y: jnp.where(message.renews, x, y), fresh, seen)
    momentum = jnp.where(own, random.normal(key, here.at.shape, here.at.dtype), 0.0)
    energy = 0.5 * jnp.sum(momentum**2, 1) - here.value
    return SiloState(here, here, momentum, energy, scale, seen)


def merge(
    factors: Factors, shared: dict[str, PyTree], walk: Walk, replies: Reply
) -> tuple[Walk, None]:
    """Complete the step of theta."""
    half = _half(walk, walk.momentum)
    at = _moved(walk, half)

    def log_prior(theta: Array) -> Array:
        return factors.log_prior(factors.unravel(theta), shared)

    value, slope = jax.vmap(jax.value_and_grad(log_prior))(at)
    there = Place(at, value, slope + replies.slope.sum(0))
    asked = walk.asked._replace(first=jnp.zeros_like(walk.asked.first))
    walk = walk._replace(there=there, gained=replies.gained.sum(0), asked=asked)
    return walk._replace(momentum=_half(walk, half)), None
