r"""The Wasserstein-2 barycenter of Gaussians: an average of laws, and not of parameters.

The barycenter of :math:`N(m_s, V_s)` with weights :math:`w_s` is :math:`N(m, X)`. Its mean is
:math:`m = \sum_s w_s m_s`, and :math:`X` is the only positive definite solution of

.. math:: X = \sum_s w_s (X^{1/2} V_s X^{1/2})^{1/2}

(SFVI, section 3.2). For diagonal covariances :math:`X = (\sum_s w_s V_s^{1/2})^2`. Otherwise
:math:`X` is the limit of

.. math:: X \leftarrow X^{-1/2} \Bigl(\sum_s w_s (X^{1/2} V_s X^{1/2})^{1/2}\Bigr)^2 X^{-1/2}

(Álvarez-Esteban et al. 2016). The code uses a factor :math:`X = L L^\top` in place of the square
root. With :math:`M = \sum_s w_s (L^\top V_s L)^{1/2}` the step is :math:`X \leftarrow L^{-\top} M^2
L^{-1}`. The reason: :math:`L^{-\top} (L^\top V_s L)^{1/2} L^{-1}` is positive definite and carries
:math:`N(0, X)` to :math:`N(0, V_s)`, and only the optimal map does so.

Since :math:`X^{1/2} = L Q` with an orthogonal :math:`Q`, the residual of the equation is
:math:`\|L^\top L - M\|`. A step and the residual before it thus cost one ``eigh`` for each Gaussian
and no other. The next factor is the transposed R of :math:`M L^{-1}`: a QR decomposition, which
never squares a condition number.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

# steps without a smaller residual that end the iteration: of ten covariances in float32 it fell in
# every step down to 2e-7, and from there rose in every third
_PATIENCE = 3


class Barycenter(NamedTuple):
    """The result of :func:`barycenter`.

    :param mean: shape ``(d,)``.
    :param covariance: shape ``(d, d)``; for diagonal Gaussians the variances, shape ``(d,)``.
    :param residual: distance of ``covariance`` from a fixed point, relative to its Frobenius norm;
        a scalar.
    :param num_steps: steps of the iteration; 0 for the closed form.
    """

    mean: Array
    covariance: Array
    residual: Array
    num_steps: Array


class _State(NamedTuple):
    """An iterate by its factor, the sum of roots there, the best iterate so far, and counts."""

    factor: Array
    roots: Array
    best: Array
    residual: Array  # of ``best``
    stalled: Array  # steps since ``best``
    num_steps: Array


def barycenter(
    means: ArrayLike,
    covariances: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    tol: float = 1e-6,
    max_steps: int = 100,
) -> Barycenter:
    r"""Return the Wasserstein-2 barycenter of Gaussians.

    Diagonal Gaussians have a closed form. The others are iterated from the weighted mean of the
    covariances; if these commute, one step from there gives the solution :math:`(\sum_s w_s
    V_s^{1/2})^2`. The iteration ends when the relative residual :math:`\|X - \sum_s w_s (X^{1/2}
    V_s X^{1/2})^{1/2}\| / \|X\|`

    * is at most ``tol``, or
    * is at most :math:`4 \epsilon \sqrt d`, about the size of its rounding error (in float32 above
      1e-6 from d = 5 on), or
    * has not fallen for 3 steps (ill-conditioned covariances in float32).

    The best iterate is returned with its ``residual``: look at it where precision matters. Shapes
    are checked, and not values.

    :param means: shape ``(S, d)``.
    :param covariances: positive definite, shape ``(S, d, d)``, or variances of diagonal Gaussians,
        shape ``(S, d)``.
    :param weights: shape ``(S,)``, not negative; they are divided by their sum. Equal if None.
    :param tol: largest accepted relative residual.
    :param max_steps: most steps of the iteration.
    :return: the barycenter, in the floating type of the input.
    :raises ValueError: when shapes do not match.

    **References**

    1. *A fixed-point approach to barycenters in Wasserstein space*, Álvarez-Esteban et al. 2016
    2. *Federated structured variational inference*, section 3.2 (SFVI-Avg)

    Example::

        >>> import jax.numpy as jnp
        >>> from numpyro_fed.vi.barycenter import barycenter
        >>> found = barycenter(jnp.array([[0.0], [2.0]]), jnp.array([[1.0], [9.0]]))  # sds 1 and 3
        >>> found.mean.tolist(), found.covariance.tolist()
        ([1.0], [4.0])
    """
    means, covariances = jnp.asarray(means), jnp.asarray(covariances)
    dtype = jnp.result_type(means, covariances, jnp.float32)
    means, covariances = means.astype(dtype), covariances.astype(dtype)
    if means.ndim != 2 or 0 in means.shape:
        raise ValueError(
            f"expected means of shape (S, d), one row for each Gaussian, got {means.shape}"
        )
    allowed = (means.shape, (*means.shape, means.shape[1]))
    if covariances.shape not in allowed:
        raise ValueError(
            f"expected covariances of shape {allowed[1]}, or variances of shape {allowed[0]}, for "
            "means of shape "
            f"{means.shape}, got {covariances.shape}"
        )
    weights = jnp.ones(len(means), dtype) if weights is None else jnp.asarray(weights, dtype)
    if weights.shape != (len(means),):
        raise ValueError(
            f"expected one weight for each of the {len(means)} Gaussians, got shape {weights.shape}"
        )
    weights = weights / weights.sum()
    mean = weights @ means
    if covariances.ndim == 2:
        return Barycenter(
            mean,
            (weights @ jnp.sqrt(covariances)) ** 2,
            jnp.zeros((), dtype),
            jnp.zeros((), jnp.int32),
        )
    return Barycenter(mean, *_fixed_point(covariances, weights, tol, max_steps))


@jax.jit
def _fixed_point(
    covariances: Array, weights: Array, tol: ArrayLike, max_steps: ArrayLike
) -> tuple[Array, ...]:
    """Return the barycenter's covariance ``(d, d)``, its residual and the number of steps."""
    dim, dtype = covariances.shape[-1], covariances.dtype
    covariances = (covariances + covariances.mT) / 2
    # with variances near one no norm overflows
    scale = weights @ jnp.trace(covariances, axis1=1, axis2=2) / dim
    covariances = covariances / scale
    enough = jnp.maximum(jnp.asarray(tol, dtype), 4 * jnp.finfo(dtype).eps * dim**0.5)

    def judged(factor: Array) -> tuple[Array, Array]:
        roots = jnp.tensordot(weights, _root(factor.T @ covariances @ factor), 1)
        gram = factor.T @ factor
        return roots, jnp.linalg.norm(gram - roots) / jnp.linalg.norm(gram)

    def goes_on(state: _State) -> Array:
        return (
            (state.residual > enough) & (state.stalled < _PATIENCE) & (state.num_steps < max_steps)
        )

    def step(state: _State) -> _State:
        # M L⁻¹ = (L⁻ᵀ M)ᵀ
        map_factor = solve_triangular(state.factor, state.roots, trans=1, lower=True).T
        factor = jnp.linalg.qr(map_factor, mode="r").T
        roots, residual = judged(factor)
        better = residual < state.residual
        best = jnp.where(better, factor, state.best)
        stalled = jnp.where(better, 0, state.stalled + 1)
        return _State(
            factor, roots, best, jnp.minimum(residual, state.residual), stalled, state.num_steps + 1
        )

    start = jnp.linalg.cholesky(jnp.tensordot(weights, covariances, 1))
    # not finite where the mean covariance is singular up to rounding
    start = jnp.where(jnp.isfinite(start).all(), start, jnp.eye(dim, dtype=dtype))
    roots, residual = judged(start)
    end = lax.while_loop(
        goes_on, step, _State(start, roots, start, residual, jnp.int32(0), jnp.int32(0))
    )
    return scale * end.best @ end.best.T, end.residual, end.num_steps


def _root(matrices: Array) -> Array:
    """Return the positive definite square roots of symmetric matrices ``(S, d, d)``.

    Eigenvalues lost to rounding are floored.
    """
    values, vectors = jnp.linalg.eigh(matrices)
    values = jnp.maximum(values, jnp.finfo(values.dtype).eps * values[:, -1:])
    return (vectors * jnp.sqrt(values)[:, None, :]) @ vectors.mT
