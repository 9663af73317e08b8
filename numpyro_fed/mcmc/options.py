"""Arguments of a kernel, and their checks before it sees any data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.mcmc.schedules import check_step_size
from numpyro_fed.surrogates.gaussian import Surrogates

__all__ = ["Options", "Whitened"]


@runtime_checkable
class Whitened(Protocol):
    """Result of a variational fit whose q(theta) can start a fit of surrogates."""

    @property
    def state(self) -> PyTree:
        """State after the last round."""

    @property
    def whitening(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and square root of the covariance of a Gaussian q(theta), else ``None``."""


@dataclass(frozen=True)
class Options:
    """Arguments of a kernel as the user wrote them; see :class:`numpyro_fed.FSGLD`."""

    step_size: float | str | Callable
    num_local_steps: int | str
    batch_size: int | None
    surrogate: str | Surrogates | None
    alpha: float | str
    selection: str | Sequence[float] | Array | None
    preconditioner: str | None
    bias_target: float
    public: Sequence[str]
    validate: bool
    round_price: float = 40.0
    noise_correction: bool = False
    num_kept: int = 1
    refresh_every: int | None = None
    distinct_silos: bool = False
    no_answer: float = 0.0
    element_batches: bool = True
    control_variates: bool = False
    init_from: Whitened | None = None

    def checked(self) -> "Options":
        """Return the arguments after all checks that need no data."""
        if isinstance(self.public, str):
            raise ValueError(
                f"public: expected a sequence of site names, got {self.public!r}; write "
                f"({self.public!r},)"
            )
        h = self.step_size
        check_step_size(h, ("auto", "adaptive"))
        if h == "auto" and self.preconditioner is None:
            raise ValueError(
                'step_size="auto" needs whitened coordinates; expected preconditioner="surrogate", '
                "got None"
            )
        first = float(h(jnp.zeros((), jnp.int32))) if callable(h) else h
        if not isinstance(first, str) and self.preconditioner is not None and not first < 4:
            raise ValueError(
                "step_size: in preconditioned units a step of 4 or more diverges by itself, got "
                f'{first:g}; expected "auto" or about 0.001 to 0.1'
            )
        self._check_visit()
        size = self.batch_size
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1
        ):
            raise ValueError(
                f"batch_size: expected an integer >= 1 or None (all rows), got {size!r}"
            )
        if not isinstance(self.bias_target, Real) or not 0 < self.bias_target < 1:
            raise ValueError(f"bias_target: expected a number in (0, 1), got {self.bias_target!r}")
        if self.alpha != "auto" and (
            not isinstance(self.alpha, Real) or not 0 <= self.alpha < np.inf
        ):
            raise ValueError(f'alpha: expected a finite number >= 0, got {self.alpha!r}; or "auto"')
        named = isinstance(self.surrogate, str) and self.surrogate in (
            "score",
            "laplace",
            "moments",
        )
        if not (named or self.surrogate is None or isinstance(self.surrogate, Surrogates)):
            raise ValueError(
                'surrogate: expected "score", "laplace", "moments", a fed.surrogates.Surrogates or '
                f"None, got {self.surrogate!r}"
            )
        if not (
            self.preconditioner is None
            or (isinstance(self.preconditioner, str) and self.preconditioner == "surrogate")
        ):
            raise ValueError(
                f'preconditioner: expected "surrogate" or None, got {self.preconditioner!r}'
            )
        if self.init_from is not None:
            self._check_start()
        if self.conducive and self.surrogate is None:
            raise ValueError(
                "alpha > 0 weights the conducive gradient of the surrogates; expected "
                'surrogate="score" (or "laplace", or a Surrogates), got None. DSGLD is the kernel '
                "without surrogates"
            )
        return self

    def _check_start(self) -> None:
        known = isinstance(self.init_from, Whitened)
        if self.init_from is None or not known or self.init_from.whitening is None:
            got = "one of another guide" if known else type(self.init_from).__name__
            raise ValueError(
                "init_from: expected the result of a variational fit with fed.AutoSiloNormal, got "
                f"{got}"
            )
        if not (isinstance(self.surrogate, str) and self.surrogate == "score"):
            raise ValueError(
                'init_from: it starts a fit of score surrogates; expected surrogate="score", '
                f"got {self.surrogate!r}"
            )

    @property
    def conducive(self) -> bool:
        """True if the kernel uses conducive gradients."""
        return isinstance(self.alpha, str) or self.alpha > 0

    @property
    def separates(self) -> bool:
        """True if a step computes its conducive residual e by itself.

        This takes conducive gradients, and whitened coordinates in which to cut e.
        """
        return self.preconditioner is not None and self.conducive

    def _check_visit(self) -> None:
        steps, auto = self.num_local_steps, self.num_local_steps == "auto"
        if not auto and not _is_count(steps):
            raise ValueError(f'num_local_steps: expected an integer >= 1 or "auto", got {steps!r}')
        if isinstance(self.selection, str) and self.selection not in ("auto", "size"):
            raise ValueError(
                f'selection: expected "auto", "size", probabilities or None, got {self.selection!r}'
            )
        for name, value in (("num_local_steps", steps), ("selection", self.selection)):
            if isinstance(value, str) and value == "auto" and self.preconditioner is None:
                raise ValueError(
                    f'{name}="auto" needs whitened coordinates; expected '
                    'preconditioner="surrogate", got None'
                )
        if self.noise_correction and (self.preconditioner is None or callable(self.step_size)):
            raise ValueError(
                "noise_correction=True needs whitened coordinates and one step size; expected "
                'preconditioner="surrogate" and step_size= a number or "auto", '
                f"got preconditioner={self.preconditioner!r}, step_size={self.step_size!r}"
            )
        if not isinstance(self.round_price, Real) or not 0 <= self.round_price < np.inf:
            raise ValueError(
                f"round_price: expected a number of local steps >= 0, got {self.round_price!r}"
            )
        if self.control_variates and (size := self.batch_size) is None:
            raise ValueError(
                f"control_variates=True is for minibatches; expected batch_size=..., got {size}"
            )
        if self.control_variates and self.surrogate is None:
            raise ValueError(
                "control_variates=True needs a point at which to center gradients; expected "
                'surrogate="score", got None'
            )
        if not isinstance(self.no_answer, Real) or not 0 <= self.no_answer < 1:
            raise ValueError(f"no_answer: expected a probability in [0, 1), got {self.no_answer!r}")
        if not _is_count(self.num_kept):
            raise ValueError(f"num_kept: expected an integer >= 1, got {self.num_kept!r}")
        if self.refresh_every is not None:
            if not _is_count(self.refresh_every):
                raise ValueError(
                    "refresh_every: expected a number of rounds >= 1, or None, got "
                    f"{self.refresh_every!r}"
                )
            if self.surrogate != "score" or self.alpha == "auto" or not self.separates:
                raise ValueError(
                    'refresh_every fits score surrogates again; expected surrogate="score", '
                    'preconditioner="surrogate" and a number alpha > 0, '
                    f"got {self.surrogate!r}, {self.preconditioner!r} and {self.alpha!r}"
                )
        if not isinstance(steps, str) and steps % self.num_kept:
            raise ValueError(
                f"num_kept={self.num_kept} does not divide the steps of a visit; expected a "
                f"divisor of num_local_steps={steps}"
            )


def _is_count(n: object) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and bool(n >= 1)
