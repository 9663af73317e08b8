"""A deployment of NVFLARE on loopback.

Startup kits with mutual TLS, a server and three clients as processes, an admin's session.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nvflare_sides
import psutil

from numpyro_fed.engines import nvflare as carrier

SIDES = Path(nvflare_sides.__file__)
ALLOWED = ("run", "who_answers", "time_rounds", "make_side", "make_echo")
NAMES = ["s0", "s1", "s2"]

PROJECT = """
api_version: 3
name: loopback
description: a server and three clients
participants:
  - {{name: localhost, type: server, org: lab, fed_learn_port: {port}}}
  - {{name: s0, type: client, org: lab}}
  - {{name: s1, type: client, org: lab}}
  - {{name: s2, type: client, org: lab}}
  - {{name: admin@lab.org, type: admin, org: lab, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config}}}}
  - {{path: nvflare.lighter.impl.cert.CertBuilder}}
  - {{path: nvflare.lighter.impl.signature.SignatureBuilder}}
"""


def provisioned(directory, port, allowed=()):
    """Startup kits, and in each what a site says once."""
    directory.mkdir()
    (directory / "project.yml").write_text(PROJECT.format(port=port))
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    kits = directory / "kits" / "loopback" / "prod_00"
    for site in ("localhost", *NAMES):
        written = carrier.prepare_kit(kits / site)
        resources = json.loads(written.read_text())
        resources["class_allow_list"] += allowed
        written.write_text(json.dumps(resources))
        (kits / site / "transfer").mkdir(exist_ok=True)
    return kits


class Deployment:
    """Processes by site, each ended by its own number."""

    def __init__(self, kits):
        self.kits, self.processes = kits, {}

    def start(self, site, kit=None):
        kit = kit or self.kits / site
        kind, uid = ("server", []) if site == "localhost" else ("client", [f"uid={site}"])
        command = [
            sys.executable,
            "-m",
            f"nvflare.private.fed.app.{kind}.{kind}_train",
            "-m",
            str(kit),
        ]
        command += [
            "-s",
            f"fed_{kind}.json",
            "--set",
            "secure_train=true",
            *uid,
            "org=lab",
            "config_folder=config",
        ]
        environment = {**os.environ, carrier.ALLOWED: ",".join(f"{SIDES}:{x}" for x in ALLOWED)}
        with (kit / "out.txt").open("a") as out:
            self.processes[site] = subprocess.Popen(
                command, cwd=kit, env=environment, stdout=out, stderr=out
            )

    def workers(self, site):
        return psutil.Process(self.processes[site].pid).children(recursive=True)

    def kill(self, site):
        """End the client and the job's process of it by SIGKILL."""
        for process in [self.processes[site], *self.workers(site)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.processes.pop(site).wait()

    def admin(self, *arguments):
        """Do the work of an admin, in a process of its own."""
        command = [sys.executable, __file__, str(self.kits / "admin@lab.org"), *map(str, arguments)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def connected(self):
        """Names of the clients that the server knows."""
        out = self.admin("clients").communicate(timeout=120)[0]
        return set(json.loads(out.splitlines()[-1]))

    def wait_for(self, expected):
        end = time.monotonic() + 120
        while (here := self.connected()) != set(expected):
            if time.monotonic() > end:
                raise AssertionError(f"connected are {here}; expected {expected}")

    def fit(self, job, disturb=None, after=12, limit=200):
        """Return a job's status and result.

        :param disturb: is called once s1 has answered some messages.
        """
        for name in NAMES:  # as the person at a site does for a new study
            shutil.rmtree(self.kits / name / "_silos", ignore_errors=True)
        end = time.monotonic() + limit
        process = self.admin("fit", job)
        try:
            next(line for line in process.stdout if line.startswith("submitted"))
            folder = carrier.silo_directory(self.kits / "s1", f"{SIDES}:make_side", "s1")
            state = folder / "state.json"
            while process.poll() is None and time.monotonic() < end:
                if (
                    disturb is not None
                    and state.exists()
                    and json.loads(state.read_text())[0] >= after
                ):
                    disturb()
                    disturb = None
                time.sleep(0.2)
            assert disturb is None
            status, folder = json.loads(process.stdout.read().splitlines()[-1])
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        result = Path(folder) / "workspace" / "result.bin"
        return status, result.read_bytes() if result.exists() else None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def administrate(kit, command, *arguments):
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    for _ in range(60):
        with contextlib.suppress(Exception):
            session = new_secure_session("admin@lab.org", kit, timeout=5)
            break
        time.sleep(1)
    if command == "clients":
        print(json.dumps([x.name for x in session.get_connected_client_list()]))
    else:
        number = session.submit_job(arguments[0])
        print("submitted", number, flush=True)
        while not (status := session.get_job_meta(number)["status"]).startswith("FINISHED"):
            time.sleep(0.3)
        print(json.dumps([status, str(session.download_job_result(number))]), flush=True)
    session.close()


if __name__ == "__main__":
    administrate(*sys.argv[1:])
