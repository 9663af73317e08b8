r"""A step size found during warm-up from the curvature that the chain meets and the noise of its
gradients.

Along a direction in which the target has precision :math:`\lambda` and the gradient's estimate has
noise of variance :math:`n`, the chain :math:`\theta \leftarrow \theta + \tfrac h2 \hat g + \sqrt
h\, \xi` has variance

.. math:: \frac{h + h^2 n / 4}{1 - (1 - h\lambda/2)^2} = \frac1\lambda \cdot \frac{1 + h n / 4}{1 - h \lambda / 4}
          \approx \frac1\lambda \left( 1 + \tfrac h4 (\lambda + n) \right),

so its sd is a factor 1 + b too large at :math:`h = 8 b / (\lambda + n)`: the rule of *accepted
bias*, as in :mod:`numpyro_fed.mcmc.pilot`, from what the chain meets. The largest :math:`\lambda`
is found by the power method, with one product of the Hessian with a vector at every state that the
warm-up visits (its size counts where the density is not log-concave); n along that direction by the
difference of two independent estimates. Far from the mode, where the squared gradient g along it
exceeds the precision that it has at stationarity, the expected squared distance after a step is
least for a step of order :math:`g / (\lambda (g + n))`, so n counts with a factor :math:`\lambda /
g` there. All are averages in which the state of step t has a weight of order :math:`t^3`, so that
the way to the typical set is forgotten.

Methods that adapt to an acceptance probability (Titsias, Dellaportas 2019, which the push-sum paper
uses) do not see the bias of a chain that rejects nothing; tests/benchmarks/step_size.py runs both
side by side.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_fed.rounds.federated import Cost

__all__ = ["Adaptation", "adapt", "begin", "check_seen", "first_looks", "look_cost"]

_FORGET = 4.0
_FIRST_LOOKS = 20  # of the power method at the start
_TINY = 1e-30


class Adaptation(NamedTuple):
    """What warm-up has learned, and how a step size follows from it.

    :param left: adaptations still to be made.
    :param seen: states seen.
    :param product: average of Hessian times direction, ``(d,)``; its direction is the stiffest, its
        norm the largest precision.
    :param noise: average variance of the gradient's estimate along it.
    :param signal: average square of the gradient along it; at stationarity that is the precision.
    :param price: relative inflation of the sd for each unit of step size times precision, and times
        noise ``(2,)``.
    :param bias_target: the relative inflation to aim at.
    """

    left: Array
    seen: Array
    product: Array
    noise: Array
    signal: Array
    price: Array
    bias_target: Array

    @property
    def step_size(self) -> Array:
        """The step at which the sd along the stiffest direction is a factor ``1 + bias_target`` too
        large.
        """
        precision = jnp.linalg.norm(self.product)
        # far from the mode gradients and their noise are large, but a long step is then worth its
        # noise; two standard errors of the average (0.44 of the looks count) keep noise from being
        # taken for distance
        signal = self.signal - 2 * self.noise / jnp.sqrt(0.44 * self.seen + 1)
        noise = self.noise * precision / jnp.maximum(precision, signal)
        return self.bias_target / (self.price[0] * precision + self.price[1] * noise)


def begin(
    key: Array, dim: int, price: tuple[float, float], bias_target: float, rounds: int, dtype: Any
) -> Adaptation:
    """Nothing learned yet, and so many adaptations to be made."""
    return Adaptation(
        left=jnp.asarray(rounds, jnp.int32),
        seen=jnp.zeros((), dtype),
        product=random.normal(key, (dim,), dtype),
        noise=jnp.zeros((), dtype),
        signal=jnp.zeros((), dtype),
        price=jnp.asarray(price, dtype),
        bias_target=jnp.asarray(bias_target, dtype),
    )


def adapt(
    adaptation: Adaptation, estimate: Callable[[Array], tuple[Array, Array]], theta: Array
) -> Adaptation:
    """One state of the warm-up seen; nothing once ``left`` is zero.

    :param estimate: a function of theta that returns two independent estimates of the gradient,
        ``(d,)`` each.
    """

    def learn(old: Adaptation) -> Adaptation:
        direction = old.product / jnp.maximum(jnp.linalg.norm(old.product), _TINY)
        (first, second), (along, _) = jax.jvp(estimate, (theta,), (direction,))
        weight = _FORGET / (old.seen + _FORGET)
        bent = jnp.where(
            jnp.dot(direction, along) > 0, along, -along
        )  # by its size where the density is not log-concave
        product = old.product + weight * (bent - old.product)
        noise = old.noise + weight * (0.5 * jnp.dot(first - second, direction) ** 2 - old.noise)
        square = jnp.dot(first, direction) * jnp.dot(second, direction)
        signal = old.signal + weight * (square - old.signal)
        good = jnp.isfinite(product).all() & jnp.isfinite(noise) & (jnp.linalg.norm(product) > 0)
        return old._replace(
            left=old.left - 1,  # one clock for all chains, so that none adapts after warm-up
            seen=jnp.where(good, old.seen + 1, old.seen),
            product=jnp.where(good, product, old.product),
            noise=jnp.where(good, noise, old.noise),
            signal=jnp.where(good, signal, old.signal),
        )

    return lax.cond(adaptation.left > 0, learn, lambda old: old, adaptation)


def first_looks(
    adaptation: Adaptation, look: Callable[[Array, Adaptation], Adaptation]
) -> Adaptation:
    """Look around at the start, before the first step.

    The adaptations of warm-up are still to be made.

    :param look: a function of the look's number and what is known.
    """
    seen = lax.fori_loop(
        0,
        _FIRST_LOOKS,
        look,
        adaptation._replace(left=jnp.full_like(adaptation.left, _FIRST_LOOKS)),
    )
    return seen._replace(left=adaptation.left)


def check_seen(adaptation: Adaptation) -> None:
    """Refuse a start at which no look was finite."""
    if (
        not isinstance(adaptation.seen, jax.core.Tracer)
        and not (np.asarray(adaptation.seen) > 0).all()
    ):
        raise ValueError(
            "the model's curvature is not finite at the start, so no step size can be learned; "
            "expected finite gradients at "
            "init_params (by default uniform on (-2, 2)), or step_size= a number"
        )


def look_cost(adaptation: Adaptation, dim: int) -> Cost:
    """What the looks cost each silo, of all chains.

    Two gradients and a product of the Hessian, at a position along a direction.
    """
    looks, item = int(np.sum(np.asarray(adaptation.seen))), adaptation.product.dtype.itemsize
    return Cost(1, 3, 2 * dim * item, 3 * dim * item).times(looks)
