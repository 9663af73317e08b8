"""First positions of the nodes of a network, and first local latents of their silos."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, stack_states
from numpyro_fed.decentralized.networks import flat, sites
from numpyro_fed.decentralized.nodes import Nodes
from numpyro_fed.mcmc.config import NetworkConfig, Tuning
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.surrogates.gaussian import matvec


def first_nodes(
    config: NetworkConfig,
    tuning: Tuning,
    stacks: list[SiloRows],
    silos: Silos,
    networks: int,
    tracking: bool,
    key: Array,
    z: dict[str, Array] | None,
) -> tuple[Nodes, dict[str, Array]]:
    """Return the nodes of all networks at their start, and all latent sites there.

    :param stacks: the silos' rows in stacks; none for remote silos, which start their own latents.
    :param networks: number of independent networks.
    :param z: unconstrained values of all latent sites; ``None``: draws of the surrogate posterior,
        or of a uniform distribution without a fit.
    """
    shape = (networks, len(silos), config.factors.dim)
    key_theta, key_eps = random.split(key)
    if z is not None:
        x = flat(config, z).reshape(shape).astype(tuning.loc.dtype)
    elif tuning.scale is not None:
        normal = random.normal(key_theta, shape, tuning.loc.dtype)
        x = tuning.loc + jax.vmap(jax.vmap(partial(matvec, tuning.scale)))(normal)
    elif tuning.latents is not None:  # the local map is good where it was fitted
        normal = random.normal(key_theta, shape, tuning.loc.dtype)
        whiten = tuning.latents.whiten
        out = (
            jnp.linalg.solve(whiten, normal[..., None])[..., 0]
            if whiten.ndim == 2
            else normal / whiten
        )
        x = tuning.latents.loc + out
    else:
        x = random.uniform(key_theta, shape, tuning.loc.dtype, -2, 2)
    eps = None
    if config.units is not None and not isinstance(silos, RemoteSilos):
        eps = _first_latents(config, tuning, stacks, silos, key_eps, x, z)
    zero = jnp.zeros(shape, x.dtype) if tracking else None
    nodes = Nodes(x, jnp.ones(shape[:2], x.dtype), zero, zero, eps)
    return nodes, sites(config, tuning, x, eps, stacks)


def _first_latents(
    config: NetworkConfig,
    tuning: Tuning,
    stacks: list[SiloRows],
    silos: Silos,
    key: Array,
    x: Array,
    z: dict[str, Array] | None,
) -> list[Array]:
    """Return the coordinates of the local latents, stack by stack."""
    units, latents = config.units, tuning.latents
    assert units is not None
    assert latents is not None
    if z is None:
        shapes = [(len(x), *rows.shape) for rows in latents.rows]
        return [random.normal(random.fold_in(key, k), s, x.dtype) for k, s in enumerate(shapes)]
    m, networks = len(silos), len(x)
    local = {s.name: z[s.name] for s in config.factors.local_sites}
    every = jax.vmap(lambda chain: units.from_pooled(chain, silos))(local)
    stacked = stack_states(jnp.moveaxis(every, 0, -1), silos, units.group)
    out = []
    for rows, local_map, values in zip(stacks, latents.rows, stacked, strict=True):
        of_chain = (
            jnp.moveaxis(values, -1, 0).reshape(networks, m, *values.shape[:-1]).astype(x.dtype)
        )
        # a silo's latents are those of its own node's chain
        own = of_chain[:, rows.number, jnp.arange(len(rows.number))]
        u = jax.vmap(jax.vmap(latents.u))(x[:, rows.number])
        inverse = jax.vmap(jax.vmap(lambda m, u, v: m.inverse(u, v)), in_axes=(None, 0, 0))
        out.append(inverse(local_map, u, own))
    return out
