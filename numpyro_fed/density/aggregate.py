"""Published results in place of a site's rows: an estimate, a likelihood profile, or sums."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.density.handlers import PUBLIC


class _Law(NamedTuple):
    """Log likelihood of a result.

    :param of: what the result is.
    :param dim: number of parameters that it is about.
    :param takes: the values that a call has.
    :param log_likelihood: a function of these values.
    """

    of: str
    dim: int
    takes: tuple[str, ...]
    log_likelihood: Callable[..., Array]


class Aggregate:
    """Result that a site has published, which stands for its rows in a model.

    Call it in the model, outside every silo plate, with a name and the values that it is about:
    ``bergen("bergen", beta)``. It adds a log likelihood to the global density. All parties have it,
    since it is published. So every algorithm takes it beside silos with rows, and nothing leaves a
    silo for it. Give one of these:

    * ``mean`` and ``cov``, an estimate of ``beta`` and its covariance: the log likelihood is
      ``log N(mean; beta, cov)``. For a logistic regression this is an approximation, good for many
      rows.
    * ``grid`` and ``log_likelihood``, a profile of one parameter: a cubic spline through the
      points, up to a constant. Beyond the grid it goes on as a line.
    * ``xtx``, ``xty``, ``yty`` and ``rows``, sums of a linear model, called with ``beta`` and
      ``sigma``: its log likelihood, exactly.

    :param mean: estimate, a number or ``(d,)``.
    :param cov: its variance, or covariance ``(d, d)``.
    :param grid: increasing values of the parameter, ``(n,)`` with n >= 4.
    :param log_likelihood: the log likelihood there, ``(n,)``.
    :param xtx: sum over rows of ``x x^T``, ``(d, d)``.
    :param xty: sum of ``x y``, ``(d,)``.
    :param yty: sum of ``y^2``.
    :param rows: number of rows.
    :raises ValueError: for other combinations, shapes, or numbers that are no such result.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> bergen = fed.Aggregate(mean=1.9, cov=0.04)
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     bergen("bergen", mu)
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.full(25, 2.0)}, "rome": {"y": jnp.full(50, 1.8)}})
        >>> idata = fed.fit(model, silos, progress_bar=False)
        >>> round(float(idata.posterior["mu"].mean()), 1)
        1.9
    """

    def __init__(
        self,
        *,
        mean: ArrayLike | None = None,
        cov: ArrayLike | None = None,
        grid: ArrayLike | None = None,
        log_likelihood: ArrayLike | None = None,
        xtx: ArrayLike | None = None,
        xty: ArrayLike | None = None,
        yty: ArrayLike | None = None,
        rows: int | None = None,
    ) -> None:
        given = {
            "mean": mean, "cov": cov, "grid": grid, "log_likelihood": log_likelihood,
            "xtx": xtx, "xty": xty, "yty": yty, "rows": rows,
        }  # fmt: skip
        parts = {k: np.asarray(v, np.float64) for k, v in given.items() if v is not None}
        if tuple(parts) not in _FORMS:
            raise ValueError(f"expected one of {', '.join(map(repr, _FORMS))}, got {tuple(parts)}")
        for name, x in parts.items():
            if not np.isfinite(x).all():
                raise ValueError(f"{name}: expected finite numbers, got {x.tolist()}")
        self._law = _FORMS[tuple(parts)](**parts)

    def __call__(self, name: str, *values: ArrayLike) -> None:
        """Add the log likelihood at these values to the model, as a site of this name.

        :raises ValueError: for other numbers of values, or other shapes.
        """
        law = self._law
        if len(values) != len(law.takes):
            what = " and ".join(law.takes)
            raise ValueError(f"{name!r}: expected {what}, got {len(values)} values")
        size = jnp.size(values[0])
        if size != law.dim:
            raise ValueError(f"{name!r}: the published result is of {law.dim} numbers, got {size}")
        # as numpyro.factor, with the mark of what all silos know
        unit = dist.Unit(law.log_likelihood(*(jnp.asarray(x) for x in values)))
        numpyro.sample(name, unit, obs=jnp.zeros((0,)), infer={"is_auxiliary": True, PUBLIC: True})

    def __repr__(self) -> str:
        return f"Aggregate({self._law.of} of {self._law.dim} numbers)"


def _definite(name: str, x: np.ndarray, dim: int) -> np.ndarray:
    """Return a matrix that is symmetric and positive definite, or raise a ``ValueError``."""
    x = x.reshape(1, 1) if x.size == 1 else x
    if x.shape != (dim, dim) or not np.allclose(x, x.T):
        raise ValueError(f"{name}: expected a symmetric matrix ({dim}, {dim}), got {x.shape}")
    smallest = np.linalg.eigvalsh(x).min()
    if not smallest > 0:
        raise ValueError(
            f"{name}: expected a positive definite matrix, got the smallest eigenvalue "
            f"{smallest:.3g}"
        )
    return x


def _normal(mean: np.ndarray, cov: np.ndarray) -> _Law:
    root = np.linalg.cholesky(_definite("cov", cov, mean.size))

    def log_likelihood(beta: Array) -> Array:
        law = dist.MultivariateNormal(jnp.ravel(beta), scale_tril=jnp.asarray(root, beta.dtype))
        return law.log_prob(jnp.asarray(mean.ravel(), beta.dtype))

    return _Law("estimate", mean.size, ("one value",), log_likelihood)


def _profile(grid: np.ndarray, log_likelihood: np.ndarray) -> _Law:
    from scipy.interpolate import CubicSpline

    if grid.ndim != 1 or len(grid) < 4 or not (np.diff(grid) > 0).all():
        raise ValueError(f"grid: expected at least 4 increasing numbers, got {grid.tolist()}")
    if log_likelihood.shape != grid.shape:
        raise ValueError(
            f"log_likelihood: expected {len(grid)} numbers, got shape {log_likelihood.shape}"
        )
    best = int(np.argmax(log_likelihood))
    if best in (0, len(grid) - 1):
        raise ValueError(
            "log_likelihood: expected its maximum inside the grid, got it at the end "
            f"{grid[best]:g}; take a wider grid"
        )
    spline = CubicSpline(grid, log_likelihood - log_likelihood[best])
    slope = spline.derivative()(grid[[0, -1]])

    def value(beta: Array) -> Array:
        x = jnp.reshape(beta, ())
        inside = jnp.clip(x, grid[0], grid[-1])
        piece = jnp.clip(jnp.searchsorted(jnp.asarray(grid), inside) - 1, 0, len(grid) - 2)
        step = inside - jnp.asarray(grid, x.dtype)[piece]
        at = jnp.polyval(jnp.asarray(spline.c, x.dtype)[:, piece], step)
        low, high = jnp.minimum(x - grid[0], 0.0), jnp.maximum(x - grid[-1], 0.0)
        return at + slope[0] * low + slope[1] * high

    return _Law("profile", 1, ("one value",), value)


def _linear(xtx: np.ndarray, xty: np.ndarray, yty: np.ndarray, rows: np.ndarray) -> _Law:
    matrix = _definite("xtx", xtx, xty.size)
    best = np.linalg.solve(matrix, xty.ravel())
    least = float(yty - xty.ravel() @ best)
    if not rows >= 1 or not least >= -1e-9 * abs(float(yty)):
        raise ValueError(
            f"yty: expected at least xty^T xtx^-1 xty, got {float(yty):g}; its residual sum of "
            f"squares is {least:g}"
        )

    def log_likelihood(beta: Array, sigma: Array) -> Array:
        # around the least-squares estimate, so that large sums do not cancel
        gap = jnp.ravel(beta) - jnp.asarray(best, beta.dtype)
        squares = least + gap @ jnp.asarray(matrix, beta.dtype) @ gap
        scale = jnp.reshape(sigma, ())
        constant = 0.5 * float(rows) * np.log(2 * np.pi)
        return -float(rows) * jnp.log(scale) - constant - 0.5 * squares / scale**2

    return _Law("linear model", xty.size, ("beta", "sigma"), log_likelihood)


_FORMS: dict[tuple[str, ...], Callable[..., _Law]] = {
    ("mean", "cov"): _normal,
    ("grid", "log_likelihood"): _profile,
    ("xtx", "xty", "yty", "rows"): _linear,
}
