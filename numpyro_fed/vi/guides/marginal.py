"""q(theta) alone: the silos integrate their latents out, and have no parameters of their own.

The latents are those of one plate's elements, or of two nested plates. The integral is the
quadrature of :mod:`numpyro_fed.surrogates.marginal`, in quadrature where plates are nested.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.surrogates.local_score import Message, marginal_score
from numpyro_fed.vi.guides.normal import SiloNormal


@dataclass(frozen=True)
class MarginalNormal(SiloNormal):
    """Gaussian q(theta) of a model whose latents silos integrate out.

    :param plates: row group of the elements, or outer and inner row groups of nested plates.
    """

    plates: tuple[str, ...] = ()

    @property
    def has_local(self) -> bool:
        """Presence of latents in q: none."""
        return False

    def integrated(self, rows: SiloRows) -> Units:
        if len(self.plates) == 2:
            return NestedUnits(self.factors, None, rows.pad, *self.plates)
        return Units(self.factors, self.plates[0], rows.pad)

    def log_likelihood(self, theta: Array, rows: SiloRows) -> Array:
        """Return a silo's ``log p(y_s | theta)`` at an unconstrained position ``(d,)``."""
        plain = Message(jnp.zeros_like(theta), jnp.ones_like(theta), theta[:0, None], theta[:0])
        return marginal_score(self.factors, self.integrated(rows), plain, rows)(theta)[0]

    def init_local(self, rows: SiloRows) -> LocalMap:
        """Return a map of no latents."""
        return LocalMap(jnp.zeros((1, 0)), jnp.zeros((1, 0)))

    def named(self, local: LocalMap) -> dict[str, tuple[Array, str | None]]:
        return {}

    def from_named(self, params: Mapping[str, Array]) -> LocalMap:
        return LocalMap(jnp.zeros((1, 0)), jnp.zeros((1, 0)))
