"""Rounds over silos in this process: many rounds in one program."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random
from jax.stages import Lowered

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.rounds.federated import Cost, Ledger, message_bytes
from numpyro_fed.rounds.inline import quick_jit, round_all
from numpyro_fed.vi.algorithms import ALGORITHMS
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.loop import CHUNK, Rounds, VIState
from numpyro_fed.vi.participation import Participation, drawn
from numpyro_fed.vi.sfvi import Info


class InlineRounds(Rounds):
    """Rounds over silos in this process."""

    def start(
        self, rng_key: Array, params: dict[str, PyTree], local_params: list[PyTree]
    ) -> VIState:
        """Return the state before the first round.

        :param local_params: the silos' first parameters, for each stack.
        """
        setup = self.setup
        return _first_state(
            self.algorithm, setup.config, setup.stacks, rng_key, params, local_params
        )

    def __call__(self, state: VIState, num: int) -> tuple[VIState, np.ndarray, np.ndarray]:
        config, stacks = self.setup.config, self.setup.stacks
        state = state if self.who is None else _own_clocks(state, stacks)
        program = _few_rounds if self.setup.config.conducive else _many_rounds
        state, losses, bad = program(
            self.federated, config, self.who, state, stacks, jnp.asarray(num, jnp.int32)
        )
        return state, np.asarray(losses)[:num], np.asarray(bad)[:num]

    def lower(self, state: VIState) -> Lowered:
        """Return the program of the rounds from a state, traced and not yet compiled."""
        setup, num = self.setup, jnp.asarray(0, jnp.int32)
        program = _few_rounds.alone if setup.config.conducive else _many_rounds
        return program.lower(self.federated, setup.config, self.who, state, setup.stacks, num)

    def ledger(self, state: VIState, order: tuple[str, ...]) -> Ledger:
        config, names = self.setup.config, self.setup.names
        visits = dict(zip(names, np.asarray(state.visits), strict=True))
        costs: dict[str, Cost] = {}
        for rows, own in zip(self.setup.stacks, state.silos, strict=True):

            def one(server: PyTree, own: PyTree, rows: SiloRows = rows) -> tuple[PyTree, PyTree]:
                own = jax.tree.map(lambda x: x[0] if x.ndim else x, own)
                alone = jax.tree.map(
                    lambda x, axis: x if axis is None else x[0],
                    rows,
                    rows.axes,
                    is_leaf=lambda x: x is None,
                )
                algorithm = self.functions()
                message = algorithm.broadcast(random.key(0), server)
                return message, algorithm.local(random.key(0), message, own, alone)[0]

            message, reply = jax.eval_shape(one, state.server, own)
            each = Cost(
                1, config.evaluations(rows.part), message_bytes(message), message_bytes(reply)
            )
            mine = names[len(costs) : len(costs) + len(rows.number)]
            costs |= {name: each.times(int(visits[name])) for name in mine}
        return Ledger(order, *zip(*(costs[name] for name in order), strict=True))


def advance(
    federated: Callable,
    config: FitConfig,
    who: Participation | None,
    state: VIState,
    stacks: list[SiloRows],
) -> tuple[VIState, Info]:
    """Make one round."""
    key_round, weights = drawn(who, state.server.rng_key)
    algorithm = federated(config, stacks)
    server, info, silos = round_all(
        algorithm, key_round, state.server, list(state.silos), stacks, weights
    )
    asked = (
        jnp.ones_like(state.visits) if weights is None else (weights > 0).astype(state.visits.dtype)
    )
    return VIState(server, tuple(silos), state.visits + asked), info


def _chunk(
    federated: Callable,
    config: FitConfig,
    who: Participation | None,
    state: VIState,
    stacks: list[SiloRows],
    num: Array,
) -> tuple[VIState, Array, Array]:
    """Make up to ``CHUNK`` rounds.

    :return: the state; each round's loss; and for each round the silo whose numbers were not finite
        (-1: none, -2: the server).
    """

    def body(i: Array, carry: tuple) -> tuple:
        state, losses, bad = carry
        state, info = advance(federated, config, who, state, stacks)
        where = jnp.where(info.finite, -1, jnp.where(info.silo < 0, -2, info.silo))
        return state, losses.at[i].set(info.loss), bad.at[i].set(where)

    losses, bad = jnp.zeros(CHUNK, jnp.result_type(float)), jnp.full(CHUNK, -1, jnp.int32)
    return lax.fori_loop(0, num, body, (state, losses, bad))


_many_rounds = jax.jit(_chunk, static_argnames=("federated", "config", "who"))
_few_rounds = quick_jit("federated", "config", "who")(_chunk)


@partial(jax.jit, static_argnames=("algorithm", "config"))
def _first_state(
    algorithm: str,
    config: FitConfig,
    stacks: list[SiloRows],
    rng_key: Array,
    params: dict[str, PyTree],
    local_params: list[PyTree],
) -> VIState:
    """Return the state before the first round."""
    functions = ALGORITHMS[algorithm]
    silos = tuple(
        _in_step(config, partial(functions.init_silo, config, rows.part, params), local)
        for rows, local in zip(stacks, local_params, strict=True)
    )
    server = functions.federated(config, stacks).init(rng_key, params)
    visits = jnp.zeros(sum(len(rows.number) for rows in stacks), jnp.int32)
    return VIState(server, silos, visits)


def _in_step(config: FitConfig, first: Callable, local: PyTree) -> PyTree:
    """Return the first states of a stack of silos.

    An optimizer's clock is the same number in all silos while all take part. It is then stored once
    for the stack.
    """
    own = config.conducive or not (_keeps_time(config.optim) and _keeps_time(config.local_optim))
    # clocks may differ: a conducive silo whose numbers are not finite does not advance its clock
    if config.optim is not None and own:
        return jax.vmap(first)(local)
    one = jax.eval_shape(first, jax.tree.map(lambda x: x[0], local))
    clocks = jax.tree.map(_is_clock, one)
    return jax.tree.map(lambda x, clock: x[0] if clock else x, jax.vmap(first)(local), clocks)


def _is_clock(x: PyTree) -> bool:
    return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def _keeps_time(optim: optax.GradientTransformation) -> bool:
    """Return whether an optimizer's clocks do not depend on gradients.

    Those of ``optax.apply_if_finite`` do.
    """
    params = {"": jnp.zeros((2, 1))}
    try:
        clocks = jax.tree.map(_is_clock, optim.init({"": params[""][0]}))
        state = jax.tree.map(
            lambda x, clock: x[0] if clock else x, jax.vmap(optim.init)(params), clocks
        )
        axes = jax.tree.map(lambda clock: None if clock else 0, clocks)
        jax.eval_shape(
            jax.vmap(optim.update, in_axes=(0, axes, 0), out_axes=(0, axes)), params, state, params
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        # an optimizer that knows parameters by name also fails; each silo then has its own clock
        return False
    return True


def _own_clocks(state: VIState, stacks: list[SiloRows]) -> VIState:
    """Return the state with a clock for each silo, for rounds that not all silos take part in."""

    def each(own: PyTree, rows: SiloRows) -> PyTree:
        return jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, rows.number.shape), own)

    return state._replace(
        silos=tuple(each(own, rows) for own, rows in zip(state.silos, stacks, strict=True))
    )
