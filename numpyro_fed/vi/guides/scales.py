r"""Square roots L of a Gaussian's covariance, with ``theta = loc + L u`` and u standard normal.

L is full (lower triangular), diagonal, or of low rank beyond the diagonal,

.. math:: L = \mathrm{diag}(s) (I + A A^\top), \qquad A \in R^{d \times r}.

The covariances of the last form are those of a factor model, ``diag(s) (I + M) diag(s)`` with M
positive of rank r. Inverse and determinant cost :math:`O(d r^2)` (Woodbury).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from numpyro_fed.rounds.serialization import wire_name


@wire_name("Triangular")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Triangular:
    """A lower triangular square root ``(d, d)``."""

    tril: Array

    def apply(self, u: Array) -> Array:
        """Return ``L u``."""
        return self.tril @ u

    def solve(self, x: Array) -> Array:
        """Return ``L^-1 x``."""
        return solve_triangular(self.tril, x, lower=True)

    def log_det(self) -> Array:
        """Return ``log det L``."""
        return jnp.sum(jnp.log(jnp.diagonal(self.tril)))

    def covariance(self) -> Array:
        """Return ``L L'``, shape ``(d, d)``."""
        return self.tril @ self.tril.T

    def sd(self) -> Array:
        """Return the marginal standard deviations ``(d,)``."""
        return jnp.linalg.norm(self.tril, axis=1)


@wire_name("Diagonal")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagonal:
    """A diagonal square root, stored as ``(d,)``."""

    scale: Array

    def apply(self, u: Array) -> Array:
        """Return ``L u``."""
        return self.scale * u

    def solve(self, x: Array) -> Array:
        """Return ``L^-1 x``."""
        return x / self.scale

    def log_det(self) -> Array:
        """Return ``log det L``."""
        return jnp.sum(jnp.log(self.scale))

    def covariance(self) -> Array:
        """Return the variances ``(d,)``."""
        return self.scale**2

    def sd(self) -> Array:
        """Return the marginal standard deviations ``(d,)``."""
        return self.scale


@wire_name("LowRankScale")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The square root ``diag(scale) (I + A A')``, with scale ``(d,)`` and A ``(d, r)``."""

    scale: Array
    factor: Array

    def apply(self, u: Array) -> Array:
        """Return ``L u``."""
        return self.scale * (u + self.factor @ (self.factor.T @ u))

    def solve(self, x: Array) -> Array:
        """Return ``L^-1 x``."""
        y = x / self.scale
        return y - self.factor @ jnp.linalg.solve(self._gram(), self.factor.T @ y)

    def log_det(self) -> Array:
        """Return ``log det L``."""
        return jnp.sum(jnp.log(self.scale)) + jnp.linalg.slogdet(self._gram())[1]

    def covariance(self) -> Array:
        """Return ``L L'``, shape ``(d, d)``."""
        root = self.scale[:, None] * (jnp.eye(len(self.scale)) + self.factor @ self.factor.T)
        return root @ root.T

    def sd(self) -> Array:
        """Return the marginal standard deviations ``(d,)``."""
        gram = self.factor.T @ self.factor
        twice = self.factor @ (2 * jnp.eye(gram.shape[0]) + gram)
        return self.scale * jnp.sqrt(1 + jnp.sum(twice * self.factor, axis=1))

    def _gram(self) -> Array:
        return jnp.eye(self.factor.shape[1]) + self.factor.T @ self.factor


Scale = Triangular | Diagonal | LowRank


def relative(base: Scale, new: Scale) -> Array:
    """Return ``base^-1 new``, shape ``(d, d)``, or its diagonal where both are diagonal."""
    if isinstance(base, Diagonal) and isinstance(new, Diagonal):
        return new.scale / base.scale
    d = (new.tril if isinstance(new, Triangular) else new.scale).shape[0]
    return jax.vmap(lambda column: base.solve(new.apply(column)), out_axes=1)(jnp.eye(d))
