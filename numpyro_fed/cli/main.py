"""Command ``numpyro-fed``.

A person at a silo calls ``describe``, and ``silo`` or (in a study of files) ``answer``. The
coordinator calls ``run`` or ``collect``, and ``check``.
"""

import click

from numpyro_fed.cli.answer import answer
from numpyro_fed.cli.check import check
from numpyro_fed.cli.collect import collect
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
main.add_command(check)
main.add_command(answer)
main.add_command(collect)
