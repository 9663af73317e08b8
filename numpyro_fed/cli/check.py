"""Command ``numpyro-fed check``, for the coordinator: a saved posterior, silo by silo."""

from pathlib import Path
from typing import Any

import click

from numpyro_fed._arviz import read_netcdf
from numpyro_fed.cli.common import FILE, check_fit, check_link, check_silos, link_options
from numpyro_fed.cli.model_file import load_model_file
from numpyro_fed.cli.run import coordinated


@click.command()
@click.argument("result", type=FILE)
@link_options
@click.option(
    "--refit", is_flag=True, help="Fit anew without each silo whose weights fail: ten rounds each."
)
def check(
    result: Path, model_file: Path, names: str, tls: Path, keys: Path, folder: Path, **options: Any
) -> None:
    """Check the posterior in the netCDF file RESULT: how each silo is predicted by the others.

    Silos take part as in `run`. Each sends 41 sums over its rows, and one number for each draw
    where RESULT does not have them.
    """
    try:
        module = load_model_file(model_file)
        silos = check_silos(names)
        check_fit(module.svi, len(silos), 0, check=True)
        check_link(options["address"], tls, keys, silos)
        read_netcdf(result)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    options["result"] = str(result.resolve())
    click.echo(coordinated(model_file, silos, tls, keys, folder, options))
