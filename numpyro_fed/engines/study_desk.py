"""Desk of a silo in a study of files (:mod:`numpyro_fed.engines.study`).

It reads a message, says what is asked, and writes the signed reply.
"""

import json
from collections import Counter
from pathlib import Path

from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.study import MESSAGE, REPLY, Letter, read_letter, ssh_keys, write_letter
from numpyro_fed.rounds.files import read_sealed, write_whole
from numpyro_fed.rounds.serialization import unpack
from numpyro_fed.rounds.task import TASKS

_OPENINGS = {
    "hello": "who is there: it gets the silo's name, numbers of rows, names and types of the "
    "arguments, and versions",
    "open": "to take part with the silos listed below: it gets a description of the silo's model",
}


class Desk:
    """Desk of a silo, which answers the messages of one study, in order.

    Its replies are also kept in the silo's own folder. So a message that comes twice gets the same
    file again, without a new computation.

    :param side: the silo's side, with its rows and its own folder.
    :param key: the silo's private key, of ``ssh-keygen``.
    :param coordinator: the coordinator's public key.
    """

    def __init__(self, side: SiloSide, key: Path, coordinator: Path) -> None:
        ssh_keys()  # before a message is answered
        self.side, self.key, self.coordinator = side, key, coordinator
        self.kept = side.folder / "replies"
        self._pinned = side.folder / "study.json"

    @property
    def answered(self) -> int:
        """Number of messages that the silo has answered."""
        return len(list((self.kept / self.side.name).glob("*.reply")))

    @property
    def sent(self) -> int:
        """Bytes of all replies."""
        return sum(p.stat().st_size for p in (self.kept / self.side.name).glob("*.reply"))

    def read(self, place: Path) -> Letter:
        """Return the message in a file.

        :raises ValueError: for a file that is no message of this study, to this silo, or that comes
            before its turn.
        """
        letter = read_letter(place, MESSAGE, self.coordinator, "the coordinator")
        if letter.silo != self.side.name:
            raise ValueError(
                f"{place}: expected a message to silo {self.side.name!r}, got one to "
                f"{letter.silo!r}"
            )
        if self._pinned.exists():
            study = json.loads(self._pinned.read_text())["study"]
            if letter.study != study:
                raise ValueError(
                    f"{place}: expected a message of study {study}, got one of {letter.study}; a "
                    "new --folder is a new consent"
                )
        if not 1 <= letter.number <= self.answered + 1:
            raise ValueError(
                f"{place}: expected message {self.answered + 1}, got {letter.number}; answer them "
                "in turn"
            )
        return letter

    def asked(self, letter: Letter) -> str:
        """Return a text on what a message asks, and what would leave."""
        what, kinds, silos = self.side.asked(letter.body)
        lines = [f"Message {letter.number} of study {letter.study}, signed by the coordinator."]
        if what in _OPENINGS:
            lines.append(f"It asks {_OPENINGS[what]}.")
            lines += [f"  {line}" for line in silos]
        else:
            lines.append("It asks for:")
        for kind, times in Counter(kinds).items():
            task = TASKS[kind]
            numbers = f"; {task.numbers}" if task.numbers else ""
            lines.append(f"  {times} x {kind}: {task.leaves}{numbers}")
        lines.append(f"So far {self.answered:,} messages were answered, with {self.sent:,} bytes.")
        return "\n".join(lines)

    def answer(self, letter: Letter, folder: Path) -> Path:
        """Write the signed reply to a message into a study's folder, and return its place.

        :raises ValueError: for another message of a number that was answered.
        """
        if not self._pinned.exists():
            write_whole(self._pinned, json.dumps({"study": letter.study}).encode())
        reply = letter._replace(kind=REPLY, about=letter.digest)
        if self.has_answered(letter):
            reply = reply._replace(body=unpack(self._kept(letter))["body"].tobytes())
        else:
            reply = reply._replace(body=self.side.answer(letter.body))
            write_letter(self.kept, reply, self.key)
        # signed anew, since the key may have been a wrong one before
        return write_letter(folder, reply, self.key)

    def _kept(self, letter: Letter) -> bytes:
        return read_sealed(self.kept / letter._replace(kind=REPLY).place, REPLY)

    def has_answered(self, letter: Letter) -> bool:
        """Return whether the silo has answered this message.

        :raises ValueError: for another message of the same number.
        """
        if not (self.kept / letter._replace(kind=REPLY).place).exists():
            return False
        if unpack(self._kept(letter))["about"] != letter.digest:
            raise ValueError(
                f"message {letter.number} is another one than the silo has answered; expected the "
                "same: two answers could tell more than one"
            )
        return True
