r"""Secure sums: the server learns the sum of the silos' replies and no single reply.

Silos add masks to their replies, and the masks cancel in the sum over all silos. Two silos i < j
share a key that the server does not know (X25519, from public keys that persons exchanged). For
every sum each pair derives a fresh stream :math:`m_{ij}` from its key (HKDF-SHA256, ChaCha20). Silo
i sends its numbers in fixed point, modulo :math:`2^{64}`, as

.. math:: \lfloor 2^{20} x_i \rceil + \sum_{j > i} m_{ij} - \sum_{j < i} m_{ji} \mod 2^{64},

Beside each number it sends a mark of 32 bits, with a mask of its own. The mark is nonzero if the
number has no fixed point: it is not finite, or beyond :data:`LARGEST`. One reply alone is uniform
for any :math:`x_i`. The sum over all silos is that of the numbers, each rounded to
:math:`2^{-20}`. The masks of a silent silo do not cancel, so a sum needs all silos. A silo repeats
its reply if the call is made again, so a lost reply does no harm.

**Reference.** Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine
learning, CCS: the one-round core, without the recovery of lost silos.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import jax
import numpy as np

from numpyro_fed._typing import PyTree
from numpyro_fed.privacy.extra import of_extra

# grid of sums: the spacing of float32's own numbers from 8 to 16
RESOLUTION = 2.0**-20
LARGEST = 2.0**30  # magnitude of a silo's number: 2^50 steps of the grid
FEWEST_SILOS = 3  # with two, each silo could subtract its own number from the sum
MOST_SILOS = 2**13  # the largest sum that fits in 64 bits


def _cryptography() -> ModuleType:
    return of_extra("secure_sum=True", "cryptography.hazmat.primitives.asymmetric.x25519")


class Keys:
    """Private key of a silo, and the public keys of the other silos.

    The private key is a hash of the silo's secret, from which its draws come as well. So equal
    masks hide equal numbers, also where the secret was copied into another folder.

    :param folder: folder of the silo, which gets ``NAME.pub``. Every other silo has to put a copy
        into its own ``peers`` folder.
    :param name: name of the silo.
    :param secret: the silo's secret, 32 bytes.
    """

    def __init__(self, folder: Path, name: str, secret: bytes) -> None:
        x25519 = _cryptography()
        self.peers, self.name = folder / "peers", name
        own = hashlib.sha256(secret + b"sums").digest()
        self.private = x25519.X25519PrivateKey.from_private_bytes(own)
        (folder / f"{name}.pub").write_text(
            self.private.public_key().public_bytes_raw().hex() + "\n"
        )

    def shared(self, names: tuple[str, ...]) -> dict[str, bytes]:
        """Return the secrets that the silo shares with each other silo, by name.

        :param names: names of all silos.
        :raises ValueError: if ``peers`` does not have the public keys of exactly the other silos,
            or a file is no public key.
        """
        x25519 = _cryptography()
        found = {p.stem: p for p in self.peers.glob("*.pub") if p.stem != self.name}
        others = set(names) - {self.name}
        if set(found) != others:
            raise ValueError(
                f"it has public keys of {sorted(found)}, and the server names {sorted(others)}; "
                "expected the same: each one's NAME.pub in its folder 'peers', and no others, got "
                "from that silo itself and not by way of the server"
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
    """Return the stream that two silos share, in the shape and type of an array."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(SHA256(), 32, salt=None, info=b"numpyro_fed secure sum\0" + info).derive(secret)
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(like.nbytes)), like.dtype).reshape(like.shape)


def _fixed(x: np.ndarray, seed: bytes) -> list[np.ndarray]:
    """Return numbers in fixed point with their marks, or for flags the marks alone.

    A mark is zero for a number in fixed point and for a true flag, and random otherwise. A sum of
    marks therefore tells that some silo has marked a number, and not how many have. A marked number
    is random, so that the sum of the others stays secret.

    :param seed: seed of the random numbers, the same if the same call comes again.
    """
    bad = ~x if x.dtype == bool else ~(np.isfinite(x) & (np.abs(x) <= LARGEST))
    words = np.frombuffer(hashlib.shake_256(seed).digest(12 * x.size), np.uint32).reshape(
        3, *x.shape
    )
    marks = np.where(bad, np.maximum(words[0], 1), 0).astype(np.uint32)
    if x.dtype == bool:
        return [marks]
    number = np.rint(np.where(bad, 0.0, x).astype(np.float64) / RESOLUTION).astype(np.int64)
    chosen = words[1].astype(np.uint64) << np.uint64(32) | words[2]
    return [np.where(bad, chosen, number.astype(np.uint64)), marks]


def masked(
    leaves: list[np.ndarray], name: str, shared: Mapping[str, bytes], label: bytes, secret: bytes
) -> list[np.ndarray]:
    """Return a silo's arrays of numbers and flags with masks.

    :param name: name of the silo.
    :param shared: the secrets that it shares with each other silo, by name.
    :param label: label of this sum alone.
    :param secret: the silo's own secret, for marks and marked numbers.
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


def types_masked(kind: PyTree) -> PyTree:
    """Return the types of a masked reply from those of the plain one; numbers become pairs."""

    def one(x: jax.ShapeDtypeStruct) -> PyTree:
        flags = jax.ShapeDtypeStruct(x.shape, np.uint32)
        return flags if x.dtype == bool else (jax.ShapeDtypeStruct(x.shape, np.uint64), flags)

    return jax.tree.map(one, kind)


def _is_pair(x: object) -> bool:
    if type(x) is not tuple or len(x) != 2 or not isinstance(x[0], np.ndarray):
        return False
    return x[0].dtype == np.uint64


def opened(replies: PyTree, like: np.dtype) -> PyTree:
    """Return the sum ``(1, ...)`` over silos of stacked replies ``(S, ...)``.

    A sum is NaN if a silo marked its number. Replies without masks stay as they are.

    :param like: type of the sums.
    """
    if not any(_is_pair(x) for x in jax.tree.leaves(replies, is_leaf=_is_pair)):
        return replies

    def one(x: PyTree) -> np.ndarray:
        if not _is_pair(x):
            return np.asarray(np.add.reduce(x, axis=0, keepdims=True, dtype=np.uint32) == 0)
        total = (
            np.add.reduce(x[0], axis=0, keepdims=True, dtype=np.uint64).astype(np.int64)
            * RESOLUTION
        )
        unusable = np.add.reduce(x[1], axis=0, keepdims=True, dtype=np.uint32)
        return np.where(unusable > 0, np.nan, total).astype(like)

    return jax.tree.map(one, replies, is_leaf=_is_pair)
