r"""Proposals with wider tails than a Gaussian approximation, for draws that are to be weighed.

For theta, half of the draws are q's. A quarter have one whitened coordinate, chosen at random, from
Student's law of three degrees, three times as wide; a quarter have two such coordinates. The
density of this mixture takes the place of q's,

.. math::

    q(\theta) \Big( \tfrac12 + \tfrac14 \, \tfrac1d \sum_i r_i
    + \tfrac14 \, \tfrac{2}{d (d - 1)} \sum_{i < j} r_i r_j \Big), \qquad
    r_i = \frac{t_3(u_i / 3) / 3}{N(u_i; 0, 1)}.

So the weights see a tail that q cuts off: that of a log scale, or of an effect which widens with
its scale.

For one or two latents of a unit, the candidates are the nodes of a trapezoidal rule with a random
shift, in :math:`t` with :math:`\epsilon = a \sinh t`. Their weights sum to an unbiased estimate of
the unit's likelihood, whose error falls exponentially with the number of nodes. A node that is
chosen by its weight has the latents' conditional law, up to this error.

For more latents, every other candidate has its coordinates from the multivariate Student law of
three degrees. All candidates are weighed by the mixture's density. So no candidate can have more
than twice its share where the target's tails are lighter.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy import special, stats

# of a wide coordinate: scale and degrees of freedom, the fewest whole ones with a variance; half of
# its draws are beyond 2.3 sds of q
_STRETCH, _DEGREES = 3.0, 3


class Rule(NamedTuple):
    """Rule of the nodes in one coordinate.

    :param side: number of nodes.
    :param spread: ``a`` in ``a sinh t``; within ``a`` sds of the map, nodes are nearly equidistant.
    :param reach: sds of the map at the outermost node.
    """

    side: int
    spread: float
    reach: float


# A Gaussian conditional law that is half as wide as the map and centered has a relative error of
# 1e-5 in one dimension and .007 in two, and .06 and .5 if it is 3 sds off; 64 candidates at random
# have .1 and .8 in one
_RULES = {1: Rule(16, 1.5, 12.0), 2: Rule(8, 1.5, 8.0)}


def stretched_normal(key: Array, noise: Array) -> tuple[Array, Array]:
    """Draw from the mixture with one or two wide coordinates in half of all draws.

    :param noise: standard normal draw ``(d,)``.
    :return: the draw ``(d,)``, and the log density of the mixture over the standard normal's.
    """
    key_kind, key_wide = random.split(key)
    d = noise.shape[0]
    kind, *rest = random.uniform(key_kind, (3,))
    # a randint compiles four times as long
    first, step = (jnp.floor(x * n).astype(int) for x, n in zip(rest, (d, d - 1), strict=True))
    second = (first + 1 + step) % d
    axis = jnp.arange(d)
    wide = (axis == first) & (kind < 0.5) | (axis == second) & (kind < 0.25)
    u = jnp.where(wide, _STRETCH * _student(key_wide, (d,)), noise)
    return u, log_stretched(u)


def log_stretched(u: Array) -> Array:
    """Return the log density of the mixture at a position ``(d,)``, over the standard normal's."""
    d = len(u)
    tails = stats.t.logpdf(u, _DEGREES, 0, _STRETCH) - stats.norm.logpdf(u)
    one = jax.nn.logsumexp(tails) - math.log(d)
    if d == 1:
        return jnp.logaddexp(0.0, one) - math.log(2)
    # a mean over pairs, each coordinate with those before it. In logarithms: a coordinate that is
    # 24 sds out has e^280 times the others' ratios, beside which these would vanish
    before = lax.cumlogsumexp(tails)[:-1]
    two = jax.nn.logsumexp(before + tails[1:]) - math.log(d * (d - 1) / 2)
    parts = jnp.stack([jnp.zeros(()), one, two])
    return jax.nn.logsumexp(parts, b=jnp.array([0.5, 0.25, 0.25]))


def _student(key: Array, shape: tuple[int, ...]) -> Array:
    """Draw from Student's law; four normals cost a fifth of a draw by a gamma's loop."""
    normals = random.normal(key, (1 + _DEGREES, *shape))
    return normals[0] * jnp.mean(normals[1:] ** 2, axis=0) ** -0.5


def num_nodes(dim: int) -> int:
    """Return the number of nodes of units of ``dim`` latents; 0 where there is no rule."""
    return _RULES[dim].side ** dim if dim in _RULES else 0


def nodes_at(shift: Array, owned: Array) -> tuple[Array, Array]:
    """Return nodes with a random shift as candidates.

    :param shift: uniform numbers ``(E, k)``.
    :param owned: mask ``(E, k)`` of the latents that are not padding.
    :return: the coordinates ``(K, E, k)``, zero for padding, and the log density of a node over the
        standard normal's, ``(K, E)``.
    """
    dim = shift.shape[1]
    side, spread, reach = _RULES[dim]
    end = math.asinh(reach / spread)
    first, beyond = end * (2 * _index(dim)[:, None] / side - 1), end * 2 * shift / side
    # the functions of a sum, from few of its parts
    a, b = (jnp.asarray(x, shift.dtype) for x in (np.cosh(first), np.sinh(first)))
    c, d = jnp.cosh(beyond), jnp.sinh(beyond)
    cosh, eps = a * c + b * d, spread * (b * c + a * d)
    normal = -0.5 * eps**2 - 0.5 * math.log(2 * math.pi)
    log_ratio = -jnp.log(2 * end * spread * cosh) - normal
    return jnp.where(owned, eps, 0.0), jnp.where(owned, log_ratio, 0.0).sum(-1)


def uniform_at(key: Array, place: Array, count: int) -> Array:
    """Return uniform numbers ``(E, count)`` of elements, by their places in the pooled data."""
    return jax.vmap(lambda i: random.uniform(random.fold_in(key, i), (count,)))(place)


def choose(weight: Array, uniform: Array) -> Array:
    """Return the candidate ``(E,)`` that each element takes, by normalized weights ``(K, E)``."""
    share = jnp.cumsum(weight, axis=0)
    return jnp.minimum(jnp.sum(share < uniform * share[-1], axis=0), len(weight) - 1)


def halves(weight: Array, axis: Array, dim: int) -> Array:
    """Return the shares of every other node along one axis, and of the others, ``(2, E)``.

    Both halves estimate the same integral, from twice the distance between nodes. A share of zero
    is the least positive number.

    :param weight: normalized weights of the nodes ``(K, E)``.
    :param axis: the axis, a whole number below ``dim``.
    :param dim: number of latents of a unit.
    """
    odd = jnp.asarray(_index(dim) % 2, weight.dtype)[:, axis]
    return jnp.maximum(jnp.stack([odd, 1 - odd]) @ weight, jnp.finfo(weight.dtype).tiny)


def _index(dim: int) -> np.ndarray:
    """Return the places of all nodes along each axis, ``(K, dim)``."""
    return np.indices((_RULES[dim].side,) * dim).reshape(dim, -1).T


def wider_candidates(key: Array, eps: Array, width: Array, place: Array) -> tuple[Array, Array]:
    """Draw every other candidate from the Student law.

    :param eps: standard normal coordinates ``(K, E, k)``, zero for padding.
    :param width: number of each unit's own coordinates, ``(E,)``.
    :param place: place of each unit in the pooled data, by which its noise is folded.
    :return: the coordinates, and the log density of the mixture over the standard normal's, ``(K,
        E)``.
    """
    num = len(eps)
    if num == 1:
        return eps, jnp.zeros(eps.shape[:2], eps.dtype)
    half = _DEGREES / 2
    # chi squared over its degrees of freedom, from three normals: a gamma costs twenty of them
    normals = jax.vmap(lambda i: random.normal(random.fold_in(key, i), (num // 2, _DEGREES)))(place)
    chi = jnp.mean(normals**2, axis=-1).T
    eps = eps.at[1::2].multiply(chi[..., None] ** -0.5)
    square = jnp.sum(eps**2, axis=-1)
    normal = -0.5 * square - 0.5 * width * math.log(2 * math.pi)
    student = (
        special.gammaln(half + width / 2)
        - special.gammaln(half)
        - 0.5 * width * math.log(_DEGREES * math.pi)
    )
    student = student - (half + width / 2) * jnp.log1p(square / _DEGREES)
    share = (num // 2) / num
    mixture = jnp.logaddexp(math.log1p(-share), math.log(share) + student - normal)
    return eps, mixture
