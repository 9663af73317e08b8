r"""Local map: coordinates in which a silo's local latents move with the global parameters.

.. math:: z_g = m_g + C_g u + T_g \left( e^{l_g + b_g u + c_g \psi} \odot
          (\epsilon_g + r_g + R_g u + Q_g \psi) \right), \qquad
          \epsilon_g \sim N(0, I), \qquad u = L^{-1} (\theta - \mu)

The map has one row for each *unit* g. A unit is an element of a silo plate where elements are
independent given :math:`\theta`, otherwise all latents of a silo together. :math:`T` is unit lower
triangular. :math:`r, R` let locations follow the scale, as those of non-centered latents do
(:math:`a / \tau` where the data determine a). :math:`\psi(u)` are the products and cubes of
:mod:`numpyro_fed.density.bounded_features`. FSGLD keeps :math:`\epsilon` as its state, so that a
move of :math:`\theta` moves :math:`z` along with it. Rows of the map never leave their silo.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, SiloView
from numpyro_fed.density.bounded_features import curved
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.small_matrices import solve_lower
from numpyro_fed.rounds.serialization import wire_name

_View = TypeVar("_View", bound=SiloView | SiloRows)


@wire_name("Units")
@dataclass(frozen=True)
class Units:
    """Static division of a silo's local sites into units.

    :param factors: the model's factors.
    :param group: the row group whose elements are the units, or ``None``: the silo is one unit.
    :param pad: static number of elements of each row group in the largest silo.
    """

    factors: Factors
    group: str | None
    pad: tuple[tuple[str, int], ...]

    @property
    def dim(self) -> int:
        """Number of latents of a unit (in a joint unit, of the largest silo)."""
        if self.group is not None:
            return self._width(self.group)
        return sum(width * count for _, count, width in self.blocks())

    def blocks(self) -> list[tuple[str, int, int]]:
        """Return a tuple for each row group with latents.

        It holds the group's name, the number of elements shown, and the number of latents of each
        element.
        """
        return [
            (group, dict(self.pad)[group], self._width(group))
            for group in self.factors.latent_groups
        ]

    def _blocks(self) -> list[tuple[str, int]]:
        if self.group is not None:
            return [(self.group, 1)]
        return [(group, count) for group, count, _ in self.blocks()]

    def _width(self, group: str) -> int:
        groups = self.factors.local_groups()
        return sum(math.prod(s.shape) for s in self.factors.local_sites if groups[s.name] == group)

    def laid_out(self, view: _View) -> _View:
        """Return the view of a silo with the padding that its latents have.

        Where all latents of a silo are one row, their padding is that of the largest silo.
        """
        return view if self.group is not None else replace(view, pad=self.pad)

    def levels(self, x: Array) -> tuple[Array, ...]:
        """Return latents ``(E, dim)`` level by level: one level, except for nested plates."""
        return (x,)

    def to_sites(self, z: Array) -> dict[str, Array]:
        """Return local sites, elements first, of units ``(E, dim)``."""
        groups = self.factors.local_groups()
        out, start = {}, 0
        for group, count in self._blocks():
            block = z[:, start : start + count * self._width(group)]
            start += count * self._width(group)
            block = block.reshape(-1, self._width(group))
            at = 0
            for site in self.factors.local_sites:
                if groups[site.name] == group:
                    width = math.prod(site.shape)
                    out[site.name] = block[:, at : at + width].reshape(-1, *site.shape)
                    at += width
        return out

    def from_sites(self, sites: dict[str, Array]) -> Array:
        """Return units ``(E, dim)`` of local sites; the inverse of :meth:`to_sites`."""
        groups = self.factors.local_groups()
        blocks = []
        for group, count in self._blocks():
            parts = [
                sites[s.name].reshape(sites[s.name].shape[0], -1)
                for s in self.factors.local_sites
                if groups[s.name] == group
            ]
            blocks.append(jnp.concatenate(parts, -1).reshape(-1, count * self._width(group)))
        return jnp.concatenate(blocks, -1)

    def owned(self, view: SiloView | SiloRows) -> Array:
        """Return a mask ``(E, dim)`` of the latents that are not padding."""
        if self.group is not None:
            return jnp.broadcast_to(
                view.mask(self.group)[:, None], (dict(view.pad)[self.group], self.dim)
            )
        parts = [jnp.repeat(view.mask(g), self._width(g)) for g, _ in self._blocks()]
        return jnp.concatenate(parts)[None]

    def identity(self, view: SiloView | SiloRows) -> Array:
        """Return a number for each unit: its pooled row, or for a joint unit the silo's number.

        The pooled row does not depend on the partition into silos.
        """
        if isinstance(view, SiloRows):
            return view.number[None] if self.group is None else view.order[self.group]
        positions, _ = view.units(self.group)
        return positions if self.group is None else view.silos.order[self.group][positions]

    def to_pooled(self, z: Array, silos: Silos) -> dict[str, Array]:
        """Return all silos' units ``(G, dim)`` as the pooled model's local sites."""
        if self.group is not None:
            flat = self.to_sites(z)
        else:
            blocks = jax.vmap(lambda row: self.to_sites(row[None]))(z)
            flat = {
                name: block[silos.silo_of_row(group), _row_in_silo(silos, group)]
                for name, group in self.factors.local_groups().items()
                for block in [blocks[name]]
            }
        groups = self.factors.local_groups()
        return {
            s.name: jnp.moveaxis(flat[s.name][silos.pooled_position(groups[s.name])], 0, s.axis)
            for s in self.factors.local_sites
        }

    def from_pooled(self, sites: Mapping[str, Array], silos: Silos) -> Array:
        """Return all silos' units ``(G, dim)`` from the pooled model's local sites.

        The inverse of :meth:`to_pooled`.
        """
        groups = self.factors.local_groups()
        flat = {
            s.name: jnp.moveaxis(sites[s.name], s.axis, 0)[silos.order[groups[s.name]]]
            for s in self.factors.local_sites
        }
        if self.group is not None:
            return self.from_sites(flat)
        pad = dict(self.pad)
        blocks = {}
        for name, x in flat.items():
            block = jnp.zeros((len(silos), pad[groups[name]], *x.shape[1:]), x.dtype)
            group = groups[name]
            blocks[name] = block.at[silos.silo_of_row(group), _row_in_silo(silos, group)].set(x)
        return jax.vmap(self.from_sites)(blocks)[:, 0]

    def log_density(
        self,
        theta: dict[str, Array],
        z: Array,
        kwargs: dict,
        weights: dict,
        view: SiloView | SiloRows,
    ) -> Array:
        """Return the log density ``(E,)`` of each unit given theta, latents and rows.

        Padding is standard normal, without the constant.
        """
        local = self.factors.terms(theta, self.to_sites(z), kwargs, weights)[1]
        if self.group is None:
            terms = sum((jnp.sum(v) for v in local.values()), jnp.zeros(()))[None]
        else:
            terms = self.factors.by_element(self.group, local, kwargs)
        return terms - 0.5 * jnp.sum(jnp.where(self.owned(view), 0.0, z**2), axis=1)


def _row_in_silo(silos: Silos, group: str) -> np.ndarray:
    return np.arange(sum(silos.sizes[group])) - np.repeat(silos.offsets(group), silos.sizes[group])


@wire_name("LocalMap")
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalMap:
    """Rows of the local map (leading axis: units).

    :param mean: m, shape ``(G, k)``.
    :param log_scale: l, shape ``(G, k)``.
    :param coupling: C, shape ``(G, k, d)``, or ``None`` for zero.
    :param scale_coupling: b, shape ``(G, k, d)``, or ``None`` for zero.
    :param tril: T, unit lower triangular, shape ``(G, k, k)``, or ``None`` for the identity.
    :param shift: r, shape ``(G, k)``, or ``None`` for zero, and R with it.
    :param shift_coupling: R, shape ``(G, k, d)``.
    :param shift_curvature: Q, shape ``(G, k, p)`` for p products and cubes, or ``None`` for zero,
        and c with it.
    :param scale_curvature: c, shape ``(G, k, p)``.
    """

    mean: Array
    log_scale: Array
    coupling: Array | None = None
    scale_coupling: Array | None = None
    tril: Array | None = None
    shift: Array | None = None
    shift_coupling: Array | None = None
    shift_curvature: Array | None = None
    scale_curvature: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the coordinates, ``(G, k)``."""
        return self.mean.shape

    def scale(self, u: Array) -> Array:
        """Return the scales ``(G, k)`` at a whitened position.

        ``u`` has shape ``(d,)``, or ``(G, d)`` for a position of each unit.
        """
        return jnp.exp(self.log_scales(u))

    def location(self, u: Array) -> Array:
        """Return latents ``(G, k)`` at ``u`` for zero coordinates."""
        center = self._center(u)
        return center if self.shift is None else center + self._turn(self.scale(u) * self._shift(u))

    def forward(self, u: Array, eps: Array) -> Array:
        """Return latents ``(G, k)`` at ``u`` for coordinates ``eps`` of shape ``(G, k)``."""
        shifted = eps if self.shift is None else eps + self._shift(u)
        return self._center(u) + self._turn(self.scale(u) * shifted)

    def inverse(self, u: Array, z: Array) -> Array:
        """Return coordinates of latents ``z`` at ``u``; the inverse of :meth:`forward`."""
        spread = z - self._center(u)
        if self.tril is not None:
            spread = solve_lower(self.tril, spread)
        eps = spread / self.scale(u)
        return eps if self.shift is None else eps - self._shift(u)

    def _center(self, u: Array) -> Array:
        return self.mean if self.coupling is None else self.mean + _rows_times(self.coupling, u)

    def _shift(self, u: Array) -> Array:
        shift = jnp.zeros(()) if self.shift is None else self.shift
        if self.shift_coupling is not None:
            shift = shift + _rows_times(self.shift_coupling, u)
        return (
            shift
            if self.shift_curvature is None
            else shift + _rows_times(self.shift_curvature, curved(u), most=0)
        )

    def _turn(self, spread: Array) -> Array:
        return spread if self.tril is None else jnp.einsum("gij,gj->gi", self.tril, spread)

    def log_scales(self, u: Array, eps: Array | None = None) -> Array:
        """Return log scales ``(G, k)``.

        Their sum over a unit is the log determinant of dz/deps. ``eps`` has no effect here; a
        :class:`~numpyro_fed.density.nested.NestedMap` needs it and has the same signature.
        """
        linear = (
            self.log_scale
            if self.scale_coupling is None
            else self.log_scale + _rows_times(self.scale_coupling, u)
        )
        return (
            linear
            if self.scale_curvature is None
            else linear + _rows_times(self.scale_curvature, curved(u), most=0)
        )

    def log_density(self, u: Array, z: Array, owned: Array) -> Array:
        """Return the log density ``(G,)`` of each unit's latents at ``u``.

        Coordinates are standard normal; latents outside the mask ``owned`` do not count.
        """
        terms = -0.5 * self.inverse(u, z) ** 2 - self.log_scales(u) - 0.5 * math.log(2 * math.pi)
        return jnp.sum(jnp.where(owned, terms, 0.0), axis=1)

    def rebased(self, shift: Array, factor: Array) -> "LocalMap":
        """Return the same map at other global positions v, where ``u = shift + factor v``.

        ``factor`` is a matrix or its diagonal. The map must not have r, R, Q and c.
        """

        def carry(coefficients: Array) -> Array:
            return coefficients @ factor if factor.ndim == 2 else coefficients * factor

        new = {"mean": self.location(shift), "log_scale": self.log_scales(shift)}
        if self.coupling is not None:
            new["coupling"] = carry(self.coupling)
        if self.scale_coupling is not None:
            new["scale_coupling"] = carry(self.scale_coupling)
        return replace(self, **new)


# most columns to multiply and sum elementwise: XLA's CPU backend multiplies small matrices one by
# one, and 100 silos took 1.15 in place of 1.24 times the pooled time (docs/results.md)
_FUSED = 64


def _rows_times(matrix: Array, u: Array, most: int = _FUSED) -> Array:
    """Return ``matrix @ u`` for ``(G, k, d)`` and one u ``(d,)``, or a u for each of G."""
    if u.ndim == 2:
        return jnp.sum(matrix * u[:, None], axis=-1)
    return matrix @ u if u.shape[0] > most else jnp.sum(matrix * u, axis=-1)
