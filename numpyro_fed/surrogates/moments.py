r"""Moment-matched surrogates, from draws of the silos' own posteriors.

Each silo draws from its own posterior, and sends mean and covariance once.

The posterior of a silo is :math:`p_s(\theta) \propto p(\theta)^c \, p(y_s \mid \theta)`, and the
prior is divided out again. With the draws' mean :math:`m_s` and covariance :math:`V_s`,

.. math:: \Lambda_s = V_s^{-1} - c \Lambda_0, \qquad \eta_s = V_s^{-1} m_s - c \eta_0.

Here :math:`(\eta_0, \Lambda_0)` is the Gaussian whose score is nearest to the prior's, in least
squares under :math:`N(m_s, V_s)`. The inverse sample covariance times (n - d - 2) / (n - 1)
estimates :math:`V_s^{-1}`, without bias for independent draws. Docs/surrogates.md compares c = 1
with the paper's target, c = 0.

Reference: el Mekkaoui et al. (2021), Federated stochastic gradient Langevin dynamics, 3.1.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.rounds.federated import Cost
from numpyro_fed.surrogates.gaussian import FULL_UP_TO, Gaussian, Surrogates
from numpyro_fed.surrogates.least_squares import fit_score
from numpyro_fed.surrogates.local_draws import CHAINS, STEP_SIZE, LocalDraws, gradients, nuts, sgld
from numpyro_fed.surrogates.score import ScoreFit, Whitening
from numpyro_fed.surrogates.sobol import sobol_normal

# largest split R-hat of long chains: the means of half chains then scatter by .66 sds; 16 chains of
# a Gaussian have about 1.01, a silo whose law does not settle had 1.8 (docs/results.md)
_SETTLED = 1.2
_FEWEST = 20  # fewest draws of each chain: R-hat and covariance are of its halves, ten draws each


def moments(
    model: Callable,
    silos: Silos,
    *,
    method: str = "sgld",
    num_samples: int = 3000,
    prior: float = 1.0,
    diagonal: bool = False,
    public: Sequence[str] = (),
    seed: int = 0,
) -> Surrogates:
    """Match surrogates to the moments of the silos' own posteriors, and divide the prior out.

    **What leaves a silo:** ``d + d (d + 1) / 2`` numbers (diagonal: ``2 d``), once.

    :param model: the marked model. Local latents need ``method="nuts"``, which draws them with
        theta.
    :param silos: the data.
    :param method: ``"sgld"`` (all rows in each step, all silos at once) or ``"nuts"`` (NumPyro's,
        silo after silo).
    :param num_samples: number of draws of each silo, over 16 (``"nuts"``: 4) chains.
    :param prior: c, the power of the prior in a silo's target. 0 is the paper's, whose target may
        be improper.
    :param diagonal: take the draws' variances only, as the paper does for neural networks.
    :param public: observed sites outside every silo plate whose data all silos know.
    :param seed: seed of the draws.
    :return: the surrogates.
    :raises ValueError: for arguments out of range, for local latents with ``"sgld"``, and for a
        silo whose draws do not converge (an improper target).

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(4)}, "rome": {"y": jnp.zeros(2)}})
        >>> q = fed.surrogates.moments(model, silos)
        >>> bool(abs(q.factors.precision[0, 0, 0] - 4) < 0.5)
        True
    """
    factors = factorize(model, silos, public=tuple(public))
    return fit(factors, silos, method, num_samples, prior=prior, diagonal=diagonal, seed=seed)[0]


def fit(
    factors: Factors,
    silos: Silos,
    method: str,
    num_samples: int = 3000,
    *,
    prior: float = 1.0,
    diagonal: bool = False,
    seed: int = 0,
) -> tuple[Surrogates, Cost]:
    """Return :func:`moments` of a factorized model, and the cost of each silo."""
    _check(factors, method, num_samples, prior)
    chains, dim = CHAINS[method], factors.dim
    count = -(-num_samples // chains) + (-num_samples // chains) % 2  # even, for half chains
    simulate = sgld if method == "sgld" else nuts
    draws = simulate(factors, float(prior), count, random.key(seed), silos)
    local = []
    for s, name in enumerate(silos.names):
        mean, covariance = _local_moments(
            jax.tree.map(lambda x, s=s: np.asarray(x[s], np.float64), draws), name, count // 2
        )
        if method == "sgld":
            covariance = covariance * (1 - STEP_SIZE / 4)
        local.append(_gaussian(mean, covariance, chains * count, diagonal))
    laws = Gaussian(np.stack([q.eta for q in local]), np.stack([q.precision for q in local]))
    parts = laws
    if prior:
        own = [_prior_under(factors, silos, q) for q in local]
        parts = laws / Gaussian(
            *(prior * np.stack(x) for x in zip(*((q.eta, q.precision) for q in own), strict=True))
        )
    passes = gradients(dim, count) if method == "sgld" else 0  # NUTS' gradients are not counted
    numbers = 2 * dim if diagonal else dim + dim * (dim + 1) // 2
    cost = Cost(1, passes, 0, numbers * jnp.result_type(float).itemsize)
    return Surrogates(parts, _global_prior(factors, silos, laws, parts)), cost


def with_moments(factors: Factors, silos: Silos, fitted: ScoreFit | None) -> ScoreFit:
    """Return a kernel's fit with moment-matched surrogates in place of its own.

    The draws are by NUTS where the model has local latents.

    :param fitted: the kernel's fit, or ``None`` without one.
    """
    method = "nuts" if factors.local_sites else "sgld"
    surrogates, cost = fit(
        factors, silos, method, max(3000, 4 * factors.dim), diagonal=factors.dim > FULL_UP_TO
    )
    whitening = Whitening(*map(jnp.asarray, surrogates.posterior().whitening()))
    if fitted is None:
        return ScoreFit(surrogates, None, whitening, whitening, jnp.full(len(silos), jnp.nan), cost)
    return fitted._replace(
        surrogates=surrogates, posterior_whitening=whitening, cost=fitted.cost + cost
    )


def _check(factors: Factors, method: str, num_samples: int, prior: float) -> None:
    if method not in CHAINS:
        raise ValueError(f'method: expected "sgld" or "nuts", got {method!r}')
    least = max(2 * factors.dim, _FEWEST * CHAINS[method])
    if (
        isinstance(num_samples, bool)
        or not isinstance(num_samples, int | np.integer)
        or num_samples < least
    ):
        raise ValueError(
            f"num_samples: expected an integer of at least {least} for a covariance in dimension "
            f"d = {factors.dim} (2 d, and {_FEWEST} for each of {CHAINS[method]} chains), "
            f"got {num_samples!r}"
        )
    if isinstance(prior, bool) or not isinstance(prior, Real) or not 0 <= prior <= 1:
        raise ValueError(
            f"prior: expected a power between 0 (the likelihood alone) and 1, got {prior!r}"
        )
    if method == "sgld" and factors.local_sites:
        raise ValueError(
            'method="sgld" draws global sites only, but the model has local latents '
            f"{[s.name for s in factors.local_sites]}; "
            'expected method="nuts", which draws them, too (or surrogate="score", which '
            "integrates them out)"
        )


def _local_moments(draws: LocalDraws, name: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of a silo's draws, or raise an error that names the silo.

    :param length: number of draws in half a chain.
    """
    mend = (
        "its target p(theta)^c p(y_s | theta) may be improper: expected prior=1.0 and a proper "
        'prior, or surrogate="score", which does not draw from this target'
    )
    if not all(np.isfinite(x).all() for x in draws):
        raise ValueError(f"silo {name!r}: the draws of its own posterior are not finite; {mend}")
    between = np.cov(draws.means.T, ddof=1).reshape(draws.within.shape)
    width = np.diag(draws.within)
    r_hat = np.sqrt(1 + np.diag(between) / np.maximum(width, 1e-30)).max()
    most = math.sqrt(_SETTLED**2 + 3 / length)  # means of few correlated draws differ by chance
    if r_hat > most:
        raise ValueError(
            f"silo {name!r}: the draws of its own posterior have not converged (R-hat {r_hat:.3g}, "
            f"expected < {most:.3g}); {mend}"
        )
    count = len(draws.means)
    covariance = draws.scale @ (draws.within + between * (count - 1) / count) @ draws.scale.T
    sd = np.sqrt(np.maximum(np.diag(covariance), 0))
    scaled = covariance / np.maximum(sd * sd[:, None], 1e-300)
    if not np.linalg.eigvalsh(scaled).min() > 1e-10:
        raise ValueError(
            f"silo {name!r}: the covariance of the draws of its own posterior is not positive "
            f"definite; {mend}"
        )
    return np.asarray(draws.loc + draws.scale @ draws.means.mean(0)), np.asarray(covariance)


def _gaussian(mean: np.ndarray, covariance: np.ndarray, count: int, diagonal: bool) -> Gaussian:
    """Return the Gaussian of a mean and a covariance, with the bias of the inverse removed."""
    if diagonal:
        precision = (count - 3) / (count - 1) / np.diag(covariance)
        return Gaussian(precision * mean, precision)
    precision = (count - len(mean) - 2) / (count - 1) * np.linalg.inv(covariance)
    precision = 0.5 * (precision + precision.T)
    return Gaussian(precision @ mean, precision)


@partial(jax.jit, static_argnames=("factors",))
def _prior_scores(factors: Factors, thetas: Array, shared: ModelArgs) -> Array:
    return jax.vmap(jax.grad(lambda t: factors.log_prior(factors.unravel(t), shared)))(thetas)


def _prior_under(factors: Factors, silos: Silos, law: Gaussian) -> Gaussian:
    """Fit the Gaussian whose score is nearest to the prior's, in least squares under ``law``."""
    dim, full = factors.dim, not law.is_diagonal
    loc, scale = law.whitening()
    scale = scale if full else np.diag(scale)
    points = sobol_normal(max(256, 2 ** math.ceil(math.log2(4 * dim))), dim, seed=0)
    scores = (
        np.asarray(
            _prior_scores(factors, jnp.asarray(loc + points @ scale.T), silos.shared), np.float64
        )
        @ scale
    )
    weights = np.isfinite(scores).all(-1).astype(float)
    scores = np.where(weights[:, None] > 0, scores, 0.0)
    found = fit_score(jnp.asarray(points), jnp.asarray(scores), jnp.asarray(weights), full)
    shift, curvature = (np.asarray(x, np.float64) for x in found[:2])
    inverse = np.linalg.inv(scale)
    matrix = inverse.T @ curvature @ inverse if full else curvature * np.asarray(law.precision)
    return Gaussian(shift @ inverse + (matrix @ loc if full else matrix * loc), matrix)


def _global_prior(factors: Factors, silos: Silos, laws: Gaussian, parts: Gaussian) -> Gaussian:
    """Fit the prior's factor near the posterior.

    Its ``law`` is the product of all factors, after two iterations.
    """
    law = Gaussian(laws.eta.mean(0), laws.precision.mean(0))
    for _ in range(2):
        whole = parts.product() * _prior_under(factors, silos, law)
        smallest = (
            whole.precision.min()
            if whole.is_diagonal
            else np.linalg.eigvalsh(whole.precision).min()
        )
        law = whole if smallest > 0 else law
    return _prior_under(factors, silos, law)
