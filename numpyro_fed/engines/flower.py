"""Flower as the transport: silos of several organizations, each with its own SuperNode.

At a silo a *side* answers: an object with a ``name`` and ``answer(data: bytes) -> bytes``. At the
server :class:`Flower` brings one message to each silo and the replies back. Bytes alone cross, in
Flower's records; nothing is pickled. :class:`InProcessGrid` takes the place of SuperLink and
SuperNodes within one process. See ``docs/flower.md`` for a deployment.
"""

import logging
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from numpyro_fed.engines.flower_commands import QUIET, link_command, node_command, write_app
from numpyro_fed.engines.side import Side, not_importable, printable

for _key, _value in QUIET.items():
    os.environ.setdefault(_key, _value)

try:
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from numpyro_fed.engines.flower_grid import InProcessGrid
    from numpyro_fed.engines.flower_registry import (
        RAISED,
        UNAVAILABLE,
        Registry,
        bytes_of,
        records_of,
    )
except ImportError as error:
    raise not_importable("Flower", "flwr", "flower", error) from error

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

_FIRST = 1e-3  # seconds between the first looks for replies
_PAUSE = 0.5  # seconds before a silo that failed is asked again
_log = logging.getLogger(__name__)


# The silo


def client_app(
    make_side: Callable[[Context], Side], heard: Callable[[str], object] | None = None
) -> ClientApp:
    """Return the app that a SuperNode runs.

    If the side raises an exception, the server receives the name of its type alone. Its text may
    hold values of rows, and goes to the silo's own log.

    :param make_side: a function of Flower's context, called once in a process;
        ``context.node_config["name"]`` is the name with which the node was started.
    :param heard: called with the server's words at the end of its run (:meth:`Flower.farewell`).
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
                return Message(Error(RAISED, type(exception).__name__), reply_to=message)

        return handler

    def who(message: Message, side: Side) -> RecordDict:
        return records_of(side.name.encode())

    def answer(message: Message, side: Side) -> RecordDict | Error:
        meant = message.metadata.group_id
        if meant != side.name:
            return Error(RAISED, f"message for silo {meant!r} came to silo {side.name!r}")
        return records_of(side.answer(bytes_of(message.content)))

    def over(message: Message, side: Side) -> RecordDict:
        if heard is not None:
            heard(printable(bytes_of(message.content).decode(errors="replace")))
        return records_of(b"")

    app.query("who")(guarded(who))
    app.query("over")(guarded(over))
    app.query("answer")(guarded(answer))
    return app


# The server


def server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """Return the app that a SuperLink runs, which calls ``run(grid, context)``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, context)

    return app


class Flower:
    """Transport over Flower: messages to silos by name, and replies back.

    A silo's name is the one under which its node's key was registered. If no node has one, the
    transport asks the nodes' sides for their names.

    :param grid: Flower's grid, or an :class:`InProcessGrid`.
    :param names: names of all silos, in the coordinator's order.
    :param timeout: longest time for one reply, in seconds.
    :param patience: time in which a silent silo is sent its message again, in seconds from the
        first time.
    :param wait: time in which all silos have to appear, in seconds.
    :param grace: time in which a node has to tell its name, in seconds, also if another node claims
        the same name.
    :param poll: longest time between two looks for replies, in seconds.
    :param waiting: called with the names of silos that are not there yet, or do not answer,
        whenever these change. Of one that is connected it says so.
    :param silence: time after which a silo that does not answer is named, in seconds.
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
        waiting: Callable[[list[str]], object] | None = None,
        silence: float = 30.0,
    ) -> None:
        self.grid, self.names = grid, tuple(names)
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ValueError(f"names={list(self.names)}; expected each name once, and at least one")
        self.timeout, self.patience, self.poll = timeout, patience, poll
        #: Reasons for which silos did not answer in the last exchange, by name.
        self.reasons: dict[str, str] = {}
        self.waiting, self.silence, self._told = waiting, silence, dict[str, str]()
        self._telling = threading.Lock()
        self.registry = Registry(grid, self.names, grace)
        self.registry.find(wait, poll, waiting)

    def exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """Send one message to each silo in ``messages``, and return the replies that came in time.

        :param messages: the message to each silo, by name.
        :raises ValueError: for a name that is not a silo's, and two nodes with one name.
        :raises RuntimeError: if the SuperLink refuses the messages as too large.
        :warns UserWarning: if a silo's app failed. :attr:`reasons` has the reasons of all silos
            that did not answer.
        """
        strange = sorted(set(messages) - set(self.names))
        if strange:
            raise ValueError(f"there are no silos {strange}; expected some of {list(self.names)}")
        start = time.monotonic()
        end, replies = start + max(self.timeout, self.patience), dict[str, bytes]()
        sent: dict[str, tuple[str, int, float]] = {}  # message: silo, node, until when
        after = dict.fromkeys(messages, -math.inf)  # when a silo that was asked may be asked again
        self.reasons, pause = {}, _FIRST
        with self._watched(messages, replies):
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
                self._tell(messages, replies, now - start)
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

    def farewell(self, words: str, to: Sequence[str], wait: float = 5.0) -> None:
        """Tell silos in words that the run is over, and wait a little for their receipts."""
        nodes = {name: node for name, node in self.registry.nodes.items() if name in to}
        told = [
            Message(records_of(words.encode()), node, "query.over", ttl=wait, group_id=name)
            for name, node in nodes.items()
        ]
        left = {n for n in self.grid.push_messages(told) if n is not None} if told else set()
        end = time.monotonic() + wait
        while left and time.monotonic() < end:
            left -= {m.metadata.reply_to_message_id for m in self.grid.pull_messages(list(left))}
            time.sleep(self.poll)

    @contextmanager
    def _watched(
        self, messages: Mapping[str, bytes], replies: Mapping[str, bytes]
    ) -> Iterator[None]:
        """Say who is silent, also while Flower waits for an upload that a killed silo began."""
        watch = threading.Timer(self.silence, self._tell, (messages, replies, math.inf))
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _tell(
        self, messages: Mapping[str, bytes], replies: Mapping[str, bytes], seconds: float
    ) -> None:
        """Say which silos do not answer for long, and when they do again."""
        with self._telling:  # two threads do
            silent = {n for n in messages if n not in replies} if seconds > self.silence else set()
            named = {
                name: f"{name} (connected, computing)" if name in self.registry.nodes else name
                for name in sorted((silent | set(self._told)) - set(replies))
            }
            if self.waiting is not None and named != self._told:
                self.waiting(list(named.values()))
                self._told = named

    def _push(
        self, messages: Mapping[str, bytes], sent: dict[str, tuple[str, int, float]], end: float
    ) -> None:
        """Send messages to their silos all at once; Flower uploads equal parts once."""
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
            if number is None:  # the SuperLink no longer knows the node
                self.registry.nodes.pop(name)
                self.reasons[name] = "its node is not there"
            else:
                sent[number] = name, self.registry.nodes[name], now + ttl

    def _pull(self, sent: dict[str, tuple[str, int, float]], replies: dict[str, bytes]) -> bool:
        """Take in the replies that have come, and return whether there were any."""
        waiting = [number for number, (name, _, _) in sent.items() if name not in replies]
        came = list(self.grid.pull_messages(waiting)) if waiting else []
        for message in came:
            number = message.metadata.reply_to_message_id
            if number in sent:
                name, node, _ = sent.pop(number)
                if node in self.registry.nameless:
                    continue
                if message.has_error():
                    self._note(name, message.error)
                else:
                    try:
                        replies[name] = bytes_of(message.content)
                    except ValueError as error:
                        self._note(name, Error(RAISED, str(error)))
        now = time.monotonic()
        for number in [n for n, (_, _, until) in sent.items() if until < now]:
            name, _, _ = sent.pop(number)
            self.reasons[name] = f"no answer in {self.timeout:.0f} s"
        return bool(came)

    def _note(self, name: str, error: Error) -> None:
        """Write down the reason of a silo's error, and warn if its app failed."""
        reason = printable(error.reason)
        if error.code in UNAVAILABLE:
            self.reasons[name] = f"no answer: {reason}"
            return
        self.reasons[name] = f"its app failed: {reason}"
        warnings.warn(f"silo {name!r} failed: {reason}; its own log says more", stacklevel=4)
