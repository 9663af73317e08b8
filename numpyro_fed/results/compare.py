"""Comparison of a federated fit with a reference, parameter by parameter.

Differences of means are in posterior standard deviations (sds) of the reference, beside their
Monte-Carlo standard errors. A verdict is given only where these errors are small enough for one.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jax import Array

from numpyro_fed._arviz import groups_of, is_result
from numpyro_fed.results.compare_scalars import (
    AGREE_SE,
    COLUMNS,
    DIFFER_SE,
    VERDICTS,
    Scalar,
    compare_scalar,
    is_constant,
    paired_scalars,
)
from numpyro_fed.vi.importance import POOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series


_SHOWN_ROWS = 16
# largest number of draws of each of the two laws: costs of 1,000 x 1,000 pairs, a second or two
_JOINT_DRAWS = 1000
# entropic regularization, in squared reference sds per scalar: features finer than an sd are
# smoothed away, and with them the noise that grows with the dimension
_EPSILON = 1.0
_SENTENCES = {
    "agrees": "The fit agrees with the reference",
    "undecided": "Whether the fit agrees with the reference is undecided",
    "differs": "The fit differs from the reference",
}


class JointDistance(NamedTuple):
    """Distance between two joint laws, beside that between two halves of the reference.

    :param distance: of the fit from the reference, in sds of the reference, root mean square over
        the scalars.
    :param within_reference: distance between two halves of the reference, as equal laws give it.
    :param num_draws: number of draws of each law, in either distance.
    """

    distance: float
    within_reference: float
    num_draws: int


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Result of :func:`compare`.

    :ivar table: one row per scalar parameter; :func:`compare` explains the columns.
    :ivar mean_tolerance: largest accepted difference of means, in posterior sds of the reference.
    :ivar sd_tolerance: largest accepted relative difference of the sds, in either direction.
    :ivar pareto_k: for a variational fit, Pareto's k of its importance weights, or of a variance
        under them, whichever is larger. It is ``None`` where the fit has none, and no verdict
        depends on it.
    :ivar privacy: for a fit with differential privacy, the budget that it spent and the effect of
        its noise on means and sds; else ``None``.
    """

    table: "DataFrame"
    mean_tolerance: float
    sd_tolerance: float
    _scalars: list[Scalar]
    pareto_k: float | None = None
    privacy: str | None = None

    @property
    def verdict(self) -> str:
        """Worst verdict of all rows, in the order "differs", "undecided", "agrees"."""
        return max(self.table["verdict"], key=VERDICTS.index)

    @property
    def worst(self) -> str:
        """Label of the row with the largest ``error``; an error that is NaN counts as infinite."""
        return self.table.index[int(np.argmax(self.table["error"].fillna(np.inf)))]

    @cached_property
    def joint(self) -> JointDistance:
        r"""Distance of the two joint laws.

        It shows differences that no row shows, such as a wrong correlation.

        The distance is :math:`\sqrt{S_1}`, with :math:`S_\epsilon` the Sinkhorn divergence (Feydy
        et al. 2019, eq. 3) for the cost :math:`\|x - y\|^2 / p` of the p scalars. The reference's
        means and sds standardize the scalars, so that moving all means by one sd gives distance 1.
        Draws are thinned evenly to equal numbers, at most 1000. Features much finer than an sd are
        smoothed away. Scalars that are constant in the reference, or not finite there, are left
        out.

        The distance is NaN where no scalar is left, or where a draw of the fit is not finite. It is
        also NaN where the fit has fewer than 2 draws, or the reference fewer than 4. No verdict
        depends on it. The first access computes it, which takes seconds.
        """
        kept = [
            (fed, ref)
            for _, fed, ref in self._scalars
            if np.isfinite(ref).all() and not is_constant(ref)
        ]
        if not kept:
            return JointDistance(np.nan, np.nan, 0)
        num_fed, num_ref = kept[0][0].size, kept[0][1].size
        number = min(_JOINT_DRAWS, num_fed, num_ref // 2)
        if number < 2:
            return JointDistance(np.nan, np.nan, number)
        of_fed, of_ref = (
            np.arange(m) * size // m for m, size in ((number, num_fed), (2 * number, num_ref))
        )
        units = [(ref.mean(dtype=float), ref.std(ddof=1, dtype=float)) for _, ref in kept]
        columns = [
            ((fed.ravel()[of_fed] - m) / s, (ref.ravel()[of_ref] - m) / s)
            for (fed, ref), (m, s) in zip(kept, units, strict=True)
        ]
        fed, ref = (np.stack(side, axis=1) for side in zip(*columns, strict=True))
        within = _sinkhorn_distance(ref[:number], ref[number:])
        finite = all(np.isfinite(draws).all() for draws, _ in kept)
        return JointDistance(
            _sinkhorn_distance(fed, ref[::2]) if finite else np.nan, within, number
        )

    def summary(self) -> str:
        """Return the result as one paragraph."""
        agree, undecided, differ = self._counts()
        text = (
            f"{_SENTENCES[self.verdict]}: of {len(self.table)} parameters {agree} agree, "
            f"{undecided} are undecided and {differ} differ. {self._extremes()}. Accepted: "
            f"{self.mean_tolerance:g} reference sds in the mean, a factor "
            f"{1 + self.sd_tolerance:g} in the sd. A parameter agrees if it is inside by "
            f"{AGREE_SE:g} Monte-Carlo standard errors, and differs if outside by {DIFFER_SE:g}."
        )
        if undecided:
            text += " More draws, of the fit and of the reference, decide what is undecided."
        return text + self._approximation()

    def closing_line(self) -> str:
        """Return counts and extremes as one line, the last of the printed table."""
        agree, undecided, differ = self._counts()
        counts = f"{agree} agree, {undecided} undecided, {differ} differ"
        return f"{self.verdict}: {counts}. {self._extremes()}.{self._approximation()}"

    def _approximation(self) -> str:
        private = "" if self.privacy is None else f" P{self.privacy[1:]}."
        if self.pareto_k is None:
            return private
        judged = (
            f", not above {POOR}"
            if self.pareto_k <= POOR
            else f", above {POOR}: it misses part of the posterior"
        )
        return f" Pareto's k of the approximation {self.pareto_k:.2f}{judged}.{private}"

    def _counts(self) -> list[int]:
        return [int((self.table["verdict"] == verdict).sum()) for verdict in VERDICTS]

    def _extremes(self) -> str:
        errors, ratios = self.table["error"].to_numpy(), self.table["sd_ratio"].dropna()
        finite = np.isfinite(errors)
        if not finite.any():
            return f"No error is finite ({self.worst}: {self.table['note'].iloc[0]})"
        at = int(np.argmax(np.where(finite, errors, -1.0)))
        row = self.table.iloc[at]
        error = f"{row['error']:.3f} ± {row['mcse']:.3f}".replace(" ± nan", "")
        which = "error" if finite.all() else "finite error"
        text = f"Largest {which} {error} sd ({self.table.index[at]})"
        if len(ratios):
            text += f"; sd ratios {ratios.min():.3f} to {ratios.max():.3f}"
        return text

    def _display(self) -> tuple["DataFrame", str]:
        """Return the table as strings, and a note where only its worst rows are shown."""
        import pandas as pd

        table, hidden = self.table, ""
        if len(table) > _SHOWN_ROWS:
            table = table.iloc[_by_severity(table)[:_SHOWN_ROWS]]
            hidden = f"the {_SHOWN_ROWS} worst of {len(self.table)} rows; all of them in .table\n"
        shown = pd.DataFrame([_shown(row) for _, row in table.iterrows()], index=table.index)
        return shown.replace([r"^nan( ± nan)?$", " ± nan$"], ["-", ""], regex=True), hidden

    def __repr__(self) -> str:
        shown, hidden = self._display()
        return f"{shown.to_string()}\n{hidden}{self.closing_line()}"

    def _repr_html_(self) -> str:
        from html import escape

        shown, hidden = self._display()
        closing = f"<b>{escape(self.closing_line())}</b>"
        return f"{shown.to_html(border=0)}<p>{escape(hidden)}{closing}</p>"


def compare(
    fed: object,
    reference: object,
    *,
    var_names: str | Sequence[str] | None = None,
    mean_tolerance: float = 0.1,
    sd_tolerance: float = 0.07,
) -> Comparison:
    r"""Compare the posterior of a fit with that of a reference, usually pooled NUTS.

    Draws are in the constrained space, as in ArviZ. The numbers of chains and draws may differ.
    The columns of the table are:

    * ``mean_ref``, ``sd_ref``, ``mean_fed``, ``sd_fed``: means and sds of both;
    * ``error``: :math:`|\bar x_{fed} - \bar x_{ref}| / s_{ref}`;
    * ``mcse``: Monte-Carlo standard error of ``error``, from those of both means;
    * ``sd_ratio``: :math:`s_{fed} / s_{ref}`;
    * ``sd_ratio_mcse``: standard error of ``sd_ratio``, by the delta method from those of both sds;
    * ``w2``: Wasserstein-2 distance of the two empirical marginals, in reference sds (it includes
      Monte-Carlo noise, so it is never quite zero);
    * ``ess_bulk``, ``ess_tail``, ``r_hat``: diagnostics of the fit;
    * ``verdict``: as below;
    * ``note``: a reason for the verdict that the numbers alone do not show.

    A row *agrees* if three conditions hold. Error + 2 mcse is at most ``mean_tolerance``. The sd
    ratio is within [1/(1 + ``sd_tolerance``), 1 + ``sd_tolerance``], with 2 standard errors to
    spare on both sides. No R-hat is above 1.05.

    A row *differs* if the error or the ratio is outside by more than 3 standard errors, or if a
    draw of the fit is not finite. Otherwise it is *undecided*. A parameter that is constant up to
    rounding in both fits agrees if both constants are equal. For a variational fit the closing
    line also judges Pareto's k.

    :param fed: an :class:`arviz.InferenceData`, or an argument of
        ``arviz.convert_to_inference_data``.
    :param reference: the reference, in the same forms.
    :param var_names: sites to compare. ``None``: all sites, which must be the same in both.
    :param mean_tolerance: largest accepted difference of means, in reference sds.
    :param sd_tolerance: largest accepted relative difference of the sds.
    :raises ValueError: when sites, dimensions, shapes or coordinates do not match, or a tolerance
        is not positive.

    **References**

    1. *Rank-normalization, folding, and localization: an improved R-hat*, Vehtari et al. 2021
       (R-hat, both ESS, and the standard errors of mean and sd)

    Example::

        >>> import numpy as np
        >>> from numpyro_fed.results.compare import compare
        >>> rng = np.random.default_rng(0)
        >>> fit = {"beta": rng.normal(size=(4, 50, 2))}
        >>> reference = {"beta": rng.normal(size=(4, 50, 2))}
        >>> compare(fit, reference).verdict  # the same law, but too few draws to tell
        'undecided'
    """
    for name, value in (("mean_tolerance", mean_tolerance), ("sd_tolerance", sd_tolerance)):
        if not value > 0:
            raise ValueError(f"expected {name} > 0, got {value}")
    return _compare(paired_scalars(fed, reference, var_names), mean_tolerance, sd_tolerance, fed)


def plot_compare(
    fed: object,
    reference: object,
    *,
    var_names: str | Sequence[str] | None = None,
    max_rows: int = 12,
    labels: tuple[str, str] = ("federated", "pooled NUTS"),
    figure: "Figure | None" = None,
) -> "Figure":
    """Draw both posteriors: a forest plot, and the marginal densities of each parameter.

    The reference's mean and sd standardize every parameter, so that all rows share one axis.
    Intervals are the central 50 % and 94 %. The verdicts are those of :func:`compare` with its
    default tolerances. Parameters that are constant in the reference are not drawn.

    :param fed: as for :func:`compare`.
    :param reference: as for :func:`compare`.
    :param var_names: as for :func:`compare`.
    :param max_rows: largest number of rows; of more parameters the worst are drawn.
    :param labels: names of the fit and of the reference.
    :param figure: an empty figure (or subfigure) to draw in. ``None``: a new one of suitable size.
    :return: the figure.
    :raises ValueError: as :func:`compare`, or when no parameter varies in the reference.
    """
    from numpyro_fed.results.comparison_figure import draw_comparison

    if max_rows < 1:
        raise ValueError(f"expected max_rows >= 1, got {max_rows}")
    scalars = paired_scalars(fed, reference, var_names)
    comparison = _compare(scalars, mean_tolerance=0.1, sd_tolerance=0.07, fit=fed)
    varies = np.array([np.isfinite(ref).all() and not is_constant(ref) for _, _, ref in scalars])
    if not varies.any():
        raise ValueError("expected a parameter that varies in the reference, got constants only")
    rows = np.flatnonzero(varies)
    title = f"Posterior: {labels[0]} against {labels[1]}"
    if len(rows) > max_rows:
        worst_first = _by_severity(comparison.table)
        rows = worst_first[varies[worst_first]][:max_rows]
        title += f", the {max_rows} worst of {len(scalars)} parameters"
    draws = [(fit.ravel(), ref.ravel()) for _, fit, ref in (scalars[i] for i in rows)]
    table = comparison.table.iloc[rows]
    units = [_rounded(m, s, s) for m, s in zip(table["mean_ref"], table["sd_ref"], strict=True)]
    subtitle = comparison.closing_line().replace(" Pareto's", "\nPareto's")
    return draw_comparison(draws, table.assign(units=units), (title, subtitle), labels, figure)


def _said_of_itself(fit: object) -> tuple[float | None, str | None]:
    """Return Pareto's k and the cost of privacy, where a fit's ``InferenceData`` has them."""
    if not is_result(fit) or "posterior" not in groups_of(fit):
        return None, None
    attrs = fit.posterior.attrs
    k = attrs.get("pareto_k")
    privacy = attrs.get("privacy")
    if privacy is not None:
        wider = float(np.hypot(1.0, float(attrs["privacy_error"])))
        privacy = f"{privacy}, so sds that include it are {wider:.2f} times the fit's"
    return None if k is None else float(k), privacy


def _compare(
    scalars: list[Scalar], mean_tolerance: float, sd_tolerance: float, fit: object
) -> Comparison:
    import pandas as pd

    rows = [compare_scalar(fed, ref, mean_tolerance, sd_tolerance) for _, fed, ref in scalars]
    table = pd.DataFrame(rows, columns=COLUMNS, index=[label for label, _, _ in scalars])
    return Comparison(table, mean_tolerance, sd_tolerance, scalars, *_said_of_itself(fit))


def _sinkhorn_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the root of the Sinkhorn divergence of draws ``x`` and ``y``, ``(draws, scalars)``."""

    def cost(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return ((x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T).clip(0) / x.shape[1]

    costs = (cost(x, y), cost(x, x), cost(y, y))
    return float(np.sqrt(max(float(_divergence()(*(c.astype(np.float32) for c in costs))), 0.0)))


@cache
def _divergence() -> Callable[..., Array]:
    """Return the Sinkhorn divergence of three cost matrices, compiled once for each shape."""
    import jax

    with warnings.catch_warnings():  # ott imports jaxopt, which is deprecated
        warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
        from ott.geometry.geometry import Geometry
        from ott.solvers.linear.acceleration import Momentum
        from ott.tools.sinkhorn_divergence import sinkhorn_divergence

    # updating both potentials at once makes the divergence symmetric in x and y
    options = {"parallel_dual_updates": True, "momentum": Momentum(start=0, value=0.5)}
    return jax.jit(
        lambda *costs: sinkhorn_divergence(
            Geometry, *costs, epsilon=_EPSILON, solve_kwargs=options
        )[0]
    )


def _by_severity(table: "DataFrame") -> np.ndarray:
    """Return positions of the rows, worst verdict first, then largest error."""
    rank = np.array([VERDICTS.index(verdict) for verdict in table["verdict"]])
    return np.lexsort((-table["error"].fillna(np.inf).to_numpy(), -rank))


def _shown(row: "Series") -> dict[str, str]:
    """Return one row of the table as printed."""
    return {
        "reference": _rounded(row["mean_ref"], row["sd_ref"], row["sd_ref"]),
        "fit": _rounded(row["mean_fed"], row["sd_fed"], row["sd_ref"]),
        "error": f"{row['error']:.3f} ± {row['mcse']:.3f}",
        "sd ratio": f"{row['sd_ratio']:.3f} ± {row['sd_ratio_mcse']:.3f}",
        "w2": f"{row['w2']:.3f}",
        "ess_bulk": f"{row['ess_bulk']:.0f}",
        "ess_tail": f"{row['ess_tail']:.0f}",
        "r_hat": f"{row['r_hat']:.3f}",
        "verdict": f"{row['verdict']} ({row['note']})" if row["note"] else row["verdict"],
    }


def _rounded(mean: float, sd: float, unit: float) -> str:
    """Format mean and sd to the third significant digit of ``unit``, where that is readable."""
    if np.isfinite([mean, sd, unit]).all() and 1e-5 < unit < 1e3:
        digits = 2 - int(np.floor(np.log10(unit)))
        mean = round(mean, digits) + 0.0  # no minus sign before zero
        return f"{mean:.{max(digits, 0)}f} ± {sd:.{max(digits, 0)}f}"
    return f"{mean:.5g} ± {sd:.3g}"
