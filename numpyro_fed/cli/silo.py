"""Command ``numpyro-fed silo``, for a person at a silo."""

import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from numpyro_fed._compat import enable_compilation_cache
from numpyro_fed.cli.common import (
    FILE,
    FOLDER,
    RUN_ENDED,
    added,
    check_address,
    check_name,
    confirm,
    flower_engine,
    flower_key,
    told_apart,
)
from numpyro_fed.cli.model_file import load_model_file, methods_of, public_of, silo_of_file
from numpyro_fed.density.check import check_own_factorization
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.privacy.data_guards import Guards
from numpyro_fed.rounds.task import TASKS

_EVERY = 10.0  # seconds between two lines of a silo that answers, in a log
_LONGEST = 500  # letters of the coordinator's words that are shown


class OpenedSilo(NamedTuple):
    """Silo that has passed its checks.

    :param side: the silo's side.
    :param folder: the folder of its state and record.
    :param leaves: text on what will leave.
    """

    side: SiloSide
    folder: Path
    leaves: str


_OPTIONS = (
    click.option(
        "--model",
        "model_file",
        type=FILE,
        required=True,
        help="Python file with the study's model, as the coordinator has it.",
    ),
    click.option(
        "--data",
        type=FILE,
        required=True,
        help="This silo's table, CSV or Parquet; it stays on this machine.",
    ),
    click.option("--name", required=True, help="This silo's name, as the coordinator lists it."),
    click.option(
        "--folder",
        type=FOLDER,
        help=(
            "Where this silo keeps its state and the record of what left it.  [default: "
            "numpyro-fed-NAME]"
        ),
    ),
    click.option(
        "--min-rows",
        type=click.IntRange(0),
        default=10,
        show_default=True,
        help="Guard: least rows; 0 turns it off.",
    ),
    click.option(
        "--min-level-rows",
        type=click.IntRange(0),
        default=3,
        show_default=True,
        help="Guard: least rows of a level of a column with two values; 0 turns it off.",
    ),
    click.option(
        "--max-parameters",
        type=click.FloatRange(0),
        default=0.1,
        show_default=True,
        help="Guard: most global parameters for each row; 0 turns it off.",
    ),
    click.option(
        "--columns",
        help="Guard: the columns of the table that the study may use, separated by commas.",
    ),
    click.option(
        "--ceiling",
        "ceilings",
        multiple=True,
        help=(
            "KIND=N: largest number of calls of a kind that are answered; repeatable. It is 0 for "
            "kinds that the study's method does not ask for."
        ),
    ),
    click.option(
        "--own-keys/--server-keys",
        default=True,
        show_default=True,
        help=(
            "Draw latents and noise by this silo's keys. With the server's keys draws equal those "
            "of inline silos, but a server that lies can solve for rows."
        ),
    ),
    click.option("--yes", is_flag=True, help="Do not ask."),
)


silo_options = added(_OPTIONS)


@click.command()
@click.option("--server", help="The coordinator's machine, host:port.")
@click.option("--ca", type=FILE, help="Certificate of the authority that signed the server's, PEM.")
@click.option(
    "--key", type=FILE, help="This silo's private key, whose public one the coordinator has."
)
@click.option(
    "--give-up",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for which the coordinator may be away, before it starts and after its study.",
)
@click.option("--check", is_flag=True, help="Show what would leave, and connect to nobody.")
@silo_options
def silo(
    server: str | None,
    ca: Path | None,
    key: Path | None,
    give_up: float,
    check: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Check this silo's data, show what will leave, ask, and answer until interrupted."""
    if not check and (server is None or ca is None):
        raise click.UsageError("expected --server and --ca, or --check")
    if server is not None:
        try:
            check_address("--server", server)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    opened = opened_silo(**options, check=check)
    click.echo(opened.leaves)
    if check or server is None or ca is None:
        return
    if not yes:
        confirm(f"Take part as {opened.side.name!r}, at {server}?")
    enable_compilation_cache(opened.folder / "programs")
    if key is not None:
        click.echo(f"Key: {flower_key(key)}; the coordinator's command shows the same.")
    _serve(opened.side, server, ca, key, give_up)


def opened_silo(
    model_file: Path,
    data: Path,
    name: str,
    folder: Path | None,
    min_rows: int,
    min_level_rows: int,
    max_parameters: float,
    columns: str | None,
    ceilings: tuple[str, ...],
    own_keys: bool,
    check: bool = False,
) -> OpenedSilo:
    """Return a silo from the options of a command, after all checks.

    :param check: whether to ignore the state that former runs left.
    :raises click.ClickException: in words, for a silo that cannot take part.
    """
    try:
        check_name(name)
        module = load_model_file(model_file)
        place = folder or Path(f"numpyro-fed-{name}")
        allowed = (
            None if columns is None else tuple(column.strip() for column in columns.split(","))
        )
        guards = Guards(min_rows or None, min_level_rows or None, max_parameters or None)
        with tempfile.TemporaryDirectory() as nothing:
            side = SiloSide(
                silo_of_file(module, name, data, allowed),
                module.model,
                nothing if check else place,
                public=public_of(module),
                fit=module.svi,
                guards=guards,
                ceilings=_ceilings(ceilings, methods_of(module)),
                own_keys=own_keys,
            )
        # check the factorization at the silo's rows, and the fit's demands on a model
        if module.svi is None:
            check_own_factorization(side.factors, side.silos)
        else:
            module.svi.check_factors(side.silos)
    except Exception as error:  # the study's file may raise anything
        raise click.ClickException(
            str(error)
            if isinstance(error, ValueError)
            else f"{model_file}: {type(error).__name__}: {error}"
        ) from error
    leaves = what_leaves(side, place, guards, allowed)
    same = f"Model: {told_apart(model_file)}; the coordinator's command shows the same."
    return OpenedSilo(side, place, f"{same}\n{leaves}")


def _ceilings(given: tuple[str, ...], methods: set[str]) -> dict[str, int]:
    """Return ceilings by kind: of kinds that the study's method does not ask for, 0."""
    out = {kind: 0 for kind, task in TASKS.items() if not methods & {*task.methods}}
    for text in given:
        kind, _, number = text.partition("=")
        if kind not in TASKS or not number.isdecimal():
            raise ValueError(f"--ceiling {text}: expected KIND=N, with a kind of {list(TASKS)}")
        out[kind] = int(number)
    return out


def what_leaves(
    side: SiloSide,
    folder: Path,
    guards: Guards | None = None,
    columns: tuple[str, ...] | None = None,
) -> str:
    """Return a text on what of a silo's data will leave it.

    :param folder: the folder of its record.
    :param guards: the guards that the silo has passed.
    :param columns: the columns of its table that the study may use. ``None``: all.
    """
    d = side.factors.dim
    sizes = ", ".join(f"{n[0]:,} rows of {group!r}" for group, n in side.silos.sizes.items())
    private = ", ".join(s.name for s in side.factors.local_sites) or "none"
    lines = [
        f"Silo {side.name!r}: {sizes}",
        *(f"  {line}" for line in side.silos.row_lines()),
        f"Stays here: all rows; local latents ({private}).",
        "Leaves, once: the silo's name, numbers of rows, the arguments' names and types.",
        *_shared(side),
        f"Leaves, in answer to the server (d = {d} global parameters, numbers of 4 bytes):",
    ]
    for kind in side.answered:
        task, ceiling = (
            TASKS[kind],
            f" (at most {side.ceilings[kind]:,} times; {side.counts[kind]:,} so far)",
        )
        lines.append(
            f"  {kind:<14} {task.leaves}" + (f"; {task.numbers}" if task.numbers else "") + ceiling
        )
    lines.append("All other kinds of call are refused.")
    if side.guard is not None and (privacy := side.guard.privacy) is not None:
        lines.append(
            f"With noise: epsilon {privacy.epsilon:g}, delta {privacy.delta:g}, spent after "
            f"{privacy.num_rounds:,} rounds; then no more is answered."
        )
    if side.guard is not None and side.guard.sums:
        lines.append(
            "Masked: of the answers to rounds the server sees the sum over all silos alone."
        )
    lines += [
        "Latents and noise are drawn by this silo's own keys."
        if side.own_keys
        else "Latents and noise are drawn by the server's keys: a server that lies can solve for "
        "single rows.",
        *(
            ()
            if guards is None
            else (f"Guards passed: {guards!r}; columns: {', '.join(columns or ['all'])}.",)
        ),
        "Nothing whose length depends on the number of rows is sent: each kind of answer is tried "
        "with a row more, and refused if it grows.",
        f"Every message is listed in {folder / 'audit.jsonl'}, with the positions that were asked "
        "about.",
    ]
    return "\n".join(lines)


def _shared(side: SiloSide) -> list[str]:
    """Return a line on arguments that are no rows of a plate, which are compared here."""
    shared = ", ".join(f"{k} {list(np.shape(v))}" for k, v in sorted(side.silos.shared.items()))
    return (
        [
            f"Compared here with the coordinator's values, and not sent: {shared} (not as long as "
            "the rows above)."
        ]
        if shared
        else []
    )


class _Counted:
    """Side of a silo that shows how many messages it has answered, and how the run ended.

    :ivar over: whether the run has ended well, and no other has asked since.
    """

    def __init__(self, side: SiloSide, give_up: float) -> None:
        self.side, self.name, self.give_up = side, side.name, give_up
        self.messages, self.sent, self.shown, self.over = 0, 0, -math.inf, False

    def heard(self, words: str) -> None:
        """Show the coordinator's words at the end of its run."""
        self.over = words.startswith(RUN_ENDED)
        minutes = f"{self.give_up / 60:.0f} minutes" if self.give_up >= 90 else "a minute"
        click.echo(
            f"\n{time.strftime('%H:%M:%S')}  The coordinator says: {words[:_LONGEST]}. This silo "
            f"waits for another command, such as a check. It ends {minutes} after the coordinator "
            "(--give-up), or by Ctrl-C",
            err=True,
        )

    def answer(self, data: bytes) -> bytes:
        answer, self.over = self.side.answer(data), False
        self.messages += 1
        self.sent += len(answer)
        if sys.stderr.isatty() or time.monotonic() - self.shown > _EVERY:
            self.shown = time.monotonic()
            end = "\r" if sys.stderr.isatty() else "\n"
            click.echo(
                f"{time.strftime('%H:%M:%S')}  {self.messages:,} messages answered, "
                f"{self.sent / 1024:,.1f} kB sent{end}",
                nl=False,
                err=True,
            )
        return answer


def _serve(side: SiloSide, server: str, ca: Path, key: Path | None, give_up: float) -> None:
    flower = flower_engine()
    from numpyro_fed.engines.flower_node import serve

    counted = _Counted(side, give_up)
    app = flower.client_app(lambda _: counted, counted.heard)
    try:
        serve(app, server, side.name, ca=ca, key=key, give_up=give_up)
    except (ConnectionError, ValueError) as error:
        if counted.over:
            click.echo(f"ended: the study is over; {counted.messages:,} messages were answered")
            return
        if isinstance(error, ConnectionError) and counted.messages:
            click.echo(
                f"the connection ended after {counted.messages:,} messages: the study is over, or "
                "the coordinator cannot be reached. If it goes on, start this command again",
                err=True,
            )
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo(f"\nended; {counted.messages:,} messages were answered", err=True)
