r"""Structured federated variational inference (SFVI).

In a round the server draws :math:`\theta \sim q(\theta)`. Every silo draws its latents, and returns
the gradient of its own part of the bound in theta. The server adds the prior's gradient; server and
silos each take a step of their optimizer. With F_s of :mod:`numpyro_fed.vi.bound`, the bound is

.. math:: \mathcal L = E_q \left[ \log p(\theta) - \log q(\theta) + \sum_s F_s(\theta) \right],

the evidence lower bound for K = 1. The estimator sticks the landing: parameters inside log q are
frozen, so at the exact posterior it has no noise. One silo with all rows takes the same steps as
any partition of them.

What leaves a silo: the gradients in theta, in whitened theta, and in the learned parameters, and
the value of F_s.

Reference: *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
Salomone & Mengersen (2023), algorithm 1 and supplement S1.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.privacy.differential import noised
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.vi.bound import server_gradient, silo_bound
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.minibatch import Batch, pick

# round t of T has weight proportional to t^8: about the last ninth counts. With Adam's steps of .01
# six cities' log scale is .05 sds off, in the last round .2
_TAIL = 8


@wire_name("SFVIServer")
class Server(NamedTuple):
    """The server's state.

    :param params: parameters of q(theta) and learned parameters, unconstrained.
    :param optim_state: the optimizer's state.
    :param average: tail average of ``params``.
    :param i: rounds made.
    :param rng_key: key of the next round.
    """

    params: dict[str, Array]
    optim_state: PyTree
    average: dict[str, Array]
    i: Array
    rng_key: Array


@wire_name("SFVISiloState")
class SiloState(NamedTuple):
    """State of a silo, which never leaves it.

    :param params: its own variational parameters.
    :param optim_state: the state of their optimizer.
    :param average: tail average of ``params``.
    :param i: steps made.
    """

    params: PyTree
    optim_state: PyTree
    average: PyTree
    i: Array


@wire_name("SFVIMessage")
class Message(NamedTuple):
    """Message to every silo.

    :param context: draws of theta, leading axis: particles.
    :param params: the learned parameters.
    :param key: keys of the silos' noise, one for each draw.
    :param scale: under privacy q's scale, in which gradients are clipped; else ``None``.
    """

    context: PyTree
    params: dict[str, Array]
    key: Array
    scale: PyTree = None


class Reply(NamedTuple):
    """Reply of a silo.

    :param value: F_s.
    :param context: its gradients in the draws of theta, leading axis: particles.
    :param params: its gradient in the learned parameters (mean over draws).
    :param finite: whether all is finite.
    """

    value: Array
    context: PyTree
    params: dict[str, Array]
    finite: Array


class Info(NamedTuple):
    """Facts of a round.

    :param loss: minus the bound.
    :param finite: whether all is finite.
    :param silo: the place of the first silo whose numbers are not finite, or -1.
    """

    loss: Array
    finite: Array
    silo: Array


def tail_average(average: PyTree, new: PyTree, i: Array) -> PyTree:
    """Return the polynomial-decay average with a new value (Shamir & Zhang 2013).

    Weights grow as the eighth power of the round ``i``, which counts from 1.
    """
    weight = jnp.minimum(1.0, (_TAIL + 1) / (i + _TAIL))
    return jax.tree.map(lambda a, x: a + weight.astype(a.dtype) * (x - a), average, new)


def federated(config: FitConfig, stacks: list[SiloRows]) -> Federated:
    """Return SFVI as ``init / broadcast / local / merge``.

    :param stacks: the silos' rows; the server evaluates the prior from their shared arguments.
    """
    return Federated(
        partial(init, config),
        partial(broadcast, config),
        partial(local, config),
        partial(merge, config, stacks[0]),
    )


def init(config: FitConfig, key: Array, params: dict[str, Array]) -> Server:
    """Return the server's first state; the key is used as :class:`numpyro.infer.SVI` uses it."""
    assert config.optim is not None
    rng_key, _, _ = random.split(key, 3)
    return Server(params, config.optim.init(params), params, jnp.zeros((), jnp.int32), rng_key)


def init_silo(config: FitConfig, part: int, params: dict[str, Array], local: PyTree) -> SiloState:
    """Return a silo's first state from its first variational parameters.

    The server's are not needed.
    """
    del params

    def one(local: PyTree) -> SiloState:
        assert config.local_optim is not None
        return SiloState(local, config.local_optim.init(local), local, jnp.zeros((), jnp.int32))

    return jax.vmap(one)(local) if config.unit_clocks(part) else one(local)


def _draws(config: FitConfig, rng_key: Array) -> tuple[Array, Array]:
    """Draw the noise of theta ``(P, d)`` and the keys of the silos' noise.

    The keys are those that SVI would use.
    """
    _, key_step = random.split(rng_key)
    keys = (
        key_step[None]
        if config.num_particles == 1
        else random.split(key_step, config.num_particles)
    )

    def one(key: Array) -> tuple[Array, Array]:
        _, guide_seed = random.split(key)
        _, key_draw = random.split(guide_seed)
        key_theta, key_local = random.split(key_draw)
        return config.families[0].global_noise(key_theta), key_local

    return jax.vmap(one)(keys)


def broadcast(config: FitConfig, key: Array, server: Server) -> Message:
    """Draw theta from the server's own key, and send it."""
    del key
    noise, key_local = _draws(config, server.rng_key)
    params = config.constrain(server.params)
    context = jax.vmap(lambda e: config.families[0].context(params, e))(noise)
    scale = None if config.noise is None else config.normal().scale(params)
    return Message(context, {k: params[k] for k in config.learned}, key_local, scale)


def local(
    config: FitConfig,
    key: Array,
    message: Message,
    state: SiloState,
    rows: SiloRows,
    bare: bool = False,
) -> tuple[Reply, SiloState]:
    """Compute a silo's gradients, and make a step of its own parameters.

    :param bare: in a fit with privacy, whether to leave clipping and noise to the caller.
    """
    family = config.families[rows.part]
    batch = pick(family, config.batch, key, rows)
    held = batch.take(state.params)
    own, pull = jax.vjp(lambda params: family.effective(params, batch.rows), held)

    def one(context: PyTree, key: Array) -> PyTree:
        eps = (
            family.noise(key, batch.rows, config.num_local_particles) if family.has_local else None
        )
        return silo_bound(family, own, context, message.params, eps, batch)

    if len(message.key) != config.num_particles:
        raise ValueError(
            f"the message has {len(message.key)} draws of theta; expected {config.num_particles}"
        )
    terms = jax.vmap(one)(message.context, message.key)
    mean = partial(jax.tree.map, lambda x: x.mean(0))
    value, learned = mean(terms.value), mean(terms.params)
    finite = all_finite((value, terms.context, learned))
    if family.has_local:
        gradient = pull(mean(terms.local))[0]
        usable = all_finite(gradient)
        finite &= usable
        if config.noise is not None:  # the server does not learn of it, and the silo goes on
            gradient = jax.tree.map(lambda x: jnp.where(usable, x, 0.0), gradient)
        state = _step(config, rows.part, state, batch, gradient)
    scaled = jax.tree.map(lambda x: x / config.num_particles, terms.context)
    reply = Reply(value, scaled, learned, finite)
    if config.noise is None:
        return reply, state
    reply = _whitened(message, reply)
    return (
        reply if bare else private(reply, partial(noised, config.noise, random.fold_in(key, 1)))
    ), state


def _whitened(message: Message, reply: Reply) -> Reply:
    """Return the reply with all gradients in whitened theta, and zero for those in theta."""

    def one(gradient: PyTree) -> PyTree:
        pull = jax.vjp(message.scale.apply, gradient.theta)[1]
        return gradient._replace(
            theta=jnp.zeros_like(gradient.theta), u=gradient.u + pull(gradient.theta)[0]
        )

    return reply._replace(context=jax.vmap(one)(reply.context))


def private(reply: Reply, noised: Callable[[PyTree], PyTree]) -> Reply:
    """Return a whitened reply under privacy: noised gradients, and nothing else.

    :param noised: clips a pytree of gradients, and adds noise.
    """
    context, learned = noised((reply.context._replace(theta=None), reply.params))
    context = context._replace(theta=jnp.zeros_like(reply.context.theta))
    return Reply(jnp.full_like(reply.value, jnp.nan), context, learned, jnp.ones_like(reply.finite))


def _step(
    config: FitConfig, part: int, state: SiloState, batch: Batch, gradient: PyTree
) -> SiloState:
    """Make one step of the silo's optimizer.

    Where units are subsampled, each unit of the batch makes one.
    """

    def one(state: SiloState, gradient: PyTree) -> SiloState:
        assert config.local_optim is not None
        down = jax.tree.map(jnp.negative, gradient)
        updates, optim_state = config.local_optim.update(down, state.optim_state, state.params)
        params = optax.apply_updates(state.params, updates)
        i = state.i + 1
        return SiloState(params, optim_state, tail_average(state.average, params, i), i)

    if config.unit_clocks(part):
        return batch.put(state, jax.vmap(one)(batch.take(state), gradient))
    return one(state, gradient)


def merge(
    config: FitConfig, rows: SiloRows, server: Server, replies: Reply, weights: Array | None = None
) -> tuple[Server, Info]:
    """Sum the silos' replies, add the prior's and q's part, and take a step.

    :param weights: weights of the replies, ``(S,)``: zero for a silo that did not answer; for one
        that did, one over its probability of being asked (Horvitz-Thompson). So the gradient stays
        unbiased. ``None``: all ones.
    """
    assert config.optim is not None
    noise, _ = _draws(config, server.rng_key)
    value, gradients, learned = (
        jax.tree.map(lambda x: _weighted_sum(x, weights), part) for part in replies[:3]
    )

    own, gradient = server_gradient(config, rows, server.params, noise, gradients, learned)
    down = jax.tree.map(jnp.negative, gradient)
    updates, optim_state = config.optim.update(down, server.optim_state, server.params)
    params = optax.apply_updates(server.params, updates)
    i = server.i + 1
    rng_key, _ = random.split(server.rng_key)
    good = replies.finite if weights is None else replies.finite | (weights == 0)
    info = Info(-(own + value), good.all() & all_finite((own, gradient)), first_bad(good))
    return Server(params, optim_state, tail_average(server.average, params, i), i, rng_key), info


def _weighted_sum(x: Array, weights: Array | None) -> Array:
    """Sum over silos; a reply of weight zero does not count, even where it is NaN."""
    if weights is None:
        return x.sum(0)
    weights = weights.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
    return jnp.sum(jnp.where(weights > 0, weights * x, 0.0), axis=0)


def first_bad(good: Array) -> Array:
    """Return the place of the first silo that is not good, or -1."""
    return jnp.where(good.all(), -1, jnp.argmin(good)).astype(jnp.int32)


def all_finite(tree: PyTree) -> Array:
    """Return whether all numbers of a pytree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
