r"""Latents of a silo, drawn in the silo at the draws of a posterior that came without them.

A fit of remote silos has draws of theta alone. Given theta, latents of different silos are
independent. So a silo that is sent the draws can complete them for its own rows, by
:math:`p(z_s \mid \theta_k, y_s)`, and asks nobody.

**What leaves the silo:** nothing.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, random

from numpyro_fed._arviz import posterior_dataset
from numpyro_fed.data.checks import check_key
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.results.silo_coords import silo_coords
from numpyro_fed.results.silo_likelihood import global_draws, question
from numpyro_fed.results.vi_inference_data import check_num_draws, grouped, of_structure
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.draws import Draws

if TYPE_CHECKING:
    from arviz import InferenceData


def local_latents(
    idata: "InferenceData",
    model: Callable,
    silos: Silos,
    *,
    num_draws: int = 4000,
    rng_key: Array | None = None,
) -> "InferenceData":
    """Draw the latents of a silo's rows, in the silo, at the draws of a posterior without them.

    So people at a silo see the effects of their own elements, check their rows with ArviZ, and
    predict for them with :func:`predict`. What leaves the silo: nothing.

    Law: latents given each draw of the global latents, chosen among nodes around their modes
    (:mod:`numpyro_fed.vi.draws`); exact as the nodes get dense.

    :param idata: the posterior of all silos, with the global latents.
    :param model: the model of the fit.
    :param silos: the rows that are here, of one silo or several.
    :param num_draws: most draws that are used.
    :param rng_key: seed. ``None``: a fixed one.
    :return: the draws with all latents, log likelihoods of rows and observed values; in one chain
        where ``num_draws`` are fewer than the posterior has.
    :raises TypeError: for silos of another type, or remote ones.
    :raises ValueError: for the posterior of another model, a model without local latents, and one
        whose local latents of a silo depend on each other, but for two nested plates.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as fed
        >>> def model(x, y=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", x.shape[0]):
        ...         z = numpyro.sample("z", dist.Normal(mu, 1))
        ...         numpyro.sample("y", dist.Normal(z * x, 1), obs=y)
        >>> silos = fed.Silos({s: {"x": jnp.ones(4), "y": jnp.ones(4) + s} for s in range(3)})
        >>> idata = fed.fit(model, fed.RemoteSilos(silos, fed.Loopback(silos)), progress_bar=False)
        >>> own = fed.Silos({2: silos[2]})  # all that silo 2 has
        >>> here = fed.local_latents(idata, model, own)
        >>> here.posterior["z"].shape
        (1, 4000, 4)
        >>> x = {"x": jnp.ones(4)}
        >>> fed.predict(model, here, jax.random.key(1), x, silo="2")["y"].shape
        (4000, 4)
    """
    if isinstance(silos, RemoteSilos) or not isinstance(silos, Silos):
        raise TypeError(
            f"expected fed.Silos with the rows that are here, got {type(silos).__name__}: a silo "
            "draws its latents itself"
        )
    check_num_draws(num_draws)
    key = random.key(0) if rng_key is None else rng_key
    check_key(key)
    posterior, factors = posterior_dataset(idata), factorize(model, silos)
    if not factors.local_sites:
        raise ValueError("the model has no local latents; expected latents inside a silo plate")
    sites = global_draws(posterior, factors, num_draws)
    asked = question(model, silos, sites, key)
    config, told = asked.setup.config, asked.told
    nothing = jnp.zeros((len(told.log_weight), 0))
    draws = Draws(told.context.theta, asked.latents(), told.log_weight, [nothing], nothing)
    each, total = posterior.sizes["chain"], posterior.sizes["chain"] * posterior.sizes["draw"]
    pieces = [of_structure(config, 0, silos, draws, asked.params, True)]
    completed = grouped(pieces, chains=each if num_draws >= total else 1)
    silo_coords(completed, factors, silos)
    completed.posterior.attrs["silos"] = json.dumps(list(silos.names))
    return completed
