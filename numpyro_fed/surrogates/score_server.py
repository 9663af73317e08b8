"""Server of the score fit: it moves a Gaussian to the product of the silos' surrogates.

:mod:`numpyro_fed.surrogates.score` says what a round is.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.rounds.inline import quick_jit
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates, matvec
from numpyro_fed.surrogates.least_squares import fit_score
from numpyro_fed.surrogates.local_score import Message, Reply, ScoreLocal
from numpyro_fed.surrogates.natural_step import ApproxFactor, History, natural_step, product


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
            scale, history = np.diag(scale), _no_history(d)
        return ServerState(np.zeros(d), scale, np.zeros((0, d)), np.zeros(0), history=history)

    def broadcast(_: Array, state: ServerState) -> Message:
        return Message(*map(_on_device, state[:4]))

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


def _on_device(x: np.ndarray) -> Array:
    """Return the array in JAX's own precision, rounded on the host, which compiles nothing."""
    return jax.device_put(np.asarray(x, jnp.result_type(float)))


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
    total = ApproxFactor(_on_device(shift), _on_device(precision))
    if state.history is None:
        (*new, moved, _), history = product(total), None
    else:
        *new, moved, _, history = _accelerated(state.history, total)
    step, root = (np.asarray(x, np.float64) for x in new)
    if state.scale.ndim == 1:
        return state.loc + state.scale * step, state.scale * root, float(moved), history
    return state.loc + state.scale @ step, state.scale @ root, float(moved), history


@partial(jax.jit, static_argnums=0)
def _no_history(dim: int) -> History:
    return History.none(ApproxFactor(jnp.zeros(dim), jnp.zeros((dim, dim))))


@quick_jit()
def _accelerated(history: History, total: ApproxFactor) -> tuple:
    return natural_step(history, total, jnp.array(True))


def log_posterior(factors: Factors, message: Message, replies: Reply, silos: Silos) -> np.ndarray:
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
