r"""Score-matched surrogates, and the local map that comes with them.

Each round the server sends a center :math:`\mu`, a factor L of a covariance, and points
:math:`u_k`. A silo returns the natural parameters of the Gaussian whose score is nearest, in least
squares, to

.. math:: \nabla_u \log \hat p(y_s \mid \mu + L u_k),

the gradient of its marginal likelihood (local latents integrated out). The server adds the prior's
parameters. It moves :math:`\mu, L` to the product by the accelerated steps of conducive rounds
(:mod:`numpyro_fed.surrogates.natural_step`).

After these rounds, a last fit of the Gaussians has wider points with weights by a power of the
posterior. In few dimensions another fit, at points near the posterior, adds bounded corrections
(:mod:`numpyro_fed.surrogates.corrections`). The last of these fits also regresses the locations and
log scales of the local latents on u. This regression, the local map, stays in the silo.

**What leaves a silo**, in each round: ``d + d^2`` numbers (diagonal: ``2 d``), the misfit, and its
log marginal likelihood at the points.

FSGLD 3.1 matches moments of local posteriors, which in hierarchical models are improper or far from
Gaussian; scores are not. FSGLD remark 3 asks for this criterion (equation 8).
"""

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.bounded_features import MOST_DIMENSIONS, num_features
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.rounds.federated import Cost, Federated, message_bytes
from numpyro_fed.rounds.inline import ask_all
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.surrogates.corrections import Corrections, regress
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates, matvec
from numpyro_fed.surrogates.least_squares import fit_score
from numpyro_fed.surrogates.local_score import Message, Reply, ScoreLocal, points_at_once
from numpyro_fed.surrogates.natural_step import ApproxFactor, History, natural_step, product
from numpyro_fed.surrogates.sobol import sobol_normal, wide_points

__all__ = ["NUM_DRAWS", "ScoreFit", "Whitening", "fit"]

_LARGEST = 1e18  # of a reply in whitened units: larger ones make the sum singular
_FULL_UP_TO = 500  # dimensions; beyond, one d x d matrix per silo is too much memory
_SETTLED = 0.1  # largest move of a converged round: center in sds, spread in log sds
# largest move of the last fit from a converged start, in sds and log sds (a twofold spread: .69)
_ELSEWHERE = 0.6
NUM_DRAWS = 32  # number of positions that represent the posterior
# largest ratio of :func:`_contradiction`; those of honest silos are below 2
_CONTRADICTION = 100.0
_FLAT = 1e-3  # least sd of log marginals, in nats
_NEAR = 1.3  # sd of the points for corrections, relative to the surrogate posterior's


class Whitening(NamedTuple):
    """Coordinates ``u = scale^-1 (theta - loc)``.

    ``scale`` is lower triangular ``(d, d)`` or diagonal ``(d,)``.
    """

    loc: Array
    scale: Array


class ScoreFit(NamedTuple):
    """Result of :func:`fit`.

    :param surrogates: the silos' and the prior's factors.
    :param local_map: rows of the local map (private to the silos), or ``None`` without local
        latents.
    :param map_whitening: whitening of the local map's coordinates u.
    :param posterior_whitening: whitening of the product of all factors, with a bound of its
        curvature where that is no density.
    :param misfit: root mean square of the score's misfit per silo ``(S,)``, in whitened units; far
        above 1 the surrogate is poor.
    :param cost: cost of the fit for each silo.
    :param draws: positions that represent the posterior, ``(32, d)``, or ``None`` where they would
        be no better than the Gaussian's.
    """

    surrogates: Surrogates
    local_map: LocalMap | None
    map_whitening: Whitening
    posterior_whitening: Whitening
    misfit: Array
    cost: Cost
    draws: np.ndarray | None = None


class ServerState(NamedTuple):
    """State of the server: whitening, points and weights of the next round.

    Arrays are on the host, in float64.
    """

    loc: np.ndarray
    scale: np.ndarray
    points: np.ndarray
    weights: np.ndarray
    surrogates: Surrogates | None = None
    moved: float = math.inf
    history: History | None = None


def algorithm(
    factors: Factors, units: Units | None, silos: Silos, full: bool, at_once: int
) -> Federated:
    """Return the fit as a federated algorithm.

    One round refits all surrogates around the last center. The server uses only the shared
    arguments of ``silos``.
    """

    def init(_: Array) -> ServerState:
        d = factors.dim
        scale, history = np.full(d, 0.5), None  # precision 4 I
        if full:
            scale, history = (
                np.diag(scale),
                History.none(ApproxFactor(jnp.zeros(d), jnp.zeros((d, d)))),
            )
        return ServerState(np.zeros(d), scale, np.zeros((0, d)), np.zeros(0), history=history)

    def broadcast(_: Array, state: ServerState) -> Message:
        return Message(*(jnp.asarray(x, jnp.result_type(float)) for x in state[:4]))

    def merge(state: ServerState, replies: Reply) -> tuple[ServerState, np.ndarray]:
        prior = _prior_fit(factors, broadcast(random.key(0), state), silos)
        shift = np.asarray(replies.shift, np.float64)
        precision = np.asarray(replies.precision, np.float64)
        own = [np.asarray(x, np.float64) for x in prior]
        loc, scale, moved, history = _move(state, shift.sum(0) + own[0], precision.sum(0) + own[1])
        surrogates = _to_natural(state, shift, precision, own)
        state = state._replace(
            loc=loc, scale=scale, surrogates=surrogates, moved=moved, history=history
        )
        return state, np.asarray(replies.misfit)

    return Federated(init, broadcast, ScoreLocal(factors, units, at_once), merge)


@partial(jax.jit, static_argnames=("factors",))
def _prior(factors: Factors, message: Message, silos: Silos) -> tuple[Array, Array]:
    """Return log prior and its whitened score at the points."""

    def value(u: Array) -> Array:
        theta = factors.unravel(message.loc + matvec(message.scale, u))
        return factors.log_prior(theta, silos.shared)

    return jax.vmap(jax.value_and_grad(value))(message.points)


@partial(jax.jit, static_argnames=("factors",))
def _prior_fit(factors: Factors, message: Message, silos: Silos) -> tuple[Array, Array]:
    scores = _prior(factors, message, silos)[1]
    weights = jnp.where(jnp.isfinite(scores).all(-1), message.weights, 0.0)
    scores = jnp.where(weights[:, None] > 0, scores, 0.0)
    return fit_score(message.points, scores, weights, message.scale.ndim == 2)[:2]


def _to_natural(
    state: ServerState, shift: np.ndarray, precision: np.ndarray, prior: list[np.ndarray]
) -> Surrogates:
    """Convert whitened coordinates to those of theta.

    ``Lambda = L^-T B L^-1``, ``eta = L^-T a + Lambda mu``.
    """

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
    """Return the next center and spread, how far they moved, and the history.

    Full precisions take the accelerated step of conducive rounds.
    """
    total = ApproxFactor(
        jnp.asarray(shift, jnp.result_type(float)), jnp.asarray(precision, jnp.result_type(float))
    )
    if state.history is None:
        (*new, moved, _), history = product(total), None
    else:
        *new, moved, _, history = _accelerated(state.history, total)
    step, root = (np.asarray(x, np.float64) for x in new)
    if state.scale.ndim == 1:
        return state.loc + state.scale * step, state.scale * root, float(moved), history
    return state.loc + state.scale @ step, state.scale @ root, float(moved), history


@jax.jit
def _accelerated(history: History, total: ApproxFactor) -> tuple:
    return natural_step(history, total, jnp.array(True))


def fit(
    factors: Factors,
    silos: Silos,
    units: Units | None = None,
    *,
    max_rounds: int = 40,
    seed: int = 0,
    local: SiloTask | None = None,
    start: tuple[np.ndarray, np.ndarray, float] | None = None,
) -> ScoreFit:
    """Fit score-matched surrogates, and the local map where the model has local latents.

    :param factors: the model's factors.
    :param silos: the data.
    :param units: the cut of local latents into units.
    :param max_rounds: limit of rounds without convergence; 5 to 10 are usual.
    :param seed: seed of the scrambled points. The fit uses no other randomness.
    :param start: mean and square root ``(d, d)`` or ``(d,)`` of a Gaussian near the posterior, in
        place of N(0, 1/4), and the sds of its last move. If the root is full and the last move
        small, center and spread stay as they are, unless the last fit moves far from them.
    :param local: another computation of a silo's reply (for Laplace surrogates); the local map is
        regressed all the same.
    :return: the fit.
    :raises ValueError: for replies that are not finite, and for a remote silo whose surrogate
        contradicts its log likelihood.
    :warns UserWarning: if the fit does not converge.
    """
    full = factors.dim <= _FULL_UP_TO
    at_once = _at_once(silos, units)
    # points cost time, and a second number of points costs another compilation
    num = 64 if at_once < 256 else 256
    if full:
        num = max(num, 2 ** math.ceil(math.log2(4 * factors.dim)))
    scheme = algorithm(factors, units, silos, full, at_once)
    reply = ScoreLocal(factors, units, at_once) if local is None else local
    key = random.key(seed)
    group = None if units is None else units.group
    cost = Cost()

    def ask(local: SiloTask, state: ServerState) -> tuple[PyTree, PyTree]:
        nonlocal cost
        message = scheme.broadcast(key, state)
        replies, rows = ask_all(local, key, message, None, silos, group)
        _check_finite(replies, silos)
        cost += Cost(
            1, len(message.points), message_bytes(message), message_bytes(replies) // len(silos)
        )
        return replies, rows

    state, converged = scheme.init(key), False
    if start is not None:
        loc, scale = (np.asarray(x, np.float64) for x in start[:2])
        converged = full and scale.ndim == 2 and start[2] <= _SETTLED
        state = state._replace(
            loc=loc, scale=_root(scale, full), moved=start[2] if converged else math.inf
        )
    state = state._replace(points=sobol_normal(num, factors.dim, seed), weights=np.ones(num))
    while not state.moved <= _SETTLED and cost.rounds < max_rounds:
        state, _ = scheme.merge(state, ask(reply, state)[0])
    if not state.moved <= _SETTLED:
        warnings.warn(
            f"the surrogates have not converged after {max_rounds} rounds: expected a posterior "
            "that a Gaussian in unconstrained space describes roughly; reparametrize the model or "
            "scale its covariates",
            stacklevel=2,
        )

    final_local = ScoreLocal(factors, units, at_once, last=True)
    # the inner map has outer latents as coordinates beside u
    inner = units.blocks()[0][2] if isinstance(units, NestedUnits) else 0
    count = _last_points(factors.dim + inner, num)
    # no acceleration, since the last fit has other points and weights
    state = state._replace(
        points=wide_points(count, factors.dim, seed + 10_000), weights=np.ones(count), history=None
    )
    logs = _log_posterior(factors, scheme.broadcast(key, state), ask(final_local, state)[0], silos)
    state = state._replace(weights=_tempered(logs, 0.25 * min(1.0, math.sqrt(6 / factors.dim))))
    replies, local_map = ask(final_local, state)
    values = replies.values
    if local is not None:
        replies = ask(reply, state)[0]
    if isinstance(silos, RemoteSilos):
        _check_values(state, replies, values, silos)
    final, misfit = scheme.merge(state, replies)
    # a start from the posterior of other data
    if start is not None and converged and not final.moved <= _ELSEWHERE:
        start = (*start[:2], math.inf)
        again = fit(
            factors, silos, units, max_rounds=max_rounds, seed=seed, local=local, start=start
        )
        return again._replace(cost=cost + again.cost)
    surrogates, of_map, draws = final.surrogates, _whitening(state), None
    if surrogates is not None and factors.dim <= MOST_DIMENSIONS:
        near = final._replace(
            points=_NEAR * sobol_normal(count, factors.dim, seed + 20_000), weights=np.ones(count)
        )
        logs = _log_posterior(
            factors, scheme.broadcast(key, near), ask(final_local, near)[0], silos
        )
        logs += 0.5 * (near.points**2).sum(1) / _NEAR**2  # divides by the density of the points
        draws, near = (
            _resampled(near, _tempered(logs, 1.0)),
            near._replace(weights=_tempered(logs, 0.5)),
        )
        replies, local_map = ask(final_local, near)
        of_map = _whitening(near)
        if local is None:
            surrogates = replace(
                surrogates, corrections=_corrections(near, surrogates.factors, replies.correction)
            )
    return ScoreFit(
        surrogates, local_map, of_map, _whitening(final), jnp.asarray(misfit), cost, draws
    )


def _root(scale: np.ndarray, full: bool) -> np.ndarray:
    """Return a square root of a covariance, full or diagonal as the fit is."""
    if full:
        return scale if scale.ndim == 2 else np.diag(scale)
    return scale if scale.ndim == 1 else np.linalg.norm(scale, axis=1)


def _last_points(dim: int, num: int) -> int:
    """Return the number of points of the last rounds.

    It is at least four times the number of bounded features, where these are fitted.
    """
    if dim > MOST_DIMENSIONS:
        return max(256, num)
    return max(256, num, 2 ** math.ceil(math.log2(4 * num_features(dim))))


def _at_once(silos: Silos, units: Units | None) -> int:
    if units is not None and units.group is None:  # all silos are padded to the largest
        return points_at_once(max(len(n) * max(n) for n in silos.sizes.values()), units)
    return points_at_once(max(sum(n) for n in silos.sizes.values()), units)


def _whitening(state: ServerState) -> Whitening:
    return Whitening(jnp.asarray(state.loc), jnp.asarray(state.scale))


def _corrections(state: ServerState, gaussians: Gaussian, regressions: Array) -> Corrections:
    """Return the silos' regressions less those of their Gaussians' scores.

    Regression is linear, and the server has points, weights and Gaussians.
    """
    thetas = state.loc + state.points @ state.scale.T
    scores = gaussians.scores(thetas) @ state.scale
    points, weights = jnp.asarray(state.points), jnp.asarray(state.weights)
    known = jax.vmap(lambda s: regress(points, s, weights))(jnp.asarray(scores))
    return Corrections(
        state.loc,
        np.linalg.inv(state.scale),
        np.asarray(regressions, np.float64) - np.asarray(known, np.float64),
    )


def _resampled(state: ServerState, weights: np.ndarray) -> np.ndarray | None:
    """Resample positions systematically by their weights.

    The result is ``None`` where too few points have most of the weight.
    """
    weights = weights / weights.sum()
    if 1 / (weights**2).sum() < NUM_DRAWS:
        return None
    places = np.searchsorted(np.cumsum(weights), (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS)
    return np.asarray(
        state.loc + state.points[np.minimum(places, len(weights) - 1)] @ state.scale.T
    )


def _log_posterior(factors: Factors, message: Message, replies: Reply, silos: Silos) -> np.ndarray:
    """Return the log posterior at the points, up to a constant.

    It is the sum of the silos' log marginals ``(S, K)`` and the log prior.
    """
    prior = np.asarray(_prior(factors, message, silos)[0], np.float64)
    values = np.asarray(replies.values, np.float64)
    logs = values.sum(0) + prior
    if not np.isfinite(logs).any():
        finite = np.isfinite(values).sum(1)
        raise ValueError(
            f"silo {silos.names[int(finite.argmin())]!r}: its log likelihood is finite at "
            f"{finite.min()} of {len(logs)} positions, and the sum over silos at none; expected "
            "finite ones near the posterior: check the silo's rows and the model's scales, or "
            "leave the silo out"
        )
    return logs


def _check_finite(replies: Reply, silos: Silos) -> None:
    """Raise an error for Gaussians that are not finite, with the name of their silo."""
    for part in ("shift", "precision", "correction"):
        x = replies._asdict()[part]
        if x is None:
            continue
        wrong = ~(np.abs(np.asarray(x)) < _LARGEST).reshape(len(silos), -1).all(1)  # or NaN
        if wrong.any():
            raise ValueError(
                f"silo {silos.names[int(wrong.argmax())]!r} returned a surrogate with NaN or "
                f"infinite numbers ({part}); expected finite ones: check its rows and its "
                "installation, or leave the silo out"
            )


def _contradiction(state: ServerState, replies: Reply, values: np.ndarray) -> np.ndarray:
    """Compare each silo's log marginals with its Gaussian at the points.

    In the coordinates of a false surrogate, which the server believed, log marginals are all but
    flat.

    :param values: log marginals ``(S, K)``; a constant does not matter.
    :return: sd of the difference over sd of the log marginals, ``(S,)``.
    """
    u, values = state.points, np.asarray(values, np.float64)
    shift, precision = (np.asarray(x, np.float64) for x in (replies.shift, replies.precision))
    curved = (
        np.einsum("ki,sij,kj->sk", u, precision, u, optimize=True)
        if precision.ndim == 3
        else precision @ (u**2).T
    )
    gaussian = shift @ u.T - 0.5 * curved
    weights = np.where(np.isfinite(values), state.weights, 0.0)
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)

    def sd(x: np.ndarray) -> np.ndarray:
        away = np.where(weights > 0, x, 0.0)
        away = away - (weights * away).sum(1, keepdims=True)
        return np.sqrt((weights * away**2).sum(1))

    return sd(values - gaussian) / np.maximum(sd(values), _FLAT)


def _check_values(state: ServerState, replies: Reply, values: np.ndarray, silos: Silos) -> None:
    """Raise an error for a surrogate that its silo's own log marginals contradict."""
    found = _contradiction(state, replies, values)
    worst = int(found.argmax())
    if found[worst] > _CONTRADICTION:
        raise ValueError(
            f"silo {silos.names[worst]!r} returned a surrogate that its own log likelihood "
            "contradicts: the difference of the two varies "
            f"{found[worst]:,.0f} times as much as the log likelihood; expected at most "
            f"{_CONTRADICTION:,.0f}: check its installation, or leave the silo out"
        )


def _tempered(logs: np.ndarray, power: float) -> np.ndarray:
    """Return a power of densities, with largest value 1.

    :param logs: log densities; where these are not finite, the result is 0.
    """
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    return np.exp(power * (logs - logs.max()))
