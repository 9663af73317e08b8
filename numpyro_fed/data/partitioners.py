"""Partitioners of pooled rows into silos, to simulate a federation.

Each partitioner returns the silo of every row, an integer array of shape ``(N,)`` with values
``0..S-1``, for the argument ``by=`` of :func:`numpyro_fed.split`. Real federations need no
partitioner, because each silo has its rows already.
"""

from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["beta", "dirichlet", "disjoint", "iid", "quantity"]

Seed = int | np.random.Generator


def iid(seed: Seed, num_rows: int, num_silos: int) -> np.ndarray:
    """Deal rows at random to silos of equal size.

    :param seed: a seed or a :class:`numpy.random.Generator`.
    :param num_rows: number of rows, N.
    :param num_silos: number of silos, S; their sizes differ by at most one row.
    :return: the silo of each row, shape ``(N,)``.
    :raises ValueError: for no silo, or more silos than rows.

    Example::

        >>> from numpyro_fed import partitioners
        >>> by = partitioners.iid(0, num_rows=10, num_silos=3)
        >>> sorted(np.bincount(by).tolist())
        [3, 3, 4]
    """
    rng = _generator(seed)
    _check_sizes(num_rows, num_silos, min_rows=1)
    return rng.permutation(np.arange(num_rows) % num_silos)


def quantity(
    seed: Seed, num_rows: int, num_silos: int, concentration: float = 1.0, min_rows: int = 1
) -> np.ndarray:
    r"""Deal rows at random to silos of unequal size (quantity skew).

    Every silo gets ``min_rows`` rows. The silos share the other rows in proportions
    :math:`p \sim \mathrm{Dirichlet}(c, \dots, c)`, one per silo.

    :param seed: a seed or a :class:`numpy.random.Generator`.
    :param num_rows: number of rows, N.
    :param num_silos: number of silos, S.
    :param concentration: c > 0; the smaller, the more unequal the silos.
    :param min_rows: smallest number of rows of a silo.
    :return: the silo of each row, shape ``(N,)``.
    :raises ValueError: for fewer than ``num_silos * min_rows`` rows, or a concentration <= 0.

    **References:**

    1. *Federated Learning on Non-IID Data Silos: An Experimental Study*,
       Qinbin Li, Yiqun Diao, Quan Chen, Bingsheng He (2022)

    Example::

        >>> from numpyro_fed import partitioners
        >>> by = partitioners.quantity(0, num_rows=100, num_silos=4, min_rows=10)
        >>> bool(np.bincount(by).min() >= 10), len(by)
        (True, 100)
    """
    rng = _generator(seed)
    _check_sizes(num_rows, num_silos, min_rows)
    shares = _dirichlet_shares(rng, num_silos, concentration)
    sizes = min_rows + _apportion(shares, num_rows - min_rows * num_silos)
    return rng.permutation(np.repeat(np.arange(num_silos), sizes))


def dirichlet(
    seed: Seed, labels: ArrayLike, num_silos: int, concentration: float = 0.5, min_rows: int = 1
) -> np.ndarray:
    r"""Deal rows to silos with different shares of the labels (Dirichlet label skew).

    For every label, the S silos' shares of its rows are a draw from
    :math:`\mathrm{Dirichlet}(c, \dots, c)`, as in Yurochkin et al. Every row goes to one silo, and
    silos differ in size. Hsu et al. draw each silo's label shares instead, at equal sizes; for two
    labels see :func:`beta`. A silo with fewer than ``min_rows`` rows takes rows at random from the
    silo that is then the largest.

    :param seed: a seed or a :class:`numpy.random.Generator`.
    :param labels: the label of each row, integers, booleans or strings, shape ``(N,)``.
    :param num_silos: number of silos, S.
    :param concentration: c > 0; a small value gives the rows of nearly every label to a few silos,
        a large one (100) gives all silos the same mix of labels.
    :param min_rows: smallest number of rows of a silo.
    :return: the silo of each row, shape ``(N,)``.
    :raises ValueError: for labels not of shape ``(N,)``, fewer than ``num_silos * min_rows`` of
        them, or a concentration <= 0.

    **References:**

    1. *Measuring the Effects of Non-Identical Data Distribution for Federated Visual
       Classification*, Tzu-Ming Harry Hsu, Hang Qi, Matthew Brown (2019), section 3
    2. *Bayesian Nonparametric Federated Learning of Neural Networks*,
       Mikhail Yurochkin et al. (2019), section 4

    Example::

        >>> from numpyro_fed import partitioners
        >>> by = partitioners.dirichlet(0, labels=[0, 1] * 50, num_silos=4)
        >>> by.shape, sorted(set(by.tolist()))
        ((100,), [0, 1, 2, 3])
    """
    rng = _generator(seed)
    labels = _column(labels)
    _check_sizes(len(labels), num_silos, min_rows)
    by = np.empty(len(labels), int)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        sizes = _apportion(_dirichlet_shares(rng, num_silos, concentration), len(rows))
        by[rows] = np.repeat(np.arange(num_silos), sizes)
    sizes = np.bincount(by, minlength=num_silos)
    while sizes.min() < min_rows:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        by[rng.choice(np.flatnonzero(by == rich))] = poor
        sizes = np.bincount(by, minlength=num_silos)
    return by


def disjoint(seed: Seed, labels: ArrayLike, num_silos: int, min_labels: int = 1) -> np.ndarray:
    """Deal each label with all its rows to one silo, so that silos have no label in common.

    Labels are dealt at random. Silos' numbers of labels differ by at most one; their numbers of
    rows follow from the labels'.

    :param seed: a seed or a :class:`numpy.random.Generator`.
    :param labels: the label of each row, integers, booleans or strings, shape ``(N,)``.
    :param num_silos: number of silos, S.
    :param min_labels: smallest number of labels of a silo (two, if an algorithm compares rows of
        different labels).
    :return: the silo of each row, shape ``(N,)``.
    :raises ValueError: for labels not of shape ``(N,)``, or fewer than ``num_silos * min_labels``
        different ones.

    **References:**

    1. *Federated Stochastic Gradient Langevin Dynamics*, Khaoula El Mekkaoui, Diego Mesquita,
       Paul Blomstedt, Samuel Kaski (2021), section 5.2

    Example::

        >>> from numpyro_fed import partitioners
        >>> by = partitioners.disjoint(0, labels=["a", "b", "c", "a"], num_silos=2)
        >>> bool(by[0] == by[3]), sorted(set(by.tolist()))
        (True, [0, 1])
    """
    rng = _generator(seed)
    values, label = np.unique(_column(labels), return_inverse=True)
    if num_silos < 1 or min_labels < 1:
        raise ValueError(
            "expected at least one silo with at least one label each, got "
            f"num_silos={num_silos}, min_labels={min_labels}"
        )
    if len(values) < num_silos * min_labels:
        raise ValueError(
            f"labels: expected at least {num_silos * min_labels} different ones, so that "
            f"{num_silos} silos have {min_labels} or more each and none in common, got "
            f"{len(values)}; use at most {len(values) // min_labels} silos"
        )
    return rng.permutation(np.arange(len(values)) % num_silos)[label]


def beta(
    seed: Seed, labels: ArrayLike, num_silos: int, a: float = 0.5, b: float | None = None
) -> np.ndarray:
    r"""Deal rows to silos of equal size with random shares of positives.

    Silo s has the share :math:`\pi_s \sim \mathrm{Beta}(a, b)`. A row is used at most once, so the
    draws of :math:`\pi` limit the size of the silos. It is the largest one for which the rows of
    both labels suffice. The other rows get ``-1``, and :func:`numpyro_fed.split` leaves them out;
    at small ``a`` and ``b`` they may be many.

    :param seed: a seed or a :class:`numpy.random.Generator`.
    :param labels: the label of each row, shape ``(N,)``; of the two values the greater one is the
        positive label.
    :param num_silos: number of silos, S.
    :param a: first parameter of the Beta distribution. ``a = b = 100`` is nearly iid; at
        0.5 most silos hold mostly one label.
    :param b: second parameter; ``a`` by default.
    :return: the silo of each row, ``-1`` for a row that is not used, shape ``(N,)``.
    :raises ValueError: for other than two labels, ``a`` or ``b`` <= 0, or labels that do not
        suffice for one row in every silo.

    **References:**

    1. *Federated Stochastic Gradient Langevin Dynamics*, Khaoula El Mekkaoui, Diego Mesquita,
       Paul Blomstedt, Samuel Kaski (2021), section 5.3

    Example::

        >>> from numpyro_fed import partitioners
        >>> by = partitioners.beta(0, labels=[0, 1] * 50, num_silos=4, a=100.0)
        >>> len(set(np.bincount(by[by >= 0]).tolist()))
        1
    """
    rng = _generator(seed)
    labels = _column(labels)
    _check_sizes(len(labels), num_silos, min_rows=1)
    b = a if b is None else b
    if not (a > 0 and b > 0):
        raise ValueError(f"expected a > 0 and b > 0, got a={a}, b={b}")
    values = np.unique(labels)
    if len(values) != 2:
        raise ValueError(
            f"labels: expected two values, got {len(values)}; partitioners.dirichlet takes any "
            "number"
        )
    negatives, positives = (rng.permutation(np.flatnonzero(labels == v)) for v in values)
    pi = rng.beta(a, b, num_silos)

    def positives_of(size: int) -> np.ndarray:
        return np.rint(pi * size).astype(int)

    def too_large(size: int) -> bool:
        used = positives_of(size).sum()
        return bool(used > len(positives) or num_silos * size - used > len(negatives))

    # both counts grow with the size, so all sizes that fit come first
    size = bisect_left(range(1, len(labels) // num_silos + 1), True, key=too_large)
    if size == 0:
        raise ValueError(
            f"{len(positives)} rows of {values[1]} and {len(negatives)} of {values[0]} do not "
            f"suffice for one row in each of {num_silos} silos at these proportions; use fewer "
            "silos or a larger a and b"
        )
    by = np.full(len(labels), -1)
    for rows, counts in ((positives, positives_of(size)), (negatives, size - positives_of(size))):
        by[rows[: counts.sum()]] = np.repeat(np.arange(num_silos), counts)
    return by


def _generator(seed: Seed) -> np.random.Generator:
    if not isinstance(seed, (int, np.integer, np.random.Generator)):
        raise ValueError(
            f"seed: expected an integer or a numpy.random.Generator, got "
            f"{type(seed).__name__}; partitions are made by NumPy, outside JAX, e.g. iid(0, ...)"
        )
    return np.random.default_rng(seed)


def _column(labels: ArrayLike) -> np.ndarray:
    column = np.asarray(labels)
    if column.ndim != 1:
        raise ValueError(f"labels: expected one per row, shape (N,), got shape {column.shape}")
    return column


def _check_sizes(num_rows: int, num_silos: int, min_rows: int) -> None:
    sizes = {"num_rows": num_rows, "num_silos": num_silos, "min_rows": min_rows}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ValueError(f"{name}: expected a whole number, got {size!r}")
    if num_silos < 1 or min_rows < 1:
        raise ValueError(
            f"expected at least one silo with at least one row each, got num_silos={num_silos}, "
            f"min_rows={min_rows}"
        )
    if num_rows < num_silos * min_rows:
        raise ValueError(
            f"expected at least {num_silos * min_rows} rows for {num_silos} silos of {min_rows} or "
            f"more, got {num_rows}; use fewer silos"
        )


def _dirichlet_shares(rng: np.random.Generator, num_silos: int, concentration: float) -> np.ndarray:
    if not 0 < concentration < np.inf:
        raise ValueError(f"concentration: expected a finite number > 0, got {concentration}")
    return rng.dirichlet(np.full(num_silos, concentration))


def _apportion(shares: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers that add up to ``total``, each within one of its share."""
    cuts = np.rint(np.cumsum(shares) * total).astype(int)
    cuts[-1] = total  # the shares' sum may round below one
    return np.diff(cuts, prepend=0)
