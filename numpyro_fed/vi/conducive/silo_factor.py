"""Approximate Gaussian factors around q, for a silo's likelihood and for the prior.

They come from a regression of scores on points whitened by q, or from averages over pairs of
points.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.data.views import SiloRows
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.local_score import Message as Points
from numpyro_fed.surrogates.local_score import look, points_at_once
from numpyro_fed.surrogates.natural_step import Site
from numpyro_fed.surrogates.sobol import sobol_normal
from numpyro_fed.vi.bound import silo_bound
from numpyro_fed.vi.conducive.pairs import Averages, averages, drawn_points, rows_of_pair, shuffled
from numpyro_fed.vi.config import MOST_DIAGONAL, Plan

__all__ = ["Points", "at_once_of", "by_pairs", "changing", "prior_site", "silo_site", "whitening"]

_NUMBERS_AT_ONCE = 1 << 21


def at_once_of(plan: Plan, rows: SiloRows, num_silos: int) -> int:
    """Return the number of points, or pairs, that ``num_silos`` silos evaluate together."""
    family, most = plan.families[rows.part], max(n for _, n in rows.pad)
    if not by_pairs(plan):
        return points_at_once(num_silos * most, family.units(rows) if family.has_local else None)
    if plan.batch is not None:
        most = max(min(n, plan.batch[1]) if g == plan.batch[0] else n for g, n in rows.pad)
    return _pairs_at_once(
        plan, num_silos, most * (plan.num_local_particles if family.has_local else 1)
    )


def _pairs_at_once(plan: Plan, num_silos: int, rows: int) -> int:
    """Return the number of pairs evaluated together, a power of two.

    :param rows: number of rows that one point uses.
    """
    d = plan.factors.dim
    numbers = 2 * num_silos * (rows + d * (d if plan.families[0].global_cov == "full" else 1))
    return 1 << (min(plan.num_points // 2, max(1, _NUMBERS_AT_ONCE // numbers)).bit_length() - 1)


def whitening(plan: Plan, params: dict[str, Array]) -> Points:
    """Return q's mean and root, with the points.

    Points are the same in every round and silo, so that rounds are a fixed-point iteration. Where
    points change from round to round (:func:`changing`), none are returned.
    """
    family, constrained = plan.families[0], plan.constrain(params)
    d, full = plan.factors.dim, family.global_cov == "full"
    scale = constrained[f"{family.prefix}_scale_tril" if full else f"{family.prefix}_scale"]
    loc = constrained[f"{family.prefix}_loc"]
    if changing(plan):  # drawn pair by pair, and not kept
        return Points(loc, scale, jnp.zeros((0, d)), jnp.zeros(0))
    points = jnp.asarray(_table(plan.num_points, d), scale.dtype)
    return Points(loc, scale, points, jnp.ones(len(points)))


def _table(num: int, dim: int) -> np.ndarray:
    """Return antithetic Sobol points ``(num, dim)`` whose variances are exactly one.

    With at least ``4 dim`` points they are also uncorrelated. So the diagonal of a constant
    precision is exact.
    """
    points = sobol_normal(num, dim, 0)
    if num >= 4 * dim:
        return np.linalg.solve(np.linalg.cholesky(points.T @ points / num), points.T).T
    return points / np.sqrt(np.mean(points**2, axis=0))


def changing(plan: Plan) -> bool:
    """Return whether each round has points of its own.

    This holds for a diagonal q of more than 256 dimensions, unless silos integrate latents out.
    """
    family = plan.families[0]
    few = family.global_cov != "full" and plan.factors.dim > MOST_DIAGONAL // 4
    return few and (plan.optim is not None or not family.has_local)


def by_pairs(plan: Plan) -> bool:
    """Return whether approximate factors are averages over pairs of points.

    Otherwise they are regressed on all points, with latents integrated out. Averages have noise: of
    points or rows that change from round to round, or of draws of latents.
    """
    return plan.optim is not None or plan.batch is not None or changing(plan)


def _averages(
    plan: Plan, asked: Points, turn: Array | None, score: Callable, at_once: int
) -> Averages:
    """Return the averages over all pairs of points."""
    # pairs take the first half of the points, which the second half mirrors
    point: Callable[[Array], Array] = asked.points.__getitem__
    if changing(plan) and turn is not None:
        point = partial(drawn_points, plan.factors.dim, turn, asked.scale.dtype)
    return averages(score, point, plan.num_points // 2, asked.scale.ndim == 2, at_once)


def silo_site(
    plan: Plan,
    params: dict[str, Array],
    turn: Array | None,
    own: Any,
    key: Array,
    rows: SiloRows,
    at_once: int,
) -> tuple[Array, Site, Array, Any]:
    """Compute a silo's approximate factor by regression or by averages over pairs.

    :param params: global parameters, unconstrained.
    :param turn: number of the round, where points or rows change from round to round.
    :param own: the present local map.
    :param at_once: number of points, or pairs of points, evaluated together.
    :return: the mean log likelihood, the approximate factor, the share of points whose numbers are
        finite, and the local map.
    """
    asked, family = whitening(plan, params), plan.families[rows.part]
    if not by_pairs(plan):
        return _regressed(plan, asked, own, rows, at_once)
    constrained, num_pairs = plan.constrain(params), plan.num_points // 2
    order = None if turn is None else shuffled(plan, rows, key)
    learned = {k: constrained[k] for k in plan.learned}

    def score(u: Array, pair: Array, sign: Array) -> tuple[Array, Array]:
        batch, eps = rows_of_pair(plan, rows, order, num_pairs, pair), None
        held = family.effective(batch.take(own), batch.rows) if family.has_local else own
        if family.has_local:
            eps = sign * family.noise(
                random.fold_in(key, pair), batch.rows, plan.num_local_particles
            )
        term = silo_bound(family, held, family.context(constrained, u), learned, eps, batch)
        slope = (
            term.context.theta * asked.scale
            if asked.scale.ndim == 1
            else asked.scale.T @ term.context.theta
        )
        return term.value, slope + term.context.u

    found = _averages(plan, asked, turn, score, at_once)
    return found.value, found.site, found.fine, own


def _regressed(
    plan: Plan, asked: Points, own: Any, rows: SiloRows, at_once: int
) -> tuple[Array, Site, Array, Any]:
    """Compute the results of :func:`silo_site` by regression on all points, from all rows."""
    family = plan.families[rows.part]
    units = family.units(rows) if family.has_local else None
    found = look(family.factors, units, asked, rows, at_once)
    weights = found.weights / jnp.maximum(found.weights.mean(), 1e-30)
    new = Site(*fit_score(asked.points, found.scores, weights, asked.scale.ndim == 2)[:2])
    value = jnp.mean(jnp.where(found.weights > 0, found.values, 0.0) * weights)
    if units is not None:
        rows_of_map = fit_map(asked.points, *found.latents[0], weights, bent=False)
        own = type(own)(
            **{k: None if v is None else getattr(rows_of_map, k) for k, v in vars(own).items()}
        )
    return value, new, jnp.mean(found.weights > 0), own


def prior_site(
    plan: Plan, params: dict[str, Array], asked: Points, turn: Array, rows: SiloRows
) -> tuple[Site, Array]:
    """Return the prior's approximate factor, and ``E_q[log p(theta) - log q(theta)]``."""
    family, d = plan.families[0], plan.factors.dim
    constrained = plan.constrain(params)

    def log_prior(u: Array) -> Array:
        return plan.log_prior(asked.loc + matvec(asked.scale, u), constrained, rows)

    entropy = family.scale(constrained).log_det() + 0.5 * d * (1 + math.log(2 * math.pi))
    if changing(plan):
        found = _averages(
            plan,
            asked,
            turn,
            lambda u, *_: jax.value_and_grad(log_prior)(u),
            _pairs_at_once(plan, 1, d),
        )
        return found.site, found.value + entropy
    values, scores = jax.vmap(jax.value_and_grad(log_prior))(asked.points)
    fine = jnp.isfinite(values) & jnp.isfinite(scores).all(-1)
    weights = fine / jnp.maximum(fine.mean(), 1e-30)
    linear, precision, _ = fit_score(
        asked.points, jnp.where(fine[:, None], scores, 0.0), weights, asked.scale.ndim == 2
    )
    return Site(linear, precision), jnp.mean(jnp.where(fine, values, 0.0) * weights) + entropy
