"""Files that are written as a whole, have a header and a checksum, and can be locked."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = b"numpyro_fed file"
_VERSION = 1
_KIND = 16  # bytes
_HEADER = len(_MARK) + 1 + _KIND + 8 + 32


def write_whole(place: Path, data: bytes) -> None:
    """Write a file as a whole or not at all, even if the power fails."""
    beside = place.with_name(f"{place.name}.{os.getpid()}.new")
    try:
        with beside.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_sealed(place: Path, data: bytes, kind: str) -> None:
    """Write a file as a whole, with a header and a checksum.

    :param kind: the kind of file, at most 16 letters; :func:`read_sealed` expects the same.
    """
    seal = bytes([_VERSION]) + kind.encode().ljust(_KIND) + len(data).to_bytes(8, "little")
    checksum = hashlib.sha256(seal + data).digest()
    write_whole(place, _MARK + seal + checksum + data)


def read_sealed(place: Path, kind: str) -> bytes:
    """Return the data that :func:`write_sealed` wrote.

    :raises ValueError: naming the file, if it is missing, cut off, changed, or of another kind.
    """
    try:
        whole = place.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(
            f"{place}: expected a {kind} file, got none; was it moved or deleted?"
        ) from error
    mend = "put back a copy, or delete it to start anew"
    if len(whole) < _HEADER or not whole.startswith(_MARK):
        got = f"{len(whole)} bytes of something else, or the beginning of one"
        raise ValueError(f"{place}: expected a {kind} file of numpyro_fed, got {got}; {mend}")
    seal, checksum = whole[len(_MARK) : _HEADER - 32], whole[_HEADER - 32 : _HEADER]
    version, name = seal[0], seal[1 : 1 + _KIND].decode(errors="replace").strip()
    if version != _VERSION:
        mend = "use the numpyro_fed that wrote it, or delete it to start anew"
        raise ValueError(
            f"{place}: expected a file of version {_VERSION}, got version {version}; {mend}"
        )
    size = int.from_bytes(seal[-8:], "little")
    if len(whole) - _HEADER != size:
        raise ValueError(
            f"{place}: expected {size} bytes of data, got {len(whole) - _HEADER}; it was cut off: "
            f"{mend}"
        )
    if hashlib.sha256(seal + whole[_HEADER:]).digest() != checksum:
        raise ValueError(
            f"{place}: expected the checksum in its header, got another: it was changed; {mend}"
        )
    if name != kind:
        raise ValueError(f"{place}: expected a {kind} file, got a {name} file; give the right one")
    return whole[_HEADER:]


@contextmanager
def locked(place: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a file for this run alone, by a lock on a second file beside it.

    :param wait: wait until the other run releases the file, instead of raising.
    :raises ValueError: naming the file, if another process or run holds it.
    """
    with place.with_name(place.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            mend = "wait for the other, or give another file"
            raise ValueError(
                f"{place}: expected it free, got one that another process uses; {mend}"
            ) from error
        yield
