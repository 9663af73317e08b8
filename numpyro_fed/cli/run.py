"""Command ``numpyro-fed run``, for the coordinator."""

from pathlib import Path
from typing import Any

import click

from numpyro_fed._compat import enable_compilation_cache
from numpyro_fed.cli.common import (
    FOLDER,
    check_address,
    check_fit,
    check_netcdf,
    check_silos,
    flower_engine,
    study_options,
)
from numpyro_fed.cli.model_file import load_model_file
from numpyro_fed.decentralized._kernel import NetworkKernel


@click.command()
@study_options
@click.option(
    "--address",
    default="127.0.0.1:9092",
    show_default=True,
    help="Where this machine listens, host:port; silos come through a proxy (docs/flower.md).",
)
@click.option(
    "--tls", type=FOLDER, required=True, help="Folder with server.crt, server.key and ca.crt."
)
@click.option(
    "--folder",
    type=FOLDER,
    default=Path("numpyro-fed-run"),
    show_default=True,
    help="Folder for logs and the checkpoint, from which a run goes on.",
)
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
@click.option(
    "--wait",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds in which all silos have to appear.",
)
@click.option(
    "--patience",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help=(
        "Seconds that a round waits for a silo that is away; variational fits and networks wait "
        "five times."
    ),
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
        check_address("--address", options["address"])
        missing = [
            str(tls / f) for f in ("server.crt", "server.key", "ca.crt") if not (tls / f).is_file()
        ]
        missing += [str(keys / f"{n}.pub") for n in silos if not (keys / f"{n}.pub").is_file()]
        nodes, chains = isinstance(module.kernel, NetworkKernel), options["chains"]
        if nodes and chains % len(silos):
            raise ValueError(
                f"--chains {chains}: a network has one per silo; expected a multiple of "
                f"{len(silos)}"
            )
        if missing:
            raise ValueError(f"there are no files {missing}; docs/flower.md says how to make them")
        check_netcdf(out)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    flower_engine()
    from numpyro_fed.cli.coordinator import coordinate

    enable_compilation_cache(folder / "programs")
    try:
        click.echo(coordinate(model_file, silos, tls, keys, out, folder, **options))
    except (RuntimeError, TimeoutError) as error:
        raise click.ClickException(str(error)) from error
