"""Points at which scores are taken and latents integrated, on the host."""

import math

import numpy as np
from scipy.special import ndtri
from scipy.stats import qmc

__all__ = ["sobol_normal", "wide_points"]


def sobol_normal(num: int, dim: int, seed: int) -> np.ndarray:
    """Antithetic scrambled Sobol points of the standard normal, shape ``(num, dim)``.

    ``num`` even.
    """
    half = num // 2
    uniform = qmc.Sobol(dim, scramble=True, seed=seed).random_base2(
        math.ceil(math.log2(max(half, 2)))
    )
    u = ndtri(np.clip(uniform, 1e-6, 1 - 1e-6))[:half]
    return np.concatenate([u, -u])


def wide_points(num: int, dim: int, seed: int) -> np.ndarray:
    """Half N(0, 1.25^2), half with one axis stretched to +-8."""
    u = sobol_normal(num, dim, seed)
    half = num // 4  # u is (points, mirror images): stretch the same quarter of each
    for start in (0, num // 2):
        rows = np.arange(start, start + half)
        # shuffled, so that the reach of an axis does not depend on its place; the same for mirror
        # images
        reach = np.random.default_rng(seed).permutation(np.linspace(1, 8, half))
        axis = np.arange(half) % dim
        sign = 1.0 if start == 0 else -1.0
        u[rows, axis] = sign * reach * np.where((np.arange(half) // dim) % 2, -1.0, 1.0)
        u[start + half : start + num // 2] *= 1.25
    return u
