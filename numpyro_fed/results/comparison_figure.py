"""Figure of two posteriors side by side, from arrays of draws."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fed._arviz import density_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

# Blue and vermilion of Okabe and Ito, distinct in every form of color blindness, and dark gray.
_FED, _REF, _DIFFERS, _QUIET = "#0072B2", "#4D4D4D", "#B24700", "#6B6B6B"
_BAND = "#DCE9F2"
_VERDICT_COLORS = {"agrees": _QUIET, "undecided": "#8A6100", "differs": _DIFFERS}
_WIDTH, _ROW, _TOP, _BOTTOM, _RIGHT = 10.0, 0.62, 1.05, 0.62, 1.9  # inches
_REACH = 5.0  # largest limit of an axis, in sds from the reference's mean
_MAX_LABEL = 26
_LEVELS = (0.03, 0.25, 0.75, 0.97)


def draw_comparison(
    draws: Sequence[tuple[np.ndarray, np.ndarray]],
    table: "DataFrame",
    titles: tuple[str, str],
    labels: tuple[str, str],
    figure: "Figure | None",
) -> "Figure":
    """Draw one row for each pair of flat draws (fit, reference) and its row of the table.

    :param titles: title and subtitle.
    """
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = len(draws)
    if figure is None:
        figure = pyplot.figure(figsize=(_WIDTH, _TOP + _BOTTOM + _ROW * rows), facecolor="white")
    width, height = (float(x) / figure.dpi for x in (figure.bbox.width, figure.bbox.height))
    names = [_short(name) for name in table.index]
    title, subtitle = titles
    for name, short in zip(table.index, names, strict=True):
        subtitle = subtitle.replace(f"({name})", f"({short})")
    left = (0.35 + 0.085 * max(16, *map(len, names))) / width
    grid = figure.add_gridspec(
        rows,
        2,
        width_ratios=(2.0, 1.0),
        wspace=0.06,
        hspace=0.0,
        left=left,
        right=1 - _RIGHT / width,
        top=1 - _TOP / height,
        bottom=_BOTTOM / height,
    )
    standardized = [_standardize(*pair) for pair in draws]
    forest = figure.add_subplot(grid[:, 0])
    limit = _draw_forest(forest, standardized)
    for i, (name, (_, row)) in enumerate(zip(names, table.iterrows(), strict=True)):
        _draw_label(forest, i, name, row)
        panel = figure.add_subplot(grid[i, 1])
        _draw_densities(panel, *standardized[i], max(4.0, limit), last=i == rows - 1)
        _draw_verdict(panel, row)
    figure.text(0.25 / width, 1 - 0.18 / height, title, size=13, weight="bold", va="top")
    figure.text(0.25 / width, 1 - 0.45 / height, subtitle, size=9, color=_QUIET, va="top")
    keys = [
        Line2D([], [], color=_FED, marker="o", lw=2.5, mec="white"),
        Line2D([], [], color=_REF, marker="s", lw=2.5, mec="white"),
        Patch(color=_BAND, lw=0),
    ]
    figure.legend(
        keys,
        [*labels, "tolerance of the mean"],
        loc="lower left",
        bbox_to_anchor=(left, 1 - (_TOP - 0.06) / height),
        ncols=3,
        frameon=False,
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        handletextpad=0.5,
    )
    return figure


def _short(name: str) -> str:
    """Cut the middle of a long label, as the site and the coordinate's end tell rows apart."""
    if len(name) <= _MAX_LABEL:
        return name
    return f"{name[: _MAX_LABEL // 2 - 1]}…{name[-_MAX_LABEL // 2 :]}"


def _standardize(fed: np.ndarray, ref: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standardize both by the reference, without draws of the fit that are not finite."""
    fed, ref = fed.astype(float), ref.astype(float)
    mean, sd = ref.mean(), ref.std(ddof=1)
    return (fed[np.isfinite(fed)] - mean) / sd, (ref - mean) / sd


def _draw_forest(ax: "Axes", pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Draw every row's intervals, and return the limit of the axis."""
    ends = [np.quantile(x, _LEVELS) for pair in pairs for x in pair if x.size]
    limit = min(_REACH, max(2.4, 1.12 * float(np.abs(ends).max())))
    ax.axvline(0, color="#BBBBBB", lw=0.8, zorder=1)
    for i, pair in enumerate(pairs):
        for x, color, marker, y in zip(pair, (_FED, _REF), "os", (i - 0.15, i + 0.15), strict=True):
            _draw_interval(ax, x, y, color, marker, limit)
    ax.axvspan(-0.1, 0.1, color=_BAND, lw=0, zorder=0)
    ax.set(xlim=(-limit, limit), ylim=(len(pairs) - 0.5, -0.5), yticks=[])
    for y in range(1, len(pairs)):
        ax.axhline(y - 0.5, color="#EEEEEE", lw=0.8, zorder=0)
    ax.set_xlabel("reference sds from its mean; 50 % and 94 % intervals", size=9, color=_QUIET)
    _quiet_axis(ax)
    return limit


def _draw_interval(
    ax: "Axes", x: np.ndarray, y: float, color: str, marker: str, limit: float
) -> None:
    """Draw the mean, 50 % and 94 % interval, or an arrow and the mean where it is off the axis."""
    if not x.size:
        ax.text(0, y, "no finite draw", color=_DIFFERS, size=8, va="center", ha="center")
        return
    mean = float(x.mean())
    if abs(mean) > limit:
        side = 1 if mean > 0 else -1
        ax.plot(side * 0.98 * limit, y, ">" if side > 0 else "<", color=color, ms=6)
        ax.annotate(
            f"{mean:+.3g} sd",
            (side * 0.98 * limit, y),
            xytext=(-8 * side, 0),
            textcoords="offset points",
            ha="right" if side > 0 else "left",
            va="center",
            size=8,
            color=color,
        )
        return
    low, q1, q3, high = np.clip(np.quantile(x, _LEVELS), -limit, limit)
    ax.plot([low, high], [y, y], color=color, lw=1.1, solid_capstyle="butt")
    ax.plot([q1, q3], [y, y], color=color, lw=3.6, solid_capstyle="butt")
    ax.plot(mean, y, marker, color=color, ms=6, mec="white", mew=0.9, zorder=3)


def _draw_label(ax: "Axes", y: int, name: str, row: "Series") -> None:
    write = partial(
        ax.annotate, xycoords=ax.get_yaxis_transform(), ha="right", textcoords="offset points"
    )
    write(name, (0, y), xytext=(-8, 1), va="bottom", size=10)
    write(row["units"], (0, y), xytext=(-8, -1), va="top", size=8, color=_QUIET)


def _draw_densities(
    ax: "Axes", fed: np.ndarray, ref: np.ndarray, limit: float, *, last: bool
) -> None:
    curves = [density_curve(x) if np.unique(x).size > 4 else None for x in (fed, ref)]
    heights = [float(curve[1].max()) if curve else 0.0 for curve in curves]
    # a density that is far too narrow may leave the panel, so that the reference stays visible
    peak = min(heights[0], 2.5 * heights[1]) if heights[1] else heights[0]
    if curves[1]:
        ax.fill_between(*curves[1], color=_REF, alpha=0.22, lw=0)
        ax.plot(*curves[1], color=_REF, lw=1.0)
    if curves[0]:
        ax.plot(*curves[0], color=_FED, lw=1.6)
    ax.set(xlim=(-limit, limit), ylim=(0, 1.15 * max(peak, heights[1], 1e-3)), yticks=[])
    _quiet_axis(ax)
    if last:
        ax.set_xlabel("density", size=9, color=_QUIET)
    else:
        ax.tick_params(labelbottom=False, length=0)


def _draw_verdict(ax: "Axes", row: "Series") -> None:
    write = partial(
        ax.annotate, xycoords="axes fraction", textcoords="offset points", annotation_clip=False
    )
    color = _VERDICT_COLORS[row["verdict"]]
    weight = "bold" if row["verdict"] == "differs" else "normal"
    write(row["verdict"], (1, 0.5), xytext=(8, 1), va="bottom", size=9, color=color, weight=weight)
    numbers = row["note"] or f"Δ {row['error']:.2f} sd, sd ratio {row['sd_ratio']:.2f}"
    write(numbers, (1, 0.5), xytext=(8, -1), va="top", size=8, color=_QUIET)


def _quiet_axis(ax: "Axes") -> None:
    from matplotlib.ticker import MultipleLocator

    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.spines["bottom"].set_color("#BBBBBB")
    ax.xaxis.set_major_locator(MultipleLocator(2))
    ax.tick_params(axis="x", colors=_QUIET, labelsize=8)
