"""Arguments of a kernel, and their checks before it sees any data."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.density.factors import Factors
from numpyro_fed.mcmc.schedules import check_step_size
from numpyro_fed.surrogates.gaussian import Surrogates


@runtime_checkable
class Whitened(Protocol):
    """Result of a variational fit whose q(theta) can start a fit of surrogates."""

    @property
    def state(self) -> PyTree:
        """State after the last round."""

    @property
    def whitening(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and square root of the covariance of a Gaussian q(theta), else ``None``."""


def check_init_from(result: object) -> None:
    """Raise unless a start is ``None`` or a result with a Gaussian q(theta)."""
    if result is None:
        return
    got = type(result).__name__
    if isinstance(result, Whitened):
        if result.whitening is not None:
            return
        got = "one of another guide"
    raise ValueError(
        f"init_from: expected the result of a variational fit with fed.AutoSiloNormal, got {got}"
    )


def gaussian_of(result: Whitened | None, factors: Factors) -> tuple[np.ndarray, np.ndarray] | None:
    """Return mean and root of the covariance of a variational fit's q(theta)."""
    if result is None or result.whitening is None:
        return None
    loc, scale = result.whitening
    if len(loc) != factors.dim:
        raise ValueError(
            f"init_from: expected a fit of the same model, with {factors.dim} unconstrained global "
            f"latents {[n for n, _ in factors.global_sites]}, got {len(loc)}"
        )
    return loc, scale


@dataclass(frozen=True)
class Step:
    """Size, coordinates and noise of a kernel's steps, in place of a plain ``step_size``.

    :param size: h: a number, an optax schedule of the number of steps, ``"auto"``, or
        ``"adaptive"`` (:class:`SGLD` and kernels over networks).
    :param bias_target: accepted relative inflation of the standard deviations (sds), under
        ``"auto"`` and ``"adaptive"``.
    :param noise_correction: inject less noise, by the amount of the silos' noise
        (:class:`FSGLD`). This allows four times the step at the same inflation, and is no longer
        the paper's update.
    :param control_variates: subtract from a minibatch's gradient the gradient of the same rows at
        the surrogates' center, and add the whole silo's gradient there (:class:`FSGLD`; Baker et
        al. 2019). The latter is computed once. A step takes two gradients; with many rows, its
        noise is far smaller.
    :param preconditioner: ``"surrogate"``: steps in the coordinates that the covariance of the
        surrogate posterior whitens; ``None``: in those of the model, as in the papers.
    :raises ValueError: for values that no kernel can use.

    **Example**::

        >>> import numpyro_fed as fed
        >>> careful = fed.FSGLD(lambda y: None, step_size=fed.Step(bias_target=0.01))
        >>> as_printed = fed.FSGLD(lambda y: None, step_size=fed.Step(1e-4, preconditioner=None))
    """

    size: float | str | Callable = "auto"
    _: KW_ONLY
    bias_target: float = 0.02
    noise_correction: bool = False
    control_variates: bool = False
    preconditioner: str | None = "surrogate"

    def __post_init__(self) -> None:
        check_step_size(self.size)
        whitening = self.preconditioner
        if whitening is not None and not (isinstance(whitening, str) and whitening == "surrogate"):
            raise ValueError(f'preconditioner: expected "surrogate" or None, got {whitening!r}')
        if isinstance(self.size, str) and self.size == "auto" and whitening is None:
            raise ValueError(
                'step_size="auto" needs whitened coordinates; expected preconditioner="surrogate", '
                "got None"
            )
        if not isinstance(self.bias_target, Real) or not 0 < self.bias_target < 1:
            raise ValueError(f"bias_target: expected a number in (0, 1), got {self.bias_target!r}")
        if self.noise_correction and (whitening is None or callable(self.size)):
            raise ValueError(
                "noise_correction=True needs whitened coordinates and one step size; expected "
                'preconditioner="surrogate" and a number or "auto", '
                f"got preconditioner={whitening!r}, a step of {self.size!r}"
            )

    @property
    def learned(self) -> bool:
        """True if the kernel learns the size in its warm-up."""
        return isinstance(self.size, str) and self.size == "adaptive"

    @property
    def schedule(self) -> Callable | None:
        """Size by number of steps, or ``None`` for a constant one."""
        return self.size if callable(self.size) else None


def as_step(step_size: "float | str | Callable | Step", *, whitened: bool = False) -> Step:
    """Return a kernel's ``step_size`` as a :class:`Step`.

    ``"auto"`` is in whitened coordinates, and other sizes are if ``whitened``.
    """
    if isinstance(step_size, Step):
        return step_size
    whitened = whitened or (isinstance(step_size, str) and step_size == "auto")
    return Step(step_size, preconditioner="surrogate" if whitened else None)


@dataclass(frozen=True)
class Options:
    """Arguments of a kernel as the user wrote them; see :class:`numpyro_fed.FSGLD`."""

    step: Step
    num_local_steps: int
    batch_size: int | None
    surrogate: str | Surrogates | None
    alpha: float
    selection: str | Sequence[float] | Array | None
    public: Sequence[str]
    validate: bool
    num_kept: int = 1
    element_batches: bool = True
    init_from: Whitened | None = None

    def checked(self) -> "Options":
        """Return the arguments after all checks that need no data."""
        if isinstance(self.public, str):
            raise ValueError(
                f"public: expected a sequence of site names, got {self.public!r}; write "
                f"({self.public!r},)"
            )
        h = self.step.size
        first = float(h(jnp.zeros((), jnp.int32))) if callable(h) else h
        if not isinstance(first, str) and self.step.preconditioner is not None and not first < 4:
            raise ValueError(
                f'step_size: expected "auto" or about 0.001 to 0.1, got {first:g}; whitened steps '
                "of 4 or more diverge by themselves"
            )
        self._check_visit()
        size = self.batch_size
        if size is not None and not _is_count(size):
            raise ValueError(
                f"batch_size: expected an integer >= 1 or None (all rows), got {size!r}"
            )
        if not isinstance(self.alpha, Real) or not 0 <= self.alpha < np.inf:
            raise ValueError(f"alpha: expected a finite number >= 0, got {self.alpha!r}")
        self._check_surrogate()
        return self

    def _check_surrogate(self) -> None:
        given = self.surrogate
        named = isinstance(given, str) and given in ("score", "laplace", "moments")
        if not (named or given is None or isinstance(given, Surrogates)):
            raise ValueError(
                'surrogate: expected "score", "laplace", "moments", a fed.surrogates.Surrogates or '
                f"None, got {given!r}"
            )
        if self.init_from is not None:
            self._check_start()
        if self.conducive and given is None:
            raise ValueError(
                'alpha > 0: expected surrogate="score", "laplace", "moments" or a Surrogates, got '
                "None; or take DSGLD"
            )
        if self.step.control_variates and self.batch_size is None:
            raise ValueError(
                "control_variates=True is for minibatches; expected batch_size=..., got None"
            )
        if self.step.control_variates and given is None:
            raise ValueError(
                "control_variates=True needs a point at which to center gradients; expected "
                'surrogate="score", got None'
            )

    def _check_start(self) -> None:
        check_init_from(self.init_from)
        if not (isinstance(self.surrogate, str) and self.surrogate == "score"):
            raise ValueError(
                'init_from: it starts a fit of score surrogates; expected surrogate="score", '
                f"got {self.surrogate!r}"
            )

    @property
    def conducive(self) -> bool:
        """True if the kernel uses conducive gradients."""
        return self.alpha > 0

    @property
    def separates(self) -> bool:
        """True if a step computes its conducive residual e by itself.

        This takes conducive gradients, and whitened coordinates in which to cut e.
        """
        return self.step.preconditioner is not None and self.conducive

    @property
    def distinct(self) -> bool:
        """True if vectorized chains visit different silos."""
        return isinstance(self.selection, str) and self.selection == "distinct"

    def _check_visit(self) -> None:
        steps, f = self.num_local_steps, self.selection
        if not _is_count(steps):
            raise ValueError(f"num_local_steps: expected an integer >= 1, got {steps!r}")
        if isinstance(f, str) and f not in ("auto", "distinct", "size"):
            raise ValueError(
                f'selection: expected "auto", "distinct", "size", probabilities or None, got {f!r}'
            )
        if isinstance(f, str) and f == "auto" and self.step.preconditioner is None:
            raise ValueError(
                'selection="auto" needs whitened coordinates; expected step_size="auto" or '
                'fed.Step(..., preconditioner="surrogate"), got coordinates of the model'
            )
        if not _is_count(self.num_kept):
            raise ValueError(f"num_kept: expected an integer >= 1, got {self.num_kept!r}")
        if steps % self.num_kept:
            raise ValueError(
                f"num_kept={self.num_kept} does not divide the steps of a visit; expected a "
                f"divisor of num_local_steps={steps}"
            )


def _is_count(n: object) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and bool(n >= 1)
