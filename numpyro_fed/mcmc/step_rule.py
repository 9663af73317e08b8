r"""From the noise that silos make to the step size, the injected noise, the length of stays, and
the silos' probabilities.

Near its stationary law and in whitened coordinates a chain makes, with :math:`a = 1 - h/2`,

.. math:: w \leftarrow a w + \tfrac h2 e + \sqrt h\, G \xi, \qquad e = x_s / f_s .

At fixed theta e has a part that stays the same while the chain stays at silo s, of covariance P
over silos, and a part that is redrawn, of covariance W a step. A stay of T steps makes the former
:math:`1 - a^T` times as large, so the stationary variance is

.. math:: V (1 - \tfrac h4) = G G^\top + \tfrac h4 N, \qquad N = \frac{4 - h}h\, \frac{1 - a^T}{1 + a^T} P + W
          \;\to\; T P + W \quad (hT \to 0),

after a stay's last step. With :math:`G = I` the sds are inflated, in the worst direction, by the
root of :math:`(1 + \tfrac h4 \lambda_{\max}(N)) / (1 - \tfrac h4)`; with :math:`G G^\top = (1 -
\tfrac h4) I - \tfrac h4 N` (``noise_correction``) they are right. In f, N is :math:`\sum_s X_s /
f_s` up to a constant, whose largest eigenvalue is convex.
"""

from dataclasses import dataclass

import numpy as np

__all__ = [
    "MAX_STEP_SIZE",
    "StayNoise",
    "best_selection",
    "best_stay",
    "inflation",
    "injection",
    "persistence",
    "step_size",
]

MAX_STEP_SIZE = 0.1
_CORRECTED = 4.0  # times the step size, where what is injected makes up for the noise
_LEAST_INJECTED = 0.5  # of the injected variance, at least this share is left
_STAYS = (1, 2, 4, 8, 12, 20, 30, 40, 60, 100)
_LEAST_VISITS = 0.25  # of an equal share of the rounds, for each silo
_NORM = 16  # Schatten norm that stands for the largest eigenvalue


@dataclass(frozen=True)
class StayNoise:
    """What silos' gradients differ by, in whitened coordinates, at draws of theta.

    :param first: means of ``x_s = f_s e_s`` over the first half of a stay, ``(S, draws, d)``.
    :param second: the same for the second half: what both share persists.
    :param length: local steps of both halves together.
    """

    first: np.ndarray
    second: np.ndarray
    length: int

    def covariance(
        self, selection: np.ndarray, num_local_steps: int, step_size: float = 0.0
    ) -> np.ndarray:
        """N for given probabilities, length of stays and step size (0: its limit), ``(d, d)``."""
        weight, draws = 1 / selection[:, None, None], self.first.shape[1]
        gap = self.first - self.second
        # the sum over silos is drift, not noise
        drift = np.einsum("ni,nj->ij", self.first.sum(0), self.second.sum(0))
        between = (np.einsum("sni,snj->ij", weight * self.first, self.second) - drift) / draws
        within = np.einsum("sni,snj->ij", weight * gap, gap) / draws
        stay = persistence(num_local_steps, step_size)
        return stay * 0.5 * (between + between.T) + self.length / 4 * within

    def by_silo(self, matrix: np.ndarray, num_local_steps: int) -> np.ndarray:
        """``tr(matrix X_s)`` of each silo, for a symmetric matrix; ``(S,)``."""
        gap = self.first - self.second
        between = np.einsum("sni,ij,snj->s", self.first, matrix, self.second, optimize=True)
        within = np.einsum("sni,ij,snj->s", gap, matrix, gap, optimize=True)
        return (num_local_steps * between + self.length / 4 * within) / self.first.shape[1]


def persistence(num_local_steps: int, step_size: float) -> float:
    """What a stay of T steps makes of noise that persists.

    ``T`` for small steps, below ``4 / h``.
    """
    if step_size * num_local_steps < 1e-6:
        return float(num_local_steps)
    decay = (1 - step_size / 2) ** num_local_steps
    return float((4 - step_size) / step_size * (1 - decay) / (1 + decay))


def _worst(noise: np.ndarray) -> float:
    return max(0.0, float(np.linalg.eigvalsh(noise)[-1]))


def inflation(
    noise: StayNoise, selection: np.ndarray, num_local_steps: int, step_size: float
) -> float:
    """Predicted ratio of the chain's sd to the posterior's, in the worst direction, without
    correction.
    """
    worst = _worst(noise.covariance(selection, num_local_steps, step_size))
    return float(np.sqrt((1 + step_size * worst / 4) / (1 - step_size / 4)))


def step_size(
    noise: StayNoise,
    selection: np.ndarray,
    num_local_steps: int,
    bias_target: float,
    *,
    corrected: bool = False,
) -> float:
    """h at which the worst direction's sd is inflated by the factor ``1 + bias_target``.

    Four times it where that is corrected.
    """
    limit = (1 + bias_target) ** 2
    worst = _worst(noise.covariance(selection, num_local_steps))
    # (1 + h N / 4) = limit (1 - h / 4), for N at its limit of small steps: never larger than asked
    # for
    h = min(MAX_STEP_SIZE, 4 * (limit - 1) / (worst + limit))
    if not corrected:
        return h
    return min(_CORRECTED * h, 4 * (1 - _LEAST_INJECTED) / (1 + worst))


def injection(
    noise: StayNoise, selection: np.ndarray, num_local_steps: int, step_size: float
) -> np.ndarray:
    """G of the module's docstring, ``(d, d)``.

    :raises ValueError: for a step size whose noise is more than what may be injected.
    """
    spread = noise.covariance(selection, num_local_steps, step_size)
    values, vectors = np.linalg.eigh(spread)
    left = 1 - step_size / 4 * (1 + np.maximum(values, 0.0))
    if not left.min() > 0:
        raise ValueError(
            f"noise_correction: at step_size={step_size:g} the silos' noise is more than what the "
            "step injects; expected a step "
            f'below {4 / (1 + values.max()):.3g}, or "auto"'
        )
    return (vectors * np.sqrt(left)) @ vectors.T


def best_selection(noise: StayNoise, num_local_steps: int) -> np.ndarray:
    """The probabilities f at which the largest eigenvalue of N is least, none below a quarter of an
    equal share, ``(S,)``.
    """
    silos = len(noise.first)
    best = f = np.full(silos, 1 / silos)
    least = _worst(noise.covariance(f, num_local_steps))
    for _ in range(30):
        values, vectors = np.linalg.eigh(noise.covariance(f, num_local_steps))
        powers = (np.maximum(values, 0) / max(values[-1], 1e-300)) ** (_NORM - 1)
        share = np.maximum(noise.by_silo((vectors * powers) @ vectors.T, num_local_steps), 0)
        if not share.sum() > 0:
            break
        # the fixed point of f_s ~ sqrt(tr(N^(p-1) X_s)), damped
        f = np.sqrt(f * np.sqrt(share) / np.sqrt(share).sum())
        f = np.maximum(f / f.sum(), _LEAST_VISITS / silos)
        f = f / f.sum()
        worst = _worst(noise.covariance(f, num_local_steps))
        if worst < least:
            best, least = f, worst
    return best


def best_stay(
    noise: StayNoise,
    selection: np.ndarray | None,
    bias_target: float,
    round_price: float,
    *,
    corrected: bool = False,
) -> int:
    """T at which effective draws for a given price are most.

    A round costs ``round_price`` local steps besides its own.

    :param selection: the probabilities f, or ``None``: the best for each T.
    """

    def efficiency(steps: int) -> float:
        f = best_selection(noise, steps) if selection is None else selection
        return (
            steps
            * step_size(noise, f, steps, bias_target, corrected=corrected)
            / (round_price + steps)
        )

    return max(_STAYS, key=efficiency)
