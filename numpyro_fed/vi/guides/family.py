"""What a variational fit asks of a family: q(theta) at the server, q(z | theta) in every silo."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax import Array
from numpyro.distributions.constraints import Constraint

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units


@dataclass(frozen=True)
class Family(abc.ABC):
    """Variational family over one structure's factors: a static description with pure methods.

    Global parameters are dicts. A silo's own parameters, ``local``, are a pytree with units first;
    a ``context`` is the family's message about a draw of theta.

    :param factors: the model's factors.
    :param group: the row group whose elements are the units; ``None``: a silo is one unit.
    """

    factors: Factors
    group: str | None

    @property
    def has_local(self) -> bool:
        """Presence of local latents in the model."""
        return bool(self.factors.local_sites)

    def units(self, rows: SiloRows) -> Units:
        """Return the partition of the latents of a stack's silos into units."""
        return Units(self.factors, self.group, rows.pad)

    def integrated(self, rows: SiloRows) -> Units | None:
        """Return the units that a silo integrates out in conducive rounds; ``None`` without any."""
        return self.units(rows) if self.has_local else None

    def can_draw(self, rows: SiloRows) -> bool:
        """Return whether a silo can draw its latents."""
        return True

    @property
    @abc.abstractmethod
    def shared_params(self) -> tuple[str, ...]:
        """Names of the global parameters that a context carries to the silos."""

    def whitening(self, params: Mapping[str, Array]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return mean and square root of the covariance of q(theta); ``None`` if not Gaussian."""
        del params
        return None

    @abc.abstractmethod
    def constraints(self) -> dict[str, Constraint]:
        """Return the support of each global parameter."""

    @abc.abstractmethod
    def global_noise(self, key: Array) -> Array:
        """Draw the noise of theta."""

    @abc.abstractmethod
    def context(self, params: Mapping[str, Array], noise: Array) -> PyTree:
        """Return the draw of theta for its noise."""

    @abc.abstractmethod
    def log_global(self, params: Mapping[str, Array], context: PyTree) -> Array:
        """Return ``log q(theta)`` in unconstrained space, a scalar."""

    @abc.abstractmethod
    def init_local(self, rows: SiloRows) -> PyTree:
        """Return a silo's first parameters, unconstrained."""

    @abc.abstractmethod
    def effective(self, local: PyTree, rows: SiloRows) -> PyTree:
        """Return a silo's parameters as the methods below take them."""

    @abc.abstractmethod
    def noise(self, key: Array, rows: SiloRows, num: int) -> Array:
        """Draw the noise of ``num`` draws of a silo's latents."""

    @abc.abstractmethod
    def latents(self, local: PyTree, context: PyTree, eps: Array, rows: SiloRows) -> Array:
        """Return the latents ``(num, E, k)`` for their noise."""

    @abc.abstractmethod
    def log_local(self, local: PyTree, context: PyTree, z: Array, rows: SiloRows) -> Array:
        """Return ``log q(z | theta)`` of each unit, ``(E,)``."""

    @abc.abstractmethod
    def reply(self, direct: PyTree, path: PyTree, path_doubly: PyTree) -> PyTree:
        """Combine a silo's gradient in the context from its parts.

        :param direct: gradient of the bound at fixed z.
        :param path: gradient through z.
        :param path_doubly: gradient through z, doubly reparametrized.
        """

    @abc.abstractmethod
    def named(self, local: PyTree) -> dict[str, tuple[Array, str | None]]:
        """Return a stack's own parameters by name, each with the row group of its elements.

        They are in their supports. The row group is ``None`` where the units are silos.
        """

    @abc.abstractmethod
    def from_named(self, params: Mapping[str, Array]) -> PyTree:
        """Invert :meth:`named`."""
