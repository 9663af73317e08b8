r"""A Gaussian site around q: of a silo's likelihood and of the prior, by regression of scores on points whitened by q, or by averages over pairs of them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.storage import SiloRows
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.local_score import Message as Points
from numpyro_fed.surrogates.local_score import look, points_at_once
from numpyro_fed.surrogates.points import sobol_normal
from numpyro_fed.vi.bound import unit_terms
from numpyro_fed.vi.pairs import Averages, averages, drawn_points, rows_of_pair
from numpyro_fed.vi.plan import Plan
from numpyro_fed.vi.sites import Site

__all__ = ["Points", "at_once_of", "changing", "num_points", "prior_site", "silo_site", "whitening"]

_MOST_DIAGONAL = 1024  # points that a diagonal precision is worth


def num_points(plan: Plan) -> int:
    """Positions of theta at which silos look: a power of two, at least ``num_local_steps``, 64, and four times as many as dimensions (diagonal: up to 1,024)."""
    steps, dim, full = plan.num_local_steps, plan.factors.dim, plan.families[0].global_cov == "full"
    return 2 ** math.ceil(math.log2(max(64, steps, 4 * dim if full else min(4 * dim, _MOST_DIAGONAL))))


def at_once_of(plan: Plan, rows: SiloRows, num_silos: int) -> int:
    """Points at which so many silos look together."""
    family = plan.families[rows.part]
    return points_at_once(num_silos * max(n for _, n in rows.pad), family.units(rows) if family.has_local else None)


def whitening(plan: Plan, params: dict[str, Array]) -> Points:
    """q's mean and root, and the points: the same in every round and silo, so that rounds are a fixed-point iteration."""
    family, constrained = plan.families[0], plan.constrain(params)
    d, full = plan.factors.dim, family.global_cov == "full"
    scale = constrained[f"{family.prefix}_scale_tril" if full else f"{family.prefix}_scale"]
    loc = constrained[f"{family.prefix}_loc"]
    if changing(plan):  # which nobody keeps
        return Points(loc, scale, jnp.zeros((0, d)), jnp.zeros(0))
    points = jnp.asarray(_table(num_points(plan), d), scale.dtype)
    return Points(loc, scale, points, jnp.ones(len(points)))


def _table(num: int, dim: int) -> np.ndarray:
    """Antithetic points with variances of exactly one and, where they are enough, no correlation, so that the diagonal of a constant precision is exact."""
    points = sobol_normal(num, dim, 0)
    if num >= 4 * dim:
        return np.linalg.solve(np.linalg.cholesky(points.T @ points / num), points.T).T
    return points / np.sqrt(np.mean(points**2, axis=0))


def changing(plan: Plan) -> bool:
    """Whether each round has points of its own, as there are too few of them for so many dimensions."""
    family = plan.families[0]
    return family.global_cov != "full" and plan.factors.dim > _MOST_DIAGONAL // 4 and not family.has_local


def _averages(plan: Plan, asked: Points, turn: Array, log_density: Callable, rows: int) -> Averages:
    """Over all pairs of points; of ``log_density`` of a whitened point and the number of its pair."""
    d, num = plan.factors.dim, num_points(plan)
    point: Callable[[Array], Array] = partial(drawn_points, d, turn, asked.scale.dtype)
    if not changing(plan):
        table = jnp.asarray(_table(num, d)[: num // 2], asked.scale.dtype)
        point = table.__getitem__
    full = asked.scale.ndim == 2
    return averages(log_density, point, num // 2, full, 2 * (rows + d * (d if full else 1)))


def silo_site(
    plan: Plan, asked: Points, turn: Array, own: Any, rows: SiloRows, at_once: int
) -> tuple[Array, Site, Array, Any]:
    """A silo's mean log likelihood, its site, the share of points whose numbers are finite, and its local map.

    :param own: the local map that it has.
    :param at_once: points that are looked at together, where all rows are.
    """
    if plan.batch is None and not changing(plan):
        return _regressed(plan, asked, own, rows, at_once)
    most = max(n if plan.batch is None or g != plan.batch[0] else min(n, plan.batch[1]) for g, n in rows.pad)
    found = _averages(plan, asked, turn, _of_some_rows(plan, asked, turn, rows), most)
    return found.value, found.site, found.fine, own


def _of_some_rows(plan: Plan, asked: Points, turn: Array, rows: SiloRows) -> Callable:
    """The log likelihood at a whitened point, from its pair's rows."""
    family, num_pairs = plan.families[rows.part], num_points(plan) // 2

    def log_density(u: Array, pair: Array) -> Array:
        batch = rows_of_pair(plan, rows, num_pairs, turn, pair)
        return unit_terms(family, asked.loc + matvec(asked.scale, u), jnp.zeros((0, 0)), {}, batch)[1]

    return log_density


def _regressed(plan: Plan, asked: Points, own: Any, rows: SiloRows, at_once: int) -> tuple[Array, Site, Array, Any]:
    """From all rows at all points: mean log likelihood, site, share of points whose numbers are finite, and local map."""
    family = plan.families[rows.part]
    units = family.units(rows) if family.has_local else None
    found = look(family.factors, units, asked, rows, at_once)
    weights = found.weights / jnp.maximum(found.weights.mean(), 1e-30)
    new = Site(*fit_score(asked.points, found.scores, weights, asked.scale.ndim == 2)[:2])
    value = jnp.mean(jnp.where(found.weights > 0, found.values, 0.0) * weights)
    if units is not None:
        rows_of_map = fit_map(asked.points, *found.latents[0], weights, bent=False)
        own = type(own)(**{k: None if v is None else getattr(rows_of_map, k) for k, v in vars(own).items()})
    return value, new, jnp.mean(found.weights > 0), own


def prior_site(plan: Plan, params: dict[str, Array], asked: Points, turn: Array, rows: SiloRows) -> tuple[Site, Array]:
    """The prior's site, and ``E_q[log p(theta) - log q(theta)]``."""
    family, d = plan.families[0], plan.factors.dim
    constrained = plan.constrain(params)

    def log_prior(u: Array, pair: Array | None = None) -> Array:
        return plan.log_prior(asked.loc + matvec(asked.scale, u), constrained, rows)

    entropy = family.scale(constrained).log_det() + 0.5 * d * (1 + math.log(2 * math.pi))
    if changing(plan):
        found = _averages(plan, asked, turn, log_prior, d)
        return found.site, found.value + entropy
    values, scores = jax.vmap(jax.value_and_grad(log_prior))(asked.points)
    fine = jnp.isfinite(values) & jnp.isfinite(scores).all(-1)
    weights = fine / jnp.maximum(fine.mean(), 1e-30)
    linear, precision, _ = fit_score(
        asked.points, jnp.where(fine[:, None], scores, 0.0), weights, asked.scale.ndim == 2
    )
    return Site(linear, precision), jnp.mean(jnp.where(fine, values, 0.0) * weights) + entropy
