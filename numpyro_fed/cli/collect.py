"""Command ``numpyro-fed collect``, for the coordinator of a study of files."""

from functools import partial
from pathlib import Path

import click

from numpyro_fed._compat import enable_compilation_cache
from numpyro_fed.cli.common import (
    FILE,
    FOLDER,
    check_fit,
    check_netcdf,
    check_silos,
    study_options,
    told_apart,
)
from numpyro_fed.cli.model_file import load_model_file
from numpyro_fed.cli.posterior import connected, posterior
from numpyro_fed.engines.study import NotYet, StudyFolder


@click.command()
@click.argument("study", type=FOLDER)
@click.option("--key", type=FILE, required=True, help="Your private key, of ssh-keygen -t ed25519.")
@click.option("--no-wait", is_flag=True, help="End where replies are missing, and name them.")
@click.option("--draws", type=click.IntRange(1), default=4000, show_default=True)
@study_options
def collect(
    study: Path,
    key: Path,
    no_wait: bool,
    draws: int,
    model_file: Path,
    names: str,
    keys: Path,
    out: Path,
    rounds: int,
    seed: int,
    check: bool,
) -> None:
    """Write messages to the silos into the folder STUDY, and pick up their replies.

    It waits for replies that are missing, and ends with the posterior. Stopped and started again,
    it goes on where it was. The method is the model file's `svi`; conducive rounds need about
    fifteen messages.
    """
    told = {"samples": draws, "chains": 1, "rounds": rounds, "seed": seed, "check": check}
    try:
        module = load_model_file(model_file)
        silos = check_silos(names)
        check_fit(module.svi, len(silos), rounds, check)
        check_netcdf(out)
        if module.svi is None:
            raise ValueError(
                f"{model_file}: a study of files needs few rounds; expected "
                "svi = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model)) in it"
            )
        say = partial(click.echo, err=True)
        say(f"Model: {told_apart(model_file)}")
        transport = StudyFolder(study, silos, key, keys, waits=not no_wait, say=say)
        enable_compilation_cache()
        remote = connected(transport, module, server=transport.server)
        idata, words = posterior(module, remote, told)
    except NotYet as missing:
        click.echo(str(missing))
        return
    except (ValueError, RuntimeError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    idata.to_netcdf(out)
    click.echo(f"{words}\nposterior written to {out}")
