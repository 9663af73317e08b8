r"""Differential privacy of a silo's rows in SFVI: its gradient is cut and noised before it leaves.

What a silo says in a round is the gradient g of its part of the bound in theta, in the coordinates
whitened by q, and in the learned parameters. With privacy it says

.. math:: h \, (k + Z), \qquad k = \lfloor g \min(1, C / |g|) / h \rfloor \text{ towards zero},

with a grid h that is a power of two and draws Z of the discrete Gaussian
(:mod:`~numpyro_fed.privacy.discrete_gaussian`), and nothing else: not its part of the bound, nor
whether its numbers are finite. That |k| is at most C / h is checked in whole numbers, so if all
rows of a silo were others (so many, though: their number is told), k would move by at most 2 C / h.
Whole numbers plus whole numbers have no low bits that give reals away, as floating point has
(Mironov 2012).

With noise of sd sigma C a round is rho-zCDP with :math:`\rho = 2 / \sigma^2`, in any dimension
and also where a round depends on the replies before; rounds add up (Canonne, Kamath & Steinke
2020). dp-accounting turns that into an epsilon at a delta. Where only sums are seen each of S
silos adds a share of variance 1 / S. A sum of discrete Gaussians is one of the summed variance, but
for terms of :math:`10 S \exp(-\pi^2 t^2)` with t a share's sd in units of h (Kairouz, Liu & Steinke
2021): t is at least 100.

Silos at hand, in one process, have JAX's noise of the same sd (:func:`noised`): it shows what a
federation would get, and promises nothing.

What it costs: a gradient of norm above C is cut, which moves the optimum towards that of silos that
weigh alike; and the noise of the averaged rounds moves q's mean, in its sds by about
:func:`expected_error`. That number does not depend on T, as noise for more rounds is larger, and
grows with the root of the number of silos, unless only their sum is seen (``secure_sum``): then
each adds its share, and it falls.

References: Canonne, Kamath & Steinke (2020), The discrete Gaussian for differential privacy,
NeurIPS; Kairouz, Liu & Steinke (2021), The distributed discrete Gaussian mechanism for federated
learning with secure aggregation, ICML; Mironov (2012), On significance of the least significant
bits for differential privacy, CCS; clipped and noised updates of a whole client: McMahan, Ramage,
Talwar & Zhang (2018), ICLR.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, random

from numpyro_fed.privacy.discrete_gaussian import MOST_SD, Words, discrete_gaussian
from numpyro_fed.privacy.secure_sum import LARGEST
from numpyro_fed.rounds.serialization import wire_name

__all__ = ["Noise", "Privacy", "Spent", "expected_error", "noised", "noised_exactly"]

_FINE = 13  # bits of C in units of the grid: what cutting towards zero moves is 1e-4 of C
_SUMMED = 2.0**-20  # the grid of sums: secure_sum's fixed point
_FEWEST = 256  # units of the grid that C has at least
_LEAST_SHARE = 100  # units that the sd of a share of the noise has at least
_ORDERS = (*(1 + i / 20 for i in range(1, 200)), *range(11, 512))  # of Renyi divergences

_TAIL_VARIANCE = 81 / 17  # of the average with weights t^8, times the number of rounds


def _accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            'privacy= needs dp-accounting: pip install "numpyro-fed[privacy]"'
        ) from error
    return dp_accounting


def _epsilon(rho: float, delta: float) -> float:
    """Return the epsilon of a rho-zCDP mechanism at a delta."""
    event = _accounting().ZCDpEvent(rho)
    return float(_accounting().rdp.RdpAccountant(_ORDERS).compose(event).get_epsilon(delta))


@lru_cache(maxsize=64)
def _rho(epsilon: float, delta: float) -> float:
    """Return the largest rho whose epsilon at a delta is at most ``epsilon``, to 1e-9 of it."""
    low, high = 1e-12, 1e6
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _epsilon(middle, delta) <= epsilon else (low, middle)
    return low


class Noise(NamedTuple):
    """What a silo does to its gradient.

    :param clip: the largest norm.
    :param sd: of what it adds to each number; a whole number of units of ``grid``.
    :param grid: on which its numbers are, a power of two.
    """

    clip: float
    sd: float
    grid: float = _SUMMED


@wire_name("Privacy")
@dataclass(frozen=True)
class Privacy:
    """A budget of (epsilon, delta)-differential privacy for the rows of each silo, all of them
    together.

    A silo whose rows were all others would send replies whose probabilities differ by at most a
    factor ``exp(epsilon)``, but for events of probability ``delta``. That holds against whoever
    sees all replies of ``num_rounds`` rounds, whatever else he knows; of numbers of rows, names,
    types and shared arguments it says nothing.

    :param epsilon: the budget of a silo.
    :param delta: likewise; below one over the number of persons, as a rule far below.
    :param clip: C, the largest norm of a silo's gradient in coordinates whitened by q (nats per
        posterior sd). Near the optimum of S silos alike with d global numbers these norms are about
        ``sqrt(2 d / S)``: a start for it. Choosing it by looking at the rows spends privacy that
        nobody counts.
    :param num_rounds: rounds that the budget is for; a fit may make fewer and have spent less.
    :raises ValueError: for numbers out of range.
    :raises ImportError: without dp-accounting.

    Example::

        >>> import numpyro_fed as fed
        >>> privacy = fed.Privacy(epsilon=4.0, delta=1e-5, clip=0.5, num_rounds=400)
        >>> round(privacy.noise_multiplier, 1), round(privacy.spent(100), 2)
        (46.3, 1.84)
    """

    epsilon: float
    delta: float
    clip: float
    num_rounds: int

    def __post_init__(self) -> None:
        for name in ("epsilon", "clip"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < math.inf
            ):
                raise ValueError(f"{name}: expected a number > 0, got {value!r}")
        if (
            isinstance(self.delta, bool)
            or not isinstance(self.delta, int | float)
            or not 0 < self.delta < 1
        ):
            raise ValueError(f"delta: expected a probability in (0, 1), got {self.delta!r}")
        if (
            isinstance(self.num_rounds, bool)
            or not isinstance(self.num_rounds, int)
            or self.num_rounds < 1
        ):
            raise ValueError(f"num_rounds: expected a whole number >= 1, got {self.num_rounds!r}")
        _accounting()

    @property
    def noise_multiplier(self) -> float:
        """Sigma: sd of the noise in each number of a round's reply, over ``clip``."""
        return math.sqrt(2 * self.num_rounds / _rho(self.epsilon, self.delta))

    def spent(self, num_rounds: int) -> float:
        """Return epsilon after so many rounds, at ``delta``."""
        return (
            _epsilon(2 * num_rounds / self.noise_multiplier**2, self.delta) if num_rounds else 0.0
        )

    def noise(self, num_sharing: int) -> Noise:
        """Return what a silo does.

        :param num_sharing: silos that add a share each to a sum of which nobody sees the terms,
            else one.
        :raises ValueError: where ``clip`` or a share is too small for the grid of sums.
        """
        grid = 2.0 ** (math.floor(math.log2(self.clip)) - _FINE)
        grid = max(grid, _SUMMED) if num_sharing > 1 else grid
        real = self.noise_multiplier * self.clip / math.sqrt(num_sharing)
        while (
            real / grid > MOST_SD
        ):  # of a tiny epsilon, beside whose noise a coarser grid is nothing
            grid *= 2
        sd = math.ceil(real / grid)
        if num_sharing > 1 and self.clip + 40 * sd * grid > LARGEST:
            raise ValueError(
                f"clip={self.clip:g}: noise goes beyond {LARGEST:g}, the largest number of a sum; "
                "expected a smaller clip"
            )
        if self.clip / grid < _FEWEST or (num_sharing > 1 and sd < _LEAST_SHARE):
            raise ValueError(
                f"clip={self.clip:g}: numbers are on a grid of {grid:.3g}, on which that is too "
                "little to be cut to, or noise shared by "
                f"{num_sharing} silos too little to be drawn; expected a clip of "
                f"{_FEWEST * grid:.3g} at least, and epsilon smaller"
            )
        return Noise(float(self.clip), sd * grid, grid)


class Spent(NamedTuple):
    """What a fit spent of a budget, and what it paid for it.

    :param epsilon: of a silo that was asked in every round, at ``delta``. A round that was broken
        off is in the silo's own count and not here.
    :param delta: as of the budget.
    :param clip: likewise.
    :param rounds: of the fit.
    :param budget: epsilon of the budget.
    :param error: about how many of its sds the noise moves q's mean, in each direction.
    :param simulated: whether the noise is that of silos at hand, which promises nothing.
    """

    epsilon: float
    delta: float
    clip: float
    rounds: int
    budget: float
    error: float
    simulated: bool = False

    def __str__(self) -> str:
        simulated = (
            ", simulated (silos at hand: it shows what it costs and promises nothing)"
            if self.simulated
            else ""
        )
        return (
            f"privacy of each silo's rows{simulated}: epsilon {self.epsilon:.3g} of "
            f"{self.budget:.3g} at delta {self.delta:.1g}, gradients cut to norm {self.clip:g}; "
            f"its noise moves means by about {self.error:.2g} posterior sds"
        )


def expected_error(noise: Noise, num_silos: float, rounds: int) -> float:
    """About how many of its sds the noise of so many rounds moves q's mean, in each direction.

    In coordinates whitened by q the bound's curvature at its optimum is one, so that a mean
    gradient of e moves the optimum by e; the parameters' average over the last rounds sees the
    noise of these. The optimizer has to be fast enough to follow: one that is slow stays where it
    started.

    :param num_silos: where not all take part, the sum of one over their probabilities: replies are
        weighted by these.
    """
    return noise.sd * math.sqrt(num_silos * _TAIL_VARIANCE / rounds)


def noised(noise: Noise, key: Array, gradient: Any) -> Any:
    """Cut a pytree to a norm and add JAX's normal noise: for silos at hand.

    A gradient that is not finite counts as zero. Its low bits give more away than the noise hides.
    """
    gradient = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), gradient)
    norm = optax.tree.norm(gradient)
    shrink = jnp.minimum(1.0, noise.clip / jnp.maximum(norm, 1e-30))
    leaves, tree = jax.tree.flatten(gradient)
    keys = random.split(key, len(leaves))
    out = [
        jnp.where(jnp.isfinite(norm), shrink * x, 0.0)
        + noise.sd * random.normal(k, x.shape, norm.dtype)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, out)


def noised_exactly(noise: Noise, words: Words, gradient: Any) -> Any:
    """Cut a pytree of arrays to a norm, on the grid, and add the discrete Gaussian: in the silo.

    :param words: of one call alone.
    :return: float64 numbers, each a whole multiple of the grid.
    """
    leaves, tree = jax.tree.flatten(gradient)
    flat = np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])
    told = cut_to_grid(noise, flat) + discrete_gaussian(
        words, round(noise.sd / noise.grid), len(flat)
    )
    parts = np.split(told * noise.grid, np.cumsum([np.size(x) for x in leaves])[:-1])
    return jax.tree.unflatten(
        tree, [part.reshape(np.shape(x)) for part, x in zip(parts, leaves, strict=True)]
    )


def cut_to_grid(noise: Noise, x: np.ndarray) -> np.ndarray:
    """Return whole numbers of the grid, towards zero, whose norm is at most ``clip``.

    Zeros for NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(x))
    if not math.isfinite(norm):
        return np.zeros(len(x), np.int64)
    # a hair below, so that rounding does not matter; in one step, whose time tells nothing of the
    # rows
    most = math.floor(noise.clip / noise.grid)
    scale = min(1.0, most * noise.grid * (1 - 1e-12) / norm) if norm > 0 else 1.0
    whole = np.trunc(x * scale / noise.grid).astype(np.int64)
    if (
        sum(k * k for k in whole.tolist()) > most * most
    ):  # of whole numbers, whatever was rounded before
        raise ValueError(
            "a gradient is longer than it was cut to; expected float64 arithmetic as IEEE has it"
        )
    return whole
