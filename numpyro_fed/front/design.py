"""The columns of numbers that a formula makes of a table, alike in every silo.

The package formulae (Bambi's) makes the columns. It learns levels from a small table that is made
up from the dictionary. ``scale``, ``center`` and ``bs`` take means, sds and knots from the
dictionary, too, instead of the rows at hand.
"""

import contextlib
import io
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import numpy as np
import pandas as pd
from scipy.interpolate import BSpline

from numpyro_fed.front.calls import take_out
from numpyro_fed.front.dictionary import Column, Dictionary
from numpyro_fed.front.formula import CALL
from numpyro_fed.front.tables import as_text, column

_SMOOTH = 8  # B-splines of s()
_KEEP = "dictionary_"


class _Matrix(Protocol):
    """A matrix of formulae that can be made of other rows."""

    terms: Mapping
    slices: Mapping[str, slice]
    design_matrix: np.ndarray

    def evaluate_new_data(self, data: pd.DataFrame) -> "_Matrix": ...


class Design:
    """Columns of numbers for one right-hand side.

    :param rhs: the formula, e.g. ``"1 + age + sex"``.
    :param words: the dictionary.
    """

    def __init__(self, rhs: str, words: Dictionary, reads: Iterable[str]) -> None:
        self.reads = tuple(reads)
        self._words = words
        self._own = _own_functions(words)
        self.intercept = rhs.split(" + ")[0] == "1"
        self._matrix = None if rhs in ("0", "1") else self._made(CALL.sub(rf"{_KEEP}\1(", rhs))
        terms = self._matrix.terms.values() if self._matrix else []
        in_full = _calls_in_full(rhs)
        #: names of the columns, without the intercept
        self.labels = [
            _replaced(label.replace(_KEEP, ""), in_full)
            for term in terms
            if term.kind not in ("intercept", "offset")
            for label in term.labels
        ]
        self.offset = any(term.kind == "offset" for term in terms)
        self._check_rows(rhs)

    def _made(self, rhs: str) -> _Matrix:
        from formulae import design_matrices

        made = _drawn(self._words, self.reads, rows=64)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return design_matrices(
                    rhs, made, na_action="pass", extra_namespace=self._own
                ).common
        except KeyError as error:
            raise ValueError(
                f"formula, part {rhs.replace(_KEEP, '')!r}: there is no function {error}; expected "
                "scale(), center(), bs(), s(), C(), I(), or NumPy's, e.g. np.log()"
            ) from error
        except Exception as error:
            raise ValueError(f"formula, part {rhs.replace(_KEEP, '')!r}: {error}") from error

    def _check_rows(self, rhs: str) -> None:
        """Raise a ``ValueError`` if the columns of a row depend on other rows."""
        made = _drawn(self._words, self.reads, rows=64)
        rng = np.random.default_rng(1)
        for name in made.select_dtypes("number"):  # no two alike, so that a minimum is of one half
            made[name] *= 1 + 0.1 * rng.random(len(made))
        half = len(made) // 2
        with np.errstate(divide="ignore", invalid="ignore"):  # of a made-up value, e.g. log(-1)
            both = [self.columns(made.iloc[rows])[0] for rows in (slice(half), slice(half, None))]
            whole = self.columns(made)[0]
        if not np.allclose(np.concatenate(both), whole, equal_nan=True):
            wrong = np.flatnonzero(~np.isclose(np.concatenate(both), whole).all(0))
            raise ValueError(
                f"formula, part {rhs!r}: {self.labels[wrong[0]]!r} reads more than its own row, "
                "which differs between silos; expected scale, center, bs or s, or a column made "
                "beforehand"
            )

    def columns(self, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns of a table, ``(rows, columns)``, and the sum of its offsets."""
        if self._matrix is None:
            return np.zeros((len(table), 0)), np.zeros(len(table))
        whole = self._matrix.evaluate_new_data(table)
        matrix = np.asarray(whole.design_matrix, np.float64)
        offset = np.zeros(len(table))
        parts = []
        for name, term in self._matrix.terms.items():
            part = matrix[:, self._matrix.slices[name]]
            if term.kind == "offset":
                offset += part.sum(1)
            elif term.kind != "intercept":
                parts.append(part)
        return np.concatenate([np.zeros((len(table), 0)), *parts], 1), offset

    def centers_and_scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and sd of each column.

        Those of a number are the dictionary's. Others are of made-up rows whose columns are
        independent: any value would be right, as all silos use the same one.
        """
        made = self.columns(_drawn(self._words, self.reads))[0]
        mean, sd = made.mean(0), made.std(0)
        for i, label in enumerate(self.labels):
            if label in self.reads:
                told = self._words.columns[label]
                mean[i], sd[i] = told.mean or 0.0, told.sd or 0.0
        return mean, np.where(sd > 0, sd, 1.0)


def _calls_in_full(rhs: str) -> dict[str, str]:
    """Return the calls of a right-hand side by formulae's names, which lack inner parentheses."""
    from formulae import model_description

    return {model_description(f"0 + {x}").terms[0].name: x for x in take_out(rhs).calls}


def _replaced(label: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        label = label.replace(old, new)
    return label


def clean(
    table: pd.DataFrame,
    names: Iterable[str],
    words: Dictionary,
    silo: str,
    holes: Collection[str] = (),
) -> pd.DataFrame:
    """Return columns of a silo's table: numbers, and levels that the dictionary has.

    :param holes: columns that the table may lack.
    """
    out = {}
    for name in names:
        told = _known(words, name)
        if name in holes and name not in table:
            _check_never_measured(table, name, words, silo)
            table = table.assign(**{name: np.nan})
        values = column(table, name, silo)
        if told.kind == "levels":
            values = as_text(values)
            if unknown := sorted(set(values.dropna()) - told.counts.keys()):
                raise ValueError(
                    f"silo {silo!r}, column {name!r}: level {unknown[0]!r} is not in the "
                    f"dictionary, which has {list(told.counts)}; expected one of these. Before a "
                    "fit, join a level of few rows with another, or describe the tables with a "
                    "smaller min_count"
                )
            values = pd.Series(
                pd.Categorical(values, list(told.counts), ordered=True), name=values.name
            )
        elif not np.issubdtype(values.dtype, np.number):
            raise ValueError(
                f"silo {silo!r}, column {name!r}: expected numbers, as in the dictionary"
            )
        out[name] = values.reset_index(drop=True)
    return pd.DataFrame(out, index=range(len(table)))


def _check_never_measured(table: pd.DataFrame, name: str, words: Dictionary, silo: str) -> None:
    """Raise where a column that a table lacks is there by another name, or was described."""
    near = [c for c in table if str(c).strip().casefold() == name.strip().casefold()]
    described = words.silos.get(silo, {}).get(name)
    rows = 0 if described is None else described.rows
    if near or rows:
        which = f"has {near[0]!r}" if near else f"had it in {rows} rows when described"
        raise ValueError(
            f"silo {silo!r}: no column {name!r}, but it {which}; expected the column, or a silo "
            f"that has never measured it; there are {sorted(map(str, table.columns))}"
        )


def _number(words: Dictionary, name: str) -> Column:
    told = _known(words, name)
    if told.kind != "number":
        raise ValueError(f"column {name!r}: expected numbers, got the levels {sorted(told.counts)}")
    return told


def _known(words: Dictionary, name: str) -> Column:
    told = words.column(name)
    if told.kind not in ("number", "levels") or (told.kind == "number" and told.mean is None):
        why = {
            "number": "hidden numbers",
            "other": "dates, or text of more than 50 values",
            "group": "a group",
        }
        raise ValueError(
            f"column {name!r}: expected numbers or levels in the dictionary, got {why[told.kind]}; "
            "make it a number, e.g. of days, (pd.to_datetime(x) - pd.Timestamp('2020-01-01')) / "
            "pd.Timedelta('1D'), or describe it with levels= or a smaller min_count"
        )
    return told


def _drawn(words: Dictionary, names: Iterable[str], rows: int = 4096) -> pd.DataFrame:
    """Return made-up rows: columns independent, with the dictionary's quantiles and shares."""
    rng = np.random.default_rng(0)
    out: dict[str, object] = {}
    known = {name: _known(words, name) for name in names}
    rows = max(rows, *(len(told.counts) for told in known.values()), 1)
    for name, told in known.items():
        if told.kind == "number":
            share = (rng.permutation(rows) + 0.5) / rows
            out[name] = np.array([told.quantile(p) for p in share])
            continue
        levels, counts = list(told.counts), np.array([*told.counts.values()], float)
        if not levels:
            raise ValueError(
                f"column {name!r}: all its levels are hidden; expected a smaller min_count"
            )
        ends = np.cumsum(counts) / counts.sum()
        codes = np.searchsorted(ends, (np.arange(rows) + 0.5) / rows)
        codes[: len(levels)] = np.arange(len(levels))
        out[name] = pd.Categorical.from_codes(rng.permutation(codes), levels, ordered=True)
    return pd.DataFrame(out, index=range(rows))


def _own_functions(words: Dictionary) -> dict[str, Callable]:
    def scale(x: pd.Series) -> np.ndarray:
        told = _number(words, str(x.name))
        return (np.asarray(x, float) - told.mean) / (told.sd or 1.0)

    def center(x: pd.Series) -> np.ndarray:
        return np.asarray(x, float) - _number(words, str(x.name)).mean

    def bs(x: pd.Series, df: int = 4) -> np.ndarray:
        if isinstance(df, bool) or not isinstance(df, int) or df < 3:
            raise ValueError(f"bs({x.name}): expected a whole number df >= 3, got {df!r}")
        return spline(np.asarray(x, float), _number(words, str(x.name)), df + 1)[:, 1:]

    own = {"scale": scale, "standardize": scale, "center": center, "bs": bs}
    return {f"{_KEEP}{name}": function for name, function in own.items()}


def spline(x: np.ndarray, told: Column, number: int) -> np.ndarray:
    """Return cubic B-splines of a column, ``(rows, number)``, with knots at its quantiles.

    They end one sd beyond the 5 and the 95 % quantile, and are constant from there.
    """
    sd = told.sd or 1.0
    low, high = told.quantile(0.05) - sd, told.quantile(0.95) + sd
    shares = np.linspace(0, 1, number - 2)[1:-1]
    inner = np.array([told.quantile(p) for p in shares])
    knots = np.concatenate([[low] * 4, inner, [high] * 4])
    return BSpline.design_matrix(np.clip(x, low, high), knots, 3).toarray()


def smooth(x: np.ndarray, told: Column) -> tuple[np.ndarray, np.ndarray]:
    """Return a smooth's columns: a straight line, and bends that share a scale.

    The bends are B-splines turned so that their second differences, which say how rough a curve
    is, become a sum of squares of independent coefficients (Wood, 2017, section 5.8).
    """
    rough = np.diff(np.eye(_SMOOTH), n=2, axis=0)
    values, vectors = np.linalg.eigh(rough.T @ rough)
    turned = vectors[:, 2:] / np.sqrt(values[2:])
    line = (x - (told.mean or 0.0)) / (told.sd or 1.0)
    return line[:, None], spline(x, told, _SMOOTH) @ turned
