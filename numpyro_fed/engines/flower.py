"""Flower carries the messages: silos of several organizations, each behind a SuperNode of its own.

At a silo a *side* answers: ``answer(data: bytes) -> bytes``, and a ``name``. At the server
:class:`Flower` brings one message to each of some silos and their replies back. Bytes are all that
crosses, in Flower's records; nothing is pickled. :class:`InProcessGrid` takes the place of
SuperLink and SuperNodes within one process. See ``docs/flower.md`` for a deployment.
"""

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpyro_fed.engines.flower_commands import QUIET, link_command, node_command, write_app

for _key, _value in QUIET.items():
    os.environ.setdefault(_key, _value)

try:
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from numpyro_fed.engines.flower_grid import InProcessGrid
    from numpyro_fed.engines.flower_registry import UNAVAILABLE, Registry, bytes_of, records_of
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

_RAISED = 2  # Flower's code of an error: the app raised an exception
_FIRST = 1e-3  # seconds between the first looks for replies
_PAUSE = 0.5  # seconds before a silo that failed is asked again
_log = logging.getLogger(__name__)


class Side(Protocol):
    """A silo's side, which keeps what is private to it on its own disk."""

    name: str

    def answer(self, data: bytes) -> bytes:
        """The reply to a message; the same one to the same message."""
        ...


# The silo


def client_app(make_side: Callable[[Context], Side]) -> ClientApp:
    """What a SuperNode runs.

    Of an exception only the type's name is told to the server, since its words may hold values of
    rows; the words are in the silo's own log.

    :param make_side: called once in a process, with Flower's context;
        ``context.node_config["name"]`` is what the node was started with.
    """
    app, sides = ClientApp(), {}

    def side_of(context: Context) -> Side:
        if context.node_id not in sides:
            sides[context.node_id] = make_side(context)
        return sides[context.node_id]

    def guarded(
        reply: Callable[[Message, Side], RecordDict | Error],
    ) -> Callable[[Message, Context], Message]:
        def handler(message: Message, context: Context) -> Message:
            try:
                return Message(reply(message, side_of(context)), reply_to=message)
            except Exception as exception:
                _log.exception(
                    "this silo could not answer; the server is told the type of the exception alone"
                )
                return Message(Error(_RAISED, type(exception).__name__), reply_to=message)

        return handler

    def who(message: Message, side: Side) -> RecordDict:
        return records_of(side.name.encode())

    def answer(message: Message, side: Side) -> RecordDict | Error:
        meant = message.metadata.group_id
        if meant != side.name:
            return Error(_RAISED, f"message for silo {meant!r} came to silo {side.name!r}")
        return records_of(side.answer(bytes_of(message.content)))

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
    """The transport: brings messages to silos by name, and replies back.

    A silo's name is the one its node's key was registered with, or else the one that its side tells
    when it is asked.

    :param grid: Flower's, or an :class:`InProcessGrid`.
    :param names: all silos, in the order of the coordinator.
    :param timeout: seconds that an answer may take; a message that is older is not waited for.
    :param patience: a message is sent again to a silo that did not answer until so many seconds
        have passed since it was first sent.
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
        self.timeout, self.patience, self.poll = timeout, patience, poll
        #: Why silos did not answer in the last exchange.
        self.reasons: dict[str, str] = {}
        self.registry = Registry(grid, self.names, grace)
        self.registry.find(wait, poll)

    def exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """One message to each of the silos named; the replies of those that answered in time.

        :raises ValueError: for a name that is not a silo's, and when two nodes turn out to have one
            name.
        :raises RuntimeError: where the server refuses messages as too large.
        :warns UserWarning: where a silo's app failed; other silences are told by :attr:`reasons`
            alone.
        """
        strange = sorted(set(messages) - set(self.names))
        if strange:
            raise ValueError(f"there are no silos {strange}; expected some of {list(self.names)}")
        start = time.monotonic()
        end, replies = start + max(self.timeout, self.patience), dict[str, bytes]()
        sent: dict[str, tuple[str, int, float]] = {}  # message: silo, node, until when
        after = dict.fromkeys(messages, -math.inf)  # when a silo that was asked may be asked again
        self.reasons, pause = {}, _FIRST
        while (now := time.monotonic()) < end:
            last = now - start >= self.patience
            busy = {(name, node) for name, node, _ in sent.values()}
            open_ = [name for name in messages if name not in replies]
            away = [name for name in open_ if name not in self.registry.nodes]
            due = [
                n
                for n in open_
                if n not in away and (n, self.registry.nodes[n]) not in busy and after[n] <= now
            ]
            due = [n for n in due if after[n] < 0 or not last]
            self.reasons |= dict.fromkeys(away, "its node is not there")
            self._push({name: messages[name] for name in due}, sent, end)
            after |= dict.fromkeys(due, now + _PAUSE)
            self.registry.look(soon=bool(away))
            moved = self._pull(sent, replies)
            waits = {name for name, _, _ in sent.values()} - set(replies)
            if len(replies) == len(messages) or (not waits and last):
                break
            pause = _FIRST if moved else min(2 * pause, self.poll)
            time.sleep(pause)
        lost = [name for name in messages if name not in replies]
        self.reasons = {
            name: self.reasons.get(name, f"no answer in {time.monotonic() - start:.0f} s")
            for name in lost
        }
        return {name: replies[name] for name in messages if name in replies}

    def _push(
        self, messages: Mapping[str, bytes], sent: dict[str, tuple[str, int, float]], end: float
    ) -> None:
        """Send messages, all at once.

        What is the same for several silos, Flower sends to the server once.
        """
        if not messages:
            return
        now = time.monotonic()
        ttl = max(min(self.timeout, end - now), 0.5)
        whole = [
            Message(
                records_of(data), self.registry.nodes[name], "query.answer", ttl=ttl, group_id=name
            )
            for name, data in messages.items()
        ]
        numbers = list(self.grid.push_messages(whole))
        if len(numbers) < len(whole):
            raise RuntimeError(
                "the SuperLink, or a proxy before it, refused the messages as too large; expected "
                "bodies of 5 MB to be let through"
            )
        for name, number in zip(messages, numbers, strict=True):
            if number is None:  # the SuperLink does not know the node any more
                self.registry.nodes.pop(name)
                self.reasons[name] = "its node is not there"
            else:
                sent[number] = name, self.registry.nodes[name], now + ttl

    def _pull(self, sent: dict[str, tuple[str, int, float]], replies: dict[str, bytes]) -> bool:
        """Take in what has come; whether anything has."""
        waiting = [number for number, (name, _, _) in sent.items() if name not in replies]
        came = list(self.grid.pull_messages(waiting)) if waiting else []
        for message in came:
            number = message.metadata.reply_to_message_id
            if number in sent:
                name = sent.pop(number)[0]
                if message.has_error():
                    self._note(name, message.error)
                else:
                    replies[name] = bytes_of(message.content)
        now = time.monotonic()
        for number in [n for n, (_, _, until) in sent.items() if until < now]:
            name, _, _ = sent.pop(number)
            self.reasons[name] = f"no answer in {self.timeout:.0f} s"
        return bool(came)

    def _note(self, name: str, error: Error) -> None:
        """A silo's error: one of its app is told aloud."""
        if error.code in UNAVAILABLE:
            self.reasons[name] = f"no answer: {error.reason}"
            return
        self.reasons[name] = f"its app failed: {error.reason}"
        warnings.warn(f"silo {name!r} failed: {error.reason}; its own log says more", stacklevel=4)
