"""Draws of a variational fit, weighed by the silos, resampled and judged.

Half of the candidates is drawn first. Where their weights are uneven, the other half follows, by
the same compiled program. Where Pareto's k is too large, silos here look for the latents' modes at
each draw, and weigh again. Where it still is, a mixture of Student laws is fitted to the resampled
draws (:mod:`numpyro_fed.vi.mixture`), and its draws are weighed together with those before, until k
is good or four mixtures were tried.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from tqdm.auto import tqdm

from numpyro_fed._arviz import import_arviz
from numpyro_fed._typing import Facts
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.rounds.federated import Cost, message_bytes
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi._base import FederatedVI
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.draws import Draws, Position, draw, draw_remote, positions, rows_at_a_draw
from numpyro_fed.vi.first_params import params_at
from numpyro_fed.vi.guides.normal import SiloNormal
from numpyro_fed.vi.importance import (
    POOR,
    balanced,
    effective,
    log_mean,
    smoothed,
    tail_of_spreads,
    worst_tail,
)
from numpyro_fed.vi.mixture import Mixture, fit_mixture
from numpyro_fed.vi.placed import can_place
from numpyro_fed.vi.proposals import log_stretched
from numpyro_fed.vi.remote import kept_by
from numpyro_fed.vi.result import VIResult, stacked_params
from numpyro_fed.vi.setup import Setup

# candidates of each half for a resampled draw: with an effective share of half or more (.6 is
# usual) one half is worth the number of draws
_EACH = 2
_LONG = 1 << 31  # rows times draws that take some twenty seconds: from here on a bar is shown
_FAIR = 0.5  # Pareto's k up to which half of the candidates is enough to tell
# log of the usual ratio of one candidate's weight to the others' mean at which a unit's candidates
# are elsewhere than its law: 1 to 100, where 32 candidates count as less than one
_BEYOND = 4.6
_FEWEST = 100  # fewest draws by which Pareto's k is judged: its fit is to a fifth of them, 20
_MIXTURES = 4  # most mixtures that are tried: on real data k was good after one to three
# most coordinates of theta for which a mixture is fitted: with sixteen, an sd was .81 to .84 of
# NUTS's though k was .65 to .70 (heart_disease_hospitals)
WIDEST = 8


class Weighed(NamedTuple):
    """Draws, and what judges them.

    :param draws: the draws, resampled where asked.
    :param k: Pareto's k, the worst of the weights' own and of those of the coordinates' variances.
    :param judged: what it is the k of.
    :param unit: the largest k of a unit's candidates, and the unit; empty where there is none.
    :param candidates: number of draws that were weighed.
    :param worth: effective number of the candidates.
    :param placed: whether candidates are around the latents' modes at each draw.
    :param evidence: log marginal likelihood, and its Monte-Carlo error.
    :param mixture: number of mixtures that drew beside q.
    :param cost: rounds in which silos weighed draws, and bytes of a silo.
    """

    draws: Draws
    k: float
    judged: str
    unit: Facts
    candidates: int
    worth: float
    placed: bool
    evidence: tuple[float, float]
    mixture: int = 0
    cost: Cost = Cost()


class _Judged(NamedTuple):
    """Smoothed weights, the worst Pareto's k, and a text of what it is the k of.

    It is the largest of the weights' own k and of those of the coordinates' variances under them.
    """

    weight: np.ndarray
    k: float
    judged: str


def weigh(
    setup: Setup,
    result: VIResult,
    silos: Silos | MixedSilos,
    params: dict[str, Array],
    key: Array,
    num_draws: int,
    resample: bool,
    progress_bar: bool = False,
) -> Weighed:
    """Draw theta, and latents of silos here, and judge the draws by their weights.

    :param params: the fit's global parameters, in their supports.
    :param resample: whether draws are resampled by their weights, from wider proposals.
    :param progress_bar: show how many draws are weighed, where it lasts.
    """
    config = setup.config
    stretched = resample and isinstance(config.families[0], SiloNormal)
    num = _EACH * num_draws if resample else num_draws
    one = setup if setup.remote else setup.as_one()
    rounds = _Rounds(setup, one, result, silos, params, key, num, stretched, progress_bar, [])

    def judge(tried: tuple[Draws, _Judged], placed: bool, mixture: int = 0) -> Weighed:
        draws, found = tried
        evidence, worth = _evidence(draws), effective(found.weight)
        if resample:  # before units are judged: stretched candidates lie where none has to be right
            chosen = _chosen(found.weight, num_draws, key)
            draws = jax.tree.map(lambda x: x[chosen], draws)
        several = config.num_local_particles > 1 or any(np.any(x) for x in draws.ratios)
        unit = _worst_unit(setup, draws) if several and not setup.remote else {}
        many = len(found.weight)
        return Weighed(draws, *found[1:], unit, many, worth, placed, evidence, mixture)

    can = resample and any(can_place(config.families[x.part], x) for x in setup.stacks)
    placed = can and setup.remote  # remote silos do not say how good their candidates are
    enough = num_draws if resample else 0
    tried = rounds.first(placed, enough)
    best = judge(tried, placed)
    if can and not placed and max(best.k, best.unit.get("pareto_k_unit", best.k)) > POOR:
        placed = True
        tried = rounds.first(placed, enough)
        best = judge(tried, placed)
    if stretched and config.factors.dim <= WIDEST:
        tries: list[Draws] = [tried[0]]
        laws: list[Callable] = [jax.jit(jax.vmap(log_stretched))]
        whiten = jax.jit(jax.vmap(partial(config.normal().whiten, params)))
        while len(laws) <= _MIXTURES and POOR < best.k < np.inf:
            number = len(laws)
            u = np.asarray(whiten(best.draws.theta), np.float64)
            mixture = fit_mixture(u, _rng(key, number)).wider()
            tries.append(rounds.drawn(1 + number, placed, mixture))
            laws.append(mixture.log_ratio)
            draws = _against_all(tries, laws, whiten)
            best = judge((draws, _judged(config, draws, stretched)), placed, number)
    return best._replace(cost=sum(rounds.cost, Cost()))


class _Rounds(NamedTuple):
    """Rounds in which silos weigh draws of theta.

    :param one: setup with silos here as one.
    :param num: draws of a round.
    :param stretched: whether draws and candidates come from proposals with wider tails.
    :param cost: what each round has cost so far.
    """

    setup: Setup
    one: Setup
    result: VIResult
    silos: Silos | MixedSilos
    params: dict[str, Array]
    key: Array
    num: int
    stretched: bool
    progress_bar: bool
    cost: list[Cost]

    def first(self, placed: bool, enough: int) -> tuple[Draws, _Judged]:
        """Return draws of q, twice as many where their weights are worth fewer than ``enough``."""
        draws, config = self.drawn(0, placed), self.setup.config
        found = _judged(config, draws, self.stretched)
        if not enough or (effective(found.weight) >= enough and found.k <= _FAIR):
            return draws, found
        draws = _joined([draws, self.drawn(1, placed)])
        return draws, _judged(config, draws, self.stretched)

    def drawn(self, number: int, placed: bool, mixture: Mixture | None = None) -> Draws:
        """Return weighed draws of q, or of a mixture.

        :param number: number of the round, by which its key is folded.
        :param placed: whether candidates are around the latents' modes at each draw.
        """
        config = self.setup.config
        own = random.fold_in(self.key, number) if number else self.key
        given = None if mixture is None else _given(mixture, own, self.num)
        first = self.one.config, self.params, self.one.stacks[0]
        told = positions(*first, own, self.num, self.stretched, given)
        if config.noise is None or not self.setup.remote:  # under privacy no silo weighs draws
            self.cost.append(_cost(told))
        how = told, self.stretched, placed
        if not isinstance(self.silos, RemoteSilos):
            return _draw_here(self.one, self.result, self.params, *how, self.progress_bar)
        slots = kept_by(self.result.state, self.setup, "result").slots.tolist()
        to = slots, self.silos, self.setup.stacks
        return jax.tree.map(np.asarray, draw_remote(config, self.params, *to, own, *how))


def _joined(some: list[Draws]) -> Draws:
    joined: Draws = jax.tree.map(lambda *x: np.concatenate(x), *some)
    return joined


def _against_all(tries: list[Draws], laws: list[Callable], whiten: Callable) -> Draws:
    """Return draws of several proposals, weighed as draws of all of them together.

    :param laws: for each proposal the log of its density over q's, at whitened positions.
    :param whiten: map of positions to whitened coordinates.
    """
    positions_of = [np.asarray(whiten(x.theta), np.float64) for x in tries]
    ratios = [np.stack([np.asarray(law(u), np.float64) for law in laws]) for u in positions_of]
    log_weights: Any = balanced([np.asarray(x.log_weight, np.float64) for x in tries], ratios)
    each = zip(tries, log_weights, strict=True)
    return _joined([x._replace(log_weight=weight) for x, weight in each])


def _num_parts(setup: Setup, num: int, stretched: bool) -> int:
    """Return in how many parts draws are weighed: in several where it takes long."""
    if num * rows_at_a_draw(setup.config, stretched, setup.stacks) < _LONG:
        return 1
    return next(n for n in (20, 10, 5, 4, 2, 1) if num % n == 0)


def _draw_here(
    setup: Setup,
    result: VIResult,
    params: dict[str, Array],
    told: Position,
    stretched: bool,
    placed: bool,
    progress_bar: bool,
) -> Draws:
    """Weigh draws by silos here, in parts behind a progress bar where it takes long.

    Draws are on the host, where they are resampled without programs of each shape.
    """
    num = len(told.log_weight)
    here = stacked_params(setup, result.params), setup.stacks, setup.totals
    places = np.arange(num).reshape(_num_parts(setup, num, stretched), -1)
    parts = []
    for part in tqdm(places, "last round", disable=not progress_bar or len(places) == 1):
        some = told if len(places) == 1 else jax.tree.map(lambda x, part=part: x[part], told)
        # keywords would be other programs than those that are compiled ahead
        draws = draw(setup.config, params, *here, some, stretched, placed)
        parts.append(jax.tree.map(np.asarray, draws))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _given(mixture: Mixture, key: Array, num: int) -> tuple[Array, Array]:
    """Return draws of a mixture in whitened coordinates, and the log of its density over q's."""
    u = mixture.draw(_rng(key, num), num)
    return jnp.asarray(u, float), jnp.asarray(mixture.log_ratio(u), float)


def _cost(told: Position) -> Cost:
    """Return the cost of a round in which silos weigh draws, by one number each."""
    return Cost(1, 0, message_bytes(told), message_bytes(told.log_weight))


def _rng(key: Array, number: int) -> np.random.Generator:
    return np.random.default_rng([number, *np.asarray(random.key_data(key)).tolist()])


def prepare_draws(
    pool: Executor, svi: FederatedVI, silos: Silos | MixedSilos, num_draws: int, rng_key: Array
) -> None:
    """Compile the program of weighted draws for resampling in another thread, and import ArviZ."""
    setup, num = svi.setup(silos).as_one(), _EACH * num_draws
    config = setup.config
    params = jax.eval_shape(lambda: config.constrain(params_at(config, setup.parts[0])))
    # arguments as in the call: a default that is not given would be another program
    first = config, params, setup.stacks[0], rng_key, num, True, None
    told = positions.alone.eval_shape(*first)
    size = num // _num_parts(setup, num, True)
    told = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), told)
    pool.submit(positions.alone.lower(*first).compile)
    each = setup.local, setup.stacks, setup.totals, told
    pool.submit(draw.alone.lower(config, params, *each, True, False).compile)
    import_arviz()


def _judged(config: FitConfig, draws: Draws, stretched: bool) -> _Judged:
    """Judge draws by their weights."""
    log_weight = np.asarray(draws.log_weight, np.float64)
    # far out a density may overflow, and the draw gets no weight
    inside = np.isfinite(log_weight) if stretched else np.ones(len(log_weight), bool)
    weight, k = np.zeros(len(log_weight)), float("inf")
    if inside.any():
        weight[inside], k = smoothed(log_weight[inside])
    if k in (0.0, float("inf")):  # nearly equal weights, or one that is not finite
        return _Judged(weight, k, "its weights")
    of_spread, place = tail_of_spreads(weight[inside], np.asarray(draws.theta)[inside])
    if of_spread <= k:
        return _Judged(weight, k, "its weights")
    return _Judged(weight, of_spread, f"the spread of {config.factors.owners[place]}")


def _evidence(draws: Draws) -> tuple[float, float]:
    """Return the log of the mean weight of all candidates, and its Monte-Carlo error."""
    log_weight = np.asarray(draws.log_weight, np.float64)
    inside = np.isfinite(log_weight)
    if not inside.any():
        return float("nan"), float("nan")
    num = len(log_weight)
    return log_mean(np.where(inside, log_weight, -np.inf), np.full(num, 1 / num))


def _worst_unit(setup: Setup, draws: Draws) -> Facts:
    """Return the largest Pareto's k of the weights of a unit's candidates, and name the unit.

    Only the units whose weights vary most are judged.
    """
    worst: Facts = {}
    for family, each, part in zip(setup.config.families, draws.ratios, setup.parts, strict=True):
        if not family.has_local or len(each) < _FEWEST:
            continue
        found = np.asarray(each, np.float64)
        k, unit = worst_tail(found.T)
        # nearly always one candidate alone: the law is beyond them, and no tail says so
        beyond = ~(np.median(np.abs(found), axis=0) <= _BEYOND)
        if beyond.any():
            k, unit = float("inf"), int(beyond.argmax())
        if k > worst.get("pareto_k_unit", -np.inf):
            where = (
                f"silo {part.names[unit]!r}"
                if family.group is None
                else f"row {unit} of {family.group!r}"
            )
            worst = {"pareto_k_unit": k, "pareto_k_unit_at": where}
    return worst


def _chosen(weight: np.ndarray, num: int, key: Array) -> np.ndarray:
    """Resample candidates systematically, and return their positions in random order.

    The number of copies of a candidate is ``num`` times its weight, rounded up or down.
    """
    rng = _rng(key, num)
    steps = (np.arange(num) + rng.random()) / num
    chosen = np.minimum(np.searchsorted(np.cumsum(weight), steps), len(weight) - 1)
    return rng.permutation(chosen)
