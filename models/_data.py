"""Paths of data that are not shipped with the models."""

import os
from pathlib import Path

VARIABLE = "NUMPYRO_FED_DATA"


def path(folder: str, file: str, where_from: str, rows: str) -> Path:
    """Return the place of a data file below the folder that ``NUMPYRO_FED_DATA`` names.

    :param folder: subfolder.
    :param file: file name.
    :param where_from: source of the file and how to make this file from it, for the error.
    :param rows: content that the file should hold, for the error.
    :raises FileNotFoundError: when the file is not there; the text says how to put it there.
    """
    root = os.environ.get(VARIABLE)
    place = Path(root or f"${VARIABLE}") / folder / file
    if root and place.is_file():
        return place
    why = "there is no such file" if root else f"the environment variable {VARIABLE} is not set"
    raise FileNotFoundError(
        f"expected data at {place}, but {why}. Get them from {where_from}; expected are {rows}. "
        f"Put the file in a folder {folder}/ and let {VARIABLE} name the folder above it."
    )
