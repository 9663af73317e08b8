"""q(theta) alone: the silos integrate the latents of two nested plates out.

They have no parameters of their own. The integral is the quadrature in quadrature of
:mod:`numpyro_fed.surrogates.nested_marginal`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.surrogates.local_score import Message, marginal_score
from numpyro_fed.vi.guides.normal import SiloNormal
from numpyro_fed.vi.proposals import num_nodes


@dataclass(frozen=True)
class MarginalNormal(SiloNormal):
    """Gaussian q(theta) of a model whose latents silos integrate out.

    :param outer: row group of the outer plate.
    :param inner: row group of the inner plate.
    """

    outer: str = ""
    inner: str = ""

    @property
    def has_local(self) -> bool:
        """Presence of latents in q: none."""
        return False

    def integrated(self, rows: SiloRows) -> NestedUnits:
        return NestedUnits(self.factors, None, rows.pad, self.outer, self.inner)

    def can_draw(self, rows: SiloRows) -> bool:
        return all(num_nodes(width) > 0 for *_, width in self.integrated(rows).blocks())

    def log_likelihood(self, theta: Array, rows: SiloRows) -> Array:
        """Return a silo's ``log p(y_s | theta)`` at an unconstrained position ``(d,)``."""
        plain = Message(jnp.zeros_like(theta), jnp.ones_like(theta), theta[:0, None], theta[:0])
        return marginal_score(self.factors, self.integrated(rows), plain, rows)(theta)[0]

    def init_local(self, rows: SiloRows) -> LocalMap:
        """Return a map of no latents."""
        return LocalMap(jnp.zeros((1, 0)), jnp.zeros((1, 0)))
