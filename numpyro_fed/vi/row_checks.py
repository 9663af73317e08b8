r"""Check of a silo's rows in the silo: leave-one-out density, calibration, predictive tails.

At each draw of theta the silo draws its latents, and has the log density of each row,
:math:`\ell_{ik} = \log p(y_i \mid \theta_k, z_k)`. Pareto-smoothed weights :math:`w_{ik} \propto
e^{-\ell_{ik}}` turn the posterior into the one without row i (Vehtari, Gelman & Gabry 2017,
equation 10):

.. math:: \mathrm{elpd}_i = \log \sum_k w_{ik} e^{\ell_{ik}}.

Rows in ten groups by their prediction without themselves tell the calibration. Replicates of the
silo's outcome, with latents drawn anew, have weights proportional to :math:`1 / p(y_s \mid
\theta_k)`. So they are what the other silos predict for this one, and tell whether its mean, sd and
share of zeros are among what was to be expected.

**What leaves a silo:** 41 numbers for each observed site (:data:`NUMBERS`). Groups have at least
ten rows; a silo with fewer rows sends only the first five.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.handlers import seed, trace

from numpyro_fed import _compat
from numpyro_fed._typing import ModelArgs, PyTree, Site
from numpyro_fed.data.views import SiloRows, SiloView
from numpyro_fed.density.factors import PARAMS
from numpyro_fed.density.handlers import unobserved
from numpyro_fed.rounds.worker import rows_of
from numpyro_fed.vi.algorithms import own_params
from numpyro_fed.vi.config import FIT_CLASSES, FitConfig, FitTask
from numpyro_fed.vi.draws import Position, candidate
from numpyro_fed.vi.importance import POOR, smoothed

FEWEST = 10  # rows of a group whose outcomes a silo tells
GROUPS = 10  # of calibration
_TIE = 1e-5  # relative difference of equal quantities in single precision, summed in another order
# elpd, sum of squares of the rows' elpd, effective number of parameters, rows, rows with k > .7
DENSITY = ("elpd", "squares", "p_loo", "rows", "bad_k")
_CENSORED = (
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
)
QUANTITIES = ("mean", "sd", "zeros")  # of the outcome: zeros are a share
# for each group its rows, mean prediction and mean outcome; for each quantity the observed value,
# and the share of replicates above it
NUMBERS = len(DENSITY) + 3 * GROUPS + 2 * len(QUANTITIES)


class Outcomes(NamedTuple):
    """Outcomes of an observed site at one draw, all of the same shape.

    :param density: log density of each outcome.
    :param mean: expected outcome, given the silo's latents; NaN where it is not known, or outcomes
        are vectors.
    :param value: the outcomes; NaN where they are vectors, or censored.
    :param counts: whether an outcome is neither padding nor masked.
    """

    density: Array
    mean: Array
    value: Array
    counts: Array


@dataclass(frozen=True)
class RowsLocal(FitTask):
    """A silo's check of its rows at draws of theta; the message is that of ``EstimateLocal``.

    :param config: the static facts.
    :param left_out: whether the draws are of the posterior without this silo. They need no weights,
        and the silo tells of its replicates alone; its other numbers are NaN.
    """

    wire_name = "RowsLocal"
    leaves = (
        "The silo sends sums over its rows of leave-one-out densities, means of the outcome in ten "
        "groups of rows by prediction, and mean, sd and zeros of the outcome beside replicates"
    )
    numbers = f"{NUMBERS} numbers for each observed site"
    ceiling = 10
    message_classes = ("Position", *FIT_CLASSES)

    config: FitConfig
    left_out: bool = False

    def __call__(
        self, key: Array, message: tuple, state: PyTree, view: SiloView
    ) -> tuple[dict[str, Array], None]:
        """Return :data:`NUMBERS` for each observed site; there is no state."""
        told, weights, learned, params = message
        rows, own = rows_of(view), own_params(self.config, 0, state, params)

        def outcomes(at: Position) -> tuple[Array, dict[str, Outcomes]]:
            context = at.context._replace(params=weights)
            keys = at.key_local, at.key_choice
            how = self.config, True, True, context, learned, *keys
            of_silo, latents, _ = candidate(*how, rows, own)
            return of_silo, _observed(self.config, context.theta, latents, learned, rows)

        def one(at: Position) -> tuple[Array, dict[str, tuple[Array, Array, Array]]]:
            of_silo, found = outcomes(at)
            anew = _replicates(self.config, at.context.theta, learned, at.key_choice, rows)
            return of_silo, {
                name: (x.density, x.mean, quantities(_like(x, anew.get(name)), x.counts))
                for name, x in found.items()
            }

        of_silo, drawn = lax.map(one, told)
        of_silo = jnp.zeros_like(of_silo) if self.left_out else of_silo
        first = outcomes(jax.tree.map(lambda x: x[0], told))[1]
        shape = jax.ShapeDtypeStruct((NUMBERS,), jnp.result_type(float))
        found = {
            name: jax.pure_callback(
                row_numbers,
                shape,
                of_silo,
                *drawn[name],
                x.value,
                x.counts,
                quantities(x.value, x.counts),
            )
            for name, x in first.items()
        }
        if self.left_out:
            found = {name: x.at[: -2 * len(QUANTITIES)].set(jnp.nan) for name, x in found.items()}
        return found, None


def _arguments(learned: dict[str, Array], rows: SiloRows) -> tuple[ModelArgs, dict[str, Array]]:
    kwargs, weights = rows.whole()
    return ({**kwargs, PARAMS: learned} if learned else kwargs), weights


def _observed(
    config: FitConfig,
    theta: Array,
    latents: Mapping[str, Array],
    learned: dict[str, Array],
    rows: SiloRows,
) -> dict[str, Outcomes]:
    """Return the outcomes of each observed site inside silo plates, by name."""
    factors, (kwargs, weights) = config.factors, _arguments(learned, rows)
    plates = dict(factors.plates)
    found: dict[str, Outcomes] = {}
    for name, site in factors.sites(factors.unravel(theta), latents, kwargs).items():
        if (
            site["type"] != "sample"
            or not site["is_observed"]
            or _compat.is_of(site["fn"], dist.Unit)
        ):
            continue
        counts = jnp.ones((), bool)
        frames = [f for f in site["cond_indep_stack"] if f.name in plates]
        for frame in frames:
            own = weights[plates[frame.name]] > 0
            counts = counts & own.reshape((-1,) + (1,) * (-frame.dim - 1))
        if frames:
            found[name] = _outcomes(site, counts)
    return found


def _replicates(
    config: FitConfig, theta: Array, learned: dict[str, Array], key: Array, rows: SiloRows
) -> dict[str, Array]:
    """Draw a silo's latents and outcomes anew, and return the sites' values by name.

    There are none where a distribution cannot be drawn from.
    """
    factors, (kwargs, _) = config.factors, _arguments(learned, rows)
    model = _compat.unconstrained(factors.model, factors.unravel(theta))
    try:
        sites = trace(seed(unobserved(model), key)).get_trace(**kwargs)
    except NotImplementedError:
        return {}
    return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}


def _outcomes(site: Site, counts: Array) -> Outcomes:
    law = site["fn"]
    density = law.log_prob(site["value"])
    counts = jnp.broadcast_to(counts & _compat.mask_of(law), density.shape)
    none = jnp.full(density.shape, jnp.nan)
    # a replicate of a censored outcome would have events that nobody saw
    if law.event_dim or _compat.is_of(law, *_CENSORED):
        return Outcomes(density, none, none, counts)
    value = jnp.broadcast_to(site["value"], density.shape).astype(density.dtype)
    try:
        mean = jnp.broadcast_to(law.mean, density.shape)
    except NotImplementedError:
        mean = none
    return Outcomes(density, mean, value, counts)


def _like(outcomes: Outcomes, replicate: Array | None) -> Array:
    """Return a replicate of outcomes, NaN where there is none, or it is of vectors."""
    if replicate is None or replicate.shape != outcomes.value.shape:
        return jnp.full_like(outcomes.value, jnp.nan)
    return replicate.astype(outcomes.value.dtype)


def quantities(value: Array, counts: Array) -> Array:
    """Return mean, sd and share of zeros of the outcomes that count, ``(3,)``."""
    num = jnp.sum(counts)
    mean = jnp.sum(jnp.where(counts, value, 0.0)) / num
    variance = jnp.sum(jnp.where(counts, (value - mean) ** 2, 0.0)) / num
    zeros = jnp.sum(jnp.where(counts, value == 0, False)) / num
    return jnp.stack([mean, jnp.sqrt(variance), jnp.where(jnp.isnan(mean), jnp.nan, zeros)])


def row_numbers(
    of_silo: np.ndarray,
    density: np.ndarray,
    mean: np.ndarray,
    replicates: np.ndarray,
    value: np.ndarray,
    counts: np.ndarray,
    observed: np.ndarray,
) -> np.ndarray:
    """Return what leaves the silo of one observed site, :data:`NUMBERS`.

    :param of_silo: log likelihood of the silo at each draw; zero where the draws are of the
        posterior without it.
    :param density: log densities of the outcomes, draws first.
    :param mean: expected outcomes, draws first.
    :param replicates: quantities of each draw's replicate, ``(draws, 3)``.
    :param value: the outcomes.
    :param counts: whether an outcome counts.
    :param observed: quantities of the outcomes.
    """
    counts = np.asarray(counts)
    terms = np.asarray(density, np.float64)[:, counts]
    num = terms.shape[1]
    weight, k = np.empty_like(terms), np.empty(num)
    for i in range(num):
        weight[:, i], k[i] = smoothed(-terms[:, i])
    most = terms.max(0, initial=-np.inf)
    scaled = np.exp(terms - most)
    elpd = np.log((weight * scaled).sum(0)) + most
    all_rows = np.log(scaled.mean(0)) + most
    bad = np.sum(~(k <= POOR))
    of_density = [elpd.sum(), (elpd**2).sum(), (all_rows - elpd).sum(), num, bad]
    groups, tails = np.full((GROUPS, 3), np.nan), np.full((len(QUANTITIES), 2), np.nan)
    if num >= FEWEST:
        y = np.asarray(value, np.float64)[counts]
        prediction = (weight * np.asarray(mean, np.float64)[:, counts]).sum(0)
        if np.isfinite(prediction).all():
            order = np.argsort(prediction, kind="stable")
            for g, rows in enumerate(np.array_split(order, min(GROUPS, num // FEWEST))):
                groups[g] = len(rows), prediction[rows].mean(), y[rows].mean()
        observed, drawn = (np.asarray(x, np.float64) for x in (observed, replicates))
        ties = np.isclose(drawn, observed, rtol=_TIE)  # half of them are above
        without_silo, _ = smoothed(-np.asarray(of_silo, np.float64))
        above = without_silo @ np.where(ties, 0.5, drawn > observed)
        unknown = np.isnan(observed) | np.isnan(drawn).any(0)
        if (y != np.round(y)).any():  # a continuous outcome has a zero by chance
            unknown |= (drawn == 0).all(0)
        tails = np.stack([observed, np.where(unknown, np.nan, above)], 1)
    found = np.concatenate([of_density, groups.ravel(), tails.ravel()])
    return found.astype(jnp.result_type(float))
