r"""The importance-weighted evidence bound: a silo's part, the server's, and their gradients.

.. math::

    F_s = \sum_g \log \frac1K \sum_{k=1}^K w_{gk}, \qquad
    w_{gk} = \frac{p(y_g, z_{gk} \mid \theta)}{q(z_{gk} \mid \theta)}, \qquad
    z_{gk} \sim q(z_g \mid \theta)

The sum has one term for each unit g (a plate element, or the whole silo), so the bound needs
nothing from outside the silo. K = 1 is the evidence lower bound. With :math:`W_{gk} = w_{gk} /
\sum_j w_{gj}` the gradients are

* at fixed z, weighted by W, for theta and the learned parameters;
* through z, weighted by :math:`W^2`, for the local parameters: the doubly reparametrized gradient.
  For K = 1 it sticks the landing. Parameters inside log q are frozen.

References: SFVI, supplement S1 (equation S4 for K = 1, derived anew); Burda, Grosse & Salakhutdinov
(2016); Tucker, Lawson, Gu & Maddison (2019), equation 8; Geffner & Domke (2022) for weights inside
each unit.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.factors import PARAMS
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.guides.family import Family
from numpyro_fed.vi.minibatch import Batch


class SiloTerm(NamedTuple):
    """A silo's part of the bound.

    :param value: F_s, a scalar.
    :param context: gradient in the message about theta.
    :param params: gradient in the model's learned parameters.
    :param local: gradient in the silo's own variational parameters (stays).
    """

    value: Array
    context: PyTree
    params: PyTree
    local: PyTree


def unit_terms(
    family: Family, theta: Array, z: Array, params: PyTree, batch: Batch
) -> tuple[Array, Array]:
    """Return each unit's ``log p(y_g, z_g | theta)``, ``(E,)``, and the sum of the other terms."""
    factors, units = family.factors, family.units(batch.rows)
    kwargs, own = batch.rows.whole()
    weights = {g: w * batch.weights.get(g, 1.0) for g, w in own.items()}
    if params:
        kwargs = {**kwargs, PARAMS: params}
    sites = units.to_sites(z) if family.has_local else {}
    local = factors.terms(factors.unravel(theta), sites, kwargs, weights)[1]
    zero = jnp.zeros((), theta.dtype)
    if not family.has_local:
        return jnp.zeros((0,), theta.dtype), sum((jnp.sum(v) for v in local.values()), zero)
    if family.group is None:
        return sum((jnp.sum(v) for v in local.values()), zero)[None], zero
    (terms,), rest = factors.by_elements((family.group,), local, kwargs)
    return terms, rest


def candidate_weights(
    family: Family, local: PyTree, context: PyTree, params: PyTree, z: Array, batch: Batch
) -> tuple[Array, Array]:
    """Return the log weights ``(K, E)`` of candidates, and the terms outside units, ``(K,)``.

    :param z: candidates ``(K, E, k)``; padding has log weight zero.
    """
    counts = real_units(family, batch)

    def one(z: Array) -> tuple[Array, Array]:
        terms, rest = unit_terms(family, context.theta, z, params, batch)
        return jnp.where(counts, terms - family.log_local(local, context, z, batch.rows), 0.0), rest

    return jax.vmap(one)(z)


def real_units(family: Family, batch: Batch) -> Array:
    """Return which units are not padding, ``(E,)``."""
    return jnp.any(family.units(batch.rows).owned(batch.rows), axis=1)


def unit_bounds(family: Family, log_weight: Array, batch: Batch) -> Array:
    """Return ``log 1/K sum_k w_gk`` of each unit ``(E,)``, zero for padding."""
    num = len(log_weight)
    if num == 1:
        return log_weight[0]
    return jnp.where(
        real_units(family, batch), jax.nn.logsumexp(log_weight, axis=0) - math.log(num), 0.0
    )


def silo_bound(
    family: Family, local: PyTree, context: PyTree, params: PyTree, eps: Array | None, batch: Batch
) -> SiloTerm:
    """Return a silo's part of the bound and its gradients at one draw of theta.

    :param family: the variational family.
    :param local: the silo's variational parameters.
    :param context: the draw of theta.
    :param params: learned parameters of the model.
    :param eps: noise of K draws of the latents, leading axis K; ``None`` without local latents.
    :param batch: the silo's rows, all or a minibatch.
    """
    if eps is None:

        def plain(context: PyTree, params: PyTree) -> Array:
            return unit_terms(family, context.theta, jnp.zeros((0, 0)), params, batch)[1]

        value, (direct, learned) = jax.value_and_grad(plain, argnums=(0, 1))(context, params)
        zero = jax.tree.map(jnp.zeros_like, direct)
        return SiloTerm(value, family.reply(direct, zero, zero), learned, local)

    def log_weights(context: PyTree, params: PyTree, z: Array) -> tuple[Array, Array]:
        return candidate_weights(family, lax.stop_gradient(local), context, params, z, batch)

    z, pull_path = jax.vjp(
        lambda local, context: family.latents(local, context, eps, batch.rows), local, context
    )
    num = z.shape[0]
    (lw, rest), pull = jax.vjp(log_weights, context, params, z)
    value = batch.scale * jnp.sum(unit_bounds(family, lw, batch)) + jnp.mean(rest)
    normalized = jax.nn.softmax(lw, axis=0)
    direct, learned, slope = pull((batch.scale * normalized, jnp.full_like(rest, 1 / num)))
    own, path_doubly = pull_path(normalized[..., None] * slope)
    path = path_doubly if num == 1 else pull_path(slope)[1]
    return SiloTerm(value, family.reply(direct, path, path_doubly), learned, own)


def server_gradient(
    config: FitConfig,
    rows: SiloRows,
    params: dict[str, Array],
    noise: Array,
    gradients: PyTree,
    learned: dict[str, Array],
) -> tuple[Array, dict[str, Array]]:
    """Return the prior's and q's part of the bound, and the gradient of the whole bound.

    The gradient is in the unconstrained global parameters.

    :param gradients: the silos' sum of gradients in the draws of theta, leading axis: particles.
    :param learned: their sum of gradients in the learned parameters.
    """
    family = config.families[0]

    def objective(params: dict[str, Array]) -> tuple[Array, Array]:
        params = config.constrain(params)
        frozen = lax.stop_gradient(params)

        def one(e: Array, gradient: PyTree) -> tuple[Array, Array]:
            context = family.context(params, e)
            own = config.log_prior(context.theta, params, rows) - family.log_global(frozen, context)
            return own, _dot(context, gradient)

        own, paths = jax.vmap(one)(noise, gradients)
        return own.mean() + paths.sum() + _dot(
            {k: params[k] for k in config.learned}, learned
        ), own.mean()

    (_, own), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    return own, gradient


def _dot(tree: PyTree, gradient: PyTree) -> Array:
    products = jax.tree.map(jnp.vdot, tree, gradient)
    return sum(jax.tree.leaves(products), jnp.zeros(()))
