"""Local steps of a silo between two rounds.

A silo's optimizers work on the silo's own part of the bound, scaled as if all data were like its
own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.vi.bound import server_gradient, silo_bound
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.minibatch import Batch, pick


class Steps(NamedTuple):
    """State after the local steps.

    :param params: global parameters, unconstrained.
    :param own: the silo's own parameters.
    :param optim_state: the state of the optimizer of the global parameters.
    :param local_optim_state: the state of the optimizer of the silo's own parameters.
    :param values: the objective at each step.
    """

    params: dict[str, Array]
    own: PyTree
    optim_state: PyTree
    local_optim_state: PyTree
    values: Array


def row_count(config: FitConfig, rows: SiloRows) -> Array:
    """Return the number of a silo's rows that no index points to (for a stack: of each silo)."""
    targets = {target for _, target in config.families[rows.part].factors.index}
    return sum((n for g, n in rows.sizes.items() if g not in targets), jnp.zeros((), jnp.int32))


def all_rows(config: FitConfig, stacks: list[SiloRows]) -> Array:
    """Return the number of rows of all silos that no index points to."""
    return sum((jnp.sum(row_count(config, rows)) for rows in stacks), jnp.zeros((), jnp.int32))


def first_optim_states(
    config: FitConfig, part: int, params: dict[str, Array], own: PyTree
) -> tuple[PyTree, PyTree]:
    """Return first optimizer states: of the global parameters that move, and of the silo's own."""
    assert config.optim is not None
    assert config.local_optim is not None
    first = (
        jax.vmap(config.local_optim.init) if config.unit_clocks(part) else config.local_optim.init
    )
    return config.optim.init({k: params[k] for k in config.moving}), first(own)


def steps(
    config: FitConfig,
    params: dict[str, Array],
    own: PyTree,
    optim_state: PyTree,
    local_state: PyTree,
    scale: Array,
    key: Array,
    rows: SiloRows,
) -> Steps:
    """Make ``num_local_steps`` steps on a silo's objective.

    :param scale: factor of the silo's term: the number of all rows over the number of its own.
    """
    family = config.families[rows.part]
    still = {k: v for k, v in params.items() if k not in config.moving}

    def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
        assert config.optim is not None
        assert config.local_optim is not None
        moving, own, optim_state, local_state = carry
        value, gradient, gradient_own, batch = _gradients(
            config, {**still, **moving}, own, scale, key, rows
        )
        downhill = jax.tree.map(jnp.negative, {k: gradient[k] for k in moving})
        updates, optim_state = config.optim.update(downhill, optim_state, moving)
        moving = optax.apply_updates(moving, updates)
        if family.has_local:
            held, held_state = batch.take(own), batch.take(local_state)
            down = jax.tree.map(jnp.negative, gradient_own)
            move = (
                jax.vmap(config.local_optim.update)
                if config.unit_clocks(rows.part)
                else config.local_optim.update
            )
            updates, held_state = move(down, held_state, held)
            own = batch.put(own, optax.apply_updates(held, updates))
            local_state = batch.put(local_state, held_state)
        return (moving, own, optim_state, local_state), value

    start = ({k: params[k] for k in config.moving}, own, optim_state, local_state)
    (moving, own, optim_state, local_state), values = lax.scan(
        step, start, random.split(key, config.num_local_steps)
    )
    return Steps({**still, **moving}, own, optim_state, local_state, values)


def _gradients(
    config: FitConfig,
    params: dict[str, Array],
    own: PyTree,
    scale: Array,
    key: Array,
    rows: SiloRows,
) -> tuple[Array, PyTree, PyTree, Batch]:
    """Return a silo's objective, its gradients and the batch.

    The gradients are those in the silo's copy of the global parameters and in its own parameters.
    """
    family = config.families[rows.part]
    key_theta, key_batch, key_local = random.split(key, 3)
    batch = pick(family, config.batch, key_batch, rows)
    noise = jax.vmap(family.global_noise)(random.split(key_theta, config.num_particles))
    constrained = config.constrain(params)
    context = jax.vmap(lambda e: family.context(constrained, e))(noise)
    effective, pull = jax.vjp(lambda own: family.effective(own, batch.rows), batch.take(own))
    learned = {k: constrained[k] for k in config.learned}

    def one(context: PyTree, key: Array) -> PyTree:
        eps = (
            family.noise(key, batch.rows, config.num_local_particles) if family.has_local else None
        )
        return silo_bound(family, effective, context, learned, eps, batch)

    terms = jax.vmap(one)(context, random.split(key_local, config.num_particles))
    terms = jax.tree.map(lambda x: scale * x / config.num_particles, terms)
    value, moved = terms.value.sum(), jax.tree.map(lambda x: x.sum(0), (terms.params, terms.local))
    prior, gradient = server_gradient(config, rows, params, noise, terms.context, moved[0])
    return prior + value, gradient, pull(moved[1])[0] if family.has_local else moved[1], batch
