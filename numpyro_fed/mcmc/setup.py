"""Setup of a Langevin kernel before its first round: checks, surrogates, local map, step size."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import thin
from numpyro_fed.density.check import check_batch, check_factorization
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.mcmc import pilot
from numpyro_fed.mcmc.checks import (
    batch_of,
    check_latents,
    check_surrogates,
    selection_of,
    units_of,
    warn_of_params,
)
from numpyro_fed.mcmc.config import Conducive, LangevinConfig, LatentCoordinates, Tuning
from numpyro_fed.mcmc.minibatch import find_members
from numpyro_fed.mcmc.options import Options, gaussian_of
from numpyro_fed.rounds.federated import Cost
from numpyro_fed.surrogates import laplace, score
from numpyro_fed.surrogates.gaussian import Surrogates
from numpyro_fed.surrogates.moments import with_moments
from numpyro_fed.surrogates.some_rows import fit_some, whole_gradients

# rows of all silos in the check of the factorization, with minibatches: a wrong term shows in any
# row, and 8,192 rows of 784 numbers take 26 MB in float32
_CHECK_ROWS = 1 << 13


class Setup(NamedTuple):
    """Config, numbers and surrogates that a kernel needs for its rounds.

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


def factors_of(model: Callable, silos: Silos, extra: ModelArgs, public: tuple[str, ...]) -> Factors:
    """Return the model's factors; refuse one without a global latent site.

    :raises ValueError: for a model that no kernel covers.
    :warns UserWarning: for learned parameters, which chains keep.
    """
    factors = factorize(model, silos, public=public, extra=extra)
    if not factors.dim:
        raise ValueError(
            "the model has no global latent site: its silos have nothing in common to learn"
        )
    warn_of_params(factors)
    return factors


def model_setup(model: Callable, silos: Silos, extra: ModelArgs, options: Options) -> ModelSetup:
    """Check model, data and factorization, and fit surrogates and local map."""
    factors = factors_of(model, silos, extra, tuple(options.public))
    selection = selection_of(options.selection, silos)
    check_latents(options, factors)
    check_surrogates(options.surrogate, factors, silos)
    silos = silos.with_shared(**extra)
    units = units_of(factors, silos)
    batch = batch_of(options.batch_size, factors, silos, units)
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
    """Make the whole setup: :func:`model_setup`, then the config and the step size."""
    made = model_setup(model, silos, extra, options)
    config = LangevinConfig(
        made.factors,
        made.units,
        int(options.num_local_steps),
        made.batch,
        options.separates,
        options.step.schedule,
        options.num_kept,
    )
    tuning, cost = _step_size(config, made.tuning, silos.with_shared(**extra), options)
    return Setup(config, tuning, made.surrogates, made.cost + cost)


def _step_size(
    config: LangevinConfig, tuning: Tuning, silos: Silos, options: Options
) -> tuple[Tuning, Cost]:
    """Return the tuning with the pilot's step size, and the cost of the pilot for each silo.

    Steps that are learned in warm-up, and steps in the coordinates of the model, need no pilot.
    """
    if options.step.control_variates:
        tuning = tuning._replace(anchor=whole_gradients(config.factors, tuning.loc, silos))
    if options.step.learned:
        inflation = 1 + options.step.bias_target
        return tuning._replace(inflation=jnp.asarray(inflation, tuning.loc.dtype)), Cost()
    if options.step.preconditioner is None:
        return tuning, Cost()
    rule = pilot.Rule(
        options.step.bias_target if options.step.size == "auto" else None,
        isinstance(options.selection, str) and options.selection == "auto",
        options.step.noise_correction,
    )
    cost = pilot.cost(config, tuning, rule)
    return pilot.choose_step_size(config, tuning, silos, rule), cost


def _start(options: Options, factors: Factors) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Return the Gaussian of a variational fit, and how far its last round moved it, in sds.

    The distance is known for conducive rounds alone; it is infinite for others.
    """
    found = gaussian_of(options.init_from, factors)
    if found is None or options.init_from is None:
        return None
    return *found, float(options.init_from.state.server._asdict().get("moved", np.inf))


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
        return jax.device_put(np.asarray(x, dtype))  # rounded on the host, which compiles nothing

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
