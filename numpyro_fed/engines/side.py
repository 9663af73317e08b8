"""Side of a silo, which every transport asks for answers, a silo's text, a carrier's absence."""

from importlib.metadata import PackageNotFoundError, version
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


def not_importable(carrier: str, package: str, extra: str, error: ImportError) -> ImportError:
    """Return the error of a carrier that is not installed, or whose release has other names.

    The library uses parts of carriers outside their public interfaces, under pinned versions.
    """
    install = f'pip install "numpyro-fed[{extra}]"'
    try:
        found = version(package)
    except PackageNotFoundError:
        return ImportError(f"{carrier} is not installed; {install}")
    return ImportError(
        f"{carrier} {found} has moved or lost a name that this library uses: {error}; "
        f"expected a release that the library knows, {install}"
    )
