r"""Variance that the disagreement of nodes adds to their draws, from mixing matrices alone.

With unit noise at every step, push-sum's nodes are at :math:`Z_i = \bar X + E_i`, where :math:`E =
A(X - y \bar X) / y` remains from earlier noise. The covariance C of :math:`X - y \bar X`, and its
covariance c with :math:`\bar X`, follow

.. math::
    C \leftarrow A C A^\top + F F^\top, \qquad c \leftarrow A c + F 1 / m,
    \qquad F = I - y 1^\top / m .

Silos alike pull all :math:`X_i` by the same force, however unequal y, which halves the covariance
of E with :math:`\bar X`. Since they pull at Z, the variance of :math:`\bar X` is less by the mean
of that covariance. In sum, with :math:`c'_i = (A c)_i / y_i`, the variance of node i exceeds the
target's by :math:`(A C A^\top)_{ii} / y_i^2 + c'_i - \tfrac1{2m} \sum_j c'_j`, averaged over the
period.

With tracking the noise has variances y, so :math:`F F^\top` is :math:`\operatorname{diag}(y) - y
y^\top / m` and c vanishes. Gossip's nodes have y = 1, and their draws include their last noise, so
the excess is the largest diagonal entry of C.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

# largest number of doublings of the sum over periods: 2^40 periods forget a start by e^-11 even if
# one shrinks disagreement by a factor 1 - 1e-11 only
_DOUBLINGS = 40
# steps of a random sequence before the average, and during it: rings of four and eight nodes with
# links that fail shrink disagreement in so many by 3e-14 and 4e-4
SEEN_STEPS = 100


def product(period: Iterable[np.ndarray]) -> np.ndarray:
    """Return the matrix of a whole period."""
    whole: np.ndarray | None = None
    for matrix in period:
        whole = matrix @ np.eye(len(matrix)) if whole is None else matrix @ whole
    assert whole is not None
    return whole


def stationary_weight(product: np.ndarray) -> np.ndarray:
    """Return the long-run push-sum weights at the start of a period with this matrix."""
    return np.linalg.matrix_power(product, 1 << 16).mean(1) * len(product)


def excess_variance(
    period: list[np.ndarray], sequences: list[Iterator[np.ndarray]], *, gossip: bool, tracking: bool
) -> float:
    """Return the excess of the worst node.

    :param period: the matrices of a period without failures.
    :param sequences: random matrices of ``2 * SEEN_STEPS`` steps each, where links fail. The result
        is then the median over these sequences.
    """
    m, whole = len(period[0]), product(period)

    def through(
        weight: np.ndarray, spread: np.ndarray, cross: np.ndarray, matrices: Iterable
    ) -> tuple:
        seen = []
        for matrix in matrices:
            weight, spread, cross = matrix @ weight, matrix @ spread @ matrix.T, matrix @ cross
            along = cross / weight
            if not gossip:
                seen.append(np.diag(spread) / weight**2 + along - along.mean() / 2)
            variance = weight if tracking else np.ones(m)
            fresh = np.eye(m) - np.outer(weight, np.ones(m)) / m
            spread = spread + (fresh * variance) @ fresh.T
            cross = cross + fresh @ variance / m
            if gossip:
                seen.append(np.diag(spread))
        return weight, spread, cross, np.mean(seen, axis=0)

    weight = stationary_weight(whole)
    # the fixed point of a period by doubling, since k doublings sum over 2^k periods
    _, spread, cross, _ = through(weight, np.zeros((m, m)), np.zeros(m), period)
    for _ in range(_DOUBLINGS):
        more = whole @ spread @ whole.T
        spread, cross, whole = spread + more, cross + whole @ cross, whole @ whole
        if np.abs(more).max() < 1e-12 * np.abs(spread).max():
            break  # further doublings would only double the sums' rounding errors
    if not sequences:
        return float(through(weight, spread, cross, period)[3].max())
    means = []
    for drawn in sequences:
        y, c, x, _ = through(weight, spread, cross, islice(drawn, SEEN_STEPS))
        means.append(through(y, c, x, drawn)[3])
    return float(np.median(means, axis=0).max())
