"""Flower: what crosses, who is who, and silos that are late, fail, die and come back.

Also a real deployment on this machine.
"""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from flower_deployment import Deployment, environment, free_port, make_certificates, make_key
from flower_standin import Hashing, message
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable import inflatable_object

from numpyro_fed.engines import flower_node, flower_registry
from numpyro_fed.engines.flower import (
    Flower,
    InProcessGrid,
    client_app,
    node_command,
    server_app,
    write_app,
)

NAMES = ("oslo", "rome", "bern")


class Echo:
    """Side that answers with its name and the message, which may ask for an error or a delay."""

    def __init__(self, name, does=lambda: None):
        self.name, self.does = name, does

    def answer(self, data):
        self.does()
        return self.name.encode() + b":" + data


def echo(name, does=lambda: None):
    return client_app(lambda context: Echo(name, does))


def hashing(directory, name):
    return client_app(lambda context: Hashing(name, directory))


class Listening(InProcessGrid):
    """Keeps what crosses."""

    def __init__(self, apps):
        super().__init__(apps)
        self.crossed = []

    def push_messages(self, messages):
        messages = list(messages)
        self.crossed += [m.content for m in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        came = super().pull_messages(message_ids)
        self.crossed += [m.error.reason if m.has_error() else m.content for m in came]
        return came


def up(names=NAMES, **settings):
    grid = Listening([echo(name) for name in names])
    return grid, Flower(grid, names, wait=5, **settings)


# What crosses


@pytest.mark.parametrize(
    "size", [0, 1, 400, flower_registry._PIECE, 2 * flower_registry._PIECE + 17]
)
def test_bytes_come_back_as_they_were(size):
    data = os.urandom(size)
    _, transport = up()
    assert transport.exchange(dict.fromkeys(NAMES, data)) == {
        name: name.encode() + b":" + data for name in NAMES
    }


def test_order_is_the_coordinators_and_only_the_named_are_asked():
    grid, transport = up()
    transport = Flower(grid, ["rome", "bern", "oslo"], wait=5)
    assert transport.names == ("rome", "bern", "oslo")
    assert transport.exchange({"bern": b"1", "rome": b"2"}) == {
        "bern": b"bern:1",
        "rome": b"rome:2",
    }
    assert transport.exchange({}) == {}


def test_nothing_but_bytes_crosses():
    grid, transport = up()
    transport.exchange(dict.fromkeys(NAMES, b"round"))
    assert len(grid.crossed) == 12  # questions for names, messages, and the replies to both
    for content in grid.crossed:
        assert isinstance(content, RecordDict)
        for record in content.values():
            assert isinstance(record, ConfigRecord)
            assert {key: type(value) for key, value in record.items()} == {"bytes": bytes}


# Who is who


def test_a_name_that_is_no_silos_is_refused():
    _, transport = up()
    with pytest.raises(
        ValueError, match=r"no silos \['paris'\]; expected some of \['oslo', 'rome', 'bern'\]"
    ):
        transport.exchange({"paris": b""})


@pytest.mark.parametrize("names", [(), ("oslo", "oslo")])
def test_names_are_given_once(names):
    with pytest.raises(ValueError, match="expected each name once"):
        Flower(InProcessGrid([]), names)


def test_a_silo_that_the_coordinator_does_not_know_is_refused():
    grid = InProcessGrid([echo("olso"), echo("rome")])
    with pytest.raises(
        ValueError,
        match=r"\['olso'\] are unknown here; expected \['oslo', 'rome'\], of which \['oslo'\]",
    ):
        Flower(grid, ["oslo", "rome"], wait=5)


def test_two_nodes_with_one_name_are_refused():
    grid = InProcessGrid([echo("oslo"), echo("rome"), echo("oslo")])
    with pytest.raises(ValueError, match="two nodes are silo 'oslo': 1 and 3"):
        Flower(grid, ["oslo", "rome"], wait=5)


def test_silos_that_do_not_appear_are_named():
    names, told = ["bern", "oslo", "rome"], []
    with pytest.raises(
        TimeoutError, match=r"\['bern', 'rome'\] did not appear in 0 s; there are \['oslo'\]"
    ):
        Flower(InProcessGrid([echo("oslo")]), names, wait=0.3, waiting=told.append)
    assert told[-1] == ["bern", "rome"]


def test_a_silo_that_is_silent_for_long_is_named_and_when_it_answers():
    class Slow(InProcessGrid):
        """The second silo's replies come late."""

        late = None

        def pull_messages(self, message_ids):
            came = list(super().pull_messages(message_ids))
            if self.late is None:  # before the exchange
                return came
            self.held = [*getattr(self, "held", []), *came]
            waits = time.monotonic() < self.late
            out = [m for m in self.held if not waits or m.metadata.src_node_id != 2]
            self.held = [m for m in self.held if m not in out]
            return out

    grid, told = Slow([echo("oslo"), echo("rome")]), []
    transport = Flower(grid, ["oslo", "rome"], wait=5, waiting=told.append, silence=0.1)
    assert told[-1] == []
    grid.late = time.monotonic() + 0.5
    before = len(told)
    assert set(transport.exchange({"oslo": b"", "rome": b""})) == {"oslo", "rome"}
    assert told[before:] == [["rome (connected, computing)"], []]


def test_a_silo_that_cannot_start_is_told_by_the_type_of_its_error_alone():
    def broken(context):
        raise KeyError("patient 17")

    with pytest.raises(TimeoutError, match="node 1 failed: KeyError") as caught:
        Flower(InProcessGrid([client_app(broken)]), ["oslo"], wait=0.3)
    assert "patient" not in str(caught.value)


def test_a_silo_may_appear_late():
    grid, began = InProcessGrid([echo("oslo")]), time.monotonic()

    class Late(InProcessGrid):
        def get_node_ids(self):
            if time.monotonic() - began > 0.3:
                self.apps[2] = echo("rome")
            return super().get_node_ids()

    grid = Late([echo("oslo")])
    assert Flower(grid, ["oslo", "rome"], wait=10).exchange({"rome": b""}) == {"rome": b"rome:"}


def test_a_stranger_that_comes_later_is_told_and_not_asked():
    grid, transport = up()
    grid.apps[9] = echo("paris")
    transport.registry._looked -= 9
    with pytest.warns(UserWarning, match="silo 'paris' is unknown here, and not asked"):
        transport.exchange(dict.fromkeys(NAMES, b""))
    assert len(transport.exchange(dict.fromkeys(NAMES, b""))) == 3


def test_a_second_node_of_a_name_that_comes_later_is_refused():
    grid, transport = up()
    grid.apps[9] = echo("rome")
    transport.registry._looked -= 9
    transport.exchange(
        dict.fromkeys(NAMES, b"")
    )  # the new node is asked for its name, then the old one for its own
    with pytest.raises(ValueError, match="two nodes are silo 'rome': 2 and 9"):
        transport.exchange(dict.fromkeys(NAMES, b""))


def test_a_name_that_the_node_was_registered_with_is_not_asked_for():
    class Registered(Listening):
        def get_nodes(self):
            return [
                type("NodeInfo", (), {"node_id": n, "name": name})
                for n, name in enumerate(NAMES, 1)
            ]

    grid = Registered([echo(name) for name in NAMES])
    transport = Flower(grid, NAMES, wait=5)
    assert not grid.crossed
    assert transport.exchange({"rome": b""}) == {"rome": b"rome:"}


class Registered(InProcessGrid):
    """SuperLink whose nodes have the names that their keys were registered under."""

    def __init__(self, apps, registered):
        super().__init__(apps)
        self.registered = registered

    def get_nodes(self):
        return [type("NodeInfo", (), {"node_id": n, "name": self.registered[n]}) for n in self.apps]


def test_a_node_with_another_registered_name_is_not_believed():
    """It said that it was a silo, and its answers counted as that silo's."""
    names = {1: "rome", 2: "bergen"}
    with pytest.raises(ValueError, match=r"\['bergen'\] are unknown here; .*\['oslo'\]"):
        Flower(Registered({1: echo("rome"), 2: echo("oslo")}, names), ["oslo", "rome"], wait=5)
    grid = Registered({1: echo("rome"), 2: echo("oslo")}, dict.fromkeys(names, ""))
    assert Flower(grid, ["oslo", "rome"], wait=5).registry.nodes["oslo"] == 2  # the control


def test_a_node_without_a_registered_name_takes_no_silos_place():
    """It told a silo's name before that silo appeared, and its answers counted."""
    grid = Registered({1: echo("rome"), 2: echo("oslo")}, {1: "rome", 2: ""})
    with pytest.raises(TimeoutError, match=r"\['oslo'\] did not .* node 2 failed: it has no "):
        Flower(grid, ["oslo", "rome"], wait=0.1)
    grid = Registered({1: echo("rome"), 2: echo("oslo")}, {1: "", 2: "", 3: "oslo"})
    transport = Flower(grid, ["oslo", "rome"], wait=5)
    grid.apps[3] = echo("oslo")
    transport.registry._looked -= 9
    assert not transport.exchange({"oslo": b""})  # the reply of node 2, which was asked
    assert transport.exchange({"oslo": b""}) == {"oslo": b"oslo:"}
    assert transport.registry.nodes == {"oslo": 3}


NO_BYTES = {
    "another name": RecordDict({"000000": ConfigRecord({"x": b""})}),
    "a text": RecordDict({"000000": ConfigRecord({"bytes": "text"})}),
    "a number": RecordDict({"000000": MetricRecord({"bytes": 1.0})}),
    "nothing": RecordDict(),
}


@pytest.mark.parametrize("content", NO_BYTES.values(), ids=NO_BYTES)
def test_a_reply_that_is_no_bytes_is_a_missing_one(content):
    grid, transport = up()
    grid.apps[2] = lambda message, context: Message(content, reply_to=message)
    with pytest.warns(UserWarning, match="silo 'rome' failed: its message has other content"):
        assert set(transport.exchange(dict.fromkeys(NAMES, b""))) == {"oslo", "bern"}
    assert "other content than bytes" in transport.reasons["rome"]


@pytest.mark.parametrize(
    "content", [NO_BYTES["another name"], flower_registry.records_of(b"\xff\xfe")]
)
def test_a_node_whose_name_is_none_ends_no_run(content):
    grid, transport = up()
    grid.apps[9] = lambda message, context: Message(content, reply_to=message)
    transport.registry._looked -= 9
    for _ in range(2):
        assert len(transport.exchange(dict.fromkeys(NAMES, b""))) == 3
    assert set(transport.registry.failed) == {9}


def test_pieces_are_counted_before_they_are_joined(monkeypatch):
    """One object under many names took 4 MiB on the wire, and any memory."""
    monkeypatch.setattr(flower_registry, "MAX_MESSAGE", 1000)
    piece = ConfigRecord({"bytes": bytes(100)})
    content = {n: RecordDict({str(i): piece for i in range(n)}) for n in (10, 11)}
    assert len(flower_registry.bytes_of(content[10])) == 1000
    with pytest.raises(ValueError, match="a message of 1,100 bytes; expected at most 1,000"):
        flower_registry.bytes_of(content[11])


def test_words_of_a_silo_do_not_command_the_terminal():
    grid, transport = up()
    grid.apps[2] = lambda message, context: Message(Error(2, "\x1b[2J done"), reply_to=message)
    with pytest.warns(UserWarning, match="its own log says more") as warned:
        transport.exchange({"rome": b""})
    assert "[2J done" in str(warned[0].message)
    assert "\x1b" not in str(warned[0].message) + transport.reasons["rome"]


def told_by_a_node(kind):
    """Return a node's replies to one message, after which the node went on."""
    up()  # so that this process has an identity of Flower's
    head = Message(RecordDict(), 1, kind, ttl=60)
    head.metadata.__dict__["_message_id"] = head.object_id
    tree = inflatable_object.get_object_tree(head)
    objects = {k: x.deflate() for k, x in inflatable_object.get_all_nested_objects(head).items()}
    came, sent = [(head, tree)], []

    def receive():
        if not came:
            raise ConnectionError("no further message")
        return came.pop()

    def send(reply, tree, seconds):
        sent.append(reply)
        return [], 0

    def pull(run, number):
        return objects[number]

    def done(*args):
        return None

    connection = (1, receive, send, None, None, pull, done, done)
    with pytest.raises(ConnectionError, match="no further message"):
        flower_node._answer(echo("oslo"), connection, {"name": "oslo"}, 0.01)
    return [reply.error.reason if reply.has_error() else "answered" for reply in sent]


@pytest.mark.parametrize("kind", ["train", "query.other"])
def test_a_message_of_no_known_kind_does_not_end_a_node(kind):
    assert told_by_a_node(kind) == ["ValueError"]


def test_a_node_stays_when_the_server_is_started_anew(tmp_path, monkeypatch):
    """Flower's own node ends with Ctrl-C where the new server does not know it (401)."""
    from flwr.proto.fleet_pb2 import ActivateNodeResponse
    from flwr.supernode.fleet_http_client import FleetHttpClient

    asked = []

    def answer(client, *, path, request, **_):
        asked.append(path.rpartition("/")[2])
        if asked.count("activate-node") == 3:
            raise RuntimeError("that is enough")
        if asked[-1] == "activate-node":
            return ActivateNodeResponse(node_id=1)
        if asked[-1] == "pull-messages" and "send-node-heartbeat" not in asked:
            time.sleep(0.2)  # so that a heartbeat is refused first
        where = httpx.Request("POST", "https://there")
        raise httpx.HTTPStatusError("401", request=where, response=httpx.Response(401))

    monkeypatch.setattr(FleetHttpClient, "_unary_unary", answer)
    tls, key = make_certificates(tmp_path / "tls"), make_key(tmp_path / "oslo.key")
    with pytest.raises(ConnectionError, match="that is enough"):
        flower_node.serve(echo("oslo"), "127.0.0.1:1", "oslo", ca=tls / "ca.crt", key=key)
    assert asked.count("pull-messages") == 2
    assert "send-node-heartbeat" in asked


def test_a_proxy_without_a_coordinator_is_spoken_of(tmp_path, monkeypatch):
    from flwr.supernode.fleet_http_client import FleetHttpClient

    def answer(client, *, path, request, **_):
        httpx.Response(502, request=httpx.Request("POST", "https://there")).raise_for_status()

    monkeypatch.setattr(FleetHttpClient, "_unary_unary", answer)
    tls, key = make_certificates(tmp_path / "tls"), make_key(tmp_path / "oslo.key")
    with pytest.raises(ConnectionError, match=r"(?s)its study is over .*502 Bad Gateway"):
        flower_node.serve(
            echo("oslo"), "127.0.0.1:1", "oslo", ca=tls / "ca.crt", key=key, give_up=0.1
        )


def unreachable(monkeypatch, words):
    """Have all requests fail; return the list of their paths."""
    from flwr.supernode.fleet_http_client import FleetHttpClient

    asked = []

    def fail(client, *, path, request, **_):
        asked.append(path)
        raise httpx.ConnectError(words)

    monkeypatch.setattr(FleetHttpClient, "_unary_unary", fail)
    return asked


def test_a_silo_waits_longer_for_its_coordinator_than_for_one_connection(tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, "refused")
    monkeypatch.setattr(flower_node, "_ATTEMPT", 0.01)
    tls, key = make_certificates(tmp_path / "tls"), make_key(tmp_path / "oslo.key")
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=r"no coordinator at 127\.0\.0\.1:1 for 1 s"):
        flower_node.serve(
            echo("oslo"), "127.0.0.1:1", "oslo", ca=tls / "ca.crt", key=key, give_up=1.0
        )
    assert time.monotonic() - start >= 1.0
    assert len(asked) > 3


def test_another_authority_is_said_at_once(tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, "certificate verify failed")
    tls, key = make_certificates(tmp_path / "tls"), make_key(tmp_path / "oslo.key")
    with pytest.raises(ConnectionError, match=r"ca\.crt did not sign the certificate of 127"):
        flower_node.serve(
            echo("oslo"), "127.0.0.1:1", "oslo", ca=tls / "ca.crt", key=key, give_up=100.0
        )
    assert len(asked) == 1


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    key = make_key(tmp_path / "oslo.key")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert flower_node.fingerprint(key) == shown
    assert flower_node.fingerprint(key.with_suffix(".pub")) == shown


def test_a_farewell_reaches_the_silos_that_it_is_for():
    said = []

    def app(name):
        return client_app(lambda _: Echo(name), lambda words: said.append((name, words)))

    transport = Flower(InProcessGrid([app("oslo"), app("rome")]), ["oslo", "rome"], wait=5)
    transport.farewell("it is over", ["rome"])
    assert said == [("rome", "it is over")]
    transport.farewell("nobody", [])
    assert len(said) == 1


def test_a_failed_run_tells_its_reason_to_the_silo_at_fault_alone():
    from numpyro_fed.cli.coordinator import _farewell

    said = []

    class Transport:
        def farewell(self, words, to):
            said.extend((name, words) for name in to)

    _farewell(Transport(), ["oslo", "rome"], "silo 'rome' has another model")
    assert said == [
        ("oslo", "the run has failed"),
        ("rome", "the run has failed: silo 'rome' has another model"),
    ]


def test_a_message_for_another_silo_is_not_answered():
    _, transport = up()
    transport.registry.nodes["oslo"], transport.registry.nodes["rome"] = (
        transport.registry.nodes["rome"],
        transport.registry.nodes["oslo"],
    )
    with pytest.warns(UserWarning, match="message for silo 'oslo' came to silo 'rome'"):
        assert transport.exchange({"oslo": b""}) == {}


# Silos that are late, fail, die and come back


def test_a_late_reply_is_a_missing_one():
    grid = InProcessGrid([echo("oslo"), echo("rome", lambda: time.sleep(0.8))])
    transport = Flower(grid, ["oslo", "rome"], wait=5, timeout=0.5)
    assert transport.exchange({"oslo": b"", "rome": b""}) == {"oslo": b"oslo:"}
    assert set(transport.reasons) == {"rome"}
    assert "no answer" in transport.reasons["rome"]


def test_an_exception_in_a_silo_is_a_missing_reply_and_its_words_stay_there(tmp_path, caplog):
    grid = Listening([hashing(tmp_path, "oslo"), hashing(tmp_path, "rome")])
    transport = Flower(grid, ["oslo", "rome"], wait=5)
    data = message(0, b"x", do="raise", **{"for": "rome"})
    with (
        pytest.warns(UserWarning, match="silo 'rome' failed: ValueError"),
        caplog.at_level(logging.ERROR),
    ):
        assert set(transport.exchange({"oslo": data, "rome": data})) == {"oslo"}
    assert transport.reasons == {"rome": "its app failed: ValueError"}
    assert "ValueError" in grid.crossed
    assert "37.25" not in repr(grid.crossed)
    assert "37.25" in caplog.text  # the control: the silo's own log has it


def replies_of(directory, rounds=4, disturb=None, restart=None, **settings):
    """Return the last replies of some rounds, one of which may be disturbed."""
    grid = InProcessGrid([hashing(directory, name) for name in NAMES])
    transport = Flower(grid, NAMES, wait=5, **settings)
    for number in range(rounds):
        what = disturb if number == 2 and disturb else {}
        got = transport.exchange(dict.fromkeys(NAMES, message(number, b"round", **what)))
        if number == 1 and restart:
            restart(grid)
    return got


@pytest.mark.filterwarnings("ignore:silo 'rome' failed")
def test_a_silo_that_failed_is_asked_again_while_patience_lasts(tmp_path):
    expected = replies_of(tmp_path / "a")
    once = {"do": "raise", "for": "rome"}
    assert replies_of(tmp_path / "b", disturb=once, patience=10) == expected
    assert replies_of(tmp_path / "c", disturb=once) != expected  # the control: the round was lost


def test_a_late_reply_is_asked_for_again_while_patience_lasts(tmp_path):
    late = {"do": "sleep", "seconds": 0.8, "for": "rome"}
    assert replies_of(tmp_path / "b", disturb=late, timeout=0.5, patience=10) == replies_of(
        tmp_path / "a"
    )


def test_a_node_that_comes_back_as_another_goes_on(tmp_path):
    def restart(grid):
        grid.apps[7] = hashing(tmp_path / "b", "rome")
        del grid.apps[2]

    assert replies_of(tmp_path / "b", restart=restart, patience=10) == replies_of(tmp_path / "a")


def test_a_new_node_takes_the_place_of_one_that_is_silent():
    grid = InProcessGrid([echo("oslo"), echo("rome")])
    transport = Flower(grid, ["oslo", "rome"], wait=5, timeout=0.5, patience=20, grace=0.2)
    grid.apps[2] = echo("rome", lambda: time.sleep(0.6))
    grid._contexts.clear()

    def silent(message, context):
        time.sleep(0.6)
        return old(message, context)

    old, grid.apps[2], grid.apps[3] = grid.apps[2], silent, echo("rome")
    assert transport.exchange({"oslo": b"", "rome": b""}) == {"oslo": b"oslo:", "rome": b"rome:"}
    assert transport.registry.nodes["rome"] == 3


def test_a_dead_node_is_a_missing_reply_at_once():
    grid, transport = up()
    del grid.apps[2]
    start = time.monotonic()
    assert set(transport.exchange(dict.fromkeys(NAMES, b""))) == {"oslo", "bern"}
    assert time.monotonic() - start < 5  # of a timeout of ten minutes
    assert "not there" in transport.reasons["rome"]
    assert set(transport.exchange(dict.fromkeys(NAMES, b""))) == {"oslo", "bern"}


def test_messages_that_the_server_refuses_are_an_error():
    grid, transport = up()
    grid.push_messages = lambda messages: []  # as Flower's does where a body is too large
    with pytest.raises(RuntimeError, match="refused the messages as too large"):
        transport.exchange({"oslo": b""})


# Apps and commands


def test_a_side_is_made_once():
    made = []
    app = client_app(lambda context: made.append(context.node_config["site"]) or Echo("oslo"))
    transport = Flower(InProcessGrid([app], {"site": 3}), ["oslo"], wait=5)
    for _ in range(3):
        transport.exchange({"oslo": b""})
    assert made == [3]


def test_server_app_runs_with_grid_and_context():
    seen = []
    grid, context = InProcessGrid([]), Context(1, 1, {}, RecordDict(), {"rounds": 3})
    server_app(lambda *x: seen.append(x))(grid, context)
    assert seen == [(grid, context)]


def test_grid_is_flowers():
    grid = InProcessGrid([echo("oslo")])
    assert [node.node_id for node in grid.get_nodes()] == [1]
    sent = grid.create_message(
        RecordDict({"0": ConfigRecord({"bytes": b"a"})}), "query.answer", 1, "oslo"
    )
    (reply,) = grid.send_and_receive([sent])
    assert flower_registry.bytes_of(reply.content) == b"oslo:a"
    unknown = grid.create_message(RecordDict(), "train", 1, "")
    assert "No train function" in next(iter(grid.send_and_receive([unknown]))).error.reason
    run = grid.run
    grid.set_run(run)
    assert grid.run is run


def test_without_flower_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "numpyro_fed.engines.flower")
    with pytest.raises(ImportError, match=r'pip install "numpyro-fed\[flower\]"'):
        importlib.import_module("numpyro_fed.engines.flower")


def test_flower_is_quiet():
    code = (
        "import numpyro_fed.engines.flower, flwr.supercore.telemetry as t; "
        "print(t.FLWR_TELEMETRY_ENABLED)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout
        == "0\n"
    )


def test_app_folder_is_one_that_flower_takes(tmp_path):
    from flwr.cli.config_utils import load_and_validate

    config = {"rounds": 3, "words": 'a "b"', "echo": True, "size": 1.5}
    app = write_app(tmp_path / "app", "flower_standin:server", "flower_standin:client", config)
    read, notes = load_and_validate(app / "pyproject.toml", check_module=False)
    assert read["tool"]["flwr"]["app"]["config"] == config
    assert not notes
    assert [p.name for p in app.iterdir()] == ["pyproject.toml"]
    assert tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"][
        "clientapp"
    ]


def test_node_command_says_what_flower_reads():
    from flwr.common.config import parse_config_args

    command = node_command(
        "host:1", "oslo", ca=Path("ca.crt"), key=Path("oslo.key"), site=3, folder="a b"
    )
    pairs = command[command.index("--node-config") + 1]
    assert parse_config_args([pairs]) == {"name": "oslo", "site": 3, "folder": "a b"}


# A real deployment


def start_node(lasting, tmp_path, address, ca, key=None):
    """Run a node that ends; return its exit code, and its output."""
    if lasting:
        own = [address, "oslo", str(tmp_path / "private"), str(ca), str(key or "")]
        command = [sys.executable, str(Path(__file__).parents[1] / "flower_standin.py"), *own]
    else:
        command = node_command(address, "oslo", ca=ca, key=key, port=free_port(), give_up=3)
    # to a file: a SuperNode's own child holds a pipe open for as long as nobody has noticed that
    # the SuperNode ended
    with (tmp_path / "said.log").open("w+") as said:
        ended = subprocess.run(
            command, env=environment(tmp_path / "oslo"), stdout=said, stderr=said, timeout=120
        )
        said.seek(0)
        return ended.returncode, said.read()


KINDS_OF_NODE = pytest.mark.parametrize("lasting", [True, False], ids=["lasting node", "SuperNode"])


@pytest.mark.ci
@KINDS_OF_NODE
def test_killed_and_started_again_a_node_loses_nothing(tmp_path, lasting):
    expected = replies_of(tmp_path / "undisturbed")
    plan = {"2": {"do": "sleep", "seconds": 6, "for": "rome"}}
    with Deployment(tmp_path / "deployed", NAMES, lasting=lasting) as deployed:
        out = deployed.run(rounds=4, timeout=40.0, patience=400.0, plan=json.dumps(plan))
        begun = deployed.root / "rome" / "private" / "rome.2"
        end = time.monotonic() + 300
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.05)
        node = deployed.nodes["rome"]
        os.kill(node.pid, signal.SIGKILL)  # and it is started again while the result is waited for
        result = deployed.result(out, 4, 400)
    assert [set(r) for r in result["replies"]] == [set(NAMES)] * 4
    assert {name: x.encode() for name, x in result["replies"][-1].items()} == expected
    assert max(result["seconds"]) == result["seconds"][2] > 6


@pytest.mark.ci
@KINDS_OF_NODE
def test_a_node_that_is_not_to_be_let_in_ends_in_words(tmp_path, lasting):
    other = make_certificates(tmp_path / "other") / "ca.crt"
    with Deployment(tmp_path / "deployed", []) as deployed:
        trusted = deployed.tls / "ca.crt"
        code, said = start_node(
            lasting, tmp_path, deployed.address, other, make_key(tmp_path / "a.key")
        )
        assert code == 1
        assert "certificate verify failed" in said.lower()
        code, said = start_node(
            lasting, tmp_path, deployed.address, trusted, make_key(tmp_path / "b.key")
        )
        assert code == 1
        assert "Failed to activate SuperNode" in said  # its key is not registered
        code, said = start_node(lasting, tmp_path, deployed.address, trusted)
        assert code == 1
        assert "must be registered" in said  # it has none


@pytest.mark.ci
@KINDS_OF_NODE
def test_a_server_that_does_not_answer_ends_a_node_that_is_to_give_up(tmp_path, lasting):
    ca = make_certificates(tmp_path / "tls") / "ca.crt"
    code, said = start_node(lasting, tmp_path, f"127.0.0.1:{free_port()}", ca)
    assert code == 1
    assert "Failed to initialize the connection to the SuperLink" in said
