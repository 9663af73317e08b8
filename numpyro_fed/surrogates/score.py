r"""Score-matched surrogates, and the local map that comes with them.

Each round the server sends a center :math:`\mu`, a factor L of a covariance, and points
:math:`u_k`. A silo returns the natural parameters of the Gaussian whose score is nearest, in least
squares, to

.. math:: \nabla_u \log \hat p(y_s \mid \mu + L u_k),

the gradient of its marginal likelihood (local latents integrated out). The server adds the prior's
parameters, and moves :math:`\mu, L` to the product by the accelerated steps of conducive rounds
(:mod:`numpyro_fed.surrogates.natural_step`). Last rounds, and the bounded corrections and the local
map that they make: see docs/derivations/surrogates.md. The local map stays in the silo.

**What leaves a silo**, in each round: ``d + d^2`` numbers (diagonal: ``2 d``), the misfit, and its
log marginal likelihood at the points.

FSGLD 3.1 matches moments of local posteriors, which in hierarchical models are improper or far from
Gaussian; scores are not. FSGLD remark 3 asks for this criterion (equation 8).
"""

import math
import warnings
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
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
from numpyro_fed.rounds.federated import Cost, message_bytes
from numpyro_fed.rounds.inline import ask_all, compile_ahead
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.surrogates.corrections import Corrections, regress
from numpyro_fed.surrogates.gaussian import FULL_UP_TO, Gaussian, Surrogates
from numpyro_fed.surrogates.local_score import ScoreLocal, points_at_once
from numpyro_fed.surrogates.natural_step import CONVERGED
from numpyro_fed.surrogates.score_checks import check_finite, check_values
from numpyro_fed.surrogates.score_server import ServerState, algorithm, log_posterior
from numpyro_fed.surrogates.sobol import sobol_normal, wide_points

# largest move of the last fit from a converged start, in sds and log sds (a twofold spread: .69)
_ELSEWHERE = 0.6
# number of positions that represent the posterior. The noise of S silos is known to a relative
# sqrt(2 / (32 S)), so an accepted inflation of 2 % to .5 % / sqrt(S)
NUM_DRAWS = 32
# sd of the points for corrections, relative to the surrogate posterior's, for wider tails; of the
# weights for a Gaussian posterior 58 % are effective in 6 dimensions, 23 % in 16
_NEAR = 1.3


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
    rounds = _Rounds(factors, silos, units, seed)
    reply = rounds.task if local is None else local
    state = rounds.first_state(start)
    started = state.moved <= CONVERGED
    with ThreadPoolExecutor(1) as pool:
        rounds.compile_last(pool, state)
        state = _converge(rounds, state, reply, max_rounds)
    wide = _widen(rounds, state)
    replies, local_map = rounds.ask(rounds.last, wide)
    values = replies.values
    if local is not None:
        replies = rounds.ask(reply, wide)[0]
    if isinstance(silos, RemoteSilos):
        check_values(wide.points, wide.weights, replies, values, silos)
    final, misfit = rounds.scheme.merge(wide, replies)
    if start is not None and started and not final.moved <= _ELSEWHERE:
        # the start was from the posterior of other data
        start = (*start[:2], math.inf)
        again = fit(
            factors, silos, units, max_rounds=max_rounds, seed=seed, local=local, start=start
        )
        return again._replace(cost=rounds.cost + again.cost)
    assert final.surrogates is not None
    found = ScoreFit(
        final.surrogates, local_map, _whitening(wide), _whitening(final), jnp.asarray(misfit),
        rounds.cost,
    )  # fmt: skip
    return found if factors.dim > MOST_DIMENSIONS else _correct(rounds, final, found, local is None)


class _Rounds:
    """Rounds of a fit, with the numbers of their points, and their cost so far."""

    def __init__(self, factors: Factors, silos: Silos, units: Units | None, seed: int) -> None:
        self.factors, self.silos, self.seed, self.cost = factors, silos, seed, Cost()
        self.full = factors.dim <= FULL_UP_TO
        at_once = _at_once(silos, units)
        self.scheme = algorithm(factors, units, silos, self.full, at_once)
        self.task = ScoreLocal(factors, units, at_once)
        self.last = ScoreLocal(factors, units, at_once, last=True)
        # points cost time, and a second number of points costs another compilation
        self.num = 64 if at_once < 256 else 256
        if self.full:
            self.num = max(self.num, 2 ** math.ceil(math.log2(4 * factors.dim)))
        # the inner map has outer latents as coordinates beside u
        inner = units.blocks()[0][2] if isinstance(units, NestedUnits) else 0
        self.num_last = _last_points(factors.dim + inner, self.num)
        self.key = random.key(seed)
        self.group = None if units is None else units.group

    def first_state(self, start: tuple[np.ndarray, np.ndarray, float] | None) -> ServerState:
        """Return the server's first state, see :func:`fit`."""
        state = self.scheme.init(self.key)
        if start is not None:
            loc, scale = (np.asarray(x, np.float64) for x in start[:2])
            keeps = self.full and scale.ndim == 2 and start[2] <= CONVERGED
            state = state._replace(
                loc=loc, scale=_root(scale, self.full), moved=start[2] if keeps else math.inf
            )
        points = sobol_normal(self.num, self.factors.dim, self.seed)
        return state._replace(points=points, weights=np.ones(self.num))

    def ask(self, local: SiloTask, state: ServerState) -> tuple[PyTree, PyTree]:
        """Return the silos' replies at the server's points, and what stays in the silos."""
        message = self.scheme.broadcast(self.key, state)
        replies, rows = ask_all(local, self.key, message, None, self.silos, self.group)
        check_finite(replies, self.silos)
        up = message_bytes(replies) // len(self.silos)
        self.cost += Cost(1, len(message.points), message_bytes(message), up)
        return replies, rows

    def compile_last(self, pool: Executor, state: ServerState) -> None:
        """Compile the program of the last rounds in another thread, beside the first rounds'."""
        message = self.scheme.broadcast(self.key, _at_wide_points(self, state))
        compile_ahead(pool, self.last, self.key, message, None, self.silos, self.group)

    def log_posterior(self, state: ServerState) -> np.ndarray:
        """Return the log posterior at the server's points, from a round of the last fit."""
        message = self.scheme.broadcast(self.key, state)
        return log_posterior(self.factors, message, self.ask(self.last, state)[0], self.silos)


def _converge(rounds: _Rounds, state: ServerState, reply: SiloTask, max_rounds: int) -> ServerState:
    """Move the server's Gaussian until it hardly moves."""
    while not state.moved <= CONVERGED and rounds.cost.rounds < max_rounds:
        state, _ = rounds.scheme.merge(state, rounds.ask(reply, state)[0])
    if not state.moved <= CONVERGED:
        warnings.warn(
            f"the surrogates have not converged after {max_rounds} rounds: expected a posterior "
            "that a Gaussian in unconstrained space describes roughly; reparametrize the model or "
            "scale its covariates",
            stacklevel=3,
        )
    return state


def _widen(rounds: _Rounds, state: ServerState) -> ServerState:
    """Return the state with wide points, weighted by a power of the posterior."""
    state = _at_wide_points(rounds, state)
    power = 0.25 * min(1.0, math.sqrt(6 / rounds.factors.dim))
    return state._replace(weights=_tempered(rounds.log_posterior(state), power))


def _at_wide_points(rounds: _Rounds, state: ServerState) -> ServerState:
    count = rounds.num_last
    points = wide_points(count, rounds.factors.dim, rounds.seed + 10_000)
    # no acceleration, since the last fit has other points and weights
    return state._replace(points=points, weights=np.ones(count), history=None)


def _correct(rounds: _Rounds, final: ServerState, found: ScoreFit, bounded: bool) -> ScoreFit:
    """Fit the local map, and if ``bounded`` the corrections, at points near the posterior.

    The result also has positions that represent the posterior.
    """
    count, dim = rounds.num_last, rounds.factors.dim
    near = final._replace(
        points=_NEAR * sobol_normal(count, dim, rounds.seed + 20_000), weights=np.ones(count)
    )
    logs = rounds.log_posterior(near)
    logs += 0.5 * (near.points**2).sum(1) / _NEAR**2  # divides by the density of the points
    draws, near = (
        _resampled(near, _tempered(logs, 1.0)),
        near._replace(weights=_tempered(logs, 0.5)),
    )
    replies, local_map = rounds.ask(rounds.last, near)
    surrogates = found.surrogates
    if bounded:
        corrections = _corrections(near, surrogates.factors, replies.correction)
        surrogates = replace(surrogates, corrections=corrections)
    return found._replace(
        surrogates=surrogates, local_map=local_map, map_whitening=_whitening(near),
        cost=rounds.cost, draws=draws,
    )  # fmt: skip


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


def _tempered(logs: np.ndarray, power: float) -> np.ndarray:
    """Return a power of densities, with largest value 1.

    :param logs: log densities; where these are not finite, the result is 0.
    """
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    return np.exp(power * (logs - logs.max()))
