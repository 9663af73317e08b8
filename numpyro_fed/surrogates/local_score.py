"""A silo's part of fitting score-matched surrogates: its marginal score at the server's points, and what it regresses on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_fed.bounded_features import MOST_DIMENSIONS
from numpyro_fed.density import Factors
from numpyro_fed.local_map import LocalMap, Units
from numpyro_fed.storage import SiloView
from numpyro_fed.surrogates.bends import regress
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.marginal import laplace_marginal, quadrature_marginal

__all__ = ["Message", "Reply", "ScoreLocal", "marginal_score"]


class Message(NamedTuple):
    """What the server sends: whitening, points ``(K, d)`` and their weights ``(K,)``."""

    loc: Array
    scale: Array
    points: Array
    weights: Array


class Reply(NamedTuple):
    """What a silo returns, in whitened coordinates: score ``a - B u``, misfit, log marginals ``(K,)``; in the last rounds its score's
    regression on the bounded features ``(p, d)``, where dimensions are few."""

    shift: Array
    precision: Array
    misfit: Array
    values: Array
    bend: Array | None


@dataclass(frozen=True)
class ScoreLocal:
    """The silo's part of a round (hashable, so that equal fits share compiled programs).

    :param points_at_once: points evaluated together.
    :param last: whether local map and bounded corrections are regressed, too.
    """

    factors: Factors
    units: Units | None
    points_at_once: int
    last: bool = False

    def __call__(self, key: Array, message: Message, state: Any, view: SiloView) -> tuple[Reply, LocalMap | None]:
        score = marginal_score(self.factors, self.units, message, view)
        size = min(self.points_at_once, message.points.shape[0])
        values, scores, modes, chols = lax.map(score, message.points, batch_size=size)
        weights = jnp.where(jnp.isfinite(values) & jnp.isfinite(scores).all(-1), message.weights, 0.0)
        scores = jnp.where(weights[:, None] > 0, scores, 0.0)
        shift, precision, misfit = fit_score(message.points, scores, weights, message.scale.ndim == 2)
        bend = None
        if self.last and self.factors.dim <= MOST_DIMENSIONS:
            bend = regress(message.points, scores, weights)
        rows = fit_map(message.points, modes, chols, weights) if self.last and self.units is not None else None
        return Reply(shift, precision, misfit, values, bend), rows


def marginal_score(
    factors: Factors, units: Units | None, message: Message, view: SiloView
) -> Callable[[Array], tuple[Array, Array, Any, Any]]:
    """A function of whitened u: the silo's log marginal likelihood, its gradient, modes and covariance factors."""
    kwargs, weights = view.whole()

    def theta(u: Array) -> dict[str, Array]:
        return factors.unravel(message.loc + matvec(message.scale, u))

    def at(u: Array) -> tuple[Array, Array, Any, Any]:
        if units is None:
            value, score = jax.value_and_grad(lambda u: factors.log_local(theta(u), {}, kwargs, weights))(u)
            return value, score, (), ()
        owned = units.owned(view)
        marginal = laplace_marginal if units.group is None else quadrature_marginal
        value, score, found = marginal(
            lambda u, z: units.log_density(theta(u), z, kwargs, weights, view),
            u,
            jnp.zeros(owned.shape, u.dtype),
            owned,
        )
        return value, score, found.location, found.chol

    return at
