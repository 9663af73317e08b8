"""Draws of a variational fit, weighed by the silos, resampled and judged.

Half of the candidates is drawn first. Where their weights are uneven, the other half follows, by
the same compiled program. Where Pareto's k is too large, silos here look for the latents' modes at
each draw, and weigh again. Where it still is, a mixture of Student laws is fitted to the resampled
draws (:mod:`numpyro_fed.vi.mixture`), and its draws are weighed in turn, until k is good or four
mixtures were tried.
"""

from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from scipy import stats
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
    POOR_SPREAD,
    effective,
    log_mean,
    smoothed,
    tail_of_spreads,
    worst_tail,
)
from numpyro_fed.vi.mixture import Mixture, fit_mixture
from numpyro_fed.vi.placed import can_place
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
# most coordinates of theta for which a mixture is fitted: with sixteen, an sd stayed at .87 of
# NUTS's though k was .68 (heart_disease_hospitals)
WIDEST = 8


class Weighed(NamedTuple):
    """Draws, and what judges them.

    :param draws: the draws, resampled where asked.
    :param k: Pareto's k, the worst of the weights' own and of those of the coordinates' variances.
    :param judged: what it is the k of.
    :param limit: the largest k of it with which the draws are good.
    :param unit: the largest k of a unit's candidates, and the unit; empty where there is none.
    :param candidates: number of draws that were weighed.
    :param worth: effective number of the candidates.
    :param placed: whether candidates are around the latents' modes at each draw.
    :param evidence: log marginal likelihood, and its Monte-Carlo error.
    :param mixture: number of the mixture whose draws these are; 0 for q's.
    :param cost: rounds in which silos weighed draws, and bytes of a silo.
    """

    draws: Draws
    k: float
    judged: str
    limit: float
    unit: Facts
    candidates: int
    worth: float
    placed: bool
    evidence: tuple[float, float]
    mixture: int = 0
    cost: Cost = Cost()


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
    num, cost = _EACH * num_draws if resample else num_draws, []
    one = setup if setup.remote else setup.as_one()
    whiten = jax.jit(jax.vmap(partial(config.normal().whiten, params))) if stretched else None

    def drawn(number: int, placed: bool, mixture: Mixture | None = None) -> Draws:
        own = random.fold_in(key, number) if number else key
        given = None if mixture is None else _given(mixture, own, num)
        told = positions(one.config, params, one.stacks[0], own, num, stretched, given)
        if config.noise is None or not setup.remote:  # under privacy no silo weighs draws
            cost.append(_cost(told))
        if isinstance(silos, RemoteSilos):
            slots = kept_by(result.state, setup, "result").slots.tolist()
            to = slots, silos, setup.stacks
            draws = draw_remote(config, params, *to, own, told, stretched, placed)
            return jax.tree.map(np.asarray, draws)
        return _draw_here(one, result, params, told, stretched, placed, progress_bar)

    def judge(placed: bool, *halves: Draws, mixture: int = 0) -> Weighed:
        draws: Draws = jax.tree.map(lambda *x: np.concatenate(x), *halves)
        weight, k, judged, limit = _judged(config, draws, stretched)
        worth = effective(weight)
        uneven = worth < num_draws or k > _FAIR
        if resample and uneven and len(halves) == 1 and not mixture:
            return judge(placed, *halves, drawn(1, placed))
        candidates, evidence = len(weight), _evidence(draws)
        if resample:  # before units are judged: stretched candidates lie where none has to be right
            chosen = _chosen(weight, num_draws, key)
            draws = jax.tree.map(lambda x: x[chosen], draws)
        several = config.num_local_particles > 1 or any(np.any(x) for x in draws.ratios)
        unit = _worst_unit(setup, draws) if several and not setup.remote else {}
        return Weighed(draws, k, judged, limit, unit, candidates, worth, placed, evidence, mixture)

    can = resample and any(can_place(config.families[x.part], x) for x in setup.stacks)
    first = can and setup.remote  # remote silos do not say how good their candidates are
    found = judge(first, drawn(0, first))
    if can and not first and max(found.k, found.unit.get("pareto_k_unit", found.k)) > POOR:
        found = judge(True, drawn(0, True))
    for number in range(1, _MIXTURES + 1):
        if whiten is None or config.factors.dim > WIDEST or not found.limit < found.k < np.inf:
            break
        u = np.asarray(whiten(found.draws.theta), np.float64)
        draws = drawn(1 + number, found.placed, fit_mixture(u, _rng(key, number)).wider())
        found = min(found, judge(found.placed, draws, mixture=number), key=lambda x: x.k - x.limit)
    return found._replace(cost=sum(cost, Cost()))


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
    normal = stats.norm.logpdf(u).sum(1)
    return jnp.asarray(u, float), jnp.asarray(mixture.log_density(u) - normal, float)


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


def _judged(
    config: FitConfig, draws: Draws, stretched: bool
) -> tuple[np.ndarray, float, str, float]:
    """Return smoothed weights, the worst Pareto's k, a text of what it is the k of, and its limit.

    It is one of the weights' own k and of those of the coordinates' variances under them, the one
    that is most beyond its limit.
    """
    log_weight = np.asarray(draws.log_weight, np.float64)
    # far out a density may overflow, and the draw gets no weight
    inside = np.isfinite(log_weight) if stretched else np.ones(len(log_weight), bool)
    weight, k = np.zeros(len(log_weight)), float("inf")
    if inside.any():
        weight[inside], k = smoothed(log_weight[inside])
    if k in (0.0, float("inf")):  # nearly equal weights, or one that is not finite
        return weight, k, "its weights", POOR
    of_spread, place = tail_of_spreads(weight[inside], np.asarray(draws.theta)[inside])
    if of_spread - POOR_SPREAD <= k - POOR:
        return weight, k, "its weights", POOR
    spread = f"the spread of {config.factors.owners[place]}"
    return weight, of_spread, spread, POOR_SPREAD


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
