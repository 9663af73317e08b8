"""Where the models find data that are not shipped with them."""

import os
from pathlib import Path

VARIABLE = "NUMPYRO_FED_DATA"


def path(folder: str, file: str, where_from: str, rows: str) -> Path:
    """The place of a data file below the folder that ``NUMPYRO_FED_DATA`` names.

    :param folder: subfolder.
    :param file: file name.
    :param where_from: the source of the file and how to get from there to this file, for the error.
    :param rows: what the file should hold, for the error.
    :raises FileNotFoundError: when it is not there, in words that tell how to put it there.
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
