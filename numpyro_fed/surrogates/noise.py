r"""Noise of the gradients with surrogates: the constants of FSGLD's theorems 1 and 2.

At some values of :math:`\theta`, over the rows :math:`x_i` of silo s, the constants are

.. math::
    \gamma_s^2 &= \max_\theta \max_i \| \nabla \log p(x_i \mid \theta) \|^2
    \qquad \text{(assumption 1, DSGLD)} \\
    \epsilon_s^2 &= \max_\theta \frac1{N_s} \sum_i
    \| \nabla \log p(x_i \mid \theta) - N_s^{-1} \nabla \log q_s(\theta) \|^2
    \qquad \text{(lemma 2, FSGLD)}

where the papers take suprema over all :math:`\theta`. Let h be the step size, T the number of steps
of the whole chain, m the rows of a minibatch, and f the silos' probabilities. The mean squared
error of an average over the chain is at most a constant times

.. math:: \frac1{mT} \sum_s \frac{N_s^2}{f_s} \epsilon_s^2 + \frac1{hT} + h^2

(theorem 2). Theorem 1, for DSGLD, has :math:`\gamma_s^2` in place of :math:`\epsilon_s^2`. The
theorems draw a silo anew at every step, so that T does not count the steps of a visit.

The constant does not depend on T and h, and is unknown: bounds compare settings, and are no error
bars. Reference: el Mekkaoui et al. (2021), Federated stochastic gradient Langevin dynamics, 4.
"""

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, sweep
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.surrogates.gaussian import Surrogates

__all__ = ["Bounds", "Noise", "check_fits", "mse_bounds", "noise"]

_ROWS_AT_ONCE = 1024


class Noise(NamedTuple):
    """Constants of the silos, each ``(S,)``.

    :param gamma_squared: squared norm of a row's gradient, largest over rows and theta.
    :param gamma_squared_mean: mean over rows of this squared norm, largest over theta: the value of
        ``epsilon_squared`` without surrogates.
    :param epsilon_squared: mean over rows of the squared distance between a row's gradient and the
        surrogate's share, largest over theta.
    :param num_rows: N_s.
    """

    gamma_squared: np.ndarray
    gamma_squared_mean: np.ndarray
    epsilon_squared: np.ndarray
    num_rows: np.ndarray


class Bounds(NamedTuple):
    """Bounds of the mean squared error up to the theorems' constant C.

    :param dsgld: theorem 1.
    :param fsgld: theorem 2.
    """

    dsgld: float
    fsgld: float


def noise(
    model: Callable,
    silos: Silos,
    surrogates: Surrogates,
    theta: ArrayLike,
    *,
    public: Sequence[str] = (),
) -> Noise:
    """Measure the constants of FSGLD's theorems 1 and 2 at values of the global position.

    As in the paper, everything is in the coordinates of theta, not in preconditioned ones.

    :param model: the marked model, without local latents.
    :param silos: the data.
    :param surrogates: the silos' surrogates.
    :param theta: flat unconstrained global positions ``(K, d)`` or ``(d,)``, sites sorted by name.
    :param public: observed sites outside every silo plate whose data all silos know.
    :return: the constants.
    :raises ValueError: for local latents, rows in several groups, or shapes that do not fit.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos(
        ...     {"oslo": {"y": jnp.array([4.0, 6.0])}, "rome": {"y": jnp.array([-1.0, 1.0])}}
        ... )
        >>> q = fed.surrogates.analytic(silos, [[5.0], [0.0]], [[2.0], [2.0]])
        >>> found = fed.surrogates.noise(model, silos, q, [0.0])
        >>> found.gamma_squared.tolist(), found.epsilon_squared.tolist()
        ([36.0, 1.0], [1.0, 1.0])
    """
    factors = factorize(model, silos, public=tuple(public))
    if factors.local_sites:
        raise ValueError(
            f"the model has local latents {[s.name for s in factors.local_sites]}: the theorems "
            "need rows that are independent given the global parameters; expected a model without "
            "local latents"
        )
    groups = list(dict.fromkeys(group for _, group in factors.plates))
    if len(groups) != 1:
        raise ValueError(
            f"the model's silo plates are of {groups}: the theorems have rows of one kind; "
            "expected one group"
        )
    thetas = np.atleast_2d(np.asarray(theta, np.float64))
    if thetas.ndim != 2 or thetas.shape[1] != factors.dim or not thetas.size:
        raise ValueError(
            f"theta: expected shape (K, {factors.dim}) or ({factors.dim},), got {np.shape(theta)}"
        )
    if not np.isfinite(thetas).all():
        raise ValueError("theta: expected finite numbers, got NaN or infinity")
    check_fits(surrogates, factors, silos)
    sizes = np.asarray(silos.sizes[groups[0]], np.float64)
    shares = jnp.asarray(surrogates.scores(thetas) / sizes[:, None, None])
    found = _norms(factors, groups[0], jnp.asarray(thetas), shares, silos)
    largest, mean, left = (np.asarray(x, np.float64).max(1) for x in found)
    return Noise(largest, mean, left, sizes)


def check_fits(surrogates: Surrogates, factors: Factors, silos: Silos) -> None:
    """Raise an error for surrogates of other silos or of another dimension."""
    if not isinstance(surrogates, Surrogates):
        raise ValueError(f"surrogates: expected a fed.surrogates.Surrogates, got {surrogates!r}")
    if len(surrogates) != len(silos) or surrogates.dim != factors.dim:
        raise ValueError(
            f"surrogates: expected factors of {len(silos)} silos in dimension {factors.dim}, got "
            f"{surrogates!r}"
        )


@partial(jax.jit, static_argnames=("factors", "group"))
def _norms(
    factors: Factors, group: str, thetas: Array, shares: Array, silos: Silos
) -> tuple[Array, Array, Array]:
    """Return statistics of the rows' gradients, each ``(S, K)``.

    They are the largest and the mean squared norm, and the mean squared distance to ``shares``.
    """

    def local(view: SiloView, _: None) -> tuple[tuple[Array, ...], None]:
        kwargs, weights = view.whole()
        mask, size = view.mask(group), view.size(group)
        rows = jnp.minimum(jnp.arange(mask.shape[0]), size - 1)

        def at(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            theta, share = args

            def squares(row: Array) -> tuple[Array, Array]:
                own = {**kwargs, **view.batch(group, row[None])}
                one = {**weights, group: jnp.ones(())}
                slope = jax.grad(lambda t: factors.log_local(factors.unravel(t), {}, own, one))(
                    theta
                )
                return jnp.sum(slope**2), jnp.sum((slope - share) ** 2)

            whole, left = lax.map(squares, rows, batch_size=min(_ROWS_AT_ONCE, rows.shape[0]))
            total, rest = (jnp.sum(jnp.where(mask, x, 0.0)) / size for x in (whole, left))
            return jnp.max(jnp.where(mask, whole, 0.0)), total, rest

        return lax.map(at, (thetas, shares[view.number])), None

    return sweep(local, silos, None, None)[0]


def mse_bounds(
    noise: Noise,
    *,
    step_size: float,
    num_steps: int,
    batch_size: int,
    selection: Sequence[float] | None = None,
) -> Bounds:
    """Return the right sides of FSGLD's theorems 1 and 2 without their constant C.

    :param noise: constants from :func:`noise`.
    :param step_size: h.
    :param num_steps: T, the number of steps of the whole chain (rounds times steps in a round).
    :param batch_size: m, the rows of a minibatch.
    :param selection: f; equal by default.
    :return: the bound of DSGLD (theorem 1, with gamma) and of FSGLD (theorem 2, with epsilon).
    :raises ValueError: for numbers that are not positive, or a selection of another shape or sum.

    Example::

        >>> import numpy as np
        >>> from numpyro_fed.surrogates.noise import Noise, mse_bounds
        >>> constants = Noise(
        ...     gamma_squared=np.array([36.0, 1.0]),
        ...     gamma_squared_mean=np.array([26.0, 1.0]),
        ...     epsilon_squared=np.array([1.0, 1.0]),
        ...     num_rows=np.array([2.0, 2.0]),
        ... )
        >>> bounds = mse_bounds(constants, step_size=0.1, num_steps=1000, batch_size=1)
        >>> round(bounds.dsgld, 3), round(bounds.fsgld, 3)
        (0.316, 0.036)
    """
    for name, value in (
        ("step_size", step_size),
        ("num_steps", num_steps),
        ("batch_size", batch_size),
    ):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < np.inf:
            raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    count = len(noise.num_rows)
    f = np.full(count, 1 / count) if selection is None else np.asarray(selection, np.float64)
    if f.shape != (count,) or not (f > 0).all() or not abs(f.sum() - 1) <= 1e-6:
        raise ValueError(
            f"selection: expected {count} probabilities > 0 that sum to one, got {selection!r}"
        )
    rest = 1 / (step_size * num_steps) + step_size**2

    def bound(squared: np.ndarray) -> float:
        return float(np.sum(noise.num_rows**2 / f * squared) / (batch_size * num_steps) + rest)

    return Bounds(bound(noise.gamma_squared), bound(noise.epsilon_squared))
