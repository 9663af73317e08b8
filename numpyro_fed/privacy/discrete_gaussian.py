r"""Exact draws of the discrete Gaussian.

Its law is :math:`P(k) \propto \exp(-k^2 / 2 t^2)` on the whole numbers. The draws are made by
algorithms 1 to 3 of Canonne, Kamath & Steinke (2020), The discrete Gaussian for differential
privacy, NeurIPS, for a whole t. All arithmetic is in whole numbers of 64 bits and rounds nothing.
The law is exact up to the random words, which are a keyed stream (SHAKE-256).
"""

import hashlib

import numpy as np

MOST_SD = 2**25  # squares of draws then fit into 63 bits, but for one draw in e^90


class Words:
    """Stream of random words of 64 bits, which a key determines.

    :param key: 32 secret bytes, for this stream alone.
    """

    def __init__(self, key: bytes) -> None:
        self.key, self.blocks = key, 0

    def take(self, num: int) -> np.ndarray:
        """Return the next words, ``(num,)``."""
        self.blocks += 1
        block = hashlib.shake_256(self.key + self.blocks.to_bytes(8, "little"))
        return np.frombuffer(block.digest(8 * num), np.uint64)


def _below(words: Words, bound: int, num: int) -> np.ndarray:
    """Draw uniform whole numbers in [0, bound).

    Words at or beyond the largest multiple of ``bound`` are rejected.
    """
    out, left = np.empty(num, np.int64), np.arange(num)
    while len(left):
        word = (words.take(len(left)) >> np.uint64(1)).astype(np.int64)
        value = word % bound
        fine = word - value <= 2**63 - bound
        out[left[fine]], left = value[fine], left[~fine]
    return out


def _bernoulli_exp(words: Words, a: np.ndarray, b: int) -> np.ndarray:
    """Draw a truth value for each of ``a``, true with probability exp(-a / b)."""
    whole = a // b
    out = np.ones(len(a), bool)
    (some,) = np.nonzero(whole)
    out[some] = _geometric(words, len(some)) >= whole[some]
    (left,) = np.nonzero(out)
    a, k = a - b * whole, 1
    while len(left):
        on = _below(words, b * k, len(left)) < a[left]
        out[left[~on]] = k % 2 == 1
        left, k = left[on], k + 1
    return out


def _geometric(words: Words, num: int) -> np.ndarray:
    """Draw numbers of successes of probability exp(-1) before the first failure."""
    out, left = np.zeros(num, np.int64), np.arange(num)
    while len(left):
        on, still, k = np.zeros(len(left), bool), np.arange(len(left)), 2  # at k = 1 all go on
        while len(still):
            more = _below(words, k, len(still)) == 0
            on[still[~more]] = k % 2 == 1
            still, k = still[more], k + 1
        left = left[on]
        out[left] += 1
    return out


def discrete_gaussian(words: Words, sd: int, num: int) -> np.ndarray:
    """Draw whole numbers from the discrete Gaussian, ``(num,)``.

    :param words: stream of random words.
    :param sd: t, a whole number from 0 (all draws are zero) to 2^25.
    :param num: number of draws.
    :raises ValueError: for another ``sd``.
    """
    if not 0 <= sd <= MOST_SD:
        raise ValueError(
            f"sd: expected a whole number from 0 to {MOST_SD}, got {sd}; take a coarser grid"
        )
    found, missing = [np.zeros(num if sd == 0 else 0, np.int64)], num if sd > 0 else 0
    while missing > 0:
        tried = 16 + 23 * missing // 10  # one in 2.1 is taken
        near = _below(words, sd, tried)
        near = near[_bernoulli_exp(words, near, sd)]
        size = near + sd * _geometric(words, len(near))  # magnitude of a discrete Laplace
        minus = words.take(len(size)) >> np.uint64(63) == 1
        one = ~(minus & (size == 0))
        size, minus = size[one], minus[one]
        taken = _bernoulli_exp(words, (size - sd) ** 2, 2 * sd * sd)
        found.append(np.where(minus, -size, size)[taken])
        missing -= len(found[-1])
    return np.concatenate(found)[:num]
