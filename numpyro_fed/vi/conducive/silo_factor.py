"""Approximate Gaussian factors around q, for a silo's likelihood and for the prior.

They come from a regression of scores on points whitened by q, or from averages over pairs of
points.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.local_score import Message as Points
from numpyro_fed.surrogates.local_score import look, points_at_once
from numpyro_fed.surrogates.natural_step import ApproxFactor
from numpyro_fed.surrogates.sobol import sobol_normal
from numpyro_fed.vi.bound import silo_bound
from numpyro_fed.vi.conducive.antithetic import (
    Averages,
    averages,
    drawn_points,
    rows_of_pair,
    shuffled,
)
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.guides.normal import SiloNormal

_NUMBERS_AT_ONCE = 1 << 21  # 8 MiB in float32
_MIN_POINTS = 64  # four for each of 16 dimensions, as a full precision has
# most points that a diagonal precision needs: from their 512 pairs a curvature has a relative error
# of about sqrt(2 / 512) = 6 %, and an sd half of that
_MAX_DIAGONAL = 1024


def number_of_points(family: SiloNormal, least: int) -> int:
    """Return the number of positions of theta at which silos evaluate their likelihood.

    It is the least power of two that is at least ``least``, 64, and four times the number of
    dimensions (for a diagonal q at least the smaller of this and 1,024).
    """
    wanted = 4 * family.factors.dim
    wanted = wanted if family.global_cov == "full" else min(wanted, _MAX_DIAGONAL)
    return 1 << (max(_MIN_POINTS, least, wanted) - 1).bit_length()


def at_once_of(config: FitConfig, rows: SiloRows, num_silos: int) -> int:
    """Return the number of points, or pairs, that ``num_silos`` silos evaluate together."""
    family, most = config.families[rows.part], max(n for _, n in rows.pad)
    if not uses_pairs(config):
        return points_at_once(num_silos * most, family.integrated(rows))
    if config.batch is not None:
        most = max(min(n, config.batch[1]) if g == config.batch[0] else n for g, n in rows.pad)
    return _pairs_at_once(
        config, num_silos, most * (config.num_local_particles if family.has_local else 1)
    )


def _pairs_at_once(config: FitConfig, num_silos: int, rows: int) -> int:
    """Return the number of pairs evaluated together, a power of two.

    :param rows: number of rows that one point uses.
    """
    d = config.factors.dim
    numbers = 2 * num_silos * (rows + d * (d if config.normal().global_cov == "full" else 1))
    return 1 << (min(config.num_points // 2, max(1, _NUMBERS_AT_ONCE // numbers)).bit_length() - 1)


def far_points(config: FitConfig) -> int:
    """Return the number of points of rounds far from the optimum; 0: that of all rounds."""
    few = number_of_points(config.normal(), _MIN_POINTS)
    return 0 if uses_pairs(config) or few >= config.num_points else few


def whitening(config: FitConfig, params: dict[str, Array], far: Array | None = None) -> Points:
    """Return q's mean and root, with the points.

    Points are the same in every near round and silo, so that rounds are a fixed-point iteration.
    Where points change from round to round (:func:`changes_points`), none are returned.

    :param far: whether the round is far from the optimum. Then most points have weight zero.
    """
    family, constrained = config.normal(), config.constrain(params)
    d, full = config.factors.dim, family.global_cov == "full"
    scale = constrained[f"{family.prefix}_scale_tril" if full else f"{family.prefix}_scale"]
    loc = constrained[f"{family.prefix}_loc"]
    if changes_points(config):  # drawn pair by pair, and not kept
        return Points(loc, scale, jnp.zeros((0, d)), jnp.zeros(0))
    points = jnp.asarray(_table(config.num_points, d), scale.dtype)
    weights = jnp.ones(len(points), scale.dtype)
    if far is not None:
        few = far_points(config)
        points = jnp.where(far, points.at[:few].set(_table(few, d)), points)
        weights = jnp.where(far & (jnp.arange(len(points)) >= few), 0.0, weights)
    return Points(loc, scale, points, weights)


def _table(num: int, dim: int) -> np.ndarray:
    """Return antithetic Sobol points ``(num, dim)`` whose variances are exactly one.

    With at least ``4 dim`` points they are also uncorrelated. So the diagonal of a constant
    precision is exact.
    """
    points = sobol_normal(num, dim, 0)
    if num >= 4 * dim:
        return np.linalg.solve(np.linalg.cholesky(points.T @ points / num), points.T).T
    return points / np.sqrt(np.mean(points**2, axis=0))


def changes_points(config: FitConfig) -> bool:
    """Return whether each round has points of its own.

    This holds for a diagonal q of more than 256 dimensions, unless silos integrate latents out.
    """
    family = config.normal()
    few = family.global_cov != "full" and config.factors.dim > _MAX_DIAGONAL // 4
    return few and (config.optim is not None or not family.factors.local_sites)


def uses_pairs(config: FitConfig) -> bool:
    """Return whether approximate factors are averages over pairs of points.

    Otherwise they are regressed on all points, with latents integrated out. Averages have noise: of
    points or rows that change from round to round, or of draws of latents.
    """
    return config.optim is not None or config.batch is not None or changes_points(config)


def _averages(
    config: FitConfig, asked: Points, turn: Array | None, score: Callable, at_once: int
) -> Averages:
    """Return the averages over all pairs of points."""
    # pairs take the first half of the points, which the second half mirrors
    point: Callable[[Array], Array] = asked.points.__getitem__
    if changes_points(config) and turn is not None:
        point = partial(drawn_points, config.factors.dim, turn, asked.scale.dtype)
    return averages(score, point, config.num_points // 2, asked.scale.ndim == 2, at_once)


def silo_factor(
    config: FitConfig,
    params: dict[str, Array],
    turn: Array | None,
    far: Array | None,
    own: PyTree,
    key: Array,
    rows: SiloRows,
    at_once: int,
) -> tuple[Array, ApproxFactor, Array, PyTree]:
    """Compute a silo's approximate factor by regression or by averages over pairs.

    :param params: global parameters, unconstrained.
    :param turn: number of the round, where points or rows change from round to round.
    :param far: whether the round is far from the optimum, where fewer points do.
    :param own: the present local map.
    :param at_once: number of points, or pairs of points, evaluated together.
    :return: the mean log likelihood, the approximate factor, the share of points whose numbers are
        finite, and the local map.
    """
    asked, family = whitening(config, params, far), config.families[rows.part]
    if not uses_pairs(config):
        return _regressed(config, asked, own, rows, at_once)
    constrained, num_pairs = config.constrain(params), config.num_points // 2
    order = None if turn is None else shuffled(config, rows, key)
    learned = {k: constrained[k] for k in config.learned}

    def score(u: Array, pair: Array, sign: Array) -> tuple[Array, Array]:
        batch, eps = rows_of_pair(config, rows, order, num_pairs, pair), None
        held = family.effective(batch.take(own), batch.rows) if family.has_local else own
        if family.has_local:
            eps = sign * family.noise(
                random.fold_in(key, pair), batch.rows, config.num_local_particles
            )
        term = silo_bound(family, held, family.context(constrained, u), learned, eps, batch)
        slope = (
            term.context.theta * asked.scale
            if asked.scale.ndim == 1
            else asked.scale.T @ term.context.theta
        )
        return term.value, slope + term.context.u

    found = _averages(config, asked, turn, score, at_once)
    return found.value, found.site, found.fine, own


def _regressed(
    config: FitConfig, asked: Points, own: PyTree, rows: SiloRows, at_once: int
) -> tuple[Array, ApproxFactor, Array, PyTree]:
    """Compute the results of :func:`silo_factor` by regression on all points, from all rows."""
    family = config.families[rows.part]
    units = family.integrated(rows)
    found = look(family.factors, units, asked, rows, at_once)
    weights = found.weights / jnp.maximum(found.weights.mean(), 1e-30)
    new = ApproxFactor(*fit_score(asked.points, found.scores, weights, asked.scale.ndim == 2)[:2])
    value = jnp.mean(jnp.where(found.weights > 0, found.values, 0.0) * weights)
    if units is not None and family.has_local:
        rows_of_map = fit_map(asked.points, *found.latents[0], weights, bent=False)
        own = type(own)(
            **{k: None if v is None else vars(rows_of_map)[k] for k, v in vars(own).items()}
        )
    return value, new, jnp.mean(found.weights) / jnp.mean(asked.weights), own


def prior_factor(
    config: FitConfig, params: dict[str, Array], asked: Points, turn: Array, rows: SiloRows
) -> tuple[ApproxFactor, Array]:
    """Return the prior's approximate factor, and ``E_q[log p(theta) - log q(theta)]``."""
    family, d = config.normal(), config.factors.dim
    constrained = config.constrain(params)

    def log_prior(u: Array) -> Array:
        return config.log_prior(asked.loc + matvec(asked.scale, u), constrained, rows)

    entropy = family.scale(constrained).log_det() + 0.5 * d * (1 + math.log(2 * math.pi))
    if changes_points(config):
        found = _averages(
            config,
            asked,
            turn,
            lambda u, *_: jax.value_and_grad(log_prior)(u),
            _pairs_at_once(config, 1, d),
        )
        return found.site, found.value + entropy
    values, scores = jax.vmap(jax.value_and_grad(log_prior))(asked.points)
    fine = jnp.isfinite(values) & jnp.isfinite(scores).all(-1)
    weights = fine * asked.weights
    weights = weights / jnp.maximum(weights.mean(), 1e-30)
    linear, precision, _ = fit_score(
        asked.points, jnp.where(fine[:, None], scores, 0.0), weights, asked.scale.ndim == 2
    )
    return ApproxFactor(linear, precision), jnp.mean(
        jnp.where(fine, values, 0.0) * weights
    ) + entropy
