"""Checkpoint of a run at the server: one file, which each write replaces as a whole."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes, random

from numpyro_fed._typing import Facts, Values
from numpyro_fed.data.silos import Silos
from numpyro_fed.rounds.files import locked, read_sealed, write_sealed
from numpyro_fed.rounds.remote import Carrier
from numpyro_fed.rounds.serialization import pack, unpack


class Checkpoint:
    """File with the state of a run.

    :param place: its path, or ``None`` for no checkpoint.
    :param every: number of rounds from one write to the next.
    :raises ValueError: for an ``every`` that is no positive whole number.
    :raises FileNotFoundError: if the folder of the file does not exist.
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
        """Return a context in which no other run can use the file.

        :raises ValueError: naming the file, if another run uses it.
        """
        return nullcontext() if self.place is None else locked(self.place)

    def due(self, made: int, last: bool) -> bool:
        """Return whether the file is due after ``made`` rounds.

        :param last: whether the run ends with them.
        """
        return self.place is not None and (made % self.every == 0 or last)

    def save(self, values: Values, carrier: Carrier) -> bool:
        """Write the state of a run and the position of its carrier.

        :return: whether the file was written. If not, silos have to keep the slots that the last
            one names.
        :warns UserWarning: the first time that the file cannot be written.
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
                    "and it tries again when the next checkpoint is due: make room on the disk",
                    stacklevel=5,
                )
            self._warned = True
            return False
        return True

    def load(self, carrier: Carrier) -> Values | None:
        """Return the saved state, or ``None`` without a file.

        The carrier continues from its saved position.

        :raises ValueError: naming the file, if it is no checkpoint or a damaged one.
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

    def same_run(self, saved: Values, facts: Facts) -> None:
        """Raise a ``ValueError`` if the facts of a saved state are not those of this run."""
        for name, expected in facts.items():
            got = saved.get(name)
            if got != expected:
                if isinstance(got, dict) and isinstance(expected, dict):  # long: show differences
                    differ = [k for k in {**got, **expected} if got.get(k) != expected.get(k)]
                    got, expected = ({k: x.get(k) for k in differ} for x in (got, expected))
                raise ValueError(
                    f"{self.place} is the checkpoint of another run: {name} {got}, expected "
                    f"{expected}; give another file, or delete it to start anew"
                )


def facts_of_run(rng_key: Array, silos: Silos) -> Facts:
    """Return the facts by which the checkpoints of any run are told apart: seed and silo sizes."""
    key = random.key_data(rng_key) if jnp.issubdtype(rng_key.dtype, dtypes.prng_key) else rng_key
    return {
        "silos": {
            name: {g: n[i] for g, n in silos.sizes.items()} for i, name in enumerate(silos.names)
        },
        "seed": np.asarray(key).tolist(),
    }
