"""Command ``numpyro-fed answer``, for a person at a silo of a study of files."""

from pathlib import Path
from typing import Any

import click

from numpyro_fed._compat import enable_compilation_cache
from numpyro_fed.cli.common import FILE, confirm
from numpyro_fed.cli.silo import OpenedSilo, opened_silo, silo_options
from numpyro_fed.engines.study_desk import Desk


@click.command()
@click.argument("message", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--key", type=FILE, required=True, help="This silo's private key, of ssh-keygen -t ed25519."
)
@click.option("--coordinator", type=FILE, required=True, help="The coordinator's public key.")
@silo_options
def answer(message: Path, key: Path, coordinator: Path, yes: bool, **options: Any) -> None:
    """Show what MESSAGE asks and what would leave, ask, and write the signed reply beside it.

    MESSAGE is a file, STUDY/NAME/0003.msg, or the folder STUDY/NAME: then the next one in it.
    """
    opened = opened_silo(**options)
    enable_compilation_cache(opened.folder / "programs")
    try:
        desk = Desk(opened.side, key, coordinator)
        place = desk.next_in(message) if message.is_dir() else message
        letter = desk.read(place)
        again = desk.has_answered(letter)
        if not again:
            _ask(desk.asked(letter), opened, letter.number == 1, yes)
        written = desk.answer(letter, place.resolve().parents[1])
    except (ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    size = f"{written.stat().st_size:,} bytes"
    click.echo(f"{written}: {size}{', as before' if again else ''}. Bring it to the coordinator.")


def _ask(text: str, opened: OpenedSilo, first: bool, yes: bool) -> None:
    if first:
        click.echo(opened.leaves)
    click.echo(text)
    if not yes:
        confirm("Answer?")
