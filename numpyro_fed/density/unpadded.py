"""Terms of a silo's own rows, where padding would enter them.

Silos are padded to one size, and padded rows have weight zero. That is enough where a row's term
depends on its own row alone. A model whose terms depend on other rows must not see padding. JAX
needs static sizes, so each size of silo has a call of the model in a branch of its own.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, lax

from numpyro_fed._typing import ModelArgs

Terms = tuple[Array, dict[str, Array]]
Sizes = tuple[tuple[tuple[str, int], ...], ...]


def unpadded_terms(
    terms: Callable[[Mapping, ModelArgs, Mapping], Terms],
    sizes: Sizes,
    groups: Mapping[str, str],
    latent_groups: Mapping[str, str],
    z: Mapping[str, Array],
    kwargs: ModelArgs,
    weights: Mapping[str, Array | float],
) -> Terms:
    """Return a silo's terms, as of :meth:`Factors.terms`, with zeros for padding.

    The number of rows of positive weight chooses the branch.

    :param terms: a function of latents, arguments and weights.
    :param sizes: the numbers of rows by group that silos have.
    :param groups: row group of each row argument.
    :param latent_groups: row group of each local site.
    """
    shown = {group: jnp.shape(weights[group])[0] for group, _ in sizes[0]}
    own_sizes = [dict(own) for own in sizes if all(n <= shown[g] for g, n in own)]

    def branch(own: dict[str, int]) -> Callable[[], Terms]:
        def cut(values: Mapping, of: Mapping[str, str]) -> dict:
            return {k: v[: own[of[k]]] if k in of else v for k, v in values.items()}

        def one() -> Terms:
            present = {g: jnp.asarray(weights[g])[:n] for g, n in own.items()}
            total, local = terms(cut(z, latent_groups), cut(kwargs, groups), present)
            return total, {g: jnp.pad(v, (0, shown[g] - own[g])) for g, v in local.items()}

        return one

    if len(own_sizes) == 1:
        return branch(own_sizes[0])()
    counts = jnp.stack([jnp.sum(jnp.asarray(weights[g]) > 0) for g in shown])
    wanted = jnp.asarray([[own[g] for g in shown] for own in own_sizes])
    place = jnp.argmin(jnp.abs(wanted - counts).sum(1))
    return lax.switch(place, [branch(own) for own in own_sizes])
