"""Guards of a silo: conditions on its data, which it checks before it joins a study."""

import math
from dataclasses import dataclass

import numpy as np

from numpyro_fed.data.silos import Silos


@dataclass(frozen=True)
class Guards:
    """Conditions that a data holder sets, like those of DataSHIELD and vantage6.

    They check one silo's rows, in the silo, before anything leaves it. They are the silo's own
    settings: no server can change them. ``numpyro-fed silo`` has them on. ``None`` turns a
    condition off.

    :param min_rows: smallest number of rows of a silo, in each row group that no index points to.
    :param min_level_rows: smallest number of rows at each level of a column with two values.
    :param max_parameters_per_row: largest number of global parameters (unconstrained) for each row,
        in each row group that no index points to. Learned parameters count, and weights of a guide
        that silos receive.
    :param columns: arguments with rows that a model may use; others are refused.
    :raises ValueError: for numbers out of range.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> silos = fed.Silos({"oslo": {"y": np.arange(7.0)}})
        >>> fed.Guards().check(silos, dim=1)
        Traceback (most recent call last):
        ...
        ValueError: guard min_rows: silo 'oslo' has 7 rows of 'y'; expected at least 10 (--min-rows)
    """

    min_rows: int | None = 10
    min_level_rows: int | None = 3
    max_parameters_per_row: float | None = 0.1
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        limits = {
            "min_rows": self.min_rows,
            "min_level_rows": self.min_level_rows,
            "max_parameters_per_row": self.max_parameters_per_row,
        }
        for name, value in limits.items():
            if value is not None and (isinstance(value, bool) or not 0 < value < math.inf):
                raise ValueError(f"{name}: expected a number > 0, or None, got {value!r}")

    def check(self, silos: Silos, dim: int) -> None:
        """Raise a ``ValueError`` if a silo does not meet the conditions.

        :param silos: one silo, with its rows.
        :param dim: number of global parameters, as for ``max_parameters_per_row``.
        :raises ValueError: with the guard, the silo, the number that it has and the limit.
        """
        name, inner = silos.names[0], _inner_groups(silos)
        sizes = {group: n[0] for group, n in silos.sizes.items() if group not in inner}
        if self.columns is not None:
            odd = sorted(set(silos.rows) - set(self.columns))
            if odd:
                raise ValueError(
                    f"guard columns: the model uses {odd} of silo {name!r}; expected some of "
                    f"{list(self.columns)}"
                )
        for group, n in sizes.items():
            if self.min_rows is not None and n < self.min_rows:
                raise ValueError(
                    f"guard min_rows: silo {name!r} has {n} rows of {group!r}; expected at least "
                    f"{self.min_rows} (--min-rows)"
                )
            if self.max_parameters_per_row is not None and dim > self.max_parameters_per_row * n:
                raise ValueError(
                    f"guard max_parameters_per_row: the model has {dim} global parameters for {n} "
                    f"rows of {group!r} "
                    f"in silo {name!r}; expected {math.ceil(dim / self.max_parameters_per_row)} "
                    f"rows or more, {self.max_parameters_per_row:g} parameters a row at most "
                    "(--max-parameters)"
                )
        if self.min_level_rows is not None:
            for leaf, x in silos.rows.items():
                if leaf not in silos.index:
                    _check_levels(leaf, np.asarray(x), name, self.min_level_rows)


def _inner_groups(silos: Silos) -> set[str]:
    """Return the row groups to which others point, from a group to which none does."""
    arrows = {(silos.group[leaf], target) for leaf, target in silos.index.items()}
    new = set(silos.sizes) - {target for group, target in arrows if target != group}
    inner: set[str] = set()
    while new:
        new = {target for group, target in arrows if group in new and target != group} - inner
        inner |= new
    return inner


def _check_levels(leaf: str, x: np.ndarray, name: str, least: int) -> None:
    """Raise a ``ValueError`` if a level of a column with two values has too few rows."""
    for place, column in enumerate(x.reshape(len(x), -1).T):
        low, high = column.min(), column.max()
        count = np.array([(column == low).sum(), (column == high).sum()])
        if low < high and count.sum() == len(column) and count.min() < least:
            of = f"{leaf}[:, {place}]" if x.ndim > 1 else repr(leaf)
            raise ValueError(
                f"guard min_level_rows: of silo {name!r} one of the two levels of {of} has "
                f"{count.min()} rows; expected "
                f"at least {least} (--min-level-rows)"
            )
