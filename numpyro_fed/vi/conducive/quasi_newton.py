r"""Quasi-Newton steps of a diagonal q toward the pooled optimum, from scores alone.

This is L-BFGS at the server, which costs no message. The mean follows the pooled score :math:`E_q
\nabla \log p(\theta, y)`, and the precisions follow its curvature. Diagonal factors carry no
correlations. The inverse curvature is built up from the steps and changes of the score in the last
ten rounds (Liu & Nocedal 1989), starting from q's variances.

A step after which the bound is lower by more than its noise is taken back to three tenths, three
times at most. Approximate factors have noise where points or rows change from round to round, and
from draws of latents. Curvatures are then averaged over about ten rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.surrogates.natural_step import CAREFUL, ApproxFactor, newest

# pairs of steps and changes in the memory: logistic regression with 60 correlated coefficients took
# 54 rounds with 3, 52 with 10, 49 with 20, which keep twice the numbers
_DEPTH = 10
# most sds that q moves in a round, root mean square over dimensions: as for a full q, beyond which
# scores were not evaluated
_FARTHEST = 3.0
# largest factor by which an sd grows or shrinks in a round, 57 in ten rounds; with 1.2 or 4 the
# same regression took 51
_WIDEST = 1.5
# share of a step that is tried after it failed; after three failures .3^3 is taken. With .1 the
# same regression took 53
_BACK = 0.3
_OWN_NOISE = 0.05  # noise from the silos' own parameters, as a share of the bound
# share of a step at which it is no longer taken back: a bound that is lower however short the step
# is noise
_SHORTEST = 0.05


class Move(NamedTuple):
    """A step of q.

    :param loc: the new mean, ``(d,)``.
    :param scale: the new sds, ``(d,)``.
    :param moved: length of the step in sds: of the farthest coordinate, or with noise the root mean
        square.
    :param held: whether the step was shortened.
    """

    loc: Array
    scale: Array
    moved: Array
    held: Array


@wire_name("Memory")
class Memory(NamedTuple):
    """Record of the rounds before, in theta's units.

    :param steps: steps of the mean, ``(m, d)``, the last first.
    :param changes: minus the changes of the score along these steps, ``(m, d)``.
    :param precision: average of the precisions, ``(d,)``.
    :param loc: mean of q in the last accepted round.
    :param scale: sds of q in that round.
    :param score: score in that round.
    :param bound: bound in that round.
    :param step: the full step from there.
    :param known: whether there was such a round, with replies of all silos.
    :param share: the share of ``step`` that was tried last.
    :param rounds: number of accepted rounds.
    """

    steps: Array
    changes: Array
    precision: Array
    loc: Array
    scale: Array
    score: Array
    bound: Array
    step: Array
    known: Array
    share: Array
    rounds: Array

    @staticmethod
    def none(dim: int) -> "Memory":
        """Return an empty record."""
        zero, several = jnp.zeros(dim), jnp.zeros((_DEPTH, dim))
        one = jnp.ones(())
        return Memory(
            several, several, zero, zero, zero + 1, zero, -jnp.inf * one, zero,
            jnp.array(False), one, jnp.zeros((), jnp.int32),
        )  # fmt: skip

    def move(
        self,
        loc: Array,
        scale: Array,
        total: ApproxFactor,
        bound: Array,
        everyone: Array,
        noisy: bool,
        moving: bool = False,
    ) -> tuple[Move, "Memory"]:
        """Return the next q and the record.

        :param loc: q's mean, ``(d,)``.
        :param scale: q's sds, ``(d,)``.
        :param total: sum of all approximate factors, whitened by this q.
        :param bound: the bound at this q.
        :param everyone: whether all silos answered; if not, old factors stand for some, and bounds
            cannot be compared.
        :param noisy: whether approximate factors have noise.
        :param moving: whether silos' own parameters move, too.
        """
        score, found = total.linear / scale, total.precision / scale**2
        compared = self.known & everyone
        steps, changes = self._with(compared, loc - self.loc, self.score - score)
        # silos' own parameters also move the bound, and add noise that does not depend on d
        slack = 2.0 + 0.5 * len(loc) ** 0.5 + (_OWN_NOISE * jnp.abs(self.bound) if moving else 0.0)
        # the noise of a bound from changing points is about that of d squares; where it is larger,
        # the bound stays lower however short the step, and is accepted
        worse = compared & (bound < self.bound - slack) & (self.share > _SHORTEST)
        weight = newest(self.rounds) if noisy else 1.0
        precision = self.precision + weight * (found - self.precision)
        step = _step(steps, changes, score, scale)
        length = jnp.linalg.norm(step / scale)
        most = _FARTHEST * len(loc) ** 0.5
        step = (
            step
            * jnp.minimum(1.0, most / jnp.maximum(length, 1e-30))
            * jnp.where(everyone, 1.0, CAREFUL)
        )
        wanted = jnp.where(precision > 0, precision, 0.0) ** -0.5
        new = jnp.clip(wanted, scale / _WIDEST, scale * _WIDEST)
        share = _BACK * self.share
        taken = jnp.where(worse, share * self.step, step)
        growth = jnp.log((new if noisy else wanted) / scale)
        size = jnp.maximum(
            *(
                _size(x, noisy)
                for x in (jnp.where(worse, self.step, step) / scale, jnp.where(worse, 0.0, growth))
            )
        )
        ahead = Memory(
            steps,
            changes,
            precision,
            loc,
            scale,
            score,
            bound,
            step,
            everyone,
            jnp.ones(()),
            self.rounds + 1,
        )
        back = self._replace(steps=steps, changes=changes, share=share)
        memory = jax.tree.map(lambda x, y: jnp.where(worse, x, y), back, ahead)
        start = jnp.where(worse, self.loc, loc)
        return Move(
            start + taken, jnp.where(worse, self.scale, new), size, worse | (length > most)
        ), memory

    def _with(self, compared: Array, step: Array, change: Array) -> tuple[Array, Array]:
        """Return the steps and changes with one more pair, if the score fell along it."""
        along = step @ change
        good = compared & (along > 1e-4 * jnp.linalg.norm(step) * jnp.linalg.norm(change))

        def push(several: Array, new: Array) -> Array:
            return jnp.where(good, jnp.concatenate([new[None], several[:-1]]), several)

        return push(self.steps, step), push(self.changes, change)


def _size(x: Array, noisy: bool) -> Array:
    return jnp.sqrt(jnp.mean(x**2)) if noisy else jnp.abs(x).max()


def _step(steps: Array, changes: Array, score: Array, scale: Array) -> Array:
    """Return the inverse curvature times the score.

    Its diagonal starts from q's variances, scaled by the last pair. The first step has no pair yet,
    and is short enough to be safe.
    """
    inner = jnp.sum(steps * changes, axis=1)
    rho = jnp.where(inner > 0, 1 / jnp.where(inner > 0, inner, 1.0), 0.0)
    shares = []
    for s, y, r in zip(steps, changes, rho, strict=True):
        shares.append(r * (s @ score))
        score = score - shares[-1] * y
    scaled = jnp.sum(changes[0] ** 2 * scale**2)
    length = jnp.where(
        inner[0] > 0, inner[0] / jnp.where(scaled > 0, scaled, 1.0), len(score) ** -0.5
    )
    step = length * scale**2 * score
    for s, y, r, share in list(zip(steps, changes, rho, shares, strict=True))[::-1]:
        step = step + s * (share - r * (y @ step))
    return step
