"""Command lines of a deployment with Flower; they are made without Flower installed."""

import json
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

#: Environment of every process of Flower: no telemetry, no installation, frequent polling.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
}


def exit_at_sigterm(code: int) -> None:
    """Let SIGTERM end this process by SystemExit, so that what it opened is closed.

    A handler that is there stays. Python sets handlers in the main thread alone.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))


def link_command(
    port: int,
    *,
    certificate: str | Path,
    key: str | Path,
    ca: str | Path,
    host: str = "127.0.0.1",
    authentication: bool = True,
) -> list[str]:
    """Return the command that starts a SuperLink; its environment has to include :data:`QUIET`.

    :param port: port at which it listens.
    :param certificate: certificate of the server, in PEM.
    :param key: private key of the certificate.
    :param ca: certificate of the authority that signed it.
    :param host: address at which it listens.
    :param authentication: whether to let in registered nodes alone.
    """
    command = [_script("flower-superlink"), "--host", host, "--port", str(port)]
    command += [
        "--ssl-certfile",
        str(certificate),
        "--ssl-keyfile",
        str(key),
        "--ssl-ca-certfile",
        str(ca),
    ]
    return (
        command
        + ["--disable-runtime-dependency-installation"]
        + ["--enable-supernode-auth"] * authentication
    )


def node_command(
    server: str,
    name: str,
    *,
    ca: str | Path,
    key: str | Path | None = None,
    port: int = 9094,
    give_up: float | None = None,
    **config: float | str,
) -> list[str]:
    """Return the command that starts a silo's SuperNode, in an environment with :data:`QUIET`.

    :param server: address of the SuperLink, ``host:port``.
    :param name: name of the silo.
    :param ca: certificate of the authority that signed the server's, in PEM.
    :param key: private key of this node, in OpenSSH's format.
    :param port: port on this machine, for the node and the apps that it starts.
    :param give_up: time after which the node ends with exit code 1 if the server does not answer,
        in seconds; by default it never ends.
    :param config: further entries of ``context.node_config``: numbers, truth values, texts.
    """
    pairs = " ".join(f"{k}={json.dumps(v)}" for k, v in {"name": name, **config}.items())
    command = [_script("flower-supernode"), "--superlink", server, "--root-certificates", str(ca)]
    command += ["--port", str(port), "--node-config", pairs]
    command += ["--auth-supernode-private-key", str(key)] if key is not None else []
    return command + (["--max-wait-time", str(give_up)] if give_up is not None else [])


def write_app(
    directory: str | Path, server: str, client: str, config: Mapping[str, float | str] | None = None
) -> Path:
    """Write the folder that ``flwr run`` sends to the SuperLink, and return its path.

    The folder has the names of two importable objects, and no code.

    :param directory: path of the folder.
    :param server: ``module:object`` of a :func:`server_app` on the SuperLink's machine.
    :param client: ``module:object`` of a :func:`client_app` on the silos' machines.
    :param config: entries of ``context.run_config`` at all parties.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        "[project]",
        'name = "numpyro-fed-run"',
        'version = "1.0.0"',
        'description = "a run of numpyro_fed"',
        'license = "Apache-2.0"',
        "",
        "[tool.flwr.app]",
    ]
    lines += ['publisher = "numpyro-fed"', "", "[tool.flwr.app.components]"]
    lines += [
        f"serverapp = {json.dumps(server)}",
        f"clientapp = {json.dumps(client)}",
        "",
        "[tool.flwr.app.config]",
    ]
    lines += [
        f"{json.dumps(k)} = {json.dumps(v, ensure_ascii=False)}" for k, v in (config or {}).items()
    ]
    (directory / "pyproject.toml").write_text("\n".join(lines) + "\n")
    return directory


def _script(name: str) -> str:
    """Return the path of a command beside this Python, or else its name."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name
