"""A silo's steps between two rounds.

Its optimisers on its own part of the bound, as large as if all data were like its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax, random

from numpyro_fed.data.views import SiloRows
from numpyro_fed.vi.bound import silo_bound
from numpyro_fed.vi.config import Plan
from numpyro_fed.vi.minibatch import Batch, pick
from numpyro_fed.vi.sfvi import server_gradient

__all__ = ["Steps", "all_rows", "first_optim_states", "row_count", "steps"]


class Steps(NamedTuple):
    """After the steps.

    Global parameters and the silo's own, its optimisers' states, and the objective at each step.
    """

    params: dict[str, Array]
    own: Any
    optim_state: Any
    local_optim_state: Any
    values: Array


def row_count(plan: Plan, rows: SiloRows) -> Array:
    """Number of a silo's rows that no index points to (of stacked silos: of each)."""
    targets = {target for _, target in plan.families[rows.part].factors.index}
    return sum((n for g, n in rows.sizes.items() if g not in targets), jnp.zeros((), jnp.int32))


def all_rows(plan: Plan, stacks: list[SiloRows]) -> Array:
    """The same of all silos."""
    return sum((jnp.sum(row_count(plan, rows)) for rows in stacks), jnp.zeros((), jnp.int32))


def first_optim_states(
    plan: Plan, part: int, params: dict[str, Array], own: Any
) -> tuple[Any, Any]:
    """Of the global parameters that move, and of the silo's own."""
    first = jax.vmap(plan.local_optim.init) if plan.unit_clocks(part) else plan.local_optim.init
    return plan.optim.init({k: params[k] for k in plan.moving}), first(own)


def steps(
    plan: Plan,
    params: dict[str, Array],
    own: Any,
    optim_state: Any,
    local_state: Any,
    scale: Array,
    key: Array,
    rows: SiloRows,
) -> Steps:
    """``num_local_steps`` of them.

    :param scale: of the silo's term, the number of all rows over its own.
    """
    family = plan.families[rows.part]
    still = {k: v for k, v in params.items() if k not in plan.moving}

    def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
        moving, own, optim_state, local_state = carry
        value, gradient, gradient_own, batch = _gradients(
            plan, {**still, **moving}, own, scale, key, rows
        )
        downhill = jax.tree.map(jnp.negative, {k: gradient[k] for k in moving})
        updates, optim_state = plan.optim.update(downhill, optim_state, moving)
        moving = optax.apply_updates(moving, updates)
        if family.has_local:
            held, held_state = batch.take(own), batch.take(local_state)
            down = jax.tree.map(jnp.negative, gradient_own)
            move = (
                jax.vmap(plan.local_optim.update)
                if plan.unit_clocks(rows.part)
                else plan.local_optim.update
            )
            updates, held_state = move(down, held_state, held)
            own = batch.put(own, optax.apply_updates(held, updates))
            local_state = batch.put(local_state, held_state)
        return (moving, own, optim_state, local_state), value

    start = ({k: params[k] for k in plan.moving}, own, optim_state, local_state)
    (moving, own, optim_state, local_state), values = lax.scan(
        step, start, random.split(key, plan.num_local_steps)
    )
    return Steps({**still, **moving}, own, optim_state, local_state, values)


def _gradients(
    plan: Plan, params: dict[str, Array], own: Any, scale: Array, key: Array, rows: SiloRows
) -> tuple[Array, Any, Any, Batch]:
    """The silo's objective and its gradients in its copy of the global parameters and in its own."""
    family = plan.families[rows.part]
    key_theta, key_batch, key_local = random.split(key, 3)
    batch = pick(family, plan.batch, key_batch, rows)
    noise = jax.vmap(family.global_noise)(random.split(key_theta, plan.num_particles))
    constrained = plan.constrain(params)
    context = jax.vmap(lambda e: family.context(constrained, e))(noise)
    effective, pull = jax.vjp(lambda own: family.effective(own, batch.rows), batch.take(own))
    learned = {k: constrained[k] for k in plan.learned}

    def one(context: Any, key: Array) -> Any:
        eps = family.noise(key, batch.rows, plan.num_local_particles) if family.has_local else None
        return silo_bound(family, effective, context, learned, eps, batch)

    terms = jax.vmap(one)(context, random.split(key_local, plan.num_particles))
    terms = jax.tree.map(lambda x: scale * x / plan.num_particles, terms)
    value, moved = terms.value.sum(), jax.tree.map(lambda x: x.sum(0), (terms.params, terms.local))
    prior, gradient = server_gradient(plan, rows, params, noise, terms.context, moved[0])
    return prior + value, gradient, pull(moved[1])[0] if family.has_local else moved[1], batch
