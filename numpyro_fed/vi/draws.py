r"""Draws of a fitted approximation, with importance weights that say how good it is.

A draw :math:`\theta \sim q(\theta)` is sent to all silos. Each draws K candidates for every unit's latents, keeps one with probability
proportional to its weight :math:`w_{gk}`, and returns its estimate :math:`\sum_g \log \frac1K \sum_k w_{gk}` of
:math:`\log p(y_s \mid \theta)`. The server's log weight of the draw is

.. math:: \log p(\theta) + \sum_s \log \hat p(y_s \mid \theta) - \log q(\theta),

constant if q is exact. Draws that are to be resampled come from a proposal with wider tails: a quarter of them have one whitened coordinate, whichever, and a quarter two,
from Student's law of three degrees, three times as wide, and the density of the mixture takes the place of q's,

.. math:: q(\theta) \Big( \tfrac12 + \tfrac14 \, \tfrac1d \sum_i r_i + \tfrac14 \, \tfrac{2}{d (d - 1)} \sum_{i < j} r_i r_j \Big), \qquad r_i = \frac{t_3(u_i / 3) / 3}{N(u_i; 0, 1)},

so that a tail that q cuts off (a log scale's, or that of an effect which widens with its scale) is seen and weighed. The tail of these weights (Pareto's k, Vehtari et al. 2024) judges q without a reference.
What leaves a silo: its estimates, one number for each draw. The kept latents stay, except where one process holds all silos.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy import stats
from numpyro.infer.util import constrain_fn, transform_fn

from numpyro_fed.density import PARAMS
from numpyro_fed.silos import Silos
from numpyro_fed.storage import SiloRows, to_pooled_order
from numpyro_fed.vi.bound import candidate_weights, unit_bounds, unit_terms
from numpyro_fed.vi.minibatch import pick
from numpyro_fed.vi.plan import Plan

__all__ = ["Draws", "constrained", "draw"]

_STRETCH, _DEGREES = 3.0, 3.0  # of a wide coordinate: scale, degrees of freedom
_REACH = 3.0  # sds of q that a stretched draw's local map goes
_NUMBERS_AT_ONCE = 1 << 22  # latents' candidates evaluated together


class Draws(NamedTuple):
    """Draws of the approximation in unconstrained space.

    :param theta: flat global positions ``(n, d)``.
    :param latents: for each structure its local sites in pooled order, leading axis n.
    :param log_weight: unnormalised log weights of the draws of theta, ``(n,)``.
    """

    theta: Array
    latents: list[dict[str, Array]]
    log_weight: Array


@partial(jax.jit, static_argnames=("plan", "totals", "num", "stretched"))
def draw(
    plan: Plan,
    params: dict[str, Array],
    local: list,
    stacks: list[SiloRows],
    totals: tuple[tuple[tuple[str, int], ...], ...],
    key: Array,
    num: int,
    stretched: bool = False,
) -> Draws:
    """Independent draws.

    :param params: global parameters, in their supports.
    :param local: for each stack the silos' own parameters.
    :param stretched: from the proposal with wider tails, where q is Gaussian.
    :param totals: for each structure the number of rows of each group in all silos.
    """

    def one(key: Array) -> Draws:
        key_theta, key_local, key_choice = random.split(key, 3)
        noise, log_ratio = plan.families[0].global_noise(key_theta), jnp.zeros(())
        if stretched:
            noise, log_ratio = _stretched(random.fold_in(key_theta, 1), noise)
        context = plan.families[0].context(params, noise)
        log_q = plan.families[0].log_global(params, context) + log_ratio
        log_weight = plan.log_prior(context.theta, params, stacks[0]) - log_q
        if stretched:  # any law of the candidates will do, and the map's goes astray far out
            context = context._replace(u=jnp.clip(context.u, -_REACH, _REACH))
        learned = {k: params[k] for k in plan.learned}
        latents: list[dict[str, Array]] = [{} for _ in plan.families]
        for rows, own in zip(stacks, local, strict=True):
            family = plan.families[rows.part]
            silo = partial(_candidate, plan, context=context, learned=learned, key=key_local, key_choice=key_choice)
            terms, sites = jax.vmap(lambda r, o, f=silo: f(r, o), in_axes=(rows.axes, 0))(rows, own)
            log_weight = log_weight + jnp.sum(terms)
            groups = family.factors.local_groups()
            for site, x in sites.items():
                group = groups[site]
                out = latents[rows.part].get(site, jnp.zeros((dict(totals[rows.part])[group], *x.shape[2:]), x.dtype))
                latents[rows.part][site] = to_pooled_order(out, rows, group, x)
        return Draws(context.theta, latents, log_weight)

    units = sum(x.size for x in jax.tree.leaves(local)) * plan.num_local_particles
    at_once = max(1, min(num, _NUMBERS_AT_ONCE // max(units, 1)))
    return lax.map(one, random.split(key, num), batch_size=at_once)


def _stretched(key: Array, noise: Array) -> tuple[Array, Array]:
    """Half of all draws with one coordinate or two from a wider law, and the log density of the mixture over the standard normal's."""
    key_kind, key_axes, key_wide = random.split(key, 3)
    d = noise.shape[0]
    kind = random.uniform(key_kind)
    rank = random.permutation(key_axes, d)
    wide = (rank < 1) & (kind < 0.5) | (rank < 2) & (kind < 0.25)
    u = jnp.where(wide, _STRETCH * random.t(key_wide, _DEGREES, (d,)), noise)
    tails = stats.t.logpdf(u, _DEGREES, 0, _STRETCH) - stats.norm.logpdf(u)
    one = jax.nn.logsumexp(tails) - math.log(d)
    if d == 1:
        return u, jnp.logaddexp(0.0, one) - math.log(2)
    # the mean over pairs, without their sum's cancellation: each coordinate with those before it
    before = jnp.log(jnp.cumsum(jnp.exp(tails - tails.max()))[:-1]) + tails.max()
    two = jax.nn.logsumexp(before + tails[1:]) - math.log(d * (d - 1) / 2)
    parts = jnp.stack([jnp.zeros(()), one, two])
    return u, jax.nn.logsumexp(parts, b=jnp.array([0.5, 0.25, 0.25]))


def _candidate(
    plan: Plan, rows: SiloRows, own: Any, context: Any, learned: dict[str, Array], key: Array, key_choice: Array
) -> tuple[Array, dict[str, Array]]:
    """A silo's estimate of its log likelihood at theta, and its latents (elements first), unconstrained."""
    family = plan.families[rows.part]
    key_choice = random.fold_in(key_choice, rows.part)
    batch = pick(family, None, key, rows)
    if not family.has_local:
        return unit_terms(family, context.theta, jnp.zeros((0, 0)), learned, batch)[1], {}
    own = family.effective(own, rows)
    units = family.units(rows)
    eps = family.noise(key, rows, plan.num_local_particles)
    z = family.latents(own, context, eps, rows)
    log_weight, rest = candidate_weights(family, own, context, learned, z, batch)
    value = jnp.sum(unit_bounds(family, log_weight, batch))
    place = rows.order[family.group] if family.group is not None else rows.number[None]
    uniform = jax.vmap(lambda i: random.uniform(random.fold_in(key_choice, i)))(place)
    share = jnp.cumsum(jax.nn.softmax(log_weight, axis=0), axis=0)
    chosen = jnp.minimum(jnp.sum(share < uniform * share[-1], axis=0), len(z) - 1)
    return value + rest.mean(), units.to_sites(z[chosen, jnp.arange(z.shape[1])])


def constrained(plan: Plan, part: int, silos: Silos, draws: Draws, params: dict[str, Array]) -> dict[str, Array]:
    """All latent sites of a structure in their supports, and its deterministic ones, leading axis: draws."""
    factors = plan.families[part].factors
    learned = {k: params[k] for k in plan.learned}
    kwargs = {**silos.pooled, PARAMS: learned} if learned else silos.pooled
    constrain: Callable
    if factors.transforms is not None:
        constrain = partial(transform_fn, factors.transforms)
    else:
        constrain = partial(constrain_fn, factors.model, (), kwargs, return_deterministic=True)

    def one(theta: Array, latents: dict[str, Array]) -> dict[str, Array]:
        placed = {s.name: jnp.moveaxis(latents[s.name], 0, s.axis) for s in factors.local_sites}
        return constrain({**factors.unravel(theta), **placed})

    return lax.map(lambda x: one(*x), (draws.theta, draws.latents[part]))
