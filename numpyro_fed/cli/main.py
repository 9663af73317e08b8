"""Command ``numpyro-fed``.

A person at a silo calls ``describe`` and ``silo``, the coordinator ``run``.
"""

import click

from numpyro_fed.cli.describe import describe
from numpyro_fed.cli.run import run
from numpyro_fed.cli.silo import silo


@click.group()
@click.version_option(package_name="numpyro-fed")
def main() -> None:
    """Run Bayesian inference over data that may not be pooled."""


main.add_command(describe)
main.add_command(silo)
main.add_command(run)
