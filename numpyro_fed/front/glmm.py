"""A generalized linear mixed model from one line, over tables in silos."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array

from numpyro_fed.data.silos import Silos
from numpyro_fed.front.design import Design, Formula, Group, parse, python_name
from numpyro_fed.front.dictionary import Dictionary, describe
from numpyro_fed.front.families import FAMILIES
from numpyro_fed.front.fit import fit
from numpyro_fed.front.rows import Coder, group_labels, warn_of_rows
from numpyro_fed.front.source import GroupPart, Parts, arguments, make, write
from numpyro_fed.front.summary import in_units
from numpyro_fed.front.tables import as_table, as_tables

if TYPE_CHECKING:
    from arviz import InferenceData

_WIDE = 2.5  # prior sd of a coefficient, for an outcome and a column of sd 1: as Bambi, rstanarm
Prior = float | tuple[float, float]


@dataclass(frozen=True)
class GLMM:
    """A model from a formula, and the silos' rows; made by :func:`glmm`.

    :param parts: what the model is written from.
    :param coder: how a silo's table becomes arguments.
    :param tables: the silos' rows as arguments, empty for a model from a dictionary alone.
    """

    parts: Parts
    coder: Coder
    tables: Mapping[str, Mapping[str, np.ndarray]]

    def source(self) -> str:
        """Return the text of the model, to be taken over by hand."""
        return write(self.parts)

    @cached_property
    def model(self) -> Callable:
        """The NumPyro model that :meth:`source` shows."""
        return make(self.source(), "glmm")

    @property
    def rows(self) -> dict[str, str]:
        """The silo plate of each argument, as :class:`Silos` takes it."""
        plates = {f"{name}_elements": name for name in self._local}
        plates |= {"strata": "strata"} if self.parts.family == "cox" else {}
        return {name: plates.get(name, "rows") for name in arguments(self.parts)}

    @property
    def index(self) -> dict[str, str]:
        """The arguments that hold positions, as :class:`Silos` takes them."""
        strata = {"stratum": "strata"} if self.parts.family == "cox" else {}
        return {name: name for name in self._local} | strata

    @property
    def _local(self) -> list[str]:
        return [g.name for g in self.parts.groups if g.levels is None]

    @cached_property
    def silos(self) -> Silos:
        """The silos' rows, as arguments of :attr:`model`."""
        if not self.tables:
            raise ValueError("the model was made from a dictionary alone; it has no silos")
        return Silos(self.tables, rows=self.rows, index=self.index)

    def arguments(self, table: object, silo: str = "this silo") -> dict[str, np.ndarray]:
        """Return one silo's table as arguments of :attr:`model`; for use inside the silo.

        :param table: a table, or the path of a file, as for :func:`glmm`.
        :raises ValueError: for a table that the dictionary does not fit.
        """
        return self.coder.arguments(as_table(table, silo), silo)[0]

    def fit(self, rng_key: Array | None = None, **options: Any) -> "InferenceData":
        """Fit the model by :func:`numpyro_fed.fit`, and add effects in the columns' own units.

        The posterior gets ``Intercept`` (where all columns are zero), ``b`` (a coefficient for each
        column), and for each group ``<group>_sd``, ``<group>_effect`` of each element, and
        ``<group>_corr``.

        :param options: of :func:`numpyro_fed.fit`.
        """
        idata = fit(self.model, self.silos, rng_key=rng_key, **options)
        return in_units(idata, self.parts, self.coder, column_labels(self.coder))

    def __repr__(self) -> str:
        lines = [f"{self.parts.title}", f"  family {self.parts.family}"]
        if self.parts.slopes:
            names = ", ".join(column_labels(self.coder))
            lines.append(f"  b: {names}")
        for group in self.parts.groups:
            where = (
                f"{group.levels} elements that cross silos: a global vector, seen by all"
                if group.levels
                else "elements inside silos, whose effects stay there over a wire"
            )
            lines.append(f"  {group.name} ({', '.join(group.effects)}): {where}")
        if self.tables:
            rows = sum(len(t["y"]) for t in self.tables.values())
            lines.append(f"  {len(self.tables)} silos, {rows} rows")
        return "\n".join(lines)


def column_labels(coder: Coder) -> list[str]:
    """Return the names of the coefficients, smooths' lines last."""
    return [*coder.common.labels, *(f"s({name})" for name in coder.formula.smooths)]


def glmm(
    formula: str,
    tables: object = None,
    *,
    family: str = "gaussian",
    words: Dictionary | None = None,
    event: str | None = None,
    weights: str | None = None,
    priors: Mapping[str, Prior] | None = None,
    correlated: bool = True,
) -> GLMM:
    """Write a generalized linear mixed model from a formula, as lme4, brms and Bambi have it.

    The formula has terms, interactions (``aspirin * heparin``), ``scale(x)``, ``center(x)``,
    splines ``bs(x, df=4)``, a smooth ``s(x)``, ``offset(log_time)``, and groups
    ``(1 + age | country/hospital)``. Columns are coded alike in all silos, with levels, means, sds
    and knots of the dictionary, so that the numbers are those of one pooled table.

    A group whose elements each live in one silo becomes a silo plate. One that crosses silos
    becomes a global vector. The column ``silo`` holds the silo's name: ``(1 | silo)``.

    Priors are scaled as in rstanarm. With sd_y the outcome's sd (1 but for ``"gaussian"`` and
    ``"t"``), the intercept at the columns' means is Normal(mean, 2.5 sd_y), a coefficient
    Normal(0, 2.5 sd_y / sd_x). A group's sd is HalfNormal of that scale, its correlations LKJ(1).

    :param formula: the formula.
    :param tables: ``{silo name: table}``, each a pandas, Arrow or polars table, columns by name, or
        the path of a CSV or Parquet file. ``None``: the model alone, from a dictionary.
    :param family: ``"gaussian"``, ``"t"``, ``"bernoulli"``, ``"binomial"`` (outcome
        ``p(dead, patients)``), ``"poisson"``, ``"negativebinomial"``, ``"gamma"``, ``"beta"``,
        ``"ordinal"``, ``"weibull"`` (proportional hazards) or ``"cox"`` (stratified by silo).
    :param words: the dictionary of :func:`describe`. ``None``: of these tables, nothing hidden.
    :param event: for times, the column that is 1 where the event was seen and 0 where not.
    :param weights: column of weights, by which a row's log likelihood is multiplied.
    :param priors: priors by name, in the columns' units: ``(mean, sd)`` or the sd of
        ``"Intercept"`` or of a coefficient (``"age"``, ``"sex[M]"``), the scale of a group's or a
        smooth's sds (``"hospital"``, ``"s(age)"``).
    :param correlated: whether a group's effects are correlated.
    :return: the model. ``.source()`` prints it, ``.model`` and ``.silos`` go to every algorithm of
        the library, ``.fit()`` to :func:`numpyro_fed.fit`.
    :raises ValueError: for a formula, a table or a prior that the model does not cover.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> rng = np.random.default_rng(0)
        >>> def clinic(n):
        ...     x = rng.normal(60, 10, n)
        ...     sex = rng.choice(["F", "M"], n)
        ...     return {"age": x, "sex": sex, "bp": 90 + x + rng.normal(size=n)}
        >>> m = fed.glmm("bp ~ age + sex + (1 | silo)", {"oslo": clinic(30), "rome": clinic(20)})
        >>> m
        bp ~ age + sex + (1 | silo)
          family gaussian
          b: age, sex[M]
          silo (1): elements inside silos, whose effects stay there over a wire
          2 silos, 50 rows
        >>> m.silos["rome"]["x"].shape
        (20, 2)
    """
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    parts = parse(formula)
    _check_columns(parts, family, event, weights)
    if tables is None and words is None:
        raise ValueError("expected tables, or words= (a dictionary of fed.describe), got neither")
    frames = {} if tables is None else as_tables(tables)
    crossing = _crossing(parts, frames, words)
    if words is None:
        words = _described(parts, frames, family, crossing, event, weights)
    coder = _coder(parts, family, words, crossing, event, weights)
    written = _parts(coder, dict(priors or {}), correlated)
    coded = {name: coder.arguments(table, name) for name, table in frames.items()}
    warn_of_rows({name: left for name, (_, left) in coded.items()}, parts.outcome[0])
    return GLMM(written, coder, {name: made for name, (made, _) in coded.items()})


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
    return found


def _kind(words: Dictionary, name: str) -> str:
    if name not in words.columns:
        raise ValueError(f"no silo has a column {name!r}; there are {sorted(words.columns)}")
    kind = words.columns[name].kind
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
    crossing: Mapping,
    event: str | None,
    weights: str | None,
) -> Dictionary:
    """Return the dictionary of tables at hand, of the columns that the model reads."""
    more = [name for name in (event, weights) if name is not None]
    names = {*parts.outcome, *parts.reads, *more}
    for silo, table in tables.items():
        if lacking := sorted(names - set(table.columns)):
            raise ValueError(
                f"silo {silo!r}: no column {lacking[0]!r}; there are {sorted(table.columns)}"
            )
    kept = sorted(names)
    levels = parts.outcome if family == "ordinal" else ()
    return describe({s: t[kept] for s, t in tables.items()}, levels=levels, min_count=1)


def _coder(
    parts: Formula,
    family: str,
    words: Dictionary,
    crossing: Mapping[str, tuple[str, ...]],
    event: str | None,
    weights: str | None,
) -> Coder:
    for name in (*parts.outcome, *parts.smooths):
        if name not in words.columns:
            raise ValueError(f"no silo has a column {name!r}; there are {sorted(words.columns)}")
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
        event,
        weights,
    )


def _parts(coder: Coder, priors: dict[str, Prior], correlated: bool) -> Parts:
    """Return what the model is written from; priors are used up by name."""
    family, outcome = FAMILIES[coder.family], coder.words.columns[coder.formula.outcome[0]]
    sd_y = (outcome.sd or 1.0) if family.identity else 1.0
    wide = _WIDE * sd_y

    def prior(name: str, mean: float, sd: float) -> tuple[float, float]:
        return _pair(name, priors.pop(name, (mean, sd)))

    intercept = None
    if family.intercept and coder.common.intercept:
        mean = (outcome.mean or 0.0) if family.identity else 0.0
        intercept = prior("Intercept", mean, wide)
    slopes = []
    for name, scale in zip(coder.common.labels, coder.scale, strict=True):
        mean, sd = prior(name, 0.0, wide / scale)
        slopes.append((mean * scale, sd * scale))
    slopes += [(0.0, wide)] * len(coder.formula.smooths)
    smooths = {
        f"s_{python_name(name)}": prior(f"s({name})", 0.0, wide)[1]
        for name in coder.formula.smooths
    }
    groups = [_group(g, coder, wide, priors, prior) for g in coder.formula.groups]
    cuts = len(outcome.counts) - 1
    parameters = {
        name: text.replace("SD", f"{sd_y:.6g}").replace("CUTS", str(cuts))
        for name, text in family.parameters.items()
    }
    if priors:
        known = ["Intercept", *column_labels(coder), *(g.name for g in coder.formula.groups)]
        raise ValueError(f"priors: expected names among {known}, got {sorted(priors)}")
    extras = ("offset",) * coder.has_offset + ("weights",) * (coder.weights is not None)
    return Parts(
        coder.formula.text.strip(),
        coder.family,
        intercept,
        slopes,
        smooths,
        groups,
        parameters,
        extras,
        correlated,
    )


def _group(
    group: Group, coder: Coder, wide: float, priors: dict[str, Prior], prior: Callable
) -> GroupPart:
    effects, scales = ["1"], [wide]
    if group.rhs != "1":
        design = coder.columns[group.name]
        effects = ["1"] * design.intercept + design.labels
        scales = [wide] * design.intercept + [wide / s for s in design.centers_and_scales()[1]]
    if group.name in priors:
        common = prior(group.name, 0.0, wide)[1]
        scales = [common * s / scales[0] for s in scales]
    crossing = coder.crossing.get(group.name)
    return GroupPart(
        group.name, tuple(effects), tuple(scales), None if crossing is None else len(crossing)
    )


def _pair(name: str, value: object) -> tuple[float, float]:
    pair = value if isinstance(value, tuple) else (0.0, value)
    try:
        mean, sd = map(float, pair)
    except (TypeError, ValueError):
        mean, sd = np.nan, np.nan
    if not (np.isfinite(mean) and 0 < sd < np.inf):
        raise ValueError(f"priors: {name!r}: expected (mean, sd) or an sd > 0, got {value!r}")
    return mean, sd
