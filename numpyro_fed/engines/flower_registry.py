"""Registry of silos and their nodes in Flower.

A node is known by the name under which its key was registered. Without one, it is asked for its
name, unless other nodes have one.
"""

import time
import warnings
from collections.abc import Callable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from numpyro_fed.engines.limits import MAX_MESSAGE
from numpyro_fed.engines.side import printable

RAISED = 2  # Flower's code of an error: the app raised an exception
UNAVAILABLE = (3, 4, 5)  # Flower's codes of errors: a message, a reply or a node is not there
_PIECE = 4 << 20  # bytes of a message in one object
_LOOK = 1.0  # seconds between looks for nodes that are new or gone


def records_of(data: bytes) -> RecordDict:
    """Return bytes as the content of a Flower message."""
    pieces = range(0, max(len(data), 1), _PIECE)
    return RecordDict(
        {f"{i:06}": ConfigRecord({"bytes": data[k : k + _PIECE]}) for i, k in enumerate(pieces)}
    )


def bytes_of(content: RecordDict) -> bytes:
    """Return the bytes that :func:`records_of` put into a message.

    :raises ValueError: for other content, and for bytes above the limit, before they are joined.
    """
    records = content.config_records
    pieces = [x for key in sorted(records) if isinstance(x := records[key].get("bytes"), bytes)]
    if not pieces or len(pieces) < len(content):
        raise ValueError("its message has other content than bytes")
    size = sum(map(len, pieces))
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size:,} bytes; expected at most {MAX_MESSAGE:,}")
    return b"".join(pieces)


class Registry:
    """Registry of nodes by silo; :meth:`look` brings it up to date.

    :param grid: Flower's grid.
    :param names: names of all silos.
    :param grace: time in which a node has to tell its name, in seconds. If another node claims a
        silo's name, the registry asks the silo's node again, which keeps the name if it answers.
    """

    def __init__(self, grid: Grid, names: Sequence[str], grace: float) -> None:
        self.grid, self.names, self.grace = grid, names, grace
        #: The node of each silo that is there.
        self.nodes: dict[str, int] = {}
        #: Errors of nodes that did not tell their names.
        self.failed: dict[int, str] = {}
        #: Nodes without a registered name, where others have one.
        self.nameless: set[int] = set()
        #: Names of nodes that are no silos.
        self.strangers: dict[int, str] = {}
        self._claims: dict[str, int] = {}  # second nodes that claim a silo's name
        self._asked: dict[str, tuple[int, float]] = {}  # questions: node, and the time limit
        self._silent: dict[int, float] = {}  # nodes without an answer: time of the next question
        self._looked = -_LOOK

    def find(
        self, wait: float, poll: float, waiting: Callable[[list[str]], object] | None = None
    ) -> None:
        """Wait for all silos.

        :param waiting: called with the names of silos that are not there yet, when these change.

        :raises TimeoutError: naming those that did not appear.
        :raises ValueError: for a silo that is not among ``names``, and two nodes with one name.
        """
        end, told = time.monotonic() + wait, None
        while len(self.nodes) < len(self.names) or not {n for n, _ in self._asked.values()} <= set(
            self._silent
        ):
            moved = self.look()
            missing = [name for name in self.names if name not in self.nodes]
            if waiting is not None and missing != told:
                waiting(missing)
                told = missing
            if self.strangers:
                strange = sorted(set(self.strangers.values()))
                which = f", of which {missing} are missing" * bool(missing)
                raise ValueError(
                    f"silos {strange} are unknown here; expected {list(self.names)}{which}"
                )
            if time.monotonic() > end and missing:
                nameless = dict.fromkeys(
                    self.nameless, "it has no registered name; others have one"
                )
                failed = "".join(
                    f"; node {node} failed: {reason}"
                    for node, reason in (self.failed | nameless).items()
                )
                raise TimeoutError(
                    f"silos {missing} did not appear in {wait:.0f} s; there are "
                    f"{sorted(self.nodes)}{failed}; "
                    "expected a node of each to be up"
                )
            time.sleep(0.0 if moved else poll)

    def look(self, soon: bool = False) -> bool:
        """Take in answers, list the nodes once a second, and return whether answers came.

        :param soon: whether to list the nodes twice a second.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK / (1 + soon):
            self._looked = now
            self._list(now)
        came = list(self.grid.pull_messages(list(self._asked))) if self._asked else []
        for message in came:
            asked = self._asked.pop(message.metadata.reply_to_message_id, None)
            if asked is not None and asked[0] not in self.nameless:
                self._told(asked[0], message)
        for number in [n for n, (_, until) in self._asked.items() if until < now]:
            self._told(self._asked.pop(number)[0], None)
        return bool(came)

    def _list(self, now: float) -> None:
        """Ask nodes that are new for their names, and forget those that are gone."""
        there = {node.node_id: node.name for node in self.grid.get_nodes()}
        self.nameless = (
            {n for n, name in there.items() if not name} if any(there.values()) else set()
        )
        self.strangers = {n: s for n, s in self.strangers.items() if n not in self.nameless}
        there = {node: name for node, name in there.items() if node not in self.nameless}
        self.nodes = {name: node for name, node in self.nodes.items() if node in there}
        for name in [
            n for n, node in self._claims.items() if n not in self.nodes or node not in there
        ]:
            node = self._claims.pop(name)
            if node in there:
                self.nodes[name] = node
        asked = {node for node, _ in self._asked.values()}
        known = {*self.nodes.values(), *self._claims.values(), *self.strangers, *asked}
        for node, name in there.items():
            if node not in known and name:
                self._claim(node, name)
            elif node not in known and now >= self._silent.get(node, now):
                self._ask(node)

    def _ask(self, node: int) -> None:
        for number in self.grid.push_messages(
            [Message(records_of(b""), node, "query.who", ttl=self.grace)]
        ):
            if number is not None:
                self._asked[number] = node, time.monotonic() + self.grace

    def _told(self, node: int, message: Message | None) -> None:
        """Enter the name that a node told; ``None`` stands for a node that told none in time."""
        failed = None
        if message is not None and message.has_error():
            if message.error.code not in UNAVAILABLE:
                failed = printable(message.error.reason)
        elif message is not None:
            try:
                name = bytes_of(message.content).decode()
            except ValueError as error:  # also a text that is no UTF-8
                failed = str(error)
            else:
                self.failed.pop(node, None)
                self._silent.pop(node, None)
                self._claim(node, name)
                return
        self._silent[node] = time.monotonic() + self.grace / 3
        if failed is not None:
            self.failed[node] = failed
        for name in [n for n in self._claims if self.nodes.get(n) == node]:
            self.nodes[name] = self._claims.pop(
                name
            )  # the old node is silent, so the new one takes its place

    def _claim(self, node: int, name: str) -> None:
        if name not in self.names:
            self.strangers[node] = name
            if len(self.nodes) == len(self.names):
                known = list(self.names)
                warnings.warn(
                    f"silo {name!r} is unknown here, and not asked; expected {known}", stacklevel=2
                )
        elif self.nodes.setdefault(name, node) == node:
            if name in self._claims:
                both = f"{node} and {self._claims[name]}"
                raise ValueError(
                    f"two nodes are silo {name!r}: {both}; expected one node for each silo"
                )
        elif name not in self._claims:
            self._claims[name] = node
            self._ask(self.nodes[name])
