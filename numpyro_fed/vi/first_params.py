"""First values of the global parameters of a variational fit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions.transforms import biject_to

from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factors import PARAMS, Factors
from numpyro_fed.rounds.inline import quick_jit
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.guides.learned import probe
from numpyro_fed.vi.guides.user_guide import GuideFamily
from numpyro_fed.vi.setup import Setup


def first_params(setup: Setup, guide: Callable, key: Array) -> dict[str, PyTree]:
    """Return first values of the global parameters, unconstrained.

    They come from the guide's strategy and the model's own first values.
    """
    config, silos = setup.config, setup.parts[0]
    if isinstance(config.families[0], GuideFamily):
        return params_at(config, silos)

    assert isinstance(guide, AutoSiloNormal)
    at = (config.factors, guide.init_loc_fn, silos, key)
    try:
        loc = _first_position(*at)
    except (jax.errors.JAXTypeError, ValueError):
        # some strategies need concrete numbers, or have no hash
        loc = _first_position.__wrapped__(*at)  # type: ignore[attr-defined]
    if not np.isfinite(loc).all():
        raise ValueError(
            "init_loc_fn: expected finite values of the global sites, got NaN or infinity"
        )
    return params_at(config, silos, loc)


def params_at(config: FitConfig, silos: Silos, loc: Array | None = None) -> dict[str, PyTree]:
    """Return global parameters, unconstrained, from the model's own first values.

    :param silos: the silos, with first values of the learned parameters.
    :param loc: location of a Gaussian q(theta); zeros by default. A guide of one's own has its
        first values instead.
    """
    family = config.families[0]
    if isinstance(family, GuideFamily):
        first = family.start
    else:
        first = config.normal().init(jnp.zeros(family.factors.dim) if loc is None else loc)
    return config.unconstrain({**first, **silos.shared.get(PARAMS, {})})


@quick_jit("factors", "strategy")
def _first_position(factors: Factors, strategy: Callable, silos: Silos, key: Array) -> Array:
    """Return the start of the global sites by a strategy, unconstrained ``(d,)``."""
    sites = probe(factors.model, silos, key, strategy)
    return factors.ravel(
        {
            n: biject_to(sites[n]["fn"].support).inv(sites[n]["value"])
            for n, _ in factors.global_sites
        }
    )
