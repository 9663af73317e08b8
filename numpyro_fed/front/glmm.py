"""A generalized linear mixed model from one line, over tables in silos."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.data.silos import Silos
from numpyro_fed.front.dictionary import Dictionary
from numpyro_fed.front.families import FAMILIES
from numpyro_fed.front.fit import fit
from numpyro_fed.front.formula import parse
from numpyro_fed.front.make_coder import make_coder
from numpyro_fed.front.predict import check_change, expected
from numpyro_fed.front.priors import Prior, make_parts
from numpyro_fed.front.rows import Coder, warn_of_rows
from numpyro_fed.front.source import Parts, arguments, make, write
from numpyro_fed.front.summary import check_columns, in_units, summary
from numpyro_fed.front.tables import as_table, as_tables
from numpyro_fed.results.check import SiloCheck, check
from numpyro_fed.results.prior_sensitivity import prior_sensitivity

if TYPE_CHECKING:
    import pandas as pd
    from arviz import InferenceData
    from xarray import DataArray


@dataclass(frozen=True)
class GLMM:
    """A model from a formula, and the silos' rows; made by :func:`glmm`.

    :param parts: what the model is written from.
    :param coder: how a silo's table becomes arguments.
    :param tables: the silos' rows as arguments, empty for a model from a dictionary alone.
    :param elements: names of the elements of groups that do not cross silos, in the silos' order.
    """

    parts: Parts
    coder: Coder
    tables: Mapping[str, Mapping[str, np.ndarray]]
    elements: Mapping[str, Sequence[str]]

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
        plates = {f"{g.name}_elements": g.name for g in self.parts.groups if g.levels is None}
        plates |= {g.index: g.by for g in self.parts.groups if g.by}
        plates |= {"strata": "strata"} if self.parts.family == "cox" else {}
        plates |= {f"{h.name}_holes": f"{h.name}_holes" for h in self.parts.holes if not h.levels}
        return {name: plates.get(name, "rows") for name in arguments(self.parts)}

    @property
    def index(self) -> dict[str, str]:
        """The arguments that hold positions, as :class:`Silos` takes them."""
        strata = {"stratum": "strata"} if self.parts.family == "cox" else {}
        holes = {f"{h.name}_hole": f"{h.name}_holes" for h in self.parts.holes if not h.levels}
        groups = {g.index: g.name for g in self.parts.groups if g.levels is None}
        return groups | holes | strata

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
        return self.in_units(fit(self.model, self.silos, rng_key=rng_key, **options))

    def in_units(self, idata: "InferenceData") -> "InferenceData":
        """Add effects in the columns' own units, as :meth:`fit` does, to a fit of :attr:`model`.

        A posterior of remote silos gets no effects of elements, which stay there.

        :param idata: a posterior of the model, which is changed.
        """
        return in_units(idata, self.parts, self.coder, self.elements)

    def predict(
        self,
        idata: "InferenceData",
        table: object,
        *,
        silo: str = "new",
        rng_key: Array | None = None,
    ) -> "DataArray":
        """Return the expected outcome of rows of a table, under each draw.

        Effects of elements that the fit knows are those of the fit. Those of others, and of a new
        silo, are drawn from their group.

        :param idata: the result of :meth:`fit` or :meth:`in_units`.
        :param table: a table without missing values, or the path of a file, as for :func:`glmm`.
        :param silo: the silo whose rows they are.
        :param rng_key: seed of new effects; ``jax.random.key(0)`` by default.
        :return: ``(chain, draw, row)``: a probability, mean or share; for ``"weibull"`` a mean
            time, for ``"cox"`` a hazard ratio; for ``"ordinal"`` ``(chain, draw, row, level)``.
        :raises ValueError: for a table that the dictionary does not fit, missing values, a silo
            that the model does not have, and the fit of another formula or dictionary.
        """
        check_columns(idata, self.coder)
        if self.tables and silo not in ("new", *self.tables):
            raise ValueError(f"silo: expected 'new' or one of {list(self.tables)}, got {silo!r}")
        key = jax.random.key(0) if rng_key is None else rng_key
        return expected(idata, self.parts, self.coder, as_table(table, silo), silo, key)

    def contrast(
        self,
        idata: "InferenceData",
        tables: object,
        change: Mapping[str, tuple[object, object]],
        *,
        rng_key: Array | None = None,
    ) -> "DataArray":
        """Return a marginal effect: the mean change of rows' expected outcome, under each draw.

        It is standardized to the rows of the tables: ``{"drug": ("A", "none")}`` compares all of
        them with drug A to all of them without. Rows with missing values are left out.

        :param idata: the result of :meth:`fit` or :meth:`in_units`.
        :param tables: ``{silo name: table}``, as for :func:`glmm`.
        :param change: for each column its value, and the value that it is compared with.
        :param rng_key: seed of effects that the fit does not know, the same for both.
        :return: ``(chain, draw)``, of the outcome's scale: a difference in risk for
            ``"bernoulli"``.
        :raises ValueError: as :meth:`predict`, and for columns that the formula does not read.
        :warns UserWarning: with the number of rows that are left out.
        """
        check_change(change, self.coder.formula.reads)
        known = all(f"{g.name}_effect" in idata.posterior for g in self.parts.groups)
        sums, rows, left_out = [], 0, 0
        for silo, table in as_tables(tables).items():
            read = [name for name in self.coder.formula.reads if name not in change]
            whole = table.reindex(columns=table.columns.union(read)).dropna(subset=read)
            left_out += len(table) - len(whole)
            if whole.empty:
                continue
            rows += len(whole)
            both = [
                self.predict(
                    idata,
                    whole.assign(**{name: pair[which] for name, pair in change.items()}),
                    silo=silo if known else "new",
                    rng_key=rng_key,
                )
                for which in (0, 1)
            ]
            sums.append((both[0] - both[1]).sum("row"))
        if not sums:
            raise ValueError(f"expected rows without missing values, got none of {left_out}")
        if left_out:
            warnings.warn(f"{left_out} rows with missing values were left out", stacklevel=2)
        return sum(sums[1:], sums[0]) / rows

    def summary(self, idata: "InferenceData", exp: bool = False) -> "pd.DataFrame":
        """Return median, sd and a central interval of 95 % of each coefficient and group's sd.

        :param idata: the result of :meth:`fit` or :meth:`in_units`.
        :param exp: whether to show the coefficients alone, exponentiated: odds ratios of
            ``"bernoulli"``, ratios of rates of ``"poisson"``, of hazards of ``"cox"``.
        """
        check_columns(idata, self.coder)
        return summary(idata, self.parts, exp)

    def check(self, idata: "InferenceData", **options: Any) -> SiloCheck:
        """Check the fit by :func:`numpyro_fed.check`, with the coefficients' own names.

        :param options: of :func:`numpyro_fed.check`.
        """
        check_columns(idata, self.coder)
        found = check(idata, self.model, self.silos, **options)
        sites = found.table["site"].replace(self._names)
        shifts = found.shifts.rename(columns=self._names)
        return replace(found, table=found.table.assign(site=sites), shifts=shifts)

    def prior_sensitivity(self, idata: "InferenceData", **options: Any) -> "pd.DataFrame":
        """Tell the prior's part by :func:`numpyro_fed.prior_sensitivity`, with columns' names.

        :param options: of :func:`numpyro_fed.prior_sensitivity`.
        """
        check_columns(idata, self.coder)
        return prior_sensitivity(idata, self.model, self.silos, **options).rename(self._names)

    @property
    def _names(self) -> dict[str, str]:
        """The columns' names, by the coefficients' names in :attr:`model`."""
        return {f"slopes[{i}]": label for i, label in enumerate(self.coder.labels)}

    def __repr__(self) -> str:
        lines = [f"{self.parts.title}", f"  family {self.parts.family}"]
        outcome = self.coder.formula.outcome[0]
        if self.parts.family == "bernoulli" and (told := self.coder.words.column(outcome)).counts:
            lines[-1] += f", of {outcome} = {list(told.counts)[1]!r}"
        if self.parts.slopes:
            names = ", ".join(self.coder.labels)
            lines.append(f"  b: {names}")
        for group in self.parts.groups:
            where = (
                f"{group.levels} elements that cross silos: a global vector, seen by all"
                if group.levels
                else "elements inside silos, whose effects stay there over a wire"
            )
            lines.append(f"  {group.name} ({', '.join(group.effects)}): {where}")
        for hole in self.parts.holes:
            how = "summed out over its levels" if hole.levels else "latents of their rows"
            lines.append(f"  {hole.name}: missing values are {how}")
        if self.tables:
            rows = sum(len(t["y"]) for t in self.tables.values())
            lines.append(f"  {len(self.tables)} silos, {rows} rows")
        return "\n".join(lines)


def glmm(
    formula: str,
    tables: object = None,
    *,
    family: str = "gaussian",
    words: Dictionary | None = None,
    event: str | None = None,
    weights: str | None = None,
    impute: Mapping[str, str] | None = None,
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
    :param impute: columns with missing values, or that a silo lacks, and the right-hand side of a
        regression for each: ``{"bmi": "age + sex"}``, or ``{"bmi": "1"}``. The model must be linear
        in a column of numbers. At most one column of levels; see :mod:`numpyro_fed.front.holes`.
    :param priors: priors by name, in the columns' units: ``(mean, sd)`` or the sd of
        ``"Intercept"`` (at the columns' means) or of a coefficient (``"age"``, ``"sex[M]"``), the
        scale of a group's or a smooth's sds (``"hospital"``, ``"s(age)"``).
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
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    if tables is None and words is None:
        raise ValueError("expected tables, or words= (a dictionary of fed.describe), got neither")
    if not isinstance(words, Dictionary | None):
        raise ValueError(f"words: expected the result of fed.describe, got {type(words).__name__}")
    frames = {} if tables is None else as_tables(tables)
    coder = make_coder(parse(formula), frames, family, words, impute, event, weights)
    written = make_parts(coder, priors, correlated)
    coded = {name: coder.arguments(table, name) for name, table in frames.items()}
    warn_of_rows({name: left for name, (_, left) in coded.items()}, coder.formula.outcome[0])
    own = [coder.elements(table, name) for name, table in frames.items()]
    elements = {
        part.name: [element for found in own for element in found[part.name]]
        for part in written.groups
        if part.levels is None
    }
    return GLMM(written, coder, {name: made for name, (made, _) in coded.items()}, elements)
