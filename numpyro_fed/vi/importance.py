"""Pareto-smoothed importance weights, whose tail index k judges an approximation.

It needs no reference. The k of the weights w alone says whether means of bounded quantities can be
trusted. A coordinate's variance is a mean of :math:`w (x - m)^2`. The tail of this product may be
worse, where the posterior is wide in a corner that few draws reach. So the product's own k judges
the variance (Vehtari et al. 2024, on k of a function).
"""

import numpy as np
from scipy.special import logsumexp

from numpyro_fed._arviz import pareto_smoothed

POOR = 0.7  # Pareto's k above which importance weights have no useful mean (Vehtari et al. 2024)
# most tails that are examined: those whose terms vary most. A tail of 16,000 draws takes 5 ms
_LOOKED_AT = 50
_BRIDGE_STEPS, _BRIDGE_STILL = 1000, 1e-8  # of the fixed point, and the change at which it ends
_BLOCK = 256  # coordinates whose terms are in memory at once: 33 MB for 16,000 draws
# n sum w^2 below which weights count as equal: q is within 0.005 nats, and k, which has no scale,
# would judge noise
_EQUAL = 1.01


def smoothed(log_weight: np.ndarray) -> tuple[np.ndarray, float]:
    """Return Pareto-smoothed weights that sum to one, and Pareto's k.

    k is 0 for nearly equal weights, and infinite where a weight is not finite.
    """
    if not np.isfinite(log_weight).all():
        return np.where(np.isfinite(log_weight), 1.0, 0.0) / max(
            np.isfinite(log_weight).sum(), 1
        ), float("inf")
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    if len(weight) * np.sum(weight**2) < _EQUAL:
        return weight, 0.0
    with np.errstate(over="ignore"):  # an overflow in the Pareto fit is a weight of zero
        found, k = pareto_smoothed(log_weight - log_weight.max())
    weight = np.exp(found - found.max())
    return weight / weight.sum(), k


def balanced(log_weights: list[np.ndarray], log_ratios: list[np.ndarray]) -> list[np.ndarray]:
    r"""Return log weights of draws from several proposals, as of draws from their mixture.

    The weight of a draw x of any proposal is :math:`p(x) / \sum_j \frac{n_j}{n} r_j(x)`, the
    balance heuristic (Veach, Guibas 1995). It is small where any proposal draws often. So a tail
    that the last proposal lacks keeps its draws from others, and shows in k.

    :param log_weights: for each proposal, log weights of its own ``n_j`` draws under it alone.
    :param log_ratios: for each proposal, log densities of all proposals at its draws, ``(J, n_j)``,
        up to a number that may differ between draws.
    """
    num = np.array([len(x) for x in log_weights])
    share = (num / num.sum())[:, None]
    return [
        weight + ratio[j] - logsumexp(ratio, axis=0, b=share)
        for j, (weight, ratio) in enumerate(zip(log_weights, log_ratios, strict=True))
    ]


def log_mean(log_terms: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Return the log of a weighted mean of terms, and its Monte-Carlo error.

    :param log_terms: logs of the terms, of which one at least is finite.
    :param weight: weights that sum to one.
    """
    most = log_terms.max()
    terms = np.exp(log_terms - most)
    mean = weight @ terms
    error = np.sqrt(np.sum(weight**2 * (terms / mean - 1) ** 2))
    return float(np.log(mean) + most), float(error)


def log_bridge(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    r"""Return the log of a mean of :math:`e^{\ell}` under a law p, and its Monte-Carlo error.

    Draws are of p and of the law proportional to :math:`p\, e^{\ell}`, so that neither needs to
    cover the other. The estimate is the fixed point of Meng, Wong (1996), section 4; its error is
    that of independent draws (Frühwirth-Schnatter 2004).

    :param above: values of :math:`\ell` at draws of the law proportional to :math:`p\, e^{\ell}`.
    :param below: values at draws of p.
    """
    share, value = len(above) / (len(above) + len(below)), float(np.median(above))
    for _ in range(_BRIDGE_STEPS):
        # with r = e^value: e^l / (share e^l + (1 - share) r) at draws of p, and r in place of the
        # numerator at the others; their means are equal at the fixed point
        up = 1 / (share + (1 - share) * np.exp(np.minimum(value - below, 700)))
        down = 1 / (share * np.exp(np.minimum(above - value, 700)) + 1 - share)
        step = float(np.log(up.mean()) - np.log(down.mean()))
        value += step
        if abs(step) < _BRIDGE_STILL:
            break
    parts = [x.var() / x.mean() ** 2 / len(x) for x in (up, down)]
    return value, float(np.sqrt(sum(parts)))


def effective(weight: np.ndarray) -> float:
    """Return the effective number of draws with weights that sum to one."""
    return float(1 / max(np.sum(weight**2), np.finfo(float).tiny))


def worst_tail(log_terms: np.ndarray) -> tuple[float, int]:
    """Return the largest k of several weighings of the same draws, and the weighing's index.

    Only the 50 weighings whose terms vary most are examined.

    :param log_terms: log weights, one row for each weighing, ``(number, n)``.
    """
    which = np.argsort(-_unevenness(np.exp(log_terms - log_terms.max(1, keepdims=True))))[
        :_LOOKED_AT
    ]
    return _largest(log_terms[which], which)


def tail_of_spreads(weight: np.ndarray, theta: np.ndarray) -> tuple[float, int]:
    """Return the largest k of the coordinates' variances, and the coordinate's index.

    Only the 50 coordinates whose terms vary most are examined.

    :param weight: normalized weights ``(n,)``.
    :param theta: positions ``(n, d)``.
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
    """Return one over the effective number of terms, for each row."""
    return (terms**2).sum(1) / terms.sum(1) ** 2
