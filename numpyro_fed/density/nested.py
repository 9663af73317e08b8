r"""Local latents of two nested plates: the units of a silo, and their local map.

Elements of the inner plate (families) point to elements of the outer plate (communities). Given
:math:`\theta`, the outer elements are independent, each together with its inner elements. Given an
outer element's latents, its inner elements are independent. The local map of the inner plate takes
the outer element's coordinates as it takes the whitened global position:

.. math:: z^{out}_g = F_g(u, \epsilon^{out}_g), \qquad
          z^{in}_i = F_i\big((u, \epsilon^{out}_{g(i)}), \epsilon^{in}_i\big)

with F of :mod:`numpyro_fed.density.local_map`. A move of :math:`\epsilon^{out}` at fixed
:math:`\epsilon^{in}` then moves the inner latents along. A silo is one row of coordinates: first
its outer elements', then its inner elements', padded to the largest silo's.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.views import SiloRows, SiloView
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.rounds.serialization import wire_name


def nesting(factors: Factors) -> tuple[str, str] | None:
    """Return the outer and the inner row group with latents, or ``None`` without nesting.

    The model has nesting if two row groups have latents, and one points to the other.
    """
    groups = factors.latent_groups
    if len(groups) != 2:
        return None
    for outer, inner in (groups, groups[::-1]):
        if any(target == outer and leaf in factors.leaves(inner) for leaf, target in factors.index):
            return outer, inner
    return None


def join_levels(outer: Array, inner: Array) -> Array:
    """Join outer ``(n0, k0)`` and inner ``(n1, k1)`` latents in one row ``(dim,)``.

    The inverse of :meth:`NestedUnits.levels`.
    """
    return jnp.concatenate([outer.reshape(-1), inner.reshape(-1)])


@wire_name("NestedUnits")
@dataclass(frozen=True)
class NestedUnits(Units):
    """Static division of two nested plates' latents into units; ``group`` is ``None``.

    :param outer: row group of the outer plate.
    :param inner: row group of the inner plate.
    """

    outer: str = ""
    inner: str = ""

    def blocks(self) -> list[tuple[str, int, int]]:
        """Return a tuple for the outer and one for the inner row group, as in the base class."""
        return [
            (group, dict(self.pad)[group], self._width(group)) for group in (self.outer, self.inner)
        ]

    @property
    def num_elements(self) -> tuple[int, int]:
        """Numbers of outer and inner elements shown."""
        (_, outer, _), (_, inner, _) = self.blocks()
        return outer, inner

    def parent(self, kwargs: ModelArgs) -> Array:
        """Return the outer element of each inner one, counted inside the silo."""
        leaves = self.factors.leaves(self.inner)
        leaf = next(
            leaf for leaf, target in self.factors.index if leaf in leaves and target == self.outer
        )
        return jnp.asarray(kwargs[leaf])

    def levels(self, x: Array) -> tuple[Array, Array]:
        """Return outer ``(n0, k0)`` and inner ``(n1, k1)`` latents of a silo's ``(1, dim)``."""
        (_, n0, k0), (_, n1, k1) = self.blocks()
        return x[0, : n0 * k0].reshape(n0, k0), x[0, n0 * k0 :].reshape(n1, k1)

    def level_terms(
        self,
        theta: dict[str, Array],
        z: Array,
        kwargs: dict,
        weights: dict,
        view: SiloView | SiloRows,
    ) -> tuple[Array, Array, Array]:
        """Return log densities of outer ``(n0,)`` and inner elements ``(n1,)``, and of the rest.

        Padding is standard normal, without the constant.
        """
        local = self.factors.terms(theta, self.to_sites(z), kwargs, weights)[1]
        terms, rest = self.factors.by_elements((self.outer, self.inner), local, kwargs)
        idle = [
            -0.5 * jnp.sum(jnp.where(own, 0.0, x**2), 1)
            for own, x in zip(self.masks(view), self.levels(z), strict=True)
        ]
        return terms[0] + idle[0], terms[1] + idle[1], rest

    def masks(self, view: SiloView | SiloRows) -> tuple[Array, Array]:
        """Return masks of outer ``(n0, 1)`` and inner ``(n1, 1)`` elements that are not padding."""
        return view.mask(self.outer)[:, None], view.mask(self.inner)[:, None]


@wire_name("NestedMap")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NestedMap:
    """Rows of the local map of nested units (leading axis of every leaf: silos).

    :param outer: map of the outer elements, with ``(S, n0, k0)`` in place of ``(G, k)``.
    :param inner: map of the inner elements, with ``(S, n1, k1)``; its position is the whitened
        global position joined with the outer element's coordinates.
    :param parent: the outer element of each inner one, ``(S, n1)``.
    """

    outer: LocalMap
    inner: LocalMap
    parent: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the coordinates, ``(S, dim)``."""
        *silos, n0, k0 = self.outer.shape
        n1, k1 = self.inner.shape[-2:]
        return *silos, n0 * k0 + n1 * k1

    def forward(self, u: Array, eps: Array) -> Array:
        """Return latents ``(S, dim)`` at ``u`` of shape ``(d,)`` for coordinates ``eps``."""

        def one(rows: NestedMap, eps: Array) -> Array:
            outer, inner = rows._levels(eps)
            return join_levels(
                rows.outer.forward(u, outer), rows.inner.forward(rows._position(u, outer), inner)
            )

        return jax.vmap(one)(self, eps)

    def inverse(self, u: Array, z: Array) -> Array:
        """Return coordinates of latents ``z`` at ``u``; the inverse of :meth:`forward`."""

        def one(rows: NestedMap, z: Array) -> Array:
            outer, inner = rows._levels(z)
            outer = rows.outer.inverse(u, outer)
            return join_levels(outer, rows.inner.inverse(rows._position(u, outer), inner))

        return jax.vmap(one)(self, z)

    def log_scales(self, u: Array, eps: Array) -> Array:
        """Return log scales ``(S, dim)``; they depend on the outer elements' coordinates."""

        def one(rows: NestedMap, eps: Array) -> Array:
            outer, _ = rows._levels(eps)
            return join_levels(
                rows.outer.log_scales(u), rows.inner.log_scales(rows._position(u, outer))
            )

        return jax.vmap(one)(self, eps)

    def _levels(self, x: Array) -> tuple[Array, Array]:
        """Split one silo's row ``(dim,)`` into outer and inner coordinates, under vmap."""
        stop = self.outer.mean.size
        return x[:stop].reshape(self.outer.mean.shape), x[stop:].reshape(self.inner.mean.shape)

    def _position(self, u: Array, outer: Array) -> Array:
        own = outer[self.parent]
        return jnp.concatenate([jnp.broadcast_to(u, (len(own), len(u))), own], axis=1)
