"""Setup of a Langevin kernel before its first round: checks, surrogates, local map, step size."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import largest, thin
from numpyro_fed.density.check import check_batch, check_factorization, elements_are_independent
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.density.nested import NestedUnits, nesting
from numpyro_fed.mcmc import pilot
from numpyro_fed.mcmc.config import Conducive, LangevinConfig, LatentCoordinates, Tuning
from numpyro_fed.mcmc.minibatch import find_members, pointing_groups
from numpyro_fed.mcmc.options import Options
from numpyro_fed.rounds.federated import Cost
from numpyro_fed.surrogates import laplace, score
from numpyro_fed.surrogates.gaussian import Surrogates
from numpyro_fed.surrogates.moments import with_moments
from numpyro_fed.surrogates.some_rows import fit_some, whole_gradients

__all__ = ["ModelSetup", "Setup", "make_setup", "model_setup"]

_CHECK_ROWS = 1 << 13  # rows of all silos in the check of the factorization, with minibatches


class Setup(NamedTuple):
    """Plan, numbers and surrogates that a kernel needs for its rounds.

    :param config: the static facts.
    :param tuning: the numbers.
    :param surrogates: the surrogates, or ``None`` without any.
    :param cost: cost of the setup for each silo.
    """

    config: LangevinConfig
    tuning: Tuning
    surrogates: Surrogates | None
    cost: Cost


class ModelSetup(NamedTuple):
    """Factors, units and fits of a model and its data, after their checks."""

    factors: Factors
    units: Units | None
    batch: tuple[str, int] | None
    tuning: Tuning
    surrogates: Surrogates | None
    cost: Cost


def model_setup(model: Callable, silos: Silos, extra: ModelArgs, options: Options) -> ModelSetup:
    """Check model, data and factorization, and fit surrogates and local map."""
    factors = factorize(model, silos, public=tuple(options.public), extra=extra)
    if not factors.dim:
        raise ValueError(
            "the model has no global latent site: its silos have nothing in common to learn"
        )
    selection = _selection(options.selection, silos)
    _check_latents(options, factors)
    _warn_of_params(factors)
    _check_given(options.surrogate, factors, silos)
    silos = silos.with_shared(**extra)
    units = _units(factors, silos)
    batch = _batch(options.batch_size, factors, silos, units)
    if options.validate:
        # with minibatches the rows might not fit in memory, so the check takes some of them
        some = silos if batch is None or units is not None else thin(silos, batch[0], _CHECK_ROWS)
        check_factorization(factors, some)
        if batch is not None and units is None:
            check_batch(factors, some, *batch)
    surrogates, fitted = _surrogates(factors, silos, units, batch, options)
    tuning = _tuning(factors, options, selection, surrogates, fitted)
    if batch is not None and units is not None:
        tuning = tuning._replace(members=find_members(factors, silos, batch[0]))
    return ModelSetup(
        factors, units, batch, tuning, surrogates, Cost() if fitted is None else fitted.cost
    )


def make_setup(model: Callable, silos: Silos, extra: ModelArgs, options: Options) -> Setup:
    """Make the whole setup: :func:`model_setup`, then the step size."""
    return _with_step_size(
        model_setup(model, silos, extra, options), silos.with_shared(**extra), options
    )


def _with_step_size(ground: ModelSetup, silos: Silos, options: Options) -> Setup:
    factors, units, batch, tuning, surrogates, cost = ground
    if options.step.control_variates:
        tuning = tuning._replace(anchor=whole_gradients(factors, tuning.loc, silos))
    config = LangevinConfig(
        factors,
        units,
        int(options.num_local_steps),
        batch,
        options.separates,
        options.step.schedule,
        options.num_kept,
    )
    if options.step.learned:
        inflation = 1 + options.step.bias_target
        tuning = tuning._replace(inflation=jnp.asarray(inflation, tuning.loc.dtype))
    elif options.step.preconditioner is not None:
        cost += pilot.cost(config, tuning)
        rule = pilot.Rule(
            options.step.bias_target if options.step.size == "auto" else None,
            isinstance(options.selection, str) and options.selection == "auto",
            options.step.noise_correction,
        )
        tuning = pilot.choose_step_size(config, tuning, silos, rule)
    return Setup(config, tuning, surrogates, cost)


def _selection(selection: str | Sequence[float] | Array | None, silos: Silos) -> np.ndarray:
    if selection is None or (isinstance(selection, str) and selection != "size"):
        return np.full(len(silos), 1 / len(silos))
    if isinstance(selection, str):  # "size" counts rows to which no other rows point
        targets = set(silos.index.values())
        sizes = np.sum(
            [n for group, n in silos.sizes.items() if group not in targets],
            axis=0,
            dtype=np.float64,
        )
        return sizes / sizes.sum()
    try:
        f = np.asarray(selection, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"selection: expected numbers, one for each of the silos {list(silos.names)} in this "
            f"order, got {selection!r}"
        ) from error
    if f.shape != (len(silos),):
        raise ValueError(
            f"selection: expected one probability for each of the {len(silos)} silos, got shape "
            f"{f.shape}"
        )
    if not (f > 0).all():
        raise ValueError(
            f"selection: expected probabilities > 0, got {f[np.argmin(f)]} for silo "
            f"{silos.names[int(np.argmin(f))]!r}; a silo that is never visited adds nothing to the "
            "posterior"
        )
    if not abs(f.sum() - 1) <= 1e-6:
        raise ValueError(
            f"selection: expected probabilities that sum to one, got a sum of {f.sum():.6g}"
        )
    return f / f.sum()


def _batch(
    size: int | None, factors: Factors, silos: Silos, units: Units | None
) -> tuple[str, int] | None:
    if size is None:
        return None
    if units is not None and units.group is None:
        names = [s.name for s in factors.local_sites]
        raise ValueError(
            f"batch_size={size} with local latents {names} that are one unit in a silo, or nested: "
            "they need all rows of a silo; expected batch_size=None"
        )
    group = factors.batch_group() if units is None else str(units.group)
    sizes = silos.sizes[group]
    if size > min(sizes):
        small = silos.names[int(np.argmin(sizes))]
        raise ValueError(
            f"batch_size={size} is more than silo {small!r} has: {min(sizes)} rows of {group!r}; "
            f"expected at most {min(sizes)}, or None for all rows"
        )
    return group, int(size)


def _units(factors: Factors, silos: Silos) -> Units | None:
    groups, pad = factors.latent_groups, largest(silos)
    if not groups:
        return None
    pair, units = nesting(factors), None
    if len(groups) == 1:
        units = Units(factors, groups[0], pad)
    elif pair is not None:
        units = NestedUnits(factors, None, pad, *pair)
    if units is not None and elements_are_independent(factors, units, silos):
        return units
    names = [s.name for s in factors.local_sites]
    why = f"elements of {groups[0]!r} are not independent given the global sites"
    if len(groups) > 1:
        why = (
            f"{list(groups)} are not two plates nested by index=, with inner elements that are "
            "independent given the outer ones"
        )
    warnings.warn(
        f"{why}, so the latents {names} of a silo are one unit: they move together (MALA), and a "
        "dense Laplace approximation, whose cost grows with the cube of their number, integrates "
        "them out",
        stacklevel=2,
    )
    return Units(factors, None, pad)


def _check_latents(options: Options, factors: Factors) -> None:
    """Raise an error for minibatches that a model with local latents does not support.

    Among these are minibatches of elements to which not all rows point.
    """
    names = [s.name for s in factors.local_sites]
    if not names or options.batch_size is None:
        return
    if not options.element_batches or options.step.learned:
        raise ValueError(
            f"batch_size={options.batch_size} with local latents {names} is for DSGLD, FSGLD, and "
            "SGLD without an adaptive step size; expected batch_size=None"
        )
    if options.step.control_variates:
        raise ValueError(
            f"control_variates=True is for models without local latents, got {names}; expected "
            "False"
        )
    if len(factors.latent_groups) == 1:
        pointing_groups(factors, factors.latent_groups[0])


def _warn_of_params(factors: Factors) -> None:
    """Warn of learned parameters, which keep their first values as in NumPyro's own kernels.

    Networks whose weights are all drawn have no such parameters.
    """
    drawn = {name.split("/")[0] for name, _ in factors.global_sites}
    kept = [
        n
        for n, kind in factors.undrawn
        if kind == "param" and n.removesuffix("$params") not in drawn
    ]
    if kept:
        warnings.warn(
            f"learned parameters {kept} are kept at their first values, since chains learn none; "
            "expected numpyro.sample with a prior in place of numpyro.param, or fed.SFVI, which "
            "learns them",
            stacklevel=5,
        )


def _check_given(given: str | Surrogates | None, factors: Factors, silos: Silos) -> None:
    if not isinstance(given, Surrogates):
        return
    if len(given) != len(silos) or given.dim != factors.dim:
        raise ValueError(
            f"surrogate: expected factors of {len(silos)} silos in dimension {factors.dim} "
            f"({[name for name, _ in factors.global_sites]} unconstrained), got {given!r}"
        )
    given.posterior()  # raises an error unless it is positive definite


def _start(options: Options, factors: Factors) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Return the Gaussian of a variational fit, and how far its last round moved it, in sds.

    The distance is known for conducive rounds alone; it is infinite for others.
    """
    if options.init_from is None or options.init_from.whitening is None:
        return None
    loc, scale = options.init_from.whitening
    if len(loc) != factors.dim:
        raise ValueError(
            f"init_from: expected a fit of the same model, with {factors.dim} unconstrained global "
            f"latents {[n for n, _ in factors.global_sites]}, got {len(loc)}"
        )
    return loc, scale, float(options.init_from.state.server._asdict().get("moved", np.inf))


def _surrogates(
    factors: Factors,
    silos: Silos,
    units: Units | None,
    batch: tuple[str, int] | None,
    options: Options,
) -> tuple[Surrogates | None, score.ScoreFit | None]:
    given = options.surrogate
    wanted = options.conducive or options.step.preconditioner is not None
    moments = wanted and given == "moments"
    fitted = None
    if units is not None or (wanted and not moments and not isinstance(given, Surrogates)):
        start, tall = _start(options, factors), batch is not None and units is None
        if start is not None and tall:
            start = (*start[:2], np.inf)  # a fit to some of the rows has a wider posterior
        fit = laplace.fit if given == "laplace" else partial(score.fit, start=start)
        if batch is not None and units is None:
            fitted = fit_some(fit, factors, silos, batch[0])
        else:
            fitted = fit(factors, silos, units)
    if moments:
        fitted = with_moments(factors, silos, fitted)
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

    h = options.step.size
    tuning = Tuning(
        step_size=array(0.0 if callable(h) or isinstance(h, str) else h),
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
        tuning = tuning._replace(
            latents=LatentCoordinates(array(loc), array(whiten), fitted.local_map)
        )
    return tuning


def _with_surrogates(
    tuning: Tuning,
    surrogates: Surrogates,
    fitted: score.ScoreFit | None,
    options: Options,
    array: Callable,
) -> Tuning:
    if fitted is not None and fitted.surrogates is surrogates:
        loc, scale = (np.asarray(x, np.float64) for x in fitted.posterior_whitening)
    else:
        loc, scale = surrogates.posterior().whitening()
    if options.step.preconditioner is not None:
        tuning = tuning._replace(scale=array(scale))
    tuning = tuning._replace(loc=array(loc))
    if fitted is not None and fitted.draws is not None:
        tuning = tuning._replace(draws=array(fitted.draws))
    if options.alpha == 0:
        return tuning
    # expanded around loc in float64: eta - Lambda theta would cancel in float32
    factors = surrogates.factors
    eta, precision = (np.asarray(x, np.float64) for x in (factors.eta, factors.precision))
    shift = eta - (precision * loc if factors.is_diagonal else precision @ loc)
    conducive = Conducive(*map(array, (shift, precision, shift.sum(0), precision.sum(0))))
    if surrogates.corrections is not None:
        corrections = jax.tree.map(array, surrogates.corrections)
        conducive = conducive._replace(
            corrections=corrections,
            total_corrections=corrections.of(corrections.coefficients.sum(0)),
        )
    return tuning._replace(conducive=conducive)
