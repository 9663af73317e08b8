r"""Bounded corrections of Gaussian surrogates: what of a silo's score no Gaussian has.

With u whitened coordinates a silo's surrogate score becomes

.. math:: \nabla_u \log q_s(u) = a_s - B_s u + D_s^\top \psi(u)

with the bounded features of :mod:`numpyro_fed.density.bounded_features`. It need not be a gradient:
conducive gradients are unbiased for any functions of theta whose mean over silos is taken away. It
is bounded, so that it cannot open a tail that the Gaussian closes. Scale parameters are why it is
there: a likelihood is flat in the logarithm of a scale on one side and falls on the other, and what
is left of that is most of the silos' noise.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.density.bounded_features import features
from numpyro_fed.density.small_matrices import solve_positive
from numpyro_fed.rounds.serialization import wire_name

__all__ = ["Bends", "regress"]


def regress(points: Array, scores: Array, weights: Array) -> Array:
    """D: weighted least squares of whitened scores ``(K, d)`` on the features at points ``(K, d)``.

    Shape ``(p, d)``.
    """
    psi = features(points)
    weights = (weights / jnp.maximum(weights.sum(), 1e-30))[:, None]
    normal = psi.T @ (weights * psi) + 1e-4 * jnp.eye(psi.shape[1], dtype=psi.dtype)
    return solve_positive(normal, psi.T @ (weights * scores))


@wire_name("Bends")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bends:
    """The corrections of all silos.

    :param loc: where u is zero, ``(d,)``.
    :param whiten: ``u = whiten (theta - loc)``, ``(d, d)``.
    :param coefficients: D, of scores in u, ``(S, p, d)``.
    """

    loc: Any
    whiten: Any
    coefficients: Any

    def score(self, theta: Array) -> Array:
        """Their gradients at ``theta`` of shape ``(d,)``, in theta.

        Shape ``(..., d)`` as the coefficients'.
        """
        psi = features(self.whiten @ (theta - self.loc))
        return (psi @ self.coefficients) @ self.whiten

    def of(self, coefficients: Array) -> "Bends":
        """The same coordinates with other coefficients: one silo's, or a sum."""
        return replace(self, coefficients=coefficients)
