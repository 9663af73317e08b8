"""The silo's regressions on whitened points: its score, and the location and scale of its local latents."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.local_map import LocalMap
from numpyro_fed.small_matrices import solve_lower

__all__ = ["fit_map", "fit_score"]

_MOST_SHIFTED = 30  # dimensions; beyond, locations are linear in u: a least squares problem of 2 (1 + d) columns a latent costs too much
_MOST_STRETCHED = 6.0  # log scales that a point may be away


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
    """Regress locations ``(K, E, k)`` and log scales on the points.

    Log scales are linear in u. Locations, in units of the scale at u, are a combination of 1, u and ``e^(-b u)`` times these.
    """
    weights = weights / jnp.maximum(weights.sum(), 1e-30)
    scales = jnp.diagonal(chols, axis1=-2, axis2=-1)
    tril = jnp.einsum("k,keij->eij", weights, jnp.nan_to_num(chols / scales[..., None, :]))
    design = jnp.concatenate([jnp.ones((points.shape[0], 1), points.dtype), points], axis=1)
    normal = design.T @ (weights[:, None] * design) + 1e-6 * jnp.eye(design.shape[1], dtype=design.dtype)
    solver = jnp.linalg.solve(normal, (weights[:, None] * design).T)
    log_scale = jnp.einsum("pk,keh->peh", solver, jnp.nan_to_num(jnp.log(scales)))
    found = {"tril": tril, "log_scale": log_scale[0], "scale_coupling": jnp.moveaxis(log_scale[1:], 0, -1)}
    modes = jnp.nan_to_num(modes)
    if points.shape[1] > _MOST_SHIFTED:
        mean = jnp.einsum("pk,keh->peh", solver, modes)
        return LocalMap(mean=mean[0], coupling=jnp.moveaxis(mean[1:], 0, -1), **found)
    unturned = solve_lower(tril, modes)
    fit = jax.vmap(jax.vmap(partial(_locations, design, weights), in_axes=(1, 1)), in_axes=(1, 1))
    turned, shift = fit(unturned, log_scale)
    centre = jnp.einsum("eij,ejp->eip", tril, turned)
    return LocalMap(
        mean=centre[..., 0], coupling=centre[..., 1:], shift=shift[..., 0], shift_coupling=shift[..., 1:], **found
    )


def _locations(design: Array, weights: Array, x: Array, log_scale: Array) -> tuple[Array, Array]:
    """Coefficients A and S, each ``(1 + d,)``, of locations ``x = A (1, u) + e^(l + b u) S (1, u)``, errors counted in units of the scale."""
    stretch = jnp.clip(design[:, 1:] @ log_scale[1:], -_MOST_STRETCHED, _MOST_STRETCHED)
    shrink = jnp.exp(-stretch)
    columns = jnp.concatenate([design, (shrink - 1)[:, None] * design], axis=1)
    normal = columns.T @ (weights[:, None] * columns)
    ridge = 1e-5 * jnp.mean(jnp.diagonal(normal)) * jnp.eye(len(normal), dtype=normal.dtype)
    target = weights * x * jnp.exp(-log_scale[0]) * shrink
    plain, shrunk = jnp.split(jnp.linalg.solve(normal + ridge, columns.T @ target), 2)
    return jnp.exp(log_scale[0]) * shrunk, plain - shrunk
