"""The command lines of a deployment with Flower, which needs no Flower to be told."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["QUIET", "link_command", "node_command", "write_app"]

#: Environment of every process of Flower's: it tells nobody of itself, installs nothing, and looks
#: for work often.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
}


def link_command(
    port: int,
    *,
    certificate: str | Path,
    key: str | Path,
    ca: str | Path,
    host: str = "127.0.0.1",
    authentication: bool = True,
) -> list[str]:
    """The command that starts a SuperLink, of which the environment is to hold :data:`QUIET`.

    :param certificate: the server's, in PEM, with ``key`` and the authority ``ca`` that signed it.
    :param authentication: only nodes whose public keys are registered are let in.
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
    **config: Any,
) -> list[str]:
    """The command that starts a silo's SuperNode, of which the environment is to hold
    :data:`QUIET`.

    :param server: the SuperLink, ``host:port``.
    :param name: the silo's.
    :param ca: the authority that signed the server's certificate, in PEM.
    :param key: private key of this node, in OpenSSH's form.
    :param port: of this machine, for the node and the apps it starts.
    :param give_up: seconds after which the node ends with exit code 1 if the server does not
        answer; by default never.
    :param config: further ``context.node_config``: numbers, truth values, words.
    """
    pairs = " ".join(f"{k}={json.dumps(v)}" for k, v in {"name": name, **config}.items())
    command = [_script("flower-supernode"), "--superlink", server, "--root-certificates", str(ca)]
    command += ["--port", str(port), "--node-config", pairs]
    command += ["--auth-supernode-private-key", str(key)] if key is not None else []
    return command + (["--max-wait-time", str(give_up)] if give_up is not None else [])


def write_app(
    directory: str | Path, server: str, client: str, config: Mapping[str, Any] | None = None
) -> Path:
    """The folder that ``flwr run`` sends to the SuperLink.

    Two names of importable objects, and no code.

    :param server: ``module:object`` of a :func:`server_app`, for the SuperLink's machine.
    :param client: ``module:object`` of a :func:`client_app`, for the silos'.
    :param config: becomes ``context.run_config`` everywhere.
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
    """A command that is installed beside this Python."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name
