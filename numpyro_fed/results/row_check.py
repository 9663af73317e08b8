"""Check of a model, row by row: sums that each silo makes of its own rows.

:mod:`numpyro_fed.vi.row_checks` tells what they are, and what leaves a silo.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_fed.results.silo_likelihood import Question, evenly
from numpyro_fed.vi.row_checks import DENSITY, GROUPS, QUANTITIES, RowsLocal

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MOST_NUMBERS = 1 << 26  # of draws times rows in a silo: 256 MiB in float32, twice
_ODD = 0.005  # a quantity is named where a smaller share of replicates lies beyond it
_NAMED = 12  # most silos that a legend names
_MOST, _LEAST = 1000, 100  # draws


@dataclass(frozen=True)
class RowCheck:
    """Check of the rows of each silo, a table for each question.

    :ivar loo: for each observed site and silo: ``rows``, ``elpd`` (leave-one-row-out log density,
        in nats), its ``se`` over rows, ``p_loo`` (effective number of parameters), and how many
        rows have Pareto's k above .7 (``bad_k``).
    :ivar calibration: for each observed site, silo and tenth of its rows by prediction: ``rows``,
        mean ``prediction`` without the row, and mean ``outcome``. At least ten rows each.
    :ivar predictive: for each observed site and silo: ``mean``, ``sd`` and share of ``zeros`` of
        the outcome, and the share of replicates above each (``mean_tail``, ...). Replicates are
        what the other silos predict for this one. A share near 0 or 1 tells an outlier.
    """

    loo: "pd.DataFrame"
    calibration: "pd.DataFrame"
    predictive: "pd.DataFrame"

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def plot(self) -> "Figure":
        """Draw mean outcome against mean prediction of groups of rows, a panel for each site.

        :raises ValueError: where ``calibration`` is empty.
        """
        import matplotlib.pyplot as plt

        sites = list(self.calibration.index.get_level_values("site").unique())
        num = len(sites)
        if not num:
            raise ValueError("expected predictions of ten rows of a silo or more, got none")
        figure, axes = plt.subplots(1, num, figsize=(3.4 * num, 3.2), layout="constrained")
        for site, axis in zip(sites, np.ravel(axes), strict=True):
            for silo, table in self.calibration.loc[site].groupby(level="silo", sort=False):
                axis.plot(table["prediction"], table["outcome"], "o", ms=3, alpha=0.6, label=silo)
            ends = self.calibration.loc[site][["prediction", "outcome"]].to_numpy()
            axis.plot(*[[ends.min(), ends.max()]] * 2, color="0.6", lw=0.8, zorder=0)
            axis.set(title=site, xlabel="mean prediction", ylabel="mean outcome")
        if len(self.loo.index.get_level_values("silo").unique()) <= _NAMED:
            handles, names = axis.get_legend_handles_labels()
            figure.legend(handles, names, loc="outside right upper", fontsize="small")
        return figure

    def lines(self) -> list[str]:
        """Return a line for each observed site, for people."""
        out = []
        for site, table in self.loo.groupby(level="site", sort=False):
            total = table.sum()
            squares = (table["se"] ** 2 + table["elpd"] ** 2 / table["rows"]).sum()
            error = _error(squares, total["elpd"], total["rows"])
            out.append(
                f"Leave one row of {site!r} out: elpd {total['elpd']:.1f} (se {error:.1f}), p_loo "
                f"{total['p_loo']:.1f}, {total['bad_k']:.0f} of {total['rows']:.0f} rows with "
                "Pareto's k above .7"
            )
        tails = self.predictive[[name for name in self.predictive if name.endswith("_tail")]]
        odd = tails.where((tails < _ODD) | (tails > 1 - _ODD)).stack().dropna()
        judged = int((tails.notna() & (tails != 0.5)).to_numpy().sum())
        if judged:
            out.append(
                "Mean, sd and share of zeros of each silo's outcome, beside replicates by the "
                f"others: {len(odd)} of {judged} are in the outer {200 * _ODD:.0f} % "
                f"({2 * _ODD * judged:.1f} are expected to be by chance)"
            )
            if not len(odd):  # readers ask which silo is most unlike the others
                odd = tails.stack().loc[[(tails.fillna(0.5) - 0.5).abs().stack().idxmax()]]
        for (site, silo, tail), share in odd.items():
            what = f"{tail.removesuffix('_tail')} of {site!r} in silo {silo!r}"
            most = "" if min(share, 1 - share) < _ODD else "most extreme: "
            side, of = ("higher", 1 - share) if share < 0.5 else ("lower", share)
            out.append(f"  {most}{what}: {side} than {100 * of:.1f} % of replicates")
        return out


def check_rows(asked: Question) -> RowCheck | None:
    """Return the check of all silos' rows; ``None`` where all outcomes are ``numpyro.factor``s.

    :param asked: a question to remote silos; at most 1,000 of its draws are taken.
    """
    sites = _asked(asked, left_out=False)
    return _tables(sites, asked.silos.names) if sites else None


def replicates_without(asked: Question) -> "pd.DataFrame":
    """Return the predictive checks of silos at draws of the posterior without them."""
    return _predictive(_asked(asked, left_out=True), asked.silos.names)


def _asked(asked: Question, left_out: bool) -> dict[str, np.ndarray]:
    """Return the silos' numbers, by site, ``(silos, numbers)``."""
    silos, num = asked.silos, len(asked.told.log_weight)
    largest = max(max(sizes) for sizes in silos.sizes.values())
    most = max(_LEAST, min(_MOST, _MOST_NUMBERS // largest))
    found = asked.at(evenly(num, most)).ask(RowsLocal(asked.setup.config, left_out))
    return {name: np.stack([np.asarray(reply[name]) for reply in found]) for name in found[0]}


def _predictive(sites: dict[str, np.ndarray], names: tuple[str, ...]) -> "pd.DataFrame":
    import pandas as pd

    index = pd.MultiIndex.from_product([sites, names], names=["site", "silo"])
    tails = [name + tail for name in QUANTITIES for tail in ("", "_tail")]
    numbers = np.concatenate(list(sites.values())).astype(np.float64)
    return pd.DataFrame(numbers[:, -len(tails) :], index, tails)


def _tables(sites: dict[str, np.ndarray], names: tuple[str, ...]) -> RowCheck:
    """Return the tables of the silos' numbers, by site, ``(silos, numbers)``."""
    import pandas as pd

    index = pd.MultiIndex.from_product([sites, names], names=["site", "silo"])
    numbers = np.concatenate(list(sites.values())).astype(np.float64)
    stop = len(DENSITY) + 3 * GROUPS
    loo = pd.DataFrame(numbers[:, : len(DENSITY)], index, DENSITY)
    loo["se"] = _error(loo["squares"], loo["elpd"], loo["rows"])
    loo = loo.astype({"rows": int, "bad_k": int})[["rows", "elpd", "se", "p_loo", "bad_k"]]
    of_groups = numbers[:, len(DENSITY) : stop].reshape(-1, 3)
    tenths = pd.MultiIndex.from_tuples(
        [(*one, group) for one in index for group in range(1, GROUPS + 1)],
        names=["site", "silo", "group"],
    )
    groups = pd.DataFrame(of_groups, tenths, ["rows", "prediction", "outcome"]).dropna()
    return RowCheck(loo, groups.astype({"rows": int}), _predictive(sites, names))


def _error(squares: Any, elpd: Any, rows: Any) -> Any:
    """Return the standard error of sums of the rows' elpd, from the sums of their squares."""
    return np.sqrt(np.maximum(squares - elpd**2 / rows, 0))
