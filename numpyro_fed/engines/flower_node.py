"""Node of a silo in one lasting process, in place of Flower's SuperNode.

Flower's SuperNode starts a process for every message, and runs in it the objects that the
coordinator's app names. This node speaks to the SuperLink by the same protocol and with the same
keys, but its own app answers in this process. Data, compiled programs and latents stay in memory,
and the coordinator's app is never fetched. The node uses parts of Flower outside its public
interface; therefore the versions of Flower are pinned.
"""

import base64
import hashlib
import logging
import math
import os
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from numpyro_fed.engines.flower import ClientApp, Context, Error, Message, RecordDict
from numpyro_fed.engines.flower_commands import exit_at_sigterm
from numpyro_fed.engines.flower_registry import RAISED
from numpyro_fed.engines.side import not_importable

try:
    import httpx
    from flwr.supercore import heartbeat
    from flwr.supercore.inflatable import inflatable_object, inflatable_utils
    from flwr.supercore.retry import http_retry
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import fleet_http_connection
except ImportError as error:
    raise not_importable("Flower", "flwr", "flower", error) from error

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from flwr.proto.message_pb2 import ObjectTree

# the key is not registered, or the server still counts on a former process of the node
_NOT_IN = "[code: 2004]"
_NO_SERVER = (502, 503, 504)  # of a proxy that has no server to pass messages to
# seconds that this may last, and seconds between attempts
_EXPIRES, _AGAIN = 150.0, 5.0
_NOT_YET = (
    "the coordinator does not let this silo in yet: it is still starting, or still counts on a "
    "former process of this silo, for two minutes or so. If this goes on, it has no public key%s "
    "as %s.pub in its --keys. Trying again"
)
_ATTEMPT = 60.0  # longest time of one connection without the server, in seconds
# seconds between heartbeats, the fewest that the server allows: it misses a dead process after two
_HEARTBEAT = 10
_log = logging.getLogger(__name__)


def serve(
    app: ClientApp,
    server: str,
    name: str,
    *,
    ca: str | Path,
    key: str | Path | None = None,
    poll: float = 0.25,
    give_up: float | None = None,
    **config: float | str,
) -> None:
    """Answer messages until the process ends.

    :param app: app of the silo, from :func:`~numpyro_fed.engines.flower.client_app`.
    :param server: address of the SuperLink, ``host:port``.
    :param name: name of the silo, for ``context.node_config["name"]``.
    :param ca: certificate of the authority that signed the server's, in PEM.
    :param key: private key of this node, in OpenSSH's format. Without a key the server has to let
        in nodes that are not registered.
    :param poll: longest time between two questions for messages, in seconds.
    :param give_up: longest time for which the server may be away, or may not let this node in, in
        seconds. By default the node waits for the server forever. The server then has 150 s to
        notice that a former process of this node was killed.
    :param config: further entries of ``context.node_config``.
    :raises ConnectionError: if the server does not answer, does not let this node in, or shows a
        certificate that ``ca`` did not sign.
    :raises ValueError: for files that are no certificate and no key.
    """
    # Flower's own functions end the process
    fleet_http_connection.flwr_exit = _refused
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = _HEARTBEAT
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = _HEARTBEAT
    fleet_http_connection.os = http_retry.os = SimpleNamespace(getpid=os.getpid, kill=_unknown)
    exit_at_sigterm(0)  # leaves the connection, which tells the server
    _calm_flower()
    keys, patience = None if key is None else _keys(key), _EXPIRES if give_up is None else give_up
    signed_by = _certificate(ca)
    own = "" if key is None else f" {fingerprint(key)}"
    each = None if give_up is None else min(give_up, _ATTEMPT)
    refused = away = math.inf  # since when the server does not let this node in, or is away
    while True:
        began = time.monotonic()
        try:
            with fleet_http_connection.http_request_response(
                server, False, signed_by, keys, None, each
            ) as connection:
                refused = away = math.inf
                _answer(app, connection, {"name": name, **config}, poll)
        except ConnectionError as error:
            if any(word in str(error).lower() for word in ("certificate", "ssl", "tls")):
                raise ConnectionError(
                    f"{ca} did not sign the certificate of {server}, or it is for another address; "
                    f"expected the ca.crt that the coordinator has now ({error})"
                ) from error
            if give_up is not None and _is_away(error):
                away = min(away, began)
                if time.monotonic() - away < give_up:
                    continue
                raise ConnectionError(
                    f"no coordinator at {server} for {give_up:.0f} s: it was not started, or its "
                    f"study is over ({error})"
                ) from error
            if _NOT_IN not in str(error):
                raise
            refused = min(refused, time.monotonic())
            if time.monotonic() - refused > patience:
                raise ConnectionError(
                    f"the server has not let silo {name!r} in for {patience:.0f} s; expected its "
                    f"public key{own} to be registered there, as {name}.pub in the coordinator's "
                    f"--keys, and no other process with this key: {error}"
                ) from error
            _log.warning(_NOT_YET, own, name)
            time.sleep(_AGAIN)


def fingerprint(key: str | Path) -> str:
    """Return the fingerprint of a key as ``ssh-keygen -lf`` prints it.

    :param key: file of a private key, or of a public one whose name ends with ``.pub``.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if Path(key).suffix == ".pub":
        line = Path(key).read_bytes()
    else:
        line = _keys(key)[1].public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _is_away(error: ConnectionError) -> bool:
    """Return whether nobody answered, and not somebody with a refusal."""
    why = error.__cause__
    if isinstance(why, httpx.HTTPStatusError):
        return why.response.status_code in _NO_SERVER
    return isinstance(why, httpx.TransportError)


def _calm_flower() -> None:
    """Have Flower say once in plain words, and without colors, that the server does not answer."""
    away: list[bool] = []

    def once(record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if text.startswith("Connection successful"):
            record.msg, record.args = "the coordinator answers again", ()
            away.clear()
        elif text.startswith("Connection attempt failed, retrying"):
            record.msg, record.args = "the coordinator does not answer; trying again", ()
            away.append(True)
            return len(away) == 1
        # `serve` says when it gives up
        return not (
            isinstance(record.msg, httpx.HTTPError) or text.startswith(("Giving up", "SSL/TLS"))
        )

    for handler in logging.getLogger("flwr").handlers:
        handler.addFilter(once)
        handler.colored = sys.stderr.isatty()  # type: ignore[attr-defined]


def _refused(code: int, message: str | None = None, *_: object, **__: object) -> None:
    raise ConnectionError(f"{message} (Flower's exit code {code})") from sys.exc_info()[1]


def _unknown(*_: int) -> None:
    """End a connection, and not the process, where the server does not know the node anymore."""
    raise heartbeat.HeartbeatFailure("the server was started anew; this node connects to it again")


def _answer(app: ClientApp, connection: tuple, config: dict[str, float | str], poll: float) -> None:
    node, receive, send, _, _, pull, push, confirm = connection
    _log.info("silo %s is node %s", config["name"], node)
    contexts: dict[int, Context] = {}
    pause = poll / 64
    while True:
        try:
            got = receive()
            if got is None:
                pause = min(2 * pause, poll)
                time.sleep(pause)
                continue
            head, tree = got
            run, pause = head.metadata.run_id, poll / 64
            context = contexts.setdefault(run, Context(run, node, config, RecordDict(), {}))
            start = time.monotonic()
            try:
                reply = app(_whole(head, tree, pull, confirm), context)
            except (ConnectionError, RunNotRunningException):
                raise
            except Exception as error:  # a message of no known kind must not end the node
                _log.exception("a message could not be answered")
                head.metadata.__dict__["_message_id"] = tree.object_id
                reply = Message(Error(RAISED, type(error).__name__), reply_to=head)
            _send(reply, time.monotonic() - start, send, push)
        except RunNotRunningException:
            _log.warning("the run has ended; its message is not answered")


def _certificate(path: str | Path) -> bytes:
    data = Path(path).read_bytes()
    try:
        ssl.create_default_context(cadata=data.decode())
    except (ValueError, ssl.SSLError) as error:
        raise ValueError(f"{path}: expected a certificate in PEM ({error})") from error
    return data


def _keys(path: str | Path) -> "tuple[EllipticCurvePrivateKey, EllipticCurvePublicKey]":
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(Path(path).read_bytes(), None)
    except (ValueError, TypeError) as error:  # a TypeError: it has a password
        raise ValueError(
            f"{path}: expected a private key in OpenSSH's format, without a password ({error})"
        ) from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError(
            f"{path}: expected a private key on an elliptic curve, as ssh-keygen -t ecdsa makes it"
        )
    return key, key.public_key()


def _whole(head: Message, tree: "ObjectTree", pull: Callable, confirm: Callable) -> Message:
    run = head.metadata.run_id
    # a message shows before all of it is at the server, and Flower's first wait is a second by
    # default
    whole = inflatable_utils.pull_and_inflate_object_from_tree(
        tree,
        lambda number: pull(run, number),
        lambda number: confirm(run, number),
        return_type=Message,
        max_tries_per_object=None,
        max_time=_EXPIRES,
        initial_backoff=0.02,
        backoff_cap=1.0,
    )
    whole.metadata.__dict__["_message_id"] = tree.object_id
    return whole


def _send(reply: Message, seconds: float, send: Callable, push: Callable) -> None:
    run = reply.metadata.run_id
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with inflatable_object.no_object_id_recompute():
        tree, objects = (
            inflatable_object.get_object_tree(reply),
            inflatable_object.get_all_nested_objects(reply),
        )
        wanted, session = send(reply, tree, seconds)
        inflatable_utils.push_objects(
            objects,
            lambda number, content: push(run, session, number, content),
            object_ids_to_push=wanted,
        )
