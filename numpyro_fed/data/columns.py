"""Columns of a dict, or of a table of any library, as NumPy arrays."""

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jax import Array

from numpyro_fed._typing import Column, ModelArgs


@runtime_checkable
class _Items(Protocol):
    """Columns of a dict or of a pandas table."""

    def items(self) -> Iterable[tuple[str, Column]]: ...


@runtime_checkable
class _Arrow(Protocol):
    """Columns of an Arrow table."""

    column_names: list[str]

    def column(self, number: int) -> Column: ...


def columns_of(data: object, whose: str = "") -> ModelArgs:
    """Return the columns of a dict or a table, by name.

    :param whose: begin of an error message, as ``"silo 'oslo': "``.
    :raises ValueError: for another object, and for two columns of one name.
    """
    if isinstance(data, _Items):
        pairs = [(str(k), v) for k, v in data.items()]
    elif isinstance(data, _Arrow):
        pairs = [(str(k), data.column(i)) for i, k in enumerate(data.column_names)]
    else:
        raise ValueError(
            f"{whose}expected the model's arguments as a dict, {{argument: value}}, or as a pandas "
            f"or an Arrow table, got {type(data).__name__}"
        )
    names = [k for k, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(k for k in names if names.count(k) > 1)
        raise ValueError(f"{whose}there are two columns {twice!r}; expected names that differ")
    return {k: as_column(v) for k, v in pairs}


def columns_of_silos(names: tuple[str, ...], data: Mapping[str, object]) -> dict[str, ModelArgs]:
    """Return each silo's columns, by name."""
    return {n: columns_of(x, f"silo {n!r}: ") for n, x in zip(names, data.values(), strict=True)}


def as_column(value: Column) -> Column:
    """Return a column of any library as a NumPy array, and any other object unchanged."""
    if np.ma.is_masked(value):
        raise ValueError(
            "expected columns without masked values; drop or impute such rows inside their silo"
        )
    if isinstance(value, Array) or hasattr(value, "__array__"):
        return np.asarray(value)
    return value
