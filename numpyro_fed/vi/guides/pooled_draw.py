"""A draw of the structured Gaussian family on pooled data."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.vi.guides.normal import SiloNormal


def draw(
    family: SiloNormal,
    params: Mapping[str, PyTree],
    local: LocalMap | None,
    rows: SiloRows,
    key: Array,
) -> tuple[dict[str, Array], Array]:
    """Draw all latent sites, and return them with their log density.

    Parameters are frozen in the log density (sticking the landing).
    """
    key_theta, key_local = random.split(key)
    noise = family.global_noise(key_theta)
    context = family.context(params, noise)
    log_density = family.log_global(lax.stop_gradient(dict(params)), context)
    if local is None:
        return _placed(family, context.theta, None, rows), log_density
    local = family.effective(local, rows)
    z = family.latents(local, context._replace(u=noise), family.noise(key_local, rows, 1), rows)[0]
    log_density = log_density + jnp.sum(
        family.log_local(lax.stop_gradient(local), context, z, rows)
    )
    return _placed(family, context.theta, z, rows), log_density


def _placed(family: SiloNormal, theta: Array, z: Array | None, rows: SiloRows) -> dict[str, Array]:
    """Return all latent sites, unconstrained, with the axes that they have in the model."""
    sites = family.factors.unravel(theta)
    if z is None:
        return sites
    flat = family.units(rows).to_sites(z)
    return {
        **sites,
        **{s.name: jnp.moveaxis(flat[s.name], 0, s.axis) for s in family.factors.local_sites},
    }
