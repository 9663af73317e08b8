"""Guard of what a silo lets out of a fit with privacy, or of which only sums are to be seen.

A silo decides which calls it answers, how often, and what becomes of their replies. A reply is a
function of the silo's rows, its secret and the call's *digest*: a hash of what was asked, what was
told, the state that the call started from and the silos of the fit, which stay those of the first
time. A call that comes again, from whichever server, has the same reply, with the same noise and
masks. A call of another digest is another round of the budget, with other noise and masks. If a
call that comes again has other numbers than the first time (another machine, or a device that adds
up in any order), it is refused: the difference of the two would have no noise.

Masks are of the *label*: a hash of what was asked and told now, and in all calls that led to the
state. Silos that were told different things have masks that do not cancel. The server's keys are of
no use to it: the silo draws by keys that it makes of its secret and the label (with privacy: the
digest), so that no two sums can be made to differ in one silo's draws.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.privacy.own_keys import hashed, secret_of, with_own_keys
from numpyro_fed.privacy.secure_sum import FEWEST_SILOS, MOST_SILOS, Keys, masked
from numpyro_fed.rounds.files import write_whole
from numpyro_fed.rounds.remote import Call
from numpyro_fed.rounds.serialization import pack

__all__ = ["RoundGuard", "Ticket"]

_INIT, _ROUND, _ESTIMATE = "InitLocal", "RoundLocal", "EstimateLocal"


class Ticket(NamedTuple):
    """Names and secrets of a call that is answered.

    :param label: of its masks; empty for a call whose reply is nothing.
    :param drawn: the hash of the call that its key and noise come from.
    :param noise: 32 secret bytes, of its noise.
    """

    label: str
    drawn: str
    noise: bytes


class RoundGuard:
    """A silo's guard of one fit.

    It has these files in the silo's folder:

    * ``secret.key``, what noise and keys come from;
    * ``joined.txt``, a hash of the silos of the fit;
    * ``answered.txt``, a line with label and digest of each round answered;
    * ``sent.txt``, a line with label (with privacy: digest) and a hash of the reply's numbers;
    * ``history.txt``, for each slot the label of the call that wrote it.

    :param folder: the silo's.
    :param name: the silo's.
    :param fit: with ``privacy`` or ``secure_sum``.
    """

    def __init__(self, folder: Path, name: str, fit: Any) -> None:
        self.folder, self.name = folder, name
        self.privacy, self.sums = fit.privacy, fit.secure_sum
        self.keys = Keys(folder, name) if self.sums else None
        self.shared: dict[str, bytes] = {}
        self.secret = secret_of(folder)
        self.roster = ""
        self.histories = dict(self._lines("history.txt"))

    @property
    def allowed(self) -> tuple[str, ...]:
        """The calls that it answers."""
        return (_INIT, _ROUND) if self.privacy is not None else (_INIT, _ROUND, _ESTIMATE)

    def join(self, names: tuple[str, ...], roster: bytes) -> None:
        """Settle which silos are in the fit, and the masks' keys with them.

        Refused, nothing changes.

        :param roster: what is known of all silos, as bytes.
        :raises ValueError: in words, where they are too few, others than before, or public keys are
            missing.
        """
        if len(set(names)) != len(names):
            raise ValueError(f"expected each silo's name once, got {list(names)}")
        shared, told = self.shared, hashed(roster)
        if self.keys is not None:
            if not FEWEST_SILOS <= len(names) <= MOST_SILOS:
                raise ValueError(
                    f"secure_sum with {len(names)} silos; expected {FEWEST_SILOS} to {MOST_SILOS}: "
                    "of two, each would know the other's"
                )
            shared = self.keys.shared(names)
        place = self.folder / "joined.txt"
        with self._alone():
            if not place.exists():
                write_whole(place, f"{told}\n".encode())
        if place.read_text().strip() != told:
            raise ValueError(
                f"it has joined a fit of other silos, or of other sizes, than {list(names)}; "
                "expected the same as the first time, as two sums of different silos, and two "
                "budgets, would tell more than either; a new folder is a new consent"
            )
        self.shared, self.roster = shared, told

    def admit(
        self, call: Call, own: dict[str, Any], state: Any, independent: bool
    ) -> tuple[Call, Ticket]:
        """Return the call as it is to be answered, with a key of the silo's own, and its ticket.

        :param own: what goes by name in :func:`~numpyro_fed.rounds.serialization.pack`.
        :param state: what the call starts from.
        :param independent: what the plan was made with.
        :raises ValueError: in words, for other calls, a budget that is spent, and a label that was
            used otherwise.
        """
        kind = type(call.local).__name__
        if kind not in self.allowed:
            what = "with privacy" if self.privacy is not None else "of which sums alone are seen"
            raise ValueError(
                f"it takes part in a fit {what}, and does not answer {kind}; expected calls of its "
                "rounds"
            )
        real = jnp.result_type(float)
        types = [x.dtype for x in jax.tree.leaves(call.message) if hasattr(x, "dtype")]
        odd = {str(x) for x in types if jnp.issubdtype(x, jnp.floating)} - {str(real)}
        if odd:
            raise ValueError(
                f"it is told numbers of type {sorted(odd)}; expected {real}, in which noise is "
                "drawn"
            )
        if kind == _ROUND:  # whatever the server said
            call = call._replace(local=replace(call.local, bare=self.privacy is not None))  # type: ignore[type-var]
        told = pack((call.local, call.message, independent), own)
        slots = [*jax.tree.leaves(call.read), *([] if call.write is None else [call.write])]
        odd_slots = [slot for slot in slots if type(slot) is not int or slot < 0]
        if odd_slots:
            raise ValueError(f"it is asked with slots {odd_slots}; expected whole numbers")
        unknown = [slot for slot in jax.tree.leaves(call.read) if str(slot) not in self.histories]
        if unknown:
            raise ValueError(
                f"it has no record of what led to its states {unknown}; expected states of this fit"
            )
        led = [self.histories[str(slot)].encode() for slot in jax.tree.leaves(call.read)]
        label = hashed(self.roster.encode(), told, *led)
        digest = hashed(self.roster.encode(), told, pack(state))
        with self._alone():
            self.histories = dict(self._lines("history.txt"))
            before = self.histories.get(str(call.write))
            if before not in (
                None,
                label,
            ):  # if the call failed, its state would have the other's history
                raise ValueError(
                    f"slot {call.write} is another call's; expected each slot to be written once"
                )
            if kind != _INIT:
                self._count(label, digest)
            if (
                call.write is not None and before is None
            ):  # of a call that is refused nothing is written
                self.histories[str(call.write)] = label
                self._append("history.txt", str(call.write), label)
        if kind == _INIT:
            return call, Ticket("", "", b"")
        drawn = self._drawn(label, digest)
        call = with_own_keys(call, self.secret, drawn)
        noise = hashlib.sha256(self.secret + b"noise" + drawn.encode()).digest()
        return call, Ticket(label, drawn, noise)

    def _drawn(self, label: str, digest: str) -> str:
        """Return the name by which noise and draws are made.

        With privacy it has the history too. By the digest alone, two histories that lead to one
        state would have one noise, and equal replies would tell that the states are equal.
        """
        return label if self.privacy is None else hashed(label.encode(), digest.encode())

    def _count(self, label: str, digest: str) -> None:
        """Note a round before it is answered, or refuse it."""
        answered = list(self._lines("answered.txt"))
        noted = {self._drawn(*pair) for pair in answered}
        if any(drawn not in noted for drawn, _ in self._lines("sent.txt")):
            raise ValueError(
                "its answered.txt lacks rounds that its sent.txt has: some of it was lost; "
                "expected the folder as it "
                "was, or a new one, which is a new consent"
            )
        if (label, digest) in answered:
            return
        if self.sums and label in dict(answered):
            raise ValueError(
                "it was asked for this sum before, from another state; expected each sum to be "
                "asked for once"
            )
        spent = len(set(answered) - {(label, digest)})
        if self.privacy is not None and spent >= self.privacy.num_rounds:
            raise ValueError(
                f"its budget of privacy is spent: it has answered {spent} rounds, expected at most "
                f"{self.privacy.num_rounds}"
            )
        self._append("answered.txt", label, digest)

    def let_out(self, local: Any, reply: Any, ticket: Ticket) -> list[np.ndarray]:
        """Return a reply's arrays as they leave: the only way out.

        :param local: what made it.
        :raises ValueError: where it is not what the same call had before.
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
                    "masks; expected the "
                    "machine and versions of before: connect anew, and start the fit again"
                )
            if before is None:
                self._append("sent.txt", ticket.drawn, told)
        if self.sums:  # of float64, in which whole units of the grid are exact
            return masked(leaves, self.name, self.shared, ticket.label.encode(), self.secret)
        return [x.astype(dtype) for x, dtype in zip(leaves, types, strict=True)]

    def _lines(self, name: str) -> Iterator[tuple[str, str]]:
        """Pairs of words of a file; a line that was broken off is none.

        Nothing was answered after it.
        """
        place = self.folder / name
        for line in place.read_text().splitlines() if place.exists() else ():
            words = line.split()
            if len(words) == 2 and len(words[1]) == 64:
                yield words[0], words[1]

    def _append(self, name: str, *words: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write("\n" + " ".join(words) + "\n")  # the line before may be broken off
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from counting meanwhile."""
        import fcntl

        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
