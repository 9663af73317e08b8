r"""Optimal weight of the conducive gradient.

FSGLD remark 1 (equation 7) multiplies the conducive gradient by :math:`\alpha`. The conducive
gradient is a control variate (Ripley 1987), and the gradient's variance is smallest at

.. math::
    \alpha^* &= -\frac{\operatorname{tr} \operatorname{Cov}(v, g)}
                      {\operatorname{tr} \operatorname{Var}(g)}, \\
    v &= \frac{N_s}{f_s m} \nabla \log p(y_s^{(m)} \mid \theta), \qquad
    g = \nabla \log q(\theta) - \frac1{f_s} \nabla \log q_s(\theta).

The covariances are over silos :math:`s \sim f` and their minibatches. Numerator and denominator are
each averaged over :math:`\theta`. For a fixed s, g does not depend on the minibatch, so that
:math:`\operatorname{Cov}(v, g)` is the same with :math:`\nabla \log p(y_s \mid \theta) / f_s` in
place of v. The traces are in the kernel's coordinates, which the surrogate posterior whitens.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, sweep
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.surrogates.gaussian import Surrogates
from numpyro_fed.surrogates.local_score import Message, marginal_score
from numpyro_fed.surrogates.noise import check_fits
from numpyro_fed.surrogates.sobol import sobol_normal

__all__ = ["best", "optimal_alpha"]

_POINTS = 64


def optimal_alpha(
    model: Callable,
    silos: Silos,
    surrogates: Surrogates,
    theta: ArrayLike | None = None,
    *,
    selection: Sequence[float] | None = None,
    public: Sequence[str] = (),
) -> float:
    """Return the weight of the conducive gradient that minimizes the gradient's variance.

    The weight is 1 for exact surrogates. It is near 0 for surrogates that do not tell how silos
    differ, and may be negative.

    :param model: the marked model, without local latents.
    :param silos: the data.
    :param surrogates: the silos' surrogates; their product with the prior must be a density.
    :param theta: flat unconstrained global positions ``(K, d)`` or ``(d,)``; by default 64 points
        of the surrogate posterior.
    :param selection: f, the silos' probabilities; equal by default.
    :param public: observed sites outside every silo plate whose data all silos know.
    :return: alpha; 1 where the conducive gradient is zero, as with one silo.
    :raises ValueError: for local latents, and for surrogates, ``theta`` or ``selection`` that do
        not fit the model and the silos.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos(
        ...     {"oslo": {"y": jnp.array([4.0, 6.0])}, "rome": {"y": jnp.array([-1.0, 1.0])}}
        ... )
        >>> # precisions are twice those of the likelihoods
        >>> q = fed.surrogates.analytic(silos, [[5.0], [0.0]], [[4.0], [4.0]])
        >>> round(fed.surrogates.optimal_alpha(model, silos, q), 4)
        0.5
    """
    factors = factorize(model, silos, public=tuple(public))
    if factors.local_sites:
        raise ValueError(
            f"the model has local latents {[s.name for s in factors.local_sites]}; expected a "
            'model without local latents, or FSGLD(alpha="auto"), which integrates them out'
        )
    check_fits(surrogates, factors, silos)
    f = (
        np.full(len(silos), 1 / len(silos))
        if selection is None
        else np.asarray(selection, np.float64)
    )
    if f.shape != (len(silos),) or not (f > 0).all() or not abs(f.sum() - 1) <= 1e-6:
        raise ValueError(
            f"selection: expected {len(silos)} probabilities > 0 that sum to one, got {selection!r}"
        )
    thetas = None
    if theta is not None:
        thetas = np.atleast_2d(np.asarray(theta, np.float64))
        if thetas.ndim != 2 or thetas.shape[1] != factors.dim or not np.isfinite(thetas).all():
            raise ValueError(
                f"theta: expected finite numbers of shape (K, {factors.dim}) or ({factors.dim},), "
                f"got shape {np.shape(theta)}"
            )
    return best(factors, silos, None, surrogates, f, thetas)


def best(
    factors: Factors,
    silos: Silos,
    units: Units | None,
    surrogates: Surrogates,
    selection: np.ndarray,
    thetas: np.ndarray | None = None,
) -> float:
    """Return :func:`optimal_alpha` of a factorized model.

    Local latents, cut into ``units``, are integrated out.
    """
    loc, scale = surrogates.posterior().whitening()
    diagonal = scale.ndim == 1
    if thetas is None:
        points = sobol_normal(_POINTS, factors.dim, seed=0)
        thetas = loc + (points * scale if diagonal else points @ scale.T)
    else:
        points = (thetas - loc) / scale if diagonal else np.linalg.solve(scale, (thetas - loc).T).T
    dtype = jnp.result_type(float)
    message = Message(*(jnp.asarray(x, dtype) for x in (loc, scale, points, np.ones(len(points)))))
    scores = np.asarray(_scores(factors, units, message, silos), np.float64)
    own = surrogates.scores(thetas)
    given = own * scale if diagonal else own @ scale
    good = np.isfinite(scores).all((0, 2))
    scores, given, weight = scores[:, good], given[:, good], 1 / selection[:, None, None]

    def covariance(a: np.ndarray, b: np.ndarray) -> float:
        """Return the trace of Cov(a_s / f_s, b_s / f_s), summed over points."""
        return float((weight * a * b).sum() - (a.sum(0) * b.sum(0)).sum())

    variance = covariance(given, given)
    size = float((weight * given**2).sum())
    return covariance(scores, given) / variance if variance > 1e-12 * size else 1.0


def _scores(factors: Factors, units: Units | None, message: Message, silos: Silos) -> Array:
    """Return whitened scores of the silos' (marginal) likelihoods at the points, ``(S, K, d)``."""

    def local(view: SiloView, _: None) -> tuple[Array, None]:
        score = marginal_score(factors, units, message, view)
        return lax.map(lambda u: score(u)[1], message.points), None

    return jax.jit(lambda silos: sweep(local, silos, None, None)[0])(silos)
