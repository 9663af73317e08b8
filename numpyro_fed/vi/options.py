"""Options of the variational fits, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import optax

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import MAX_BATCH
from numpyro_fed.privacy.differential import Privacy


@dataclass(frozen=True)
class Options:
    """Options of a variational fit, as :class:`~numpyro_fed.SFVI` and its kin take them.

    :param num_points: of conducive rounds; ``None`` in other fits.
    """

    optim: optax.GradientTransformation | None
    local_optim: optax.GradientTransformation | None
    num_particles: int
    num_local_particles: int
    batch_size: int | None
    validate: bool
    secure_sum: bool
    num_local_steps: int = 1
    num_points: int | None = None
    privacy: Privacy | None = None

    @property
    def rounds_only(self) -> bool:
        """True under privacy or secure sums: a guard in each silo decides what it answers."""
        return self.privacy is not None or self.secure_sum

    def checked(self) -> "Options":
        """Return these options, or raise an error that names the one out of range.

        ``optim`` takes the place of a ``local_optim`` that is None.

        :raises TypeError: for optimizers that are not optax's, and other wrong types.
        :raises ValueError: for numbers out of range.
        """
        own = self.optim if self.local_optim is None else self.local_optim
        without = self.num_points is not None and own is None
        for name, value in () if without else (("optim", self.optim), ("local_optim", own)):
            if not isinstance(value, optax.GradientTransformation):
                raise TypeError(
                    f"{name}: expected an optax transformation, e.g. optax.adam(1e-2), got "
                    f"{type(value).__name__}"
                )
        numbers = {
            "num_particles": self.num_particles,
            "num_local_particles": self.num_local_particles,
            "num_local_steps": self.num_local_steps,
        }
        optional = {"batch_size": self.batch_size, "num_points": self.num_points}
        numbers |= {name: value for name, value in optional.items() if value is not None}
        for name, value in numbers.items():
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not (whole and value >= 1):
                raise ValueError(f"{name}: expected a whole number >= 1, got {value!r}")
        if self.batch_size is not None and self.batch_size > MAX_BATCH:
            raise ValueError(f"batch_size: expected at most {MAX_BATCH:,}, got {self.batch_size:,}")
        if self.privacy is not None and not isinstance(self.privacy, Privacy):
            raise TypeError(
                f"privacy: expected fed.Privacy(...) or None, got {type(self.privacy).__name__}"
            )
        if self.privacy is not None and self.num_particles != 1:
            raise ValueError(
                f"num_particles={self.num_particles}: under privacy each draw of theta would have "
                "noise of its own; expected 1"
            )
        if not isinstance(self.secure_sum, bool):
            raise TypeError(f"secure_sum: expected True or False, got {self.secure_sum!r}")
        return replace(self, local_optim=own)

    def check_rounds(
        self,
        num_rounds: int,
        tol: float | None,
        participation: float | Mapping[str, float] | None,
        answering: float | Mapping[str, float] | None,
        state: PyTree,
    ) -> None:
        """Refuse arguments of a run that are out of range, or that privacy or sums exclude."""
        whole = isinstance(num_rounds, int | np.integer) and not isinstance(num_rounds, bool)
        if not whole or num_rounds < 1:
            raise ValueError(f"num_rounds: expected a whole number >= 1, got {num_rounds!r}")
        if tol is not None and not (math.isfinite(tol) and tol > 0):
            raise ValueError(f"tol: expected a number of nats > 0, got {tol!r}")
        if self.secure_sum and not (participation is None and answering is None):
            raise ValueError(
                "secure_sum=True: a sum needs the replies of all silos; expected "
                "participation=None and answering=None"
            )
        if self.privacy is None:
            return
        if tol is not None:
            raise ValueError(
                f"tol={tol}: under privacy no bound leaves the silos; expected tol=None"
            )
        before = 0 if state is None else int(state.server.i)
        if before + num_rounds > self.privacy.num_rounds:
            raise ValueError(
                f"num_rounds={num_rounds}{f' after {before}' if before else ''}: the budget of "
                f"privacy is for {self.privacy.num_rounds} rounds; expected no more"
            )
