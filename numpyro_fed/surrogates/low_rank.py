r"""Low-rank surrogates, a diagonal and a few directions of each silo's precision.

They serve where one full matrix for each silo is too much:

.. math::
    \Lambda_s = \operatorname{diag}(\delta_s) + U_s \operatorname{diag}(w_s) U_s^\top, \qquad
    U_s \in R^{d \times r}.

The server adds up the silos' curvatures, and finds the posterior's mode by damped Newton steps. At
the mode a silo fits :math:`\Lambda_s` to its own curvature :math:`H_s` by principal factors, in
units of the posterior's conditional sds. U and w are the r eigenpairs of :math:`H_s -
\operatorname{diag}(\delta_s)` of largest absolute value, and :math:`\delta_s` makes the diagonal
that of :math:`H_s`. Nothing is lost where the d - r smallest eigenvalues, in those units, are
equal.

The server knows the sum of the curvatures, and adds the sum's remainder to the prior's factor.
``posterior()``, the preconditioner, is therefore the posterior's expansion for any r. Reference for
principal factors: Harman (1976), Modern factor analysis, chapter 8.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.surrogates.gaussian import Gaussian, LowRank, Surrogates

__all__ = ["low_rank", "principal_factors"]

_ROUNDS = 60
_SETTLED = 1e-2  # sds that a converged mode moves in a round
_PASSES = 5  # iterations of principal factors


def low_rank(
    model: Callable, silos: Silos, *, rank: int = 20, public: Sequence[str] = ()
) -> Surrogates:
    """Return surrogates with a diagonal and ``rank`` directions for each silo.

    They are expansions at the posterior's mode. They serve posteriors of 100 to 1,000 dimensions
    that are nearly Gaussian, and save the memory of a full matrix for each silo.

    **What leaves a silo:** gradient, curvature and log likelihood in each of about 8 rounds, which
    the server only adds up; then ``d (rank + 2) + rank`` numbers.

    :param model: the marked model, without local latents.
    :param silos: the data.
    :param rank: r, between 1 and d.
    :param public: observed sites outside every silo plate whose data all silos know.
    :return: the surrogates.
    :raises ValueError: for local latents, a rank that does not fit, or a mode that is not found.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(x, y):
        ...     beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)
        >>> silos = fed.Silos(
        ...     {
        ...         "oslo": {"x": jnp.ones((4, 3)), "y": jnp.ones(4)},
        ...         "rome": {"x": jnp.eye(3), "y": jnp.ones(3)},
        ...     }
        ... )
        >>> fed.surrogates.low_rank(model, silos, rank=1)
        Surrogates(2 silos, dimension 3, rank 1)
    """
    factors = factorize(model, silos, public=tuple(public))
    if factors.local_sites:
        raise ValueError(
            f"the model has local latents {[s.name for s in factors.local_sites]}: expected a "
            'model without local latents, or surrogate="score", which integrates them out'
        )
    if (
        isinstance(rank, bool)
        or not isinstance(rank, int | np.integer)
        or not 1 <= rank <= factors.dim
    ):
        raise ValueError(f"rank: expected an integer between 1 and d = {factors.dim}, got {rank!r}")
    theta, damping, moved = np.zeros(factors.dim), 0.0, np.inf
    value, slope, curvature = _ask(factors, theta, silos)
    for _ in range(_ROUNDS):
        scale = 1 / np.sqrt(np.maximum(np.abs(np.diag(curvature)), 1e-30))
        scaled = curvature * scale * scale[:, None] + damping * np.eye(factors.dim)
        step = scale * np.linalg.solve(scaled, scale * slope)
        moved = float(np.sqrt(abs(step @ curvature @ step)))
        there = _ask(factors, theta + step, silos)
        if there[0] >= value - 1e-5 * abs(value):  # float32 rounds a sum of many terms
            theta, (value, slope, curvature), damping = theta + step, there, damping * 0.2
            if moved < _SETTLED and damping < 0.1:
                return _expand(factors, rank, theta, slope, curvature, silos)
        else:
            damping = max(damping, 1e-3) * 6
    raise ValueError(
        f"the posterior's mode was not found in {_ROUNDS} rounds (the last step was {moved:.3g} "
        'sds); expected surrogate="score", or a model whose posterior has a mode in unconstrained '
        "space"
    )


def _ask(factors: Factors, theta: np.ndarray, silos: Silos) -> tuple[float, np.ndarray, np.ndarray]:
    """Return log posterior, gradient and curvature at theta, summed over silos one by one."""
    at = jnp.asarray(theta, jnp.result_type(float))
    value, slope, curvature = (np.asarray(x, np.float64) for x in _prior(factors, at, silos.shared))
    for s in range(len(silos)):
        own = (np.asarray(x, np.float64) for x in _silo(factors, at, jnp.asarray(s), silos))
        value, slope, curvature = (
            x + y for x, y in zip((value, slope, curvature), own, strict=True)
        )
    return float(value), slope, curvature


def _expand(
    factors: Factors,
    rank: int,
    theta: np.ndarray,
    total_slope: np.ndarray,
    total: np.ndarray,
    silos: Silos,
) -> Surrogates:
    """Return the surrogates around theta.

    The prior's factor, which serves the whitening, takes up what the silos' factors lack of the
    total.
    """
    dtype = jnp.result_type(float)
    at, unit = jnp.asarray(theta, dtype), jnp.asarray(1 / np.sqrt(np.abs(np.diag(total))), dtype)
    replies = []
    for s in range(len(silos)):
        _, slope, curvature = _silo(factors, at, jnp.asarray(s), silos)
        replies.append((slope, principal_factors(curvature, unit, rank)))
    slopes, precision = jax.tree.map(
        lambda *x: np.stack([np.asarray(v, np.float64) for v in x]), *replies
    )
    parts = Gaussian(slopes + precision @ theta, precision)
    return Surrogates(parts, Gaussian(total_slope + total @ theta, total) / parts.product())


def _expansion(value: Callable[[Array], Array], theta: Array) -> tuple[Array, Array, Array]:
    return value(theta), jax.grad(value)(theta), -jax.hessian(value)(theta)


@partial(jax.jit, static_argnames=("factors",))
def _prior(factors: Factors, theta: Array, shared: ModelArgs) -> tuple[Array, Array, Array]:
    return _expansion(lambda t: factors.log_prior(factors.unravel(t), shared), theta)


@partial(jax.jit, static_argnames=("factors",))
def _silo(
    factors: Factors, theta: Array, number: Array, silos: Silos
) -> tuple[Array, Array, Array]:
    kwargs, weights = SiloView(silos, number, largest(silos)).whole()
    return _expansion(lambda t: factors.log_local(factors.unravel(t), {}, kwargs, weights), theta)


@partial(jax.jit, static_argnames=("rank",))
def principal_factors(matrix: Array, scale: Array, rank: int) -> LowRank:
    """Return the diagonal and ``rank`` directions nearest to a symmetric matrix.

    Distance is in units of ``scale``; the result has the diagonal of the matrix.
    """
    scaled = 0.5 * (matrix + matrix.T) * scale * scale[:, None]
    values = jnp.linalg.eigvalsh(scaled)
    rest = jnp.sum(jnp.sort(jnp.abs(values))[: len(scale) - rank]) / max(len(scale) - rank, 1)
    diagonal = jnp.full(len(scale), rest)
    for _ in range(_PASSES):
        values, vectors = jnp.linalg.eigh(scaled - jnp.diag(diagonal))
        chosen = jnp.argsort(-jnp.abs(values))[:rank]
        weight, factor = values[chosen], vectors[:, chosen]
        diagonal = jnp.diagonal(scaled) - jnp.sum(weight * factor**2, axis=1)
    return LowRank(diagonal / scale**2, factor / scale[:, None], weight)
