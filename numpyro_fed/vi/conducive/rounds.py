r"""Conducive rounds of SFVI, which reach the pooled optimum in about ten rounds.

:math:`q(\theta) = N(\mu, L L^\top)` is the product of Gaussian approximate factors: :math:`t_0` for
the prior, and one, :math:`t_s`, for each silo. In a round each silo integrates its latents out at
points :math:`\theta_k = \mu + L u_k`, which are the same in all silos. Its new approximate factor
is the Gaussian whose score is nearest, in least squares over q, to that of the silo's marginal
likelihood:

.. math::

    \min_{a, B} \; E_{u \sim N(0, I)}
    \left| \nabla_u \log p(y_s \mid \mu + L u) - (a_s - B_s u) \right|^2 .

The product of the new factors is a natural-gradient step of length one on the pooled bound

.. math:: E_q \Big[ \log p(\theta) + \sum_s \log p(y_s \mid \theta) - \log q(\theta) \Big],

whatever the partition; the server accelerates it. Derived in docs/derivations/conducive.md.

Law and bias: the Gaussian nearest to the posterior of theta in KL(q || p). Latents are integrated
by quadrature (several together: Laplace), or with optimizers by the guide's law. The only
randomness is that of changing points and rows, and of the guide's draws of latents. It leaves noise
in q's mean and sds.

What leaves a silo in a round: the change of its approximate factor, ``d + d (d + 1) / 2`` numbers
(diagonal: ``2 d``), its mean log likelihood, and a flag of finite numbers. With optimizers its
copies leave too, times its share of the rows.

References: the approximate factors are those of partitioned variational inference (Ashman et al.
2022), and the step is the natural gradient of Khan & Lin (2017), as in Lin, Khan & Schmidt (2019).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.natural_step import (
    ApproxFactor,
    History,
    carried,
    natural_step,
    packed,
    unpacked,
)
from numpyro_fed.vi.conducive.quasi_newton import Memory
from numpyro_fed.vi.conducive.silo_factor import (
    Points,
    at_once_of,
    far_points,
    prior_factor,
    silo_factor,
    uses_pairs,
    whitening,
)
from numpyro_fed.vi.conducive.states import Message, Reply, Server, SiloState
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.guides.scales import relative
from numpyro_fed.vi.local_steps import all_rows, first_optim_states, row_count, steps
from numpyro_fed.vi.sfvi import Info, all_finite

# largest share of a silo's points whose numbers may be not finite: of 4 d points 2 d are left, for
# d + 1 coefficients of a score
_MOST_MISSING = 0.5
# move of the round before, in sds and log sds, above which a round has few points; the last two or
# three rounds have all (four models)
_FAR = 0.3


def federated(config: FitConfig, stacks: list[SiloRows]) -> Federated:
    """Return the algorithm as ``init / broadcast / local / merge``."""
    total = all_rows(config, stacks)
    at_once = min(at_once_of(config, rows, len(rows.number)) for rows in stacks)
    num = sum(len(rows.number) for rows in stacks)
    return Federated(
        partial(init, config, num),
        partial(broadcast, config, total),
        partial(local, config, at_once=at_once),
        partial(merge, config, stacks[0]),
    )


def _no_site(config: FitConfig) -> ApproxFactor:
    d = config.factors.dim
    return ApproxFactor(
        jnp.zeros(d), jnp.zeros((d, d) if config.normal().global_cov == "full" else d)
    )


def _nothing_known(config: FitConfig) -> History | Memory:
    full = config.normal().global_cov == "full"
    return History.none(_no_site(config)) if full else Memory.none(config.factors.dim)


def init(config: FitConfig, num_silos: int, key: Array, params: dict[str, Array]) -> Server:
    """Return the server's first state, in which no silo has replied."""
    zero = jnp.zeros((), jnp.int32)
    return Server(
        params,
        None,
        _no_site(config),
        jnp.zeros(num_silos),
        _nothing_known(config),
        jnp.full((), jnp.inf, jnp.result_type(float)),
        zero,
        zero,
        key,
    )


def init_silo(config: FitConfig, part: int, params: dict[str, Array], local: PyTree) -> SiloState:
    """Return a silo's first state."""
    first = SiloState(local, params, _no_site(config), jnp.zeros(1, jnp.int32))
    if config.optim is None:
        return first
    moving, own = first_optim_states(config, part, params, local)
    return first._replace(optim_state=moving, local_optim_state=own)


def broadcast(config: FitConfig, total: Array, key: Array, server: Server) -> Message:
    """Send q and the other global parameters."""
    del key
    return Message(
        server.params,
        server.i if uses_pairs(config) else None,
        _far(config, server),
        None if config.optim is None else total,
    )


def _far(config: FitConfig, server: Server) -> Array | None:
    """Return whether q moves so far that fewer points show where; ``None`` where none do."""
    return server.moved > _FAR if far_points(config) else None


# jitted: a fit traces it once for its rounds and for their costs
@partial(jax.jit, static_argnames=("config", "at_once"))
def local(
    config: FitConfig,
    key: Array,
    message: Message,
    state: SiloState,
    rows: SiloRows,
    at_once: int | None = None,
) -> tuple[Reply, SiloState]:
    """Compute a silo's approximate factor and local map around the server's q.

    :param at_once: number of points evaluated together; ``None``: as many as for one silo alone.
    """
    at_once = at_once_of(config, rows, 1) if at_once is None else at_once
    family, own = config.normal(rows.part), state.params
    old, now = config.constrain(state.base), config.constrain(message.params)
    moved = (
        family.whiten(old, now[f"{family.prefix}_loc"]),
        relative(family.scale(old), family.scale(now)),
    )
    key_steps, key_site = random.split(key)
    told: dict[str, PyTree] = {}
    new_state = state
    if config.optim is not None:
        share = row_count(config, rows) / jnp.asarray(message.total)
        own = family.rebased(own, old, now) if family.has_local else own
        done = steps(
            config,
            message.params,
            own,
            state.optim_state,
            state.local_optim_state,
            1 / share,
            key_steps,
            rows,
        )
        own = done.own
        new_state = state._replace(
            optim_state=done.optim_state, local_optim_state=done.local_optim_state
        )
        if config.moving:
            copies = config.constrain(done.params)
            told = {
                "params": {k: jax.tree.map(lambda x: share * x, copies[k]) for k in config.moving},
                "share": share,
            }
    value, new, fine, own = silo_factor(
        config, message.params, message.turn, message.far, own, key_site, rows, at_once
    )
    site = carried(state.site, *moved)
    finite = all_finite((new, value, own, told)) & (fine >= 1 - _MOST_MISSING)
    kept = new_state._replace(params=own, base=message.params, site=new)
    # A silo whose numbers are not finite contributes nothing in this round and keeps its state. In
    # a sum it sends NaN, which ends the fit: without it the sum would be that of the other silos.
    nothing = jnp.nan if config.secure_sum else 0.0
    kept = jax.tree.map(lambda x, y: jnp.where(finite, x, y), kept, state)._replace(
        missed=state.missed + ~finite
    )
    gained = jax.tree.map(lambda x, y: jnp.where(finite, x - y, nothing), new, site)
    told = jax.tree.map(lambda x: jnp.where(finite, x, nothing), told)
    return Reply(jnp.where(finite, value, nothing), packed(gained), finite, **told), kept


def merge(
    config: FitConfig, rows: SiloRows, server: Server, replies: Reply, weights: Array | None = None
) -> tuple[Server, Info]:
    """Set q to the product of all approximate factors and the prior's.

    :param weights: zero for a silo that did not answer; its factor stays. Other silos count once,
        whatever their probability.
    """
    # gain and value of a silo whose numbers are not finite are zero; a sum of replies is then NaN
    heard = jnp.ones_like(replies.finite) if config.secure_sum else replies.finite
    heard = heard if weights is None else heard & (weights > 0)
    gained = jax.tree.map(
        lambda x: jnp.where(heard.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0).sum(0), replies.gained
    )
    sites = jax.tree.map(jnp.add, server.sites, unpacked(gained, server.sites))
    asked = whitening(config, server.params, _far(config, server))
    prior, own = prior_factor(config, server.params, asked, server.i, rows)
    total = jax.tree.map(jnp.add, sites, prior)
    # that of a silo which is not heard is its last; a sum has no values of single silos
    last = jnp.zeros_like(replies.value) if config.secure_sum else server.values
    values = jnp.where(heard, replies.value, last)
    loss = -(own + jnp.sum(values))
    everyone = jnp.array(True) if weights is None else (weights > 0).all()
    new, step, history = _step(config, server, asked, total, -loss, everyone, replies.finite.all())
    if replies.params is not None:
        new |= _averaged(config, server.params, replies, heard)
    params, sites = config.unconstrain(new), carried(sites, step.shift, step.factor)
    state = Server(
        params,
        None,
        sites,
        server.values if config.secure_sum else values,
        history,
        step.moved,
        server.held + step.held,
        server.i + 1,
        random.split(server.rng_key)[0],
    )
    return state, Info(loss, all_finite((params, sites, loss)), jnp.array(-1))


class _Step(NamedTuple):
    """Step of q, whitened by the q of before."""

    shift: Array
    factor: Array
    moved: Array
    held: Array


def _step(
    config: FitConfig,
    server: Server,
    asked: Points,
    total: ApproxFactor,
    bound: Array,
    everyone: Array,
    finite: Array,
) -> tuple[dict[str, Array], _Step, History | Memory]:
    """Return q's next parameters, in their supports, the step to them and the record of steps.

    :param asked: q before the step.
    :param total: the sum of all approximate factors.
    :param everyone: whether all silos answered.
    :param finite: whether all replies are finite.
    """
    prefix, noisy = config.normal().prefix, uses_pairs(config)
    mean = asked.loc
    if isinstance(server.history, Memory):
        move, memory = server.history.move(
            mean, asked.scale, total, bound, everyone & finite, noisy, config.optim is not None
        )
        step = _Step(
            (move.loc - mean) / asked.scale, move.scale / asked.scale, move.moved, move.held
        )
        return {f"{prefix}_loc": move.loc, f"{prefix}_scale": move.scale}, step, memory
    # with optimizers silos' own parameters follow q, and shorter steps would delay them
    averaged = noisy and config.optim is None
    *found, history = natural_step(server.history, total, everyone & (not noisy), averaged)
    step = _Step(*found)
    new = {
        f"{prefix}_loc": mean + matvec(asked.scale, step.shift),
        f"{prefix}_scale_tril": asked.scale @ step.factor,
    }
    return new, step, history


def _averaged(
    config: FitConfig, params: dict[str, Array], replies: Reply, heard: Array
) -> dict[str, Array]:
    """Return the silos' moved parameters, averaged by rows over the silos that replied."""
    share = jnp.sum(jnp.where(heard, jnp.asarray(replies.share), 0.0))

    def one(several: Array, last: Array) -> Array:
        total = jnp.where(heard.reshape(-1, *[1] * last.ndim), several, 0.0).sum(0)
        return jnp.where(share > 0, total / jnp.where(share > 0, share, 1.0), last)

    return jax.tree.map(
        one, replies.params, {k: config.constrain(params)[k] for k in config.moving}
    )
