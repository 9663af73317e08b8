"""Flower carries the messages: silos of several organisations, each behind a SuperNode of its own.

At a silo a *side* answers: ``answer(data: bytes) -> bytes``, and a ``name``. At the server :class:`Flower` brings one message to each of some
silos and their replies back. Bytes are all that crosses, in Flower's records; nothing is pickled. :class:`InProcessGrid` takes the place of
SuperLink and SuperNodes within one process. See ``docs/flower.md`` for a deployment.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpyro_fed.engines.flower_commands import QUIET, link_command, node_command, write_app

for _key, _value in QUIET.items():
    os.environ.setdefault(_key, _value)

try:
    from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from numpyro_fed.engines.flower_grid import InProcessGrid
except ImportError as error:
    raise ImportError('Flower is not installed; pip install "numpyro-fed[flower]"') from error

__all__ = [
    "QUIET",
    "Flower",
    "InProcessGrid",
    "Side",
    "client_app",
    "link_command",
    "node_command",
    "server_app",
    "write_app",
]

_RAISED, _UNAVAILABLE = 2, (3, 4, 5)  # Flower's codes: the app raised an exception; message, reply or node is not there
_PIECE = 4 << 20  # bytes of a message that are sent as one object
_FIRST = 1e-3  # seconds between the first looks for replies
_LOOK = 1.0  # seconds between looks for nodes that are new or gone
_PAUSE = 0.5  # seconds before a silo that failed is asked again
_log = logging.getLogger(__name__)


class Side(Protocol):
    """A silo's side, which keeps what is private to it on its own disk."""

    name: str

    def answer(self, data: bytes) -> bytes:
        """The reply to a message; the same one to the same message."""
        ...


def _records(data: bytes) -> RecordDict:
    pieces = range(0, max(len(data), 1), _PIECE)
    return RecordDict({f"{i:06}": ConfigRecord({"bytes": data[k : k + _PIECE]}) for i, k in enumerate(pieces)})


def _bytes(content: RecordDict) -> bytes:
    return b"".join(content.config_records[key]["bytes"] for key in sorted(content.config_records))


# The silo


def client_app(make_side: Callable[[Context], Side]) -> ClientApp:
    """What a SuperNode runs.

    Of an exception only the type's name is told to the server, since its words may hold values of rows; the words are in the silo's own log.

    :param make_side: called once in a process, with Flower's context; ``context.node_config["name"]`` is what the node was started with.
    """
    app, sides = ClientApp(), {}

    def side_of(context: Context) -> Side:
        if context.node_id not in sides:
            sides[context.node_id] = make_side(context)
        return sides[context.node_id]

    def guarded(reply: Callable[[Message, Side], RecordDict | Error]) -> Callable[[Message, Context], Message]:
        def handler(message: Message, context: Context) -> Message:
            try:
                return Message(reply(message, side_of(context)), reply_to=message)
            except Exception as exception:
                _log.exception("this silo could not answer; the server is told the type of the exception alone")
                return Message(Error(_RAISED, type(exception).__name__), reply_to=message)

        return handler

    def who(message: Message, side: Side) -> RecordDict:
        return _records(side.name.encode())

    def answer(message: Message, side: Side) -> RecordDict | Error:
        meant = message.metadata.group_id
        if meant != side.name:
            return Error(_RAISED, f"message for silo {meant!r} came to silo {side.name!r}")
        return _records(side.answer(_bytes(message.content)))

    app.query("who")(guarded(who))
    app.query("answer")(guarded(answer))
    return app


# The server


def server_app(run: Callable[[Grid, Context], Any]) -> ServerApp:
    """What SuperLink runs: ``run(grid, context)``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, context)

    return app


class Flower:
    """The messenger: brings messages to silos by name, and replies back.

    A silo's name is the one its node's key was registered with, or else the one that its side tells when it is asked.

    :param grid: Flower's, or an :class:`InProcessGrid`.
    :param names: all silos, in the order of the coordinator.
    :param timeout: seconds that an answer may take; a message that is older is not waited for.
    :param patience: a message is sent again to a silo that did not answer until so many seconds have passed since it was first sent.
    :param wait: seconds that silos have to appear in.
    :param grace: seconds that a node has to tell its name in, also where another one claims it.
    :param poll: most seconds between looks for replies.
    :raises TimeoutError: naming the silos that did not appear.
    :raises ValueError: for a silo that is not among ``names``, and two nodes with one name.
    """

    def __init__(
        self,
        grid: Grid,
        names: Sequence[str],
        *,
        timeout: float = 600.0,
        patience: float = 0.0,
        wait: float = 120.0,
        grace: float = 30.0,
        poll: float = 0.1,
    ) -> None:
        self.grid, self.names = grid, tuple(names)
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ValueError(f"names={list(self.names)}; expected each name once, and at least one")
        self.timeout, self.patience, self.grace, self.poll = timeout, patience, grace, poll
        #: Why silos did not answer in the last exchange.
        self.reasons: dict[str, str] = {}
        self._nodes: dict[str, int] = {}
        self._claims: dict[str, int] = {}  # nodes with a name that another node has
        self._strangers: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._asked: dict[str, tuple[int, float]] = {}  # who are you: message, node, until when
        self._silent: dict[int, float] = {}  # nodes that did not tell, and when they are asked again
        self._looked = -_LOOK
        self._find(wait)

    def exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """One message to each of the silos named; the replies of those that answered in time.

        :raises ValueError: for a name that is not a silo's, and when two nodes turn out to have one name.
        :warns UserWarning: where a silo's app failed; other silences are told by :attr:`reasons` alone.
        """
        strange = sorted(set(messages) - set(self.names))
        if strange:
            raise ValueError(f"there are no silos {strange}; expected some of {list(self.names)}")
        start = time.monotonic()
        end, replies = start + max(self.timeout, self.patience), dict[str, bytes]()
        sent: dict[str, tuple[str, int, float]] = {}  # message: silo, node, until when
        after = dict.fromkeys(messages, start)  # when a silo may be asked (again)
        self.reasons, pause = {}, _FIRST
        while (now := time.monotonic()) < end:
            busy = {(name, node) for name, node, _ in sent.values()}
            due = [n for n in messages if n not in replies and self._due(n, after[n], busy, now, start)]
            self._push({n: messages[n] for n in due}, sent, end)
            after |= dict.fromkeys(due, now + _PAUSE)
            self._look()
            moved = self._pull(sent, replies)
            waits = {name for name, _, _ in sent.values()} - set(replies)
            if len(replies) == len(messages) or (not waits and now - start >= self.patience):
                break
            pause = _FIRST if moved else min(2 * pause, self.poll)
            time.sleep(pause)
        lost = [name for name in messages if name not in replies]
        self.reasons = {name: self.reasons.get(name, f"no answer in {time.monotonic() - start:.0f} s") for name in lost}
        return {name: replies[name] for name in messages if name in replies}

    def _due(self, name: str, after: float, busy: set[tuple[str, int]], now: float, start: float) -> bool:
        """Whether a silo is to be asked now: the first time, and again as long as patience lasts."""
        if name not in self._nodes:
            self.reasons[name], self._looked = "its node is not there", min(self._looked, now - _LOOK / 2)
            return False
        return (
            (name, self._nodes[name]) not in busy and now >= after and (after == start or now - start < self.patience)
        )

    def _push(self, messages: Mapping[str, bytes], sent: dict[str, tuple[str, int, float]], end: float) -> None:
        """Send messages, all at once: what is the same for several silos, Flower sends to the server once."""
        if not messages:
            return
        now = time.monotonic()
        ttl = max(min(self.timeout, end - now), 0.5)
        whole = [
            Message(_records(data), self._nodes[name], "query.answer", ttl=ttl, group_id=name)
            for name, data in messages.items()
        ]
        for name, number in zip(messages, self.grid.push_messages(whole), strict=True):
            if number is None:  # the SuperLink does not know the node any more
                self._nodes.pop(name)
                self.reasons[name] = "its node is not there"
            else:
                sent[number] = name, self._nodes[name], now + ttl

    def _pull(self, sent: dict[str, tuple[str, int, float]], replies: dict[str, bytes]) -> bool:
        """Take in what has come; whether anything has."""
        waiting = [number for number, (name, _, _) in sent.items() if name not in replies]
        came = list(self.grid.pull_messages([*waiting, *self._asked])) if waiting or self._asked else []
        for message in came:
            number = message.metadata.reply_to_message_id
            if number in self._asked:
                self._told(self._asked.pop(number)[0], message)
            elif number in sent:
                name = sent.pop(number)[0]
                if message.has_error():
                    self._note(name, message.error)
                else:
                    replies[name] = _bytes(message.content)
        now = time.monotonic()
        for number in [n for n, (_, _, until) in sent.items() if until < now]:
            name, _, _ = sent.pop(number)
            self.reasons[name] = f"no answer in {self.timeout:.0f} s"
        for number in [n for n, (_, until) in self._asked.items() if until < now]:
            self._told(self._asked.pop(number)[0], None)
        return bool(came)

    def _note(self, name: str, error: Error) -> None:
        """A silo's error: one of its app is told aloud."""
        if error.code in _UNAVAILABLE:
            self.reasons[name] = f"no answer: {error.reason}"
            return
        self.reasons[name] = f"its app failed: {error.reason}"
        warnings.warn(f"silo {name!r} failed: {error.reason}; its own log says more", stacklevel=4)

    # Which node is which silo

    def _find(self, wait: float) -> None:
        end = time.monotonic() + wait
        while len(self._nodes) < len(self.names) or not {n for n, _ in self._asked.values()} <= set(self._silent):
            self._look()
            moved = self._pull({}, {})
            missing = [name for name in self.names if name not in self._nodes]
            if self._strangers:
                strange = sorted(set(self._strangers.values()))
                raise ValueError(
                    f"silos {strange} are unknown here; expected {list(self.names)}"
                    + f", of which {missing} are missing" * bool(missing)
                )
            if time.monotonic() > end and missing:
                failed = "".join(f"; node {node} failed: {reason}" for node, reason in self._failed.items())
                raise TimeoutError(
                    f"silos {missing} did not appear in {wait:.0f} s; there are {sorted(self._nodes)}{failed}; "
                    "expected a SuperNode of each to be up"
                )
            time.sleep(_FIRST if moved else self.poll)

    def _look(self) -> None:
        """Ask nodes that are new for their names, and forget those that are gone."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        there = {node.node_id: node.name for node in self.grid.get_nodes()}
        self._nodes = {name: node for name, node in self._nodes.items() if node in there}
        for name in [n for n, node in self._claims.items() if n not in self._nodes or node not in there]:
            node = self._claims.pop(name)
            if node in there:
                self._nodes[name] = node
        known = {*self._nodes.values(), *self._claims.values(), *self._strangers, *(n for n, _ in self._asked.values())}
        for node, name in there.items():
            if node not in known and name in self.names:
                self._claim(node, name)
            elif node not in known and now >= self._silent.get(node, now):
                self._ask(node)

    def _ask(self, node: int) -> None:
        question = Message(_records(b""), node, "query.who", ttl=self.grace)
        for number in self.grid.push_messages([question]):
            if number is not None:
                self._asked[number] = node, time.monotonic() + self.grace

    def _told(self, node: int, message: Message | None) -> None:
        """A node has told its name, or has not."""
        if message is not None and not message.has_error():
            self._failed.pop(node, None)
            self._silent.pop(node, None)
            self._claim(node, _bytes(message.content).decode())
            return
        self._silent[node] = time.monotonic() + self.grace / 3
        if message is not None and message.error.code not in _UNAVAILABLE:
            self._failed[node] = str(message.error.reason)
        for name in [n for n in self._claims if self._nodes.get(n) == node]:
            self._nodes[name] = self._claims.pop(name)  # the old one is silent: the new one takes its place

    def _claim(self, node: int, name: str) -> None:
        if name not in self.names:
            self._strangers[node] = name
            if len(self._nodes) == len(self.names):
                warnings.warn(
                    f"silo {name!r} is unknown here, and not asked; expected {list(self.names)}", stacklevel=5
                )
        elif self._nodes.setdefault(name, node) == node:
            if name in self._claims:
                raise ValueError(
                    f"two nodes are silo {name!r}: {node} and {self._claims[name]}; expected one node for each silo"
                )
        elif name not in self._claims:
            self._claims[name] = node
            self._ask(self._nodes[name])
