r"""Joint density of a marked model, factor by factor.

For every model with silo plates

.. math:: \log p(\theta, z, y) = \log p(\theta) + \sum_s \log p(y_s, z_s \mid \theta),

with the global latents :math:`\theta` and the local latents :math:`z` in unconstrained space. The
density includes Jacobians, and counts each term once. A silo is a call of the model with that
silo's arguments; a minibatch is a call with some of its rows. Only this module and
:mod:`numpyro_fed.density.factorize` look inside a model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import validation_enabled
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import is_identically_one
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import constrain_fn, potential_energy, transform_fn, unconstrain_fn

from numpyro_fed import _compat
from numpyro_fed._typing import ModelArgs, Site
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.unpadded import Sizes, unpadded_terms

PARAMS = "_fed_params"  # argument with the values of learned parameters


@dataclass(frozen=True)
class PooledModel:
    """Model that accepts a :class:`Silos` (and takes its pooled rows) or its usual arguments.

    It is ``kernel.model``, so that ``arviz.from_numpyro(mcmc)``, ``Predictive`` and the other
    blocks of :class:`numpyro.infer.Gibbs` accept the arguments of ``mcmc.run``.
    """

    model: Callable

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model; the rest of the arguments replaces pooled ones of the same name."""
        if args and isinstance(args[0], Silos):
            return self.model(*args[1:], **{**args[0].pooled, **kwargs})
        return self.model(*args, **kwargs)


class LocalSite(NamedTuple):
    """Latent site inside a silo plate.

    ``shape`` is the unconstrained shape of one element, and ``axis`` is the plate's axis in the
    unconstrained value.
    """

    name: str
    plate: str
    axis: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LearnedModel:
    """Model whose ``numpyro.param`` sites take their values from the argument :data:`PARAMS`.

    Learned parameters are then a shared argument like any other, and densities have gradients in
    them.
    """

    model: Callable

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model with the parameters' values substituted."""
        return substitute(self.model, data=kwargs.pop(PARAMS))(*args, **kwargs)


@dataclass(frozen=True)
class Factors:
    """Factors of a model's density: a static, hashable description with the density as methods.

    :param model: the marked model.
    :param global_sites: name and unconstrained shape of each global latent site, sorted by name.
    :param local_sites: the latent sites inside silo plates.
    :param plates: name and row group of each silo plate.
    :param rows: name, row group and type of one row of each row argument.
    :param index: row arguments that hold positions in another row group.
    :param transforms: constraining transform of each latent site, or ``None`` where constraining
        needs the model.
    :param undrawn: name and type of each site that is a learned parameter or mutable state.
    :param observed: names of observed sites and factors inside silo plates.
    :param row_wise: ``False`` where a row's term depends on other rows of its silo.
    :param sizes: where terms are not row-wise, the numbers of rows by group that silos have.
    """

    model: Callable
    global_sites: tuple[tuple[str, tuple[int, ...]], ...]
    local_sites: tuple[LocalSite, ...]
    plates: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, str, jax.ShapeDtypeStruct], ...]
    index: tuple[tuple[str, str], ...]
    transforms: dict[str, Transform] | None = field(compare=False, repr=False)
    undrawn: tuple[tuple[str, str], ...] = ()
    observed: tuple[str, ...] = ()
    row_wise: bool = True
    sizes: Sizes = ()

    def for_silos(self, silos: Silos) -> "Factors":
        """Return factors that know the sizes of these silos, if terms are not row-wise."""
        if self.row_wise:
            return self
        own = [
            tuple((group, n[s]) for group, n in sorted(silos.sizes.items()))
            for s in range(len(silos))
        ]
        return replace(self, sizes=tuple(dict.fromkeys(own)))

    @property
    def dim(self) -> int:
        """Dimension of the flat global position."""
        return sum(math.prod(shape) for _, shape in self.global_sites)

    @property
    def owners(self) -> tuple[str, ...]:
        """Site of each coordinate of the flat global position."""
        return tuple(name for name, shape in self.global_sites for _ in range(math.prod(shape)))

    @property
    def latent_groups(self) -> tuple[str, ...]:
        """Row groups whose elements have latents."""
        return tuple(dict.fromkeys(dict(self.plates)[s.plate] for s in self.local_sites))

    def unravel(self, theta: Array) -> dict[str, Array]:
        """Return the global sites of a flat position ``(dim,)``."""
        # a split, not slices, as its gradient is one concatenation
        stops = np.cumsum([math.prod(shape) for _, shape in self.global_sites])[:-1]
        parts = jnp.split(theta, stops)
        return {
            name: part.reshape(shape)
            for (name, shape), part in zip(self.global_sites, parts, strict=True)
        }

    def ravel(self, sites: Mapping[str, Array]) -> Array:
        """Return the flat position ``(dim,)`` of global sites; other entries are ignored."""
        return jnp.concatenate([jnp.ravel(sites[name]) for name, _ in self.global_sites])

    def leaves(self, group: str) -> list[str]:
        """Return the row arguments of a row group."""
        return [leaf for leaf, g, _ in self.rows if g == group]

    def batch_group(self) -> str:
        """Return the row group that a minibatch subsamples: the one that no index points to."""
        targets = {target for _, target in self.index}
        groups = [g for g in dict.fromkeys(g for _, g in self.plates) if g not in targets]
        if len(groups) != 1:
            raise ValueError(
                f"batch_size subsamples one row group, but the model's silo plates have {groups}; "
                "expected batch_size=None"
            )
        return groups[0]

    def check_minibatch(self) -> None:
        """Raise a ``ValueError`` where a row's term depends on other rows."""
        if not self.row_wise:
            raise ValueError(
                "batch_size with a silo plate whose rows depend on each other (row_wise=False): "
                "expected batch_size=None"
            )

    def local_groups(self) -> dict[str, str]:
        """Return the row group of each local site."""
        plates = dict(self.plates)
        return {site.name: plates[site.plate] for site in self.local_sites}

    def sites(
        self, theta: Mapping[str, Array], z: Mapping[str, Array], kwargs: ModelArgs
    ) -> dict[str, Site]:
        """Return the model's sites at unconstrained values; arguments as in :meth:`terms`."""
        placed = {s.name: jnp.moveaxis(z[s.name], 0, s.axis) for s in self.local_sites}
        model = _compat.unconstrained(self.model, {**theta, **placed})
        found: dict[str, Site] = trace(model).get_trace(**kwargs)
        return found

    def terms(
        self,
        theta: Mapping[str, Array],
        z: Mapping[str, Array],
        kwargs: ModelArgs,
        weights: Mapping[str, Array | float],
    ) -> tuple[Array, dict[str, Array]]:
        """Return the global log density, and each row group's local terms by element.

        :param theta: global sites, unconstrained.
        :param z: local sites, unconstrained, elements of their plate first: ``(n, *shape)``.
        :param kwargs: keyword arguments of the model: a silo's, a minibatch's, or all data's.
        :param weights: for each row group the weight of its terms: 0 for padding, N_s / m for a
            minibatch; a scalar or shape ``(n,)``.
        :return: ``log p(theta)`` (scalar), and for each row group a vector ``(n,)``. All entries of
            all vectors sum to ``log p(y_s, z_s | theta)``.
        """
        if self.sizes and any(jnp.ndim(w) for w in weights.values()):
            terms = partial(replace(self, sizes=()).terms, theta)
            own = {leaf: group for leaf, group, _ in self.rows}
            return unpadded_terms(terms, self.sizes, own, self.local_groups(), z, kwargs, weights)
        plates = dict(self.plates)
        total: Array = jnp.zeros(())
        local: dict[str, Array] = {}
        for site in self.sites(theta, z, kwargs).values():
            if site["type"] != "sample":
                continue
            log_prob = _site_log_prob(site)
            frames = [f for f in site["cond_indep_stack"] if f.name in plates]
            if not frames:
                total = total + jnp.sum(log_prob)
                continue
            for frame in frames:
                weight = jnp.asarray(weights[plates[frame.name]])
                if weight.ndim:
                    weight = weight.reshape((-1,) + (1,) * (-frame.dim - 1))
                log_prob = log_prob * weight
            axis = log_prob.ndim + frames[0].dim
            vector = jnp.sum(log_prob, axis=tuple(a for a in range(log_prob.ndim) if a != axis))
            group = plates[frames[0].name]
            local[group] = local[group] + vector if group in local else vector
        return total, local

    def log_local(
        self,
        theta: Mapping[str, Array],
        z: Mapping[str, Array],
        kwargs: ModelArgs,
        weights: Mapping[str, Array | float],
    ) -> Array:
        """Return ``log p(y_s, z_s | theta)``, a scalar; arguments as in :meth:`terms`."""
        return sum(
            (jnp.sum(v) for v in self.terms(theta, z, kwargs, weights)[1].values()), jnp.zeros(())
        )

    def log_prior(self, theta: Mapping[str, Array], shared: ModelArgs) -> Array:
        """Return ``log p(theta)``, a scalar, from the shared arguments alone.

        The server has no rows, so it calls the model with one made-up row of each group. No global
        term may depend on that row: :mod:`numpyro_fed.density.check` compares the sum of all
        factors with the pooled model.
        """
        one_row = made_up_rows(self.rows, dict(self.index))
        z = {s.name: jnp.zeros((1, *s.shape)) for s in self.local_sites}
        weights = {group: 1.0 for _, group, _ in self.rows}
        with validation_enabled(False):  # a likelihood's support may lack the made-up row
            return self.terms(theta, z, {**shared, **one_row}, weights)[0]

    def log_prior_of_sites(self, sites: Mapping[str, Array], shared: ModelArgs) -> Array:
        """Return ``log p(theta)``, a scalar, of global sites in their supports, without Jacobians.

        Observed sites outside of silo plates are left out.
        """
        own = {name: sites[name] for name, _ in self.global_sites}
        z = {s.name: jnp.moveaxis(jnp.zeros((1, *s.shape)), 0, s.axis) for s in self.local_sites}
        model = _compat.unconstrained(substitute(self.model, data=own), z)
        with validation_enabled(False):
            kwargs = {**shared, **made_up_rows(self.rows, dict(self.index))}
            found = trace(model).get_trace(**kwargs)
        return sum((jnp.sum(_site_log_prob(found[name])) for name in own), jnp.zeros(()))

    def constrain_globals(self, sites: Mapping[str, Array], shared: ModelArgs) -> dict[str, Array]:
        """Return global sites in their supports from unconstrained sites and shared arguments.

        Deterministic sites are left out.
        """
        if self.transforms is not None:
            return {
                name: self.transforms[name](sites[name]) if name in self.transforms else sites[name]
                for name, _ in self.global_sites
            }
        z = {s.name: jnp.moveaxis(jnp.zeros((1, *s.shape)), 0, s.axis) for s in self.local_sites}
        kwargs = {**shared, **made_up_rows(self.rows, dict(self.index))}
        with validation_enabled(False):
            out = constrain_fn(self.model, (), kwargs, {**z, **sites})
        return {name: out[name] for name, _ in self.global_sites}

    def unconstrain_globals(
        self, sites: Mapping[str, Array], shared: ModelArgs
    ) -> dict[str, Array]:
        """Return unconstrained global sites; the inverse of :meth:`constrain_globals`."""
        own = {name: sites[name] for name, _ in self.global_sites}
        if self.transforms is not None:
            return transform_fn(self.transforms, own, invert=True)
        kwargs = {**shared, **made_up_rows(self.rows, dict(self.index))}
        with validation_enabled(False):
            return unconstrain_fn(seed(self.model, 0), (), kwargs, own)

    def by_element(self, group: str, local: Mapping[str, Array], kwargs: ModelArgs) -> Array:
        """Sum local terms at the elements of one row group.

        An element collects its own terms and those of rows that point to it.

        :param group: a row group.
        :param local: vectors of :meth:`terms`.
        :return: a vector over the elements of ``group``.
        """
        return self.by_elements((group,), local, kwargs)[0][0]

    def by_elements(
        self, groups: tuple[str, ...], local: Mapping[str, Array], kwargs: ModelArgs
    ) -> tuple[list[Array], Array]:
        """Sum local terms at the elements of several row groups.

        A row points to an element itself or by way of other rows. It belongs to the last of
        ``groups`` that it points to, and to one element only, so that each term counts once.

        :param groups: row groups, inner ones after those that they point to.
        :return: a vector over the elements of each of ``groups``, and the sum of all other terms.
        """
        out, rest = [local[group] for group in groups], jnp.zeros(())
        for rows, terms in local.items():
            if rows in groups:
                continue
            found = self._element_of(rows, groups, kwargs)
            if found is None:
                rest = rest + jnp.sum(terms)
                continue
            level, element = found
            out[level] = out[level] + jax.ops.segment_sum(
                terms, element, num_segments=out[level].shape[0]
            )
        return out, rest

    def _element_of(
        self, rows: str, groups: tuple[str, ...], kwargs: ModelArgs, seen: tuple[str, ...] = ()
    ) -> tuple[int, Array] | None:
        """Return the place in ``groups`` of the group that rows belong to, and each row's element.

        The result is ``None`` for rows that point to none of ``groups``.
        """
        leaves, found = self.leaves(rows), []
        for leaf, target in self.index:
            if leaf not in leaves or target in (*seen, rows):
                continue
            if target in groups:
                found.append((groups.index(target), True, kwargs[leaf]))
            elif (by_way := self._element_of(target, groups, kwargs, (*seen, rows))) is not None:
                found.append((by_way[0], False, by_way[1][kwargs[leaf]]))
        if not found:
            return None
        # a row's own index goes before a way through other rows
        level, _, element = max(found, key=lambda x: x[:2])
        return level, element


def made_up_rows(
    rows: tuple[tuple[str, str, jax.ShapeDtypeStruct], ...], index: Mapping[str, str]
) -> dict[str, Array]:
    """Return one row of every row argument, for calls of a model without data."""
    return {
        leaf: jnp.asarray(np.full((1, *spec.shape), leaf not in index, spec.dtype))
        for leaf, _, spec in rows
    }


def _site_log_prob(site: Site) -> Array:
    intermediates = site["intermediates"]
    if intermediates:
        log_prob = site["fn"].log_prob(site["value"], intermediates)
    else:
        log_prob = site["fn"].log_prob(site["value"])
    scale = site["scale"]
    return log_prob if scale is None or is_identically_one(scale) else scale * log_prob


def pooled_log_density(model: Callable, silos: Silos, values: Mapping[str, Array]) -> Array:
    """Return NumPyro's own log density of the pooled model at unconstrained ``values``.

    Local sites must be in pooled order.
    """
    return -potential_energy(model, (), silos.pooled, values)
