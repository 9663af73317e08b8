"""Rounds of the Langevin kernels: the chain's state, its start, and its visits to silos."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.mcmc.adaptation import Adaptation, adapt, first_looks
from numpyro_fed.mcmc.config import LangevinConfig, Tuning
from numpyro_fed.mcmc.gradients import drift, open_silo, push
from numpyro_fed.mcmc.langevin import Chain, VisitStats, batches, federated
from numpyro_fed.rounds.inline import quick_jit, round_one
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.surrogates.gaussian import matvec


@wire_name("LangevinState")
class LangevinState(NamedTuple):
    """State of a Langevin kernel after a round.

    :param i: number of draws made: rounds, or with ``num_kept=k`` k per round.
    :param z: all latent sites in unconstrained space, local ones in pooled order.
    :param eps: coordinates of the local latents under the local map, ``(units, k)``, or ``None``.
    :param silo: the silo visited in this round.
    :param diverging: whether a step of this round was cut, or the round was undone because a number
        was not finite.
    :param cut_rate: fraction of the round's steps whose conducive residual was cut (0 for an undone
        round).
    :param local_accept_prob: mean acceptance of the local latents' moves (1 without any; about 0.95
        where the local map is exact; NaN for remote silos).
    :param local_stuck: fraction of the silo's local latents that did not move in this round, at the
        level with the largest fraction; NaN for remote silos.
    :param residual: mean of e over this round's steps, in whitened coordinates, ``(d,)``. It is
        what the visited silo's surrogate lacks; ``None`` without surrogates or without a
        preconditioner.
    :param step_size: step size of the round's last step.
    :param inflation: predicted ratio of the chain's sd to the posterior's (NaN without a
        preconditioner, and under a schedule).
    :param visits: rounds at each silo so far, ``(S,)``.
    :param unanswered: number of these rounds in which the silo did not answer, ``(S,)``.
    :param rng_key: key of the next draw.
    :param key_silos: key of the silos' numbers; with ``"distinct"`` silos one for all chains.
    :param stratum: this chain's place in [0, 1) among all chains under ``"distinct"``. Chains
        take silos from different strata of f, so they visit different silos where no f exceeds one
        over their number. The silos of each chain are independent draws from f.
    :param adaptation: memory of ``step_size="adaptive"``, or ``None``.
    :param tuning: the numbers of the kernel, one for all chains. They are part of the state because
        compiled programs outlive the data they were made for (``jit_model_args=True``).
    """

    i: Array
    z: dict[str, Array]
    eps: Array | None
    silo: Array
    diverging: Array
    cut_rate: Array
    local_accept_prob: Array
    local_stuck: Array
    residual: Array | None
    step_size: Array
    inflation: Array
    visits: Array
    unanswered: Array
    rng_key: Array
    key_silos: Array
    stratum: Array
    adaptation: Adaptation | None
    tuning: Tuning


def chain_axes(adaptive: bool) -> LangevinState:
    """Return the vmap axes of vectorized chains.

    Each chain has its own state. All share one tuning and one count of the adaptations left.
    """
    shared = ("left", "price", "bias_target")
    own = (
        Adaptation._make(None if f in shared else 0 for f in Adaptation._fields)
        if adaptive
        else None
    )
    return LangevinState._make((*[0] * (len(LangevinState._fields) - 2), own, None))


class Departure(NamedTuple):
    """Chain on its way to a silo.

    The number is that of the silo. ``arrives`` is 1 if the chain arrives there, and 0 if it
    continues a visit. The keys are for the visit, a look, and the next round.
    """

    number: Array
    arrives: Array
    chain: Chain
    key: Array
    key_look: Array
    rng_key: Array


def depart(config: LangevinConfig, state: LangevinState, num_silos: int) -> Departure:
    """Choose the silo of a round."""
    rng_key, key, key_look = random.split(state.rng_key, 3)
    chain = Chain(config.factors.ravel(state.z), state.i * config.steps_a_draw)
    return Departure(*_next_silo(config, state, num_silos), chain, key, key_look, rng_key)


def arrive(
    config: LangevinConfig, state: LangevinState, leave: Departure, chain: Chain, stats: VisitStats
) -> LangevinState:
    """Return the state after a visit, without new local latents."""
    return state._replace(
        i=state.i + 1,
        z={**state.z, **config.factors.unravel(chain.theta)},
        silo=leave.number.astype(jnp.int32),
        diverging=~stats.finite | (stats.cut_rate > 0),
        cut_rate=stats.cut_rate,
        local_accept_prob=stats.accept_prob,
        local_stuck=stats.stuck,
        residual=stats.residual,
        step_size=_step_size(config, state.tuning, chain.num_steps - 1, state.adaptation),
        visits=state.visits.at[leave.number].add(leave.arrives),
        rng_key=leave.rng_key,
    )


@partial(jax.jit, static_argnames=("config",))
def one_round(config: LangevinConfig, state: LangevinState, silos: Silos) -> LangevinState:
    """Make one communication round: choose a silo, and make T local steps there.

    With ``num_kept`` draws per round, make one of its equal parts.
    """
    tuning, adaptation = state.tuning, state.adaptation
    leave = depart(config, state, len(silos))
    if adaptation is not None:
        tuning = tuning._replace(step_size=adaptation.step_size)
    private = None if tuning.latents is None else (state.eps, tuning.latents.rows)
    group = None if config.units is None else config.units.group
    algorithm = federated(config, tuning)
    chain, stats, private = round_one(
        algorithm, leave.key, leave.chain, private, silos, leave.number, group
    )
    eps = None if private is None else private[0]
    new = arrive(config, state, leave, chain, stats)._replace(
        z=_positions(config, tuning, chain.theta, eps, silos), eps=eps
    )
    if adaptation is None:
        return new
    looked = _look(config, tuning, adaptation, leave.key_look, chain.theta, private, silos)
    return new._replace(adaptation=looked)


def wait(old: LangevinState, new: LangevinState, arrives: Array, silent: Array) -> LangevinState:
    """Return the new state, or the old one with the round counted if the silo is silent."""
    waits = {
        "z": old.z,
        "eps": old.eps,
        "diverging": jnp.zeros((), bool),
        "cut_rate": jnp.zeros_like(new.cut_rate),
    }
    # the old draw counts again
    waits |= {
        "silo": old.silo,
        "local_accept_prob": old.local_accept_prob,
        "local_stuck": old.local_stuck,
    }
    if old.residual is not None:
        waits["residual"] = old.residual
    kept = {
        k: jax.tree.map(lambda a, b: jnp.where(silent, a, b), v, new._asdict()[k])
        for k, v in waits.items()
    }
    return new._replace(
        **kept, unanswered=old.unanswered.at[new.silo].add(jnp.where(silent, arrives, 0))
    )


def _next_silo(config: LangevinConfig, state: LangevinState, num_silos: int) -> tuple[Array, Array]:
    """Return the silo of the next draw, and 1 if the chain arrives there or 0 if it continues."""
    arrives = state.i % config.num_kept == 0
    if num_silos == 1:  # saves a draw, a tenth of the time of a short visit
        return jnp.zeros((), jnp.int32), arrives.astype(jnp.int32)
    f = state.tuning.selection
    place = (
        random.uniform(random.fold_in(state.key_silos, state.i), dtype=f.dtype) + state.stratum
    ) % 1
    number = jnp.searchsorted(jnp.cumsum(f)[:-1], place, side="right").astype(jnp.int32)
    return jnp.where(arrives, number, state.silo), arrives.astype(jnp.int32)


def _look(
    config: LangevinConfig,
    tuning: Tuning,
    adaptation: Adaptation,
    key: Array,
    theta: Array,
    private: PyTree,
    silos: Silos,
) -> Adaptation:
    """Measure curvature, in whitened units, and gradient noise at the chain's position.

    All rows are in one silo.
    """
    view = SiloView(silos, jnp.zeros((), jnp.int32), largest(silos))
    silo, keys = open_silo(config, tuning, private, view), random.split(key)

    def gradient(u: Array, key: Array) -> Array:
        here = silo._replace(kwargs={**silo.kwargs, **batches(config, key, view, ())})
        return drift(
            config,
            tuning,
            theta + push(tuning, u),
            None if private is None else private[0],
            here,
            view,
        )[0]

    return adapt(
        adaptation, lambda u: (gradient(u, keys[0]), gradient(u, keys[1])), jnp.zeros_like(theta)
    )


def _step_size(
    config: LangevinConfig, tuning: Tuning, count: Array, adaptation: Adaptation | None
) -> Array:
    if adaptation is not None:
        return adaptation.step_size
    if config.schedule is None:
        return tuning.step_size
    return jnp.asarray(config.schedule(count), tuning.step_size.dtype)


def _positions(
    config: LangevinConfig, tuning: Tuning, theta: Array, eps: Array | None, silos: Silos
) -> dict[str, Array]:
    sites = config.factors.unravel(theta)
    if config.units is None or tuning.latents is None or eps is None:
        return sites
    z = tuning.latents.rows.forward(tuning.latents.u(theta), eps)
    return {**sites, **config.units.to_pooled(z, silos)}


def start_keys(keys: Array, distinct: bool) -> tuple[Array, Array, Array]:
    """Return the chains' own keys, their keys of silos, and their strata, from keys ``(C,)``."""
    split = jax.vmap(random.split)(keys)
    own, of_silos, strata = split[:, 0], split[:, 1], jnp.zeros(len(keys))
    if distinct:
        of_silos, strata = (
            jnp.broadcast_to(of_silos[0], of_silos.shape),
            jnp.arange(len(keys)) / len(keys),
        )
    return own, of_silos, strata


@quick_jit("config", "distinct")
def first_states(
    config: LangevinConfig,
    distinct: bool,
    keys: Array,
    z: dict[str, Array] | None,
    tuning: Tuning,
    silos: Silos,
    adaptation: Adaptation | None,
) -> LangevinState:
    """Return the initial states of vectorized chains; their leading axes are :func:`chain_axes`.

    :param distinct: whether chains visit different silos in a round.
    """
    axes = chain_axes(adaptation is not None)
    own, of_silos, strata = start_keys(keys, distinct)
    start = jax.vmap(
        partial(first_state, config), in_axes=(0, 0, 0, 0, None, None, None), out_axes=axes
    )
    return start(own, of_silos, z, strata, tuning, silos, adaptation)


@partial(jax.jit, static_argnames=("config",))
def first_state(
    config: LangevinConfig,
    key: Array,
    key_silos: Array,
    z: dict[str, Array] | None,
    stratum: Array,
    tuning: Tuning,
    silos: Silos,
    adaptation: Adaptation | None,
) -> LangevinState:
    """Return the initial state, at ``z`` or at a draw of the surrogate posterior.

    Without a preconditioner the draw is uniform on (-2, 2).
    """
    rng_key, key_theta, key_eps, key_look = random.split(key, 4)
    factors, units = config.factors, config.units
    shape, dtype = (factors.dim,), tuning.loc.dtype
    eps = None
    if z is not None:
        theta = factors.ravel(z).astype(dtype)
    elif tuning.scale is not None:
        theta = tuning.loc + matvec(tuning.scale, random.normal(key_theta, shape, dtype))
    else:
        theta = random.uniform(key_theta, shape, dtype, -2, 2)
    if units is not None and tuning.latents is not None:
        rows = tuning.latents.rows
        if z is None:
            eps = random.normal(key_eps, rows.shape, dtype)
        else:
            eps = rows.inverse(tuning.latents.u(theta), units.from_pooled(z, silos).astype(dtype))
    if adaptation is not None:
        private = None if tuning.latents is None else (eps, tuning.latents.rows)
        adaptation = first_looks(
            adaptation,
            lambda i, a: _look(
                config, tuning, a, random.fold_in(key_look, i), theta, private, silos
            ),
        )
    zero = jnp.zeros((), dtype)
    return LangevinState(
        i=jnp.zeros((), jnp.int32),
        z=_positions(config, tuning, theta, eps, silos),
        eps=eps,
        silo=jnp.zeros((), jnp.int32),
        diverging=jnp.zeros((), bool),
        cut_rate=zero,
        local_accept_prob=zero + 1,
        local_stuck=zero,
        residual=jnp.zeros(shape, dtype) if config.cut else None,
        step_size=_step_size(config, tuning, jnp.zeros((), jnp.int32), adaptation).astype(dtype),
        inflation=tuning.inflation,
        visits=jnp.zeros(len(silos), jnp.int32),
        unanswered=jnp.zeros(len(silos), jnp.int32),
        rng_key=rng_key,
        key_silos=key_silos,
        stratum=stratum,
        adaptation=adaptation,
        tuning=tuning,
    )
