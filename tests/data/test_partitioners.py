"""Partitioners: exact counts first, then the law of the shares."""

from collections.abc import Callable

import numpy as np
import pytest

from numpyro_fed.data import partitioners
from numpyro_fed.data.split import split

LABELS = np.repeat([0, 1, 2], [500, 300, 200])
BINARY = np.repeat([0, 1], [600, 400])
ALL: dict[str, Callable[[int], np.ndarray]] = {
    "iid": lambda seed: partitioners.iid(seed, 1000, 7),
    "quantity": lambda seed: partitioners.quantity(seed, 1000, 7, 0.3, min_rows=5),
    "dirichlet": lambda seed: partitioners.dirichlet(seed, LABELS, 7, 0.3, min_rows=5),
    "beta": lambda seed: partitioners.beta(seed, BINARY, 7, 2.0),
    "disjoint": lambda seed: partitioners.disjoint(seed, np.arange(1000) % 50, 7),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(20))
def test_every_silo_has_rows_and_the_seed_decides(name: str, seed: int) -> None:
    by = ALL[name](seed)
    assert by.shape == (1000,)
    assert np.issubdtype(by.dtype, np.integer)
    assert set(by[by >= 0]) == set(range(7))
    if name != "beta":
        assert by.min() == 0
    np.testing.assert_array_equal(by, ALL[name](seed))
    assert (by != ALL[name](seed + 1)).any()


def test_a_generator_is_a_seed_and_moves_on() -> None:
    rng = np.random.default_rng(3)
    first, second = partitioners.iid(rng, 50, 5), partitioners.iid(rng, 50, 5)
    np.testing.assert_array_equal(first, partitioners.iid(3, 50, 5))
    assert (first != second).any()


@pytest.mark.parametrize("num_rows", [5, 17, 1000])
def test_iid_sizes_differ_by_at_most_one(num_rows: int) -> None:
    sizes = np.bincount(partitioners.iid(0, num_rows, 5))
    assert sizes.sum() == num_rows
    assert np.ptp(sizes) <= 1


@pytest.mark.parametrize(
    ("num_silos", "counts"), [(10, [2] * 4 + [3] * 6), (13, [2] * 13), (1, [26])]
)
def test_disjoint_silos_have_whole_labels_of_their_own(num_silos: int, counts: list[int]) -> None:
    labels = np.random.default_rng(1).integers(0, 26, 2000)
    by = partitioners.disjoint(3, [chr(65 + k) for k in labels], num_silos)
    silo_of = {label: set(by[labels == label]) for label in range(26)}
    assert all(len(found) == 1 for found in silo_of.values())
    assert sorted(np.bincount([found.pop() for found in silo_of.values()])) == counts


def test_disjoint_deals_every_label_to_every_silo_alike() -> None:
    first = np.array([partitioners.disjoint(seed, np.arange(7), 3)[0] for seed in range(3000)])
    shares = np.bincount(first) / len(first)
    # seven labels are dealt 3, 2, 2; the largest silo is the first one
    expected = np.array([3, 2, 2]) / 7
    assert (abs(shares - expected) < 4 * np.sqrt(expected * (1 - expected) / len(first))).all()
    assert abs(shares[0] - 1 / 3) > 4 * np.sqrt(2 / 9 / len(first))  # negative control


@pytest.mark.parametrize("concentration", [1e-3, 0.1, 1.0, 100.0])
def test_min_rows_holds_at_any_concentration(concentration: float) -> None:
    for seed in range(10):
        by = partitioners.quantity(seed, 120, 10, concentration, min_rows=12)
        np.testing.assert_array_equal(np.bincount(by), 12)
        sizes = np.bincount(partitioners.dirichlet(seed, LABELS, 10, concentration, min_rows=30))
        assert sizes.min() >= 30
        assert sizes.sum() == 1000


def test_dirichlet_label_shares_have_the_dirichlet_moments() -> None:
    """A silo's share of a label is Beta(c, (S-1)c): its variance is (S-1) / (S^2 (S c + 1))."""
    num_silos, draws = 5, 400
    for concentration in (0.5, 5.0):
        share = np.array(
            [
                np.bincount(
                    partitioners.dirichlet(seed, LABELS, num_silos, concentration)[:500],
                    minlength=num_silos,
                )[0]
                / 500
                for seed in range(draws)
            ]
        )
        squared = (share - 1 / num_silos) ** 2
        error = squared.std() / np.sqrt(draws)

        def variance(c: float) -> float:
            return (num_silos - 1) / num_silos**2 / (num_silos * c + 1)

        assert abs(squared.mean() - variance(concentration)) < 4 * error
        # negative control: the law at another concentration is distinguished
        assert abs(squared.mean() - variance(3 * concentration)) > 4 * error


def test_beta_silos_are_equal_and_as_large_as_labels_allow() -> None:
    for seed in range(30):
        by = partitioners.beta(seed, BINARY, 6, 0.5)
        sizes = np.bincount(by[by >= 0], minlength=6)
        assert np.ptp(sizes) == 0
        positives = np.bincount(by[(by >= 0) & (BINARY == 1)], minlength=6)
        pi = positives / sizes[0]
        # One row more in every silo needs more of one label than is left, but for rounding.
        left = np.bincount(BINARY[by == -1], minlength=2)
        need = np.array([(1 - pi).sum(), pi.sum()])
        assert (left <= need + 6).any()


def test_beta_proportions_follow_their_law() -> None:
    """The mean of pi ~ Beta(a, b) is a/(a+b); the silos are large, so rounding is small."""
    labels = np.repeat([0, 1], [20_000, 20_000])

    def shares(seed: int) -> np.ndarray:
        by = partitioners.beta(seed, labels, 10, 2.0, 1.0)
        used = by >= 0
        return np.bincount(by[used], labels[used]) / np.bincount(by[used])

    share = np.concatenate([shares(seed) for seed in range(60)])
    error = share.std() / np.sqrt(len(share))
    assert abs(share.mean() - 2 / 3) < 4 * error
    assert abs(share.mean() - 1 / 2) > 4 * error


def test_beta_is_nearly_iid_at_a_hundred() -> None:
    by = partitioners.beta(0, BINARY[::-1], 4, 100.0)
    used = by >= 0
    pi = [BINARY[::-1][used & (by == s)].mean() for s in range(4)]
    assert np.abs(np.array(pi) - 0.5).max() < 4 * 0.5 / np.sqrt(200)


def test_split_leaves_unused_rows_out() -> None:
    by = partitioners.beta(1, BINARY, 5, 0.5)
    silos = split({"y": BINARY, "row": np.arange(1000)}, by=by)
    used = by >= 0
    assert 0 < used.sum() < 1000
    np.testing.assert_array_equal(silos.pooled["row"], np.flatnonzero(used))
    np.testing.assert_array_equal(silos["2"]["row"], np.flatnonzero(by == 2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: partitioners.iid(0, 3, 4), "at least 4 rows for 4 silos.*got 3"),
        (lambda: partitioners.iid(0, 3, 0), "at least one silo"),
        (lambda: partitioners.iid("a", 3, 2), "expected an integer or a numpy.random.Generator"),
        (lambda: partitioners.quantity(0, 9, 2, min_rows=5), "at least 10 rows"),
        (
            lambda: partitioners.quantity(0, 9, 2, 0.0),
            "concentration: expected a finite number > 0",
        ),
        (lambda: partitioners.iid(0, 10.5, 2), "num_rows: expected a whole number, got 10.5"),
        (lambda: partitioners.dirichlet(0, [[0, 1]], 1), r"shape \(N,\), got shape \(1, 2\)"),
        (lambda: partitioners.dirichlet(0, [0, 1], 3), "use fewer silos"),
        (lambda: partitioners.dirichlet(0, [0, 1], 2, -1.0), "got -1.0"),
        (
            lambda: partitioners.disjoint(0, [0, 1, 1], 3),
            "at least 3 different ones.*got 2; use at most 2 silos",
        ),
        (
            lambda: partitioners.disjoint(0, list("abcde"), 3, min_labels=2),
            "at least 6 different.*got 5; use at most 2 ",
        ),
        (lambda: partitioners.disjoint(0, [0, 1], 1, min_labels=0), "at least one label each"),
        (lambda: partitioners.disjoint(0, [[0, 1]], 1), r"shape \(N,\), got shape \(1, 2\)"),
        (lambda: partitioners.beta(0, [0, 1, 2], 2), "expected two values, got 3"),
        (lambda: partitioners.beta(0, [0, 0, 1], 2, a=0.0), "a > 0 and b > 0"),
        (lambda: partitioners.beta(0, [0] * 9 + [1], 8, a=500.0, b=1.0), "do not suffice"),
    ],
)
def test_bad_input_is_refused_in_words(call: Callable[[], np.ndarray], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
