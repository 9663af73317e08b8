r"""Surrogates of tall data, from a fit to a subset of the rows.

A score fit evaluates all rows at hundreds of points. Where rows are many, a subset of them gives
their curvature: the surrogates of n_s of a silo's N_s rows, times N_s / n_s, have the precisions
:math:`\Lambda_s`. Then Newton steps with these precisions,

.. math::
    \mu \leftarrow \mu + \Big( \Lambda_0 + \sum_s \Lambda_s \Big)^{-1}
        \nabla \Big[ \log p(\mu) + \sum_s \log p(y_s \mid \mu) \Big],

take a gradient of all rows each. At the last one :math:`\eta_s = \nabla \log p(y_s \mid \mu) +
\Lambda_s \mu`.

**What leaves a silo:** the fit's messages, and ``d`` numbers a step.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, sweep, thin
from numpyro_fed.density.factors import Factors
from numpyro_fed.rounds.federated import Cost
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates
from numpyro_fed.surrogates.score import ScoreFit, Whitening

# rows of the subset, over all silos; up to twice as many are all fitted. Their curvature has a
# relative error of about sqrt(d / ENOUGH): 2.5 % for d = 20
ENOUGH = 1 << 15
# Newton steps, each of which multiplies the distance by that error; a subset of a million rows
# starts sqrt(30) sds away, and is 2e-6 sds away after four
_STEPS = 4


@partial(jax.jit, static_argnames=("factors",))
def whole_gradients(factors: Factors, theta: Array, silos: Silos) -> Array:
    """Return gradients of the silos' terms at ``theta``, ``(S, d)``.

    They take one pass over all rows of a model without local latents.
    """

    def local(view: SiloView, _: None) -> tuple[Array, None]:
        kwargs, weights = view.whole()
        return jax.grad(lambda t: factors.log_local(factors.unravel(t), {}, kwargs, weights))(
            theta
        ), None

    return sweep(local, silos, None, None)[0]


def fit_some(fit: Callable[..., ScoreFit], factors: Factors, silos: Silos, group: str) -> ScoreFit:
    """Fit surrogates to a subset of the rows, then correct them by gradients of all rows.

    The model has no local latents. Data with few rows are fitted whole.

    :param fit: :func:`numpyro_fed.surrogates.score.fit` or
        :func:`numpyro_fed.surrogates.laplace.fit`.
    :param group: the row group that is tall.
    :return: the fit, without bounded corrections for a subset.
    :raises ValueError: where the product of surrogates and prior is no density.
    """
    if sum(silos.sizes[group]) <= 2 * ENOUGH:
        return fit(factors, silos, None)
    some = thin(silos, group, ENOUGH)
    found = fit(factors, some, None)
    stands_for = np.asarray(silos.sizes[group]) / np.asarray(some.sizes[group])
    eta, precision = (
        np.asarray(x, np.float64)
        for x in (found.surrogates.factors.eta, found.surrogates.factors.precision)
    )
    eta = eta * stands_for[:, None]
    precision = precision * stands_for.reshape(-1, *[1] * (precision.ndim - 1))
    try:
        Surrogates(Gaussian(eta, precision), found.surrogates.prior).posterior()
    except ValueError as error:
        raise ValueError(
            f"the surrogates that were fitted to {ENOUGH} of the rows are together no density "
            f"({error}); expected a posterior that a Gaussian in unconstrained space describes "
            "roughly. Reparametrize the model, pass other surrogates (surrogate=...), or take DSGLD"
        ) from error
    for _ in range(_STEPS):
        loc = np.asarray(
            Surrogates(Gaussian(eta, precision), found.surrogates.prior).posterior().mean
        )
        gradients = whole_gradients(factors, jnp.asarray(loc, jnp.result_type(float)), silos)
        eta = np.asarray(gradients, np.float64) + (
            precision * loc if precision.ndim == 2 else precision @ loc
        )
    surrogates = Surrogates(Gaussian(eta, precision), found.surrogates.prior)
    whitening = Whitening(*(jnp.asarray(x) for x in surrogates.posterior().whitening()))
    item = jnp.dtype(jnp.result_type(float)).itemsize * factors.dim
    cost = found.cost + Cost(1, 1, item, item).times(_STEPS)
    return found._replace(
        surrogates=surrogates, posterior_whitening=whitening, cost=cost, draws=None
    )
