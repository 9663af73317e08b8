r"""Marginal quantiles of the structured Gaussian family.

A global latent is Gaussian. A local latent is a mixture over theta: given u, latent i of unit g is
Gaussian with mean :math:`m_{gi} + C_{gi} u` and variance :math:`\sum_j T_{gij}^2 e^{2 l_{gj} + 2
b_{gj} u}`. Its quantile x solves :math:`E_u \Phi((x - \text{mean}) / \text{sd}) = p`. The
expectation is over Sobol points u, and bisection finds the solution.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import ndtr, ndtri

from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.surrogates.sobol import sobol_normal
from numpyro_fed.vi.guides.normal import SiloNormal

__all__ = ["latent_quantiles"]

_POINTS = 512
_BISECTIONS = 50


def latent_quantiles(
    family: SiloNormal, params: Mapping[str, Array], local: LocalMap | None, probs: Array
) -> tuple[Array, Array | None]:
    """Return quantiles of the global latents ``(Q, d)`` and the local ones ``(Q, G, k)``.

    All are unconstrained; without local latents the second is ``None``.
    """
    loc = params[f"{family.prefix}_loc"]
    theta = loc + ndtri(probs)[:, None] * family.scale(params).sd()
    if local is None:
        return theta, None
    u = jnp.asarray(sobol_normal(_POINTS, family.factors.dim, seed=0), loc.dtype)
    square = None if local.tril is None else local.tril**2

    def conditional(u: Array) -> tuple[Array, Array]:
        variance = jnp.exp(2 * local.log_scales(u))
        if square is not None:
            variance = jnp.einsum("gij,gj->gi", square, variance)
        return local.location(u), jnp.sqrt(variance)

    mean, sd = jax.vmap(conditional)(u)
    low, high = (mean - 8 * sd).min(0), (mean + 8 * sd).max(0)

    def quantile(p: Array) -> Array:
        def bisect(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = ends
            middle = (low + high) / 2
            below = ndtr((middle - mean) / sd).mean(0) < p
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        return sum(lax.fori_loop(0, _BISECTIONS, bisect, (low, high))) / 2

    return theta, lax.map(quantile, probs)
