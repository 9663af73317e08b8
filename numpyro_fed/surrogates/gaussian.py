r"""Gaussian surrogates of the silos' likelihoods, in natural parameters.

A silo's surrogate is :math:`\log q_s(\theta) = \eta_s^\top \theta - \tfrac12 \theta^\top \Lambda_s
\theta` up to a constant, where :math:`\theta` is the flat global position in unconstrained space.
It need not be a density: :math:`\Lambda_s` may be singular or indefinite, for instance in a silo
with one row. Only the product with the prior must be a density. Exponential families are closed
under products (FSGLD 3.1), so that :math:`q = \prod_s q_s` costs nothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.surrogates.corrections import Corrections

# dimensions of full precisions; beyond, each silo has a d x d matrix of more than 1 MB in float32
FULL_UP_TO = 500


def matvec(matrix: Array, vector: Array) -> Array:
    """Return ``matrix @ vector`` for a matrix that is full or stored as its diagonal."""
    return matrix @ vector if matrix.ndim == 2 else matrix * vector


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gaussian:
    """Gaussian factor in natural parameters; leading axes are a batch.

    :param eta: precision times mean, shape ``(..., d)``. NumPy arrays in float64 are accepted, and
        avoid cancellation.
    :param precision: full ``(..., d, d)``, or diagonal ``(..., d)``.

    Example::

        >>> import jax.numpy as jnp
        >>> from numpyro_fed.surrogates import Gaussian
        >>> q = Gaussian(jnp.array([2.0]), jnp.array([[2.0]]))
        >>> q = q * Gaussian(jnp.array([0.0]), jnp.array([[2.0]]))
        >>> q.mean.tolist(), (q / q).precision.tolist()
        ([0.5], [[0.0]])
    """

    eta: Array | np.ndarray
    precision: Array | np.ndarray

    @property
    def is_diagonal(self) -> bool:
        """Flag of a precision that is stored as its diagonal."""
        return self.precision.ndim == self.eta.ndim

    def __mul__(self, other: "Gaussian") -> "Gaussian":
        return Gaussian(self.eta + other.eta, self.precision + other.precision)

    def __truediv__(self, other: "Gaussian") -> "Gaussian":
        return Gaussian(self.eta - other.eta, self.precision - other.precision)

    def product(self) -> "Gaussian":
        """Return the product over the leading batch axis."""
        return Gaussian(self.eta.sum(0), self.precision.sum(0))

    def score(self, theta: ArrayLike) -> Array:
        """Return the gradient of the log factor at ``theta`` ``(d,)``, shape ``(..., d)``."""
        theta = jnp.asarray(theta)
        product = self.precision * theta if self.is_diagonal else self.precision @ theta
        return jnp.asarray(self.eta - product)

    def scores(self, thetas: np.ndarray) -> np.ndarray:
        """Return gradients at positions ``(K, d)``, in float64.

        The shape is ``(S, K, d)`` for a batch ``(S,)``. In float32, two large terms may cancel.
        """
        eta, precision = (np.asarray(x, np.float64) for x in (self.eta, self.precision))
        if self.is_diagonal:
            return np.asarray(eta[:, None] - thetas * precision[:, None])
        return np.asarray(eta[:, None] - np.swapaxes(precision @ thetas.T, 1, 2))

    def whitening(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and a factor of the covariance of one density, in float64.

        The factor is lower triangular ``(d, d)``; that of a diagonal precision is its diagonal
        ``(d,)``.
        """
        precision, eta = (np.asarray(x, np.float64) for x in (self.precision, self.eta))
        if self.is_diagonal:
            return eta / precision, precision**-0.5
        return np.linalg.solve(precision, eta), np.linalg.cholesky(np.linalg.inv(precision))

    @property
    def mean(self) -> Array:
        """Mean, shape ``(..., d)``; the factor must be a density."""
        if self.is_diagonal:
            return jnp.asarray(self.eta / self.precision)
        return jnp.linalg.solve(self.precision, self.eta[..., None])[..., 0]

    @property
    def covariance(self) -> Array:
        """Covariance, full or diagonal as the precision is."""
        return jnp.asarray(
            1 / self.precision if self.is_diagonal else jnp.linalg.inv(self.precision)
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Surrogates:
    """Gaussian factors, one for each silo and one for the prior.

    :param factors: the silos' factors, batch ``(S,)`` in the order of ``silos.names``.
    :param prior: the prior's factor, for the whitening only: gradients use the prior itself.
    :param corrections: bounded corrections of the silos' scores, or ``None``. Gradients include
        them, :meth:`posterior` does not.

    A silo's factor is ``d + d (d + 1) / 2`` different numbers (diagonal: ``2 d``).
    """

    factors: Gaussian
    prior: Gaussian
    corrections: Corrections | None = None

    def __len__(self) -> int:
        return self.factors.eta.shape[0]

    @property
    def dim(self) -> int:
        """Dimension of the flat global position."""
        return self.factors.eta.shape[-1]

    def score(self, theta: ArrayLike) -> Array:
        """Return gradients of the silos' surrogates at ``theta`` ``(d,)``, shape ``(S, d)``."""
        score = self.factors.score(theta)
        return (
            score
            if self.corrections is None
            else score + self.corrections.score(jnp.asarray(theta))
        )

    def scores(self, thetas: np.ndarray) -> np.ndarray:
        """Return :meth:`score` at positions ``(K, d)``, in float64; shape ``(S, K, d)``."""
        scores = self.factors.scores(thetas)
        if self.corrections is None:
            return scores
        bent = jax.vmap(self.corrections.score, out_axes=1)(
            jnp.asarray(thetas, jnp.result_type(float))
        )
        return scores + np.asarray(bent, np.float64)

    def posterior(self) -> Gaussian:
        """Return the product of all factors, a one-shot Gaussian posterior and the preconditioner.

        :raises ValueError: where the product is not positive definite.
        """
        whole = self.factors.product() * self.prior
        precision = np.asarray(whole.precision, np.float64)
        smallest = precision.min() if whole.is_diagonal else np.linalg.eigvalsh(precision).min()
        if not smallest > 0:
            raise ValueError(
                "the product of surrogates and prior is not positive definite: smallest eigenvalue "
                f"{smallest:.3g}; expected > 0. Pass precisions whose sum is positive definite"
            )
        return whole

    def __repr__(self) -> str:
        form = "diagonal" if self.factors.is_diagonal else "full"
        return (
            f"Surrogates({len(self)} silos, dimension {self.dim}, "
            f"{form}{'' if self.corrections is None else ', corrected'})"
        )
