r"""SFVI-Avg: many local steps between two rounds, and averages in the space of distributions.

In a round every silo takes the server's :math:`q(\theta)` and learned parameters as its own. It
makes m steps of its optimizers on

.. math:: E_q \left[ \log p(\theta) - \log q(\theta) + \frac{N}{N_s} F_s(\theta) \right],

and returns its q and learned parameters. N counts the rows that no index points to. The server's
new q is the Wasserstein-2 barycenter of the silos' (weights :math:`N_s / N`), and its learned
parameters are their average. A silo's local map is rewritten for the new q, so that its q(z |
theta) stays the same function of theta.

Bias: the silos' optima differ from the pooled one, and so does their barycenter, on hierarchical
models by more than a posterior sd. The result is a cheap start for SFVI (``init_from``).

What leaves a silo in a round: q's parameters, the learned parameters, its bound, and a flag.

Reference: *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
Salomone & Mengersen (2023), algorithm 2 and section 3.2.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.vi.barycenter import barycenter
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.local_steps import all_rows, first_optim_states, row_count, steps
from numpyro_fed.vi.sfvi import Info, all_finite, first_bad


@wire_name("SFVIAvgServer")
class Server(NamedTuple):
    """The server's state.

    :param params: parameters of q(theta) and learned parameters, unconstrained.
    :param average: ``None``; no average is kept.
    :param i: rounds made.
    :param rng_key: key of the next round.
    """

    params: dict[str, Array]
    average: None
    i: Array
    rng_key: Array


@wire_name("SFVIAvgSiloState")
class SiloState(NamedTuple):
    """State of a silo, which never leaves it.

    :param params: its local variational parameters, in coordinates whitened by ``base``.
    :param base: global parameters (unconstrained).
    :param optim_state: the optimizer's state of its copy of the global parameters.
    :param local_optim_state: the optimizer's state of ``params``.
    """

    params: PyTree
    base: dict[str, Array]
    optim_state: PyTree
    local_optim_state: PyTree


@wire_name("SFVIAvgMessage")
class Message(NamedTuple):
    """Message to every silo: the global parameters, and the number of rows in all silos."""

    params: dict[str, Array]
    total: Array


class Reply(NamedTuple):
    """Reply of a silo.

    With secure sums, bound and parameters (in their supports) are multiplied by the silo's share of
    the rows.

    :param value: its bound.
    :param params: its copy of the global parameters.
    :param count: its number of rows.
    :param finite: whether all is finite.
    """

    value: Array
    params: dict[str, Array]
    count: Array  # type: ignore[assignment]
    finite: Array


def federated(config: FitConfig, stacks: list[SiloRows]) -> Federated:
    """Return SFVI-Avg as ``init / broadcast / local / merge``."""
    return Federated(
        init,
        partial(broadcast, all_rows(config, stacks)),
        partial(local, config),
        partial(merge, config),
    )


def init(key: Array, params: dict[str, Array]) -> Server:
    """Return the server's first state."""
    return Server(params, None, jnp.zeros((), jnp.int32), key)


def init_silo(config: FitConfig, part: int, params: dict[str, Array], local: PyTree) -> SiloState:
    """Return a silo's first state, from its first variational parameters and the server's."""
    return SiloState(local, params, *first_optim_states(config, part, params, local))


def broadcast(total: Array, key: Array, server: Server) -> Message:
    """Send the global parameters."""
    del key
    return Message(server.params, total)


def local(
    config: FitConfig, key: Array, message: Message, state: SiloState, rows: SiloRows
) -> tuple[Reply, SiloState]:
    """Make m steps on the silo's own objective, from the server's parameters."""
    family = config.normal(rows.part)
    scale = message.total.astype(jnp.result_type(float)) / row_count(config, rows)
    old, new = config.constrain(state.base), config.constrain(message.params)
    own = family.rebased(state.params, old, new) if family.has_local else state.params

    done = steps(
        config, message.params, own, state.optim_state, state.local_optim_state, scale, key, rows
    )
    finite, value, told = (
        all_finite((done.params, done.own, done.values)),
        done.values.mean(),
        done.params,
    )
    if config.secure_sum:
        told, value = jax.tree.map(lambda x: x / scale, (config.constrain(told), value))
    reply = Reply(value, told, row_count(config, rows), finite)
    return reply, SiloState(done.own, done.params, done.optim_state, done.local_optim_state)


def merge(
    config: FitConfig, server: Server, replies: Reply, weights: Array | None = None
) -> tuple[Server, Info]:
    """Set q to the barycenter of the silos' q, and average their learned parameters, by rows.

    :param weights: zero for a silo that did not answer. Silos that did answer are weighted by rows
        alone.
    """
    # silos have multiplied by their shares, and sds of diagonal Gaussians add up in the barycenter
    if config.secure_sum:
        value, new = jax.tree.map(lambda x: x.sum(0), (replies.value, replies.params))
        return _next_server(config, server, new, -value, replies.finite)
    asked = jnp.ones_like(replies.finite) if weights is None else weights > 0
    share = jnp.where(asked, replies.count, 0).astype(replies.value.dtype)
    share = share / share.sum()
    # replaces a reply whose numbers are arbitrary
    absent = {k: server.params[k] for k in server.params}
    params = jax.tree.map(
        lambda x, y: jnp.where(asked.reshape(-1, *[1] * (x.ndim - 1)), x, y), replies.params, absent
    )
    constrained = jax.vmap(config.constrain)(params)
    family = config.normal()
    covariances = jax.vmap(lambda p: family.scale(p).covariance())(constrained)
    mean, covariance, _, _ = barycenter(constrained[f"{family.prefix}_loc"], covariances, share)
    new = family.from_moments(mean, covariance)
    averaged = {k: constrained[k] for k in (*config.learned, *family.shared_params)}
    new |= jax.tree.map(lambda x: jnp.tensordot(share, x, 1), averaged)
    good = replies.finite | ~asked
    loss = -jnp.sum(jnp.where(asked, share * replies.value, 0.0))
    return _next_server(config, server, new, loss, good)


def _next_server(
    config: FitConfig, server: Server, new: dict[str, Array], loss: Array, good: Array
) -> tuple[Server, Info]:
    """Return the server's next state and the round's facts; ``new`` is constrained."""
    unconstrained = config.unconstrain(new)
    info = Info(loss, good.all() & all_finite(unconstrained), first_bad(good))
    rng_key, _ = random.split(server.rng_key)
    return Server(unconstrained, None, server.i + 1, rng_key), info
