"""Checks and paths that both commands share."""

from pathlib import Path
from types import ModuleType

import click

from numpyro_fed.engines.nvflare_jobs import NAME

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


def check_name(name: str) -> None:
    """Raise a ``ValueError`` for a name that is no name of a silo."""
    if not NAME.fullmatch(name):
        raise ValueError(f"the silo's name {name!r}: expected letters, digits, '.', '_' and '-'")


def flower_engine() -> ModuleType:
    """Return the engine, or end the command if Flower is not installed."""
    try:
        from numpyro_fed.engines import flower
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    return flower
