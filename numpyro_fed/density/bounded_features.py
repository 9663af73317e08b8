r"""Bounded features of the whitened global position, to fit functions that are not linear in it.

With :math:`c = 3 \tanh(u / 3)` they are :math:`\psi(u) = (1,\; c_i,\; c_i c_j / 3,\; c_i^3 / 9)`.
In the tails a linear term outgrows every combination of them; products of u itself outgrew it.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import AnyArray

# with more, the features are too many for the points of a fit: 16 dimensions have 169 features,
# fitted at 1,024 points, and 30 dimensions would have 526 and 4,096
MOST_DIMENSIONS = 16
# bound of a coordinate, in sds: a feature is bounded by 3, and near linear within an sd (.96 at 1)
_REACH = 3.0


def num_features(dim: int) -> int:
    """Return the length of :func:`features` in ``dim`` dimensions."""
    return 1 + 2 * dim + dim * (dim + 1) // 2


def features(u: AnyArray) -> Array:
    r"""Return :math:`\psi` at whitened positions ``(..., d)``, of shape ``(..., p)``."""
    c = _REACH * jnp.tanh(u / _REACH)
    return jnp.concatenate([jnp.ones_like(c[..., :1]), c, curved(u)], axis=-1)


def curved(u: AnyArray) -> Array:
    """Return the products and cubes among :func:`features`."""
    c = _REACH * jnp.tanh(u / _REACH)
    first, second = np.tril_indices(u.shape[-1])
    return jnp.concatenate([c[..., first] * c[..., second] / 3, c**3 / 9], axis=-1)
