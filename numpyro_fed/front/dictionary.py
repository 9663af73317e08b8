"""A look at the columns of all silos without their rows, and the dictionary made from it.

Each silo says of each column how many values it has and lacks. Of numbers it adds their mean,
standard deviation and quantiles, of text the counts of its levels, of a group (``hospital``, in a
silo that is a country) how many elements it has. Nothing else leaves the silo. A value that fewer
than ``min_count`` rows stand behind is hidden, and said to be. So is the next level where what is
hidden would follow from the rest, and the mean of two values of which one is so rare.
"""

import copy
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from numpyro_fed.front.level_order import own_order, pooled_order
from numpyro_fed.front.tables import (
    as_tables,
    as_text,
    column,
    is_date_text,
    is_time,
    numeric_text,
)

_LEVELS = np.round(np.arange(0.05, 1.0, 0.05), 2)  # of the quantiles
_SHOWN = 6  # levels in a line
_MOST_LEVELS = 50  # names and free text have more


@dataclass(frozen=True)
class Column:
    """Facts on a column, of one silo or of all.

    :param kind: ``"number"``, ``"levels"``, ``"group"``, or ``"other"``: dates, and text of more
        than 50 values.
    :param rows: rows with a value.
    :param missing: rows without.
    :param mean: of the numbers, as ``sd``; ``None`` where hidden.
    :param quantiles: of the numbers, ``(share of rows, value)``; extremes are left out.
    :param counts: rows at each level, in the order of a pandas ``Categorical`` or of the alphabet.
    :param hidden: rows at levels of which fewer than ``min_count`` rows are.
    :param elements: number of elements of a group.
    """

    kind: str
    rows: int
    missing: int
    mean: float | None = None
    sd: float | None = None
    quantiles: tuple[tuple[float, float], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    hidden: int = 0
    elements: int | None = None

    @property
    def is_binary(self) -> bool:
        """Flag of numbers that are 0 or 1, as far as mean and sd tell."""
        if self.mean is None or not self.sd:
            return False
        values = {value for _, value in self.quantiles}
        return values <= {0.0, 1.0} and math.isclose(self.sd**2, self.mean * (1 - self.mean))

    def quantile(self, share: float) -> float:
        """Return a quantile of the numbers, between those that are known."""
        if not self.quantiles:
            return float(self.mean or 0.0)
        shares, values = zip(*self.quantiles, strict=True)
        return float(np.interp(share, shares, values))


class Dictionary:
    """Facts on the columns of all silos, the same for each of them.

    :func:`numpyro_fed.glmm` takes levels, centers and scales from it, so that every silo codes its
    rows alike.

    :param silos: the columns of each silo.
    """

    def __init__(self, silos: Mapping[str, Mapping[str, Column]]) -> None:
        if not silos:
            raise ValueError("expected at least one silo, got none")
        self.silos = {name: dict(columns) for name, columns in silos.items()}
        names = dict.fromkeys(c for columns in self.silos.values() for c in columns)
        self.columns = {name: _pooled(name, self.silos) for name in names}

    def column(self, name: str) -> Column:
        """Return the facts on a column over all silos.

        :raises ValueError: if no silo has it.
        """
        if name not in self.columns:
            raise ValueError(f"no silo has a column {name!r}; there are {sorted(self.columns)}")
        return self.columns[name]

    def led_by(self, first: Mapping[str, str]) -> "Dictionary":
        """Return the dictionary with other first levels, with which others are compared.

        :raises ValueError: for a level that the column does not have.
        """
        columns = dict(self.columns)
        for name, level in first.items():
            counts = self.column(name).counts
            if level not in counts:
                raise ValueError(
                    f"column {name!r}: expected a reference among its levels {list(counts)}, got "
                    f"{level!r}"
                )
            columns[name] = replace(columns[name], counts={level: counts[level], **counts})
        led = copy.copy(self)
        led.columns = columns
        return led

    @classmethod
    def load(cls, *paths: str | Path) -> "Dictionary":
        """Return the dictionary of the silos in files that :meth:`save` wrote.

        :raises ValueError: for a file of another kind, and a silo in two files.
        """
        silos: dict[str, dict[str, Column]] = {}
        for path in paths:
            try:
                found = json.loads(Path(path).read_text())["silos"]
                read = {
                    name: {c: _column_of(facts) for c, facts in columns.items()}
                    for name, columns in found.items()
                }
            except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"{str(Path(path).absolute())!r}: expected a file of Dictionary.save, got "
                    f"{error!r}; in a model file, name files by Path(__file__).parent"
                ) from error
            if twice := silos.keys() & read.keys():
                raise ValueError(f"{str(path)!r}: silo {min(twice)!r} is in another file, too")
            silos |= read
        return cls(silos)

    def save(self, path: str | Path) -> None:
        """Write the dictionary to a JSON file."""
        silos = {
            name: {c: asdict(facts) for c, facts in columns.items()}
            for name, columns in self.silos.items()
        }
        Path(path).write_text(json.dumps({"silos": silos}, indent=1))

    def table(self, silo: str | None = None) -> pd.DataFrame:
        """Return one row a column: of all silos, or of one of them."""
        columns = self.columns if silo is None else self.silos[silo]
        return pd.DataFrame({name: _row(facts) for name, facts in columns.items()}).T

    def by_silo(self, column: str) -> pd.DataFrame:
        """Return one row a silo: what each says of a column.

        :raises ValueError: for a column that no silo has.
        """
        self.column(column)
        return pd.DataFrame(
            {silo: _row(own[column]) for silo, own in self.silos.items() if column in own}
        ).T

    def __repr__(self) -> str:
        rows = max(c.rows + c.missing for c in self.columns.values())
        with pd.option_context("display.width", 100, "display.max_columns", 10):
            return f"Dictionary: {len(self.silos)} silos, {rows} rows\n{self.table().to_string()}"


def describe(
    tables: object,
    *,
    groups: Collection[str] = (),
    levels: Collection[str] = (),
    min_count: int = 3,
) -> Dictionary:
    """Describe the columns of tables, without their rows.

    What leaves a silo is what the result shows: counts, means, standard deviations, quantiles,
    names of levels. It has no row and no extreme, but it is not noised. A person at the silo looks
    at it before it goes out, e.g. in the file that ``numpyro-fed describe`` writes.

    :param tables: ``{silo name: table}``, each a pandas, Arrow or polars table, columns by name, or
        the path of a CSV or Parquet file. In a silo: its own alone.
    :param groups: columns whose values name elements inside a silo, such as patients or hospitals.
        Their names stay there.
    :param levels: columns of numbers that are codes of levels.
    :param min_count: fewest rows behind a mean, a quantile or a level. 1: nothing is hidden.
    :return: the dictionary; its ``repr`` is a table.
    :raises ValueError: for objects that are no tables, and a column that is text in one silo and
        numbers in another.

    Example::

        >>> import numpyro_fed as fed
        >>> oslo = {"age": [61, 74, 70, 68], "sex": ["F", "M", "F", "F"]}
        >>> rome = {"age": [80, 77, None, 75], "sex": ["M", "M", "M", "M"]}
        >>> words = fed.describe({"oslo": oslo, "rome": rome})
        >>> words.columns["sex"].counts, words.columns["sex"].hidden
        ({'M': 4}, 4)
        >>> round(words.columns["age"].mean, 2), words.columns["age"].missing
        (72.14, 1)
    """
    if isinstance(min_count, bool) or not isinstance(min_count, int) or min_count < 1:
        raise ValueError(f"min_count: expected a whole number >= 1, got {min_count!r}")
    for name, value in {"groups": groups, "levels": levels}.items():
        if isinstance(value, str):
            raise ValueError(f"{name}: expected names of columns, e.g. [{value!r}], got {value!r}")
    frames = as_tables(tables)
    known = set().union(*(table.columns for table in frames.values()))
    if unknown := sorted({*groups, *levels} - known):
        raise ValueError(f"no silo has a column {unknown[0]!r}; there are {sorted(known)}")
    return Dictionary(
        {
            silo: {
                name: _described(table, name, silo, groups, levels, min_count)
                for name in table.columns
                # where we added it
                if name != "silo" or name in levels or not (table[name] == silo).all()
            }
            for silo, table in frames.items()
        }
    )


def _described(
    table: pd.DataFrame,
    name: str,
    silo: str,
    groups: Collection[str],
    levels: Collection[str],
    min_count: int,
) -> Column:
    """Return what a silo says of a column."""
    if is_time(table[name]) or (name not in {*groups, *levels} and is_date_text(table[name])):
        return Column("other", int(table[name].notna().sum()), int(table[name].isna().sum()))
    values = column(table, name, silo)
    values = as_text(values) if name in {*groups, *levels} else values
    known = values.dropna()
    rows, missing = len(known), len(values) - len(known)
    if name in groups:
        return Column("group", rows, missing, elements=known.nunique())
    if numeric_text(known):
        x = known.to_numpy(np.float64)
        each = np.unique(x, return_counts=True)[1]
        # mean and rows of two values tell how many rows each has
        if rows < min_count or (len(each) == 2 and each.min() < min_count):
            return Column("number", rows, missing)
        inside = _LEVELS[(np.minimum(_LEVELS, 1 - _LEVELS) * rows) >= min_count]
        whole = bool((x == np.round(x)).all())  # no quantile between whole numbers
        at = np.quantile(x, inside, method="inverted_cdf") if whole else np.quantile(x, inside)
        quantiles = tuple((float(p), float(q)) for p, q in zip(inside, at, strict=True))
        return Column("number", rows, missing, float(x.mean()), float(x.std()), quantiles)
    counts = known.value_counts()
    order = own_order(table[name], list(counts.index))
    if len(counts) > _MOST_LEVELS and name not in levels:
        return Column("other", rows, missing)
    shown = {level: int(counts[level]) for level in order if counts[level] >= min_count}
    if shown and 0 < rows - sum(shown.values()) < min_count:  # the rest would be known
        del shown[min(shown, key=lambda level: shown[level])]
    return Column("levels", rows, missing, counts=shown, hidden=rows - sum(shown.values()))


def _pooled(name: str, silos: Mapping[str, Mapping[str, Column]]) -> Column:
    """Return what all silos together say of a column."""
    found = {silo: columns[name] for silo, columns in silos.items() if name in columns}
    said = {silo: c.kind for silo, c in found.items() if c.rows}
    kinds = set(said.values()) or {"other"}
    if kinds == {"levels", "other"}:  # free text, of which a silo has few values
        kinds = {"other"}
    if len(kinds) > 1:
        first, other = (next(s for s in said if said[s] == k) for k in sorted(kinds)[:2])
        raise ValueError(
            f"column {name!r}: expected one kind in all silos, got {said[first]!r} in silo "
            f"{first!r} and {said[other]!r} in silo {other!r}; code it alike, or name it in "
            "levels= or groups="
        )
    columns = [c for c in found.values() if c.rows]
    rows = sum(c.rows for c in columns)
    missing = sum(c.missing for c in found.values())
    (kind,) = kinds
    if kind == "number":
        return _pooled_numbers(rows, missing, columns)
    of_levels = [c.counts for c in columns if kind == "levels"]
    counts: dict[str, int] = {}
    for own in of_levels:
        for level, n in own.items():
            counts[level] = counts.get(level, 0) + n
    return Column(
        kind,
        rows,
        missing,
        counts={level: counts[level] for level in pooled_order([*map(list, of_levels)])},
        hidden=sum(c.hidden for c in columns),
        elements=sum(c.elements or 0 for c in columns) if kind == "group" else None,
    )


def _pooled_numbers(rows: int, missing: int, columns: Sequence[Column]) -> Column:
    """Return the mean, sd and quantiles over silos; quantiles are between those of silos."""
    shown = [(c.rows, c.mean, c.sd, c) for c in columns if c.mean is not None and c.sd is not None]
    if not shown:
        return Column("number", rows, missing)
    n = np.array([r for r, _, _, _ in shown], float)
    means = np.array([m for _, m, _, _ in shown])
    sds = np.array([s for _, _, s, _ in shown])
    mean = float(n @ means / n.sum())
    sd = float(np.sqrt(n @ (sds**2 + (means - mean) ** 2) / n.sum()))
    with_quantiles = [c for _, _, _, c in shown if c.quantiles]
    if not with_quantiles:
        return Column("number", rows, missing, mean, sd)
    grid = np.unique([value for c in with_quantiles for _, value in c.quantiles])
    below = np.zeros(len(grid))
    for c in with_quantiles:
        shares, values = map(np.array, zip(*c.quantiles, strict=True))
        last = np.append(np.diff(values) > 0, True)  # of equal values the largest share
        below += c.rows * np.interp(grid, values[last], shares[last], left=0.0, right=1.0)
    below /= sum(c.rows for c in with_quantiles)
    # levels that silos with nine rows of ten have
    having = [sum(c.rows for c in columns if p in dict(c.quantiles)) for p in _LEVELS]
    known = _LEVELS[(np.array(having) >= 0.9 * rows) & (below.max() >= _LEVELS)]
    found = np.interp(known, below, grid)
    found = np.round(found) if (grid == np.round(grid)).all() else found
    quantiles = tuple((float(p), float(x)) for p, x in zip(known, found, strict=True))
    return Column("number", rows, missing, mean, sd, quantiles)


def _column_of(facts: Mapping) -> Column:
    quantiles = tuple((float(p), float(x)) for p, x in facts["quantiles"])
    return Column(**{**facts, "quantiles": quantiles})


def _row(c: Column) -> dict[str, object]:
    """Return a column's line in a table for people."""
    said = ""
    if c.kind == "number":
        said = "hidden" if c.mean is None else ""
    elif c.kind == "group":
        said = f"{c.elements} elements"
    elif c.kind == "other":
        said = f"dates, or text of more than {_MOST_LEVELS} values"
    elif c.kind == "levels":
        most = sorted(c.counts.items(), key=lambda pair: -pair[1])
        said = ", ".join(f"{k} {n}" for k, n in most[:_SHOWN])
        said += f", and {len(most) - _SHOWN} more" if len(most) > _SHOWN else ""
        said += f"{', ' * bool(said)}hidden {c.hidden}" if c.hidden else ""
    at = dict(c.quantiles)
    q05, q50, q95 = (f"{at[p]:.4g}" if p in at else "" for p in (0.05, 0.5, 0.95))
    return {
        "kind": c.kind,
        "rows": c.rows,
        "missing": c.missing,
        "mean": "" if c.mean is None else f"{c.mean:.4g}",
        "sd": "" if c.sd is None else f"{c.sd:.4g}",
        "5%": q05,
        "50%": q50,
        "95%": q95,
        "levels": said,
    }
