"""Result of a variational fit, and its parameters as the silos hold them.

Local parameters are either stacked by silo, or over a plate's elements in pooled order.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows, stacked_mask, to_pooled_order
from numpyro_fed.privacy.differential import Privacy, Spent, expected_error
from numpyro_fed.rounds.federated import Ledger
from numpyro_fed.rounds.inline import quick_jit
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.algorithms import own_params
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.loop import VIState
from numpyro_fed.vi.participation import Participation
from numpyro_fed.vi.setup import Setup, Totals

_FEWEST = 200  # rounds by which a fall is judged
FARTHER = (
    "run more rounds (init_state=result.state), or with fed.AutoSiloNormal start where conducive "
    "rounds lead: init_from=fed.ConduciveSFVI(model, guide).run(...)"
)
_ERRORS = 4.0  # standard errors that a mean has to fall to count: by chance once in 15,000 fits


@dataclass(frozen=True, repr=False)
class VIResult:
    """The result of ``run``.

    :ivar params: parameters in their supports, under the names that the guide has in
        :class:`numpyro.infer.SVI`: q(theta)'s, the model's learned ones, and the local ones. They
        are averaged over the last rounds (SFVI-Avg: those of the last round). Local ones are in the
        pooled order of their plate; those of remote silos stay there and are not in the result.
    :ivar state: the state after the last round; ``run(..., init_state=result.state)`` goes on from
        it.
    :ivar losses: minus the estimated bound in each round, a NumPy array.
    :ivar ledger: rounds, gradient evaluations and bytes of each silo.
    :ivar partition: a fingerprint of the silos: which pooled row is in which silo.
    :ivar privacy: for a fit with a privacy budget, the budget that was spent, and about how far the
        noise moves q's mean; else ``None``.
    :ivar stopped: why the rounds broke off; ``None`` where they did not.
    :ivar whitening: mean ``(d,)`` and a square root of the covariance of a Gaussian q(theta), ``(d,
        d)`` or its diagonal, in unconstrained space; else ``None``.
    """

    params: dict[str, PyTree]
    state: VIState
    losses: np.ndarray
    ledger: Ledger
    partition: str
    whitening: tuple[np.ndarray, np.ndarray] | None = None
    privacy: Spent | None = None
    stopped: str | None = None

    @property
    def falling(self) -> float:
        """Fall of the mean loss, in nats, from the last quarter of the rounds but one to the last.

        Where that is within the noise of the losses (4 standard errors), it is the fall from the
        last tenth but one to the last, or zero if that is, too. It is zero for fewer than 200
        rounds, and for a fit with privacy, which has no losses.
        """
        if len(self.losses) < _FEWEST or self.privacy is not None:
            return 0.0
        for share in (4, 10):
            n = len(self.losses) // share
            before, last = self.losses[-2 * n : -n], self.losses[-n:]
            fell, error = before.mean() - last.mean(), np.sqrt((before.var() + last.var()) / n)
            if fell > _ERRORS * error:
                return float(fell)
        return 0.0

    @property
    def said_of_loss(self) -> str:
        """Sentence on the loss of the last rounds."""
        if self.privacy is not None:
            return str(self.privacy)
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        mean = tail.mean() if len(tail) else np.nan
        fell = f"; it still fell, by {self.falling:.2g} nats: not converged" if self.falling else ""
        return f"mean loss {mean:.2f} over the last {len(tail):,}{fell}"

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k}{shape_of(v)}" for k, v in self.params.items())
        head = f"VIResult: {len(self.losses):,} rounds, {self.said_of_loss}"
        return f"{head}\n  params: {shapes}\n{self.ledger}"


def global_params(result: VIResult, setup: Setup, params: dict) -> dict:
    """Return a result's global parameters, unconstrained.

    :raises ValueError: where their names or shapes are not those of the fit.
    """
    shapes = {k: shape_of(v) for k, v in setup.config.constrain(params).items()}
    got = {k: shape_of(result.params[k]) for k in shapes if k in result.params}
    if got != shapes:
        raise ValueError(
            "init_from: expected a result of the same model and guide, with global parameters of "
            f"shapes {shapes}, got {got}"
        )
    return setup.config.unconstrain(
        jax.tree.map(jnp.asarray, {k: result.params[k] for k in params})
    )


def spent_privacy(
    privacy: Privacy | None, setup: Setup, rounds: int, *drawn: Participation | None
) -> Spent | None:
    """Return the privacy that a fit has spent after ``rounds``; ``None`` without a budget.

    :param drawn: laws of the silos' participation and answers.
    """
    if privacy is None:
        return None
    silos, noise = setup.parts[0], setup.config.noise
    assert noise is not None
    counts = np.ones(len(setup.names))
    for who in drawn:
        counts = counts if who is None else counts / who.probability
    error = expected_error(noise, float(counts.sum()), max(rounds, 1))
    simulated = not (isinstance(silos, RemoteSilos) and silos.carrier.guarded)
    return Spent(
        privacy.spent(rounds), privacy.delta, noise.clip, rounds, privacy.epsilon, error, simulated
    )


def shape_of(value: PyTree) -> list:
    """Return the shape of an array, or the shapes of a network's arrays."""
    if isinstance(value, Array | np.ndarray):
        return list(value.shape)
    return [list(x.shape) for x in jax.tree.leaves(value)]


@quick_jit("config", "totals", "averaged")
def named_params(
    config: FitConfig,
    totals: Totals,
    averaged: bool,
    stacks: list[SiloRows],
    params: dict[str, Array],
    server_params: dict[str, Array],
    silo_states: list,
) -> dict[str, Array]:
    """Return global parameters in their supports, and those of the silos, by name.

    :param params: global parameters, unconstrained.
    :param server_params: those of the server's q, whose whitened coordinates the silos' parameters
        are returned in.
    """
    local = []
    for rows, state in zip(stacks, silo_states, strict=True):
        one = partial(own_params, config, rows.part, params=server_params, averaged=averaged)
        # one clock may stand for all silos
        axes = jax.tree.map(lambda x: 0 if x.ndim else None, state)
        local.append(jax.vmap(one, in_axes=(axes,))(state))
    return {**config.constrain(params), **local_params(config, totals, stacks, local)}


def local_params(
    config: FitConfig, totals: Totals, stacks: list[SiloRows], local: list
) -> dict[str, Array]:
    """Return the silos' parameters as arrays over their plate's elements, in pooled order.

    Where silos are the units, the arrays are over silos.

    :param totals: for each structure the number of rows of each group in all silos.
    :param local: for each stack the silos' parameters.
    """
    out = {}
    for part, family in enumerate(config.families):
        if not family.has_local:
            continue
        mine = [(r, family.named(p)) for r, p in zip(stacks, local, strict=True) if r.part == part]
        for name, (_, group) in mine[0][1].items():
            out[name + config.suffix(part)] = _in_order(
                [(r, p[name][0]) for r, p in mine], group, dict(totals[part])
            )
    return out


def stacked_params(setup: Setup, params: dict[str, Array]) -> list:
    """Invert :func:`local_params`; padding gets its first values."""
    names = set(setup.config.supports)
    given = {k: v for k, v in params.items() if k not in names}
    return _stacked(setup.config, setup.stacks, setup.local, given)


@quick_jit("config")
def _stacked(
    config: FitConfig, stacks: list[SiloRows], local: list, params: dict[str, Array]
) -> list:
    out = []
    for rows, first in zip(stacks, local, strict=True):
        family = config.families[rows.part]
        if not family.has_local or not family.named(first):
            out.append(first)
            continue
        new = {}
        for name, (x, group) in family.named(first).items():
            given = params[name + config.suffix(rows.part)]
            new[name] = _in_stack(rows, given, x, group)
        out.append(family.from_named(new))
    return out


def _in_stack(rows: SiloRows, given: Array, first: Array, group: str | None) -> Array:
    """Return a stack's part of a parameter in pooled order; padding has its first values."""
    if group is None:
        return given[(rows.number, *[slice(n) for n in first.shape[2:]])][:, None]
    own = stacked_mask(rows, group)
    return jnp.where(
        own.reshape(*own.shape, *[1] * (first.ndim - 2)), given[rows.order[group]], first
    )


def _in_order(rows: list, group: str | None, totals: dict[str, int]) -> Array:
    if group is None:
        widest = [max(x.shape[i] for _, x in rows) for i in range(2, rows[0][1].ndim)]
        total = [sum(len(r.number) for r, _ in rows), *widest]
        out = jnp.zeros(total, rows[0][1].dtype)
        for r, x in rows:
            out = out.at[(r.number, *[slice(n) for n in x.shape[2:]])].set(x[:, 0])
        return out
    out = jnp.zeros((totals[group], *rows[0][1].shape[2:]), rows[0][1].dtype)
    for r, x in rows:
        out = to_pooled_order(out, r, group, x)
    return out
