r"""Bounded functions of the whitened global position, for what is not linear in it.

With :math:`c = 3 \tanh(u / 3)`: :math:`\psi(u) = (1,\; c_i,\; c_i c_j / 3,\; c_i^3 / 9)`. A
combination of them cannot open a tail that something linear closes; products of u itself did.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["MOST_DIMENSIONS", "curved", "features", "num_features"]

MOST_DIMENSIONS = 16  # beyond, the features are too many for the points that they are fitted at
_REACH = 3.0


def num_features(dim: int) -> int:
    """Length of :func:`features` in ``dim`` dimensions."""
    return 1 + 2 * dim + dim * (dim + 1) // 2


def features(u: Array) -> Array:
    """:math:`\\psi` at whitened positions ``(..., d)``; shape ``(..., p)``."""
    c = _REACH * jnp.tanh(u / _REACH)
    return jnp.concatenate([jnp.ones_like(c[..., :1]), c, curved(u)], axis=-1)


def curved(u: Array) -> Array:
    """The products and cubes among :func:`features`."""
    c = _REACH * jnp.tanh(u / _REACH)
    first, second = np.tril_indices(u.shape[-1])
    return jnp.concatenate([c[..., first] * c[..., second] / 3, c**3 / 9], axis=-1)
