r"""Score-matched surrogates: Gaussians fitted to the silos' marginal scores, and the local map with them.

Each round the server sends a centre :math:`\mu`, a factor L of a covariance, and points :math:`u_k`. A silo returns
the natural parameters of the Gaussian whose score is nearest, in least squares, to

.. math:: \nabla_u \log \hat p(y_s \mid \mu + L u_k),

the gradient of its marginal likelihood (local latents integrated out). The server adds the prior's, and moves :math:`\mu, L` to the
product. A last round at wider points, weighted by a power of the posterior, settles the surrogates and regresses
the locations and log scales of the local latents on u, which stays in the silo.

Moment-matched local posteriors (FSGLD 3.1) are improper or far from Gaussian exactly in hierarchical models;
scores are not. What leaves a silo, a round: ``d + d^2`` numbers (diagonal: ``2 d``), the misfit, and its log marginal
likelihood at the points. Related: FSGLD remark 3 asks for this criterion (equation 8).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_fed.density import Factors
from numpyro_fed.engines.inline import ask_all
from numpyro_fed.federation import Cost, Federated, message_bytes
from numpyro_fed.local_map import LocalMap, Units
from numpyro_fed.silos import Silos
from numpyro_fed.storage import SiloView
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates, matvec
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.marginal import laplace_marginal, nodes, quadrature_marginal
from numpyro_fed.surrogates.points import sobol_normal, wide_points

__all__ = ["ScoreFit", "Whitening", "fit", "fit_at"]

_FULL_UP_TO = 500  # dimensions; beyond, one d x d matrix per silo is too much memory
_SETTLED = 0.1  # sds the centre moves in a round, and the like for the spread
_ROWS_AT_ONCE = 1 << 20  # rows x points evaluated together


class Whitening(NamedTuple):
    """Coordinates ``u = scale^-1 (theta - loc)``; ``scale`` is lower triangular ``(d, d)`` or diagonal ``(d,)``."""

    loc: Array
    scale: Array


class ScoreFit(NamedTuple):
    """What :func:`fit` returns.

    :param surrogates: the silos' and the prior's factors.
    :param local_map: rows of the local map (private to the silos), or ``None`` without local latents.
    :param map_whitening: the coordinates u of the local map.
    :param posterior_whitening: those of the product of all factors, its curvature guarded where that is no density.
    :param misfit: root mean square of the score's misfit per silo ``(S,)``, in whitened units; far above 1 the
        surrogate is poor.
    :param cost: what the fit cost each silo.
    """

    surrogates: Surrogates
    local_map: LocalMap | None
    map_whitening: Whitening
    posterior_whitening: Whitening
    misfit: Array
    cost: Cost


class Message(NamedTuple):
    """What the server sends: whitening, points ``(K, d)`` and their weights ``(K,)``."""

    loc: Array
    scale: Array
    points: Array
    weights: Array


class Reply(NamedTuple):
    """What a silo returns, in whitened coordinates: score ``a - B u``, misfit, log marginals ``(K,)``."""

    shift: Array
    precision: Array
    misfit: Array
    values: Array


@dataclass(frozen=True)
class ScoreLocal:
    """The silo's part of a round (hashable, so that equal fits share compiled programs)."""

    factors: Factors
    units: Units | None
    points_at_once: int

    def __call__(self, key: Array, message: Message, state: Any, view: SiloView) -> tuple[Reply, LocalMap | None]:
        values, scores, modes, chols = self._evaluate(message, view)
        weights = jnp.where(jnp.isfinite(values) & jnp.isfinite(scores).all(-1), message.weights, 0.0)
        scores = jnp.where(weights[:, None] > 0, scores, 0.0)
        full = message.scale.ndim == 2
        shift, precision, misfit = fit_score(message.points, scores, weights, full)
        rows = None if self.units is None else fit_map(message.points, modes, chols, weights)
        return Reply(shift, precision, misfit, values), rows

    def _evaluate(self, message: Message, view: SiloView) -> tuple[Array, Array, Any, Any]:
        score = marginal_score(self.factors, self.units, message, view)
        size = min(self.points_at_once, message.points.shape[0])
        return lax.map(score, message.points, batch_size=size)


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


class ServerState(NamedTuple):
    """The server's whitening, and the points and weights of the next round, on the host in float64."""

    loc: np.ndarray
    scale: np.ndarray
    points: np.ndarray
    weights: np.ndarray
    surrogates: Surrogates | None = None
    moved: float = math.inf


def algorithm(factors: Factors, units: Units | None, silos: Silos, full: bool, points_at_once: int) -> Federated:
    """The fit as a federated algorithm; one round refits all surrogates around the last centre.

    Of ``silos`` the server uses the shared arguments only.
    """

    def init(_: Array) -> ServerState:
        scale = np.full(factors.dim, 0.5)  # precision 4 I
        nothing = np.zeros((0, factors.dim))
        return ServerState(np.zeros(factors.dim), np.diag(scale) if full else scale, nothing, np.zeros(0))

    def broadcast(_: Array, state: ServerState) -> Message:
        return Message(*(jnp.asarray(x, jnp.result_type(float)) for x in state[:4]))

    def merge(state: ServerState, replies: Reply) -> tuple[ServerState, np.ndarray]:
        prior = _prior_fit(factors, broadcast(random.key(0), state), silos)
        shift = np.asarray(replies.shift, np.float64)
        precision = np.asarray(replies.precision, np.float64)
        own = [np.asarray(x, np.float64) for x in prior]
        loc, scale, moved = _move(state, shift.sum(0) + own[0], precision.sum(0) + own[1])
        surrogates = _to_natural(state, shift, precision, own)
        state = state._replace(loc=loc, scale=scale, surrogates=surrogates, moved=moved)
        return state, np.asarray(replies.misfit)

    return Federated(init, broadcast, ScoreLocal(factors, units, points_at_once), merge)


@partial(jax.jit, static_argnames=("factors",))
def _prior(factors: Factors, message: Message, silos: Silos) -> tuple[Array, Array]:
    """Log prior and its whitened score at the points."""

    def value(u: Array) -> Array:
        theta = factors.unravel(message.loc + matvec(message.scale, u))
        return factors.log_prior(theta, silos.shared)

    return jax.vmap(jax.value_and_grad(value))(message.points)


def _prior_fit(factors: Factors, message: Message, silos: Silos) -> tuple[Array, Array]:
    scores = _prior(factors, message, silos)[1]
    weights = jnp.where(jnp.isfinite(scores).all(-1), message.weights, 0.0)
    scores = jnp.where(weights[:, None] > 0, scores, 0.0)
    return fit_score(message.points, scores, weights, message.scale.ndim == 2)[:2]


def _to_natural(state: ServerState, shift: np.ndarray, precision: np.ndarray, prior: list[np.ndarray]) -> Surrogates:
    """From whitened coordinates to those of theta: ``Lambda = L^-T B L^-1``, ``eta = L^-T a + Lambda mu``."""

    def natural(a: np.ndarray, b: np.ndarray) -> Gaussian:
        if state.scale.ndim == 1:
            matrix = b / state.scale**2
            eta = a / state.scale + matrix * state.loc
        else:
            inverse = np.linalg.inv(state.scale)
            matrix = inverse.T @ b @ inverse
            eta = a @ inverse + matrix @ state.loc
        return Gaussian(eta, matrix)  # float64: the kernel expands them around loc

    return Surrogates(natural(shift, precision), natural(*prior))


def _move(state: ServerState, shift: np.ndarray, precision: np.ndarray) -> tuple:
    """The next whitening: the product's, with curvature floored and the step cut to 3 old sds a direction.

    Where the step is cut the old spread is doubled, so that a start far away is left in a few rounds.
    """
    if state.scale.ndim == 1:
        values, vectors = precision, None
        step = shift
    else:
        values, vectors = np.linalg.eigh(precision)
        step = vectors.T @ shift
    curvature = np.maximum(np.abs(values), 0.25)
    step = step / curvature
    cut = np.abs(step) > 3
    step = np.clip(step, -3, 3)
    curvature = np.where(cut, 0.25, curvature)
    moved = float(max(np.abs(step).max(), np.abs(np.log(curvature)).max() / 2.2))
    if vectors is None:
        return state.loc + state.scale * step, state.scale / np.sqrt(curvature), moved
    loc = state.loc + state.scale @ (vectors @ step)
    root = state.scale @ (vectors / np.sqrt(curvature))
    return loc, np.linalg.cholesky(root @ root.T), moved


def fit(
    factors: Factors,
    silos: Silos,
    units: Units | None = None,
    *,
    max_rounds: int = 40,
    seed: int = 0,
    local: Callable | None = None,
) -> ScoreFit:
    """Fit score-matched surrogates, and the local map where the model has local latents.

    :param factors: the model's factors.
    :param silos: the data.
    :param units: how local latents are cut into units.
    :param max_rounds: rounds before giving up on settling; 5 to 10 are usual.
    :param seed: of the scrambled points. The fit uses no other randomness.
    :param local: another way to make a silo's reply (the Laplace surrogates'); the local map is regressed all the same.
    :return: the fit.
    """
    full = factors.dim <= _FULL_UP_TO
    at_once = _at_once(silos, units)
    # points cost time; a second number of points costs compiling the program again
    num = 64 if at_once < 256 else 256
    if full:
        num = max(num, 2 ** math.ceil(math.log2(4 * factors.dim)))
    scheme = algorithm(factors, units, silos, full, at_once)
    local = scheme.local if local is None else local
    key = random.key(seed)
    group = None if units is None else units.group
    cost = Cost()

    def ask(local: Callable, state: ServerState) -> tuple[Any, Any]:
        nonlocal cost
        message = scheme.broadcast(key, state)
        replies, rows = ask_all(local, key, message, None, silos, group)
        cost += Cost(1, len(message.points), message_bytes(message), message_bytes(replies) // len(silos))
        return replies, rows

    state = scheme.init(key)
    while state.moved > _SETTLED and cost.rounds < max_rounds:
        points = sobol_normal(num, factors.dim, seed + cost.rounds)
        state = state._replace(points=points, weights=np.ones(num))
        state, _ = scheme.merge(state, ask(local, state)[0])
    if state.moved > _SETTLED:
        warnings.warn(
            f"the surrogates have not settled after {max_rounds} rounds: expected a posterior that a Gaussian in "
            "unconstrained space describes roughly; reparametrise the model or scale its covariates",
            stacklevel=2,
        )

    points = wide_points(max(256, num), factors.dim, seed + 10_000)
    state = state._replace(points=points, weights=np.ones(len(points)))
    values = np.asarray(ask(scheme.local, state)[0].values, np.float64)
    state = state._replace(weights=_last_weights(factors, scheme.broadcast(key, state), values, silos))
    replies, local_map = ask(scheme.local, state)
    if local is not scheme.local:
        replies = ask(local, state)[0]
    final, misfit = scheme.merge(state, replies)
    return ScoreFit(final.surrogates, local_map, _whitening(state), _whitening(final), jnp.asarray(misfit), cost)


def fit_at(factors: Factors, silos: Silos, units: Units | None, thetas: np.ndarray, scale: np.ndarray) -> ScoreFit:
    """Fit surrogates and local map at given positions, all of equal weight: one round.

    At draws of the posterior the least squares fit of the total score has the posterior's mean and covariance (Stein's identity), whatever
    its shape, and what is left of each silo's is least in the posterior's mean square.

    :param thetas: positions ``(K, d)``, several times as many as d.
    :param scale: of the coordinates in which is fitted, ``(d, d)`` or ``(d,)``; the positions' spread, roughly.
    """
    scheme = algorithm(factors, units, silos, scale.ndim == 2, _at_once(silos, units))
    loc = thetas.mean(0)
    shifted = thetas - loc
    points = shifted / scale if scale.ndim == 1 else np.linalg.solve(scale, shifted.T).T
    state = ServerState(loc, scale, points, np.ones(len(points)))
    key = random.key(0)
    message = scheme.broadcast(key, state)
    replies, local_map = ask_all(scheme.local, key, message, None, silos, None if units is None else units.group)
    final, misfit = scheme.merge(state, replies)
    cost = Cost(1, len(points), message_bytes(message), message_bytes(replies) // len(silos))
    return ScoreFit(final.surrogates, local_map, _whitening(state), _whitening(final), jnp.asarray(misfit), cost)


def _at_once(silos: Silos, units: Units | None) -> int:
    """Points evaluated together."""
    rows = max(sum(n) for n in silos.sizes.values())
    if units is not None and units.group is not None:
        rows *= len(nodes(units.dim)[0])
    return max(1, _ROWS_AT_ONCE // rows)


def _whitening(state: ServerState) -> Whitening:
    return Whitening(jnp.asarray(state.loc), jnp.asarray(state.scale))


def _last_weights(factors: Factors, message: Message, values: np.ndarray, silos: Silos) -> np.ndarray:
    """``p(theta | y)^(1/4)`` at the points, the power lowered where dimensions are many."""
    total = values.sum(0) + np.asarray(_prior(factors, message, silos)[0], np.float64)
    total = np.where(np.isfinite(total), total, -np.inf)
    power = 0.25 * min(1.0, math.sqrt(6 / factors.dim))
    return np.exp(power * (total - total.max()))
