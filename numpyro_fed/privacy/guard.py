"""Guard of a silo's replies in a fit with privacy or with secure sums.

The guard decides which calls the silo answers and how often, and adds noise and masks to the
replies. It knows a call by two hashes, and both include the silos of the fit. The *label* is a hash
of the call, its message, and the labels of the calls that led to its state. The *digest* is a hash
of the call, its message, and the numbers in its state.

The same call from any server has the same reply, with the same noise and masks. A call with another
label or digest is another round of the budget. If the same call gives other numbers than the first
time, the silo refuses it: the difference of the two replies would have no noise. This happens on
another machine, or on a device that adds in random order.

Masks come from the label: the masks of silos with different messages do not cancel. The silo does
not use the server's keys. It draws by keys from its secret and the label (with privacy also the
digest), so that no two sums differ in one silo's draws alone.
"""

import hashlib
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.privacy.differential import Privacy
from numpyro_fed.privacy.own_keys import hashed, with_own_keys
from numpyro_fed.privacy.secure_sum import FEWEST_SILOS, MOST_SILOS, Keys, masked
from numpyro_fed.rounds.files import write_whole
from numpyro_fed.rounds.serialization import pack
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.rounds.worker import Call

_INIT, _ROUND, _ESTIMATE = "InitLocal", "RoundLocal", "EstimateLocal"


class Ticket(NamedTuple):
    """Names and secrets of a call that the silo answers.

    :param label: label of its masks; empty for a call with an empty reply.
    :param drawn: hash from which its keys and noise come.
    :param noise: 32 secret bytes for its noise.
    """

    label: str
    drawn: str
    noise: bytes


class Guarded(Protocol):
    """Variational fit, by what its guard has to know."""

    @property
    def privacy(self) -> Privacy | None: ...

    @property
    def secure_sum(self) -> bool: ...


class RoundGuard:
    """Guard of a silo for one fit.

    It has these files in the silo's folder:

    * ``secret.key``, of which the secret is a hash;
    * ``joined.txt``, a hash of the silos of the fit;
    * ``answered.txt``, a line with label and digest of each round that the silo answered;
    * ``sent.txt``, a line with the label (with privacy: a hash of label and digest) and a hash of
      the reply's numbers;
    * ``history.txt``, for each slot the label of the call that wrote it.

    :param folder: folder of the silo.
    :param name: name of the silo.
    :param fit: the fit, with ``privacy`` or ``secure_sum``.
    :param secret: the silo's secret of noise and keys, 32 bytes.
    """

    def __init__(self, folder: Path, name: str, fit: Guarded, secret: bytes) -> None:
        self.folder, self.name, self.secret = folder, name, secret
        self.privacy, self.sums = fit.privacy, fit.secure_sum
        self.keys = Keys(folder, name, secret) if self.sums else None
        self.shared: dict[str, bytes] = {}
        self.roster = ""
        self.histories = dict(self._lines("history.txt"))

    @property
    def allowed(self) -> tuple[str, ...]:
        """Kinds of call that the silo answers."""
        return (_INIT, _ROUND) if self.privacy is not None else (_INIT, _ROUND, _ESTIMATE)

    def join(self, names: tuple[str, ...], roster: bytes) -> None:
        """Fix the silos of the fit, and the masks' keys with them.

        An error leaves the guard as it was.

        :param names: names of all silos.
        :param roster: the facts about all silos, as bytes.
        :raises ValueError: if the silos are too few, differ from the first time, or lack public
            keys.
        """
        if len(set(names)) != len(names):
            raise ValueError(f"expected each silo's name once, got {list(names)}")
        shared, told = self.shared, hashed(roster)
        if self.keys is not None:
            if not FEWEST_SILOS <= len(names) <= MOST_SILOS:
                raise ValueError(
                    f"secure_sum with {len(names)} silos; expected {FEWEST_SILOS} to {MOST_SILOS}: "
                    "with two, each would learn the other's numbers"
                )
            shared = self.keys.shared(names)
        place = self.folder / "joined.txt"
        with self._alone():
            if not place.exists():
                write_whole(place, f"{told}\n".encode())
        if place.read_text().strip() != told:
            raise ValueError(
                f"it has joined a fit of other silos, or of other sizes, than {list(names)}; "
                "expected the same as the first time, because two sums over different silos would "
                "tell more than either; a new folder is a new consent"
            )
        self.shared, self.roster = shared, told

    def admit(
        self, call: Call, own: dict[str, Hashable], state: PyTree, independent: bool | None
    ) -> tuple[Call, Ticket]:
        """Return the call with the silo's keys in place of the server's, and its ticket.

        :param own: objects that :func:`~numpyro_fed.rounds.serialization.pack` writes as names.
        :param state: the state that the call starts from.
        :param independent: whether the fit treats elements as independent.
        :raises ValueError: for other kinds of call, a spent budget, and a second use of a slot or
            of a sum.
        """
        kind = call.local.wire_name
        self._check(call)
        if kind == _ROUND:  # noise is added here, whatever the server asks for
            bare = replace(call.local, bare=self.privacy is not None)  # type: ignore[type-var]
            call = call._replace(local=bare)
        told = pack((call.local, call.message, independent), own)
        led = [self.histories[str(slot)].encode() for slot in jax.tree.leaves(call.read)]
        label = hashed(self.roster.encode(), told, *led)
        digest = hashed(self.roster.encode(), told, pack(state))
        with self._alone():
            self.histories = dict(self._lines("history.txt"))
            before = self.histories.get(str(call.write))
            if before not in (
                None,
                label,
            ):  # a second call that failed would leave the first one's state a false history
                raise ValueError(
                    f"slot {call.write} is another call's; expected each slot to be written once"
                )
            if kind != _INIT:
                self._count(label, digest)
            if call.write is not None and before is None:  # a refused call writes nothing
                self.histories[str(call.write)] = label
                self._append("history.txt", str(call.write), label)
        if kind == _INIT:
            return call, Ticket("", "", b"")
        drawn = self._drawn(label, digest)
        call = with_own_keys(call, self.secret, drawn)
        noise = hashlib.sha256(self.secret + b"noise" + drawn.encode()).digest()
        return call, Ticket(label, drawn, noise)

    def _check(self, call: Call) -> None:
        """Raise a ``ValueError`` for a call that no such fit makes."""
        kind = call.local.wire_name
        if kind not in self.allowed:
            what = "with privacy" if self.privacy is not None else "with secure sums"
            raise ValueError(
                f"it takes part in a fit {what}, and does not answer {kind}; expected calls of its "
                "rounds"
            )
        real = jnp.result_type(float)
        types = [
            x.dtype
            for x in jax.tree.leaves(call.message)
            if isinstance(x, Array | np.generic | np.ndarray)
        ]
        odd = {str(x) for x in types if jnp.issubdtype(x, jnp.floating)} - {str(real)}
        if odd:
            raise ValueError(
                f"it is told numbers of type {sorted(odd)}; expected {real}, in which noise "
                "is drawn"
            )
        slots = [*jax.tree.leaves(call.read), *([] if call.write is None else [call.write])]
        odd_slots = [slot for slot in slots if type(slot) is not int or slot < 0]
        if odd_slots:
            raise ValueError(f"its slots are {odd_slots}; expected whole numbers >= 0")
        unknown = [slot for slot in jax.tree.leaves(call.read) if str(slot) not in self.histories]
        if unknown:
            raise ValueError(
                f"it has no record of the calls that led to the states {unknown}; expected states "
                "of this fit"
            )

    def _drawn(self, label: str, digest: str) -> str:
        """Return the hash from which noise and draws come: the label, with privacy also the digest.

        By the digest alone, two histories that lead to the same state would have the same noise.
        Equal replies would then reveal that the states are equal.
        """
        return label if self.privacy is None else hashed(label.encode(), digest.encode())

    def _count(self, label: str, digest: str) -> None:
        """Write down a round before the silo answers it, or raise a ``ValueError``."""
        answered = list(self._lines("answered.txt"))
        noted = {self._drawn(*pair) for pair in answered}
        if any(drawn not in noted for drawn, _ in self._lines("sent.txt")):
            raise ValueError(
                "its answered.txt lacks rounds that its sent.txt has: some of it was lost; "
                "expected the folder as it was, or a new one, which is a new consent"
            )
        if (label, digest) in answered:
            return
        if self.sums and label in dict(answered):
            raise ValueError(
                "it was asked for this sum before, from another state; expected each sum to be "
                "asked for once"
            )
        spent = len(set(answered))
        if self.privacy is not None and spent >= self.privacy.num_rounds:
            raise ValueError(
                f"its budget of privacy is spent: it has answered {spent} rounds, expected at most "
                f"{self.privacy.num_rounds}"
            )
        self._append("answered.txt", label, digest)

    def let_out(self, local: SiloTask, reply: PyTree, ticket: Ticket) -> list[np.ndarray]:
        """Return a reply's arrays with noise and masks, as they leave the silo.

        Replies leave by this method alone.

        :param local: the call's task.
        :raises ValueError: if the same call had another reply before.
        """
        leaves = [np.asarray(x) for x in jax.tree.leaves(reply)]
        if not ticket.label:
            return leaves
        types = [x.dtype for x in leaves]
        if self.privacy is not None:
            leaves = [np.asarray(x) for x in jax.tree.leaves(local.private(reply, ticket.noise))]
        told = hashed(self.secret, *(x.tobytes() for x in leaves))
        with self._alone():
            before = dict(self._lines("sent.txt")).get(ticket.drawn)
            if before not in (None, told):
                raise ValueError(
                    "the same call has other numbers than the first time, with the same noise or "
                    "masks; expected the machine and versions of the first time: connect anew, and "
                    "start the fit again"
                )
            if before is None:
                self._append("sent.txt", ticket.drawn, told)
        if self.sums:  # in float64, which holds whole units of the grid exactly
            return masked(leaves, self.name, self.shared, ticket.label.encode(), self.secret)
        return [x.astype(dtype) for x, dtype in zip(leaves, types, strict=True)]

    def _lines(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the pairs of words in a file's lines, and skip lines that were cut off.

        The silo answered nothing after it wrote part of a line.
        """
        place = self.folder / name
        for line in place.read_text().splitlines() if place.exists() else ():
            words = line.split()
            if len(words) == 2 and len(words[1]) == 64:
                yield words[0], words[1]

    def _append(self, name: str, *words: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write("\n" + " ".join(words) + "\n")  # the last line may be cut off
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the silo's files for this process alone."""
        import fcntl

        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
