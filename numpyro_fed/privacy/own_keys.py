"""Random keys of a silo, in place of the server's, so that the server does not know its draws.

A server with the keys can compute the latents and the noise that a silo draws by them. From
gradients at these latents it can solve for single rows. A silo's keys are hashes of its secret and
of the whole call. The same call therefore has the same draws, and any other call has other draws.
"""

import hashlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed._typing import PyTree
from numpyro_fed.rounds.serialization import is_key
from numpyro_fed.rounds.worker import Call


def _secret_file(place: Path) -> bytes:
    """Return the 32 secret bytes in a file, and make the file if it does not exist.

    The file is readable to its owner alone, and never half written.

    :raises ValueError: if the file does not have 32 bytes.
    """
    if not place.exists():
        beside = place.with_name(f"{place.name}.{os.getpid()}")
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, place)  # fails if another process was first
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


def secret_of(folder: Path, name: str, rows: str) -> bytes:
    """Return the silo's secret of 32 bytes; the first call for a folder makes its file.

    Silos whose folders are copies of one another have other secrets.

    :param name: name of the silo.
    :param rows: hash of its rows.
    """
    made = _secret_file(folder / "secret.key")
    return bytes.fromhex(hashed(made, name.encode(), rows.encode()))


def hashed(*parts: bytes) -> str:
    """Return a hash of several byte strings, which depends on where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def with_own_keys(call: Call, secret: bytes, drawn: str) -> Call:
    """Return a call with the silo's keys in place of all the server's, also in its message.

    :param secret: the silo's secret, 32 bytes.
    :param drawn: a name for the call; calls with other names have other keys.
    """

    def own(number: int, leaf: PyTree) -> PyTree:
        if not is_key(leaf):
            return leaf
        seed = secret + drawn.encode() + number.to_bytes(4, "little")
        words = np.frombuffer(hashlib.shake_256(seed).digest(8 * leaf.size), np.uint32)
        shaped = jnp.asarray(words.reshape(*leaf.shape, 2))
        return jax.random.wrap_key_data(shaped, impl="threefry2x32")

    leaves, tree = jax.tree.flatten((call.key, call.message))
    key, message = jax.tree.unflatten(tree, [own(i, leaf) for i, leaf in enumerate(leaves)])
    return call._replace(key=key, message=message)
