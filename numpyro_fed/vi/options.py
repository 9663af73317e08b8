"""Options of the variational fits, checked."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from numpyro_fed.privacy.differential import Privacy

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Options of a variational fit, as :class:`~numpyro_fed.SFVI` and its kin take them."""

    optim: Any
    local_optim: Any
    num_particles: int
    num_local_particles: int
    batch_size: int | None
    validate: bool
    num_local_steps: int = 1
    conducive: bool = False
    privacy: Privacy | None = None
    secure_sum: bool = False

    @property
    def rounds_only(self) -> bool:
        """Flag of a closed fit: remote silos answer rounds alone, and no questions."""
        return self.privacy is not None or self.secure_sum

    def checked(self) -> "Options":
        """Return these options, or raise an error that names the one out of range.

        :raises TypeError: for optimizers that are not optax's, and other wrong types.
        :raises ValueError: for numbers out of range.
        """
        without = self.conducive and self.optim is None and self.local_optim is None
        for name in () if without else ("optim", "local_optim"):
            value = getattr(self, name)
            if not isinstance(value, optax.GradientTransformation):
                raise TypeError(
                    f"{name}: expected an optax transformation, e.g. optax.adam(1e-2), got "
                    f"{type(value).__name__}"
                )
        for name in ("num_particles", "num_local_particles", "batch_size", "num_local_steps"):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not (value is None and name == "batch_size") and not (whole and value >= 1):
                raise ValueError(f"{name}: expected a whole number >= 1, got {value!r}")
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
        return self

    def check_rounds(
        self, num_rounds: int, tol: Any, participation: Any, answering: Any, state: Any
    ) -> None:
        """Refuse arguments of a run that exclude a privacy budget or secure sums."""
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
