r"""Mean, score and curvature of a log density over a Gaussian, from antithetic pairs of points.

This is for points that are too many to keep, or rows that are too many to evaluate at each. The
averages

.. math:: E_q f, \qquad a = E_q \nabla_u f, \qquad B = -E_q \nabla_u f \, u^\top,

over pairs :math:`\mu \pm L u_j` are added up pair by pair: no array has shape ``(points,
dimensions)``. Both points of a pair use the same rows, and different pairs use different rows. All
pairs together use every row equally often. So terms that do not depend on u are as exact as from
all rows at all points.

Law and bias: a quadrature, exact in a for quadratic terms. For a full matrix B, differences between
rows leave noise of about :math:`2 d / \sqrt{m K / 2}` of its size, from m rows at each of K / 2
pairs. For a diagonal B the noise is that of Hutchinson's estimator. Rows and points change from
round to round, so that the noise averages out over rounds.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_fed.data.views import SiloRows
from numpyro_fed.surrogates.natural_step import ApproxFactor
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.minibatch import Batch, rows_at, whole

# evaluations of rows in a round for each number of a full precision: noise of .4 in a round, .1 in
# the average of rounds
_LOOKS = 25


class Averages(NamedTuple):
    """Averages over pairs of points.

    :param value: mean log density.
    :param site: mean score and curvature in whitened units.
    :param fine: share of pairs whose numbers are finite.
    """

    value: Array
    site: ApproxFactor
    fine: Array


def drawn_points(dim: int, turn: Array, dtype: jnp.dtype, pair: Array) -> Array:
    """Draw a pair's standard normal point, ``(dim,)``.

    It is the same in all silos, and changes with ``turn``.
    """
    return random.normal(random.fold_in(random.fold_in(random.key(0), turn), pair), (dim,), dtype)


def shuffled(config: FitConfig, rows: SiloRows, key: Array) -> Array | None:
    """Return the order in which pairs go through a silo's rows; padding is last.

    Each key gives another order. Without minibatches it is ``None``.
    """
    if config.batch is None:
        return None
    group = config.batch[0]
    uniform = random.uniform(random.fold_in(key, 1 << 20), (dict(rows.pad)[group],))
    return jnp.argsort(jnp.where(rows.mask(group), uniform, 2.0))


def rows_of_pair(
    config: FitConfig, rows: SiloRows, order: Array | None, num_pairs: int, pair: Array
) -> Batch:
    """Return the rows that a pair uses: the next ones in this order.

    Over all pairs each row comes equally often.
    """
    if config.batch is None or order is None:
        return whole(rows)
    group, most = config.batch
    total, shown = rows.sizes[group], min(most, len(order))
    often = jnp.clip(shown * num_pairs // total, 1, num_pairs)
    each, more = often * total // num_pairs, often * total % num_pairs
    count = each + (pair < more)
    number = (
        pair * (each % total) + jnp.minimum(pair, more) + jnp.minimum(jnp.arange(shown), count - 1)
    )
    return rows_at(
        config.families[rows.part], group, order[number % total], count, num_pairs / often, rows
    )


def fewest_rows(config: FitConfig, largest: int) -> int:
    """Return the least number of rows of a pair for which the averages are usable.

    All pairs together then use every row of a silo once. For a full precision they use enough rows
    that the noise of its curvature is small.
    """
    dim, full = config.factors.dim, config.normal().global_cov == "full"
    return min(
        largest, -(-max(largest, _LOOKS * dim**2 if full else 0) // (config.num_points // 2))
    )


def averages(
    score: Callable[[Array, Array, Array], tuple[Array, Array]],
    point: Callable[[Array], Array],
    num_pairs: int,
    full: bool,
    at_once: int,
) -> Averages:
    """Return the averages over all pairs.

    :param score: maps a whitened point ``(d,)``, the number of its pair and its sign in the pair to
        a log density's value and gradient in the point.
    :param point: maps a pair's number to its point ``(d,)``.
    :param num_pairs: number of pairs, a power of two.
    :param full: whether the precision is a full matrix.
    :param at_once: number of pairs evaluated together, a power of two.
    """

    def one(pair: Array) -> tuple[Array, ...]:
        u = point(pair)
        value, slope = jax.vmap(lambda sign: score(sign * u, pair, sign))(
            jnp.array([1.0, -1.0], u.dtype)
        )
        fine = jnp.isfinite(value).all() & jnp.isfinite(slope).all()
        value, slope = jnp.where(fine, value, 0.0), jnp.where(fine, slope, 0.0)
        odd, u = 0.5 * (slope[0] - slope[1]), jnp.where(fine, u, 0.0)
        return (
            fine.astype(u.dtype),
            value.mean(),
            slope.mean(0),
            jnp.outer(odd, u) if full else odd * u,
            u**2,
        )

    def some(total: tuple[Array, ...], pairs: Array) -> tuple[tuple[Array, ...], None]:
        return jax.tree.map(lambda t, x: t + x.sum(0), total, jax.vmap(one)(pairs)), None

    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32)),
    )
    total, _ = lax.scan(some, start, jnp.arange(num_pairs).reshape(-1, at_once))
    count, value, shift, slope, square = total
    known = jnp.maximum(count, 1.0)
    tiny = np.finfo(np.float32).tiny
    precision = -0.5 * (slope + slope.T) / known if full else -slope / jnp.maximum(square, tiny)
    return Averages(value / known, ApproxFactor(shift / known, precision), count / num_pairs)
