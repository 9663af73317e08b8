"""What is written for NVFLARE.

A prepared kit, a job's folder, and its simulator, which is started in processes of its own. Needs
no NVFLARE to be imported.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["prepare_kit", "simulate", "write_job"]

# names that the two parts of a job, and its folder, have in common
TASK, SETTINGS, RESULT, ERROR = "answer", "fed.json", "result.bin", "error.txt"
PACKAGE = "numpyro_fed.engines.nvflare."
CLASSES = [PACKAGE + "FedController", PACKAGE + "SideExecutor"]  # all that a job may build
ALLOWED, SILOS = "NUMPYRO_FED_ALLOWED", "NUMPYRO_FED_SILOS"  # a site's environment variables
PERIOD = 0.05
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def prepare_kit(kit: str | Path) -> Path:
    """Write once what a provisioned site says in its ``local/resources.json``.

    Of a job our two components are built, and no more of ours or of NVFLARE's; what else the list
    has stays. A silo's process is started by ``Rejoin``, and a silo's log stays where it is.

    :param kit: the server's or a site's folder.
    """
    local = Path(kit) / "local"
    written = local / "resources.json"
    source = written if written.is_file() else local / "resources.json.default"
    if not source.is_file():
        raise ValueError(
            f"{kit}: there is no {source}; expected a folder that `nvflare provision` made"
        )
    resources = json.loads(source.read_text())
    others = [
        x for x in resources.get("class_allow_list", []) if not x.startswith(("nvflare.", PACKAGE))
    ]
    resources["class_allow_list"] = others + CLASSES
    resources["allow_log_streaming"] = False
    for component in resources["components"]:
        if component["path"].endswith(".ClientProcessJobLauncher"):
            component["path"] = PACKAGE + "Rejoin"
    written.write_text(json.dumps(resources, indent=2))
    return written


def write_job(
    folder: str | Path,
    run: str,
    make_side: str,
    names: Sequence[str],
    *,
    run_arguments: dict[str, Any] | None = None,
    patience: float = 600.0,
    period: float | None = None,
) -> Path:
    """A job folder, to be submitted to a server (``nvflare job submit -j folder``) or simulated.

    :param folder: is made; its last part is the job's name.
    :param run: import path of ``run(transport, **run_arguments)``, which returns bytes or ``None``.
    :param make_side: import path of ``make_side(name, directory)``, called at each site that allows
        it; of its arguments the job says nothing.
    :param names: the silos, which are the names of the clients.
    :param run_arguments: what JSON holds.
    :param patience: seconds after which a silo that has not answered is left out of a round.
    :param period: seconds between a silo's questions for a message; by default 0.05, and more with
        above five silos, for a hundred questions a second in all.
    """
    _check_names(names)
    period = max(PERIOD, 0.01 * len(names)) if period is None else period
    if not period > 0:
        raise ValueError(f"period={period!r}; expected a number of seconds above zero")
    if not patience > 0:
        raise ValueError(f"patience={patience!r}; expected a number of seconds above zero")
    server = {
        "format_version": 2,
        "server": {"task_request_interval": period},
        # that a silo is away is for ``run`` to judge, not for NVFLARE
        "dead_client_grace_period": 1e9,
        "workflows": [{"id": "fed", "path": PACKAGE + "FedController", "args": {}}],
        "components": [],
    }
    silo = {
        "format_version": 2,
        "default_task_fetch_interval": period,
        "executors": [
            {"tasks": [TASK], "executor": {"path": PACKAGE + "SideExecutor", "args": {}}}
        ],
        "components": [],
    }
    folder = Path(folder)
    told = {
        "names": list(names),
        "patience": patience,
        "run": run,
        "arguments": run_arguments or {},
    }
    asked = {"make_side": make_side}
    for app, kind, config, settings in (
        ("server", "server", server, told),
        ("silo", "client", silo, asked),
    ):
        config_dir = folder / app / "config"
        config_dir.mkdir(parents=True, exist_ok=True)
        (config_dir / f"config_fed_{kind}.json").write_text(json.dumps(config, indent=2))
        (config_dir / SETTINGS).write_text(json.dumps(settings, indent=2))
    deploy = {"server": ["server"], "silo": list(names)}
    meta = {
        "name": folder.name,
        "resource_spec": {},
        "deploy_map": deploy,
        "min_clients": len(names),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))
    return folder


def _check_names(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ValueError(f"silos {twice} are listed more than once; expected each name once")
    wrong = [name for name in names if not NAME.fullmatch(name) or name == "server"]
    if wrong or not names:
        raise ValueError(
            f"silos {wrong or list(names)}: expected names of letters, digits, '.', '_' and '-', "
            "not 'server'"
        )


def simulate(
    run: str,
    make_side: str,
    names: Sequence[str],
    workspace: str | Path,
    *,
    keep: bool = False,
    threads: int | None = None,
    timeout: float | None = None,
    **settings: Any,
) -> bytes:
    """Run a job in NVFLARE's simulator: all on this machine, offline, each silo a process.

    Returns what ``run`` returned.

    :param workspace: for the job and logs; ``nvflare`` in it is emptied first. The silos' private
        state is in ``silos``.
    :param keep: go on from that state; by default ``silos`` is emptied first.
    :param threads: silos in memory at one time; by default all. With fewer, a silo's process is
        started for each message, and its state read from disk.
    :param timeout: seconds after which the simulation is ended.
    :param settings: further ones of :func:`write_job`.
    :raises RuntimeError: with the reason, where ``run`` failed.
    """
    workspace = Path(workspace).resolve()
    job = write_job(workspace / "job", run, make_side, names, **settings)
    threads = len(names) if threads is None else threads
    if not 1 <= threads <= len(names):
        raise ValueError(
            f"threads={threads}; expected between 1 and the number of silos, {len(names)}"
        )
    where, silos = workspace / "nvflare", workspace / "silos"
    shutil.rmtree(where, ignore_errors=True)
    if not keep and silos.exists():
        shutil.rmtree(silos)
    (where / "local").mkdir(parents=True)
    (where / "local" / "resources.json").write_text(
        json.dumps({"format_version": 2, "class_allow_list": CLASSES})
    )
    command = [
        sys.executable,
        "-m",
        "nvflare.private.fed.app.simulator.simulator",
        str(job),
        "-w",
        str(where),
    ]
    command += ["-c", ",".join(names), "-t", str(threads), "-m", str(len(names))]
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(Path(x).resolve()) for x in paths if x),
        ALLOWED: f"{run},{make_side}",
        SILOS: str(silos),
    }
    log = workspace / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=workspace,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, 9)
            process.wait()
            raise
    kept = where / "server" / "simulate_job"
    if (kept / ERROR).is_file():
        reason = (kept / ERROR).read_text().strip()
        raise RuntimeError(f"{run} failed: {reason.splitlines()[-1]}\n{reason}")
    if not (kept / RESULT).is_file():
        raise RuntimeError(
            f"the simulation ended without a result (exit code {process.returncode}); see {log}"
        )
    return (kept / RESULT).read_bytes()
