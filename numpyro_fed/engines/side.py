"""Side of a silo, which every transport asks for answers, and a silo's text at the server."""

from typing import Protocol

_LONGEST = 2000  # letters of a silo's text in an error


class Side(Protocol):
    """Side of a silo, which keeps its private states on its own disk."""

    name: str

    def answer(self, data: bytes) -> bytes:
        """Return the reply to a message; the same message has the same reply."""
        ...


def printable(text: object) -> str:
    """Return a silo's text without the characters that would command the server's terminal."""
    return "".join(x if x.isprintable() or x == "\n" else "\ufffd" for x in str(text)[:_LONGEST])
