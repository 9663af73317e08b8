r"""Draws of a fitted approximation, with importance weights that judge it.

The server sends a draw :math:`\theta \sim q(\theta)` to all silos. Each silo draws K candidates for
every unit's latents and keeps one with probability proportional to its weight :math:`w_{gk}`. It
returns its estimate :math:`\sum_g \log \frac1K \sum_k w_{gk}` of :math:`\log p(y_s \mid \theta)`.
The server's log weight of the draw is

.. math:: \log p(\theta) + \sum_s \log \hat p(y_s \mid \theta) - \log q(\theta),

which is constant if q is exact. Draws for resampling come from proposals with wider tails than q
and its local maps (:mod:`numpyro_fed.vi.proposals`), so that the weights see tails that q cuts off.
The tail of the weights (Pareto's k, Vehtari et al. 2024) judges q without a reference.

What leaves a silo: its estimates, one number for each draw. The latents stay, except where one
process holds all silos.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows, SiloView, to_pooled_order
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.privacy.secure_sum import opened
from numpyro_fed.rounds.inline import quick_jit
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.rounds.worker import Call, rows_of
from numpyro_fed.surrogates.local_score import evaluations
from numpyro_fed.vi.algorithms import own_params
from numpyro_fed.vi.bound import candidate_weights, unit_bounds, unit_terms
from numpyro_fed.vi.config import FIT_CLASSES, FitConfig, FitTask
from numpyro_fed.vi.guides.marginal import MarginalNormal
from numpyro_fed.vi.minibatch import pick
from numpyro_fed.vi.nested_draw import draw_nested
from numpyro_fed.vi.placed import at_modes, can_place
from numpyro_fed.vi.proposals import (
    choose,
    halves,
    nodes_at,
    num_nodes,
    stretched_normal,
    uniform_at,
    wider_candidates,
)

# sds of q at which a stretched draw's u is clipped for the local maps: the outermost of the 256
# points to which these are fitted
_REACH = 3.0
# sds of q beyond which a draw has no weight: there single precision may be wrong by thousands of
# nats (a negative binomial of shape 4e10 was), and a law that has mass there is not near q
_FARTHEST = 30.0
_NUMBERS_AT_ONCE = 1 << 22  # latents' candidates evaluated together: 16 MiB in float32


class Draws(NamedTuple):
    """Draws of the approximation in unconstrained space.

    :param theta: flat global positions ``(n, d)``.
    :param latents: for each structure its local sites in pooled order, leading axis n.
    :param log_weight: unnormalized log weights of the draws of theta, ``(n,)``.
    :param ratios: for each structure and unit, log of one candidate's weight over the others' mean,
        ``(n, G)`` in pooled order; for nodes, of alternate nodes' weight over the rest's. It is
        zero where there are no others, and one zero without latents.
    :param terms: estimate of each silo's log likelihood, ``(n, S)``, in the order of the stacks;
        ``(n, 0)`` where the server sees their sum alone, ``(n, 1)`` where silos are drawn as one.
    """

    theta: Array
    latents: list[dict[str, Array]]
    log_weight: Array
    ratios: list[Array]
    terms: Array


@wire_name("Position")
class Position(NamedTuple):
    """A draw of theta, as the server sends it to the silos.

    :param context: the draw in the form that the variational family needs.
    :param log_weight: the server's part of its log weight.
    :param key_local: key of the silos' candidates.
    :param key_choice: key of the choice among them.
    """

    context: PyTree
    log_weight: Array
    key_local: Array
    key_choice: Array


@quick_jit("config", "num", "stretched")
def positions(
    config: FitConfig,
    params: dict[str, Array],
    rows: SiloRows,
    key: Array,
    num: int,
    stretched: bool = False,
    given: tuple[Array, Array] | None = None,
) -> Position:
    """Draw theta, and return the draws as the message to the silos.

    With wider tails theta may be farther out than the position that the silos' maps use.

    :param rows: rows of any silo, for the arguments that all share.
    :param num: number of draws.
    :param stretched: whether to draw from the proposal with wider tails (for a Gaussian q).
    :param given: draws of another proposal, in the coordinates ``(num, d)`` in which q is standard
        normal, and the log of its density over q's.
    """

    def one(x: tuple[Array, tuple[Array, Array] | None]) -> Position:
        key_theta, key_local, key_choice = random.split(x[0], 3)
        if x[1] is not None:
            noise, log_ratio = x[1]
        else:
            noise, log_ratio = config.families[0].global_noise(key_theta), jnp.zeros(())
            if stretched:
                noise, log_ratio = stretched_normal(random.fold_in(key_theta, 1), noise)
        context = config.families[0].context(params, noise)
        log_q = config.families[0].log_global(params, context) + log_ratio
        log_weight = config.log_prior(context.theta, params, rows) - log_q
        if stretched:
            log_weight = jnp.where(jnp.abs(noise).max() > _FARTHEST, -jnp.inf, log_weight)
            # any law of candidates is valid, and far out the map extrapolates badly
            context = context._replace(u=jnp.clip(context.u, -_REACH, _REACH))
        # the networks' weights are the same in all draws
        return Position(context._replace(params={}), log_weight, key_local, key_choice)

    batch = at_once(num, 4 * config.factors.dim)
    return lax.map(one, (random.split(key, num), given), batch_size=batch)


@dataclass(frozen=True)
class EstimateLocal(FitTask):
    """A silo's estimates of its log likelihood at draws of theta, one number each.

    :param config: the static facts.
    :param stretched: whether the draws, and candidates, come from proposals with wider tails.
    :param placed: whether candidates are around the units' modes at each draw.
    """

    wire_name = "EstimateLocal"
    leaves = "The silo sends estimates of its log likelihood at the server's draws"
    numbers = "1 number for each draw"
    ceiling = 1_000
    message_classes = ("Position", *FIT_CLASSES)

    config: FitConfig
    stretched: bool
    placed: bool = False

    @property
    def summed(self) -> bool:
        """Flag of masked replies, in fits with secure sums."""
        return self.config.secure_sum

    def __call__(
        self, key: Array, message: tuple, state: PyTree, view: SiloView
    ) -> tuple[Array, None]:
        """Return an estimate at each draw of the message; there is no state."""
        told, weights, learned, params = message
        rows, config = rows_of(view), self.config
        own = own_params(config, 0, state, params)

        def one(at: Position) -> Array:
            context = at.context._replace(params=weights)
            how = (config, self.stretched, self.placed)
            keys = (at.key_local, at.key_choice)
            return candidate(*how, context, learned, *keys, rows, own)[0]

        units = sum(x.size for x in jax.tree.leaves(own))
        many = _num_candidates(config, self.stretched, rows)
        numbers = units * many + _rows_of_draw(config, self.stretched, rows)
        return lax.map(one, told, batch_size=at_once(len(told.log_weight), numbers)), None


def draw_remote(
    config: FitConfig,
    params: dict[str, Array],
    slots: list[int],
    silos: RemoteSilos,
    stacks: list[SiloRows],
    key: Array,
    told: Position,
    stretched: bool = False,
    placed: bool = False,
) -> Draws:
    """Weigh draws of theta by remote silos, whose latents stay there.

    The silos return their estimates. Under privacy no silo weighs draws, and log weights are NaN.

    :param slots: the number under which each silo keeps its state, in the order of the stacks.
    :param told: the draws of theta.
    """
    theta, num = told.context.theta, len(told.log_weight)
    if config.noise is not None:  # under privacy no silo weighs draws
        nothing = jnp.zeros((num, 0))
        return Draws(theta, [{}], jnp.full(num, jnp.nan), [nothing], nothing)
    local = EstimateLocal(config, stretched, placed)
    replies = ask_estimates(local, params, slots, silos, stacks, key, told)
    stacked = jax.tree.map(lambda *x: np.stack(x), *replies)
    total = opened(stacked, np.dtype(told.log_weight.dtype)).sum(0)
    nothing = jnp.zeros((num, 0))
    terms = nothing if config.secure_sum else jnp.asarray(stacked.T)
    return Draws(theta, [{}], told.log_weight + total, [nothing], terms)


def ask_estimates(
    local: FitTask,
    params: dict[str, Array],
    slots: list[int],
    silos: RemoteSilos,
    stacks: list[SiloRows],
    key: Array,
    told: Position,
) -> list[PyTree]:
    """Return remote silos' replies about draws of theta, in the order of the stacks.

    :param told: the draws, a leading axis first.
    """
    config = local.config
    message = (
        told,
        {k: params[k] for k in config.families[0].shared_params},
        {k: params[k] for k in config.learned},
        config.unconstrain(params),
    )
    numbers = np.concatenate([np.asarray(rows.number) for rows in stacks]).tolist()
    calls = [Call(n, local, key, message, slot) for n, slot in zip(numbers, slots, strict=True)]
    return silos.ask_again(calls)[0]


@quick_jit("config", "totals", "stretched", "placed")
def draw(
    config: FitConfig,
    params: dict[str, Array],
    local: list,
    stacks: list[SiloRows],
    totals: tuple[tuple[tuple[str, int], ...], ...],
    told: Position,
    stretched: bool = False,
    placed: bool = False,
) -> Draws:
    """Draw all latents of silos here at draws of theta, with the weights of both.

    :param params: global parameters, in their supports.
    :param local: for each stack the silos' own parameters.
    :param stacks: the silos' rows.
    :param totals: for each structure the number of rows of each group in all silos.
    :param told: the draws of theta.
    :param stretched: whether candidates come from proposals with wider tails.
    :param placed: whether candidates are around the units' modes at each draw, instead of where the
        fitted maps are.
    """
    weights, learned = (
        {k: params[k] for k in some} for some in (config.families[0].shared_params, config.learned)
    )

    def one(at: Position) -> Draws:
        how = config, stretched, placed, at.context._replace(params=weights), learned
        silo = partial(candidate, *how, at.key_local, at.key_choice)
        each, latents, ratios = _of_silos(silo, config, local, stacks, totals)
        log_weight = at.log_weight
        for terms in each:
            log_weight = log_weight + jnp.sum(terms)
        return Draws(at.context.theta, latents, log_weight, ratios, jnp.concatenate(each))

    numbers = _numbers(config, stretched, local, stacks)
    return lax.map(one, told, batch_size=at_once(len(told.log_weight), numbers))


def _of_silos(
    silo: Callable,
    config: FitConfig,
    local: list,
    stacks: list[SiloRows],
    totals: tuple[tuple[tuple[str, int], ...], ...],
) -> tuple[list[Array], list[dict[str, Array]], list[Array]]:
    """Return each stack's estimates, and each structure's latents (pooled order) and units' ratios.

    :param silo: :func:`candidate` at a draw, as a function of a silo's rows and parameters.
    """
    latents: list[dict[str, Array]] = [{} for _ in config.families]
    ratios = [
        jnp.zeros(_num_units(config, part, stacks, totals)) for part in range(len(config.families))
    ]
    each = []
    for rows, own in zip(stacks, local, strict=True):
        family = config.families[rows.part]
        terms, sites, ratio = jax.vmap(silo, in_axes=(rows.axes, 0))(rows, own)
        each.append(terms)
        if family.has_local and family.group is not None:
            ratios[rows.part] = to_pooled_order(ratios[rows.part], rows, family.group, ratio)
        elif family.has_local:
            ratios[rows.part] = ratios[rows.part].at[rows.number].set(ratio[:, 0])
        groups = family.factors.local_groups()
        for site, x in sites.items():
            group = groups[site]
            out = latents[rows.part].get(
                site, jnp.zeros((dict(totals[rows.part])[group], *x.shape[2:]), x.dtype)
            )
            latents[rows.part][site] = to_pooled_order(out, rows, group, x)
    return each, latents, ratios


def _numbers(config: FitConfig, stretched: bool, local: list, stacks: list[SiloRows]) -> int:
    """Return how many numbers are in memory for one draw."""
    units = sum(
        sum(x.size for x in jax.tree.leaves(own)) * _num_candidates(config, stretched, rows)
        for rows, own in zip(stacks, local, strict=True)
    )
    return units + rows_at_a_draw(config, stretched, stacks)


def rows_at_a_draw(config: FitConfig, stretched: bool, stacks: list[SiloRows]) -> int:
    """Return how many rows are evaluated at one draw in all silos, once for each candidate."""
    return sum(len(rows.number) * _rows_of_draw(config, stretched, rows) for rows in stacks)


def _rows_of_draw(config: FitConfig, stretched: bool, rows: SiloRows) -> int:
    """Return how many rows of a silo are evaluated at one draw, once for each candidate."""
    family, most = config.families[rows.part], max(n for _, n in rows.pad)
    if family.has_local:
        return most * _num_candidates(config, stretched, rows)
    return most * evaluations(family.integrated(rows))


def _num_candidates(config: FitConfig, stretched: bool, rows: SiloRows) -> int:
    """Return the number of candidates of a unit's latents; 1 without latents."""
    if not config.families[rows.part].has_local:
        return 1
    return _num_nodes(config, stretched, rows) or config.num_local_particles


def at_once(num: int, numbers: int) -> int:
    """Return how many of ``num`` draws to make together.

    A number near the limit that divides ``num`` is preferred: a remainder would be a program of its
    own.

    :param numbers: numbers in memory for one draw.
    """
    most = max(1, min(num, _NUMBERS_AT_ONCE // max(numbers, 1)))
    return next((n for n in range(most, most // 2, -1) if num % n == 0), most)


def _num_nodes(config: FitConfig, widened: bool, rows: SiloRows) -> int:
    """Return the number of nodes that are a unit's candidates; 0 where candidates are random."""
    family = config.families[rows.part]
    units = family.units(rows) if widened and family.has_local else None
    return 0 if units is None or isinstance(units, NestedUnits) else num_nodes(units.dim)


def _num_units(config: FitConfig, part: int, stacks: list[SiloRows], totals: tuple) -> int:
    family = config.families[part]
    if not family.has_local:
        return 1  # lax.map has no use for an empty array
    if family.group is not None:
        return int(dict(totals[part])[family.group])
    return sum(len(rows.number) for rows in stacks if rows.part == part)


def candidate(
    config: FitConfig,
    widened: bool,
    placed: bool,
    context: PyTree,
    learned: dict[str, Array],
    key: Array,
    key_choice: Array,
    rows: SiloRows,
    own: PyTree,
) -> tuple[Array, dict[str, Array], Array]:
    """Return a silo's log likelihood estimate at theta, its latents, and each unit's ratio.

    Latents are unconstrained, elements first.

    :param widened: whether every other candidate comes from a law with wider tails.
    :param placed: whether candidates are around the units' modes, where they can be.
    """
    family = config.families[rows.part]
    key_choice = random.fold_in(key_choice, rows.part)
    batch = pick(family, None, key, rows)
    if isinstance(family, MarginalNormal):
        value = family.log_likelihood(context.theta, rows)
        sites = (
            draw_nested(family, context.theta, key_choice, rows) if family.can_draw(rows) else {}
        )
        return value, sites, jnp.zeros(0)
    if not family.has_local:
        return (
            unit_terms(family, context.theta, jnp.zeros((0, 0)), learned, batch)[1],
            {},
            jnp.zeros(0),
        )
    own = family.effective(own, rows)
    if placed and can_place(family, rows):
        family, own = at_modes(family, own, context, learned, batch)
    units = family.units(rows)
    place = rows.order[family.group] if family.group is not None else rows.number[None]
    owned, by_nodes = units.owned(rows), _num_nodes(config, widened, rows) > 0
    # for the choice of a candidate, and the nodes' shift
    uniform = uniform_at(key_choice, place, 1 + units.dim if by_nodes else 1)
    log_ratio: Array | float = 0.0
    if by_nodes:
        eps, log_ratio = nodes_at(uniform[:, 1:], owned)
    else:
        eps = family.noise(key, rows, config.num_local_particles)
        if widened:
            eps, log_ratio = wider_candidates(random.fold_in(key, 1), eps, owned.sum(1), place)
    z = family.latents(own, context, eps, rows)
    log_weight, rest = candidate_weights(family, own, context, learned, z, batch)
    log_weight = log_weight - log_ratio
    if widened:  # far out a density may overflow; such a candidate gets no weight
        log_weight = jnp.where(jnp.isfinite(log_weight), log_weight, -jnp.inf)
    value = jnp.sum(unit_bounds(family, log_weight, batch))
    weight = jax.nn.softmax(log_weight, axis=0)
    chosen = choose(weight, uniform[:, 0])
    which, axis = random.uniform(random.fold_in(key, 2), (2,))
    judged = log_weight
    if by_nodes:  # a single node's weight is not meant to be even
        judged = jnp.log(halves(weight, (axis * units.dim).astype(int), units.dim))
    ratio = _over_the_others(judged, (which * len(judged)).astype(int))
    return value + rest.mean(), units.to_sites(z[chosen, jnp.arange(z.shape[1])]), ratio


def _over_the_others(log_weight: Array, which: Array) -> Array:
    """Return the log weight of candidate ``which`` over the mean of the others', ``(E,)``.

    It is zero where there are no others.
    """
    num = len(log_weight)
    if num == 1:
        return jnp.zeros_like(log_weight[0])
    others = jnp.where((jnp.arange(num) == which)[:, None], -jnp.inf, log_weight)
    return log_weight[which] - jax.nn.logsumexp(others, axis=0) + math.log(num - 1)
