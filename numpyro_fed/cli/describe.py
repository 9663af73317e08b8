"""Command ``numpyro-fed describe``, for a person at a silo."""

from pathlib import Path

import click

from numpyro_fed.cli.common import FILE, check_name, confirm
from numpyro_fed.front.dictionary import describe as describe_tables


@click.command()
@click.option("--data", type=FILE, required=True, help="This silo's table, CSV or Parquet.")
@click.option("--name", required=True, help="This silo's name, as the coordinator lists it.")
@click.option("--group", "groups", multiple=True, help="A column of elements inside the silo.")
@click.option("--level", "levels", multiple=True, help="A column of numbers that are codes.")
@click.option(
    "--min-count",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Fewest rows behind a mean, a quantile or a level that is shown.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File to write, JSON.",
)
@click.option("--yes", is_flag=True, help="Write the file without asking.")
def describe(
    data: Path,
    name: str,
    groups: tuple[str, ...],
    levels: tuple[str, ...],
    min_count: int,
    out: Path,
    yes: bool,
) -> None:
    """Describe a table's columns without its rows, show all of it, and write it if you agree."""
    try:
        check_name(name)
        told = describe_tables({name: data}, groups=groups, levels=levels, min_count=min_count)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(repr(told))
    for column, facts in told.columns.items():
        if facts.quantiles:
            quantiles = ", ".join(f"{p:.0%} {x:.6g}" for p, x in facts.quantiles)
            click.echo(f"{column}: {quantiles}")
    if not yes:
        confirm(f"Write this to {out}, for the coordinator?")
    told.save(out)
    click.echo(f"{out}: {len(told.columns)} columns")
