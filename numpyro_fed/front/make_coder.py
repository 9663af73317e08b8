"""Code of tables for a formula: checks of what it reads, groups, columns with holes."""

import warnings
from collections.abc import Mapping

import numpy as np
import pandas as pd

from numpyro_fed.front.calls import columns_of_terms, compared
from numpyro_fed.front.design import Design
from numpyro_fed.front.dictionary import Dictionary, describe
from numpyro_fed.front.families import FAMILIES
from numpyro_fed.front.formula import Formula, parse
from numpyro_fed.front.holes import Hole
from numpyro_fed.front.rows import Coder, group_labels

# right-hand side of the regression of each column with holes, and the columns that it reads
Regressions = Mapping[str, tuple[str, tuple[str, ...]]]


def make_coder(
    formula: Formula,
    tables: Mapping[str, pd.DataFrame],
    family: str,
    words: Dictionary | None,
    impute: object,
    event: str | None,
    weights: str | None,
) -> Coder:
    """Return how tables are coded.

    :param words: the dictionary; ``None``: of the tables, nothing hidden.
    :param impute: the regression of each column with holes.
    :raises ValueError: for columns, a family or groups that do not fit together.
    """
    _check_columns(formula, family, event, weights)
    crossing = _crossing(formula, tables, words)
    regressions = _check_impute(impute, formula)
    if words is None:
        words = _described(formula, tables, family, regressions, event, weights)
    return _coder(formula, family, words, crossing, regressions, event, weights)


def _check_columns(parts: Formula, family: str, event: str | None, weights: str | None) -> None:
    known = FAMILIES[family]
    if known.event != (event is not None):
        raise ValueError(
            f"family {family!r}: expected "
            + (
                "event=, the column that is 1 where the event was seen"
                if known.event
                else "no event="
            )
            + f", got event={event!r}"
        )
    if (family == "binomial") != (len(parts.outcome) == 2):
        raise ValueError(
            f"family {family!r}: expected "
            + ("p(successes, trials)" if family == "binomial" else "one column")
            + f" before '~', got {parts.text.split('~')[0].strip()!r}"
        )
    if weights is not None and known.event:
        raise ValueError(f"family {family!r}: expected no weights=, got {weights!r}")


def _crossing(
    parts: Formula, tables: Mapping, words: Dictionary | None
) -> dict[str, tuple[str, ...]]:
    """Return the elements of each group that crosses silos."""
    found = {}
    for group in parts.groups:
        if "silo" in group.factor:
            continue
        if words is not None:
            kinds = [_kind(words, name) for name in group.factor]
            if "group" in kinds:
                continue
            if len(kinds) > 1:
                raise ValueError(
                    f"group {group.name!r} crosses silos: expected one column, or a column that "
                    "the dictionary has as a group"
                )
            found[group.name] = tuple(words.columns[group.factor[0]].counts)
            continue
        own = [set(group_labels(table, group, silo)) for silo, table in tables.items()]
        together = set().union(*own)
        if sum(map(len, own)) > len(together):
            found[group.name] = tuple(sorted(together))
            if all(name.isdecimal() for name in together):
                warnings.warn(
                    f"group {group.name!r}: numbers such as {min(together)} are in several silos, "
                    "and taken as one element there, which all silos see. Say so by words=fed."
                    f"describe(tables, levels=[{group.factor[0]!r}]), or groups=[...] if each silo "
                    "counts its own",
                    stacklevel=4,
                )
    return found


def _kind(words: Dictionary, name: str) -> str:
    kind = words.column(name).kind
    if kind not in ("group", "levels"):
        raise ValueError(
            f"column {name!r} is of kind {kind!r} in the dictionary; expected groups=[{name!r}] "
            f"(elements inside silos) or levels=[{name!r}] when the tables are described"
        )
    return kind


def _described(
    parts: Formula,
    tables: Mapping,
    family: str,
    impute: Regressions,
    event: str | None,
    weights: str | None,
) -> Dictionary:
    """Return the dictionary of tables at hand, of the columns that the model reads."""
    more = [name for name in (event, weights) if name is not None]
    more += [name for _, reads in impute.values() for name in reads]
    names = {*parts.outcome, *parts.reads, *more}
    for silo, table in tables.items():
        if lacking := sorted(names - set(table.columns) - impute.keys()):
            raise ValueError(
                f"silo {silo!r}: no column {lacking[0]!r}; there are {sorted(table.columns)}"
            )
    levels = {*parts.chosen, *({"silo"} & names)} & names
    levels |= {*parts.outcome} if family == "ordinal" else set()
    kept = {s: t[[c for c in sorted(names) if c in t]] for s, t in tables.items()}
    return describe(kept, levels=sorted(levels), min_count=1)


def _coder(
    parts: Formula,
    family: str,
    words: Dictionary,
    crossing: Mapping[str, tuple[str, ...]],
    impute: Regressions,
    event: str | None,
    weights: str | None,
) -> Coder:
    for name in parts.chosen:
        if name in words.columns and words.columns[name].kind == "number":
            raise ValueError(
                f"column {name!r}: C() expects levels, got numbers; describe the tables with "
                f"levels=[{name!r}]"
            )
    words = words.led_by({k: v for k, v in parts.chosen.items() if v is not None})
    for rhs in (parts.rhs, *(group.rhs for group in parts.groups)):
        _check_compared(rhs, words)
    for name in (*parts.outcome, *parts.smooths):
        kind = words.column(name).kind
        if name in parts.smooths and kind != "number":
            raise ValueError(f"column {name!r}: s() expects numbers, got {kind}")
    outcome = words.columns[parts.outcome[0]]
    if (
        outcome.kind == "levels"
        and family != "ordinal"
        and (family != "bernoulli" or len(outcome.counts) != 2)
    ):
        raise ValueError(
            f"column {parts.outcome[0]!r}: family {family!r} expects numbers"
            + (", or text with two levels" if family == "bernoulli" else "")
            + f", got the levels {sorted(outcome.counts)}"
        )
    if family in ("gaussian", "t") and outcome.is_binary:
        warnings.warn(
            f"column {parts.outcome[0]!r} is 0 or 1, and the family {family!r}; expected "
            "family='bernoulli', unless a line is meant",
            stacklevel=4,
        )
    common = Design(parts.rhs, words, parts.reads)
    center, scale = common.centers_and_scales()
    # without an intercept a coefficient is of the columns as they are
    centered = common.intercept or not FAMILIES[family].intercept
    return Coder(
        parts,
        family,
        words,
        common,
        center if centered else np.zeros_like(center),
        scale,
        {g.name: Design(g.rhs, words, parts.reads) for g in parts.groups if g.rhs != "1"},
        crossing,
        _holes(impute, words, family),
        event,
        weights,
    )


def _check_impute(impute: object, parts: Formula) -> Regressions:
    """Return the right-hand side of each regression, and the columns that it reads."""
    if impute is None:
        return {}
    if not isinstance(impute, Mapping):
        raise ValueError(f"impute: expected {{column: regression}}, got {impute!r}")
    found = {}
    for name, rhs in impute.items():
        if name not in parts.reads:
            raise ValueError(f"impute: the formula does not read {name!r}; it reads {parts.reads}")
        of_groups = [columns_of_terms(group.rhs) for group in parts.groups]
        if name in parts.smooths or any(name in x for one in of_groups for x in one.values()):
            raise ValueError(f"impute: expected {name!r} outside groups and s()")
        if not isinstance(rhs, str):
            raise ValueError(
                f"impute: {name!r}: expected the right-hand side of a regression, e.g. 'age + sex' "
                f"or '1', got {rhs!r}"
            )
        regression = parse(f"y ~ {rhs}")
        if regression.chosen or "offset(" in regression.rhs or not regression.rhs.startswith("1"):
            raise ValueError(
                f"impute: the regression of {name!r}: expected an intercept, and no C() and no "
                f"offset(), got {rhs!r}; levels= of fed.describe names codes of levels"
            )
        if used := sorted({*regression.reads} & {*parts.outcome}):
            raise ValueError(
                f"impute: the regression of {name!r} has the outcome {used}; expected other "
                "columns: holes are drawn given the outcome already, by the formula"
            )
        if regression.groups or regression.smooths or {*regression.reads} & {*impute, name}:
            raise ValueError(
                f"impute: the regression of {name!r}: expected columns without holes, and no "
                f"groups and no s(), got {rhs!r}"
            )
        found[str(name)] = regression.rhs, regression.reads
    for term, columns in columns_of_terms(parts.rhs).items():
        number = 0 if term.startswith("offset(") else 1
        if len(columns & found.keys()) > number:
            most = "one column" if number else "no column"
            raise ValueError(f"impute: expected {most} with holes in {term!r}")
    return found


def _check_compared(rhs: str, words: Dictionary) -> None:
    """Raise a ``ValueError`` for a comparison that is true of no row, such as with a typing error.

    Its column would be zero, and the fit without the term.
    """
    for name, value in compared(rhs):
        column = words.column(name)
        known = list(column.counts) if column.kind == "levels" else "numbers"
        if (column.kind == "levels" and value not in column.counts) or (
            column.kind == "number" and isinstance(value, str)
        ):
            raise ValueError(
                f"formula: {name!r} is compared with {value!r}; expected one of its {known}"
            )


def _holes(impute: Regressions, words: Dictionary, family: str) -> tuple[Hole, ...]:
    """Return the columns with holes, one of levels last."""
    holes = []
    for name, (rhs, reads) in impute.items():
        regression = Design(rhs, words, reads)
        holes.append(Hole(name, words.columns[name], regression, *regression.centers_and_scales()))
    of_levels = [hole for hole in holes if hole.levels]
    if of_levels and FAMILIES[family].event:
        raise ValueError(
            f"impute: family {family!r} expects columns of numbers, got {of_levels[0].column!r}, "
            "of levels"
        )
    if len(of_levels) > 1:
        raise ValueError(
            f"impute: expected at most one column of levels, got {[h.column for h in of_levels]}"
        )
    return (*(hole for hole in holes if not hole.levels), *of_levels)
