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


def check_address(option: str, address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, or raise a ``ValueError``."""
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and 0 < int(port) < 2**16) or set(host) & set("/@ "):
        raise ValueError(f"{option} {address}: expected host:port, a port from 1 to 65535")
    return host, int(port)


def flower_engine() -> ModuleType:
    """Return the engine, or end the command if Flower is not installed."""
    try:
        from numpyro_fed.engines import flower
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    return flower
