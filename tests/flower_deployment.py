"""A SuperLink and SuperNodes on this machine, with TLS and node authentication.

Each has a folder of its own.
"""

import datetime
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from numpyro_fed.engines.flower_commands import QUIET, link_command, node_command, write_app

HERE = Path(__file__).parent
PEM, SSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
PLAIN = serialization.NoEncryption()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def make_certificates(directory):
    """``ca.crt``, and ``server.crt`` with ``server.key`` that it signed for this machine."""
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name, key, issuer, issuer_key, authority):
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer or subject)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
            now + datetime.timedelta(days=2)
        )
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=authority, path_length=None), critical=True
        )
        return builder.sign(issuer_key, hashes.SHA256())

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = certificate("numpyro-fed test authority", ca_key, None, ca_key, True)
    own = certificate("localhost", key, ca.subject, ca_key, False)
    (directory / "ca.crt").write_bytes(ca.public_bytes(PEM))
    (directory / "server.crt").write_bytes(own.public_bytes(PEM))
    (directory / "server.key").write_bytes(
        key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN)
    )
    return directory


def make_key(path):
    """Write a node's private key, and its public one beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, PLAIN))
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(SSH, serialization.PublicFormat.OpenSSH)
    )
    return path


def environment(home):
    home.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return (
        os.environ
        | QUIET
        | {"FLWR_HOME": str(home), "PYTHONPATH": str(HERE), "PATH": path, "JAX_PLATFORMS": "cpu"}
    )


class Deployment:
    """Started on entry; on exit its processes are ended, each by its own id."""

    def __init__(self, root, names, authentication=True, lasting=False):
        self.root, self.names, self.authentication, self.lasting = (
            Path(root),
            names,
            authentication,
            lasting,
        )
        self.port, self.address = (port := free_port()), f"127.0.0.1:{port}"
        self.tls = make_certificates(self.root / "tls")
        self.started, self.nodes = [], {}

    def start(self, command, who):
        with (self.root / f"{who}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment(self.root / who), stdout=log, stderr=log, cwd=self.root
            )
        self.started.append(process)
        return process

    def __enter__(self):
        tls = {
            "certificate": self.tls / "server.crt",
            "key": self.tls / "server.key",
            "ca": self.tls / "ca.crt",
        }
        self.link = self.start(
            link_command(self.port, **tls, authentication=self.authentication), "link"
        )
        try:
            self._wait_for_link()
            if self.authentication:
                self._register()
            for name in self.names:
                self.start_node(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for_link(self, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.link.poll() is None:
            with socket.socket() as s:
                s.settimeout(1)
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError("the SuperLink did not start:\n" + (self.root / "link.log").read_text())

    def _register(self):
        own = [
            (
                name,
                self.flwr(
                    "supernode",
                    "register",
                    str(make_key(self.root / f"{name}.key").with_suffix(".pub")),
                    "link",
                    "--name",
                    name,
                ),
            )
            for name in self.names
        ]
        for name, process in own:
            out = process.communicate(timeout=60)[0]
            if process.returncode:
                raise RuntimeError(f"{name} was not registered: {out}")

    def flwr(self, *arguments):
        """Start the coordinator's command; the caller waits for its exit."""
        home = self.root / "coordinator"
        env = environment(home)
        lines = [
            "[superlink]",
            'default = "link"',
            "[superlink.link]",
            f'address = "{self.address}"',
        ]
        (home / "config.toml").write_text(
            "\n".join([*lines, f"root-certificates = {json.dumps(str(self.tls / 'ca.crt'))}", ""])
        )
        command = [str(Path(sys.executable).with_name("flwr")), *arguments]
        return subprocess.Popen(
            command,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.root,
        )

    def start_node(self, name):
        key = self.root / f"{name}.key" if self.authentication else None
        directory = str(self.root / name / "private")
        if self.lasting:
            own = [self.address, name, directory, self.tls / "ca.crt", key or ""]
            self.nodes[name] = self.start(
                [sys.executable, str(HERE / "flower_standin.py"), *map(str, own)], name
            )
            return
        command = node_command(
            self.address,
            name,
            ca=self.tls / "ca.crt",
            key=key,
            port=free_port(),
            directory=directory,
        )
        self.nodes[name] = self.start(command, name)

    def run(self, server="server", **config):
        """Have the stand-in's run started; where its result will be."""
        out = self.root / "result.json"
        out.unlink(missing_ok=True)
        settings = {
            "echo": False,
            "rounds": 3,
            "size": 0,
            "timeout": 60.0,
            "patience": 0.0,
            "wait": 120.0,
            "plan": "{}",
        }
        settings |= {"names": " ".join(self.names), "out": str(out), **config}
        app = write_app(
            self.root / "app", f"flower_standin:{server}", "flower_standin:client", settings
        )
        process = self.flwr("run", str(app), "link")
        printed = process.communicate(timeout=120)[0]
        if process.returncode:
            raise RuntimeError(f"flwr run failed: {printed}")
        return out

    def result(self, out, rounds, seconds):
        """Return the result that the run wrote after so many rounds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name in [name for name, node in self.nodes.items() if node.poll() is not None]:
                time.sleep(
                    2
                    # as a service manager would; the SuperLink takes a node back when its old
                    # heartbeats have run out
                )
                self.start_node(name)
            if out.exists() and len((done := json.loads(out.read_text()))["replies"]) >= rounds:
                return done
            time.sleep(0.1)
        logs = "\n".join(
            f"--- {p.name}\n{p.read_text()[-4000:]}" for p in sorted(self.root.glob("*.log"))
        )
        raise TimeoutError(f"no {rounds} rounds in {seconds} s\n{logs}")

    def __exit__(self, *_):
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
