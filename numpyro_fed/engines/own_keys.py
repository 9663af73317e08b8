"""Keys of a silo's own, in place of those that a server sends: it must not know what a silo draws.

Who knows by which key latents and noise are drawn knows both, and a gradient at known latents is a
question about single rows. A silo's keys come from its secret and from all that the call is made
of: a call that comes again has the same draws, and any other call has others.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.engines.remote import Call

__all__ = ["hashed", "with_own_keys"]


def hashed(*parts: bytes) -> str:
    """Return a hash of some bytes that tells where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def with_own_keys(call: Call, secret: bytes, drawn: str) -> Call:
    """Return a call whose every key, also in what is told, is the silo's own.

    :param secret: the silo's, 32 bytes.
    :param drawn: a name of the call, whose keys are others than those of another name.
    """

    def own(number: int, leaf: Any) -> Any:
        if not jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            return leaf
        seed = secret + drawn.encode() + number.to_bytes(4, "little")
        words = np.frombuffer(hashlib.shake_256(seed).digest(8 * leaf.size), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(words.reshape(*leaf.shape, 2)), impl="threefry2x32")

    leaves, tree = jax.tree.flatten((call.key, call.message))
    key, message = jax.tree.unflatten(tree, [own(i, leaf) for i, leaf in enumerate(leaves)])
    return call._replace(key=key, message=message)
