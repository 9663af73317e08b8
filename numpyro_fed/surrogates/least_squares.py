"""Regressions of a silo on whitened points.

A silo regresses its score, and the location and scale of its local latents.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_fed.density.bounded_features import MOST_DIMENSIONS, curved
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.density.small_matrices import solve_lower, solve_positive

_NUMBERS_AT_ONCE = 1 << 18  # bound of the designs that are solved together: 1 MiB in float32
# bound of a log scale's difference from that at u = 0: the normal equations have squares, and
# e^12 = 2e5 is within the seven digits of float32
_MOST_STRETCHED = 6.0


def fit_score(
    points: Array, scores: Array, weights: Array, full: bool
) -> tuple[Array, Array, Array]:
    """Fit the linear score ``a - B u`` to scores by weighted least squares.

    :param points: whitened positions u, shape ``(K, d)``.
    :param scores: whitened scores, shape ``(K, d)``.
    :param weights: shape ``(K,)``.
    :param full: fit a full B, or else a diagonal one.
    :return: a ``(d,)``; B, symmetric ``(d, d)`` or its diagonal ``(d,)``; and the root mean square
        of the misfit's norm.
    """
    weights = weights / jnp.maximum(weights.sum(), 1e-30)
    if full:
        design = jnp.concatenate([jnp.ones((points.shape[0], 1), points.dtype), points], axis=1)
        normal = design.T @ (weights[:, None] * design)
        ridge = 1e-6 * jnp.eye(normal.shape[0], dtype=normal.dtype)
        coefficients = solve_positive(normal + ridge, design.T @ (weights[:, None] * scores))
        precision = -0.5 * (coefficients[1:] + coefficients[1:].T)
        # for the symmetric B, the best shift is the mean of the residuals
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


def fit_map(
    points: Array, modes: Array, chols: Array, weights: Array, bent: bool = True
) -> LocalMap:
    """Regress locations ``(K, E, k)`` and log scales of the latents on the points.

    Log scales are regressed on 1, u and, where dimensions are few, the bounded products and cubes.
    Locations, in units of the scale at u, are regressed on these and on 1 and u times ``e^(-b u)``.

    :param chols: factors of the latents' covariances, ``(K, E, k, k)``.
    :param bent: include nonlinear terms: bounded products and cubes, and locations that go with the
        scale.
    """
    weights = weights / jnp.maximum(weights.sum(), 1e-30)
    scales = jnp.diagonal(chols, axis1=-2, axis2=-1)
    tril = jnp.einsum("k,keij->eij", weights, jnp.nan_to_num(chols / scales[..., None, :]))
    linear = jnp.concatenate([jnp.ones((points.shape[0], 1), points.dtype), points], axis=1)
    bent = bent and points.shape[1] <= MOST_DIMENSIONS
    corrections = curved(points) if bent else points[:, :0]
    modes, log_scales = jnp.nan_to_num(modes), jnp.nan_to_num(jnp.log(scales))
    of_scale = _solve(jnp.concatenate([linear, corrections], axis=1), weights, log_scales)
    log_scale, scale_coupling, scale_curvature = jnp.split(of_scale, [1, linear.shape[1]], axis=-1)
    found = {"tril": tril, "log_scale": log_scale[..., 0], "scale_coupling": scale_coupling}
    if not bent:
        mean = _solve(linear, weights, modes)
        return LocalMap(mean=mean[..., 0], coupling=mean[..., 1:], **found)

    def locations(args: tuple[Array, Array]) -> tuple[Array, Array]:
        return _locations(linear, corrections, weights, *args)

    units = (jnp.moveaxis(solve_lower(tril, modes), 0, -1), of_scale)
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), units)
    at_once = max(
        1, _NUMBERS_AT_ONCE // (len(points) * (2 * linear.shape[1] + corrections.shape[1]))
    )
    turned, shift = (
        x.reshape(*modes.shape[1:], -1)
        for x in lax.map(locations, flat, batch_size=min(at_once, len(flat[0])))
    )
    center = jnp.einsum("eij,ejp->eip", tril, turned)
    shift, shift_coupling, shift_curvature = jnp.split(shift, [1, linear.shape[1]], axis=-1)
    return LocalMap(
        mean=center[..., 0], coupling=center[..., 1:],
        shift=shift[..., 0], shift_coupling=shift_coupling, shift_curvature=shift_curvature,
        scale_curvature=scale_curvature, **found,
    )  # fmt: skip


def _solve(design: Array, weights: Array, x: Array) -> Array:
    """Regress ``(K, E, k)`` on ``(K, p)`` by weighted least squares with a small ridge.

    The result has shape ``(E, k, p)``.
    """
    normal = design.T @ (weights[:, None] * design) + 1e-5 * jnp.eye(
        design.shape[1], dtype=design.dtype
    )
    right = jnp.einsum("kp,k,keh->peh", design, weights, x)
    found = solve_positive(normal, right.reshape(len(normal), -1)).reshape(right.shape)
    return jnp.moveaxis(found, 0, -1)


def _locations(
    linear: Array, corrections: Array, weights: Array, x: Array, of_scale: Array
) -> tuple[Array, Array]:
    """Fit ``A (1, u) + e^(log scale) S (1, u, psi)`` to one latent's locations ``(K,)``.

    Errors are in units of the scale.

    :param of_scale: coefficients of the log scale.
    :return: A ``(1 + d,)`` and S ``(1 + d + p,)``.
    """
    columns = linear.shape[1]
    grown = jnp.concatenate([linear, corrections], axis=1)[:, 1:] @ of_scale[1:]
    shrink = jnp.exp(-jnp.clip(grown, -_MOST_STRETCHED, _MOST_STRETCHED))
    design = jnp.concatenate([linear, corrections, (shrink - 1)[:, None] * linear], axis=1)
    normal = design.T @ (weights[:, None] * design)
    ridge = 1e-5 * jnp.mean(jnp.diagonal(normal)) * jnp.eye(len(normal), dtype=normal.dtype)
    target = weights * x * jnp.exp(-of_scale[0]) * shrink
    found = solve_positive(normal + ridge, (design.T @ target)[:, None])[:, 0]
    plain, shrunk = found[:-columns], found[-columns:]
    return jnp.exp(of_scale[0]) * shrunk, plain.at[:columns].add(-shrunk)
