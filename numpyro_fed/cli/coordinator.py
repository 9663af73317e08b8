"""Coordinator of a deployment with Flower: a SuperLink, and the run that it hosts."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numpyro_fed._arviz import read_netcdf
from numpyro_fed.cli.common import RUN_ENDED, check_address, flower_key
from numpyro_fed.cli.model_file import load_model_file
from numpyro_fed.cli.posterior import connected, posterior
from numpyro_fed.engines import flower
from numpyro_fed.engines.flower_commands import QUIET, exit_at_sigterm, link_command, write_app
from numpyro_fed.results.check import check
from numpyro_fed.results.prior_sensitivity import SENSITIVE, prior_sensitivity
from numpyro_fed.rounds.files import write_whole
from numpyro_fed.rounds.remote import RemoteSilos

if TYPE_CHECKING:
    from arviz import InferenceData
    from flwr.app import Context
    from flwr.serverapp import Grid


_START = 60.0  # seconds for SuperLink to start
_EVERY = 10.0  # seconds between two lines on how far a run is


class Bar(io.TextIOBase):
    """Standard error whose last state of a progress bar is in a file."""

    def __init__(self, place: Path) -> None:
        self.place, self.rest = place, sys.stderr

    def write(self, text: str) -> int:
        if not text.startswith("\r"):  # no bar's
            return self.rest.write(text)
        if text.strip():
            write_whole(self.place, text.strip().encode())
        return len(text)


def _draw(grid: "Grid", context: "Context") -> None:
    """Connect to the silos, draw, and write the posterior, inside SuperLink.

    Files in the run's folder report the end: ``done``, or ``failed`` and ``error.log``.
    """
    told = dict(context.run_config)
    folder, names = Path(told["folder"]), json.loads(told["silos"])
    (folder / "process").write_text(str(os.getpid()))
    transport = None
    try:
        module = load_model_file(told["model"])
        transport = flower.Flower(
            grid,
            names,
            timeout=told["patience"],
            patience=told["patience"],
            wait=told["wait"],
            grace=min(30.0, told["wait"]),
            waiting=lambda missing: write_whole(folder / "waiting", ", ".join(missing).encode()),
        )
        write_whole(folder / "waiting", b"")
        write_whole(folder / "progress", b"silos check the model, and programs compile")
        fresh = not (folder / "checkpoint").exists()
        silos = connected(transport, module, fresh=fresh)
        carrier: Any = silos.carrier
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            with redirect_stderr(Bar(folder / "progress")):
                if "result" in told:
                    idata, refit = read_netcdf(told["result"]), told["refit"]
                    words = f"{check(idata, module.model, silos, refit=refit)}\n"
                    words += _prior_words(idata, module.model, silos)
                else:
                    idata, words = posterior(module, silos, told, folder / "checkpoint", True)
                    idata.to_netcdf(told["out"])
        lines = [words, "On the wire (messages, bytes to the silo, bytes from it):"]
        lines += [
            f"  {name}: {t.messages:,}, {t.bytes_down:,}, {t.bytes_up:,}"
            for name, t in carrier.traffic.items()
        ]
        lines += [f"Warning: {w.message}" for w in said if issubclass(w.category, UserWarning)]
        lines += [f"posterior written to {told['out']}"] if "out" in told else []
        _farewell(transport, names)
        write_whole(folder / "done", "\n".join(lines).encode())
    except BaseException as error:
        (folder / "error.log").write_text(traceback.format_exc())
        said_why = (
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        _farewell(transport, names, said_why)
        write_whole(folder / "failed", said_why.encode())
        raise


def _prior_words(idata: "InferenceData", model: Callable, silos: RemoteSilos) -> str:
    try:
        table = prior_sensitivity(idata, model, silos, progress_bar=False)
    except ValueError as error:
        return f"sensitivity to the prior: {error}"
    return f"sensitivity to the prior and the data (from {SENSITIVE} on look at it):\n" + str(
        table.round(3)
    )


def _farewell(transport: flower.Flower | None, names: list[str], failed: str = "") -> None:
    """Tell silos how the run has ended; why it failed, only to a silo that the text names."""
    if transport is None:
        return
    at_fault = [name for name in names if f"silo {name!r}" in failed]
    others = [name for name in names if name not in at_fault]
    with suppress(Exception):  # the run has ended, whether they hear of it or not
        transport.farewell("the run has failed" if failed else RUN_ENDED, others)
        transport.farewell(f"the run has failed: {failed}", at_fault)


server = flower.server_app(_draw)
# silos answer with their own app
client = flower.client_app(lambda _: None)  # type: ignore[arg-type, return-value]


def coordinate(
    model: Path,
    names: list[str],
    tls: Path,
    keys: Path,
    folder: Path,
    *,
    address: str,
    **settings: float | str,
) -> str:
    """Start a SuperLink and the run, wait for its end or for SIGTERM, and stop both.

    :param settings: ``wait`` and ``patience``; for a fit ``out`` (a netCDF file) and what
        :func:`~numpyro_fed.cli.posterior.posterior` is told; for a check the file
        ``result`` and the flag ``refit``.
    :return: a text on the cost of the run.
    :raises RuntimeError: with the reason, when the run or SuperLink failed.
    """
    folder, tls = folder.resolve(), tls.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end_former(folder)
    for name in ("done", "failed", "process", "waiting", "progress", "link"):
        (folder / name).unlink(missing_ok=True)
    if "result" not in settings and (folder / "checkpoint").exists():
        click.echo(
            f"going on from {folder / 'checkpoint'}; with another --folder the run starts afresh",
            err=True,
        )
    host, port = check_address("address", address)
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flower")}
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", "")]
    )
    command = link_command(
        port,
        certificate=tls / "server.crt",
        key=tls / "server.key",
        ca=tls / "ca.crt",
        host=host,
    )
    exit_at_sigterm(128 + signal.SIGTERM)
    click.echo(f"starting Flower's SuperLink at {address}", err=True)
    with (folder / "link.log").open("ab") as log:
        link = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    (folder / "link").write_text(str(link.pid))
    try:
        near = "127.0.0.1" if host in ("", "0.0.0.0") else host
        _wait_for(link, near, port, folder)
        flwr = partial(_flwr, folder, tls, f"{near}:{port}", environment)
        for name in names:
            key = (keys / f"{name}.pub").resolve()
            flwr("supernode", "register", str(key), "link", "--name", name)
            click.echo(f"key of {name}: {flower_key(key)}", err=True)
        config: dict[str, float | str] = {
            **settings,
            "model": str(model.resolve()),
            "silos": json.dumps(names),
            "folder": str(folder),
        }
        app = write_app(folder / "app", f"{__name__}:server", f"{__name__}:client", config)
        flwr("run", str(app), "link")
        return _report(link, folder)
    finally:
        _stop(link, folder)


def _stop(link: subprocess.Popen, folder: Path) -> None:
    """Stop SuperLink, and the run, which does not end with SuperLink if it has not reported."""
    link.terminate()
    try:
        link.wait(15)
    except subprocess.TimeoutExpired:
        link.kill()
    if number := _running(folder / "process", "flwr-serverapp"):
        _end(number)


def _report(link: subprocess.Popen, folder: Path) -> str:
    """Wait for the run, and return its text; say whom it waits for, and how far it is."""
    place, bar, said, shown, when = folder / "waiting", folder / "progress", None, "", 0.0
    while not (folder / "done").exists():
        if (folder / "failed").exists():
            raise RuntimeError(
                (folder / "failed").read_text() + f" (the whole error is in {folder / 'error.log'})"
            )
        if place.exists() and (missing := place.read_text()) != said:
            click.echo(f"waiting for {missing}" if missing else "all silos are here", err=True)
            said = missing
        if time.monotonic() - when > _EVERY and bar.exists() and (text := bar.read_text()) != shown:
            click.echo(f"{time.strftime('%H:%M:%S')}  {text}", err=True)
            shown, when = text, time.monotonic()
        if link.poll() is not None or _is_gone(folder / "process"):
            raise RuntimeError(
                f"SuperLink, or the run in it, ended without a result; see {folder / 'link.log'}"
            )
        time.sleep(0.2)
    return (folder / "done").read_text()


def end_former(folder: Path) -> None:
    """End the SuperLink of a run that was killed, and the run in it, which nobody waits for."""
    for name, command in (("link", "flower-superlink"), ("process", "flwr-serverapp")):
        if number := _running(folder / name, command):
            click.echo(f"ending {command} of a former run, process {number}", err=True)
            _end(number)


def _running(place: Path, command: str) -> int | None:
    """Return the number in a file if a process of this number runs the command."""
    try:
        number = int(place.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return number if command in _command_of(number) else None


def _end(number: int) -> None:
    for signal_, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        if not _command_of(number):
            break
        with suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal_)
        end = time.monotonic() + seconds
        while _command_of(number) and time.monotonic() < end:
            time.sleep(0.1)


def _command_of(number: int) -> str:
    """Return state and command line of a process, empty where there is none, or no ``ps``."""
    command = ["ps", "-ww", "-o", "stat=", "-o", "command=", "-p", str(number)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
    return "" if found.startswith("Z") else found


def _is_gone(place: Path) -> bool:
    """Return True if the process with the number in ``place`` ended without a report."""
    try:
        os.kill(int(place.read_text()), 0)
    except (FileNotFoundError, ValueError):
        return False
    except ProcessLookupError:
        time.sleep(1.0)
        return not (place.with_name("done").exists() or place.with_name("failed").exists())
    return False


def _wait_for(link: subprocess.Popen, host: str, port: int, folder: Path) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end and link.poll() is None:
        with socket.socket() as s:
            s.settimeout(1)
            if s.connect_ex((host, port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"SuperLink did not start within {_START:.0f} s; see {folder / 'link.log'}")


def _flwr(
    folder: Path, tls: Path, address: str, environment: dict[str, str], *arguments: str
) -> None:
    """Run Flower's command ``flwr`` against the SuperLink of this machine."""
    home = folder / "flower"
    home.mkdir(exist_ok=True)
    lines = ["[superlink]", 'default = "link"', "[superlink.link]", f'address = "{address}"']
    (home / "config.toml").write_text(
        "\n".join([*lines, f"root-certificates = {json.dumps(str(tls / 'ca.crt'))}", ""])
    )
    command = [str(Path(sys.executable).with_name("flwr")), *arguments]
    done = subprocess.run(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"flwr {arguments[0]} failed: {done.stdout.strip()}")
