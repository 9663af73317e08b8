r"""Mean, score and curvature of a log density over a Gaussian from antithetic pairs of points, where points are too many to keep, or rows to look at all.

.. math:: E_q f, \qquad a = E_q \nabla_u f, \qquad B = -E_q \nabla_u f \, u^\top,

as averages over pairs :math:`\mu \pm L u_j`, added up pair by pair: nothing of shape ``(points, dimensions)`` is kept. Both points of a pair look at the same
rows, and each pair at others, evenly spaced, so that all pairs together look at every row equally often: what does not depend on u is as exact as from all rows at
all points.

Law and bias: a quadrature; of quadratic terms that all rows share exact in a, and in B where points are without correlation (the others' noise is that of Hutchinson's estimator).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_fed.storage import SiloRows, gather
from numpyro_fed.vi.minibatch import Batch, rows_at
from numpyro_fed.vi.plan import Plan
from numpyro_fed.vi.sites import Site

__all__ = ["Averages", "averages", "drawn_points", "fewest_rows", "rows_of_pair"]

_NUMBERS_AT_ONCE = 1 << 21


class Averages(NamedTuple):
    """Of log density values, of scores and curvatures in whitened units, and the share of pairs whose numbers are finite."""

    value: Array
    site: Site
    fine: Array


def drawn_points(dim: int, turn: Array, dtype: jnp.dtype, pair: Array) -> Array:
    """A pair's standard normal point: others in each turn, the same in all silos."""
    return random.normal(random.fold_in(random.fold_in(random.key(0), turn), pair), (dim,), dtype)


def rows_of_pair(plan: Plan, rows: SiloRows, num_pairs: int, turn: Array, pair: Array) -> Batch:
    """The silo's rows at which a pair looks: every so many of them; over all pairs each row comes equally often."""
    if plan.batch is None:
        return Batch(rows, {}, 1.0, lambda tree: tree, lambda _, new: new)
    group, most = plan.batch
    family = plan.families[rows.part]
    total, shown = rows.sizes[group], min(most, dict(rows.pad)[group])
    often = jnp.clip(shown * num_pairs // total, 1, num_pairs)
    count = (often * total - pair + num_pairs - 1) // num_pairs
    turned = random.randint(random.fold_in(random.key(1), turn), (), 0, total)
    number = jnp.minimum(jnp.arange(shown), count - 1) * num_pairs + pair
    place = (number % total + number // total + turned) % total  # when it comes again, at another pair
    some = rows_at(family, group, place, count, rows)
    if family.group != group:
        return Batch(some, {group: num_pairs / often}, 1.0, lambda tree: tree, lambda _, new: new)
    return Batch(some, {}, num_pairs / often, lambda tree: gather(tree, place), lambda tree, _: tree)


def fewest_rows(largest: int, num_points: int) -> int:
    """Rows of a pair with which all pairs look at every row once, in a silo of so many."""
    return -(-largest // (num_points // 2))


def averages(
    score: Callable[[Array, Array, Array], tuple[Array, Array]],
    point: Callable[[Array], Array],
    num_pairs: int,
    full: bool,
    numbers: int,
) -> Averages:
    """Averages over all pairs.

    :param score: of a whitened point ``(d,)``, the number of its pair and its sign in it: a log density's value and gradient in the point.
    :param point: of a pair's number.
    :param numbers: that one pair takes.
    """
    at_once = 1 << (min(num_pairs, max(1, _NUMBERS_AT_ONCE // numbers)).bit_length() - 1)  # num_pairs is a power of two

    def one(pair: Array) -> tuple[Array, ...]:
        u = point(pair)
        value, slope = jax.vmap(lambda sign: score(sign * u, pair, sign))(jnp.array([1.0, -1.0], u.dtype))
        fine = jnp.isfinite(value).all() & jnp.isfinite(slope).all()
        value, slope = jnp.where(fine, value, 0.0), jnp.where(fine, slope, 0.0)
        odd, u = 0.5 * (slope[0] - slope[1]), jnp.where(fine, u, 0.0)
        return fine.astype(u.dtype), value.mean(), slope.mean(0), jnp.outer(odd, u) if full else odd * u, u**2

    def some(total: tuple[Array, ...], pairs: Array) -> tuple[tuple[Array, ...], None]:
        return jax.tree.map(lambda t, x: t + x.sum(0), total, jax.vmap(one)(pairs)), None

    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
    )
    total, _ = lax.scan(some, start, jnp.arange(num_pairs).reshape(-1, at_once))
    count, value, shift, slope, square = total
    known = jnp.maximum(count, 1.0)
    tiny = np.finfo(np.float32).tiny
    precision = -0.5 * (slope + slope.T) / known if full else -slope / jnp.maximum(square, tiny)
    return Averages(value / known, Site(shift / known, precision), count / num_pairs)
