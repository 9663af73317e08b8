r"""Conducive rounds of SFVI-Avg: a Gaussian site for every silo, and the pooled optimum in about ten rounds.

:math:`q(\theta) = N(\mu, L L^\top)` is the product of a Gaussian site :math:`t_0` for the prior and one, :math:`t_s`, for each silo. In a round
a silo integrates its latents out at the same points :math:`\theta_k = \mu + L u_k` in all silos, and its new site is the Gaussian whose score is nearest, in
least squares over q, to that of its marginal likelihood:

.. math:: \min_{a, B} \; E_{u \sim N(0, I)} \left| \nabla_u \log p(y_s \mid \mu + L u) - (a_s - B_s u) \right|^2 .

By Stein's lemma :math:`B_s = -E_q \nabla_u^2 \log p(y_s \mid \theta)` and :math:`a_s = E_q \nabla_u \log p(y_s \mid \theta)`: the product of the new
sites is a natural-gradient step of length one on the pooled bound

.. math:: E_q \Big[ \log p(\theta) + \sum_s \log p(y_s \mid \theta) - \log q(\theta) \Big],

a Newton step near its optimum, whatever the partition. Where the posterior is skewed such steps overshoot by turns; the server corrects them
by Anderson's acceleration of the fixed-point iteration (Walker & Ni 2011), which costs no message. With diagonal sites it is
a step of Jacobi's method, far too long where coordinates are correlated: its length is then that of Barzilai & Borwein (1988), and it takes tens of rounds. Each silo contributes what it has, and all others' sites stand in for what it lacks, as
conducive gradients do for Langevin steps. A silo that does not answer keeps its site, so that missing replies slow the rounds
and do not move their fixed point. Its local map is regressed on the same points.

Law and bias: the Gaussian nearest to the posterior of theta in KL(q || p), latents integrated by quadrature (for several together: Laplace). No randomness.
What leaves a silo in a round: how its site changed, ``d + d (d + 1) / 2`` numbers (diagonal: ``2 d``), its mean log likelihood, and whether all is finite.

References: the sites are those of partitioned variational inference (Ashman et al. 2022), where each silo goes to its own optimum; the step is the
natural gradient of Khan & Lin (2017), with Stein's lemma as in Lin, Khan & Schmidt (2019). Derived in docs/conducive.md.
"""

import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.federation import Federated
from numpyro_fed.storage import SiloRows
from numpyro_fed.surrogates.gaussian import matvec
from numpyro_fed.surrogates.least_squares import fit_map, fit_score
from numpyro_fed.surrogates.local_score import Message as Points
from numpyro_fed.surrogates.local_score import look, points_at_once
from numpyro_fed.surrogates.points import sobol_normal
from numpyro_fed.vi.plan import Plan
from numpyro_fed.vi.rounds import VIState
from numpyro_fed.vi.scales import relative
from numpyro_fed.vi.sfvi import Info, all_finite
from numpyro_fed.vi.sites import History, Site, carried, packed, product, unpacked

__all__ = ["SETTLED", "JointUnits", "check", "federated", "init_silo", "num_points", "say_how_it_ended"]

_CAREFUL = 0.7  # share of a step that is taken where silos did not answer
_MOST_DIAGONAL = 1024  # points that a diagonal precision is worth
SETTLED = 0.1  # sds that q moves in a round
_MOST_MISSING = 0.5  # share of a silo's points that may be no numbers


class Server(NamedTuple):
    """The server's state.

    :param params: of q(theta), unconstrained.
    :param average: none is kept.
    :param sites: the sum of the silos' sites, whitened by q.
    :param history: what is known of the steps before.
    :param moved: sds that the last round's sites alone would move q, or a like measure of its spread, the larger.
    :param held: rounds in which the product of the sites was no Gaussian, or too far, and q went a part of the way.
    """

    params: dict[str, Array]
    average: None
    sites: Site
    history: History
    moved: Array
    held: Array
    i: Array
    rng_key: Array


class SiloState(NamedTuple):
    """What never leaves a silo: its local map and its site, whitened by q as it was in its last round, and rounds without a finite reply."""

    params: Any
    base: dict[str, Array]
    site: Site
    missed: Array


class Message(NamedTuple):
    """To every silo: q's parameters."""

    params: dict[str, Array]


class Reply(NamedTuple):
    """From a silo: ``E_q[log p(y_s | theta)]``, how its site changed (of the precision the lower triangle), and whether all is finite."""

    value: Array
    gained: Site
    finite: Array


class JointUnits(ValueError):
    """Elements of the silo plates depend on each other, so that a silo's latents are one unit, and the guide holds them apart."""


def check(plan: Plan, guide: Any) -> None:
    """Refuse what conducive rounds do not cover, in words."""
    if plan.learned:
        raise ValueError(
            f"conducive=True with learned parameters {list(plan.learned)}: expected latent sites alone (numpyro.sample in place of numpyro.param), or "
            "fed.SFVI, or conducive=False, which learn them"
        )
    if guide.amortize:
        raise ValueError(
            f"conducive=True: expected a guide without amortize=, got encoders of {sorted(guide.amortize)}: latents are integrated out, and local maps "
            "regressed"
        )
    local = [f for f in plan.families if f.has_local]
    if local and not (guide.coupling and guide.scale_coupling):
        raise ValueError(
            "conducive=True: expected a guide with coupling=True and scale_coupling=True, as its local maps are regressed on theta, got "
            f"coupling={guide.coupling}, scale_coupling={guide.scale_coupling}"
        )
    if guide.local_cov != "full" and any(f.group is None for f in local):
        raise JointUnits(
            f'conducive=True with latents that are one unit in a silo: expected a guide with local_cov="full", got {guide.local_cov!r}'
        )
    width = max((sum(math.prod(s.shape) for s in f.factors.local_sites) for f in local), default=1)
    if width > 1 and guide.local_cov == "diag":
        raise ValueError(
            f'conducive=True with {width} latents an element: expected a guide with local_cov="element", got "diag"'
        )


def say_how_it_ended(names: tuple[str, ...], state: VIState, summed: bool = False) -> None:
    """Warn of silos whose replies were no numbers, and of a fit that has not settled.

    :param summed: whether only sums were heard.
    """
    kept = state.silos if isinstance(state.silos, tuple) else (state.silos,)  # of silos elsewhere the server counts
    missed = np.concatenate([np.ravel(s.missed) for s in kept])
    visits, rounds = np.asarray(state.visits), int(state.server.i)
    if missed.any() and summed:
        warnings.warn(
            f"in {missed.max()} of {rounds} rounds the reply of one silo or more was not finite, and its site stood still; whose it was a sum does not tell. Have "
            "the silos look for NaN in their data, or for positions at which their likelihood has none",
            stacklevel=3,
        )
    elif missed.any():
        each = ", ".join(f"{name!r} {m} of {n}" for name, m, n in zip(names, missed, visits, strict=True) if m)
        warnings.warn(
            f"replies that were not finite, taken as missing (silo, rounds): {each}. Look for NaN in these silos' data, or for positions at which "
            "their likelihood has none",
            stacklevel=3,
        )
    moved = float(state.server.moved)
    if moved > SETTLED:
        held = int(state.server.held)
        why = (
            f"; in {held} of them the product of the sites was no Gaussian near the last one, and q was held back"
            if held
            else ""
        )
        warnings.warn(
            f"q has not settled: it moved by {moved:.2g} sds in the last of {rounds} rounds, expected at most {SETTLED}{why}. Go on with "
            "init_state=result.state, or start nearer (init_loc_fn, init_scale)",
            stacklevel=3,
        )


def num_points(steps: int, dim: int, full: bool) -> int:
    """Positions of theta at which silos look: a power of two, at least ``steps``, 64, and four times as many as dimensions (diagonal: up to 1,024)."""
    return 2 ** math.ceil(math.log2(max(64, steps, 4 * dim if full else min(4 * dim, _MOST_DIAGONAL))))


def federated(plan: Plan, stacks: list[SiloRows]) -> Federated:
    """The algorithm as ``init / broadcast / local / merge``."""
    at_once = min(_at_once(plan, rows, len(rows.number)) for rows in stacks)
    return Federated(
        partial(init, plan), broadcast, partial(local, plan, at_once=at_once), partial(merge, plan, stacks[0])
    )


def _at_once(plan: Plan, rows: SiloRows, num_silos: int) -> int:
    """Points at which so many silos look together."""
    family = plan.families[rows.part]
    return points_at_once(num_silos * max(n for _, n in rows.pad), family.units(rows) if family.has_local else None)


def _no_site(plan: Plan) -> Site:
    d = plan.factors.dim
    return Site(jnp.zeros(d), jnp.zeros((d, d) if plan.families[0].global_cov == "full" else d))


def init(plan: Plan, key: Array, params: dict[str, Array]) -> Server:
    """The server's first state: no silo has said anything."""
    zero = jnp.zeros((), jnp.int32)
    return Server(
        params,
        None,
        _no_site(plan),
        History.none(_no_site(plan)),
        jnp.full((), jnp.inf, jnp.result_type(float)),
        zero,
        zero,
        key,
    )


def init_silo(plan: Plan, part: int, params: dict[str, Array], local: Any) -> SiloState:
    """A silo's first state."""
    del part
    return SiloState(local, params, _no_site(plan), jnp.zeros(1, jnp.int32))


def broadcast(key: Array, server: Server) -> Message:
    """Send q."""
    del key
    return Message(server.params)


def _whitening(plan: Plan, params: dict[str, Array]) -> Points:
    """q's mean and root, and the points: the same in every round and silo, so that rounds are a fixed-point iteration."""
    family, constrained = plan.families[0], plan.constrain(params)
    d, full = plan.factors.dim, family.global_cov == "full"
    scale = constrained[f"{family.prefix}_scale_tril" if full else f"{family.prefix}_scale"]
    points = jnp.asarray(_table(num_points(plan.num_local_steps, d, full), d), scale.dtype)
    return Points(constrained[f"{family.prefix}_loc"], scale, points, jnp.ones(len(points)))


def _table(num: int, dim: int) -> np.ndarray:
    """Antithetic points with variances of exactly one and, where they are enough, no correlation, so that the diagonal of a constant precision is exact."""
    points = sobol_normal(num, dim, 0)
    if num >= 4 * dim:
        return np.linalg.solve(np.linalg.cholesky(points.T @ points / num), points.T).T
    return points / np.sqrt(np.mean(points**2, axis=0))


def local(
    plan: Plan, key: Array, message: Message, state: SiloState, rows: SiloRows, at_once: int | None = None
) -> tuple[Reply, SiloState]:
    """The silo's site and local map around the server's q.

    :param at_once: points that are looked at together; ``None``: as many as a silo alone may.
    """
    del key
    at_once = _at_once(plan, rows, 1) if at_once is None else at_once
    family = plan.families[rows.part]
    units = family.units(rows) if family.has_local else None
    asked = _whitening(plan, message.params)
    found = look(family.factors, units, asked, rows, at_once)
    weights = found.weights / jnp.maximum(found.weights.mean(), 1e-30)
    new = Site(*fit_score(asked.points, found.scores, weights, asked.scale.ndim == 2)[:2])
    old, now = plan.constrain(state.base), plan.constrain(message.params)
    moved = family.whiten(old, now[f"{family.prefix}_loc"]), relative(family.scale(old), family.scale(now))
    site = carried(state.site, *moved)
    value = jnp.mean(jnp.where(found.weights > 0, found.values, 0.0) * weights)
    own = state.params
    if units is not None:
        rows_of_map = fit_map(asked.points, *found.latents[0], weights, bent=False)
        own = type(own)(**{k: None if v is None else getattr(rows_of_map, k) for k, v in vars(own).items()})
    finite = all_finite((new, value, own)) & (jnp.mean(found.weights > 0) >= 1 - _MOST_MISSING)
    kept = SiloState(own, message.params, new, state.missed)
    # a silo whose numbers are not finite says nothing in this round, and keeps what it had
    kept = jax.tree.map(lambda x, y: jnp.where(finite, x, y), kept, state)._replace(missed=state.missed + ~finite)
    gained = jax.tree.map(lambda x, y: jnp.where(finite, x - y, 0.0), new, site)
    return Reply(jnp.where(finite, value, 0.0), packed(gained), finite), kept


def merge(
    plan: Plan, rows: SiloRows, server: Server, replies: Reply, weights: Array | None = None
) -> tuple[Server, Info]:
    """The product of all sites and the prior's.

    :param weights: zero for a silo that did not answer; its site stays. Others count once, whatever their probability.
    """
    family = plan.families[0]
    # of a silo whose numbers are not finite gain and value are zero; in a sum its flag is everybody's, and says nothing of the others' gains
    heard = jnp.ones_like(replies.finite) if plan.secure_sum else replies.finite
    heard = heard if weights is None else heard & (weights > 0)
    gained = jax.tree.map(lambda x: jnp.where(heard.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0).sum(0), replies.gained)
    sites = jax.tree.map(jnp.add, server.sites, unpacked(gained, server.sites))
    asked = _whitening(plan, server.params)
    prior, own = _prior_site(plan, server.params, asked, rows)
    total = jax.tree.map(jnp.add, sites, prior)
    one = jnp.ones(()) if total.precision.ndim == 1 else jnp.eye(plan.factors.dim)
    residual = Site(total.linear, total.precision - one)
    everyone = jnp.array(True) if weights is None else (weights > 0).all()
    step, history = server.history.step(residual)
    step = jax.tree.map(lambda x, y: jnp.where(everyone, x, _CAREFUL * y), step, residual)
    loc, root, _, held = product(Site(step.linear, one + step.precision))
    moved, held_one = product(total)[2:]
    held = held | held_one
    if root.ndim == 1:
        history = history._replace(taken=Site(loc / root**2, root**-2 - one))  # which tells the length of the next step
    # nothing is learned from steps in which old sites stood for silos that did not answer, and no acceleration from what was held back
    told = everyone if root.ndim == 1 else everyone & ~held
    history = jax.tree.map(lambda x, y: jnp.where(told, x, y), history, History.none(_no_site(plan)))
    constrained = plan.constrain(server.params)
    mean = constrained[f"{family.prefix}_loc"] + matvec(asked.scale, loc)
    if root.ndim == 1:
        new = {f"{family.prefix}_loc": mean, f"{family.prefix}_scale": asked.scale * root}
    else:
        new = {f"{family.prefix}_loc": mean, f"{family.prefix}_scale_tril": asked.scale @ root}
    params, sites = plan.unconstrain(new), carried(sites, loc, root)
    history = history.carried(loc, root)
    loss = -(own + jnp.sum(jnp.where(heard, replies.value, 0.0)))
    state = Server(
        params, None, sites, history, moved, server.held + held, server.i + 1, random.split(server.rng_key)[0]
    )
    return state, Info(loss, all_finite((params, sites, loss)), jnp.array(-1))


def _prior_site(plan: Plan, params: dict[str, Array], asked: Points, rows: SiloRows) -> tuple[Site, Array]:
    """The prior's site, and ``E_q[log p(theta) - log q(theta)]``."""
    family, d = plan.families[0], plan.factors.dim
    constrained = plan.constrain(params)

    def log_prior(u: Array) -> Array:
        return plan.log_prior(asked.loc + matvec(asked.scale, u), constrained, rows)

    values, scores = jax.vmap(jax.value_and_grad(log_prior))(asked.points)
    fine = jnp.isfinite(values) & jnp.isfinite(scores).all(-1)
    weights = fine / jnp.maximum(fine.mean(), 1e-30)
    linear, precision, _ = fit_score(
        asked.points, jnp.where(fine[:, None], scores, 0.0), weights, asked.scale.ndim == 2
    )
    entropy = family.scale(constrained).log_det() + 0.5 * d * (1 + math.log(2 * math.pi))
    return Site(linear, precision), jnp.mean(jnp.where(fine, values, 0.0) * weights) + entropy
