"""Desk of a silo in a study of files (:mod:`numpyro_fed.engines.study`).

It reads a message, says what is asked, and writes the signed reply.
"""

import json
from collections import Counter
from pathlib import Path

from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.study import (
    MESSAGE,
    REPLY,
    Letter,
    file_name,
    open_letter,
    read_letter,
    ssh_keys,
    write_letter,
)
from numpyro_fed.rounds.files import write_whole
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

    def next_in(self, folder: Path) -> Path:
        """Return the file of the first message in a folder that the silo has not answered.

        :raises ValueError: if it is not there yet.
        """
        place = folder / file_name(MESSAGE, self.answered + 1)
        if not place.exists():
            raise ValueError(
                f"{folder}: no message {place.name}; {self.answered} were answered. Wait for the "
                "next, or name the file of an earlier one to write its reply again"
            )
        return place

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
        asked = self.side.asked(letter.body)
        lines = [f"Message {letter.number} of study {letter.study}, signed by the coordinator."]
        if asked.what in _OPENINGS:
            lines.append(f"It asks {_OPENINGS[asked.what]}.")
            lines += [f"  {line}" for line in asked.silos.splitlines()]
        else:
            lines.append("It asks for:")
        for kind, times in Counter(asked.kinds).items():
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
        reply = self._kept(letter)
        if reply is None:
            body = self.side.answer(letter.body)
            reply = letter._replace(kind=REPLY, body=body, about=letter.digest)
            write_letter(self.kept, reply, self.key)
        # signed anew, since the key may have been a wrong one before
        return write_letter(folder, reply, self.key)

    def has_answered(self, letter: Letter) -> bool:
        """Return whether the silo has answered this message.

        :raises ValueError: for another message of the same number.
        """
        return self._kept(letter) is not None

    def _kept(self, letter: Letter) -> Letter | None:
        """Return the reply to a message, if there is one, or raise a ``ValueError``."""
        place = self.kept / letter._replace(kind=REPLY).place
        if not place.exists():
            return None
        reply = open_letter(place, REPLY).letter
        if reply.about != letter.digest:
            raise ValueError(
                f"message {letter.number} is another one than the silo has answered; expected the "
                "same: two answers could tell more than one"
            )
        return reply
