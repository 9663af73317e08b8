r"""Bounded corrections of Gaussian surrogates, for the nonlinear part of a silo's score.

With u whitened coordinates, the score of a silo's surrogate becomes

.. math:: \nabla_u \log q_s(u) = a_s - B_s u + D_s^\top \psi(u)

with the bounded features :math:`\psi` of :mod:`numpyro_fed.density.bounded_features`. It need not
be the gradient of any function. Conducive gradients subtract the mean over silos, and are therefore
unbiased for any functions of theta. The correction is bounded, so that it cannot open a tail that
the Gaussian closes.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed._typing import AnyArray
from numpyro_fed.density.bounded_features import features
from numpyro_fed.density.small_matrices import solve_positive
from numpyro_fed.rounds.serialization import wire_name


@jax.jit
def regress(points: Array, scores: Array, weights: Array) -> Array:
    """Regress whitened scores on the bounded features by weighted least squares.

    :param points: whitened positions, shape ``(K, d)``.
    :param scores: shape ``(K, d)``.
    :param weights: shape ``(K,)``.
    :return: D, shape ``(p, d)``.
    """
    psi = features(points)
    weights = (weights / jnp.maximum(weights.sum(), 1e-30))[:, None]
    normal = psi.T @ (weights * psi) + 1e-4 * jnp.eye(psi.shape[1], dtype=psi.dtype)
    return solve_positive(normal, psi.T @ (weights * scores))


@wire_name("Corrections")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Corrections:
    """Corrections of all silos.

    :param loc: the position at which u is zero, ``(d,)``.
    :param whiten: the matrix ``(d, d)`` in ``u = whiten (theta - loc)``.
    :param coefficients: D for scores in u, ``(S, p, d)``.
    """

    loc: AnyArray
    whiten: AnyArray
    coefficients: AnyArray

    def score(self, theta: Array) -> Array:
        """Return the corrections at ``theta`` of shape ``(d,)``, in the coordinates of theta.

        The shape is ``(..., d)``, with the leading axes of the coefficients.
        """
        psi = features(self.whiten @ (theta - self.loc))
        return (psi @ self.coefficients) @ self.whiten

    def of(self, coefficients: AnyArray) -> "Corrections":
        """Return corrections in the same coordinates with other coefficients.

        :param coefficients: those of one silo, or a sum over silos.
        """
        return replace(self, coefficients=coefficients)
