"""Rows of one silo's table, coded as the arguments of a model from a formula."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from numpyro_fed.front.design import Design, clean, smooth
from numpyro_fed.front.dictionary import Dictionary
from numpyro_fed.front.families import FAMILIES, check_outcome
from numpyro_fed.front.formula import Formula, Group, python_name
from numpyro_fed.front.holes import Hole
from numpyro_fed.front.source import index_name
from numpyro_fed.front.tables import as_text, column, numbers


@dataclass(frozen=True)
class Coder:
    """Rule by which a silo's table becomes arguments.

    :param formula: the formula's parts.
    :param family: name of the family.
    :param words: the dictionary.
    :param common: columns of the common effects, whose means and sds are ``center`` and ``scale``.
    :param columns: columns of each group's effects, with an intercept first where it has one.
    :param crossing: labels of the elements of groups that cross silos, by name of the group.
    :param holes: columns that may have missing values.
    :param event: column that says whether a time was seen.
    :param weights: column of weights.
    """

    formula: Formula
    family: str
    words: Dictionary
    common: Design
    center: np.ndarray
    scale: np.ndarray
    columns: Mapping[str, Design]
    crossing: Mapping[str, tuple[str, ...]]
    holes: tuple[Hole, ...]
    event: str | None
    weights: str | None

    @property
    def labels(self) -> list[str]:
        """Names of the coefficients, smooths' lines last."""
        return [*self.common.labels, *(f"s({name})" for name in self.formula.smooths)]

    def by(self, group: Group) -> str | None:
        """Return the group whose elements each lie in one of this group's, or ``None``.

        With wards in hospitals in countries, that of countries is hospitals, and that of hospitals
        is wards.
        """
        inside = [g for g in self.formula.groups if self._lies_in(g, group)]
        depths = [sum(self._lies_in(g, other) for other in inside) for g in inside]
        return inside[depths.index(min(depths))].name if inside else None

    def _lies_in(self, inner: Group, outer: Group) -> bool:
        """Return whether an element of a group names one of another, or its silo."""
        if inner == outer or {inner.name, outer.name} & self.crossing.keys():
            return False
        return outer.factor == ("silo",) or {*outer.factor} < {*inner.factor}

    def arguments(
        self, table: pd.DataFrame, silo: str, outcome: bool = True
    ) -> tuple[dict[str, np.ndarray], int]:
        """Return a silo's arguments, and the number of rows that were left out.

        Rows without an outcome say nothing of the parameters, and are left out.

        :raises ValueError: for a missing value elsewhere, and values that the family or the
            dictionary does not have.
        """
        own = self.outcome(table, silo) if outcome else {}
        kept = ~np.any([np.isnan(v) for v in own.values()], axis=0) if own else slice(None)
        holes = {hole.column for hole in self.holes}
        reads = sorted({*self.formula.reads, *(n for h in self.holes for n in h.regression.reads)})
        rows = clean(table, reads, self.words, silo, holes)[kept].reset_index(drop=True)
        own = {name: values[kept] for name, values in own.items()}
        number = len(table[kept])
        if not number:
            raise ValueError(f"silo {silo!r}: no row has an outcome; leave the silo out")
        _check_missing(rows.drop(columns=list(holes)), silo, fitting=outcome)
        filled = rows
        imputed: dict[str, np.ndarray] = {}
        for hole in self.holes:
            others = rows
            for other in self.holes:
                others = others if other is hole else other.filled(others)
            imputed |= hole.arguments(others, self.common, self.scale, len(self.formula.smooths))
            filled = hole.filled(filled)
        rows = filled
        x, offset = self.common.columns(rows)
        made: dict[str, np.ndarray] = {"x": _single((x - self.center) / self.scale)}
        if self.formula.smooths:
            made |= self._smooths(rows, made)
        if self.common.offset:
            made["offset"] = _single(offset)
        for group in self.formula.groups:
            made |= self._group(group, table[kept], rows, silo)
        made |= imputed
        if outcome:
            check_outcome(self.family, own["y"], self.formula.outcome[0], silo)
            made |= self._typed(own, silo)
        return made, len(table) - number

    def elements(self, table: pd.DataFrame, silo: str) -> dict[str, list[str]]:
        """Return the names of a silo's elements of each group that does not cross silos."""
        known = ~np.any([np.isnan(v) for v in self.outcome(table, silo).values()], axis=0)
        return {
            group.name: np.unique(element_names(table[known], group, silo, crosses=False)).tolist()
            for group in self.formula.groups
            if group.name not in self.crossing
        }

    def outcome(self, table: pd.DataFrame, silo: str) -> dict[str, np.ndarray]:
        """Return the outcome, and what the family adds, with NaN where a value is missing."""
        first, *second = self.formula.outcome
        told = self.words.columns[first]
        if told.kind == "levels":
            values = column(table, first, silo)
            levels = list(told.counts)
            if self.family == "ordinal":
                levels.sort(key=_number)
            known = {level: i for i, level in enumerate(levels)}
            y = np.array([known.get(v, np.nan) for v in as_text(values)])
        else:
            y = numbers(table, first, silo)
        found = {"y": y}
        if second:
            found["trials"] = numbers(table, second[0], silo)
        for name, of in {"event": self.event, "weights": self.weights}.items():
            if of is not None:
                found[name] = numbers(table, of, silo)
        return found

    def _typed(self, own: dict[str, np.ndarray], silo: str) -> dict[str, np.ndarray]:
        whole = FAMILIES[self.family].values in ("binary", "count", "order")
        if "trials" in own and (own["y"] > own["trials"]).any():
            raise ValueError(f"silo {silo!r}: expected at most as many successes as trials")
        if "event" in own and not np.isin(own["event"], (0, 1)).all():
            raise ValueError(f"silo {silo!r}, column {self.event!r}: expected 0 and 1")
        if "weights" in own and (own["weights"] < 0).any():
            raise ValueError(f"silo {silo!r}, column {self.weights!r}: expected weights >= 0")
        made: dict[str, np.ndarray] = {
            name: v.astype(np.int32) if whole and name in ("y", "trials") else _single(v)
            for name, v in own.items()
        }
        if self.family == "weibull":  # in units of the mean time
            made["y"] = _single(own["y"] / self.words.columns[self.formula.outcome[0]].mean)
        if self.family == "cox":
            made |= {"stratum": np.zeros(len(own["y"]), np.int32), "strata": np.zeros(1, np.int32)}
        return made

    def _smooths(self, rows: pd.DataFrame, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        lines, bends = [], {}
        for name in self.formula.smooths:
            told = self.words.columns[name]
            line, bend = smooth(rows[name].to_numpy(np.float64), told)
            lines.append(line)
            bends[f"s_{python_name(name)}"] = _single(bend)
        return {"x": _single(np.concatenate([made["x"], *lines], 1)), **bends}

    def _group(
        self, group: Group, table: pd.DataFrame, rows: pd.DataFrame, silo: str
    ) -> dict[str, np.ndarray]:
        labels = group_labels(table, group, silo)
        name = group.name
        made: dict[str, np.ndarray] = {}
        if name in self.crossing:
            known = {label: i for i, label in enumerate(self.crossing[name])}
            if unknown := sorted(set(labels.tolist()) - known.keys()):
                raise ValueError(
                    f"silo {silo!r}, group {name!r}: level {unknown[0]!r} is not in the "
                    f"dictionary, which has {len(known)} levels; expected one of these, or tables "
                    "that are described with a smaller min_count"
                )
            made[name] = np.array([known[label] for label in labels], np.int32)
        else:
            _, first, codes = np.unique(labels, return_index=True, return_inverse=True)
            made[f"{name}_elements"] = np.arange(len(first), dtype=np.int32)
            if self.by(group) is None:
                made[name] = codes.astype(np.int32)
            for outer in self.formula.groups:
                if self.by(outer) == name:
                    of = np.unique(group_labels(table, outer, silo), return_inverse=True)[1][first]
                    made[index_name(outer.name, name)] = of.astype(np.int32)
        if group.rhs != "1":
            design = self.columns[name]
            x, _ = design.columns(rows)
            one = np.ones((len(rows), int(design.intercept)))
            made[f"{name}_columns"] = _single(np.concatenate([one, x], 1))
        return made


def _check_missing(rows: pd.DataFrame, silo: str, fitting: bool) -> None:
    missing = rows.isna().sum()
    if missing.any():
        name = missing.idxmax()
        mend = f"name a regression in impute={{{name!r}: '1'}}, or drop these rows"
        raise ValueError(
            f"silo {silo!r}, column {name!r}: {missing[name]} of {len(rows)} values are missing; "
            + (mend if fitting else "expected rows without missing values")
        )


def element_names(table: pd.DataFrame, group: Group, silo: str, crosses: bool) -> np.ndarray:
    """Return the element of each row, with its silo's name unless it crosses silos."""
    labels = group_labels(table, group, silo)
    if crosses or "silo" in group.factor:
        return labels
    return np.array([f"{silo}/{label}" for label in labels])


def group_labels(table: pd.DataFrame, group: Group, silo: str) -> np.ndarray:
    """Return the element of each row, as text.

    :raises ValueError: where a row has none, and where two elements would have one name.
    """
    parts = [as_text(column(table, name, silo)) for name in group.factor]
    missing = np.any([p.isna() for p in parts], axis=0)
    if missing.any():
        raise ValueError(
            f"silo {silo!r}, group {group.name!r}: {missing.sum()} rows have no element; expected "
            "a name in each row"
        )
    elements = list(zip(*parts, strict=True))
    labels = np.array([":".join(element) for element in elements])
    if len(set(elements)) > len(set(labels)):
        raise ValueError(
            f"silo {silo!r}, group {group.name!r}: two elements of one name; expected values of "
            f"{' and '.join(group.factor)} without ':', which joins them"
        )
    return labels


def _single(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)


def _number(level: str) -> float:
    try:
        return float(level)
    except ValueError as error:
        raise ValueError(
            f"family 'ordinal': expected levels that are numbers in their order, got {level!r}"
        ) from error


def warn_of_rows(left_out: Mapping[str, int], outcome: str) -> None:
    """Warn if rows without an outcome were left out."""
    total = sum(left_out.values())
    if total:
        silos = [name for name, n in left_out.items() if n]
        warnings.warn(
            f"{total} rows without {outcome!r} were left out, in {len(silos)} silos",
            stacklevel=3,
        )
