"""The silo's regressions on whitened points: its score, and the location and scale of its local latents."""

import jax.numpy as jnp
from jax import Array

from numpyro_fed.local_map import LocalMap

__all__ = ["fit_map", "fit_score"]


def fit_score(points: Array, scores: Array, weights: Array, full: bool) -> tuple[Array, Array, Array]:
    """Weighted least squares of scores ``(K, d)`` on points: ``a``, symmetric ``B``, root mean square misfit."""
    weights = weights / jnp.maximum(weights.sum(), 1e-30)
    if full:
        design = jnp.concatenate([jnp.ones((points.shape[0], 1), points.dtype), points], axis=1)
        normal = design.T @ (weights[:, None] * design)
        ridge = 1e-6 * jnp.eye(normal.shape[0], dtype=normal.dtype)
        coefficients = jnp.linalg.solve(normal + ridge, design.T @ (weights[:, None] * scores))
        precision = -0.5 * (coefficients[1:] + coefficients[1:].T)
        # given the symmetric B, the best shift is the mean of what it leaves
        shift = weights @ (scores + points @ precision)
        fitted = shift - points @ precision
    else:
        mean_u, mean_s = weights @ points, weights @ scores
        covariance = weights @ ((points - mean_u) * (scores - mean_s))
        precision = -covariance / (weights @ (points - mean_u) ** 2)
        shift = mean_s + precision * mean_u
        fitted = shift - points * precision
    misfit = jnp.sqrt(jnp.sum(weights[:, None] * (scores - fitted) ** 2))
    return shift, precision, misfit


def fit_map(points: Array, modes: Array, chols: Array, weights: Array) -> LocalMap:
    """Regress locations ``(K, E, k)`` and log scales on the points."""
    weights = weights / jnp.maximum(weights.sum(), 1e-30)
    scales = jnp.diagonal(chols, axis1=-2, axis2=-1)
    tril = jnp.einsum("k,keij->eij", weights, jnp.nan_to_num(chols / scales[..., None, :]))
    design = jnp.concatenate([jnp.ones((points.shape[0], 1), points.dtype), points], axis=1)
    normal = design.T @ (weights[:, None] * design) + 1e-6 * jnp.eye(design.shape[1], dtype=design.dtype)
    solver = jnp.linalg.solve(normal, (weights[:, None] * design).T)
    mean = jnp.einsum("pk,keh->peh", solver, jnp.nan_to_num(modes))
    log_scale = jnp.einsum("pk,keh->peh", solver, jnp.nan_to_num(jnp.log(scales)))
    return LocalMap(
        mean=mean[0],
        coupling=jnp.moveaxis(mean[1:], 0, -1),
        tril=tril,
        log_scale=log_scale[0],
        scale_coupling=jnp.moveaxis(log_scale[1:], 0, -1),
    )
