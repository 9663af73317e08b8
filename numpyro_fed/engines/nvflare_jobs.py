"""Files and commands for NVFLARE: kits, jobs, and the simulator.

The module can be imported without NVFLARE; the simulator runs in processes of its own.
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

from numpyro_fed._typing import Facts

# names that the controller, the executor and the job folder share
TASK, SETTINGS, RESULT, ERROR = "answer", "fed.json", "result.bin", "error.txt"
PACKAGE = "numpyro_fed.engines.nvflare."
CLASSES = [PACKAGE + "FedController", PACKAGE + "SideExecutor"]  # all that a job may build
ALLOWED, SILOS = "NUMPYRO_FED_ALLOWED", "NUMPYRO_FED_SILOS"  # a site's environment variables
PERIOD = 0.05  # seconds between requests: a round then takes .2 s, with NVFLARE's own periods 2 s
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def prepare_kit(kit: str | Path) -> Path:
    """Write ``local/resources.json`` of a provisioned kit, once, and return its path.

    Jobs may then build :class:`FedController` and :class:`SideExecutor`, and no other class of
    numpyro_fed or of NVFLARE. Other entries of the kit's list of allowed classes stay.
    :class:`Rejoin` starts a silo's process. A silo's log does not go to the server.

    :param kit: folder of the server or of a silo.
    :raises ValueError: if the folder is not from ``nvflare provision``.
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
    run_arguments: Facts | None = None,
    patience: float = 600.0,
    period: float | None = None,
) -> Path:
    """Write a job folder, for ``nvflare job submit -j folder`` or the simulator; return its path.

    :param folder: path of the folder; its last part is the job's name.
    :param run: import path of ``run(transport, **run_arguments)``, which returns bytes or ``None``.
    :param make_side: import path of ``make_side(name, directory)``. Each silo that allows it calls
        it with arguments of its own.
    :param names: names of the silos, which are those of the clients.
    :param run_arguments: arguments of ``run``, as JSON can hold them.
    :param patience: time after which a round continues without silent silos, in seconds.
    :param period: time between a silo's questions for a message, in seconds. By default it is 0.05,
        or with more than five silos a hundredth of their number.
    :raises ValueError: for names that are not valid, and times that are not positive.
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
        # ``run`` decides what to do without a silo, and not NVFLARE
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
    """Run a job in NVFLARE's simulator, offline on this machine, and return the result of ``run``.

    Each silo is a process.

    :param run: import path, as for :func:`write_job`.
    :param make_side: import path, as for :func:`write_job`.
    :param names: names of the silos.
    :param workspace: folder for the job and logs; its folder ``nvflare`` is emptied first. The
        silos' private states are in its folder ``silos``.
    :param keep: whether to continue from these states; by default ``silos`` is emptied first.
    :param threads: number of silos in memory at one time; by default all. With fewer, each message
        starts a process of the silo, which reads its state from disk.
    :param timeout: time after which the simulation is stopped, in seconds.
    :param settings: further arguments of :func:`write_job`.
    :raises RuntimeError: with the reason, if ``run`` failed.
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
    return _result_of(where / "server" / "simulate_job", run, process.returncode, log)


def _result_of(kept: Path, run: str, code: int, log: Path) -> bytes:
    """Return what a simulation left in a folder; ``code`` is its exit code."""
    if (kept / ERROR).is_file():
        reason = (kept / ERROR).read_text().strip()
        raise RuntimeError(f"{run} failed: {reason.splitlines()[-1]}\n{reason}")
    if not (kept / RESULT).is_file():
        raise RuntimeError(f"the simulation ended without a result (exit code {code}); see {log}")
    return (kept / RESULT).read_bytes()
