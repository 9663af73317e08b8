r"""Gaussian sites.

What a server adds, how far it goes at once, and what it remembers of the rounds before.

Sites are natural parameters in coordinates :math:`u = L^{-1}(\theta - \mu)` whitened by the current
q, in which q is N(0, I) and nothing cancels in float32. :class:`History` is Anderson's acceleration
of the fixed-point iteration (Walker & Ni 2011), lengths being those of q's Fisher information; for
full precisions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.rounds.serialization import wire_name

__all__ = [
    "CAREFUL",
    "History",
    "Site",
    "carried",
    "natural_step",
    "newest",
    "packed",
    "product",
    "unpacked",
]

_FARTHEST = 3.0  # sds of q that it moves in a round, along an axis of its curvature
_FLATTEST = (
    0.25  # precision of the new q in units of the old one's: it widens at most twofold in a round
)
CAREFUL = 0.7  # share of a step that is taken where silos did not answer
_OLDEST = 0.1  # weight of the newest sites in the end
_SLOWLY = 6.0  # rounds after which the part is half, where it falls
_DEPTH = 3  # rounds that are remembered


@wire_name("Site")
class Site(NamedTuple):
    """A Gaussian factor in coordinates whitened by q: score ``linear - precision u``.

    Precision ``(d, d)`` or its diagonal.
    """

    linear: Array
    precision: Array


@wire_name("History")
class History(NamedTuple):
    """Anderson's acceleration.

    Of the last rounds the steps taken and how the residual changed with them, in q's natural
    parameters.

    :param steps: the last first, leading axis m.
    :param changes: likewise.
    :param residual: the last round's.
    :param taken: the last round's step.
    :param known: whether there was one.
    :param calm: rounds since q was held back last.
    """

    steps: Site
    changes: Site
    residual: Site
    taken: Site
    known: Array
    calm: Array

    @staticmethod
    def none(like: Site) -> "History":
        """Nothing is known."""
        several = jax.tree.map(lambda x: jnp.zeros((_DEPTH, *x.shape), x.dtype), like)
        zero = jax.tree.map(jnp.zeros_like, like)
        return History(several, several, zero, zero, jnp.array(False), jnp.zeros((), jnp.int32))

    def step(self, residual: Site) -> tuple[Site, "History"]:
        """The step for a residual, and the history with it."""

        def push(several: Array, new: Array) -> Array:
            return jnp.concatenate([jnp.where(self.known, new, 0.0)[None], several[:-1]])

        steps = jax.tree.map(push, self.steps, self.taken)
        changes = jax.tree.map(
            lambda x, new, old: push(x, new - old), self.changes, residual, self.residual
        )
        # lengths in q's Fisher information
        lengths = jnp.concatenate(
            [changes.linear, changes.precision.reshape(_DEPTH, -1) * 0.5**0.5], axis=1
        )
        of_now = jnp.concatenate([residual.linear, residual.precision.ravel() * 0.5**0.5])
        gram = lengths @ lengths.T
        gram = gram + jnp.diag(jnp.where(jnp.diagonal(gram) > 0, 1e-4 * jnp.diagonal(gram), 1.0))
        share = jnp.linalg.solve(gram, lengths @ of_now)
        # at the fixed point residuals are rounding errors, and so are their changes: nothing can be
        # told from them
        share = jnp.where(jnp.linalg.norm(of_now) > jnp.finfo(of_now.dtype).eps ** 0.75, share, 0.0)
        step = jax.tree.map(
            lambda r, x, y: r - jnp.tensordot(share, x + y, 1), residual, steps, changes
        )
        return step, History(steps, changes, residual, step, jnp.array(True), self.calm)

    def carried(self, shift: Array, factor: Array) -> "History":
        """In coordinates v, where ``u = shift + factor v``."""

        def one(site: Site) -> Site:
            return carried(site, shift, factor)

        several = jax.vmap(one)
        return History(
            several(self.steps),
            several(self.changes),
            one(self.residual),
            one(self.taken),
            self.known,
            self.calm,
        )


def packed(site: Site) -> Site:
    """With the lower triangle of a full precision in its place."""
    d = len(site.linear)
    return (
        site
        if site.precision.ndim == 1
        else site._replace(precision=site.precision[jnp.tril_indices(d)])
    )


def unpacked(site: Site, like: Site) -> Site:
    """The inverse, for a precision of the form of ``like``'s."""
    if like.precision.ndim == 1:
        return site
    lower = (
        jnp.zeros_like(like.precision).at[jnp.tril_indices(len(site.linear))].set(site.precision)
    )
    return site._replace(precision=lower + jnp.tril(lower, -1).T)


def carried(site: Site, shift: Array, factor: Array) -> Site:
    """A site in coordinates v, where ``u = shift + factor v``."""
    linear, precision = site
    if precision.ndim == 1:
        return Site(factor * (linear - precision * shift), factor**2 * precision)
    return Site(factor.T @ (linear - precision @ shift), factor.T @ precision @ factor)


def product(site: Site) -> tuple[Array, Array, Array, Array]:
    """Mean and square root of the new q in the old one's coordinates, how far that is, and whether
    q was held back.
    """
    linear, precision = site
    if precision.ndim == 1:
        values, vectors = precision, None
    else:
        values, vectors = jnp.linalg.eigh(0.5 * (precision + precision.T))
        linear = vectors.T @ linear
    curvature = jnp.maximum(
        jnp.abs(values), _FLATTEST
    )  # where q is no density, a step uphill all the same
    step = linear / curvature
    beyond = jnp.abs(step) / _FARTHEST
    # the farther it would go the wider q is to look, from as wide as it was to twofold
    curvature = jnp.where(
        beyond > 1, jnp.maximum(jnp.minimum(curvature, beyond**-2), _FLATTEST), curvature
    )
    step = jnp.clip(step, -_FARTHEST, _FARTHEST)
    held = (beyond > 1).any() | (values < _FLATTEST).any()
    moved = jnp.maximum(jnp.abs(step).max(), 0.5 * jnp.abs(jnp.log(curvature)).max())
    if vectors is None:
        return step, curvature**-0.5, moved, held
    # a root without squares, which float32 has not the digits for where curvatures differ by 1e8
    upper = jnp.linalg.qr((vectors * curvature**-0.5).T, mode="r")
    return vectors @ step, (jnp.sign(jnp.diagonal(upper))[:, None] * upper).T, moved, held


def natural_step(
    history: History, total: Site, accelerated: Array, averaged: bool = False
) -> tuple[Array, Array, Array, Array, History]:
    """The natural-gradient step of a full q.

    Where it goes, whitened by what it was, its root, sds, whether it was held back, and the
    history.

    :param total: the sum of all sites.
    :param accelerated: whether it is; else a part of the plain step is taken, as some sites are
        old, or have noise.
    :param averaged: whether that part falls to a tenth, so that noise averages out over rounds.
    """
    one = jnp.eye(len(total.linear))
    residual = Site(total.linear, total.precision - one)
    step, later = history.step(residual)
    part = jnp.clip(_SLOWLY / (_SLOWLY + history.calm), _OLDEST, CAREFUL) if averaged else CAREFUL
    step = jax.tree.map(lambda x, y: jnp.where(accelerated, x, part * y), step, residual)
    loc, root, taken, held = product(Site(step.linear, one + step.precision))
    moved, held_one = product(total)[2:]
    held, moved = (held, taken) if averaged else (held | held_one, moved)
    # nothing is learned from steps in which old sites stood for silos that did not answer, or from
    # what was held back
    later = jax.tree.map(
        lambda x, y: jnp.where(accelerated & ~held, x, y), later, History.none(total)
    )
    later = later.carried(loc, root)._replace(calm=jnp.where(held, 0, history.calm + 1))
    return loc, root, moved, held, later


def newest(rounds: Array) -> Array:
    """Weight of a round's sites in the average over rounds, where they have noise.

    One, two thirds, a half ... a tenth.
    """
    return jnp.maximum(_OLDEST, 2 / (2.0 + rounds))
