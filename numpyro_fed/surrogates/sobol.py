"""Sobol points for scores and for integrals over latents, on the host."""

import math

import numpy as np
from scipy.special import ndtri
from scipy.stats import qmc


def sobol_normal(num: int, dim: int, seed: int) -> np.ndarray:
    """Return antithetic pairs of scrambled Sobol points of the standard normal.

    The shape is ``(num, dim)``, with ``num`` even.
    """
    half = num // 2
    uniform = qmc.Sobol(dim, scramble=True, seed=seed).random_base2(
        math.ceil(math.log2(max(half, 2)))
    )
    u = ndtri(np.clip(uniform, 1e-6, 1 - 1e-6))[:half]
    return np.concatenate([u, -u])


def wide_points(num: int, dim: int, seed: int) -> np.ndarray:
    """Return Sobol points that reach into the tails, ``(num, dim)``.

    Half are from N(0, 1.25^2); the others have one axis stretched, up to +-8.
    """
    u = sobol_normal(num, dim, seed)
    half = num // 4  # u is points, then their mirror images: stretch the same half of each
    for start in (0, num // 2):
        rows = np.arange(start, start + half)
        # shuffled, so that an axis' reach does not depend on its place; alike for mirror images
        reach = np.random.default_rng(seed).permutation(np.linspace(1, 8, half))
        axis = np.arange(half) % dim
        sign = 1.0 if start == 0 else -1.0
        u[rows, axis] = sign * reach * np.where((np.arange(half) // dim) % 2, -1.0, 1.0)
        u[start + half : start + num // 2] *= 1.25
    return u
