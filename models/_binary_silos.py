"""Silos of binary labels whose shares differ: rows of SUSY, and simulated rows.

The simulated rows have a known p(y | x).
"""

import zipfile

import numpy as np
from _data import path
from scipy.special import expit, logit

import numpyro_fed as fed

FEATURES = 18
NUM_SILOS, NUM_ROWS = 30, 90_000
Rows = dict[str, np.ndarray]


def log_odds(x: np.ndarray) -> np.ndarray:
    """Return eta(x), which changes sign with the first two features and so balances the labels."""
    return 1.5 * x[:, 0] + 1.5 * x[:, 1] * x[:, 2]


def given(rng: np.random.Generator, y: np.ndarray) -> Rows:
    """Draw a row of p(x | y) for each label.

    A population row x has label 1 with probability p(y = 1 | x). If its label is not y, its first
    two features change sign, which exchanges the probabilities of the labels.
    """
    x = rng.standard_normal((len(y), FEATURES), np.float32)
    other = (rng.random(len(y)) < expit(log_odds(x))) != y
    x[other, :2] *= -1
    return {"x": x, "y": y}


def simulated(beta: float, seed: int = 0, size: int = NUM_ROWS) -> tuple[fed.Silos, Rows]:
    """Draw silos of ``size`` rows each, and as many balanced rows to test on."""
    rng = np.random.default_rng(seed)
    rows = {}
    for s, share in enumerate(rng.beta(beta, beta, NUM_SILOS)):
        rows[f"silo{s}"] = given(rng, (np.arange(size) < round(share * size)).astype(np.int32))
    return fed.Silos(rows), given(rng, (np.arange(size) % 2).astype(np.int32))


def table() -> Rows:
    """Return the available rows of SUSY: X_train (10000, 8), X_test (1000, 8), and their labels."""
    shapes = {
        "X_train": (10_000, 8),
        "y_train": (10_000,),
        "X_test": (1_000, 8),
        "y_test": (1_000,),
    }
    source = (
        "github.com/pghysels/STRUMPACK, examples/dense/data/susy_10Kn_*.csv, put together as "
        "arrays of these names"
    )
    place = path("susy", "susy_11k_lowlevel.npz", source, f"arrays {shapes}")
    try:
        with place.open("rb") as opened, np.load(opened) as file:
            found = {name: file[name] for name in shapes}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{place}: expected a whole npz file of arrays {shapes}, got {error!r}; get it anew "
            f"from {source}"
        ) from error
    got = {name: x.shape for name, x in found.items()}
    if got != shapes:
        raise ValueError(
            f"{place}: expected arrays of shapes {shapes}, got {got}; get it anew from {source}"
        )
    return found


def deal(rng: np.random.Generator, y: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the silo of each row, -1 for rows of no silo.

    Silos have equal sizes and the given shares of ones, and are as large as the labels allow.
    """
    have = np.bincount(y, minlength=2)
    size = int(min(have[0] / (1 - shares).sum(), have[1] / shares.sum()))
    while size and (
        (ones := np.round(shares * size).astype(int)).sum() > have[1]
        or (size - ones).sum() > have[0]
    ):
        size -= 1
    if not size:
        raise ValueError(
            f"expected enough labels of both kinds for {len(shares)} silos, got {have.tolist()}"
        )
    by = np.full(len(y), -1)
    for label, counts in ((0, size - ones), (1, ones)):
        rows = rng.permutation(np.flatnonzero(y == label))[: counts.sum()]
        by[rows] = np.repeat(np.arange(len(shares)), counts)
    return by


def susy(beta: float, seed: int = 0) -> tuple[fed.Silos, Rows]:
    """Return the training rows, dealt to silos, and the balanced part of the test rows."""
    found, rng = table(), np.random.default_rng(seed)
    x, y, tests = (
        found["X_train"],
        found["y_train"].astype(np.int32),
        found["y_test"].astype(np.int32),
    )
    by = deal(rng, y, rng.beta(beta, beta, NUM_SILOS))
    keep = by >= 0
    test = deal(rng, tests, np.array([0.5])) == 0
    return fed.split({"x": x[keep], "y": y[keep]}, by=by[keep]), {
        "x": found["X_test"][test],
        "y": tests[test],
    }


def sample(silos: fed.Silos, size: int) -> Rows:
    """Return ``size`` rows of each silo (or all), evenly spaced, ``(S, size, ...)``."""
    have = [{k: np.asarray(v) for k, v in silos[name].items()} for name in silos.names]
    which = np.linspace(0, len(have[0]["y"]) - 1, min(size, len(have[0]["y"]))).astype(int)
    return {k: np.stack([rows[k][which] for rows in have]) for k in ("x", "y")}


def best(silos: fed.Silos, test: Rows) -> dict[str, float]:
    """Return the log-likelihoods of the true p(y | x) on train and test rows of simulated silos.

    Those on train rows use the share of ones in all silos, or in each silo. The last one is on test
    rows with the train rows' share.
    """
    some = sample(silos, 1_000)
    shares = some["y"].mean(1)
    shift, own = logit(shares.mean()), logit(np.clip(shares, 1e-3, 1 - 1e-3))
    eta = np.stack([log_odds(x) for x in some["x"]])

    def value(odds: np.ndarray, y: np.ndarray) -> float:
        return float(-np.logaddexp(0, np.where(y == 1, -odds, odds)).mean())

    balanced = log_odds(test["x"])
    return {
        "train": value(eta + shift, some["y"]),
        "own silo": value(eta + own[:, None], some["y"]),
        "test": value(balanced, test["y"]),
        "test, labels as in training": value(balanced + shift, test["y"]),
    }
