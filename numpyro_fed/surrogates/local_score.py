"""Part of a silo in the fit of score-matched surrogates.

A silo evaluates its marginal score at the server's points, and regresses it on them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_fed.data.views import SiloRows, SiloView
from numpyro_fed.density.bounded_features import MOST_DIMENSIONS
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.density.nested import NestedMap, NestedUnits, join_levels
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.surrogates.corrections import regress
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.marginal import (
    Moments,
    laplace_marginal,
    log_normalizer,
    nodes,
    quadrature_marginal,
)
from numpyro_fed.surrogates.nested_marginal import nested_marginal, num_nodes

# rows times points that are evaluated together: 4 MiB in float32 for each number of a row
_ROWS_AT_ONCE = 1 << 20
# sd of the standardized outer latents at which inner moments are taken, for regressions on them: 10
# % of the points are beyond 2 sds, where the law itself has 5 %
_SPREAD = 1.2


@wire_name("ScoreMessage")
class Message(NamedTuple):
    """Message of the server: whitening, points ``(K, d)`` and their weights ``(K,)``."""

    loc: Array
    scale: Array
    points: Array
    weights: Array

    def has_dim(self, dim: int) -> bool:
        """Return whether all parts are of so many dimensions."""
        loc, scale, points, weights = map(jnp.shape, self)
        return (
            loc == (dim,)
            and scale in ((dim,), (dim, dim))
            and points == (*weights, dim)
            and len(weights) == 1
        )


class Reply(NamedTuple):
    """Reply of a silo, in whitened coordinates.

    :param shift: a of the score's fit ``a - B u``.
    :param precision: B, full or diagonal.
    :param misfit: root mean square misfit of the score.
    :param values: log marginal likelihoods at the points, ``(K,)``.
    :param correction: regression ``(p, d)`` of the score on the bounded features, in the last
        rounds if dimensions are few; or ``None``.
    """

    shift: Array
    precision: Array
    misfit: Array
    values: Array
    correction: Array | None


@dataclass(frozen=True)
class ScoreLocal(SiloTask):
    """Part of a silo in a round of the score fit.

    It is hashable, so that equal fits share compiled programs.

    :param points_at_once: number of points that are evaluated together.
    :param last: regress the local map and the bounded corrections, too.
    """

    wire_name = "ScoreLocal"
    methods = ("chains", "network")
    leaves = (
        "The silo sends its surrogate, which is a gradient and a precision fitted to its log "
        "marginal likelihood at the server's points, the error of this fit, and the values at "
        "the points"
    )
    numbers = (
        "d + d^2 + 1 numbers (beyond 500 dimensions 2 d + 1) and one for each point; in the last "
        "rounds with d <= 16, d (1 + 2 d + d (d + 1) / 2) more"
    )
    ceiling = 1_000
    message_classes = ("ScoreMessage",)

    factors: Factors
    units: Units | None
    points_at_once: int
    last: bool = False

    @property
    def keeps(self) -> bool:
        """Flag of a silo that keeps its rows of the local map."""
        return self.last and self.units is not None

    @property
    def latent_units(self) -> Units | None:
        """Units of the latents, from the static facts."""
        return self.units

    def __call__(
        self, key: Array, message: Message, state: None, view: SiloView
    ) -> tuple[Reply, LocalMap | NestedMap | None]:
        """Return the regression of the score, and in the last round the rows of the local map."""
        points, beside = message.points, None
        if self.last and isinstance(self.units, NestedUnits):
            shape = (len(points), self.units.blocks()[0][2])
            beside = _SPREAD * random.normal(random.key(0), shape, points.dtype)
        values, scores, latents, weights = look(
            self.factors, self.units, message, view, self.points_at_once, beside
        )
        shift, precision, misfit = fit_score(points, scores, weights, message.scale.ndim == 2)
        correction = None
        if self.last and self.factors.dim <= MOST_DIMENSIONS:
            correction = regress(points, scores, weights)
        rows = (
            self._local_map(points, beside, latents, weights, view)
            if self.last and self.units is not None
            else None
        )
        return Reply(shift, precision, misfit, values, correction), rows

    def _local_map(
        self,
        points: Array,
        beside: Array | None,
        latents: list[Moments],
        weights: Array,
        view: SiloView,
    ) -> LocalMap | NestedMap:
        outer = fit_map(points, *latents[0], weights)
        if beside is None or not isinstance(self.units, NestedUnits):
            return outer
        inner = fit_map(jnp.concatenate([points, beside], axis=1), *latents[1], weights)
        rows = NestedMap(outer, inner, self.units.parent(self.units.laid_out(view).whole()[0]))
        return jax.tree.map(lambda x: x[None], rows)


class Looked(NamedTuple):
    """Results of a silo at the points.

    They are log marginal likelihoods ``(K,)``, their whitened scores ``(K, d)``, moments of the
    latents level by level, and the weights of the points. A weight is zero where a number is not
    finite.
    """

    values: Array
    scores: Array
    latents: list[Moments]
    weights: Array


def look(
    factors: Factors,
    units: Units | None,
    message: Message,
    view: SiloView | SiloRows,
    at_once: int,
    beside: Array | None = None,
) -> Looked:
    """Return marginal likelihood, score and latents' moments at the server's points.

    :param at_once: number of points that are evaluated together.
    :param beside: standardized outer latents ``(K, k0)``, at which the moments of inner latents are
        taken.
    """
    score = jax.vmap(marginal_score(factors, units, message, view))
    size = min(at_once, len(message.points))

    def some(_: None, asked: tuple) -> tuple[None, tuple[Array, Array, list[Moments]]]:
        points, beside, weights = asked
        given = (points,) if beside is None else (points, beside)
        ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), jax.eval_shape(score, *given))
        # points without weight are not looked at
        return None, lax.cond((weights > 0).any(), score, lambda *_: ones, *given)

    batches = jax.tree.map(
        lambda x: x.reshape(-1, size, *x.shape[1:]), (message.points, beside, message.weights)
    )
    found = lax.scan(some, None, batches)[1]
    values, scores, latents = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
    weights = jnp.where(jnp.isfinite(values) & jnp.isfinite(scores).all(-1), message.weights, 0.0)
    return Looked(values, jnp.where(weights[:, None] > 0, scores, 0.0), latents, weights)


def points_at_once(rows: int, units: Units | None) -> int:
    """Return the number of points that are evaluated together.

    It is a power of two, like the number of points. A remainder would be a program of its own.

    :param rows: number of rows that one point takes.
    """
    return 1 << (max(1, _ROWS_AT_ONCE // (rows * evaluations(units))).bit_length() - 1)


def evaluations(units: Units | None) -> int:
    """Return how often a row is evaluated at one point."""
    if units is None:
        return 1
    if isinstance(units, NestedUnits):
        return num_nodes(*(width for *_, width in units.blocks()))
    # a joint unit has a column of the curvature for each latent
    return len(nodes(units.dim)[0]) if units.group is not None else units.dim


def marginal_score(
    factors: Factors, units: Units | None, message: Message, view: SiloView | SiloRows
) -> Callable[..., tuple[Array, Array, list[Moments]]]:
    """Return a function of whitened u with the silo's log marginal likelihood.

    The function returns the value, its gradient, and moments of the latents. Where plates are
    nested, it also takes the position of the outer latents at which it returns the moments of the
    inner ones.
    """
    view = view if units is None else units.laid_out(view)
    kwargs, weights = view.whole()

    def theta(u: Array) -> dict[str, Array]:
        return factors.unravel(message.loc + matvec(message.scale, u))

    def at(u: Array, beside: Array | None = None) -> tuple[Array, Array, list[Moments]]:
        if units is None:
            return *jax.value_and_grad(lambda u: factors.log_local(theta(u), {}, kwargs, weights))(
                u
            ), []
        owned = units.owned(view)
        start = jnp.zeros(owned.shape, u.dtype)
        if isinstance(units, NestedUnits):

            def log_terms(u: Array, a: Array, b: Array) -> tuple[Array, Array, Array]:
                return units.level_terms(theta(u), join_levels(a, b)[None], kwargs, weights, view)

            found = nested_marginal(log_terms, u, units.parent(kwargs), units.levels(start), beside)
            return (
                found.value + log_normalizer(owned),
                found.score,
                [m for m in found[2:] if m is not None],
            )
        marginal = laplace_marginal if units.group is None else quadrature_marginal
        value, score, moments = marginal(
            lambda u, z: units.log_density(theta(u), z, kwargs, weights, view), u, start, owned
        )
        if units.group is None:
            return value, score, [moments]

        def without_latents(u: Array) -> Array:
            local = factors.terms(theta(u), units.to_sites(start), kwargs, weights)[1]
            return factors.by_elements((units.group or "",), local, kwargs)[1]

        more, slope = jax.value_and_grad(without_latents)(u)
        return value + more, score + slope, [moments]

    return at
