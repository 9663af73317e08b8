"""Terms of a silo's density that a step needs, and their gradients.

Symbols are those of :mod:`numpyro_fed.mcmc.langevin`, whose steps take these gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed._typing import ModelArgs, PyTree
from numpyro_fed.data.views import SiloRows, SiloView
from numpyro_fed.mcmc.config import Conducive, LangevinConfig, LatentCoordinates, NodeConfig, Tuning
from numpyro_fed.surrogates.gaussian import matvec


class OpenSilo(NamedTuple):
    """Arguments, weights, latent coordinates and surrogates that all steps at one silo share."""

    kwargs: ModelArgs
    weights: dict[str, Array]
    latents: LatentCoordinates | None
    conducive: Conducive | None = None
    net: tuple[Array, Array] | None = None
    selection: Array | float = 1.0
    anchor: Array | None = None


def open_silo(config: LangevinConfig, tuning: Tuning, state: PyTree, view: SiloView) -> OpenSilo:
    """Return the :class:`OpenSilo` of all steps at one silo."""
    number = view.number
    of_all: Array | int = (
        number if len(tuning.selection) > 1 else 0
    )  # a silo that receives its own numbers alone finds them first
    if tuning.members is not None:  # each step gathers rows with their elements
        kwargs = dict(view.silos.shared)
        weights: dict[str, Array] = {}
    elif config.batch is not None:
        group, m = config.batch
        kwargs, weights = SiloView(
            view.silos, number, tuple((g, 1 if g == group else n) for g, n in view.pad)
        ).whole()
        weights[group] = view.size(group).astype(weights[group].dtype) / m
    else:
        kwargs, weights = view.whole()
    latents, conducive, net = tuning.latents, tuning.conducive, None
    if latents is not None and state is not None:
        latents = latents._replace(rows=state[1])
    if conducive is not None:
        conducive = conducive.of(of_all)
        weight = tuning.alpha / tuning.selection[of_all]
        if conducive.corrections is None:  # alpha g_s as one Gaussian score
            net = (
                tuning.alpha * conducive.total_shift - weight * conducive.shift,
                tuning.alpha * conducive.total_precision - weight * conducive.precision,
            )
    anchor = None if tuning.anchor is None else tuning.anchor[of_all]
    return OpenSilo(kwargs, weights, latents, conducive, net, tuning.selection[of_all], anchor)


def push(tuning: Tuning, vector: Array) -> Array:
    """Return L times a vector."""
    return vector if tuning.scale is None else matvec(tuning.scale, vector)


def pull_back(tuning: Tuning, gradient: Array) -> Array:
    """Return L transposed times a gradient."""
    return gradient if tuning.scale is None else matvec(tuning.scale.T, gradient)


def _server_gradient(config: LangevinConfig, tuning: Tuning, theta: Array, view: SiloView) -> Array:
    """Return grad log p(theta) + alpha grad log q(theta), which needs no silo."""
    gradient = _prior_slope(config, theta, view)
    if tuning.conducive is not None:
        gradient = gradient + tuning.alpha * tuning.conducive.total_score(theta, tuning.loc)
    return gradient


def _prior_slope(config: LangevinConfig, theta: Array, view: SiloView) -> Array:
    factors = config.factors
    return jax.grad(lambda t: factors.log_prior(factors.unravel(t), view.silos.shared))(theta)


def drift(
    config: LangevinConfig,
    tuning: Tuning,
    theta: Array,
    eps: Array | None,
    silo: OpenSilo,
    view: SiloView,
) -> tuple[Array, Array | None, Array | None]:
    """Return the drift of a step, which h / 2 multiplies, in whitened units ``(d,)``.

    If the config separates e, also return e and whether it was cut; else return ``None`` for both.
    """
    if config.cut:
        e, cut = residual(config, tuning, theta, eps, silo, view)
        return pull_back(tuning, _server_gradient(config, tuning, theta, view)) + e, e, cut
    # the same sum, with one product with a precision; the prior's gradient is added last, since XLA
    # would otherwise copy the rows in each step to add it inside their product
    gradient = _silo_slope(config, tuning, eps, silo, view)(theta)
    gradient = gradient / silo.selection + _prior_slope(config, theta, view)
    if silo.net is not None:
        shift, precision = silo.net
        gradient = gradient + shift - matvec(precision, theta - tuning.loc)
    elif silo.conducive is not None:
        own = silo.conducive.score(theta, tuning.loc) / silo.selection
        gradient = gradient + tuning.alpha * (silo.conducive.total_score(theta, tuning.loc) - own)
    return pull_back(tuning, gradient), None, None


def residual(
    config: LangevinConfig,
    tuning: Tuning,
    theta: Array,
    eps: Array | None,
    silo: OpenSilo,
    view: SiloView,
) -> tuple[Array, Array]:
    """Return the conducive residual e, in whitened units ``(d,)``, and 1 if it was cut."""
    gradient = _silo_slope(config, tuning, eps, silo, view)(theta)
    if silo.conducive is not None:
        gradient = gradient - tuning.alpha * silo.conducive.score(theta, tuning.loc)
    e = pull_back(tuning, gradient) / silo.selection
    if not config.cut:
        return e, jnp.zeros(())
    norm = jnp.linalg.norm(e)
    factor = jnp.where(norm > tuning.cut, tuning.cut / norm, 1.0)
    return e * factor, (norm > tuning.cut).astype(e.dtype)


def _silo_slope(
    config: LangevinConfig, tuning: Tuning, eps: Array | None, silo: OpenSilo, view: SiloView
) -> Callable[[Array], Array]:
    """Return the gradient of a silo's term, or of its minibatch, as a function of theta."""
    slope = jax.grad(lambda t: terms(config, t, eps, silo, view)[1])
    return slope if silo.anchor is None else with_control_variate(slope, tuning.loc, silo.anchor)


def with_control_variate(
    slope: Callable[[Array], Array], center: Array, whole: Array
) -> Callable[[Array], Array]:
    """Return a minibatch's gradient plus what it lacks of the silo's at the center.

    :param slope: the minibatch's gradient, a function of theta.
    :param whole: the silo's gradient at the center.
    """
    return lambda theta: slope(theta) + (whole - slope(center))


def terms(
    config: LangevinConfig | NodeConfig,
    theta: Array,
    eps: Array | None,
    silo: OpenSilo,
    view: SiloView | SiloRows,
) -> tuple[Array, Array]:
    """Return ``log p(theta)``, and ``log p(y_s, z | theta) + log |dz/deps|`` at fixed eps."""
    factors = config.factors
    sites = factors.unravel(theta)
    z: dict[str, Array] = {}
    log_det = jnp.zeros(())
    if config.units is not None and eps is not None and silo.latents is not None:
        u = silo.latents.u(theta)
        z = config.units.to_sites(silo.latents.rows.forward(u, eps))
        # a minibatch's elements also count for the elements outside it
        counted = (
            config.units.owned(view)
            if config.units.group is None
            else silo.weights[config.units.group][:, None]
        )
        log_det = jnp.sum(counted * silo.latents.rows.log_scales(u, eps))
    log_prior, local = factors.terms(sites, z, silo.kwargs, silo.weights)
    return log_prior, sum((jnp.sum(v) for v in local.values()), jnp.zeros(())) + log_det
