"""Options, checks and paths that several commands share."""

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from types import ModuleType

import click

from numpyro_fed.engines.nvflare_jobs import NAME
from numpyro_fed.privacy.secure_sum import FEWEST_SILOS
from numpyro_fed.vi._base import FederatedVI

RUN_ENDED = "the run has ended"  # how the coordinator's words on a good end begin
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


_MEMBERS = (
    click.option(
        "--model", "model_file", type=FILE, required=True, help="Python file of the study's model."
    ),
    click.option(
        "--silos", "names", required=True, help="Names of all silos, separated by commas."
    ),
    click.option(
        "--keys",
        type=FOLDER,
        required=True,
        help="Folder with the silos' public keys, NAME.pub; nobody else is let in.",
    ),
)
_FIT = (
    click.option(
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        required=True,
        help="netCDF file for the posterior.",
    ),
    click.option(
        "--rounds",
        type=click.IntRange(0),
        default=0,
        help=(
            "Most rounds of a variational fit.  [default: those of its privacy's budget, 40 "
            "conducive ones, or 1000]"
        ),
    ),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True),
    click.option(
        "--check",
        is_flag=True,
        help="Then leave each silo out, by one number for each draw from each silo, and print it.",
    ),
)
_LINK = (
    click.option(
        "--address",
        default="127.0.0.1:9092",
        show_default=True,
        help="Where this machine listens, host:port; silos come through a proxy (docs/flower.md).",
    ),
    click.option(
        "--tls", type=FOLDER, required=True, help="Folder with server.crt, server.key and ca.crt."
    ),
    click.option(
        "--folder",
        type=FOLDER,
        default=Path("numpyro-fed-run"),
        show_default=True,
        help="Folder for logs and the checkpoint, from which a run goes on.",
    ),
    click.option(
        "--wait",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        show_default=True,
        help="Seconds in which all silos have to appear.",
    ),
    click.option(
        "--patience",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        show_default=True,
        help=(
            "Seconds that a round waits for a silo that is away; variational fits and networks "
            "wait five times."
        ),
    ),
)


def added(options: Sequence[Callable]) -> Callable[[Callable], Callable]:
    """Return a decorator that adds options to a command."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


study_options = added((*_MEMBERS, *_FIT))
link_options = added((*_MEMBERS, *_LINK))
run_options = added((*_MEMBERS, *_FIT, *_LINK))


def check_silos(names: str) -> list[str]:
    """Return the names in a list with commas, or raise a ``ValueError``."""
    silos = [name.strip() for name in names.split(",")]
    for name in silos:
        check_name(name)
    if len(set(silos)) < len(silos):
        raise ValueError(f"--silos {names}: expected each name once")
    return silos


def check_fit(svi: FederatedVI | None, num_silos: int, rounds: int, check: bool) -> None:
    """Raise for a fit that cannot run, before any silo is there."""
    if check and (svi is None or svi.algorithm != "conducive" or svi.secure_sum):
        raise ValueError(
            "a check asks for each silo's log likelihood at the draws; expected a study whose "
            "model file has svi = fed.ConduciveSFVI(...), without secure sums"
        )
    if svi is None:
        return
    if svi.secure_sum and num_silos < FEWEST_SILOS:
        raise ValueError(
            f"the study's secure_sum=True wants three silos at least, got {num_silos}: each of two "
            "silos would know the other's answer"
        )
    if svi.privacy is not None and rounds > svi.privacy.num_rounds:
        raise ValueError(
            f"--rounds {rounds}: the study's budget of privacy is for {svi.privacy.num_rounds}"
        )


def check_link(address: str, tls: Path, keys: Path, silos: Sequence[str]) -> None:
    """Raise a ``ValueError`` for an address that is none, and for missing certificates or keys."""
    check_address("--address", address)
    missing = [str(tls / f) for f in ("server.crt", "server.key", "ca.crt")]
    missing += [str(keys / f"{name}.pub") for name in silos]
    if missing := [place for place in missing if not Path(place).is_file()]:
        raise ValueError(f"there are no files {missing}; docs/flower.md says how to make them")


def check_netcdf(out: Path) -> None:
    """Raise a ``ValueError`` for a path at which no netCDF file can be."""
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.resolve().parent}")
    if out.suffix != ".nc":
        raise ValueError(f"--out {out}: expected a netCDF file, NAME.nc")


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


def told_apart(file: Path) -> str:
    """Return a text by which two parties see whether they have the same file."""
    return f"{file.name}, SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


def flower_key(key: Path) -> str:
    """Return the fingerprint of a private key, or of the public one in a file NAME.pub."""
    flower_engine()
    from numpyro_fed.engines.flower_node import fingerprint

    try:
        return fingerprint(key)
    except (ValueError, IndexError) as error:
        raise click.ClickException(str(error)) from error


def flower_engine() -> ModuleType:
    """Return the engine, or end the command if Flower is not installed."""
    try:
        from numpyro_fed.engines import flower
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    return flower


def confirm(question: str) -> None:
    """Ask, and end the command where the answer is no or there is nobody to ask."""
    try:
        agreed = click.confirm(question)
    except click.Abort as error:
        if sys.stdin.isatty():  # Ctrl-C
            raise
        raise click.ClickException("nobody answered; without a terminal, give --yes") from error
    if not agreed:
        raise click.Abort
