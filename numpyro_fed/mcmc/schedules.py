"""Diminishing step sizes as optax schedules, and the check of a schedule."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.rounds.serialization import wire_name

# steps between which a schedule's exponent is measured: an offset of up to 10^5 steps changes it by
# 1.4 %
_LATE = (10**6, 10**9)


def polynomial_decay(scale: float, offset: float, power: float) -> Callable[[Array], Array]:
    r"""Return the schedule :math:`\alpha(t) = a / (b + t)^\gamma`, in the form of optax.

    Diminishing steps make Langevin dynamics exact in the limit. An infinite :math:`\sum_t
    \alpha(t)` (:math:`\gamma \le 1`) lets the chain go anywhere. A finite :math:`\sum_t
    \alpha(t)^2` (:math:`\gamma > 1/2`) bounds the noise of gradients.

    :param scale: a > 0.
    :param offset: b > 0; the step has fallen to :math:`2^{-\gamma}` of its first value after b
        steps.
    :param power: :math:`\gamma`.
    :return: a function of the number of steps made.
    :raises ValueError: for numbers that are not positive.

    Example::

        >>> import numpyro_fed as fed
        >>> schedule = fed.polynomial_decay(0.008, 12.0, 0.45)
        >>> round(float(schedule(0)), 5), round(float(schedule(1632)), 5)
        (0.00261, 0.00029)
    """
    for name, value in (("scale", scale), ("offset", offset), ("power", power)):
        if not isinstance(value, Real) or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")

    return _PolynomialDecay(float(scale), float(offset), float(power))


@wire_name("PolynomialDecay")
@dataclass(frozen=True)
class _PolynomialDecay:
    """Polynomial schedule, equal by value so that kernels of equal schedules share programs."""

    scale: float
    offset: float
    power: float

    def __repr__(self) -> str:
        return f"polynomial_decay({self.scale:g}, {self.offset:g}, {self.power:g})"

    def __call__(self, count: Array) -> Array:
        return self.scale / (self.offset + count) ** jnp.asarray(self.power, jnp.result_type(float))


def _check_schedule(schedule: Callable) -> None:
    """Raise an error for a schedule that is not positive and finite, and warn of a bad decay.

    :raises ValueError: with the step at which the schedule fails.
    :warns UserWarning: if the sum of all steps looks finite, or if the schedule diminishes and the
        sum of squared steps looks infinite.
    """
    counts = [0, *np.unique(np.logspace(0, math.log10(_LATE[1]), 40).astype(int))]
    for count in counts:
        try:
            size = np.asarray(schedule(jnp.asarray(count)), float)
        except Exception as error:
            raise ValueError(
                f"step_size: the schedule fails at step {count} ({type(error).__name__}: {error})"
            ) from error
        if size.shape or not 0 < size < math.inf:
            got = f"{float(size):g}" if not size.shape else f"an array of shape {size.shape}"
            raise ValueError(
                f"step_size: expected a schedule of finite numbers > 0, got {got} at step {count:,}"
            )
    early, late = (float(schedule(jnp.asarray(t))) for t in _LATE)
    exponent = -math.log(late / early) / math.log(_LATE[1] / _LATE[0])
    if exponent > 1.01:
        warnings.warn(
            f"step_size falls like t^-{exponent:.2f}: the sum of all steps looks finite, so the "
            "chain stops before it has gone everywhere; expected an exponent in (0.5, 1]",
            stacklevel=7,
        )
    elif 0.01 < exponent <= 0.5:
        warnings.warn(
            f"step_size falls like t^-{exponent:.2f}: the sum of its squares looks infinite, so "
            "the noise of gradients and the disagreement of nodes die out, but not summably; "
            "expected an exponent in (0.5, 1]",
            stacklevel=7,
        )


def check_step_size(step_size: float | str | Callable | None) -> None:
    """Raise an error unless a step size is a positive number, a schedule or a name."""
    if isinstance(step_size, str):
        if step_size not in ("auto", "adaptive"):
            raise ValueError(
                'step_size: expected a positive number, a schedule, "auto" or "adaptive", got '
                f"{step_size!r}"
            )
    elif callable(step_size):
        _check_schedule(step_size)
    elif (
        isinstance(step_size, bool)
        or step_size is None
        or np.ndim(step_size)
        or not _is_positive(step_size)
    ):
        raise ValueError(f"step_size: expected a finite number > 0, got {step_size!r}")


def _is_positive(number: object) -> bool:
    try:
        return bool(0 < float(np.asarray(number, jnp.result_type(float))) < math.inf)
    except TypeError:
        return False
