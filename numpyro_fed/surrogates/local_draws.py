r"""Draws of the silos' own posteriors, by SGLD or NUTS.

The target is :math:`p(\theta)^c p(y_s, z_s \mid \theta)`. SGLD starts at the silo's mode, which
damped Newton steps find. It is preconditioned by the curvature H there: with :math:`L L^\top
\approx H^{-1}` and :math:`\theta = \hat\theta + L w`,

.. math::
    w \leftarrow w + \tfrac h2 L^\top \nabla \log p_s(\theta) + \sqrt h \, \xi, \qquad h = 0.1.

Each step uses all rows, and every 20th position is kept. In these units the chain of a Gaussian
target has the variance 1 / (1 - h/4).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.handlers import block
from numpyro.infer import MCMC, NUTS

from numpyro_fed._typing import AnyArray
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, largest, sweep
from numpyro_fed.density.factors import Factors

# in units of the curvature at the mode; it widens a Gaussian's variance by 2.6 %, which the moments
# divide out
STEP_SIZE = 0.1
CHAINS = {"sgld": 16, "nuts": 4}  # half chains are compared: 32 means, or eight
_THINNING = 20  # steps between draws; the draws of a Gaussian have correlation 0.36
# discarded draws of each chain: 400 steps leave .13 of the start where the curvature is a tenth of
# that at the mode
_BURN_IN = 20
_NEWTON_STEPS = 60  # of kidiq's silos, whose intercepts are 86 from the start, the slowest took 30
# lower bound of the scaled curvature's eigenvalues in the preconditioner: its widest coordinate is
# 100 times as wide as a direction's own scale
_FLATTEST = 1e-4
# steps of NUTS: NumPyro's first five windows of 75, 25, 50, 100 and 200 steps, and the last of 50
_WARMUP = 500


class LocalDraws(NamedTuple):
    """Summary of draws ``loc + scale @ w`` of a silo's posterior.

    It holds the means of w over half chains, and the mean of the half chains' covariances.
    """

    loc: AnyArray
    scale: AnyArray
    means: AnyArray
    within: AnyArray


def _log_target(
    factors: Factors, power: float, view: SiloView
) -> Callable[[Array, dict[str, Array]], Array]:
    kwargs, weights = view.whole()

    def log_density(theta: Array, z: dict[str, Array]) -> Array:
        sites = factors.unravel(theta)
        local = factors.log_local(sites, z, kwargs, weights)
        return power * factors.log_prior(sites, view.silos.shared) + local if power else local

    return log_density


def _mode(log_density: Callable[[Array], Array], start: Array) -> tuple[Array, Array]:
    """Find the mode by Newton steps, and a factor of the inverse curvature there.

    The steps are damped (Levenberg-Marquardt).
    """
    hessian = jax.jacfwd(jax.grad(log_density))

    def scaled(x: Array) -> tuple[Array, Array]:
        curvature = -hessian(x)
        diagonal = jnp.abs(jnp.diagonal(curvature))
        scale = 1 / jnp.sqrt(jnp.maximum(diagonal, 1e-6 * diagonal.max() + 1e-30))
        return scale, curvature * scale * scale[:, None]

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        x, value, damping = carry
        scale, curvature = scaled(x)
        shift = jnp.linalg.solve(
            curvature + damping * jnp.eye(len(x), dtype=x.dtype), scale * jax.grad(log_density)(x)
        )
        proposal = x + scale * shift
        new = log_density(proposal)
        better = new >= value
        damping = jnp.where(better, damping * 0.2, jnp.maximum(damping, 1e-3) * 6.0)
        return (jnp.where(better, proposal, x), jnp.where(better, new, value), damping), None

    first = (start, log_density(start), jnp.zeros((), start.dtype))
    mode = lax.scan(step, first, None, length=_NEWTON_STEPS)[0][0]
    scale, curvature = scaled(mode)
    values, vectors = jnp.linalg.eigh(curvature)
    # columns are eigenvectors, so that a flat direction of the target is one coordinate of w
    return mode, scale[:, None] * vectors / jnp.sqrt(jnp.maximum(jnp.abs(values), _FLATTEST))


def _summary(w: Array) -> tuple[Array, Array]:
    """Return means ``(2 C, d)`` of half chains, and the mean of their covariances.

    :param w: draws, shape ``(C, n, d)``.
    """
    halves = w.reshape(2 * w.shape[0], -1, w.shape[2])
    means = halves.mean(1)
    centered = (halves - means[:, None]).reshape(-1, w.shape[2])
    return means, centered.T @ centered / centered.shape[0]


@partial(jax.jit, static_argnames=("factors", "power", "count"))
def sgld(factors: Factors, power: float, count: int, key: Array, silos: Silos) -> LocalDraws:
    """Run Langevin chains in all silos: theta += L (h/2 L' grad + sqrt(h) xi).

    The result has a leading axis of silos.
    """

    def local(view: SiloView, _: None) -> tuple[LocalDraws, None]:
        log_target = _log_target(factors, power, view)
        loc, scale = _mode(lambda t: log_target(t, {}), jnp.zeros(factors.dim))
        slope = jax.vmap(jax.grad(lambda w: log_target(loc + scale @ w, {})))

        def step(w: Array, key: Array) -> tuple[Array, None]:
            noise = random.normal(key, w.shape, w.dtype)
            return w + 0.5 * STEP_SIZE * slope(w) + math.sqrt(STEP_SIZE) * noise, None

        def draw(w: Array, key: Array) -> tuple[Array, Array]:
            w, _ = lax.scan(step, w, random.split(key, _THINNING))
            return w, w

        key_start, key_draws = random.split(random.fold_in(key, view.number))
        start = random.normal(key_start, (CHAINS["sgld"], factors.dim))
        draws = lax.scan(draw, start, random.split(key_draws, _BURN_IN + count))[1]
        return LocalDraws(loc, scale, *_summary(jnp.swapaxes(draws[_BURN_IN:], 0, 1))), None

    return sweep(local, silos, None, None)[0]


def nuts(factors: Factors, power: float, count: int, key: Array, silos: Silos) -> LocalDraws:
    """Run NUTS on theta and the local latents of each silo in turn.

    It is compiled once for all silos; padded latents are standard normal.
    """
    pad, groups, chains = largest(silos), factors.local_groups(), CHAINS["nuts"]
    shapes = {v.name: (dict(pad)[groups[v.name]], *v.shape) for v in factors.local_sites}

    def law(number: Array) -> None:
        view = SiloView(silos, number, pad)
        theta = numpyro.sample(
            "theta", dist.ImproperUniform(dist.constraints.real, (), (factors.dim,))
        )
        z, idle = {}, jnp.zeros(())
        for name, shape in shapes.items():
            z[name] = numpyro.sample(
                f"local_{name}", dist.ImproperUniform(dist.constraints.real, (), shape)
            )
            own = view.mask(groups[name]).reshape(-1, *[1] * (len(shape) - 1))
            idle = idle - 0.5 * jnp.sum(jnp.where(own, 0.0, z[name] ** 2))
        with block():  # hides the model's sample sites from this one's trace
            value = _log_target(factors, power, view)(theta, z)
        numpyro.factor("law", value + idle)

    start = {"theta": jnp.zeros((chains, factors.dim))}
    start |= {f"local_{name}": jnp.zeros((chains, *shape)) for name, shape in shapes.items()}
    settings = {
        "num_chains": chains,
        "chain_method": "vectorized",
        "progress_bar": False,
        "jit_model_args": True,
    }
    mcmc = MCMC(NUTS(law), num_warmup=_WARMUP, num_samples=count, **settings)
    out = []
    for s in range(len(silos)):
        mcmc.run(random.fold_in(key, s), jnp.asarray(s), init_params=start)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"], np.float64)
        # the draws of an improper target are refused later
        with np.errstate(invalid="ignore", over="ignore"):
            loc, spread = draws.mean((0, 1)), draws.std((0, 1))
            spread = np.where(spread > 0, spread, 1.0)
            out.append(LocalDraws(loc, np.diag(spread), *_summary((draws - loc) / spread)))
    return jax.tree.map(lambda *x: np.stack(x), *out)


def gradients(dim: int, count: int) -> int:
    """Return the number of gradients of its target that :func:`sgld` takes at each silo.

    A Hessian counts as ``dim`` gradients.
    """
    return _NEWTON_STEPS * (dim + 1) + CHAINS["sgld"] * _THINNING * (count + _BURN_IN)
