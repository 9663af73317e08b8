r"""Marginal likelihood of a silo and its gradient, with local latents integrated out.

It is a function of the global parameters. For each unit g, with :math:`\ell_g(z) = \log p(y_g, z
\mid \theta)`, damped Newton steps find the mode :math:`\hat z_g` and the curvature :math:`H_g =
-\ell_g''(\hat z_g)`. Then one of two rules integrates:

* *Quadrature*, for elements with few latents, has nodes :math:`z_j = \hat z + R \epsilon_j` with
  :math:`R R^\top = H^{-1}` and importance weights :math:`W_j`. Fisher's identity gives the score,
  :math:`\nabla \log p(y_g \mid \theta) = \sum_j W_j \nabla_\theta \ell_g(z_j)`, and the weights
  give the latents' moments.
* *Laplace*, for all latents of a silo together, has the value :math:`\ell(\hat z) - \tfrac12
  \log\det H + \tfrac k2 \log 2\pi`. Its gradient includes the motion of the mode and the
  derivative of the determinant. Without the latter every scale parameter is several standard
  deviations wrong.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from numpyro_fed._typing import PyTree
from numpyro_fed.density import small_matrices
from numpyro_fed.surrogates.sobol import sobol_normal

# from 0 to a mode's hundredth of an sd, binomial terms took up to 9 steps, and Poisson terms with
# counts up to 1e5 and prior sds of .1 to 30 up to 19
NEWTON_STEPS = 25
DAMPED = 1e-2  # damping at which a step is shorter than Newton's, and its length says nothing
# for one latent; the worst error of a score in its log scale, of binomial elements with 1 to 40
# rows and prior sds of .3 to 6, was .006 (15 nodes: .035, 35 nodes: .001)
_SCALAR_NODES = 25
# for several latents: the root mean square error of such a score with 3 or 4 latents and 8 binary
# rows was .13 (32 nodes: .19, 128 nodes: .07)
_SOBOL_NODES = 64
# spread of the nodes relative to the curvature's, for tails wider than Gaussian; the error above is
# .024 for a spread of 1, and .007 for 1.5
_WIDEN = 1.2


class Moments(NamedTuple):
    """Moments of the units' latents at one theta.

    :param location: shape ``(E, k)``.
    :param chol: factors of the covariances, ``(E, k, k)``.
    """

    location: Array
    chol: Array


def nodes(
    dim: int, scalar: int = _SCALAR_NODES, sobol: int = _SOBOL_NODES
) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes ``(J, k)`` and weights ``(J,)`` of integrals against the standard normal.

    One latent has the trapezoidal rule, two latents have its products, and more have Sobol points.
    The range of the trapezoidal rule balances the tails beyond it with the error between nodes.
    Where latents are large, logistic terms have poles near the real line, and a Gauss-Hermite rule
    of as many nodes is ten times less exact.
    """
    if dim == 1:
        x = np.linspace(-1.0, 1.0, scalar) * 1.2 * np.sqrt(scalar)
        return x[:, None], (x[1] - x[0]) / np.sqrt(2 * np.pi) * np.exp(-(x**2) / 2)
    if dim == 2:  # products are far more exact than as many Sobol points
        side = round(np.sqrt(sobol))
        (x, w), two = nodes(1, scalar=side), np.indices((side, side)).reshape(2, -1)
        return x[two, 0].T, w[two].prod(0)
    x = sobol_normal(sobol, dim, seed=0)
    return x, np.full(len(x), 1 / len(x))


class Quadrature(NamedTuple):
    """Nodes ``(J, E, k)``, and log weights ``(J, E)``.

    An integral of exp(f) is the sum of exp(f + log weight) over J, times ``(2 pi)^(k / 2)``.
    """

    points: Array
    log_weight: Array

    def moments(self, log_values: Array) -> Moments:
        """Return moments of the distribution with log densities ``(J, E)`` at the nodes."""
        weight = jax.nn.softmax(log_values + self.log_weight, axis=0)
        mean = jnp.einsum("ne,nei->ei", weight, self.points)
        centered = self.points - mean
        return Moments(mean, cholesky(jnp.einsum("ne,nei,nej->eij", weight, centered, centered)))


def place(center: Array, chol: Array, table: tuple[np.ndarray, np.ndarray]) -> Quadrature:
    """Place nodes around centers ``(E, k)``, spread by factors of covariances ``(E, k, k)``.

    No gradient passes through them, so that derivatives of an integral, of any order, are integrals
    themselves (Fisher's identity).
    """
    center, chol = lax.stop_gradient((center, _WIDEN * chol))
    eps, base = (jnp.asarray(x, center.dtype) for x in table)
    log_det = jnp.sum(jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)), -1)
    points = center + jnp.einsum("eij,nj->nei", chol, eps)
    return Quadrature(points, (0.5 * jnp.sum(eps**2, -1) + jnp.log(base))[:, None] + log_det)


def place_at_mode(
    log_density: Callable[[Array], Array],
    start: Array,
    table: tuple[np.ndarray, np.ndarray],
    steps: int,
) -> Quadrature:
    """Place nodes around each unit's mode, spread by the curvature there.

    Newton steps from ``start`` find the mode.
    """
    mode = newton(log_density, start, steps, near_enough(start.dtype))
    return place(mode.at, inverse_factor(mode.curvature), table)


def quadrature_marginal(
    log_density: Callable[[Array, Array], Array], u: Array, start: Array, owned: Array
) -> tuple[Array, Array, Moments]:
    """Integrate local latents out by quadrature.

    Arguments are those of :func:`laplace_marginal`.

    :return: log marginal likelihood at ``u`` (scalar), its score ``(d,)``, and the latents'
        moments.
    """
    found = place_at_mode(lambda z: log_density(u, z), start, nodes(start.shape[1]), NEWTON_STEPS)

    def marginal(u: Array) -> tuple[Array, Array]:
        values = jax.vmap(lambda z: log_density(u, z))(found.points)
        return jnp.sum(jax.nn.logsumexp(values + found.log_weight, axis=0)), values

    (value, values), score = jax.value_and_grad(marginal, has_aux=True)(u)
    return value + log_normalizer(owned), score, found.moments(values)


def log_normalizer(owned: Array) -> Array:
    """Return the logarithm of the constant that :class:`Quadrature` leave out.

    Only the latents in ``owned`` count.
    """
    return 0.5 * np.log(2 * np.pi) * jnp.sum(owned)


def laplace_marginal(
    log_density: Callable[[Array, Array], Array], u: Array, start: Array, owned: Array
) -> tuple[Array, Array, Moments]:
    """Integrate local latents out by Laplace's approximation.

    :param log_density: ``(u, z) -> (E,)``. Each unit's term depends on its own row of z ``(E, k)``
        only, and padding is standard normal.
    :param u: global position (whitened), shape ``(d,)``.
    :param start: first position of the search for the mode, shape ``(E, k)``.
    :param owned: true for latents that are not padding, shape ``(E, k)``.
    :return: log marginal likelihood at ``u`` (scalar), its gradient ``(d,)``, and the modes with
        factors of the inverse curvatures.
    """
    # no stop_gradient here: a Hessian of this function needs the mode's derivative
    mode, _, _, hessian = newton(lambda z: log_density(u, z), start, NEWTON_STEPS)

    def marginal(u: Array) -> Array:
        # one Newton step from the mode has the mode's derivative in u (implicit function theorem)
        slope = jax.grad(lambda z: jnp.sum(log_density(u, z)))(mode)
        z = mode + small_matrices.solve(cholesky(hessian), slope)
        there = _local(lambda z: log_density(u, z), z)
        chol = cholesky(there.curvature)
        log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)))
        return jnp.sum(there.value) - 0.5 * log_det + log_normalizer(owned)

    value, gradient = jax.value_and_grad(marginal)(u)
    return value, gradient, Moments(mode, inverse_factor(hessian))


class Local(NamedTuple):
    """Units' terms at a position ``(E, k)``: value, slope, and negative second derivatives."""

    at: Array
    value: Array
    slope: Array
    curvature: Array


def _local(log_density: Callable[[Array], Array], z: Array) -> Local:
    """Evaluate each unit's term and its derivatives in its own latents, in one pass."""

    def slope(z: Array) -> tuple[Array, Array]:
        def total(z: Array) -> tuple[Array, Array]:
            values = log_density(z)
            return jnp.sum(values), values

        return jax.grad(total, has_aux=True)(z)

    def column(e: Array) -> tuple[tuple[Array, Array], Array]:
        here, change = jax.jvp(slope, (z,), (jnp.broadcast_to(e, z.shape),))
        return here, -change[0]

    basis = jnp.eye(z.shape[1], dtype=z.dtype)
    (first, values), curvature = jax.vmap(column, out_axes=(None, -1))(basis)
    return Local(z, values, first, curvature)


def cholesky(matrix: Array) -> Array:
    """Return Cholesky factors.

    A unit whose curvature is not positive definite has the identity (its weight is small).
    """
    return small_matrices.cholesky(_positive(matrix))


def inverse_factor(matrix: Array) -> Array:
    """Return Cholesky factors of the inverses."""
    return small_matrices.inverse_cholesky(_positive(matrix))


def _positive(matrix: Array) -> Array:
    good = jnp.isfinite(small_matrices.cholesky(lax.stop_gradient(matrix))).all(
        (-2, -1), keepdims=True
    )
    return jnp.where(good, matrix, jnp.eye(matrix.shape[-1], dtype=matrix.dtype))


def nowhere(start: Array) -> Local:
    """Return what any finite term is better than; its Newton step stays at the start."""
    eye = jnp.eye(start.shape[1], dtype=start.dtype)
    worst = jnp.full_like(start[:, 0], -jnp.inf)
    return Local(
        start, worst, jnp.zeros_like(start), jnp.broadcast_to(eye, (len(start), *eye.shape))
    )


def taken(better: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return the new numbers of the elements that are better, and the old ones of the others."""
    return jax.tree.map(
        lambda x, y: jnp.where(better.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old
    )


def near_enough(dtype: DTypeLike) -> float:
    """Return the squared length of a Newton step, in sds, at which nodes may be placed.

    The root is .005 sds in float32. Weights of the nodes correct a place that is farther off.
    """
    return float(jnp.finfo(dtype).eps) ** (2 / 3)


def newton(
    log_density: Callable[[Array], Array], start: Array, steps: int, near: float = 0.0
) -> Local:
    """Maximize each unit's term by Newton steps, damped unit by unit (Levenberg-Marquardt).

    :param steps: most steps of a unit.
    :param near: squared length in sds of the step at which a unit stops; 0: none stops.
    """
    eye = jnp.eye(start.shape[1], dtype=start.dtype)

    def step(carry: tuple) -> tuple:
        i, best, proposal, damping, moves = carry
        new = _local(log_density, proposal)
        # not for NaN, as from a curvature that has no factor
        better = moves & (new.value >= best.value)
        best = taken(better, new, best)
        damping = jnp.where(better, damping * 0.2, jnp.maximum(damping, 1e-3) * 6.0)
        diagonal = jnp.diagonal(best.curvature, axis1=-2, axis2=-1)
        scale = jnp.abs(diagonal).max(-1)[:, None, None] + 1e-6
        factor = small_matrices.cholesky(best.curvature + damping[:, None, None] * scale * eye)
        move = small_matrices.solve(factor, best.slope)
        arrived = (jnp.sum(best.slope * move, -1) < near) & (damping < DAMPED)
        return i + 1, best, best.at + move, damping, moves & ~arrived

    # the first step evaluates the start itself
    first = nowhere(start), start, jnp.zeros_like(start[:, 0]), jnp.ones(len(start), bool)
    return lax.while_loop(lambda x: (x[0] <= steps) & x[-1].any(), step, (0, *first))[1]
