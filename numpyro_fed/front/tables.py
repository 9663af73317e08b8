"""Tables as silos have them: pandas, Arrow, polars, dictionaries of columns, CSV, Parquet."""

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd
from pandas.api.types import (
    is_bool_dtype,
    is_datetime64_any_dtype,
    is_numeric_dtype,
    is_timedelta64_dtype,
)

# 2021-03-01, 2021/3/1, 1.3.2021 or 03/01/21, with or without a time
_DATE = re.compile(
    r"\s*(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))"
    r"([T ]\d{1,2}:\d\d.*)?\s*$"
)
_MISSING_IN_R = -(2**31)


@runtime_checkable
class _ToPandas(Protocol):
    """A table of Arrow, polars or another library."""

    def to_pandas(self) -> pd.DataFrame: ...


def as_tables(data: object) -> dict[str, pd.DataFrame]:
    """Return the tables of all silos, by silo name."""
    if not isinstance(data, Mapping) or not data:
        raise ValueError(
            "tables: expected {silo name: table}, e.g. {'oslo': 'oslo.csv', 'rome': 'rome.csv'}, "
            f"got {type(data).__name__}; a pooled table is split by "
            "dict(iter(table.groupby('hospital')))"
        )
    if len({str(name) for name in data}) < len(data):
        raise ValueError(f"tables: two silos of one name, as text, among {list(data)}")
    return {str(name): as_table(table, str(name)) for name, table in data.items()}


def as_table(data: object, silo: str) -> pd.DataFrame:
    """Return one silo's table, with a column ``silo`` that holds its name unless it has one.

    :param data: a pandas, Arrow or polars table, columns by name, or the path of a CSV or Parquet
        file.
    :raises ValueError: for another object, a file that is not there, and a table without rows.
    """
    if isinstance(data, str | Path):
        table = _from_file(Path(data), silo)
    elif isinstance(data, pd.DataFrame):
        table = data
    elif isinstance(data, _ToPandas):
        table = data.to_pandas()
    elif isinstance(data, Mapping):
        table = pd.DataFrame(dict(data))
    else:
        raise ValueError(
            f"silo {silo!r}: expected a table (pandas, Arrow, polars, columns by name) or the path "
            f"of a CSV or Parquet file, got {type(data).__name__}"
        )
    if not len(table):
        raise ValueError(f"silo {silo!r}: expected a table with rows, got none; leave the silo out")
    table = table.rename(columns=str).reset_index(drop=True)
    return table if "silo" in table else table.assign(silo=silo)


def _from_file(path: Path, silo: str) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"silo {silo!r}: no file {str(path)!r}")
    try:
        return read_file(path)
    except Exception as error:
        raise ValueError(
            f"silo {silo!r}: expected a table in CSV or Parquet at {str(path)!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def read_file(path: Path) -> pd.DataFrame:
    """Return the table of a CSV or Parquet file.

    The rows of a CSV file have a field for each name in the header, no two alike.
    """
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0]
    if header.duplicated().any():
        twice = header[header.duplicated()].iloc[0]
        raise ValueError(f"its header has {twice!r} twice; expected names that differ")
    with warnings.catch_warnings():
        # by default pandas takes the first of too many fields for the rows' names, and shifts
        # the other columns
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return pd.read_csv(path, index_col=False)


def column(table: pd.DataFrame, name: str, silo: str) -> pd.Series:
    """Return a column, numbers as float64 and text as objects, with NaN where a value is missing.

    :raises ValueError: for a column that the table lacks, dates, durations, infinity, and missing
        integers of R.
    """
    if name not in table:
        raise ValueError(f"silo {silo!r}: no column {name!r}; there are {sorted(table.columns)}")
    values = table[name]
    if is_time(values):
        raise ValueError(
            f"silo {silo!r}, column {name!r}: expected numbers or text, got {values.dtype}; make "
            "it a number of days, e.g. (x - pd.Timestamp('2020-01-01')) / pd.Timedelta('1D')"
        )
    if is_numeric_dtype(values) or is_bool_dtype(values):
        numbers = values.to_numpy(np.float64, na_value=np.nan)
        if np.isinf(numbers).any():
            row = int(np.argmax(np.isinf(numbers)))
            raise ValueError(
                f"silo {silo!r}, column {name!r}, row {row}: expected finite numbers, got infinity"
            )
        if (missing := numbers == _MISSING_IN_R).any():
            row = int(np.argmax(missing))
            raise ValueError(
                f"silo {silo!r}, column {name!r}, row {row}: {_MISSING_IN_R} "
                "is what reticulate makes of R's missing integer (missing text becomes 'NA'); "
                "expected the path of a CSV file, by write.csv"
            )
        return pd.Series(numbers, name=name)
    return as_text(values)


def numbers(table: pd.DataFrame, name: str, silo: str) -> np.ndarray:
    """Return a column of numbers, with NaN where a value is missing.

    :raises ValueError: as :func:`column`, and for text.
    """
    values = column(table, name, silo)
    if not is_numeric_dtype(values):
        raise ValueError(f"silo {silo!r}, column {name!r}: expected numbers, got text")
    return values.to_numpy(np.float64)


def is_time(values: pd.Series) -> bool:
    """Return whether a column holds dates or durations."""
    return bool(is_datetime64_any_dtype(values) or is_timedelta64_dtype(values))


def is_date_text(values: pd.Series) -> bool:
    """Return whether most values of a column are dates as text, as of a CSV file."""
    known = [] if is_numeric_dtype(values) else as_text(values).dropna().tolist()
    return 2 * sum(bool(_DATE.match(x)) for x in known) > len(known)


def as_text(values: pd.Series) -> pd.Series:
    """Return a column as text without blanks around it, NaN where a value is missing or blank.

    Whole numbers lose their decimal point, so that 1 and 1.0 are one level.
    """

    def text(value: object) -> object:
        if value is None or value != value:
            return np.nan
        if isinstance(value, float | np.floating) and value == int(value):
            value = int(value)
        return str(value).strip() or np.nan

    return pd.Series([text(v) for v in values.astype(object)], dtype=object, name=values.name)


def numeric_text(values: Iterable[object]) -> bool:
    """Return whether all values that are there are numbers."""
    return all(isinstance(v, float | int | np.number) for v in values)
