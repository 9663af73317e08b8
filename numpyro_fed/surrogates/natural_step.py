r"""Natural-gradient steps of a server, from the silos' approximate factors.

The server adds the approximate factors up, limits its step, and accelerates it by earlier rounds.

Approximate factors are natural parameters in coordinates :math:`u = L^{-1}(\theta - \mu)` whitened
by the current q. In these, q is N(0, I), and nothing cancels in float32. :class:`History` is
Anderson's acceleration of the fixed-point iteration (Walker & Ni 2011), for full precisions. It
measures lengths by q's Fisher information.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.rounds.serialization import wire_name

# largest move of a converged fit's last round, in sds and log sds; 15 models moved by .001 two to
# four rounds after q was within .1 sds (docs/results.md)
CONVERGED = 0.1
# largest step of a round, in sds of q along an axis of its curvature: the outermost of 256 points,
# at which silos evaluate their scores, are that far
_FARTHEST = 3.0
_FLATTEST = 0.25  # least precision relative to the old q's: a round widens q at most twofold
# share of a step where silos did not answer; with 30 % missing, full steps took up to 18 rounds and
# more on five models, this share up to 12 (docs/results.md)
CAREFUL = 0.7
# least weight of the newest factors, and least share of an averaged step: the noise of such steps
# is sqrt(.1 / 1.9) = .23 of a round's
_OLDEST = 0.1
# rounds until the share of an averaged step is half; ten rounds still divide the distance from the
# start by 6,600, the product of 1 / (1 - share)
_SLOWLY = 6.0
_DEPTH = 3  # rounds in the history; steps may overshoot with period two


@wire_name("ApproxFactor")
class ApproxFactor(NamedTuple):
    """Approximate factor: Gaussian with score ``linear - precision u`` in q's coordinates.

    The precision is ``(d, d)`` or its diagonal ``(d,)``.
    """

    linear: Array
    precision: Array


@wire_name("History")
class History(NamedTuple):
    """State of Anderson's acceleration, in q's natural parameters.

    It holds the steps of the last rounds, and the changes of the residual with them.

    :param steps: the last rounds' steps, newest first, leading axis m.
    :param changes: changes of the residual, in the order of ``steps``.
    :param residual: residual of the last round.
    :param taken: step of the last round.
    :param known: true after a first round.
    :param calm: number of rounds since a limit last held q back.
    """

    steps: ApproxFactor
    changes: ApproxFactor
    residual: ApproxFactor
    taken: ApproxFactor
    known: Array
    calm: Array

    @staticmethod
    def none(like: ApproxFactor) -> "History":
        """Return an empty history."""
        several = jax.tree.map(lambda x: jnp.zeros((_DEPTH, *x.shape), x.dtype), like)
        zero = jax.tree.map(jnp.zeros_like, like)
        return History(several, several, zero, zero, jnp.array(False), jnp.zeros((), jnp.int32))

    def step(self, residual: ApproxFactor) -> tuple[ApproxFactor, "History"]:
        """Return the step for a residual, and the history with it."""

        def push(several: Array, new: Array) -> Array:
            return jnp.concatenate([jnp.where(self.known, new, 0.0)[None], several[:-1]])

        steps = jax.tree.map(push, self.steps, self.taken)
        changes = jax.tree.map(
            lambda x, new, old: push(x, new - old), self.changes, residual, self.residual
        )
        # the root of 1/2 weighs precisions as q's Fisher information does
        lengths = jnp.concatenate(
            [changes.linear, changes.precision.reshape(_DEPTH, -1) * 0.5**0.5], axis=1
        )
        of_now = jnp.concatenate([residual.linear, residual.precision.ravel() * 0.5**0.5])
        gram = lengths @ lengths.T
        gram = gram + jnp.diag(jnp.where(jnp.diagonal(gram) > 0, 1e-4 * jnp.diagonal(gram), 1.0))
        share = jnp.linalg.solve(gram, lengths @ of_now)
        # at the fixed point residuals and their changes are rounding errors, without information
        share = jnp.where(jnp.linalg.norm(of_now) > jnp.finfo(of_now.dtype).eps ** 0.75, share, 0.0)
        step = jax.tree.map(
            lambda r, x, y: r - jnp.tensordot(share, x + y, 1), residual, steps, changes
        )
        return step, History(steps, changes, residual, step, jnp.array(True), self.calm)

    def carried(self, shift: Array, factor: Array) -> "History":
        """Return the history in coordinates v, where ``u = shift + factor v``."""

        def one(site: ApproxFactor) -> ApproxFactor:
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


def packed(site: ApproxFactor) -> ApproxFactor:
    """Pack a full precision into its lower triangle."""
    d = len(site.linear)
    return (
        site
        if site.precision.ndim == 1
        else site._replace(precision=site.precision[jnp.tril_indices(d)])
    )


def unpacked(site: ApproxFactor, like: ApproxFactor) -> ApproxFactor:
    """Invert :func:`packed`, for a precision of the form of that of ``like``."""
    if like.precision.ndim == 1:
        return site
    lower = (
        jnp.zeros_like(like.precision).at[jnp.tril_indices(len(site.linear))].set(site.precision)
    )
    return site._replace(precision=lower + jnp.tril(lower, -1).T)


def carried(site: ApproxFactor, shift: Array, factor: Array) -> ApproxFactor:
    """Return an approximate factor in coordinates v, where ``u = shift + factor v``."""
    linear, precision = site
    if precision.ndim == 1:
        return ApproxFactor(factor * (linear - precision * shift), factor**2 * precision)
    return ApproxFactor(factor.T @ (linear - precision @ shift), factor.T @ precision @ factor)


@jax.jit
def product(site: ApproxFactor) -> tuple[Array, Array, Array, Array]:
    """Return the new q in the old one's coordinates, within the limits of a step.

    :return: mean; square root of the covariance; largest move, in sds and log sds; and true where a
        limit held q back.
    """
    linear, precision = site
    if precision.ndim == 1:
        values, vectors = precision, None
    else:
        values, vectors = jnp.linalg.eigh(0.5 * (precision + precision.T))
        linear = vectors.T @ linear
    # absolute values, so that the step goes uphill where q is no density
    curvature = jnp.maximum(jnp.abs(values), _FLATTEST)
    step = linear / curvature
    beyond = jnp.abs(step) / _FARTHEST
    # the farther a step exceeds its limit, the wider q becomes, up to twofold
    curvature = jnp.where(
        beyond > 1, jnp.maximum(jnp.minimum(curvature, beyond**-2), _FLATTEST), curvature
    )
    step = jnp.clip(step, -_FARTHEST, _FARTHEST)
    held = (beyond > 1).any() | (values < _FLATTEST).any()
    moved = jnp.maximum(jnp.abs(step).max(), 0.5 * jnp.abs(jnp.log(curvature)).max())
    if vectors is None:
        return step, curvature**-0.5, moved, held
    # QR avoids squares, which are too coarse in float32 where curvatures differ by 1e8
    upper = jnp.linalg.qr((vectors * curvature**-0.5).T, mode="r")
    return vectors @ step, (jnp.sign(jnp.diagonal(upper))[:, None] * upper).T, moved, held


def natural_step(
    history: History, total: ApproxFactor, accelerated: Array, averaged: bool = False
) -> tuple[Array, Array, Array, Array, History]:
    """Take the natural-gradient step of a full q.

    :param total: the sum of all approximate factors.
    :param accelerated: take the accelerated step, or else a share of the plain one, for factors
        that are old or have noise.
    :param averaged: let that share fall to a tenth, so that noise averages out over rounds.
    :return: mean and square root of the new q in the old one's coordinates, the move in sds, true
        where a limit held q back, and the history.
    """
    one = jnp.eye(len(total.linear))
    residual = ApproxFactor(total.linear, total.precision - one)
    step, later = history.step(residual)
    part = jnp.clip(_SLOWLY / (_SLOWLY + history.calm), _OLDEST, CAREFUL) if averaged else CAREFUL
    step = jax.tree.map(lambda x, y: jnp.where(accelerated, x, part * y), step, residual)
    loc, root, taken, held = product(ApproxFactor(step.linear, one + step.precision))
    moved, held_one = product(total)[2:]
    held, moved = (held, taken) if averaged else (held | held_one, moved)
    # steps with old factors of silos that did not answer, or at a limit, would mislead the history
    later = jax.tree.map(
        lambda x, y: jnp.where(accelerated & ~held, x, y), later, History.none(total)
    )
    later = later.carried(loc, root)._replace(calm=jnp.where(held, 0, history.calm + 1))
    return loc, root, moved, held, later


def newest(rounds: Array) -> Array:
    """Return the weight of a round's approximate factors in the average over rounds.

    The average is for factors with noise; the weights are one, two thirds, a half ... a tenth.
    """
    return jnp.maximum(_OLDEST, 2 / (2.0 + rounds))
