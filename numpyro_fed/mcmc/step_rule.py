r"""Rule from the silos' noise to step size, injected noise and probabilities.

Near its stationary law, in whitened coordinates and with :math:`a = 1 - h/2`, a chain makes

.. math:: w \leftarrow a w + \tfrac h2 e + \sqrt h\, G \xi, \qquad e = x_s / f_s .

At fixed theta, e has two parts. The first is constant while the chain visits silo s, with
covariance P over silos. The second is drawn anew in each step, with covariance W per step. Over a
visit of T steps the first part adds up to :math:`1 - a^T` times itself, so after the last step the
stationary variance is

.. math::
    V (1 - \tfrac h4) = G G^\top + \tfrac h4 N, \qquad
    N = \frac{4 - h}h\, \frac{1 - a^T}{1 + a^T} P + W \;\to\; T P + W \quad (hT \to 0).

Step sizes, injected noise and probabilities follow in docs/derivations/langevin.md.
"""

from dataclasses import dataclass

import numpy as np

# without noise from silos it inflates sds by (1 - h/4)^(-1/2): 1.3 %; a visit of 40 steps forgets
# 87 % of its start
MAX_STEP_SIZE = 0.1
# factor of the step size under noise correction; a prototype had the same accuracy with it, and 2.5
# times the effective draws
_CORRECTED = 4.0
# least share of the injected variance that a correction leaves: the pilot knows the noise of S
# silos to a relative sqrt(2 / (32 S)), so for four silos the sds of the chain to 3 %
_LEAST_INJECTED = 0.5
# least probability of a silo, as a fraction of an equal share: a silo whose noise the pilot missed
# has at most four times the noise that equal shares give it
_LEAST_VISITS = 0.25
# order of the Schatten norm that stands for the largest eigenvalue, to a factor d^(1/16): at most
# 1.15 in 10 dimensions, 1.33 in 100
_NORM = 16


@dataclass(frozen=True)
class VisitNoise:
    """Noise of the silos' gradients in whitened coordinates, at draws of theta.

    :param first: means of ``x_s = f_s e_s`` over the first half of a walk, ``(S, draws, d)``.
    :param second: the same over the second half; noise common to both halves persists.
    :param length: local steps of both halves together.
    """

    first: np.ndarray
    second: np.ndarray
    length: int

    def covariance(
        self, selection: np.ndarray, num_local_steps: int, step_size: float = 0.0
    ) -> np.ndarray:
        """Return N for probabilities, visit length and step size (0: its limit), ``(d, d)``."""
        weight, draws = 1 / selection[:, None, None], self.first.shape[1]
        gap = self.first - self.second
        # the sum over silos is drift, not noise
        drift = np.einsum("ni,nj->ij", self.first.sum(0), self.second.sum(0))
        between = (np.einsum("sni,snj->ij", weight * self.first, self.second) - drift) / draws
        within = np.einsum("sni,snj->ij", weight * gap, gap) / draws
        stay = persistence(num_local_steps, step_size)
        return stay * 0.5 * (between + between.T) + self.length / 4 * within

    def by_silo(self, matrix: np.ndarray, num_local_steps: int) -> np.ndarray:
        """Return ``tr(matrix X_s)`` of each silo, for a symmetric matrix; ``(S,)``."""
        gap = self.first - self.second
        between = np.einsum("sni,ij,snj->s", self.first, matrix, self.second, optimize=True)
        within = np.einsum("sni,ij,snj->s", gap, matrix, gap, optimize=True)
        return (num_local_steps * between + self.length / 4 * within) / self.first.shape[1]


def persistence(num_local_steps: int, step_size: float) -> float:
    """Return the factor by which a visit of T steps multiplies persistent noise.

    The factor is ``T`` for small steps, and below ``4 / h``.
    """
    if step_size * num_local_steps < 1e-6:
        return float(num_local_steps)
    decay = (1 - step_size / 2) ** num_local_steps
    return float((4 - step_size) / step_size * (1 - decay) / (1 + decay))


def _worst(noise: np.ndarray) -> float:
    return max(0.0, float(np.linalg.eigvalsh(noise)[-1]))


def inflation(
    noise: VisitNoise, selection: np.ndarray, num_local_steps: int, step_size: float
) -> float:
    """Predict the ratio of the chain's sd to the posterior's, in the worst direction.

    The prediction is for a chain without noise correction.
    """
    worst = _worst(noise.covariance(selection, num_local_steps, step_size))
    return float(np.sqrt((1 + step_size * worst / 4) / (1 - step_size / 4)))


def step_size(
    noise: VisitNoise,
    selection: np.ndarray,
    num_local_steps: int,
    bias_target: float,
    *,
    corrected: bool = False,
) -> float:
    """Return the step size h that inflates the worst direction's sd by ``1 + bias_target``.

    With noise correction return up to four times this h.
    """
    limit = (1 + bias_target) ** 2
    worst = _worst(noise.covariance(selection, num_local_steps))
    # solves (1 + h N / 4) = limit (1 - h / 4) with N at its limit of small steps, an upper bound
    h = min(MAX_STEP_SIZE, 4 * (limit - 1) / (worst + limit))
    if not corrected:
        return h
    return min(_CORRECTED * h, 4 * (1 - _LEAST_INJECTED) / (1 + worst))


def injection(
    noise: VisitNoise, selection: np.ndarray, num_local_steps: int, step_size: float
) -> np.ndarray:
    """Return G of the module's docstring, ``(d, d)``.

    :raises ValueError: if the silos' noise at this step size exceeds the noise of a step.
    """
    spread = noise.covariance(selection, num_local_steps, step_size)
    values, vectors = np.linalg.eigh(spread)
    left = 1 - step_size / 4 * (1 + np.maximum(values, 0.0))
    if not left.min() > 0:
        raise ValueError(
            f"noise_correction: at step_size={step_size:g} the silos' noise is more than what the "
            f'step injects; expected a step below {4 / (1 + values.max()):.3g}, or "auto"'
        )
    return (vectors * np.sqrt(left)) @ vectors.T


def best_selection(noise: VisitNoise, num_local_steps: int) -> np.ndarray:
    """Return the probabilities f that minimize the largest eigenvalue of N, ``(S,)``.

    None is below a quarter of an equal share.
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
