r"""Importance weights of draws, Pareto-smoothed, and the k of their tails, which judges an
approximation without a reference.

The k of the weights w alone says whether means of bounded quantities can be trusted. A coordinate's
variance is a mean of :math:`w (x - m)^2`, whose tail may be worse where the posterior is wide in a
corner that few draws reach; so it is judged by that product's own k (Vehtari et al. 2024, on k of a
function).
"""

import numpy as np

from numpyro_fed._compat import import_arviz

__all__ = ["POOR", "smoothed", "tail_of_spreads", "worst_tail"]

POOR = 0.7  # Pareto's k above which importance weights have no useful mean (Vehtari et al. 2024)
_LOOKED_AT = 50  # tails, those whose terms vary most
_BLOCK = 256  # coordinates at a time
# n sum w^2 below which weights are as good as equal: q is within 0.005 nats, and k, which knows no
# scale, would judge noise
_EQUAL = 1.01


def smoothed(log_weight: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed weights that sum to one, and Pareto's k (0 for nearly equal weights, infinite
    where one is not finite).
    """
    if not np.isfinite(log_weight).all():
        return np.where(np.isfinite(log_weight), 1.0, 0.0) / max(
            np.isfinite(log_weight).sum(), 1
        ), float("inf")
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    if len(weight) * np.sum(weight**2) < _EQUAL:
        return weight, 0.0
    with np.errstate(over="ignore"):  # in the fit of the Pareto law, where it is a weight of zero
        found, k = import_arviz().psislw(log_weight - log_weight.max())
    weight = np.exp(found - found.max())
    return weight / weight.sum(), float(k)


def worst_tail(log_terms: np.ndarray) -> tuple[float, int]:
    """The largest k of several weighings of the same draws ``(number, n)``, and which it is, among
    those whose terms vary most.
    """
    which = np.argsort(-_unevenness(np.exp(log_terms - log_terms.max(1, keepdims=True))))[
        :_LOOKED_AT
    ]
    return _largest(log_terms[which], which)


def tail_of_spreads(weight: np.ndarray, theta: np.ndarray) -> tuple[float, int]:
    """The largest k of the coordinates' variances under weights ``(n,)`` of positions ``(n, d)``,
    and the coordinate, likewise.
    """

    def terms(which: slice | np.ndarray) -> np.ndarray:
        some = theta[:, which].astype(np.float64)
        return (weight[:, None] * (some - weight @ some) ** 2).T + np.finfo(float).tiny

    blocks = [slice(i, i + _BLOCK) for i in range(0, theta.shape[1], _BLOCK)]
    which = np.argsort(-np.concatenate([_unevenness(terms(block)) for block in blocks]))[
        :_LOOKED_AT
    ]
    return _largest(np.log(terms(which)), which)


def _largest(log_terms: np.ndarray, which: np.ndarray) -> tuple[float, int]:
    found = [smoothed(row)[1] for row in log_terms]
    at = int(np.argmax(found))
    return found[at], int(which[at])


def _unevenness(terms: np.ndarray) -> np.ndarray:
    """One over the effective number of terms, of each row."""
    return (terms**2).sum(1) / terms.sum(1) ** 2
