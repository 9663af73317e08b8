"""The server's checkpoint of a run: one file, replaced as a whole."""

import hashlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes, random

from numpyro_fed.engines.packing import pack, unpack, write_whole
from numpyro_fed.engines.remote import Carrier
from numpyro_fed.silos import Silos

__all__ = ["Checkpoint", "facts_of_run"]


class Checkpoint:
    """A file that holds a run after some rounds.

    :param place: its name, or ``None``: there is none.
    :param every: rounds from one to the next.
    """

    def __init__(self, place: str | Path | None, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"checkpoint_every: expected a whole number >= 1, got {every!r}")
        self.place = None if place is None else Path(place)
        if self.place is not None and not self.place.parent.is_dir():
            raise FileNotFoundError(f"checkpoint: there is no folder {self.place.parent}; make it first")
        self.every = every

    def due(self, made: int, total: int) -> bool:
        """Whether one is to be written after so many rounds."""
        return self.place is not None and (made % self.every == 0 or made == total)

    def save(self, values: dict[str, Any], carrier: Carrier) -> None:
        """Write what a run has."""
        assert self.place is not None
        data = pack({**values, "carrier": carrier.position()})
        write_whole(self.place, hashlib.sha256(data).digest() + data)

    def load(self, carrier: Carrier) -> dict[str, Any] | None:
        """What was saved, or ``None``; the carrier goes on counting where it was.

        :raises ValueError: where the file is no checkpoint.
        """
        if self.place is None or not self.place.exists():
            return None
        try:
            found = self.place.read_bytes()
            if hashlib.sha256(found[32:]).digest() != found[:32]:
                raise ValueError("it is not what was written")
            values = unpack(found[32:])
            carrier.go_on(values["carrier"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.place} is no checkpoint, or a broken one ({error}); delete it to start anew"
            ) from error
        return dict(values)

    def same_run(self, saved: dict[str, Any], facts: dict[str, Any]) -> None:
        """Refuse a checkpoint whose facts are others, in words."""
        for name, expected in facts.items():
            got = saved.get(name)
            if got != expected:
                if isinstance(got, dict) and isinstance(expected, dict):  # which are long
                    differ = [k for k in {**got, **expected} if got.get(k) != expected.get(k)]
                    got, expected = ({k: x.get(k) for k in differ} for x in (got, expected))
                raise ValueError(
                    f"{self.place} is the checkpoint of another run: {name} {got}, expected {expected}; give another file, or delete it to start anew"
                )


def facts_of_run(rng_key: Array, silos: Silos) -> dict[str, Any]:
    """What checkpoints of the same run have, whatever runs: the seed, and the silos' sizes."""
    key = random.key_data(rng_key) if jnp.issubdtype(rng_key.dtype, dtypes.prng_key) else rng_key
    return {
        "silos": {name: {g: n[i] for g, n in silos.sizes.items()} for i, name in enumerate(silos.names)},
        "seed": np.asarray(key).tolist(),
    }
