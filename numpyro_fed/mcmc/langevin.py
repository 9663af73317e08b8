r"""Local Langevin steps of a chain that visits a silo.

:class:`~numpyro_fed.SGLD`, :class:`~numpyro_fed.DSGLD` and :class:`~numpyro_fed.FSGLD` all make
these steps. With :math:`\delta = \theta - \mu` and L the preconditioner's factor (:math:`L = I`
without one), each local step is

.. math::
    g &= \nabla_\theta \Big[ \tfrac{N_s}{m} \log p(y_s^{(m)}, z(\theta, \epsilon) \mid \theta)
         + \sum_g \log \left| \tfrac{\partial z_g}{\partial \epsilon_g} \right| \Big]
         \quad\text{at fixed } \epsilon \\
    e &= L^\top \left( g - \alpha \nabla \log q_s(\theta) \right) / f_s \\
    \theta &\leftarrow \theta + L \Big( \tfrac h2 \left[ L^\top (\nabla \log p(\theta)
         + \alpha \nabla \log q(\theta)) + e \right] + \sqrt h\, \xi \Big),
         \qquad \xi \sim N(0, I)

which is FSGLD equations 5 and 7 (DSGLD, equation 3, for :math:`\alpha = 0`). The vector e is the
*conducive residual*. The gradient at fixed :math:`\epsilon` differs from the gradient at fixed z by
a term of mean zero, and moves z along with theta. Before each step, a Metropolis move of
:math:`\epsilon` leaves :math:`p(z_s \mid y_s, \theta)` invariant.

Law: for a fixed silo schedule and small h, the chain's stationary law is the posterior up to O(h).
The bias comes from discretization and from the variance of e between silos, which the surrogates
reduce.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows, SiloView, gather
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.mcmc.config import LangevinConfig, NodeConfig, Tuning
from numpyro_fed.mcmc.gradients import OpenSilo, drift, open_silo, push
from numpyro_fed.mcmc.local_moves import MoveNoise, free_move_noise, metropolis, move_noise
from numpyro_fed.mcmc.minibatch import pick_elements, rows_of
from numpyro_fed.mcmc.nested_moves import nested_metropolis
from numpyro_fed.rounds.federated import LARGEST_FINITE, Federated
from numpyro_fed.rounds.serialization import wire_name


@wire_name("Chain")
class Chain(NamedTuple):
    """State of a chain that travels: global position ``(d,)`` and number of local steps made."""

    theta: Array
    num_steps: Array


class VisitStats(NamedTuple):
    """Statistics of a visit; remote silos send ``None`` for the two of the local moves.

    :param cut_rate: fraction of steps whose e was cut.
    :param accept_prob: mean acceptance of the local moves (1 without any).
    :param stuck: fraction of the local latents that never moved, at the level with the largest
        fraction (0 without local latents).
    :param finite: whether all numbers remained finite.
    :param residual: mean of e after the cut, ``(d,)``; ``None`` if the config does not separate e.
    """

    cut_rate: Array
    accept_prob: PyTree
    stuck: PyTree
    finite: Array
    residual: Array | None


def federated(config: LangevinConfig, tuning: Tuning) -> Federated:
    """Return the chain as a federated algorithm that visits one silo per round.

    The engine's caller chooses the silo.
    """

    def broadcast(key: Array, chain: Chain) -> Chain:
        return chain

    def local(
        key: Array, chain: Chain, state: tuple[Array, LocalMap] | None, view: SiloView
    ) -> tuple[tuple[Chain, VisitStats], PyTree]:
        return visit(config, tuning, key, chain, state, view)

    def merge(chain: Chain, reply: tuple[Chain, VisitStats]) -> tuple[Chain, VisitStats]:
        return reply

    return Federated(
        lambda key, theta: Chain(theta, jnp.zeros((), jnp.int32)), broadcast, local, merge
    )


def visit(
    config: LangevinConfig,
    tuning: Tuning,
    key: Array,
    chain: Chain,
    state: tuple[Array, LocalMap] | None,
    view: SiloView,
) -> tuple[tuple[Chain, VisitStats], PyTree]:
    """Make a chain's local steps at one silo, up to the next draw.

    :param state: the silo's private rows: coordinates ``(E, k)`` and local map; ``None`` without
        local latents.
    :return: the chain and the visit's statistics (they leave the silo), and the private rows (they
        do not).
    """
    silo = open_silo(config, tuning, state, view)
    eps = None if state is None else state[0]
    steps = config.steps_a_draw
    blocks, rest = divmod(steps, config.block)
    keys = random.split(key, (blocks + 1, 3))

    def run(carry: tuple, keys: Array, length: int) -> tuple:
        return _run_block(config, tuning, keys, silo, view, carry, length)

    sum_e = jnp.zeros_like(chain.theta) if config.cut else None
    carry = (chain.theta, eps, chain.num_steps, jnp.zeros(()), jnp.zeros(()), sum_e)
    if blocks == 1:
        carry = run(carry, keys[0], config.block)
    else:
        carry, _ = lax.scan(lambda c, k: (run(c, k, config.block), None), carry, keys[:blocks])
    if rest:
        carry = run(carry, keys[blocks], rest)
    theta, new_eps, count, cuts, accepted, sum_e = carry
    finite, stuck, accept = (jnp.abs(theta) < LARGEST_FINITE).all(), jnp.zeros(()), jnp.ones(())
    if config.units is not None and eps is not None and new_eps is not None:
        owned = config.units.owned(view)
        finite &= jnp.isfinite(jnp.where(owned, new_eps, 0.0)).all()
        still = (
            (new_eps == eps) & owned & (config.batch is None)
        )  # a minibatch leaves others unmoved
        # the level with the largest fraction, since outer elements are few beside inner ones
        levels = zip(config.units.levels(still), config.units.levels(owned), strict=True)
        stuck = jnp.stack([jnp.sum(s) / jnp.sum(o) for s, o in levels]).max()
        accept = accepted / steps
        new_eps = jnp.where(finite, new_eps, eps)
    theta = jnp.where(
        finite, theta, chain.theta
    )  # a visit with numbers that are not finite is undone, and counts
    cuts = jnp.where(finite, cuts, 0.0)
    mean_e = None if sum_e is None else jnp.where(finite, sum_e, 0.0) / steps
    stats = VisitStats(cuts / steps, accept, stuck, finite, mean_e)
    return (Chain(theta, count), stats), (None if state is None else (new_eps, state[1]))


def _run_block(
    config: LangevinConfig,
    tuning: Tuning,
    keys: Array,
    silo: OpenSilo,
    view: SiloView,
    carry: tuple,
    length: int,
) -> tuple:
    """Draw all random numbers of ``length`` steps at once, then scan over the steps."""
    key_noise, key_batch, key_local = keys
    theta, eps, count = carry[:3]
    noise = random.normal(key_noise, (length, theta.shape[0]), theta.dtype)
    rows = batches(config, key_batch, view, (length,))
    moves = None if config.units is None else local_noise(config, key_local, eps, view, length)
    step_size = tuning.step_size
    step_sizes = None
    if config.schedule is not None:
        counts = count + jnp.arange(length, dtype=count.dtype)
        step_sizes = jnp.asarray(jax.vmap(config.schedule)(counts), theta.dtype)
        step_size = step_sizes[:, None]
    if tuning.inject is not None:
        noise = noise @ tuning.inject
    noise = jnp.sqrt(step_size) * noise  # here, to save an operation in each step

    def step(carry: tuple, x: tuple) -> tuple[tuple, None]:
        theta, eps, cuts, accepted, sum_e = carry
        xi, batch, move_draws, h = x
        eps, probability, (own, here, seen) = local_step(
            config, tuning, theta, eps, silo, view, batch, move_draws
        )
        accepted += probability
        slope, e, cut = drift(config, tuning, theta, own, here, seen)
        if e is not None:
            cuts, sum_e = cuts + cut, sum_e + e
        h = tuning.step_size if h is None else h
        theta = theta + push(tuning, 0.5 * h * slope + xi)
        return (theta, eps, cuts, accepted, sum_e), None

    inner = (theta, eps, *carry[3:])
    (theta, eps, *sums), _ = lax.scan(step, inner, (noise, rows, moves, step_sizes))
    return theta, eps, count + length, *sums


def local_noise(
    config: LangevinConfig, key: Array, eps: PyTree, view: SiloView, length: int
) -> tuple[MoveNoise, Array | None]:
    """Draw random numbers of ``length`` moves of the silo's latents.

    With minibatches of elements, also draw the elements that move.
    """
    assert config.units is not None
    if config.batch is None:
        return move_noise(config.units, key, eps, view, length), None
    group, m = config.batch
    key_pick, key_move = random.split(key)
    shape = (length, m)
    moves = free_move_noise(key_move, shape, eps.shape[1], eps.dtype)
    return moves, pick_elements(key_pick, length, m, view.size(group))


def local_step(
    config: LangevinConfig,
    tuning: Tuning,
    theta: Array,
    eps: PyTree,
    silo: OpenSilo,
    view: SiloView,
    batch: dict,
    noise: PyTree,
) -> tuple[PyTree, Array, tuple[PyTree, OpenSilo, SiloView]]:
    """Move the silo's local latents, or those of a minibatch of elements.

    :return: all coordinates, the mean acceptance, and the gradient's inputs: coordinates, silo and
        view of the elements that moved.
    """
    if config.units is None:
        return eps, jnp.zeros(()), (eps, silo._replace(kwargs={**silo.kwargs, **batch}), view)
    moves, index = noise
    if index is None:
        eps, probability = move(config, theta, eps, silo, view, moves)
        return eps, probability, (eps, silo, view)
    assert config.batch is not None
    assert silo.latents is not None
    group, m = config.batch
    seen, rows, weights = rows_of(config.factors, tuning.members or {}, group, view, index)
    latents = silo.latents._replace(rows=gather(silo.latents.rows, index))
    here = silo._replace(kwargs={**silo.kwargs, **rows}, weights=weights, latents=latents)
    own, probability = move(config, theta, eps[index], here, seen, moves)
    stands_for = view.size(group).astype(own.dtype) / m
    here = here._replace(weights={g: stands_for * w for g, w in weights.items()})
    return eps.at[index].set(own), probability, (own, here, seen)


def batches(
    config: LangevinConfig, key: Array, view: SiloView, shape: tuple[int, ...]
) -> dict[str, Array]:
    """Draw minibatches of rows, one for each index of ``shape``, or none for other configs."""
    if config.batch is None or config.units is not None:
        return {}
    group, m = config.batch
    return view.batch(group, pick_rows(key, (*shape, m), view.size(group)).astype(jnp.int32))


def pick_rows(key: Array, shape: tuple[int, ...], size: Array) -> Array:
    """Draw row numbers in 0 ... size - 1 with replacement, as unsigned integers.

    They are 32 random bits modulo N_s, with a bias against a row below N_s / 2^32.
    """
    return random.bits(key, shape, jnp.uint32) % size.astype(jnp.uint32)


def move(
    config: LangevinConfig | NodeConfig,
    theta: Array,
    eps: PyTree,
    silo: OpenSilo,
    view: SiloView | SiloRows,
    noise: MoveNoise,
) -> tuple[Array, Array]:
    """Make a Metropolis move of the silo's local latents given theta.

    :return: the new coordinates and the mean acceptance.
    """
    units, latents = config.units, silo.latents
    assert units is not None
    assert latents is not None
    sites, u = config.factors.unravel(theta), latents.u(theta)

    if isinstance(units, NestedUnits):
        return _nested_move(units, sites, u, eps, silo, view, noise)

    def log_target(eps: Array) -> Array:
        return units.log_density(
            sites, latents.rows.forward(u, eps), silo.kwargs, silo.weights, view
        )

    return metropolis(log_target, eps, noise, units.owned(view), joint=units.group is None)


def _nested_move(
    units: NestedUnits,
    sites: dict,
    u: Array,
    eps: PyTree,
    silo: OpenSilo,
    view: SiloView | SiloRows,
    noise: MoveNoise,
) -> tuple[Array, Array]:
    assert silo.latents is not None
    rows = silo.latents.rows

    def log_terms(eps: Array) -> tuple[Array, Array]:
        own, below, _ = units.level_terms(
            sites, rows.forward(u, eps), silo.kwargs, silo.weights, view
        )
        of_outer, of_inner = units.levels(rows.log_scales(u, eps))
        return own + jnp.sum(of_outer, 1), below + jnp.sum(of_inner, 1)

    return nested_metropolis(
        units, log_terms, eps, noise, units.parent(silo.kwargs), units.masks(view)
    )
