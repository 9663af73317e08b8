r"""Conducive rounds of SFVI-Avg.

A Gaussian site for every silo, and the pooled optimum in about ten rounds.

:math:`q(\theta) = N(\mu, L L^\top)` is the product of a Gaussian site :math:`t_0` for the prior and
one, :math:`t_s`, for each silo. In a round a silo integrates its latents out at the same points
:math:`\theta_k = \mu + L u_k` in all silos, and its new site is the Gaussian whose score is
nearest, in least squares over q, to that of its marginal likelihood:

.. math:: \min_{a, B} \; E_{u \sim N(0, I)} \left| \nabla_u \log p(y_s \mid \mu + L u) - (a_s - B_s u) \right|^2 .

By Stein's lemma :math:`B_s = -E_q \nabla_u^2 \log p(y_s \mid \theta)` and :math:`a_s = E_q \nabla_u
\log p(y_s \mid \theta)`: the product of the new sites is a natural-gradient step of length one on
the pooled bound

.. math:: E_q \Big[ \log p(\theta) + \sum_s \log p(y_s \mid \theta) - \log q(\theta) \Big],

a Newton step near its optimum, whatever the partition. Where the posterior is skewed such steps
overshoot by turns; the server corrects them by Anderson's acceleration of the fixed-point iteration
(Walker & Ni 2011), which costs no message. With diagonal sites it would be a step of Jacobi's
method, far too long where coordinates are correlated: the server then learns how they pull together
from its own last rounds (:mod:`numpyro_fed.vi.conducive.quasi_newton`), in tens of them. Each silo
contributes what it has, and all others' sites stand in for what it lacks, as conducive gradients do
for Langevin steps. A silo that does not answer keeps its site, so that missing replies slow the
rounds and do not move their fixed point. Its local map is regressed on the same points.

Diagonal sites of more than 256 dimensions are averages over 512 pairs of points, others in each
round, and with ``batch_size`` each pair of points looks at so many of a silo's rows, at others in
each round (:mod:`numpyro_fed.vi.conducive.pairs`).

With optimisers (:mod:`numpyro_fed.vi.local_steps`) a silo's latents follow its local map, which
moves by steps in each round before the site is found, as do copies of networks' weights and learned
parameters, which the server averages; the site is then of the silo's bound, at the server's learned
parameters.

Law and bias: the Gaussian nearest to the posterior of theta in KL(q || p), latents integrated by
quadrature (for several together: Laplace), with optimisers those of the guide. No randomness but
that of points and rows that change and of the guide's draws of latents, which leave q's mean and
sds with noise. What leaves a silo in a round: how its site changed, ``d + d (d + 1) / 2`` numbers
(diagonal: ``2 d``), its mean log likelihood, whether all is finite, and with optimisers its copies
times its share of the rows.

References: the sites are those of partitioned variational inference (Ashman et al. 2022), where
each silo goes to its own optimum; the step is the natural gradient of Khan & Lin (2017), with
Stein's lemma as in Lin, Khan & Schmidt (2019). Derived in docs/conducive.md.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed.data.views import SiloRows
from numpyro_fed.rounds.federated import Federated
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.natural_step import (
    History,
    Site,
    carried,
    natural_step,
    packed,
    unpacked,
)
from numpyro_fed.vi.conducive.quasi_newton import Memory
from numpyro_fed.vi.conducive.silo_factor import (
    at_once_of,
    by_pairs,
    prior_site,
    silo_site,
    whitening,
)
from numpyro_fed.vi.config import Plan
from numpyro_fed.vi.guides.scales import relative
from numpyro_fed.vi.local_steps import all_rows, first_optim_states, row_count, steps
from numpyro_fed.vi.sfvi import Info, all_finite

__all__ = ["federated", "init_silo"]

_MOST_MISSING = 0.5  # share of a silo's points that may be no numbers


@wire_name("ConduciveServer")
class Server(NamedTuple):
    """The server's state.

    :param params: of q(theta), unconstrained.
    :param average: none is kept.
    :param sites: the sum of the silos' sites, whitened by q.
    :param history: what is known of the steps before.
    :param moved: sds that the last round's sites alone would move q, or a like measure of its
        spread, the larger.
    :param held: rounds in which the product of the sites was no Gaussian, or too far, and q went a
        part of the way.
    """

    params: dict[str, Array]
    average: None
    sites: Site
    history: History | Memory
    moved: Array
    held: Array
    i: Array
    rng_key: Array


@wire_name("ConduciveSiloState")
class SiloState(NamedTuple):
    """What never leaves a silo.

    Its local map and its site, whitened by q as it was in its last round, rounds without a finite
    reply, and its optimisers' states.
    """

    params: Any
    base: dict[str, Array]
    site: Site
    missed: Array
    optim_state: Any = None
    local_optim_state: Any = None


@wire_name("ConduciveMessage")
class Message(NamedTuple):
    """To every silo.

    The global parameters, which points and rows, where they change, and, of rounds with optimisers,
    the number of rows in all silos.
    """

    params: dict[str, Array]
    turn: Array | None
    total: Array | None


class Reply(NamedTuple):
    """From a silo.

    ``E_q[log p(y_s | theta)]``, how its site changed (of the precision the lower triangle), whether
    all is finite, and, of what its optimisers move of the global parameters, its copy times its
    share of the rows, and that share.
    """

    value: Array
    gained: Site
    finite: Array
    params: dict[str, Array] | None = None
    share: Array | None = None


def federated(plan: Plan, stacks: list[SiloRows]) -> Federated:
    """The algorithm as ``init / broadcast / local / merge``."""
    total = all_rows(plan, stacks)
    at_once = min(at_once_of(plan, rows, len(rows.number)) for rows in stacks)
    return Federated(
        partial(init, plan),
        partial(broadcast, plan, total),
        partial(local, plan, at_once=at_once),
        partial(merge, plan, stacks[0]),
    )


def _no_site(plan: Plan) -> Site:
    d = plan.factors.dim
    return Site(jnp.zeros(d), jnp.zeros((d, d) if plan.families[0].global_cov == "full" else d))


def _nothing_known(plan: Plan) -> History | Memory:
    full = plan.families[0].global_cov == "full"
    return History.none(_no_site(plan)) if full else Memory.none(plan.factors.dim)


def init(plan: Plan, key: Array, params: dict[str, Array]) -> Server:
    """The server's first state: no silo has said anything."""
    zero = jnp.zeros((), jnp.int32)
    return Server(
        params,
        None,
        _no_site(plan),
        _nothing_known(plan),
        jnp.full((), jnp.inf, jnp.result_type(float)),
        zero,
        zero,
        key,
    )


def init_silo(plan: Plan, part: int, params: dict[str, Array], local: Any) -> SiloState:
    """A silo's first state."""
    first = SiloState(local, params, _no_site(plan), jnp.zeros(1, jnp.int32))
    if plan.optim is None:
        return first
    moving, own = first_optim_states(plan, part, params, local)
    return first._replace(optim_state=moving, local_optim_state=own)


def broadcast(plan: Plan, total: Array, key: Array, server: Server) -> Message:
    """Send q."""
    del key
    return Message(
        server.params, server.i if by_pairs(plan) else None, None if plan.optim is None else total
    )


def local(
    plan: Plan,
    key: Array,
    message: Message,
    state: SiloState,
    rows: SiloRows,
    at_once: int | None = None,
) -> tuple[Reply, SiloState]:
    """The silo's site and local map around the server's q.

    :param at_once: points that are looked at together; ``None``: as many as a silo alone may.
    """
    at_once = at_once_of(plan, rows, 1) if at_once is None else at_once
    family, own = plan.families[rows.part], state.params
    old, now = plan.constrain(state.base), plan.constrain(message.params)
    moved = (
        family.whiten(old, now[f"{family.prefix}_loc"]),
        relative(family.scale(old), family.scale(now)),
    )
    key_steps, key_site = random.split(key)
    told: dict[str, Any] = {}
    new_state = state
    if plan.optim is not None:
        share = row_count(plan, rows) / jnp.asarray(message.total)
        own = family.rebased(own, old, now) if family.has_local else own
        done = steps(
            plan,
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
        if plan.moving:
            copies = plan.constrain(done.params)
            told = {
                "params": {k: jax.tree.map(lambda x: share * x, copies[k]) for k in plan.moving},
                "share": share,
            }
    value, new, fine, own = silo_site(
        plan, message.params, message.turn, own, key_site, rows, at_once
    )
    site = carried(state.site, *moved)
    finite = all_finite((new, value, own, told)) & (fine >= 1 - _MOST_MISSING)
    kept = new_state._replace(params=own, base=message.params, site=new)
    # a silo whose numbers are not finite says nothing in this round, and keeps what it had
    kept = jax.tree.map(lambda x, y: jnp.where(finite, x, y), kept, state)._replace(
        missed=state.missed + ~finite
    )
    gained = jax.tree.map(lambda x, y: jnp.where(finite, x - y, 0.0), new, site)
    told = jax.tree.map(lambda x: jnp.where(finite, x, 0.0), told)
    return Reply(jnp.where(finite, value, 0.0), packed(gained), finite, **told), kept


def merge(
    plan: Plan, rows: SiloRows, server: Server, replies: Reply, weights: Array | None = None
) -> tuple[Server, Info]:
    """The product of all sites and the prior's.

    :param weights: zero for a silo that did not answer; its site stays. Others count once, whatever
        their probability.
    """
    family = plan.families[0]
    # of a silo whose numbers are not finite gain and value are zero; in a sum its flag is
    # everybody's, and says nothing of the others' gains
    heard = jnp.ones_like(replies.finite) if plan.secure_sum else replies.finite
    heard = heard if weights is None else heard & (weights > 0)
    gained = jax.tree.map(
        lambda x: jnp.where(heard.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0).sum(0), replies.gained
    )
    sites = jax.tree.map(jnp.add, server.sites, unpacked(gained, server.sites))
    asked = whitening(plan, server.params)
    prior, own = prior_site(plan, server.params, asked, server.i, rows)
    total = jax.tree.map(jnp.add, sites, prior)
    loss = -(own + jnp.sum(jnp.where(heard, replies.value, 0.0)))
    everyone = jnp.array(True) if weights is None else (weights > 0).all()
    noisy = by_pairs(plan)
    mean = plan.constrain(server.params)[f"{family.prefix}_loc"]
    history: History | Memory
    if isinstance(server.history, Memory):
        move, history = server.history.move(
            mean,
            asked.scale,
            total,
            -loss,
            everyone & replies.finite.all(),
            noisy,
            plan.optim is not None,
        )
        new = {f"{family.prefix}_loc": move.loc, f"{family.prefix}_scale": move.scale}
        shift, factor, moved, held = (
            (move.loc - mean) / asked.scale,
            move.scale / asked.scale,
            move.moved,
            move.held,
        )
    else:
        accelerated = everyone & (not noisy)
        averaged = (
            noisy and plan.optim is None
        )  # silos' own parameters go with q, and would wait for it
        shift, factor, moved, held, history = natural_step(
            server.history, total, accelerated, averaged
        )
        new = {
            f"{family.prefix}_loc": mean + matvec(asked.scale, shift),
            f"{family.prefix}_scale_tril": asked.scale @ factor,
        }
    if replies.params is not None:
        new |= _averaged(plan, server.params, replies, heard)
    params, sites = plan.unconstrain(new), carried(sites, shift, factor)
    state = Server(
        params,
        None,
        sites,
        history,
        moved,
        server.held + held,
        server.i + 1,
        random.split(server.rng_key)[0],
    )
    return state, Info(loss, all_finite((params, sites, loss)), jnp.array(-1))


def _averaged(
    plan: Plan, params: dict[str, Array], replies: Reply, heard: Array
) -> dict[str, Array]:
    """What the silos' optimisers moved, by rows, of those that were heard."""
    share = jnp.sum(jnp.where(heard, jnp.asarray(replies.share), 0.0))

    def one(several: Array, last: Array) -> Array:
        total = jnp.where(heard.reshape(-1, *[1] * last.ndim), several, 0.0).sum(0)
        return jnp.where(share > 0, total / jnp.where(share > 0, share, 1.0), last)

    return jax.tree.map(one, replies.params, {k: plan.constrain(params)[k] for k in plan.moving})
