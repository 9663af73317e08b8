"""Missing values of a column, under a regression on other columns, in the silo.

Let c be a column with holes, and let the model's columns x be linear in it. A number is Normal
given the regression's columns w,

    c ~ Normal(a + w'g, s),    eta = intercept + x(c)'slopes,

in units of its sd from its mean. Each hole is a latent of its row, and never leaves its silo. Of
levels, the holes are summed out: with p_k(w) the share of level k in a logistic regression, the
outcome's density is the mixture sum_k p_k(w) p(y | eta_k). Rows where c is known inform the
regression. This is right if holes do not depend on the value that is missing, given w and y.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from numpyro_fed.front.design import Design
from numpyro_fed.front.dictionary import Column
from numpyro_fed.front.formula import python_name


@dataclass(frozen=True)
class Hole:
    """A column with holes.

    :param column: its name.
    :param told: what the dictionary says of it.
    :param regression: columns of its regression, of which ``center`` and ``scale`` are the means
        and sds.
    """

    column: str
    told: Column
    regression: Design
    center: np.ndarray
    scale: np.ndarray

    @property
    def name(self) -> str:
        """The column as a name of Python."""
        return python_name(self.column)

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of a column of levels."""
        return tuple(self.told.counts)

    def filled(self, rows: pd.DataFrame, value: object = None) -> pd.DataFrame:
        """Return the rows with the holes filled, with the mean or the first level by default."""
        values = rows[self.column].copy()
        if value is None:
            value = self.levels[0] if self.levels else self.told.mean
        values[values.isna()] = value
        return rows.assign(**{self.column: values})

    def arguments(
        self, rows: pd.DataFrame, common: Design, scale: np.ndarray, num_smooths: int
    ) -> dict[str, np.ndarray]:
        """Return the arguments of this column.

        :param rows: the silo's rows, with other columns' holes filled.
        :param common: the model's columns, of which ``scale`` are the sds.
        :param num_smooths: number of lines of smooths after them, which no hole changes.
        :raises ValueError: for columns that are not linear in this one.
        """
        hole = rows[self.column].isna().to_numpy()
        w = (self.regression.columns(rows)[0] - self.center) / self.scale
        base = common.columns(self.filled(rows))[0]
        made = {f"{self.name}_known": ~hole}
        if w.shape[1]:
            made[f"{self.name}_columns"] = w
        if self.levels:
            made[self.name] = pd.Categorical(
                self.filled(rows)[self.column], categories=list(self.levels)
            ).codes.astype(np.int32)
            changes = [common.columns(self.filled(rows, v))[0] - base for v in self.levels[1:]]
            made[f"{self.name}_change"] = np.stack(changes, 1) / scale
        else:
            mean, sd = self.told.mean or 0.0, self.told.sd or 1.0
            up, *others = (
                (common.columns(self.filled(rows, mean + d * sd))[0] - base) / d
                for d in (1, -1, 0.37, 5)
            )
            near = {"rtol": 1e-6, "atol": 1e-9 * np.abs(base).max(initial=1.0)}
            if not all(np.allclose(up, other, **near) for other in others):
                raise ValueError(
                    f"impute: the model's columns are not linear in {self.column!r}; expected it "
                    "alone, in scale() or center(), or in a product with other columns"
                )
            made[self.name] = (self.filled(rows)[self.column].to_numpy(float) - mean) / sd
            made[f"{self.name}_change"] = up / scale
            made[f"{self.name}_hole"] = (np.maximum(np.cumsum(hole), 1) - 1).astype(np.int32)
            # a silo without holes has one that no row reads, since silos are not empty
            made[f"{self.name}_holes"] = np.arange(max(hole.sum(), 1), dtype=np.int32)
        change = made[f"{self.name}_change"]
        made[f"{self.name}_change"] = np.pad(
            change, [(0, 0)] * (change.ndim - 1) + [(0, num_smooths)]
        )
        whole = (f"{self.name}_hole", f"{self.name}_holes", *([self.name] if self.levels else []))
        return {
            k: v if k in whole or v.dtype == bool else np.asarray(v, np.float32)
            for k, v in made.items()
        }


def argument_names(hole: "HolePart") -> list[str]:
    """Return the names of a column's arguments, in the model's order."""
    name = hole.name
    names = [name, f"{name}_known", f"{name}_change"]
    names += [f"{name}_columns"] if hole.has_columns else []
    return names if hole.levels else [*names, f"{name}_hole", f"{name}_holes"]


@dataclass(frozen=True)
class HolePart:
    """A column with holes, as a model has it.

    :param name: the column as a name of Python.
    :param levels: number of levels, 0 for a column of numbers.
    :param has_columns: whether its regression has more than a mean.
    """

    name: str
    levels: int
    has_columns: bool


def number_lines(hole: HolePart) -> tuple[list[str], list[str]]:
    """Return lines of a model for a column of numbers: before the plate of rows, and inside."""
    n = hole.name
    before = [f'level_{n} = numpyro.sample("level_{n}", dist.Normal(0.0, 1.0))']
    expected = f"level_{n}"
    if hole.has_columns:
        before.append(
            f'slopes_{n} = numpyro.sample("slopes_{n}", '
            f"dist.Normal(0.0, 1.0).expand([{n}_columns.shape[1]]).to_event(1))"
        )
        expected += f" + {n}_columns @ slopes_{n}"
    else:
        expected += " + jnp.zeros(x.shape[0])"
    before += [
        f'spread_{n} = numpyro.sample("spread_{n}", dist.HalfNormal(1.0))',
        f"expected_{n} = {expected}",
        f'with fed.silo_plate("{n}_holes", {n}_holes.shape[0]):',
        f'    z_{n} = numpyro.sample("z_{n}", dist.Normal(0.0, 1.0))',
        "# the change is zero where the value is known",
        f"eta = eta + ({n}_change @ slopes) * (expected_{n} + spread_{n} * z_{n}[{n}_hole])",
    ]
    inside = [
        f"with numpyro.handlers.mask(mask={n}_known):",
        f'    numpyro.sample("{n}", dist.Normal(expected_{n}, spread_{n}), obs={n})',
    ]
    return before, inside


def level_lines(hole: HolePart) -> tuple[list[str], list[str]]:
    """Return lines of a model for a column of levels: before the plate of rows, and inside."""
    n, more = hole.name, hole.levels - 1
    before = [
        f'level_{n} = numpyro.sample("level_{n}", '
        f"dist.Normal(0.0, 2.5).expand([{more}]).to_event(1))"
    ]
    logits = f"level_{n}"
    if hole.has_columns:
        before.append(
            f'slopes_{n} = numpyro.sample("slopes_{n}", '
            f"dist.Normal(0.0, 2.5).expand([{n}_columns.shape[1], {more}]).to_event(2))"
        )
        logits += f" + {n}_columns @ slopes_{n}"
    else:
        logits += " + jnp.zeros((x.shape[0], 1))"
    before += [
        f"shares_{n} = jnp.pad({logits}, ((0, 0), (1, 0)))  # logits",
        "# one predictor for each level; they are equal where the level is known",
        f"eta = eta[:, None] + jnp.pad({n}_change @ slopes, ((0, 0), (1, 0)))",
    ]
    inside = [
        f"with numpyro.handlers.mask(mask={n}_known):",
        f'    numpyro.sample("{n}", dist.Categorical(logits=shares_{n}), obs={n})',
    ]
    return before, inside
