r"""Differential privacy of a silo's rows in SFVI: its gradient is cut to a norm, and noise is added, before it leaves.

What a silo says in a round is the gradient g of its part of the bound in theta, in the coordinates whitened by q, and in the learned parameters. With privacy it says

.. math:: g \min(1, C / |g|) + \sigma C \, N(0, I),

and nothing else: not its part of the bound, nor whether its numbers are finite. If all rows of a silo were others (so many, though: their number is told), the first
term would move by at most 2 C. T rounds, each of which may depend on the replies before, are exactly as private as one Gaussian mechanism with noise
:math:`\sigma \sqrt T / 2` times the sensitivity (Dong, Roth & Su 2022, corollary 2), whose epsilon at a delta is that of Balle & Wang (2018), as dp-accounting computes it.

What it costs: a gradient of norm above C is cut, which moves the optimum towards that of silos that weigh alike; and the noise of the averaged rounds moves q's mean, in its sds by about
:func:`expected_error`. That number does not depend on T, as noise for more rounds is larger, and grows with the root of the number of silos, unless only
their sum is seen (``secure_sum``): then each adds its share, and it falls.

References: Dong, Roth & Su (2022), Gaussian differential privacy, JRSS B 84; Balle & Wang (2018), Improving the Gaussian mechanism for differential privacy, ICML;
clipped and noised updates of a whole client: McMahan, Ramage, Talwar & Zhang (2018), ICLR.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, random

from numpyro_fed.engines.packing import wire_name

__all__ = ["Noise", "Privacy", "Spent", "expected_error", "noised"]

_TAIL_VARIANCE = 81 / 17  # of the average with weights t^8, times the number of rounds


def _accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError('privacy= needs dp-accounting: pip install "numpyro-fed[privacy]"') from error
    return dp_accounting


class Noise(NamedTuple):
    """What a silo does to its gradient: the largest norm, and the sd of what it adds to each number."""

    clip: float
    sd: float


@wire_name("Privacy")
@dataclass(frozen=True)
class Privacy:
    """A budget of (epsilon, delta)-differential privacy for the rows of each silo, all of them together.

    A silo whose rows were all others would send replies whose probabilities differ by at most a factor ``exp(epsilon)``, but for events of probability ``delta``. That
    holds against whoever sees all replies of ``num_rounds`` rounds, whatever else he knows; of numbers of rows, names, types and shared arguments it says nothing.

    :param epsilon: the budget of a silo.
    :param delta: likewise; below one over the number of persons, as a rule far below.
    :param clip: C, the largest norm of a silo's gradient in coordinates whitened by q (nats per posterior sd). Near the optimum of S silos alike with d global numbers these norms
        are about ``sqrt(2 d / S)``: a start for it. Choosing it by looking at the rows spends privacy that nobody counts.
    :param num_rounds: rounds that the budget is for; a fit may make fewer and have spent less.
    :raises ValueError: for numbers out of range.
    :raises ImportError: without dp-accounting.

    Example::

        >>> import numpyro_fed as fed
        >>> privacy = fed.Privacy(epsilon=4.0, delta=1e-5, clip=0.5, num_rounds=400)
        >>> round(privacy.noise_multiplier, 1), round(privacy.spent(100), 2)
        (43.2, 1.83)
    """

    epsilon: float
    delta: float
    clip: float
    num_rounds: int

    def __post_init__(self) -> None:
        for name in ("epsilon", "clip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a number > 0, got {value!r}")
        if isinstance(self.delta, bool) or not isinstance(self.delta, int | float) or not 0 < self.delta < 1:
            raise ValueError(f"delta: expected a probability in (0, 1), got {self.delta!r}")
        if isinstance(self.num_rounds, bool) or not isinstance(self.num_rounds, int) or self.num_rounds < 1:
            raise ValueError(f"num_rounds: expected a whole number >= 1, got {self.num_rounds!r}")
        _accounting()

    @property
    def noise_multiplier(self) -> float:
        """Sigma: sd of the noise in each number of a round's reply, over ``clip``."""
        return 2 * math.sqrt(self.num_rounds) * float(_accounting().get_sigma_gaussian(self.epsilon, self.delta))

    def spent(self, num_rounds: int) -> float:
        """Epsilon after so many rounds, at ``delta``."""
        if num_rounds == 0:
            return 0.0
        of_all = self.noise_multiplier / (2 * math.sqrt(num_rounds))
        return float(_accounting().get_epsilon_gaussian(of_all, self.delta))

    def noise(self, num_sharing: int) -> Noise:
        """What a silo does, where so many add a share each to a sum of which nobody sees the terms (else one)."""
        return Noise(float(self.clip), self.noise_multiplier * self.clip / math.sqrt(num_sharing))


class Spent(NamedTuple):
    """What a fit spent of a budget, and what it paid for it.

    :param epsilon: of a silo that was asked in every round, at ``delta``. A round that was broken off is in the silo's own count and not here.
    :param delta: as of the budget.
    :param clip: likewise.
    :param rounds: of the fit.
    :param budget: epsilon of the budget.
    :param error: about how many of its sds the noise moves q's mean, in each direction.
    """

    epsilon: float
    delta: float
    clip: float
    rounds: int
    budget: float
    error: float

    def __str__(self) -> str:
        return (
            f"privacy of each silo's rows: epsilon {self.epsilon:.3g} of {self.budget:.3g} at delta {self.delta:.1g}, gradients cut to norm {self.clip:g}; "
            f"its noise moves means by about {self.error:.2g} posterior sds"
        )


def expected_error(noise: Noise, num_silos: float, rounds: int) -> float:
    """About how many of its sds the noise of so many rounds moves q's mean, in each direction.

    In coordinates whitened by q the bound's curvature at its optimum is one, so that a mean gradient of e moves the optimum by e; the parameters' average over the
    last rounds sees the noise of these. The optimiser has to be fast enough to follow: one that is slow stays where it started.

    :param num_silos: where not all take part, the sum of one over their probabilities: replies are weighted by these.
    """
    return noise.sd * math.sqrt(num_silos * _TAIL_VARIANCE / rounds)


def noised(noise: Noise, key: Array, gradient: Any) -> Any:
    """A pytree cut to a norm, with noise, both in float32 at least; one that is not finite counts as zero."""
    gradient = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), gradient)
    norm = optax.tree.norm(gradient)
    shrink = jnp.minimum(1.0, noise.clip / jnp.maximum(norm, 1e-30))
    leaves, tree = jax.tree.flatten(gradient)
    keys = random.split(key, len(leaves))
    out = [
        jnp.where(jnp.isfinite(norm), shrink * x, 0.0) + noise.sd * random.normal(k, x.shape, norm.dtype)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, out)
