"""Checks of the silos' replies in the score fit."""

import numpy as np

from numpyro_fed.data.silos import Silos
from numpyro_fed.rounds.federated import LARGEST_FINITE
from numpyro_fed.surrogates.local_score import Reply

# largest ratio of :func:`_contradiction`; those of honest silos are below 2
_CONTRADICTION = 100.0
# least sd of log marginals, in nats: float32 rounds a log likelihood of 10,000 to .0005
_FLAT = 1e-3


def check_finite(replies: Reply, silos: Silos) -> None:
    """Raise an error for Gaussians that are not finite, with the name of their silo."""
    for part in ("shift", "precision", "correction"):
        x = replies._asdict()[part]
        if x is None:
            continue
        wrong = ~(np.abs(np.asarray(x)) < LARGEST_FINITE).reshape(len(silos), -1).all(1)  # or NaN
        if wrong.any():
            raise ValueError(
                f"silo {silos.names[int(wrong.argmax())]!r} returned a surrogate with NaN or "
                f"infinite numbers ({part}); expected finite ones: check its rows and its "
                "installation, or leave the silo out"
            )


def _contradiction(
    points: np.ndarray, weights: np.ndarray, replies: Reply, values: np.ndarray
) -> np.ndarray:
    """Compare each silo's log marginals with its Gaussian at the points.

    In the coordinates of a false surrogate, which the server believed, log marginals are all but
    flat.

    :param values: log marginals ``(S, K)``; a constant does not matter.
    :return: sd of the difference over sd of the log marginals, ``(S,)``.
    """
    u, values = points, np.asarray(values, np.float64)
    shift, precision = (np.asarray(x, np.float64) for x in (replies.shift, replies.precision))
    curved = (
        np.einsum("ki,sij,kj->sk", u, precision, u, optimize=True)
        if precision.ndim == 3
        else precision @ (u**2).T
    )
    gaussian = shift @ u.T - 0.5 * curved
    weights = np.where(np.isfinite(values), weights, 0.0)
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)

    def sd(x: np.ndarray) -> np.ndarray:
        away = np.where(weights > 0, x, 0.0)
        away = away - (weights * away).sum(1, keepdims=True)
        return np.sqrt((weights * away**2).sum(1))

    return sd(values - gaussian) / np.maximum(sd(values), _FLAT)


def check_values(
    points: np.ndarray, weights: np.ndarray, replies: Reply, values: np.ndarray, silos: Silos
) -> None:
    """Raise an error for a surrogate that its silo's own log marginals contradict."""
    found = _contradiction(points, weights, replies, values)
    worst = int(found.argmax())
    if found[worst] > _CONTRADICTION:
        raise ValueError(
            f"silo {silos.names[worst]!r} returned a surrogate that its own log likelihood "
            "contradicts: the difference of the two varies "
            f"{found[worst]:,.0f} times as much as the log likelihood; expected at most "
            f"{_CONTRADICTION:,.0f}: check its installation, or leave the silo out"
        )
