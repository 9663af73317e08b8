"""Everything a Langevin kernel settles before its first round: checks, surrogates, local map, step size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.density import Factors
from numpyro_fed.factorise import factorise
from numpyro_fed.federation import Cost
from numpyro_fed.local_map import Units
from numpyro_fed.mcmc import pilot
from numpyro_fed.mcmc.langevin import Conducive, LatentCoordinates, Plan, Tuning
from numpyro_fed.mcmc.schedules import check_step_size
from numpyro_fed.proof import elements_are_independent, prove, prove_batch
from numpyro_fed.silos import Silos
from numpyro_fed.storage import head, largest
from numpyro_fed.surrogates import laplace, score
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates

__all__ = ["Ground", "Options", "Prepared", "groundwork", "prepare"]

_PROOF_ROWS = 1 << 13  # rows that the proof check of a fit by minibatches takes, over all silos


@dataclass(frozen=True)
class Options:
    """A kernel's arguments as the user gave them; see :class:`numpyro_fed.FSGLD`."""

    step_size: float | str | Callable
    num_local_steps: int
    batch_size: int | None
    surrogate: str | Surrogates | None
    alpha: float
    selection: Sequence[float] | Array | None
    preconditioner: str | None
    bias_target: float
    public: Sequence[str]
    validate: bool

    def checked(self) -> "Options":
        """Refuse what can be refused before any data are seen."""
        if isinstance(self.public, str):
            raise ValueError(
                f"public: expected a sequence of site names, got {self.public!r}; write ({self.public!r},)"
            )
        h = self.step_size
        check_step_size(h, ("auto", "adaptive"))
        if h == "auto" and self.preconditioner is None:
            raise ValueError(
                'step_size="auto" needs whitened coordinates; expected preconditioner="surrogate", got None'
            )
        if self.num_local_steps < 1 or int(self.num_local_steps) != self.num_local_steps:
            raise ValueError(f"num_local_steps: expected an integer >= 1, got {self.num_local_steps}")
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1):
            raise ValueError(f"batch_size: expected an integer >= 1 or None (all rows), got {size!r}")
        if not isinstance(self.bias_target, Real) or not 0 < self.bias_target < 1:
            raise ValueError(f"bias_target: expected a number in (0, 1), got {self.bias_target!r}")
        if not np.isfinite(self.alpha) or self.alpha < 0:
            raise ValueError(f"alpha: expected a finite number >= 0, got {self.alpha}")
        if isinstance(self.surrogate, str) and self.surrogate not in ("score", "laplace"):
            raise ValueError(
                f'surrogate: expected "score", "laplace", a fed.surrogates.Surrogates or None, got {self.surrogate!r}'
            )
        if self.preconditioner not in ("surrogate", None):
            raise ValueError(f'preconditioner: expected "surrogate" or None, got {self.preconditioner!r}')
        if self.alpha > 0 and self.surrogate is None:
            raise ValueError(
                'alpha > 0 weights the conducive gradient of the surrogates; expected surrogate="score" (or '
                '"laplace", or a Surrogates), got None. DSGLD is the kernel without surrogates'
            )
        return self


class Prepared(NamedTuple):
    """What a kernel needs for its rounds.

    :param plan: the static facts.
    :param tuning: the numbers.
    :param surrogates: ``None`` where none are used.
    :param cost: what the preparation cost each silo.
    """

    plan: Plan
    tuning: Tuning
    surrogates: Surrogates | None
    cost: Cost


class Ground(NamedTuple):
    """What is known of a model and its data once both are checked and the options' fits are made."""

    factors: Factors
    units: Units | None
    batch: tuple[str, int] | None
    tuning: Tuning
    surrogates: Surrogates | None
    cost: Cost


def groundwork(model: Callable, silos: Silos, extra: dict[str, Any], options: Options) -> Ground:
    """Check model and data, prove the factors, and fit surrogates and local map."""
    factors = factorise(model, silos, public=tuple(options.public), extra=extra)
    if not factors.dim:
        raise ValueError("the model has no global latent site: its silos have nothing in common to learn")
    selection = _selection(options.selection, silos)
    batch = _batch(options.batch_size, factors, silos)
    _check_given(options.surrogate, factors, silos)
    silos = silos.with_shared(**extra)
    if options.validate:
        # a fit by minibatches never evaluates all rows at once, so neither does its proof: they might not fit in memory
        some = silos if batch is None else head(silos, batch[0], _PROOF_ROWS)
        prove(factors, some)
        if batch is not None:
            prove_batch(factors, some, *batch)
    units = _units(factors, silos)
    surrogates, fitted = _surrogates(factors, silos, units, options)
    tuning = _tuning(factors, options, selection, surrogates, fitted)
    return Ground(factors, units, batch, tuning, surrogates, Cost() if fitted is None else fitted.cost)


def prepare(model: Callable, silos: Silos, extra: dict[str, Any], options: Options) -> Prepared:
    """:func:`groundwork`, and the step size."""
    factors, units, batch, tuning, surrogates, cost = groundwork(model, silos, extra, options)
    silos = silos.with_shared(**extra)
    schedule = options.step_size if callable(options.step_size) else None
    cut = options.preconditioner is not None and options.alpha > 0
    plan = Plan(factors, units, int(options.num_local_steps), batch, cut, schedule)
    if options.step_size == "adaptive":
        tuning = tuning._replace(inflation=jnp.asarray(1 + options.bias_target, tuning.loc.dtype))
    elif options.preconditioner is not None:
        cost += pilot.cost(plan, tuning)
        tuning = pilot.settle(plan, tuning, silos, options.bias_target if options.step_size == "auto" else None)
    return Prepared(plan, tuning, surrogates, cost)


def _selection(selection: Any, silos: Silos) -> np.ndarray:
    if selection is None:
        return np.full(len(silos), 1 / len(silos))
    f = np.asarray(selection, np.float64)
    if f.shape != (len(silos),):
        raise ValueError(f"selection: expected one probability for each of the {len(silos)} silos, got shape {f.shape}")
    if not (f > 0).all():
        raise ValueError(
            f"selection: expected probabilities > 0, got {f[np.argmin(f)]} for silo "
            f"{silos.names[int(np.argmin(f))]!r}; a silo that is never visited has no say in the posterior"
        )
    if not abs(f.sum() - 1) <= 1e-6:
        raise ValueError(f"selection: expected probabilities that sum to one, got a sum of {f.sum():.6g}")
    return f / f.sum()


def _batch(size: int | None, factors: Factors, silos: Silos) -> tuple[str, int] | None:
    if size is None:
        return None
    if factors.local_sites:
        names = [s.name for s in factors.local_sites]
        raise ValueError(
            f"batch_size={size} with local latents {names}: their Metropolis moves need all rows of a silo; "
            "expected batch_size=None"
        )
    group = factors.batch_group()
    sizes = silos.sizes[group]
    if size > min(sizes):
        small = silos.names[int(np.argmin(sizes))]
        raise ValueError(
            f"batch_size={size} is more than silo {small!r} has: {min(sizes)} rows of {group!r}; expected at "
            f"most {min(sizes)}, or None for all rows"
        )
    return group, int(size)


def _units(factors: Factors, silos: Silos) -> Units | None:
    groups = factors.latent_groups
    if not groups:
        return None
    if len(groups) == 1:
        units = Units(factors, groups[0], largest(silos))
        if elements_are_independent(factors, units, silos):
            return units
    return Units(factors, None, largest(silos))


def _check_given(given: str | Surrogates | None, factors: Factors, silos: Silos) -> None:
    if not isinstance(given, Surrogates):
        return
    if len(given) != len(silos) or given.dim != factors.dim:
        raise ValueError(
            f"surrogate: expected factors of {len(silos)} silos in dimension {factors.dim} "
            f"({[name for name, _ in factors.global_sites]} unconstrained), got {given!r}"
        )
    given.posterior()  # positive definite, or an error in words


def _surrogates(
    factors: Factors, silos: Silos, units: Units | None, options: Options
) -> tuple[Surrogates | None, score.ScoreFit | None]:
    given = options.surrogate
    wanted = options.alpha > 0 or options.preconditioner is not None
    fitted = None
    if units is not None or (wanted and not isinstance(given, Surrogates)):
        fit = laplace.fit if given == "laplace" else score.fit
        fitted = fit(factors, silos, units)
    if isinstance(given, Surrogates):
        return given, fitted
    return (fitted.surrogates if fitted is not None and wanted else None), fitted


def _tuning(
    factors: Factors,
    options: Options,
    selection: np.ndarray,
    surrogates: Surrogates | None,
    fitted: score.ScoreFit | None,
) -> Tuning:
    dtype = jnp.result_type(float)

    def array(x: Any) -> Array:
        return jnp.asarray(x, dtype)

    number = not callable(options.step_size) and not isinstance(options.step_size, str)
    tuning = Tuning(
        step_size=array(options.step_size if number else 0.0),
        alpha=array(options.alpha),
        selection=array(selection),
        loc=jnp.zeros(factors.dim, dtype),
        scale=None,
        conducive=None,
        latents=None,
        inflation=array(np.nan),
        cut=array(np.inf),
    )
    if surrogates is not None:
        tuning = _with_surrogates(tuning, surrogates, fitted, options, array)
    if fitted is not None and fitted.local_map is not None:
        loc, scale = (np.asarray(x, np.float64) for x in fitted.map_whitening)
        whiten = 1 / scale if scale.ndim == 1 else np.linalg.inv(scale)
        tuning = tuning._replace(latents=LatentCoordinates(array(loc), array(whiten), fitted.local_map))
    return tuning


def _with_surrogates(
    tuning: Tuning, surrogates: Surrogates, fitted: score.ScoreFit | None, options: Options, array: Callable
) -> Tuning:
    if fitted is not None and fitted.surrogates is surrogates:
        loc, scale = (np.asarray(x, np.float64) for x in fitted.posterior_whitening)
    else:
        loc, scale = _whitening(surrogates.posterior())
    if options.preconditioner is not None:
        tuning = tuning._replace(scale=array(scale))
    tuning = tuning._replace(loc=array(loc))
    if options.alpha == 0:
        return tuning
    # expanded around loc in float64: eta - Lambda theta would cancel in float32
    factors = jax.tree.map(lambda x: np.asarray(x, np.float64), surrogates.factors)
    at_loc = factors.precision * loc if surrogates.factors.is_diagonal else factors.precision @ loc
    shift = factors.eta - at_loc
    conducive = Conducive(*map(array, (shift, factors.precision, shift.sum(0), factors.precision.sum(0))))
    return tuning._replace(conducive=conducive)


def _whitening(posterior: Gaussian) -> tuple[np.ndarray, np.ndarray]:
    precision, eta = (np.asarray(x, np.float64) for x in (posterior.precision, posterior.eta))
    if posterior.is_diagonal:
        return eta / precision, 1 / np.sqrt(precision)
    return np.linalg.solve(precision, eta), np.linalg.cholesky(np.linalg.inv(precision))
