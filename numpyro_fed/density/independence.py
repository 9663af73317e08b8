"""Check at random points that a plate's elements are independent given theta."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, buckets, largest
from numpyro_fed.density.check import made_up_silos
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.density.nested import NestedUnits, nesting
from numpyro_fed.rounds.inline import ask_all
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask


def _local_point(factors: Factors, key: Array, view: SiloView) -> dict[str, Array]:
    groups = factors.local_groups()
    keys = random.split(key, len(factors.local_sites))
    return {
        s.name: 0.5 * random.normal(k, (dict(view.pad)[groups[s.name]], *s.shape))
        for s, k in zip(factors.local_sites, keys, strict=True)
    }


@dataclass(frozen=True)
class LeakageLocal(SiloTask):
    """Relative error of treating one silo's units as independent.

    It is zero if no unit's term depends on another unit's latents, and the terms sum to the silo's
    log density.
    """

    factors: Factors
    units: Units

    def __call__(
        self, key: Array, message: None, state: None, view: SiloView
    ) -> tuple[Array, None]:
        """Return the error at a random point, relative to the gradient."""
        factors, units = self.factors, self.units
        key_theta, key = random.split(key)
        theta = factors.unravel(0.5 * random.normal(key_theta, (factors.dim,)))
        view = units.laid_out(view)
        kwargs, weights = view.whole()
        own, key = units.from_sites(_local_point(factors, key, view)), random.fold_in(key, 1)
        if isinstance(units, NestedUnits):
            return _nested_leakage(units, theta, own, kwargs, weights, key, view), None

        def terms(x: Array) -> Array:
            return units.log_density(theta, x, kwargs, weights, view)

        def whole(x: Array) -> Array:
            pad = 0.5 * jnp.sum(jnp.where(units.owned(view), 0.0, x**2))
            return factors.log_local(theta, units.to_sites(x), kwargs, weights) - pad

        # random weights on the terms expose a term that depends on another unit's latents
        r = random.normal(key, own.shape[:1])
        weighted = jax.grad(lambda x: jnp.sum(r * terms(x)))(own)
        plain = jax.grad(lambda x: jnp.sum(terms(x)))(own)
        crossed = jnp.abs(weighted - r[:, None] * plain).max()
        missed = jnp.abs(plain - jax.grad(whole)(own)).max()
        size = 1.0 + jnp.abs(jax.grad(whole)(own)).max()
        return jnp.maximum(crossed, missed) / size, None


def _nested_leakage(
    units: NestedUnits,
    theta: dict,
    own: Array,
    kwargs: dict,
    weights: dict,
    key: Array,
    view: SiloView,
) -> Array:
    """Return the error for nested units: inner terms may depend on the outer element's latents."""
    parent = units.parent(kwargs)
    n0, n1 = units.num_elements
    outer, inner = random.normal(key, (n0,)), random.normal(random.fold_in(key, 1), (n1,))

    def weighted(x: Array, r0: Array, r1: Array) -> Array:
        terms = units.level_terms(theta, x, kwargs, weights, view)
        return jnp.sum(r0 * terms[0]) + jnp.sum(r1 * terms[1]) + terms[2]

    slope = jax.grad(weighted)
    plain = units.levels(slope(own, jnp.ones(n0), jnp.ones(n1)))
    by_outer = units.levels(slope(own, outer, outer[parent]))
    by_inner = units.levels(slope(own, jnp.zeros(n0), inner))
    crossed = [
        jnp.abs(by_outer[0] - outer[:, None] * plain[0]).max(),
        jnp.abs(by_outer[1] - outer[parent, None] * plain[1]).max(),
        jnp.abs(by_inner[1] - inner[:, None] * plain[1]).max(),
    ]
    # terms of no element must not depend on the latents
    rest = jax.grad(lambda x: units.level_terms(theta, x, kwargs, weights, view)[2])(own)
    size = 1.0 + jnp.maximum(jnp.abs(plain[0]).max(), jnp.abs(plain[1]).max())
    return jnp.maximum(jnp.abs(rest).max(), jnp.stack(crossed).max()) / size


def elements_are_independent(
    factors: Factors, units: Units, silos: Silos, *, seed: int = 0
) -> bool:
    """Return whether, given theta, each silo's density factorizes over the elements of ``units``.

    These are the elements of a plate, or of two nested plates. In an element's latents, a random
    combination of all terms must have the gradient of that element's term times its weight. For
    remote silos the check takes made-up rows. Silos here of many sizes are checked as one, whose
    program is small.
    """
    if isinstance(silos, RemoteSilos):
        found = made_up_silos(factors, silos, seed)
        if found is None:
            return False
    else:
        found = silos if len(buckets(silos)) == 1 else silos.as_one()
    factors = factors.for_silos(found)
    silos, units = found, replace(units, factors=factors, pad=largest(found))
    for trial in range(2):
        key = random.key(seed + trial)
        leaks = np.asarray(ask_all(LeakageLocal(factors, units), key, None, None, silos, None)[0])
        if not (leaks <= 1e3 * float(jnp.finfo(leaks.dtype).eps)).all():
            return False
    return True


def independent_units(factors: Factors, silos: Silos) -> Units | None:
    """Return the units of one plate's elements, or of two nested plates.

    The result is ``None`` where they depend on each other, and for a model without local latents.
    """
    groups, pair, pad = factors.latent_groups, nesting(factors), largest(silos)
    units = None
    if len(groups) == 1:
        units = Units(factors, groups[0], pad)
    elif pair is not None:
        units = NestedUnits(factors, None, pad, *pair)
    found = units is not None and elements_are_independent(factors, units, silos)
    return units if found else None
