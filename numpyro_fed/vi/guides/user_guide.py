"""Guides that users write, over silos.

Sites outside silo plates are drawn by the server, with the parameters outside them. Sites inside
are drawn by each silo, with the parameters inside (``numpyro.param(..., event_dim=k)`` in the
plate), which stay there. The guide is called in every silo with that silo's arguments.

What leaves a silo: gradients in the global sites and in all global parameters of the guide (e.g. of
a network that amortizes q(z)).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import Transform, biject_to
from numpyro.handlers import seed, substitute, trace

from numpyro_fed import _compat
from numpyro_fed._typing import Column, ModelArgs, PyTree, Site
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, largest
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import PARAMS, Factors, LearnedModel, made_up_rows
from numpyro_fed.density.handlers import is_silo_plate, silo_plate
from numpyro_fed.density.independence import elements_are_independent
from numpyro_fed.density.local_map import Units
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.vi.guides.amortize import as_float
from numpyro_fed.vi.guides.family import Family


class LocalParam(NamedTuple):
    """A parameter inside a silo plate: its row group, and the axis of its rows."""

    name: str
    group: str
    axis: int


@wire_name("GuideContext")
class Context(NamedTuple):
    """Message to every silo about a draw of theta.

    :param theta: flat position in unconstrained space, ``(d,)``.
    :param params: the guide's global parameters.
    """

    theta: Array
    params: dict[str, Array]


@dataclass(frozen=True, eq=False)
class Shared:
    """Shared arguments of all silos.

    They are hashed by identity, since their arrays are constants of the compiled program.
    """

    kwargs: ModelArgs


@dataclass(frozen=True)
class GuideFamily(Family):
    """A user's guide as a family.

    :param guide: the guide.
    :param guide_factors: the factors of the guide's log density, unconstrained, as those of a
        model.
    :param local_params: the parameters inside silo plates.
    :param supports: support of every parameter.
    :param start: first values of the global parameters, in their supports.
    :param shared: arguments that all silos share.
    """

    guide: Callable
    guide_factors: Factors
    local_params: tuple[LocalParam, ...]
    supports: dict[str, Constraint] = field(compare=False, repr=False)
    start: dict[str, Array] = field(compare=False, repr=False)
    shared: Shared = field(repr=False)

    @property
    def shared_params(self) -> tuple[str, ...]:
        """Names of all global parameters of the guide."""
        return tuple(self.start)

    def constraints(self) -> dict[str, Constraint]:
        local = {p.name for p in self.local_params}
        return {name: support for name, support in self.supports.items() if name not in local}

    def global_noise(self, key: Array) -> Array:
        """Return the noise of a draw of theta: a key."""
        return random.key_data(key)

    def context(self, params: Mapping[str, Array], noise: Array) -> Context:
        """Return the draw of theta for a key: the guide's, on one made-up row."""
        own = {k: params[k] for k in self.start}
        rows = made_up_rows(self.factors.rows, dict(self.factors.index))
        sites = self._trace(own, {}, {**self.shared.kwargs, **rows}, random.wrap_key_data(noise))
        theta = {name: self._unconstrained(sites[name]) for name, _ in self.factors.global_sites}
        return Context(self.factors.ravel(theta), own)

    def log_global(self, params: Mapping[str, Array], context: Context) -> Array:
        own = {k: params[k] for k in self.start}
        model = replace(self.guide_factors, model=LearnedModel(self.guide))
        return model.log_prior(
            self.factors.unravel(context.theta), {**self.shared.kwargs, PARAMS: own}
        )

    def init_local(self, rows: SiloRows) -> dict[str, Array]:
        kwargs, _ = rows.whole()
        sites = trace(seed(self.guide, random.key(0))).get_trace(**kwargs)
        out = {}
        for name, _, axis in self.local_params:
            value = jnp.asarray(sites[name]["value"])
            value = biject_to(self.supports[name]).inv(value.astype(jnp.result_type(value, float)))
            out[name] = self._units_first(jnp.moveaxis(value, axis, 0))
        return out or {"": jnp.zeros((1, 0))}

    def effective(self, local: dict[str, Array], rows: SiloRows) -> dict[str, Array]:
        """Return the parameters in their supports, with the axes that they have in the guide."""
        return {p.name: self._placed(local[p.name], p) for p in self.local_params}

    def _placed(self, x: Array, p: LocalParam) -> Array:
        rows_first = x if self.group is not None else x[0]
        return biject_to(self.supports[p.name])(jnp.moveaxis(rows_first, 0, p.axis))

    def _units_first(self, rows_first: Array) -> Array:
        return rows_first if self.group is not None else rows_first[None]

    def noise(self, key: Array, rows: SiloRows, num: int) -> Array:
        """Return the keys of a silo's draws."""
        return jax.vmap(random.key_data)(
            random.split(random.fold_in(random.fold_in(key, rows.part), rows.number), num)
        )

    def latents(
        self, local: dict[str, Array], context: Context, eps: Array, rows: SiloRows
    ) -> Array:
        """Draw latents ``(num, E, k)`` from the guide given theta."""
        kwargs, _ = rows.whole()
        theta = self.factors.unravel(context.theta)

        def one(key: Array) -> Array:
            sites = self._trace(
                {**context.params, **local}, theta, kwargs, random.wrap_key_data(key)
            )
            flat = {
                s.name: jnp.moveaxis(self._unconstrained(sites[s.name]), s.axis, 0)
                for s in self.factors.local_sites
            }
            units = self.units(rows)
            return jnp.where(units.owned(rows), units.from_sites(flat), 0.0)

        return jax.vmap(one)(eps)

    def log_local(
        self, local: dict[str, Array], context: Context, z: Array, rows: SiloRows
    ) -> Array:
        """Return ``log q(z | theta)`` of each unit, ``(E,)``; parameters are frozen."""
        kwargs, weights = rows.whole()
        params = {**lax.stop_gradient(context.params), **local}
        model = replace(self.guide_factors, model=LearnedModel(self.guide))
        sites = self.units(rows).to_sites(z)
        theta = self.factors.unravel(context.theta)
        terms = model.terms(theta, sites, {**kwargs, PARAMS: params}, weights)[1]
        if self.group is None:
            return sum((jnp.sum(v) for v in terms.values()), jnp.zeros(()))[None]
        return terms[self.group]

    def reply(self, direct: Context, path: Context, path_doubly: Context) -> Context:
        """Combine a silo's gradient in the context from its parts.

        Theta's gradient is along every path. The parameters' gradient is through z, doubly
        reparametrized.
        """
        return Context(direct.theta + path.theta, path_doubly.params)

    def named(self, local: dict[str, Array]) -> dict[str, tuple[Array, str | None]]:
        out: dict[str, tuple[Array, str | None]] = {}
        for p in self.local_params:
            # the first axis is that of the stack's silos
            placed = jax.vmap(lambda x, p=p: jnp.moveaxis(self._placed(x, p), p.axis, 0))(
                local[p.name]
            )
            out[p.name] = (placed, p.group)
        return out

    def from_named(self, params: Mapping[str, Array]) -> dict[str, Array]:
        out = {}
        for p in self.local_params:

            def one(x: Array, p: LocalParam = p) -> Array:
                value = biject_to(self.supports[p.name]).inv(jnp.moveaxis(x, 0, p.axis))
                return self._units_first(jnp.moveaxis(value, p.axis, 0))

            out[p.name] = jax.vmap(one)(params[p.name])
        return out

    def _trace(
        self, params: dict, theta: Mapping[str, Array], kwargs: dict, key: Array
    ) -> dict[str, Site]:
        """Trace the guide.

        :param params: values of its parameters.
        :param theta: values of global sites, unconstrained; empty: they are drawn.
        """
        guide = _compat.unconstrained(self.guide, theta) if theta else self.guide
        return trace(seed(substitute(guide, data=params), key)).get_trace(**kwargs)

    @staticmethod
    def _unconstrained(site: Site) -> Array:
        return biject_to(site["fn"].support).inv(site["value"])


@dataclass(frozen=True)
class _WithPlates:
    """A guide of global sites alone, with empty silo plates of the model's names."""

    guide: Callable
    plates: tuple[tuple[str, str], ...]
    leaves: tuple[tuple[str, str], ...]

    def __call__(self, **kwargs: Column) -> PyTree:
        leaf = {group: name for name, group in self.leaves}
        for name, group in self.plates:
            with silo_plate(name, kwargs[leaf[group]].shape[0]):
                pass
        return self.guide(**kwargs)


def guide_family(
    guide: Callable,
    factors: Factors,
    silos: Silos,
    learned: dict[str, PyTree],
    independent: bool,
    measured: bool = True,
) -> GuideFamily:
    """Sort a guide's sites and parameters into the server's and the silos'.

    :param learned: first values of the model's learned parameters.
    :param independent: whether the model's elements are independent given theta.
    :param measured: whether to check that the guide's are, too.
    :raises ValueError: where sites, supports or parameters do not match the model.
    """
    one_row = {**silos.shared, **made_up_rows(factors.rows, silos.index)}
    sites = trace(seed(guide, random.key(0))).get_trace(**one_row)
    if not factors.local_sites and not any(is_silo_plate(site) for site in sites.values()):
        leaves = tuple((leaf, group) for leaf, group, _ in factors.rows)
        guide = _WithPlates(guide, factors.plates, leaves)
        sites = trace(seed(guide, random.key(0))).get_trace(**one_row)
    guide_factors = factorize(guide, silos)
    _check_sites(factors, guide_factors)
    _check_supports(factors, sites, {**one_row, **({PARAMS: learned} if learned else {})})
    plates = dict(guide_factors.plates)
    local, supports, start = [], {}, {}
    for name, site in sites.items():
        if site["type"] != "param":
            continue
        if name in learned:
            raise ValueError(
                f"parameter {name!r} is in the model and in the guide; expected different names"
            )
        supports[name] = site["kwargs"].get("constraint", constraints.real)
        frames = [f for f in site["cond_indep_stack"] if f.name in plates]
        value = jax.tree.map(as_float, site["value"])  # a network's weights are a pytree
        if frames:
            if not isinstance(value, Array):
                raise ValueError(
                    f"guide parameter {name!r} in silo plate {frames[0].name!r}: expected an array "
                    "with a row for each element, got "
                    f"{type(site['value']).__name__}; declare a network outside the plate"
                )
            event_dim = site["kwargs"].get("event_dim")
            axis = 0 if event_dim is None else value.ndim - event_dim + frames[0].dim
            local.append(LocalParam(name, plates[frames[0].name], axis))
        else:
            start[name] = value
    groups = factors.latent_groups
    alone = independent and len(groups) == 1 and all(p.group == groups[0] for p in local)
    if alone and measured:
        units = Units(guide_factors, groups[0], largest(silos))
        alone = elements_are_independent(guide_factors, units, silos)
    group = groups[0] if alone else None
    return GuideFamily(
        factors, group, guide, guide_factors, tuple(local), supports, start, Shared(silos.shared)
    )


def _check_sites(model: Factors, guide: Factors) -> None:
    own, other = (
        {**dict(f.global_sites), **{s.name: (s.plate, s.shape) for s in f.local_sites}}
        for f in (model, guide)
    )
    wrong = sorted(k for k in {*own, *other} if own.get(k) != other.get(k))
    if wrong:
        expected = {k: own.get(k, "no such site") for k in wrong}
        got = {k: other.get(k, "no such site") for k in wrong}
        raise ValueError(
            f"the guide does not match the model at {wrong}: expected {expected}, got {got} (the "
            "shape of a global site, or silo plate and shape of an element). Draw each latent site "
            "of the model in the guide, the local ones inside a fed.silo_plate of the same name"
        )


def _check_supports(factors: Factors, guide: Mapping[str, Site], one_row: ModelArgs) -> None:
    model = trace(seed(factors.model, random.key(0))).get_trace(**one_row)
    for name in [*dict(factors.global_sites), *(s.name for s in factors.local_sites)]:
        if not guide[name]["fn"].has_rsample:
            raise ValueError(
                f"guide site {name!r}: its distribution cannot be reparametrized; expected one "
                "with rsample"
            )
        own, other = (biject_to(sites[name]["fn"].support) for sites in (model, guide))
        if not _same_map(own, other, model[name]["value"]):
            raise ValueError(
                f"guide site {name!r}: expected the support of the model's, "
                f"{model[name]['fn'].support}, got "
                f"{guide[name]['fn'].support}"
            )


def _same_map(own: Transform, other: Transform, value: Array) -> bool:
    """Return whether two transforms send the same unconstrained numbers to the same values."""
    start = jnp.zeros_like(own.inv(value))
    x = 0.3 + 0.1 * jnp.arange(start.size, dtype=start.dtype).reshape(start.shape)
    if jax.eval_shape(other.inv, value).shape != x.shape:
        return False
    return bool(jnp.allclose(own(x), other(x), rtol=1e-5))
