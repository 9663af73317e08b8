r"""Differential privacy of a silo's rows in SFVI, by clipping its gradient and adding noise to it.

In a round without privacy, a silo sends the gradient g of its part of the bound in theta, in the
coordinates whitened by q, and in the learned parameters. With privacy it sends

.. math:: h \, (k + Z), \qquad k = \lfloor g \min(1, C / |g|) / h \rfloor \text{ towards zero},

and nothing else: neither its part of the bound, nor whether its numbers are finite. The grid h is a
power of two, and Z are draws of the discrete Gaussian
(:mod:`~numpyro_fed.privacy.discrete_gaussian`). The silo checks in whole numbers that |k| is at
most C / h. If all rows of the silo changed, and not their number, k would therefore move by at most
2 C / h. Sums of whole numbers have no low bits that reveal real numbers; floating point has
(Mironov 2012).

With noise of sd sigma C a round is rho-zCDP with :math:`\rho = 2 / \sigma^2`. If the server sees
sums alone (``secure_sum``), each of S silos adds a share of variance 1 / S.

Inline silos, in one process, have JAX's noise of the same sd (:func:`noised`). It shows the result
of a federation, and protects nothing.

**Costs.** A gradient of norm above C is clipped, which moves the optimum towards that of silos with
equal weights. The noise of the averaged rounds moves q's mean by about :func:`expected_error` of
its sds. Derived in docs/derivations/privacy.md, which has the references. Clipped and noised
updates of a whole client: McMahan, Ramage, Talwar & Zhang (2018), ICLR.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.privacy.discrete_gaussian import MOST_SD, Words, discrete_gaussian
from numpyro_fed.privacy.extra import of_extra
from numpyro_fed.privacy.secure_sum import LARGEST, RESOLUTION
from numpyro_fed.rounds.serialization import wire_name

_FINE = 13  # bits of C in units of the grid: rounding towards zero moves a gradient by 1e-4 of C
# smallest C in units of the grid: rounding towards zero moves a gradient by at most .4 % of C
_FEWEST = 256
# smallest sd of a share of the noise in units of the grid: rounded up, it is 1 % too large at most,
# and the sum of shares is as good as one draw (10 S exp(-pi^2 t^2))
_LEAST_SHARE = 100
# of Renyi divergences; the best one is 1 + sqrt(log(1 / delta) / rho), for a delta of 1e-5 from 462
# (epsilon .05) to 1.8 (epsilon 50)
_ORDERS = (*(1 + i / 20 for i in range(1, 200)), *range(11, 512))
# of the average with weights t^8, times the number of rounds: (8 + 1)^2 / (2 x 8 + 1)
_TAIL_VARIANCE = 81 / 17


def _accounting() -> ModuleType:
    return of_extra("privacy=", "dp_accounting")


def _epsilon(rho: float, delta: float) -> float:
    """Return the epsilon of a rho-zCDP mechanism at a delta."""
    event = _accounting().ZCDpEvent(rho)
    return float(_accounting().rdp.RdpAccountant(_ORDERS).compose(event).get_epsilon(delta))


@lru_cache(maxsize=64)
def _rho(epsilon: float, delta: float) -> float:
    """Return the largest rho with at most ``epsilon`` at ``delta``, to a relative 1e-9."""
    low, high = 1e-12, 1e6
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _epsilon(middle, delta) <= epsilon else (low, middle)
    return low


class Noise(NamedTuple):
    """Clipping norm and noise of a silo's gradient.

    :param clip: largest norm of the gradient.
    :param sd: sd of the noise in each number; a whole multiple of ``grid``.
    :param grid: spacing of the numbers that leave the silo, a power of two.
    """

    clip: float
    sd: float
    grid: float = RESOLUTION


@wire_name("Privacy")
@dataclass(frozen=True)
class Privacy:
    """Budget of (epsilon, delta)-differential privacy for all rows of each silo together.

    If all rows of a silo changed, the probabilities of its replies would change by at most a factor
    ``exp(epsilon)``, up to events of probability ``delta``. This holds against an observer who sees
    all replies of ``num_rounds`` rounds, with any other knowledge. The budget does not cover
    numbers of rows, names, types and shared arguments.

    :param epsilon: epsilon of a silo.
    :param delta: delta of a silo; choose it far below one over the number of persons.
    :param clip: C, the largest norm of a silo's gradient in coordinates whitened by q (nats per
        posterior sd). Near the optimum of S equal silos with d global numbers these norms are about
        ``sqrt(2 d / S)``, a value to start with. A choice by looking at the rows spends privacy
        outside the budget.
    :param num_rounds: number of rounds in the budget; a fit with fewer spends less.
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
        for name, value in (("epsilon", self.epsilon), ("clip", self.clip)):
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
        """Ratio sigma of the sd of the noise in each number of a round's reply to ``clip``."""
        return math.sqrt(2 * self.num_rounds / _rho(self.epsilon, self.delta))

    def spent(self, num_rounds: int) -> float:
        """Return the epsilon that ``num_rounds`` rounds spend, at ``delta``."""
        return (
            _epsilon(2 * num_rounds / self.noise_multiplier**2, self.delta) if num_rounds else 0.0
        )

    def noise(self, num_sharing: int) -> Noise:
        """Return clipping norm, sd and grid of a silo's noise.

        :param num_sharing: number of silos that each add a share of the noise to a secure sum; one
            without secure sums.
        :raises ValueError: if ``clip`` or a share is too small for the grid of sums, or the noise
            too large.
        """
        grid = 2.0 ** (math.floor(math.log2(self.clip)) - _FINE)
        grid = max(grid, RESOLUTION) if num_sharing > 1 else grid
        real = self.noise_multiplier * self.clip / math.sqrt(num_sharing)
        while real / grid > MOST_SD:  # noise of a tiny epsilon is far larger than a coarser grid
            grid *= 2
        sd = math.ceil(real / grid)
        if num_sharing > 1 and self.clip + 40 * sd * grid > LARGEST:
            raise ValueError(
                f"clip={self.clip:g}: noise goes beyond {LARGEST:g}, the largest number of a sum; "
                "expected a smaller clip"
            )
        if self.clip / grid < _FEWEST or (num_sharing > 1 and sd < _LEAST_SHARE):
            raise ValueError(
                f"clip={self.clip:g}: numbers are on a grid of {grid:.3g}, where that norm, or the "
                f"noise shared by {num_sharing} silos, is too small; expected a clip of "
                f"{_FEWEST * grid:.3g} at least, and a smaller epsilon"
            )
        return Noise(float(self.clip), sd * grid, grid)


class Spent(NamedTuple):
    """Privacy that a fit spent of its budget, and the error that the noise causes.

    :param epsilon: epsilon that a silo with a call in every round spent, at ``delta``. A round that
        was interrupted is in the silo's own count and not here.
    :param delta: delta of the budget.
    :param clip: largest norm of a silo's gradient.
    :param rounds: number of rounds of the fit.
    :param budget: epsilon of the budget.
    :param error: typical shift of q's mean by the noise, in its sds, in each direction.
    :param simulated: whether the noise is that of inline silos, which protects nothing.
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
    """Return the approximate sd of q's mean due to the noise, in q's sds, in each direction.

    In coordinates whitened by q the bound's curvature at its optimum is one, so a mean gradient of
    e moves the optimum by e. The average of the parameters over the last rounds has the noise of
    these rounds. The optimizer must be fast enough to converge in these rounds.

    :param noise: clipping norm and noise of each silo.
    :param num_silos: number of silos; with partial participation, the sum of one over the silos'
        probabilities, by which replies are weighted.
    :param rounds: number of rounds.
    """
    return noise.sd * math.sqrt(num_silos * _TAIL_VARIANCE / rounds)


def noised(noise: Noise, key: Array, gradient: PyTree) -> PyTree:
    """Clip a pytree to a norm and add JAX's normal noise, for inline silos.

    A gradient that is not finite counts as zero. The low bits of the result reveal more than the
    noise hides.
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


def noised_exactly(noise: Noise, words: Words, gradient: PyTree) -> PyTree:
    """Clip a pytree of arrays to a norm on the grid and add the discrete Gaussian, in a silo.

    :param words: random words for one call alone.
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
    """Return a clipped array as whole multiples of the grid, rounded towards zero.

    The result has a norm of at most ``clip``. It is zero if the norm is not finite.

    :raises ValueError: if the result's norm exceeds ``clip``, by an error of the arithmetic.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(x))
    if not math.isfinite(norm):
        return np.zeros(len(x), np.int64)
    # slightly below, so that rounding does not matter; in one step, whose time does not depend on
    # the rows
    most = math.floor(noise.clip / noise.grid)
    scale = min(1.0, most * noise.grid * (1 - 1e-12) / norm) if norm > 0 else 1.0
    whole = np.trunc(x * scale / noise.grid).astype(np.int64)
    if (
        sum(k * k for k in whole.tolist()) > most * most
    ):  # in whole numbers, which no rounding before can spoil
        raise ValueError(
            "a gradient is longer than it was cut to; expected float64 arithmetic as IEEE has it"
        )
    return whole
