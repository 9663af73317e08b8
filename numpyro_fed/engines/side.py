"""Side of a silo, which every transport asks for answers."""

from typing import Protocol


class Side(Protocol):
    """Side of a silo, which keeps its private states on its own disk."""

    name: str

    def answer(self, data: bytes) -> bytes:
        """Return the reply to a message; the same message has the same reply."""
        ...
