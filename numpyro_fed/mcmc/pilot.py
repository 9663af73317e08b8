r"""The step size from an accepted bias, and the noise that silos make, measured in a pilot.

Near its stationary law and in whitened coordinates the chain is
:math:`w \leftarrow w - \tfrac h2 w + \tfrac h2 e + \sqrt h \xi` with noise e of covariance N (of a stay's sum, per step), so its
variance in a direction is

.. math:: \frac{1 + hN/4}{1 - h/4} \approx 1 + \tfrac h4 (1 + N),

and an inflation of sds by the factor 1 + b is reached at :math:`h = 8 b / (1 + N)`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_fed.federation import Cost
from numpyro_fed.local_map import LocalMap
from numpyro_fed.mcmc import langevin
from numpyro_fed.mcmc.langevin import Plan, Tuning
from numpyro_fed.mcmc.local_moves import move_noise
from numpyro_fed.silos import Silos
from numpyro_fed.storage import SiloView, sweep

__all__ = ["MAX_STEP_SIZE", "cost", "inflation", "settle", "stay_noise", "step_size"]

MAX_STEP_SIZE = 0.1
_DRAWS = 32
_WARM = 20  # local moves before counting
_CUT = 8.0  # norm of e, in whitened units
_CUT_RATE = 0.005
_LONGEST = 64  # local moves counted; longer stays are extrapolated


@partial(jax.jit, static_argnames=("plan", "length"))
def _stay_means(plan: Plan, length: int, key: Array, tuning: Tuning, silos: Silos) -> tuple[Array, Array, Array]:
    """Means of e over each half of a stay at fixed theta ``(S, draws, d)``, and its norms ``(S, draws, steps)``."""
    shape = (_DRAWS, plan.factors.dim)
    key_theta, key_walks = random.split(key)
    normal = random.normal(key_theta, shape, tuning.loc.dtype)
    thetas = tuning.loc + jax.vmap(partial(langevin.push, tuning))(normal)
    group = None if plan.units is None else plan.units.group

    def local(view: SiloView, rows: LocalMap | None) -> tuple[tuple[Array, ...], None]:
        def at(args: tuple[Array, Array]) -> tuple[Array, ...]:
            theta, key = args
            return _walk(plan, tuning, theta, key, rows, view, length)

        keys = random.split(random.fold_in(key_walks, view.number), _DRAWS)
        return lax.map(at, (thetas, keys)), None

    rows = None if tuning.latents is None else tuning.latents.rows
    return sweep(local, silos, rows, group)[0]


def _walk(
    plan: Plan,
    tuning: Tuning,
    theta: Array,
    key: Array,
    rows: LocalMap | None,
    view: SiloView,
    length: int,
) -> tuple[Array, Array, Array]:
    state = None
    warm = 0
    if rows is not None:
        state = (random.normal(random.fold_in(key, 0), rows.mean.shape, theta.dtype), rows)
        warm = _WARM
    silo = langevin.open_silo(plan, tuning, state, view)

    def step(eps: Array | None, i: Array) -> tuple[Array | None, Array]:
        key_step = random.fold_in(key, i + 1)
        here = silo._replace(kwargs={**silo.kwargs, **langevin.batches(plan, key_step, view, ())})
        if plan.units is not None and eps is not None:
            noise = move_noise(plan.units, key_step, eps, view, 1)
            noise = jax.tree.map(lambda x: x[0], noise)
            eps, _ = langevin.move(plan, theta, eps, here, view, noise)
        return eps, langevin.residual(plan, tuning, theta, eps, here, view)[0]

    eps = None if state is None else state[0]
    _, e = lax.scan(step, eps, jnp.arange(warm + length))
    e = e[warm:]
    return e[: length // 2].mean(0), e[length // 2 :].mean(0), jnp.linalg.norm(e, axis=-1)


def _length(plan: Plan) -> int:
    still = plan.units is None and plan.batch is None  # e is then constant at fixed theta
    return 2 if still else 2 * max(1, min(plan.num_local_steps, _LONGEST) // 2)


def cost(plan: Plan, tuning: Tuning) -> Cost:
    """What the pilot costs each silo: the draws of theta down, two means of e for each up."""
    item = tuning.loc.dtype.itemsize
    steps = _length(plan) + (0 if plan.units is None else _WARM)
    passes = 2 if plan.cut else 1
    up = _DRAWS * (2 * plan.factors.dim + _length(plan)) * item
    return Cost(1, _DRAWS * steps, _DRAWS * plan.factors.dim * item, up).times(passes)


def settle(plan: Plan, tuning: Tuning, silos: Silos, bias_target: float | None, *, seed: int = 0) -> Tuning:
    """Settle the cut, the step size (where ``bias_target`` is given) and the predicted inflation.

    The cut is 8, or where that would act too often, what leaves one step in 200 to be cut: minibatches and small f_s make
    e large without its being wrong.
    """
    key, dtype = random.key(seed), tuning.loc.dtype
    if plan.cut:
        norms = np.asarray(_stay_means(plan, _length(plan), key, tuning, silos)[2], np.float64)
        weights = np.broadcast_to(np.asarray(tuning.selection, np.float64)[:, None, None], norms.shape)
        tuning = tuning._replace(cut=jnp.asarray(max(_CUT, _quantile(norms, weights, 1 - _CUT_RATE)), dtype))
    if plan.schedule is not None:  # no one step size to predict for
        return tuning
    if bias_target is None and not float(tuning.step_size) < 4:
        raise ValueError(
            f"step_size: in preconditioned units a step of 4 or more diverges by itself, got {float(tuning.step_size):g}; "
            'expected "auto" or about 0.001 to 0.1'
        )
    noise = stay_noise(plan, tuning, silos, seed=seed)
    h = float(tuning.step_size) if bias_target is None else step_size(noise, bias_target)
    return tuning._replace(step_size=jnp.asarray(h, dtype), inflation=jnp.asarray(inflation(noise, h), dtype))


def _quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    """Weighted quantile of the finite values."""
    values, weights = (x[np.isfinite(values)] for x in (values, weights))
    if not values.size:
        return 0.0
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulative, q * cumulative[-1])])


def stay_noise(plan: Plan, tuning: Tuning, silos: Silos, *, seed: int = 0) -> np.ndarray:
    """N: covariance over silos of a stay's sum of e, per step, in whitened coordinates, ``(d, d)``.

    With A and B the means of two halves of a stay of J steps at fixed theta, a stay of T steps has
    ``N = T sym(A B') + J/4 (A - B)(A - B)'``: what persists counts T times, what is redrawn once.
    """
    steps, length = plan.num_local_steps, _length(plan)
    first, second = (np.asarray(x, np.float64) for x in _stay_means(plan, length, random.key(seed), tuning, silos)[:2])
    f = np.asarray(tuning.selection, np.float64)[:, None, None]
    good = np.isfinite(first).all((0, 2)) & np.isfinite(second).all((0, 2))
    if not good.any():
        raise ValueError(
            "the gradient is not finite at any of the pilot's draws of the surrogate posterior, so no step size "
            "can be chosen; check the model's scales, or give step_size= and surrogate="
        )
    first, second = first[:, good], second[:, good]
    gap = first - second
    # the mean over silos is drift, not noise (it cancels in the gap)
    first, second = first - (f * first).sum(0), second - (f * second).sum(0)
    between = np.einsum("sni,snj->ij", f * first, second) / good.sum()
    within = np.einsum("sni,snj->ij", f * gap, gap) / good.sum()
    return steps * 0.5 * (between + between.T) + length / 4 * within


def step_size(noise: np.ndarray, bias_target: float) -> float:
    """h at which the worst direction's sd is inflated by the factor ``1 + bias_target``."""
    return min(MAX_STEP_SIZE, 8 * bias_target / (1 + max(0.0, float(np.linalg.eigvalsh(noise)[-1]))))


def inflation(noise: np.ndarray, h: float) -> float:
    """Predicted ratio of the chain's sd to the posterior's, in the worst direction."""
    worst = max(0.0, float(np.linalg.eigvalsh(noise)[-1]))
    return float(np.sqrt((1 + h * worst / 4) / (1 - h / 4)))
