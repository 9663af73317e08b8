"""The server's checkpoint of a run: one file, replaced as a whole."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.rounds.files import locked, read_sealed, write_sealed
from numpyro_fed.rounds.remote import Carrier
from numpyro_fed.rounds.serialization import pack, unpack

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
            raise FileNotFoundError(
                f"checkpoint: there is no folder {self.place.parent}; make it first"
            )
        self.every = every
        self._warned = False

    def held(self) -> AbstractContextManager[None]:
        """Hold the file while a run uses it.

        :raises ValueError: naming the file, where another run uses it.
        """
        return nullcontext() if self.place is None else locked(self.place)

    def due(self, made: int, total: int) -> bool:
        """Whether one is to be written after so many rounds."""
        return self.place is not None and (made % self.every == 0 or made == total)

    def save(self, values: dict[str, Any], carrier: Carrier) -> bool:
        """Write what a run has.

        :return: whether it was written; if not, silos have to keep what the last one names.
        :warns UserWarning: once, where it cannot be written.
        """
        assert self.place is not None
        data = pack({**values, "carrier": carrier.position()})
        try:
            write_sealed(self.place, data, "checkpoint")
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"{self.place}: the checkpoint could not be written ({error}); the run goes "
                    "on, its results are kept in memory, "
                    "and the next that is due is tried again: make room on the disk",
                    stacklevel=4,
                )
            self._warned = True
            return False
        return True

    def load(self, carrier: Carrier) -> dict[str, Any] | None:
        """What was saved, or ``None``; the carrier goes on counting where it was.

        :raises ValueError: in words, where the file is no checkpoint, or a broken one.
        """
        if self.place is None or not self.place.exists():
            return None
        data = read_sealed(self.place, "checkpoint")
        try:
            values = unpack(data)
            carrier.go_on(values["carrier"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.place}: expected the checkpoint of a run of this version, got another "
                f"({error}); delete it to start anew"
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
                    f"{self.place} is the checkpoint of another run: {name} {got}, expected "
                    f"{expected}; give another file, or delete it to start anew"
                )


def facts_of_run(rng_key: Array, silos: Silos) -> dict[str, Any]:
    """What checkpoints of the same run have, whatever runs: the seed, and the silos' sizes."""
    key = random.key_data(rng_key) if jnp.issubdtype(rng_key.dtype, dtypes.prng_key) else rng_key
    return {
        "silos": {
            name: {g: n[i] for g, n in silos.sizes.items()} for i, name in enumerate(silos.names)
        },
        "seed": np.asarray(key).tolist(),
    }
