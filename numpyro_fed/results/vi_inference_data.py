"""ArviZ data of a variational fit: draws with silo names, the trace of the bound, Pareto's k."""

import json
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import log_likelihood as log_likelihood_of

from numpyro_fed._compat import import_arviz, infer_dims
from numpyro_fed._typing import Facts, ModelArgs
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import gather, split_shared
from numpyro_fed.density.factors import PARAMS
from numpyro_fed.results.silo_coords import ledger_attrs, silo_coords
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi._base import FederatedVI
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.draws import Draws, draw, draw_remote
from numpyro_fed.vi.guides.normal import SiloNormal
from numpyro_fed.vi.importance import POOR, smoothed, tail_of_spreads, worst_tail
from numpyro_fed.vi.placed import can_place
from numpyro_fed.vi.remote import kept_by
from numpyro_fed.vi.result import VIResult, stacked_params
from numpyro_fed.vi.setup import Setup
from numpyro_fed.vi.sites import constrained, globals_of

if TYPE_CHECKING:
    from arviz import InferenceData


# draws of q for each resampled draw: with an effective share of a quarter or more (.6 is usual) the
# resampled draws are worth their number
CANDIDATES = 4
# log of the usual ratio of one candidate's weight to the others' mean at which a unit's candidates
# are elsewhere than its law: 1 to 100, where 32 candidates count as less than one
_BEYOND = 4.6
_FEWEST = 100  # fewest draws by which Pareto's k is judged: its fit is to a fifth of them, 20


def vi_inference_data(
    svi: FederatedVI,
    result: VIResult,
    silos: Silos | MixedSilos,
    *,
    num_draws: int = 1000,
    rng_key: Array | None = None,
    log_likelihood: bool = True,
    resample: bool = False,
) -> "InferenceData":
    """Convert a variational fit, as :func:`numpyro_fed.to_inference_data` says."""
    if not isinstance(result, VIResult):
        raise TypeError(f"expected the result of svi.run(...), got {type(result).__name__}")
    check_num_draws(num_draws)
    _check_silos(result, silos)
    setup = svi.setup(silos)
    config = setup.config
    params = svi.fitted(result, silos)
    key = random.key(0) if rng_key is None else rng_key
    unweighed = setup.remote and config.noise is not None
    if unweighed and resample:
        raise ValueError(
            "resample=True: silos of a fit with privacy do not weigh draws; expected resample=False"
        )
    weighed = partial(_weighed, setup, result, silos, params, key, num_draws, resample)
    can = resample and any(can_place(config.families[x.part], x) for x in setup.stacks)
    placed = can and setup.remote  # remote silos do not say how good their candidates are
    draws, k, judged = weighed(placed)
    if can and not placed and max(k, _worst_unit(setup, draws).get("pareto_k_unit", k)) > POOR:
        placed = True
        draws, k, judged = weighed(True)
    suffixes = [config.suffix(i) for i in range(len(setup.parts))]
    pieces = [
        (globals_of(config, part, draws, params), {}, {}, {})
        if setup.remote
        else _part(config, i, part, draws, params, log_likelihood, suffix)
        for i, (part, suffix) in enumerate(zip(setup.parts, suffixes, strict=True))
    ]
    idata = _groups(pieces, draws, result)
    for i, (part, suffix) in enumerate(
        zip(() if setup.remote else setup.parts, suffixes, strict=False)
    ):
        silo_coords(idata, config.families[i].factors, part, suffix)
    idata.posterior.attrs |= _told(setup, params, draws, result) | {"placed": int(placed)}
    if not unweighed:
        idata.posterior.attrs |= {"pareto_k": k, "pareto_k_of": judged}
    if not unweighed and not k <= POOR:
        warnings.warn(
            f"Pareto's k of the approximation is {k:.2f} ({judged}), above {POOR}: q(theta) misses "
            'part of the posterior. Run more rounds, take global_cov="full" and more '
            "num_local_particles, or resample=True; and compare the fit with pooled NUTS or FSGLD",
            stacklevel=3,
        )
    return idata


def _check_silos(result: VIResult, silos: Silos | MixedSilos) -> None:
    """Raise unless the silos are those of the run."""
    if isinstance(silos, Silos | MixedSilos) and silos.names == result.ledger.silos:
        return
    got = list(silos.names) if isinstance(silos, Silos | MixedSilos) else type(silos).__name__
    raise ValueError(f"expected the silos of the run, {list(result.ledger.silos)}, got {got}")


def _weighed(
    setup: Setup,
    result: VIResult,
    silos: Silos | MixedSilos,
    params: dict[str, Array],
    key: Array,
    num_draws: int,
    resample: bool,
    placed: bool,
) -> tuple[Draws, float, str]:
    """Draw theta, and latents of silos here; return draws, Pareto's k, and what it is the k of."""
    num = CANDIDATES * num_draws if resample else num_draws
    stretched = resample and isinstance(setup.config.families[0], SiloNormal)
    how = (key, num, stretched, placed)
    if isinstance(silos, RemoteSilos):
        slots = kept_by(result.state, setup, "result").slots.tolist()
        draws = draw_remote(setup.config, params, slots, silos, setup.stacks, *how)
    else:
        one = setup.as_one()
        local = stacked_params(one, result.params)
        draws = draw(one.config, params, local, one.stacks, one.totals, *how)
    weight, k, judged = _judged(setup.config, draws, stretched)
    if resample:  # before units are judged: stretched candidates lie where no unit has to be right
        draws = jax.jit(gather)(draws, _chosen(weight, num_draws, key))
    return draws, k, judged


def prepare_draws(
    pool: Executor, svi: FederatedVI, silos: Silos | MixedSilos, num_draws: int, rng_key: Array
) -> None:
    """Compile the program of weighted draws for resampling in another thread, and import ArviZ."""
    setup, num = svi.setup(silos).as_one(), CANDIDATES * num_draws
    state = svi.init(rng_key, silos)
    params = jax.eval_shape(setup.config.constrain, state.server.params)
    each = setup.local, setup.stacks, setup.totals, rng_key, num
    # arguments as in the call: a default that is not given would be another program
    pool.submit(draw.lower(setup.config, params, *each, True, False).compile)
    import_arviz()


def _groups(
    pieces: list[tuple[dict, dict, dict, dict]], draws: Draws, result: VIResult
) -> "InferenceData":
    """Return the groups of all parts together, with the bound in each round."""
    posterior, likelihood, observed, dims = (
        {k: v for one in kind for k, v in one.items()} for kind in zip(*pieces, strict=True)
    )
    az = import_arviz()
    idata = az.from_dict(
        posterior={k: np.asarray(v)[None] for k, v in posterior.items()},
        sample_stats={"log_weight": np.asarray(draws.log_weight)[None]},
        log_likelihood={k: np.asarray(v)[None] for k, v in likelihood.items()} or None,
        observed_data={k: np.asarray(v) for k, v in observed.items()} or None,
        dims=dims,
    )
    bound = (
        az.from_dict({"elbo": -result.losses[None]})
        .posterior.rename(draw="round")
        .squeeze("chain", drop=True)
    )
    idata.add_groups({"optimization": bound}, warn_on_custom_groups=False)
    return idata


def check_num_draws(num_draws: object) -> None:
    """Raise unless ``num_draws`` is a whole number >= 1."""
    if isinstance(num_draws, bool) or not isinstance(num_draws, int | np.integer) or num_draws < 1:
        raise ValueError(f"num_draws: expected a whole number >= 1, got {num_draws!r}")


def _judged(config: FitConfig, draws: Draws, stretched: bool) -> tuple[np.ndarray, float, str]:
    """Return smoothed weights, the worst Pareto's k, and a text of what it is the k of.

    It is the largest of the weights' own k and of those of the coordinates' variances under them.
    """
    log_weight = np.asarray(draws.log_weight, np.float64)
    # far out a density may overflow, and the draw gets no weight
    inside = np.isfinite(log_weight) if stretched else np.ones(len(log_weight), bool)
    weight, k = np.zeros(len(log_weight)), float("inf")
    if inside.any():
        weight[inside], k = smoothed(log_weight[inside])
    if k in (0.0, float("inf")):  # nearly equal weights, or one that is not finite
        return weight, k, "its weights"
    of_spread, place = tail_of_spreads(weight[inside], np.asarray(draws.theta)[inside])
    if of_spread <= k:
        return weight, k, "its weights"
    return weight, of_spread, f"the spread of {config.factors.owners[place]}"


def _part(
    config: FitConfig,
    number: int,
    silos: Silos,
    draws: Draws,
    params: dict,
    log_likelihood: bool,
    suffix: str,
) -> tuple[dict, dict, dict, dict]:
    """Return draws, pointwise log likelihood, observed values and dimensions of one structure."""
    factors = config.families[number].factors
    learned = {k: params[k] for k in config.learned}
    kwargs = {**silos.pooled, PARAMS: learned} if learned else silos.pooled
    bound_model = _Called(factors.model, kwargs)
    sites = constrained(config, number, silos, draws, params)
    dims = infer_dims(bound_model, ())
    plates = dict(factors.plates)

    def named(name: str) -> str:
        own = any(d in plates for d in dims.get(name, ()))
        return name + suffix if own else name

    renamed = {named(k): [d + suffix if d in plates else d for d in v] for k, v in dims.items()}
    observed = bound_model.observed()
    likelihood = {}
    if log_likelihood:
        latent = {k: v for k, v in sites.items() if k not in observed}
        likelihood = log_likelihood_of(bound_model, latent, parallel=False)
    return (
        {named(k): v for k, v in sites.items()},
        {named(k): v for k, v in likelihood.items()},
        {named(k): v for k, v in observed.items()},
        renamed,
    )


class _Called:
    """Model that is called without arguments."""

    def __init__(self, model: Callable, kwargs: dict) -> None:
        self.model, self.kwargs = model, kwargs

    def __call__(self) -> object:
        return self.model(**self.kwargs)

    def observed(self) -> dict[str, jax.Array]:
        """Return the values of observed sites."""
        from numpyro.handlers import seed, substitute, trace
        from numpyro.infer.initialization import init_to_median

        arrays, static = split_shared(self.kwargs)

        # improper priors cannot be sampled, so a strategy of initialization sets the latents
        @jax.jit
        def values(arrays: ModelArgs) -> dict[str, jax.Array]:
            model = partial(self.model, **arrays, **dict(static))
            filled = substitute(seed(model, random.key(0)), substitute_fn=init_to_median)
            return {
                # a plate may repeat a row of data, as the draws and the likelihood do
                name: jnp.broadcast_to(s["value"], s["fn"].shape())
                for name, s in trace(filled).get_trace().items()
                if s["type"] == "sample" and s["is_observed"] and type(s["fn"]).__name__ != "Unit"
            }

        return values(arrays)


def _told(setup: Setup, params: dict, draws: Draws, result: VIResult) -> Facts:
    """Return the attributes of the posterior that describe the fit.

    They are its ledger, learned parameters, the unit with the worst Pareto's k, the latents that
    stay in remote silos, and privacy.
    """
    config = setup.config
    arrays = {
        k: np.asarray(params[k]).tolist()
        for k in config.learned
        if isinstance(params[k], jax.Array)
    }
    networks = [k for k in config.learned if k not in arrays]  # too large for an attribute
    told: Facts = {**ledger_attrs(result.ledger), "structures": len(setup.parts)}
    told |= {"learned": json.dumps(arrays), "networks": json.dumps(networks)}
    if setup.remote:
        told["remote"] = json.dumps([s.name for s in config.factors.local_sites])
    elif config.num_local_particles > 1 or any(np.any(x) for x in draws.ratios):
        told |= _worst_unit(setup, draws)
    if result.privacy is not None:
        told |= {"privacy": str(result.privacy), "privacy_error": result.privacy.error}
    return told


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
    rng = np.random.default_rng([num, *np.asarray(random.key_data(key)).tolist()])
    steps = (np.arange(num) + rng.random()) / num
    chosen = np.minimum(np.searchsorted(np.cumsum(weight), steps), len(weight) - 1)
    return rng.permutation(chosen)
