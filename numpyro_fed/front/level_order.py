"""Order of a column's levels, the first of which others are compared with."""

import warnings
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pandas as pd

from numpyro_fed.front.tables import as_text


def _sorted(levels: Iterable[str]) -> list[str]:
    """Return levels in the order of numbers, where all are, or of the alphabet."""
    try:
        return sorted(levels, key=lambda level: (float(level), level))
    except ValueError:
        return sorted(levels)


def own_order(values: pd.Series, levels: Iterable[str]) -> list[str]:
    """Return a silo's levels in the order of its pandas ``Categorical``, or as :func:`_sorted`."""
    if not isinstance(values.dtype, pd.CategoricalDtype):
        return _sorted(levels)
    own = [str(level) for level in as_text(pd.Series(values.cat.categories))]
    return [level for level in own if level in levels]


def pooled_order(orders: Sequence[Sequence[str]]) -> list[str]:
    """Return the levels of all silos in an order that is each silo's, or as :func:`_sorted`.

    It is the same in every process.

    :warns UserWarning: where the orders of silos contradict each other.
    """
    levels = _sorted(set().union(*orders))
    own = [order for order in orders if list(order) != _sorted(order)]  # text has no order
    if not own:
        return levels
    after: dict[str, set[str]] = {level: set() for level in levels}
    for order in own:
        for before, level in pairwise(order):
            after[level].add(before)
    try:
        # sorted, as a set's order differs between processes
        return list(TopologicalSorter({k: sorted(v) for k, v in after.items()}).static_order())
    except CycleError:
        warnings.warn(
            f"silos have the levels {levels} in different orders; this one is taken", stacklevel=5
        )
        return levels
