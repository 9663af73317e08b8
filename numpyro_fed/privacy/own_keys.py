"""Keys of a silo's own, in place of those that a server sends: it must not know what a silo draws.

A server that knows the keys knows the latents and noise that are drawn by them. With gradients at
known latents it can solve for single rows. A silo's keys come from its secret and from the whole
call: a call that comes again has the same draws, and any other call has others.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.privacy.secure_sum import secret_file
from numpyro_fed.rounds.remote import Call

__all__ = ["hashed", "secret_of", "with_own_keys"]


def secret_of(folder: Path) -> bytes:
    """Return the silo's secret of 32 bytes, made when its folder is first used."""
    return secret_file(folder / "secret.key", lambda: os.urandom(32))


def hashed(*parts: bytes) -> str:
    """Return a hash of some bytes that tells where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def with_own_keys(call: Call, secret: bytes, drawn: str) -> Call:
    """Return a call whose every key, also in what is told, is the silo's own.

    :param secret: the silo's, 32 bytes.
    :param drawn: a name for the call; calls of another name have other keys.
    """

    def own(number: int, leaf: Any) -> Any:
        if not jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            return leaf
        seed = secret + drawn.encode() + number.to_bytes(4, "little")
        words = np.frombuffer(hashlib.shake_256(seed).digest(8 * leaf.size), np.uint32)
        shaped = jnp.asarray(words.reshape(*leaf.shape, 2))
        return jax.random.wrap_key_data(shaped, impl="threefry2x32")

    leaves, tree = jax.tree.flatten((call.key, call.message))
    key, message = jax.tree.unflatten(tree, [own(i, leaf) for i, leaf in enumerate(leaves)])
    return call._replace(key=key, message=message)
