r"""Log likelihood :math:`\log p(y_s \mid \theta)` of each silo, at draws of the posterior.

Local latents are integrated out, by nodes around their modes at each draw
(:mod:`numpyro_fed.vi.placed`).

**What leaves a silo:** one number for each draw, as in the last round of a fit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import split_shared
from numpyro_fed.density.factors import Factors
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.conducive.checks import JointUnits
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.draws import EstimateLocal, Position, ask_estimates, estimates_here
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.placed import can_place
from numpyro_fed.vi.svi import ConduciveSFVI

if TYPE_CHECKING:
    from xarray import Dataset


_CANNOT = (
    "the latents of a silo depend on each other (nested or crossed plates), so that its likelihood "
    "given the global latents has no closed or one-element form; expected a model without local "
    "latents, or with independent elements of one plate"
)


def silo_log_likelihood(model: Callable, silos: Silos, draws: dict[str, np.ndarray]) -> np.ndarray:
    """Return each silo's log likelihood, summed over its rows, at draws of theta, ``(n, S)``.

    :param draws: global latent sites in their supports, leading axis n.
    :raises ValueError: for learned parameters, and for latents that cannot be integrated out one by
        one: those of nested or crossed plates, or of elements that depend on each other.
    """
    svi = ConduciveSFVI(model, AutoSiloNormal(model))
    try:
        setup = svi.setup(silos)
    except JointUnits as error:
        raise ValueError(_CANNOT) from error
    config = setup.config
    if config.learned:
        raise ValueError(f"learned parameters {list(config.learned)}: expected priors on them")
    for rows in setup.stacks:
        if config.families[rows.part].has_local and not can_place(config.families[rows.part], rows):
            raise ValueError(_CANNOT)
    dim = config.factors.dim
    params = config.normal().from_moments(jnp.zeros(dim), jnp.eye(dim))
    told = _told(config, params, draws, setup.parts[0])
    if isinstance(silos, RemoteSilos):
        slots = svi.init(random.key(0), silos).silos.slots.tolist()
        local = EstimateLocal(config, stretched=True, placed=True)
        replies = ask_estimates(local, params, slots, silos, setup.stacks, random.key(0), told)
        found = np.stack(replies, 1)
    else:
        found = np.asarray(estimates_here(config, params, setup.local, setup.stacks, told))
    order = np.concatenate([np.asarray(rows.number) for rows in setup.stacks])
    return found[:, np.argsort(order)].astype(np.float64)


def _told(
    config: FitConfig, params: dict[str, Array], draws: dict[str, np.ndarray], silos: Silos
) -> Position:
    """Return the message to the silos, which has the unconstrained draws."""
    shared = split_shared(silos.shared)

    @jax.jit
    def one(draws: dict, keys: Array, arrays: dict) -> Position:
        def at(sites: dict, key: Array) -> Position:
            free = config.factors.unconstrain_globals(sites, {**arrays, **dict(shared[1])})
            theta = config.factors.ravel(free)
            # q is standard normal, so that its noise is theta
            context = config.families[0].context(params, theta)._replace(params={})
            return Position(context, jnp.zeros(()), *random.split(key))

        return jax.vmap(at)(draws, keys)

    some = {k: jnp.asarray(x) for k, x in draws.items()}
    keys = random.split(random.key(0), len(next(iter(some.values()))))
    return one(some, keys, shared[0])


def global_draws(posterior: "Dataset", factors: Factors, most: int) -> dict[str, np.ndarray]:
    """Return at most ``most`` draws of all chains, evenly spaced, by global site.

    :raises ValueError: for a posterior without one of the model's global latents.
    """
    missing = [name for name, _ in factors.global_sites if name not in posterior]
    if missing:
        raise ValueError(
            f"expected the posterior of this model, with its global latents; {missing} are not in "
            f"it, which has {sorted(map(str, posterior.data_vars))}"
        )
    flat = {
        name: posterior[name].values.reshape(-1, *posterior[name].shape[2:])
        for name, _ in factors.global_sites
    }
    total = len(next(iter(flat.values())))
    some = np.arange(min(most, total)) * total // min(most, total)
    return {name: x[some] for name, x in flat.items()}
