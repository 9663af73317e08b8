r"""Sums of which nobody sees the terms.

Silos add masks to their replies that cancel in the sum over all of them.

Two silos i < j share a key of which the server knows nothing (X25519, of public keys that persons
exchanged). For every sum each pair derives from it a fresh stream :math:`m_{ij}` (HKDF-SHA256,
ChaCha20), and silo i sends its numbers in fixed point, modulo :math:`2^{64}`, as

.. math:: \lfloor 2^{20} x_i \rceil + \sum_{j > i} m_{ij} - \sum_{j < i} m_{ji} \mod 2^{64},

and beside each, in 16 bits that are masked alike, whether it has no such form (not finite, or
beyond :data:`LARGEST`). One reply alone is uniform whatever :math:`x_i` is; the sum over all silos
is that of the numbers, each rounded to :math:`2^{-20}`. Masks of silos that do not answer would not
cancel: the sum needs all of them, and as they answer again what they answered before, a lost reply
is asked for again. The protocol is the one-round core of Bonawitz et al. (2017), Practical secure
aggregation for privacy-preserving machine learning, CCS, without its recovery of lost silos.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

__all__ = [
    "FEWEST_SILOS",
    "LARGEST",
    "MOST_SILOS",
    "Keys",
    "masked",
    "opened",
    "secret_file",
    "types_masked",
]

_RESOLUTION = 2.0**-20
LARGEST = 2.0**30  # of a silo's number
FEWEST_SILOS = 3  # of a sum: of two, each knows the other's
MOST_SILOS = 2**13  # the sum of so many has room in 64 bits


def _cryptography() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ImportError as error:
        raise ImportError(
            'secure_sum=True needs cryptography: pip install "numpyro-fed[privacy]"'
        ) from error
    return x25519


def secret_file(place: Path, make: Callable[[], bytes]) -> bytes:
    """32 secret bytes that a file holds, made when it is not there.

    Readable to its owner alone, and never half written.

    :raises ValueError: where the file holds something else.
    """
    if not place.exists():
        beside = place.with_name(f"{place.name}.{os.getpid()}")
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(make())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, place)  # which fails where another process was first
        except FileExistsError:
            pass
        finally:
            beside.unlink()
    found = place.read_bytes()
    if len(found) != 32:
        raise ValueError(
            f"{place} holds {len(found)} bytes, expected 32 of a key; give another folder"
        )
    return found


class Keys:
    """A silo's own key, made when its folder is first used, and the others' public ones.

    :param folder: the silo's: ``sum.key``, and ``NAME.pub``, a copy of which every other silo is to
        put into its own ``peers`` folder.
    :param name: the silo's.
    """

    def __init__(self, folder: Path, name: str) -> None:
        x25519 = _cryptography()
        self.peers, self.name = folder / "peers", name
        own = secret_file(
            folder / "sum.key", lambda: x25519.X25519PrivateKey.generate().private_bytes_raw()
        )
        self.private = x25519.X25519PrivateKey.from_private_bytes(own)
        (folder / f"{name}.pub").write_text(
            self.private.public_key().public_bytes_raw().hex() + "\n"
        )

    def shared(self, names: tuple[str, ...]) -> dict[str, bytes]:
        """The secret shared with each of the others.

        :raises ValueError: where the public keys in ``peers`` are not those of exactly the other
            silos, or one is none.
        """
        x25519 = _cryptography()
        found = {p.stem: p for p in self.peers.glob("*.pub") if p.stem != self.name}
        others = set(names) - {self.name}
        if set(found) != others:
            raise ValueError(
                f"it has public keys of {sorted(found)}, and the server names {sorted(others)}; "
                "expected the same: each one's NAME.pub in its folder 'peers', "
                "got from that silo itself and not by way of the server, and of no others"
            )
        out = {}
        for name, place in found.items():
            try:
                raw = bytes.fromhex(place.read_text().strip())
                out[name] = self.private.exchange(x25519.X25519PublicKey.from_public_bytes(raw))
            except ValueError as error:
                raise ValueError(
                    f"peers/{place.name} is no public key; expected 64 hexadecimal digits"
                ) from error
        return out


def _stream(secret: bytes, info: bytes, like: np.ndarray) -> np.ndarray:
    """The stream that two silos share, as long as an array."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(SHA256(), 32, salt=None, info=b"numpyro_fed secure sum\0" + info).derive(secret)
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(like.nbytes)), like.dtype).reshape(like.shape)


def _fixed(x: np.ndarray, seed: bytes) -> list[np.ndarray]:
    """Return numbers in fixed point, and marks of those that have no such form; or of flags.

    A mark is zero, or a random number. So a sum of marks tells that a silo has marked it, and not
    how many have; and a marked number is random, so that the sum of the others is not told.

    :param seed: of random numbers, the same if the same call comes again.
    """
    bad = ~x if x.dtype == bool else ~(np.isfinite(x) & (np.abs(x) <= LARGEST))
    words = np.frombuffer(hashlib.shake_256(seed).digest(12 * x.size), np.uint32).reshape(
        3, *x.shape
    )
    marks = np.where(bad, np.maximum(words[0], 1), 0).astype(np.uint32)
    if x.dtype == bool:
        return [marks]
    number = np.rint(np.where(bad, 0.0, x).astype(np.float64) / _RESOLUTION).astype(np.int64)
    chosen = words[1].astype(np.uint64) << np.uint64(32) | words[2]
    return [np.where(bad, chosen, number.astype(np.uint64)), marks]


def masked(
    leaves: list[np.ndarray], name: str, shared: Mapping[str, bytes], label: bytes, secret: bytes
) -> list[np.ndarray]:
    """A silo's arrays of numbers and flags with masks.

    :param shared: the secret shared with each of the others, by name.
    :param label: of this sum alone.
    :param secret: the silo's own, for what stands in the place of numbers that are not finite.
    """
    seed = hashlib.sha256(secret + b"marks" + label).digest()
    parts = [x for i, leaf in enumerate(leaves) for x in _fixed(leaf, seed + str(i).encode())]
    out = []
    for place, x in enumerate(parts):
        total = x
        for other, common in shared.items():
            first, second = sorted((name, other))
            info = b"\0".join([first.encode(), second.encode(), label, str(place).encode()])
            mask = _stream(common, info, x)
            total = total + mask if name == first else total - mask
        out.append(total)
    return out


def types_masked(kind: Any) -> Any:
    """Types of a masked reply, of those of the plain one: numbers become pairs."""

    def one(x: Any) -> Any:
        flags = jax.ShapeDtypeStruct(x.shape, np.uint32)
        return flags if x.dtype == bool else (jax.ShapeDtypeStruct(x.shape, np.uint64), flags)

    return jax.tree.map(one, kind)


def _is_pair(x: Any) -> bool:
    return type(x) is tuple and len(x) == 2 and getattr(x[0], "dtype", None) == np.uint64


def opened(replies: Any, like: np.dtype) -> Any:
    """The sum over silos of stacked replies ``(S, ...)``, as of one silo ``(1, ...)``.

    NaN where a term had no form; replies that are not masked stay as they are.

    :param like: type of numbers.
    """
    if not any(_is_pair(x) for x in jax.tree.leaves(replies, is_leaf=_is_pair)):
        return replies

    def one(x: Any) -> np.ndarray:
        if not _is_pair(x):
            return np.asarray(np.add.reduce(x, axis=0, keepdims=True, dtype=np.uint32) == 0)
        total = (
            np.add.reduce(x[0], axis=0, keepdims=True, dtype=np.uint64).astype(np.int64)
            * _RESOLUTION
        )
        unusable = np.add.reduce(x[1], axis=0, keepdims=True, dtype=np.uint32)
        return np.where(unusable > 0, np.nan, total).astype(like)

    return jax.tree.map(one, replies, is_leaf=_is_pair)
