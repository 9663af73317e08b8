"""Pilot that measures the silos' noise and derives a kernel's numbers from it.

At approximate draws of the posterior, each silo walks at fixed theta. Its latents and minibatches
move as in a visit. The rule from the noise to the step size is in
:mod:`numpyro_fed.mcmc.step_rule`.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.mcmc import gradients, langevin, step_rule
from numpyro_fed.mcmc.config import TUNING_CLASSES, KernelTask, LangevinConfig, Tuning
from numpyro_fed.mcmc.step_rule import VisitNoise
from numpyro_fed.rounds.federated import LARGEST_FINITE, Cost
from numpyro_fed.rounds.inline import ask_all
from numpyro_fed.surrogates.score import NUM_DRAWS

# local moves before counting; of latents that start at the map's draws, and move with probability
# .2, one in a hundred has not moved then
_WARM = 20
# norm of e, in whitened units; without a cut chains of two models of five diverged, with it none
_CUT = 8.0
_CUT_RATE = 0.005  # half of the share of cut steps that `diagnose` accepts
_NO_STEP = 1e-6  # at less, chains of thousands of rounds move by less than an sd
# local moves counted, from which longer visits are extrapolated; halves of 32 are long beside the
# memory of independence moves, which is 2 / a - 1 moves at acceptance a
_LONGEST = 64


@dataclass(frozen=True)
class PilotLocal(KernelTask):
    """Walks of a silo at fixed theta.

    The silo sends means of e over each half ``(draws, d)``, and norms of e ``(draws, steps)``.
    """

    wire_name = "PilotLocal"
    leaves = (
        "The silo sends means and norms of the difference between its gradient and its "
        "surrogate's at the server's positions"
    )
    numbers = "2 d numbers for each position, and one for each of up to 128 steps"
    ceiling = 100
    message_classes = TUNING_CLASSES
    reads = (("ScoreLocal",),)

    config: LangevinConfig
    length: int

    def tell(self, message: tuple[Tuning, Array], number: int) -> tuple[Tuning, Array]:
        """Return the numbers without other silos' surrogates, and the positions."""
        return message[0].seen_by(number), message[1]

    def __call__(
        self, key: Array, message: tuple[Tuning, Array], rows: LocalMap | None, view: SiloView
    ) -> tuple[tuple[Array, ...], None]:
        """Return means and norms of e along a walk at each theta of the message."""
        config, (tuning, thetas) = self.config, message
        view = view if config.units is None else config.units.laid_out(view)

        def at(args: tuple[Array, Array]) -> tuple[Array, ...]:
            theta, key = args
            return _walk(config, tuning, theta, key, rows, view, self.length)

        return lax.map(at, (thetas, random.split(key, len(thetas)))), None


def _visit_means(
    config: LangevinConfig, length: int, key: Array, tuning: Tuning, silos: Silos
) -> tuple[Array, Array, Array]:
    """Return the replies of all silos to :class:`PilotLocal`, ``(S, draws, ...)``."""
    shape = (NUM_DRAWS, config.factors.dim)
    key_theta, key_walks = random.split(key)
    thetas = tuning.draws
    if thetas is None:
        normal = random.normal(key_theta, shape, tuning.loc.dtype)
        thetas = tuning.loc + jax.vmap(partial(gradients.push, tuning))(normal)
    group = None if config.units is None else config.units.group
    rows = None if tuning.latents is None else tuning.latents.rows
    return ask_all(
        PilotLocal(config, length), key_walks, (tuning.without_rows(), thetas), rows, silos, group
    )[0]


def _walk(
    config: LangevinConfig,
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
        state = (random.normal(random.fold_in(key, 0), rows.shape, theta.dtype), rows)
        warm = _WARM
    silo = gradients.open_silo(config, tuning, state, view)

    def step(eps: Array | None, i: Array) -> tuple[Array | None, Array]:
        key_step = random.fold_in(key, i + 1)
        batch, noise = langevin.batches(config, key_step, view, ()), None
        if config.units is not None and eps is not None:
            noise = jax.tree.map(
                lambda x: x[0], langevin.local_noise(config, key_step, eps, view, 1)
            )
        eps, _, (own, here, seen) = langevin.local_step(
            config, tuning, theta, eps, silo, view, batch, noise
        )
        return eps, gradients.residual(config, tuning, theta, own, here, seen)[0]

    eps = None if state is None else state[0]
    _, e = lax.scan(step, eps, jnp.arange(warm + length))
    e = e[warm:]
    return e[: length // 2].mean(0), e[length // 2 :].mean(0), jnp.linalg.norm(e, axis=-1)


def _length(config: LangevinConfig) -> int:
    still = config.units is None and config.batch is None  # e is then constant at fixed theta
    return 2 if still else 2 * max(1, min(config.num_local_steps, _LONGEST) // 2)


class Rule(NamedTuple):
    """Choices that the pilot makes.

    :param bias_target: accepted inflation of the sds, or ``None`` if the user sets the step size.
    :param selection: whether to choose the silos' probabilities.
    :param noise_correction: whether the chain injects less noise by the amount of the silos' noise.
    """

    bias_target: float | None
    selection: bool
    noise_correction: bool


def cost(config: LangevinConfig, tuning: Tuning, rule: Rule) -> Cost:
    """Return the pilot's cost for each silo.

    A silo receives the draws of theta, and sends two means of e and its norms for each draw.
    """
    item = tuning.loc.dtype.itemsize
    steps = _length(config) + (0 if config.units is None else _WARM)
    walks = int(config.cut or rule.selection) + int(config.schedule is None)
    gradients = NUM_DRAWS * steps * (1 if tuning.anchor is None else 2)
    up = NUM_DRAWS * (2 * config.factors.dim + _length(config)) * item
    return Cost(1, gradients, NUM_DRAWS * config.factors.dim * item, up).times(walks)


def choose_step_size(
    config: LangevinConfig, tuning: Tuning, silos: Silos, rule: Rule, *, seed: int = 0
) -> Tuning:
    """Choose what the rule asks for and the cut, and predict the inflation.

    A first walk without a cut chooses the silos' probabilities and the cut.
    The cut is 8, or larger where 8 would cut more than one step in 200, since minibatches and small
    f_s make e large without a fault. A second walk, with the chain's cut, chooses the step size.
    """
    dtype = tuning.loc.dtype
    if config.cut or rule.selection:
        noise, norms = _walk_all(config, tuning, silos, seed)
        old = f = np.asarray(tuning.selection, np.float64)
        if rule.selection:
            f = step_rule.best_selection(noise, config.num_local_steps)
        tuning = tuning._replace(selection=jnp.asarray(f, dtype))
        if config.cut:
            norms = norms * (old / f)[:, None, None]
            weights = np.broadcast_to(f[:, None, None], norms.shape)
            tuning = tuning._replace(
                cut=jnp.asarray(max(_CUT, _quantile(norms, weights, 1 - _CUT_RATE)), dtype)
            )
    if config.schedule is not None:  # a schedule has no single step size to predict for
        return tuning
    h = float(tuning.step_size)
    at = (
        visit_noise(config, tuning, silos, seed=seed),
        np.asarray(tuning.selection, np.float64),
        config.num_local_steps,
    )
    if rule.bias_target is not None:
        h = step_rule.step_size(*at, rule.bias_target, corrected=rule.noise_correction)
        if h < _NO_STEP:
            worst = at[0].by_silo(np.eye(len(tuning.loc)), config.num_local_steps).argmax()
            warnings.warn(
                f"the silos' noise allows a step size of only {h:.1g} (0.001 to 0.1 are usual), "
                f"and silo {silos.names[int(worst)]!r} makes most of it: chains will hardly move. "
                "The surrogates do not fit this model; fewer dependent latents in a silo, or "
                "another parametrization, would help",
                stacklevel=2,
            )
    if rule.noise_correction:
        inflation = 1.0
        tuning = tuning._replace(inject=jnp.asarray(step_rule.injection(*at, h), dtype))
    else:
        inflation = step_rule.inflation(*at, h)
    return tuning._replace(step_size=jnp.asarray(h, dtype), inflation=jnp.asarray(inflation, dtype))


def _quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    """Return the weighted quantile of the finite values."""
    values, weights = (x[np.isfinite(values)] for x in (values, weights))
    if not values.size:
        return 0.0
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulative, q * cumulative[-1])])


def visit_noise(
    config: LangevinConfig, tuning: Tuning, silos: Silos, *, seed: int = 0
) -> VisitNoise:
    """Measure the noise of the silos' e, cut as in the chain."""
    return _walk_all(config, tuning, silos, seed)[0]


def _walk_all(
    config: LangevinConfig, tuning: Tuning, silos: Silos, seed: int
) -> tuple[VisitNoise, np.ndarray]:
    """Return the noise and the norms of e ``(S, draws, steps)`` at the pilot's positions.

    The noise is at the positions where all silos are finite.

    :raises ValueError: if there is no such position.
    """
    length = _length(config)
    means = _visit_means(config, length, random.key(seed), tuning, silos)
    first, second, norms = (np.asarray(x, np.float64) for x in means)
    f = np.asarray(tuning.selection, np.float64)[:, None, None]
    finite = np.all((abs(first) < LARGEST_FINITE) & (abs(second) < LARGEST_FINITE), axis=2)
    good = np.all(finite, axis=0)
    if not good.any():
        worst = int(finite.sum(1).argmin())
        raise ValueError(
            f"silo {silos.names[worst]!r}: its gradient is finite at {finite[worst].sum()} of the "
            f"pilot's {len(good)} positions, and the gradients of all silos at none, so no step "
            "size can be chosen; expected finite gradients: check its rows and the model's "
            "scales, or set step_size= and surrogate="
        )
    return VisitNoise(f * first[:, good], f * second[:, good], length), norms
