"""Command ``numpyro-fed run``, for the coordinator."""

from pathlib import Path
from typing import Any

import click

from numpyro_fed._compat import enable_compilation_cache
from numpyro_fed.cli.common import (
    check_fit,
    check_link,
    check_netcdf,
    check_silos,
    flower_engine,
    run_options,
    told_apart,
)
from numpyro_fed.cli.model_file import load_model_file
from numpyro_fed.decentralized._kernel import NetworkKernel
from numpyro_fed.rounds.files import locked


@click.command()
@run_options
@click.option("--chains", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="Warmup rounds of each chain, which are not kept.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Draws of each chain; a variational fit has as many in all as all chains.",
)
def run(
    model_file: Path, names: str, tls: Path, keys: Path, out: Path, folder: Path, **options: Any
) -> None:
    """Wait for the silos, draw from the posterior of all of them together, and write it.

    The method is the model file's `kernel` or `svi` (a variational fit), or else FSGLD.
    """
    try:
        module = load_model_file(model_file)
        silos = check_silos(names)
        check_fit(module.svi, len(silos), options["rounds"], options["check"])
        nodes, chains = isinstance(module.kernel, NetworkKernel), options["chains"]
        if nodes and chains % len(silos):
            raise ValueError(
                f"--chains {chains}: a network has one per silo; expected a multiple of "
                f"{len(silos)}"
            )
        check_link(options["address"], tls, keys, silos)
        check_netcdf(out)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    options["out"] = str(out.resolve())
    click.echo(coordinated(model_file, silos, tls, keys, folder, options))


def coordinated(
    model_file: Path,
    silos: list[str],
    tls: Path,
    keys: Path,
    folder: Path,
    options: dict[str, Any],
) -> str:
    """Return the text of a run at the end of which everything is stopped.

    :raises click.ClickException: with the reason, when the run failed.
    """
    click.echo(f"Model: {told_apart(model_file)}", err=True)
    flower_engine()
    from numpyro_fed.cli.coordinator import coordinate

    enable_compilation_cache(folder / "programs")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / "run"):  # a run that goes on is not ended by another
            return coordinate(model_file, silos, tls, keys, folder, **options)
    except (RuntimeError, TimeoutError, ValueError) as error:
        raise click.ClickException(str(error)) from error
