r"""Step size learned in warm-up from the curvature and gradient noise that the chain meets.

Along a direction in which the target has precision :math:`\lambda` and the gradient estimate has
noise of variance :math:`n`, the chain :math:`\theta \leftarrow \theta + \tfrac h2 \hat g + \sqrt
h\, \xi` has variance

.. math::
    \frac{h + h^2 n / 4}{1 - (1 - h\lambda/2)^2}
    = \frac1\lambda \cdot \frac{1 + h n / 4}{1 - h \lambda / 4}
    \approx \frac1\lambda \left( 1 + \tfrac h4 (\lambda + n) \right),

so its standard deviation (sd) is a factor 1 + b too large at :math:`h = 8 b / (\lambda + n)`. This
is the rule of *accepted bias* of :mod:`numpyro_fed.mcmc.pilot`, applied to what the chain meets.

The power method finds the largest :math:`\lambda` with one Hessian-vector product at every state of
the warm-up. Where the density is not log-concave, the size of the product counts. The difference of
two independent gradient estimates gives n along that direction. One such measurement is a *look*.

Far from the mode, the squared gradient g along the direction exceeds the precision, its value at
stationarity. There a step of order :math:`g / (\lambda (g + n))` gives the least expected squared
distance, so n counts with a factor :math:`\lambda / g`. All averages give the state of step t a
weight of order :math:`t^3`, so that they forget the way to the typical set.

Methods that adapt to an acceptance probability do not see the bias of a chain without rejections.
The push-sum paper uses such a method (Titsias, Dellaportas 2019). The benchmark
tests/benchmarks/step_size.py runs both side by side.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import DTypeLike

from numpyro_fed.rounds.federated import Cost

# look n has weight 4 / (n + 4) when it comes, so of order n^3 in the end: the first half of the
# looks has 6 % of the weight, and 7/16 of all looks are effective
_FORGET = 4.0
# steps of the power method at the start; the curvature found was .82 to 1 of the largest in 95 % of
# starts, for 5 to 100 eigenvalues spread evenly or by factors
_FIRST_LOOKS = 20
_TINY = 1e-30  # keeps a direction of no curvature from a division by zero


class Adaptation(NamedTuple):
    """Memory of the adaptation in warm-up, from which the step size follows.

    :param left: number of adaptations left to make.
    :param seen: number of looks so far.
    :param product: average Hessian-vector product ``(d,)``; its direction is the stiffest, its norm
        the largest precision.
    :param noise: average variance of the gradient estimate along that direction.
    :param signal: average squared gradient along it, which equals the precision at stationarity.
    :param price: relative inflation of the sd per unit of step size, times precision and times
        noise ``(2,)``.
    :param bias_target: relative inflation to aim at.
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
        """Step size that inflates the stiffest direction's sd by a factor ``1 + bias_target``."""
        precision = jnp.linalg.norm(self.product)
        # far from the mode a long step is worth its noise; two standard errors of the average (0.44
        # of the looks count) keep noise from passing for distance
        signal = self.signal - 2 * self.noise / jnp.sqrt(0.44 * self.seen + 1)
        noise = self.noise * precision / jnp.maximum(precision, signal)
        return self.bias_target / (self.price[0] * precision + self.price[1] * noise)


def begin(
    key: Array,
    dim: int,
    price: tuple[float, float],
    bias_target: float,
    rounds: int,
    dtype: DTypeLike,
) -> Adaptation:
    """Return the initial memory, with ``rounds`` adaptations left to make."""
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
    """Update the memory by one look, unless ``left`` is zero.

    :param estimate: a function of theta that returns two independent gradient estimates, ``(d,)``
        each.
    """

    def learn(old: Adaptation) -> Adaptation:
        direction = old.product / jnp.maximum(jnp.linalg.norm(old.product), _TINY)
        (first, second), (along, _) = jax.jvp(estimate, (theta,), (direction,))
        weight = _FORGET / (old.seen + _FORGET)
        bent = jnp.where(
            jnp.dot(direction, along) > 0, along, -along
        )  # where the density is not log-concave, the size of the curvature counts
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
    """Look at the start, before the first step, and leave the adaptations of warm-up to be made.

    :param look: a function of the look's number and the memory so far.
    """
    seen = lax.fori_loop(
        0,
        _FIRST_LOOKS,
        look,
        adaptation._replace(left=jnp.full_like(adaptation.left, _FIRST_LOOKS)),
    )
    return seen._replace(left=adaptation.left)


def check_seen(adaptation: Adaptation) -> None:
    """Raise an error if no look at the start was finite."""
    if (
        not isinstance(adaptation.seen, jax.core.Tracer)
        and not (np.asarray(adaptation.seen) > 0).all()
    ):
        raise ValueError(
            "the model's curvature is not finite at the start, so no step size can be learned; "
            "expected finite gradients at init_params (by default uniform on (-2, 2)), or a number "
            "as step_size="
        )


def look_cost(adaptation: Adaptation, dim: int) -> Cost:
    """Return the cost of all chains' looks for each silo.

    A look sends a position and a direction to a silo, which sends back two gradients and a
    Hessian-vector product.
    """
    looks, item = int(np.sum(np.asarray(adaptation.seen))), adaptation.product.dtype.itemsize
    return Cost(1, 3, 2 * dim * item, 3 * dim * item).times(looks)
