r"""The structured Gaussian family: :math:`q(\theta)`, and a local map in every silo.

.. math::

    \theta = \mu + L u, \quad u \sim N(0, I), \qquad
    z_g = m_g + C_g u + T_g (e^{l_g + b_g u} \odot \epsilon_g)

The local map defines :math:`q(z_s \mid \theta)`. The paper's family (section 3.1) has :math:`C_g
(\theta - \mu)`, constant log scales and one T for each silo. Here the coupling is in whitened
coordinates, so that the local parameters have the scale of the latents for every L. The log scales
are linear in u, and T may differ between plate elements. Every function is pure and sees one silo.

Reference: *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
Salomone & Mengersen (2023), equations 7-8 and section 3.1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.vi.guides.amortize import Encoder
from numpyro_fed.vi.guides.family import Family
from numpyro_fed.vi.guides.scales import Diagonal, LowRank, Scale, Triangular, relative

_LOCAL = {
    "mean": "local_loc",
    "log_scale": "local_log_scale",
    "coupling": "local_coupling",
    "scale_coupling": "local_scale_coupling",
    "tril": "local_tril",
}


@wire_name("NormalContext")
class Context(NamedTuple):
    """Message to every silo about a draw of the global latents.

    :param theta: flat position in unconstrained space, ``(d,)``.
    :param u: theta, whitened by q, ``(d,)``.
    :param params: weights of the networks that amortize local latents.
    """

    theta: Array
    u: Array
    params: dict[str, PyTree]


@dataclass(frozen=True)
class SiloNormal(Family):
    """The structured Gaussian family; a silo's own parameters are its local map.

    :param global_cov: ``"full"``, ``"diag"`` or the rank of a low-rank form.
    :param local_cov: ``"diag"``, ``"element"`` or ``"full"``.
    :param coupling: whether the location of the local latents moves with theta.
    :param scale_coupling: whether their log scales do.
    :param prefix: prefix of the parameters' names.
    :param init_scale: sd of all latents at the start.
    :param encoders: networks in place of the local map's rows, for some or all sites.
    """

    global_cov: str | int
    local_cov: str
    coupling: bool
    scale_coupling: bool
    prefix: str = "auto"
    init_scale: float = 0.3
    encoders: tuple[Encoder, ...] = ()

    @property
    def shared_params(self) -> tuple[str, ...]:
        """Names of the networks' weights."""
        return tuple(name for encoder in self.encoders for name in encoder.start)

    # q(theta)

    def constraints(self) -> dict[str, Constraint]:
        out: dict[str, Constraint] = {f"{self.prefix}_loc": constraints.real}
        for encoder in self.encoders:
            out |= encoder.supports
        if self.global_cov == "full":
            return {**out, f"{self.prefix}_scale_tril": constraints.scaled_unit_lower_cholesky}
        out[f"{self.prefix}_scale"] = constraints.softplus_positive
        if self.global_cov != "diag":
            out[f"{self.prefix}_factor"] = constraints.real
        return out

    def init(self, loc: Array) -> dict[str, PyTree]:
        """Return global parameters of independent components around ``loc``."""
        d = self.factors.dim
        out = {f"{self.prefix}_loc": loc} | {
            k: v for encoder in self.encoders for k, v in encoder.start.items()
        }
        if self.global_cov == "full":
            return {
                **out,
                f"{self.prefix}_scale_tril": jnp.asarray(self.init_scale * np.eye(d), loc.dtype),
            }
        out[f"{self.prefix}_scale"] = jnp.asarray(np.full(d, self.init_scale), loc.dtype)
        if not isinstance(self.global_cov, str):  # random: at A = 0 the gradient of A A' is zero
            out[f"{self.prefix}_factor"] = 0.1 * random.normal(
                random.key(0), (d, self.global_cov), loc.dtype
            )
        return out

    def scale(self, params: Mapping[str, Array]) -> Scale:
        """Return the square root L of the covariance of q(theta)."""
        if self.global_cov == "full":
            return Triangular(params[f"{self.prefix}_scale_tril"])
        if self.global_cov == "diag":
            return Diagonal(params[f"{self.prefix}_scale"])
        return LowRank(params[f"{self.prefix}_scale"], params[f"{self.prefix}_factor"])

    def global_noise(self, key: Array) -> Array:
        return random.normal(key, (self.factors.dim,))

    def context(self, params: Mapping[str, Array], noise: Array) -> Context:
        """Return the draw of theta for standard normal ``noise``.

        ``u`` is computed with frozen parameters, so that its gradients flow through ``theta``
        alone.
        """
        theta = params[f"{self.prefix}_loc"] + self.scale(params).apply(noise)
        weights = {name: params[name] for name in self.shared_params}
        return Context(theta, self.whiten(lax.stop_gradient(params), theta), weights)

    def from_moments(self, mean: Array, covariance: Array) -> dict[str, Array]:
        """Return the global parameters of a Gaussian (not of the low-rank form).

        :param covariance: the full covariance, or its diagonal for a diagonal q.
        """
        out = {f"{self.prefix}_loc": mean}
        if self.global_cov == "full":
            return {**out, f"{self.prefix}_scale_tril": jnp.linalg.cholesky(covariance)}
        return {**out, f"{self.prefix}_scale": jnp.sqrt(covariance)}

    def whiten(self, params: Mapping[str, Array], theta: Array) -> Array:
        """Return ``u`` of a position."""
        return self.scale(params).solve(theta - params[f"{self.prefix}_loc"])

    def whitening(self, params: Mapping[str, Array]) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of q(theta) and a square root of its covariance.

        The root is triangular ``(d, d)``, or for a diagonal q its diagonal ``(d,)``.
        """
        loc, scale = np.asarray(params[f"{self.prefix}_loc"]), self.scale(params)
        if isinstance(scale, Triangular):
            return loc, np.asarray(scale.tril)
        if isinstance(scale, Diagonal):
            return loc, np.asarray(scale.scale)
        return loc, np.linalg.cholesky(np.asarray(scale.covariance()))

    def log_global(self, params: Mapping[str, Array], context: Context) -> Array:
        return (
            -0.5 * jnp.sum(context.u**2)
            - self.scale(params).log_det()
            - 0.5 * self.factors.dim * math.log(2 * np.pi)
        )

    # q(z_s | theta)

    def init_local(self, rows: SiloRows) -> LocalMap:
        """Return a silo's first map: standard normal times ``init_scale``, for every theta."""
        units = self.units(rows)
        count = 1 if self.group is None else dict(rows.pad)[self.group]
        k, d = int(self._free(units).sum()), self.factors.dim
        shape = (count, k)
        # absent fields are not even made: with many latents and globals one may exceed memory
        return LocalMap(
            mean=jnp.zeros(shape),
            log_scale=jnp.full(shape, math.log(self.init_scale), jnp.result_type(float)),
            coupling=jnp.zeros((*shape, d)) if self.coupling else None,
            scale_coupling=jnp.zeros((*shape, d)) if self.scale_coupling else None,
            tril=jnp.broadcast_to(jnp.eye(k), (count, k, k)) if self._correlated(units) else None,
        )

    def effective(self, local: LocalMap, rows: SiloRows) -> LocalMap:
        """Return the map with its triangular factors masked to the entries that the family has."""
        if local.tril is None:
            return local
        mask = jnp.asarray(self._tril_mask(self.units(rows)))
        eye = jnp.eye(mask.shape[0], dtype=local.tril.dtype)
        return replace(local, tril=jnp.where(mask, local.tril, eye))

    def rebased(
        self, local: LocalMap, base: Mapping[str, Array], params: Mapping[str, Array]
    ) -> LocalMap:
        """Rewrite the map of a q(z | theta) for another q(theta).

        :param local: the map in coordinates whitened by ``base``.
        :return: the map in coordinates whitened by ``params``.
        """
        shift = self.whiten(base, params[f"{self.prefix}_loc"])
        return local.rebased(shift, relative(self.scale(base), self.scale(params)))

    def noise(self, key: Array, rows: SiloRows, num: int) -> Array:
        """Draw standard normal coordinates ``(num, E, k)`` of a silo's units.

        Keys are folded by the elements' places in the pooled data.
        """
        units = self.units(rows)
        parts = []
        for i, (group, count, width) in enumerate(units.blocks()):
            key_group = random.fold_in(random.fold_in(key, rows.part), i)
            draw = jax.vmap(
                lambda j, k=key_group, w=width: random.normal(random.fold_in(k, j), (num, w))
            )
            eps = jnp.moveaxis(draw(rows.order[group]), 0, 1)
            parts.append(eps if self.group is not None else eps.reshape(num, 1, count * width))
        return jnp.where(units.owned(rows), jnp.concatenate(parts, axis=-1), 0.0)

    def latents(self, local: LocalMap, context: Context, eps: Array, rows: SiloRows) -> Array:
        local = self.completed(local, context.params, rows)
        return jax.vmap(lambda e: local.forward(context.u, e))(eps)

    def log_local(self, local: LocalMap, context: Context, z: Array, rows: SiloRows) -> Array:
        local = self.completed(local, lax.stop_gradient(context.params), rows)
        return local.log_density(context.u, z, self.units(rows).owned(rows))

    def completed(self, local: LocalMap, weights: Mapping[str, PyTree], rows: SiloRows) -> LocalMap:
        """Return the map of all latents.

        It has a silo's own rows, and the networks' outputs for the others. The latter do not move
        with theta.
        """
        if not self.encoders:
            return local
        units, kwargs = self.units(rows), rows.whole()[0]
        encoded = {e.site: e(weights, kwargs) for e in self.encoders}
        zeros = {
            s.name: jnp.zeros((dict(rows.pad)[g], *s.shape))
            for s, g in zip(
                self.factors.local_sites, self.factors.local_groups().values(), strict=True
            )
        }
        mean, log_scale = (
            units.from_sites(zeros | {site: both[i] for site, both in encoded.items()})
            for i in range(2)
        )
        free = np.flatnonzero(self._free(units))
        if not len(free):
            return LocalMap(mean, log_scale)

        def wide(x: Array | None) -> Array | None:
            return (
                None
                if x is None
                else jnp.zeros((*mean.shape, x.shape[-1]), x.dtype).at[:, free].set(x)
            )

        tril = None
        if local.tril is not None:
            eye = jnp.broadcast_to(jnp.eye(units.dim, dtype=mean.dtype), (*mean.shape, units.dim))
            tril = eye.at[:, free[:, None], free].set(local.tril)
        return LocalMap(
            mean.at[:, free].set(local.mean),
            log_scale.at[:, free].set(local.log_scale),
            wide(local.coupling),
            wide(local.scale_coupling),
            tril,
        )

    def named(self, local: LocalMap) -> dict[str, tuple[Array, str | None]]:
        parts = {f"{self.prefix}_{name}": vars(local)[field] for field, name in _LOCAL.items()}
        return {name: (x, self.group) for name, x in parts.items() if x is not None and x.size}

    def from_named(self, params: Mapping[str, Array]) -> LocalMap:
        names = {field: f"{self.prefix}_{name}" for field, name in _LOCAL.items()}
        if names["mean"] not in params:  # every latent is amortized
            return LocalMap(jnp.zeros((1, 0)), jnp.zeros((1, 0)))
        return LocalMap(**{field: params[name] for field, name in names.items() if name in params})

    def reply(self, direct: Context, path: Context, path_doubly: Context) -> Context:
        r"""Combine a silo's gradient in the context from its parts.

        At fixed noise z does not depend on :math:`\mu, L`, so there is no path through ``theta``.
        Through ``u`` only a term of mean zero is added: the path's gradient minus its doubly
        reparametrized form. At the exact posterior no noise is left. The networks' weights are
        reached through z alone.
        """
        return Context(direct.theta, direct.u + path.u - path_doubly.u, path_doubly.params)

    def _correlated(self, units: Units) -> bool:
        return self.local_cov != "diag" and bool(self._tril_mask(units).any())

    def _free(self, units: Units) -> np.ndarray:
        """Return which latents of a unit have parameters of their own, ``(k,)``."""
        amortized = {encoder.site for encoder in self.encoders}
        if not amortized:
            return np.ones(units.dim, bool)
        groups = self.factors.local_groups()
        with jax.ensure_compile_time_eval():
            own = {
                s.name: jnp.full(
                    (dict(units.pad)[groups[s.name]], *s.shape), s.name not in amortized
                )
                for s in self.factors.local_sites
            }
            return np.asarray(units.from_sites(own)[0])

    def _tril_mask(self, units: Units) -> np.ndarray:
        """Return which entries of T are free, ``(k, k)``.

        T covers the latents that have parameters of their own.
        """
        free = np.tri(units.dim, k=-1, dtype=bool)
        own = np.flatnonzero(self._free(units))
        if self.local_cov != "full" and self.group is None:
            element, start = [], 0
            for _, count, width in units.blocks():
                element += [start + i // width for i in range(count * width)]
                start += count
            free = free & (np.array(element)[:, None] == np.array(element))
        return free[np.ix_(own, own)]
