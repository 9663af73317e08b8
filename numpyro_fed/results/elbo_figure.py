"""Figure of a variational run's evidence lower bound, round by round."""

from typing import TYPE_CHECKING

import numpy as np
from numpyro.infer.svi import SVIRunResult

from numpyro_fed._arviz import groups_of, is_result
from numpyro_fed.vi.result import VIResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_RAW, _MEAN, _QUIET = "#A9CCE3", "#0072B2", "#6B6B6B"
_WINDOWS = 50  # windows of the running mean in a run
_COLD = 0.25  # share of the rounds, at the start, that the limits of the axis ignore
_RANGE = (0.005, 0.995)  # quantiles of the other rounds that the axis spans
_MARGIN = 0.1


def plot_elbo(
    result: object, *, smooth: int | None = None, figure: "Figure | None" = None
) -> "Figure":
    """Draw the estimated bound of every round, and its running mean.

    The vertical axis shows the last three quarters of the rounds, so that a cold start may leave
    it. The running mean is centered; at the ends, and beside rounds that are not finite, it
    averages fewer rounds. It levels off where more rounds bring nothing.

    :param result: the result of ``run`` of :class:`SFVI` and its kin, or of
        :class:`numpyro.infer.SVI`, or the ``InferenceData`` of :func:`to_inference_data`.
    :param smooth: rounds in a window of the running mean. ``None``: a fiftieth of all rounds.
    :param figure: an empty figure (or subfigure) to draw in. ``None``: a new one.
    :return: the figure.
    :raises TypeError: for a result without a trace of the bound.
    :raises ValueError: for ``smooth`` below 1, and when the bound was finite in no round.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> from numpyro.infer.svi import SVIRunResult
        >>> result = SVIRunResult(params={}, state=None, losses=1 / np.arange(1, 101))
        >>> fed.plot_elbo(result).axes[0].get_xlabel()
        'round'
    """
    from matplotlib import pyplot

    elbo = _trace(result)
    if smooth is None:
        smooth = max(1, len(elbo) // _WINDOWS)
    if not isinstance(smooth, int | np.integer) or isinstance(smooth, bool) or smooth < 1:
        raise ValueError(f"smooth: expected a whole number of rounds >= 1, got {smooth!r}")
    if not np.isfinite(elbo).any():
        raise ValueError(
            f"expected a bound that is finite in some round, got {len(elbo)} that are not"
        )
    rounds = np.arange(1, len(elbo) + 1)
    if figure is None:
        figure = pyplot.figure(figsize=(7, 3.6), layout="constrained", facecolor="white")
    axis = figure.add_subplot()
    axis.plot(rounds, elbo, color=_RAW, lw=0.6, label="each round")
    axis.plot(
        rounds, running_mean(elbo, smooth), color=_MEAN, lw=1.8, label=f"running mean of {smooth:,}"
    )
    axis.set(
        xlim=(1, max(2, len(elbo))),
        ylim=_limits(elbo),
        xlabel="round",
        ylabel="evidence lower bound (nats)",
    )
    axis.spines[["right", "top"]].set_visible(False)
    axis.tick_params(colors=_QUIET, labelsize=8)
    axis.legend(loc="lower right", frameon=False, fontsize=9)
    return figure


def running_mean(x: np.ndarray, window: int) -> np.ndarray:
    """Average the finite values in a centered window, cut at the ends; NaN where none is finite."""
    finite = np.isfinite(x)

    def sums(values: np.ndarray) -> np.ndarray:
        # a cumulative sum would lose the digits of late windows to a cold start
        return np.convolve(values, np.ones(window))[window // 2 :][: len(x)]

    counts = sums(finite.astype(float))
    return np.where(counts > 0, sums(np.where(finite, x, 0.0)) / np.maximum(counts, 1), np.nan)


def _trace(result: object) -> np.ndarray:
    if isinstance(result, VIResult | SVIRunResult):
        return -np.asarray(result.losses, np.float64)
    if is_result(result) and "optimization" in groups_of(result) and "elbo" in result.optimization:
        return np.asarray(result.optimization["elbo"].values, np.float64)
    raise TypeError(
        "expected the result of svi.run(...), or InferenceData with a variable elbo in the group "
        f"optimization, from fed.to_inference_data(svi, ...); got {type(result).__name__}"
    )


def _limits(elbo: np.ndarray) -> tuple[float, float]:
    """Return limits that show nearly all rounds after the cold start.

    They show all finite rounds where none is finite after it.
    """
    late = elbo[int(_COLD * len(elbo)) :]
    shown = late[np.isfinite(late)] if np.isfinite(late).any() else elbo[np.isfinite(elbo)]
    low, high = np.quantile(shown, _RANGE)
    margin = _MARGIN * (high - low) or 1.0
    return low - margin, high + margin
