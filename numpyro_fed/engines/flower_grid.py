"""Flower in one process, which calls real ClientApps itself, for experiments and tests."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

_RAISED, _NODE_UNAVAILABLE = 2, 5  # Flower's codes of errors


class InProcessGrid(Grid):
    """Grid of ClientApps in this process, in place of SuperNodes, called one after another.

    A reply that takes longer than its message's ttl is lost.

    :param apps: the app of each node, by node or in a list, which is numbered from 1. A node that
        is removed from :attr:`apps` is dead.
    :param config: ``context.node_config`` of every node.
    """

    def __init__(
        self,
        apps: Mapping[int, ClientApp] | Sequence[ClientApp],
        config: Mapping[str, float | str] | None = None,
    ) -> None:
        self.apps = dict(apps) if isinstance(apps, Mapping) else dict(enumerate(apps, 1))
        self.config = dict(config or {})
        self._contexts: dict[int, Context] = {}
        self._replies: dict[str, Message] = {}
        self._count = itertools.count(1)
        self._run = Run.create_empty(1)
        try:
            _ = TaskIdentity.run_id
        except RuntimeError:  # this is no process of Flower's, and messages need an identity
            TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def set_run(self, run: Run) -> None:
        """Store the run, whose number becomes that of every context."""
        self._run = run

    @property
    def run(self) -> Run:
        """Run that was set, or an empty one."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to one node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are alive."""
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have the apps answer at once, one after another; return the messages' ids."""
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        number, node = str(next(self._count)), message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = number
        if node not in self.apps:
            self._replies[number] = Message(
                Error(_NODE_UNAVAILABLE, "the node is not there"), reply_to=message
            )
            return number
        context = self._contexts.setdefault(
            node, Context(self._run.run_id, node, self.config, RecordDict(), {})
        )
        start = time.monotonic()
        try:
            reply = self.apps[node](message, context)
        except Exception as exception:
            reply = Message(
                Error(_RAISED, f"{type(exception)}:<{str(exception)!r}>"), reply_to=message
            )
        if time.monotonic() - start <= message.metadata.ttl:
            self._replies[number] = reply
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each of them once."""
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to messages; a message's own ttl counts, and ``timeout`` does not."""
        return self.pull_messages(self.push_messages(messages))
