"""Checks of data in silos, with the error messages that refuse all other data.

Each check raises a ``ValueError``. It names the silo, the argument and, where there is one, the
row, and says how to mend it. Values must be columns: NumPy arrays, or objects that are not arrays.
"""

import datetime
import warnings
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import Array
from numpyro.util import is_prng_key

from numpyro_fed._typing import Column

# numbers that a check copies at a time (.5 MB in float64): copying all would double the memory
_PIECE = 1 << 16
# most that rounding may move a number, in standard deviations of its column; float32 moves numbers
# so far that are 17,000 standard deviations away from zero, such as points of time
_MOST_MOVED = 1e-3
_MIXED = "silos of different structure: fed.MixedSilos (variational fits alone)"


def check_key(rng_key: object) -> None:
    """Raise a ``ValueError`` unless the seed is a JAX random key."""
    if not is_prng_key(rng_key):
        raise ValueError(f"rng_key: expected one key, e.g. jax.random.key(0), got {rng_key!r}")


def silo_names(data: object) -> tuple[str, ...]:
    """Return the names of the silos in ``{silo name: {argument: value}}``, as strings."""
    if not isinstance(data, Mapping):
        raise ValueError(
            "expected {silo name: {argument: value}}, e.g. {'oslo': {'x': x, 'y': y}}, got "
            f"{type(data).__name__}; tables are split by fed.split(table, by=column)"
        )
    if not data:
        raise ValueError("expected at least one silo, got none")
    names = tuple(str(n) for n in data)
    if len(set(names)) < len(names):
        raise ValueError(f"expected silo names that differ, got {list(names)}")
    return names


def check_same_arguments(data: Mapping[str, Mapping[str, Column]]) -> None:
    """Raise a ``ValueError`` unless every silo has the arguments of the first one."""
    first = next(iter(data))
    for name, kwargs in data.items():
        if set(kwargs) != set(data[first]):
            raise ValueError(
                f"silo {name!r}: expected the arguments {sorted(data[first])} as in silo "
                f"{first!r}, got {sorted(kwargs)}; {_MIXED}"
            )


def check_told(rows: Iterable[str], index: Iterable[str], known: Container[str]) -> None:
    """Raise a ``ValueError`` if ``rows=`` or ``index=`` names an argument that the data lack."""
    unknown = {name for name in (*rows, *index) if name not in known}
    if unknown:
        raise ValueError(f"rows= and index= name arguments that data lack: {sorted(unknown)}")


def check_numbers(leaf: str, values: Iterable[Column]) -> None:
    """Raise a ``ValueError`` for an array of dates, durations, text or other objects."""
    for value in values:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "OUSMm":
            continue
        first = value.flat[0] if value.size else None
        mend = "encode it first"
        if isinstance(first, np.datetime64 | datetime.date):
            mend = (
                "subtract an origin and make it a number of days, e.g. (x - x.min()) / "
                "np.timedelta64(1, 'D')"
            )
        elif isinstance(first, np.timedelta64 | datetime.timedelta):
            mend = "make it a number of days, e.g. x / np.timedelta64(1, 'D')"
        timed = value.dtype == object and mend != "encode it first"
        kind = f"objects of type {type(first).__name__}" if timed else value.dtype
        raise ValueError(f"argument {leaf!r}: expected numbers, got {kind}; {mend}")


def check_shared(leaf: str, value: Column) -> None:
    """Raise a ``ValueError`` unless a shared argument is a finite array or a hashable value.

    Compiled programs may depend on a hashable value.
    """
    if isinstance(value, Array) and not np.isfinite(np.asarray(value, np.float64)).all():
        raise ValueError(f"shared argument {leaf!r}: expected finite numbers, got NaN or infinity")
    if not isinstance(value, (Array, Hashable)):
        raise ValueError(
            f"argument {leaf!r}: expected an array or a hashable value, got "
            f"{type(value).__name__}; use a tuple in place of a list"
        )


def all_equal(values: Sequence[Column]) -> bool:
    """Return whether all silos have equal values; objects must also agree in type."""
    first = values[0]
    if isinstance(first, np.ndarray):
        return all(np.array_equal(first, v) for v in values[1:])
    return all(type(v) is type(first) and v == first for v in values)


def lengths(values: Sequence[Column]) -> tuple[int, ...] | None:
    """Return the number of rows in each silo, or ``None`` if a value has no leading axis."""
    if all(isinstance(v, np.ndarray) and v.ndim for v in values):
        return tuple(len(v) for v in values)
    return None


def check_rows(leaf: str, names: tuple[str, ...], values: Sequence[Column]) -> None:
    """Raise a ``ValueError`` unless the silos' values are arrays of rows of one shape."""
    for name, v in zip(names, values, strict=True):
        if not isinstance(v, np.ndarray) or v.ndim == 0:
            raise ValueError(
                f"argument {leaf!r} differs between silos, so it must be an array of rows; silo "
                f"{name!r} has {v!r}. Give it one row per element of a silo plate, or the same "
                "value everywhere" + ("" if isinstance(v, np.ndarray) else f"; {_MIXED}")
            )
        if v.shape[1:] != values[0].shape[1:]:
            raise ValueError(
                f"argument {leaf!r}: rows of silo {name!r} have shape {v.shape[1:]}, those of silo "
                f"{names[0]!r} {values[0].shape[1:]}; expected equal shapes after the leading axis"
            )


def check_sizes(
    leaf: str,
    sizes: tuple[int, ...],
    others: Sequence[str],
    group: str,
    names: tuple[str, ...],
    table: Mapping[str, Sequence[Column]],
) -> None:
    """Raise a ``ValueError`` unless, in every silo, one group's arguments have equally many rows.

    Equal totals are not enough: rows would end up in wrong silos.
    """
    for other in others[:1]:
        for name, own, v in zip(names, sizes, table[other], strict=True):
            if own != len(v):
                raise ValueError(
                    f"silo {name!r}, argument {leaf!r}: expected {len(v)} rows of {group!r}, as "
                    f"many as {other!r} has, got {own}"
                )


def check_flat(
    names: tuple[str, ...],
    rows: dict[str, np.ndarray],
    group: dict[str, str],
    sizes: dict[str, tuple[int, ...]],
    index: dict[str, str],
) -> None:
    """Raise a ``ValueError`` for an empty silo, a bad number, or an index outside its silo.

    Rows are flat, silo after silo. A bad number is NaN, infinite or too large for its type.
    """
    for g, n in sizes.items():
        if min(n) == 0:
            raise ValueError(
                f"silo {names[n.index(0)]!r} is empty: it has no row of {g!r}; leave it out"
            )
    for leaf, values in rows.items():
        n = sizes[group[leaf]]
        starts = np.cumsum(n) - np.asarray(n)
        silo = np.repeat(np.arange(len(names), dtype=np.int32), n)

        def place(
            row: int, silo: np.ndarray = silo, starts: np.ndarray = starts, leaf: str = leaf
        ) -> str:
            return f"silo {names[silo[row]]!r}, argument {leaf!r}, row {row - starts[silo[row]]}"

        _check_values(leaf, values, place, names)
        if leaf in index:
            if index[leaf] not in sizes:
                raise ValueError(
                    f"index={{{leaf!r}: {index[leaf]!r}}}: no argument has rows of "
                    f"{index[leaf]!r}; give one, "
                    f'e.g. np.arange(number of {index[leaf]}) with rows={{...: "{index[leaf]}"}}'
                )
            if not np.issubdtype(values.dtype, np.integer):
                raise ValueError(f"argument {leaf!r}: expected integers, got {values.dtype}")
            bad = (values < 0) | (values >= np.asarray(sizes[index[leaf]])[silo])
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(
                    f"{place(row)}: index {values[row]} is outside the silo's "
                    f"{sizes[index[leaf]][silo[row]]} elements of {index[leaf]!r}"
                )


def _check_values(
    leaf: str, values: np.ndarray, place: Callable[[int], str], names: tuple[str, ...]
) -> None:
    stored = jax.dtypes.canonicalize_dtype(values.dtype)
    if values.dtype.kind in "iu" and values.size:
        limits = np.iinfo(stored)
        if values.min() < limits.min or values.max() > limits.max:
            raise ValueError(
                f"argument {leaf!r}: {values.min()} to {values.max()} does not fit into {stored}; "
                "divide it, make it floating-point, or enable float64 (numpyro.enable_x64())"
            )
    if values.dtype.kind in "fc":
        with np.errstate(over="ignore"):  # numbers too large for float32 become infinite
            pieces = (x.astype(stored, copy=False) for x in _pieces(values))
            finite = np.concatenate(
                [np.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in pieces]
            )
        if not finite.all():
            raise ValueError(
                f"{place(int(np.argmin(finite)))}: expected finite numbers, got NaN or infinity; "
                "drop or impute such rows inside their silo"
            )
    if values.dtype.kind == "f" and values.dtype != stored:
        _warn_of_rounding(leaf, values, stored, names)


def _pieces(values: np.ndarray) -> Iterable[np.ndarray]:
    step = max(1, _PIECE // max(1, values[:1].size))
    return (values[i : i + step] for i in range(0, len(values), step))


def _warn_of_rounding(
    leaf: str, values: np.ndarray, stored: np.dtype, names: tuple[str, ...]
) -> None:
    """Warn if rounding moves numbers by much of their spread, e.g. seconds since 1970."""
    moved, total, squares = (np.zeros(values.shape[1:]) for _ in range(3))
    for x in _pieces(values):
        apart = x - values[0]
        total, squares = total + apart.sum(0), squares + (apart**2).sum(0)
        moved = np.maximum(moved, np.abs(x - x.astype(stored)).max(0))
    sd = np.sqrt(np.maximum(squares / len(values) - (total / len(values)) ** 2, 0))
    share = np.max(moved / np.where(sd > 0, sd, np.inf), initial=0)
    if share > _MOST_MOVED:
        silo = f"silo {names[0]!r}, " if len(names) == 1 else ""
        warnings.warn(
            f"{silo}argument {leaf!r}: stored as {stored}, its numbers move by up to {share:.1g} "
            "of their standard deviation; subtract an origin, or enable float64 "
            "(numpyro.enable_x64())",
            stacklevel=6,
        )
