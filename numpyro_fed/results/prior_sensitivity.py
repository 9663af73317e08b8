r"""Sensitivity of a posterior to the prior and to the data, by scaling each with a power.

Draws of :math:`p(\theta) \prod_s p(y_s \mid \theta)` get the weights :math:`p(\theta)^{a - 1}`, or
:math:`\prod_s p(y_s \mid \theta)^{a - 1}`, for a near 1. The distance between a coefficient's two
distribution functions P and Q is the cumulative Jensen-Shannon distance, the root of

.. math:: \frac{\int P \log_2 \frac{2 P}{P + Q} + Q \log_2 \frac{2 Q}{P + Q}}{\int P + Q}

(Kallioinen et al. 2023, section 2.3). The sensitivity is the distance over :math:`|\log_2 a|`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed._arviz import posterior_dataset
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import split_shared
from numpyro_fed.density.factorize import factorize
from numpyro_fed.results.silo_likelihood import (
    check_enough,
    check_same_silos,
    coefficients,
    global_draws,
    kept_terms,
    question,
)
from numpyro_fed.results.vi_inference_data import check_num_draws
from numpyro_fed.vi.importance import smoothed

if TYPE_CHECKING:
    import pandas as pd
    from arviz import InferenceData

_POWERS = (0.99, 1 / 0.99)
SENSITIVE = 0.05  # from which a sensitivity is worth a look (Kallioinen et al. 2023, section 3.1)


def prior_sensitivity(
    idata: "InferenceData",
    model: Callable,
    silos: Silos,
    *,
    num_draws: int = 4000,
    progress_bar: bool = True,
) -> "pd.DataFrame":
    """Tell how much each coefficient depends on the prior, and on the data.

    Law: both powers' weights are exact up to Monte-Carlo error. The prior is that of all global
    sites, in their supports; local latents are integrated out of the likelihood.

    What leaves a silo: as in :func:`check`; nothing for a result of remote silos that :func:`fit`
    made.

    :param idata: the posterior, from :func:`fit` or :func:`to_inference_data`.
    :param model: the model of the fit.
    :param silos: the silos of the fit.
    :param num_draws: most draws that are used.
    :param progress_bar: show how many are done, where that takes more than two seconds.
    :return: for each coefficient the sensitivity to the ``prior`` and to the ``likelihood``, and a
        ``diagnosis``: ``"prior-data conflict"`` where both are .05 or more, ``"strong prior or weak
        data"`` where only the prior's is; otherwise ``"-"``.
    :raises ValueError: as :func:`check`; and where a prior is improper.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> far = fed.Silos({s: {"y": 10 + s + jnp.arange(3.0)} for s in range(3)})
        >>> idata = fed.fit(model, far, progress_bar=False)
        >>> fed.prior_sensitivity(idata, model, far).loc["mu", "diagnosis"]
        'prior-data conflict'
    """
    import pandas as pd

    check_num_draws(num_draws)
    factors = factorize(model, silos)
    posterior = posterior_dataset(idata)
    check_same_silos(posterior, factors, silos)
    sites = global_draws(posterior, factors, num_draws)
    check_enough(sites)
    terms = kept_terms(idata, silos, num_draws)
    if terms is None:
        terms = question(model, silos, sites).together().log_likelihood(progress_bar)
    arrays, static = split_shared(silos.shared)

    @jax.jit
    def log_prior(sites: dict, arrays: dict) -> jax.Array:
        shared = {**arrays, **dict(static)}
        return jax.lax.map(lambda one: factors.log_prior_of_sites(one, shared), sites)

    prior = np.asarray(log_prior({k: jnp.asarray(x) for k, x in sites.items()}, arrays), np.float64)
    if not np.ptp(prior) > 0:
        raise ValueError("expected proper priors, got a prior density that is the same everywhere")
    names, values = coefficients(sites)
    found = {
        kind: [_sensitivity(x, density) for x in values.T]
        for kind, density in (("prior", prior), ("likelihood", terms.sum(1)))
    }
    table = pd.DataFrame(found, pd.Index(names, name="coefficient"))
    by_prior, by_data = table["prior"] >= SENSITIVE, table["likelihood"] >= SENSITIVE
    table["diagnosis"] = np.select(
        [by_prior & by_data, by_prior], ["prior-data conflict", "strong prior or weak data"], "-"
    )
    return table


def _sensitivity(x: np.ndarray, log_density: np.ndarray) -> float:
    """Return the mean of a coefficient's sensitivities to a power just below 1 and just above."""
    equal = np.full(len(x), 1 / len(x))
    found = [
        distance(x, equal, smoothed((power - 1) * log_density)[0]) / abs(np.log2(power))
        for power in _POWERS
    ]
    return float(np.mean(found))


def distance(x: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    """Return the cumulative Jensen-Shannon distance of two weighings of the same draws.

    It is the larger of those of x and of -x, whose tails count differently.

    :param p: weights of the draws ``x``, which sum to one.
    :param q: other weights.
    """
    order = np.argsort(x)

    def one(order: np.ndarray) -> float:
        width = np.abs(np.diff(x[order]))
        below = np.cumsum(p[order])[:-1], np.cumsum(q[order])[:-1]
        half = (below[0] + below[1]) / 2
        terms = [np.sum(width * _times_log2(f, half)) for f in below]
        total = np.sum(width * 2 * half)
        return float(np.sqrt(max(sum(terms), 0.0) / total)) if total > 0 else 0.0

    return max(one(order), one(order[::-1]))


def _times_log2(f: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Return f log2(f / of), which is zero where f is."""
    return f * np.log2(np.where(f > 0, f, 1) / np.where(f > 0, of, 1))
