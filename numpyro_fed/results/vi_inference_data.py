"""ArviZ data of a variational fit: draws with silo names, the trace of the bound, Pareto's k."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions import Unit
from numpyro.infer import log_likelihood as log_likelihood_of

from numpyro_fed._arviz import from_groups, infer_dims, set_group
from numpyro_fed._compat import is_of
from numpyro_fed._typing import Facts, ModelArgs
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import split_shared
from numpyro_fed.density.factors import PARAMS
from numpyro_fed.results.silo_coords import ledger_attrs, silo_coords
from numpyro_fed.results.weighing import Weighed, weigh
from numpyro_fed.vi._base import FederatedVI
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.draws import Draws
from numpyro_fed.vi.importance import POOR
from numpyro_fed.vi.result import FARTHER, VIResult
from numpyro_fed.vi.setup import Setup
from numpyro_fed.vi.sites import constrained, globals_of

if TYPE_CHECKING:
    from arviz import InferenceData

SILO_TERMS = "log_likelihood_silo"  # group of each silo's log likelihood, draws by silos


def vi_inference_data(
    svi: FederatedVI,
    result: VIResult,
    silos: Silos | MixedSilos,
    *,
    num_draws: int = 1000,
    rng_key: Array | None = None,
    log_likelihood: bool = True,
    resample: bool = False,
    progress_bar: bool = True,
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
    found = weigh(setup, result, silos, params, key, num_draws, resample, progress_bar)
    draws, k, judged = found.draws, found.k, found.judged
    pieces = [
        (globals_of(config, part, draws, params), {}, {}, {})
        if setup.globals_alone
        else of_structure(config, i, part, draws, params, log_likelihood)
        for i, part in enumerate(setup.parts)
    ]
    idata = grouped(pieces, {"log_weight": np.asarray(draws.log_weight)[None]})
    _add_bound(idata, result)
    if resample and draws.terms.shape[1] == len(setup.names):  # not of all silos drawn as one
        _add_silo_terms(idata, setup, draws.terms)
    for i, part in enumerate(() if setup.globals_alone else setup.parts):
        silo_coords(idata, config.families[i].factors, part, config.suffix(i))
    idata.posterior.attrs |= _told(setup, params, result, found) | found.unit
    if not unweighed:
        log_evidence, error = found.evidence
        idata.posterior.attrs |= {"pareto_k": k, "pareto_k_of": judged}
        idata.posterior.attrs |= {"log_evidence": log_evidence, "log_evidence_error": error}
    if result.falling:
        warnings.warn(f"{result.said_of_loss}; {FARTHER}", stacklevel=3)
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


def grouped(
    pieces: list[tuple[dict, dict, dict, dict]],
    stats: dict[str, np.ndarray] | None = None,
    chains: int = 1,
) -> "InferenceData":
    """Return the groups of all structures together.

    :param pieces: for each structure what :func:`of_structure` returns.
    :param stats: statistics of the draws.
    :param chains: number of chains, one after the other in the draws.
    """

    def by_chain(x: Array) -> np.ndarray:
        return np.asarray(x).reshape(chains, -1, *np.shape(x)[1:])

    posterior, likelihood, observed, dims = (
        {k: v for one in kind for k, v in one.items()} for kind in zip(*pieces, strict=True)
    )
    groups = {
        "posterior": {k: by_chain(v) for k, v in posterior.items()},
        "sample_stats": stats,
        "log_likelihood": {k: by_chain(v) for k, v in likelihood.items()},
        "observed_data": {k: np.asarray(v) for k, v in observed.items()},
    }
    return from_groups(groups, dims=dims)


def _add_bound(idata: "InferenceData", result: VIResult) -> None:
    """Add the bound in each round."""
    import xarray

    rounds = np.arange(len(result.losses))
    bound = xarray.Dataset({"elbo": ("round", -result.losses)}, {"round": rounds})
    set_group(idata, "optimization", bound)


def _add_silo_terms(idata: "InferenceData", setup: Setup, terms: Array) -> None:
    """Add each silo's log likelihood at the draws, as it was estimated to weigh them."""
    import xarray

    names = [setup.parts[r.part].names[i] for r in setup.stacks for i in np.asarray(r.number)]
    order = [names.index(name) for name in setup.names]
    each = np.asarray(terms, np.float64)[None, :, order]
    group = xarray.Dataset(
        {"log_likelihood": (("chain", "draw", "silo"), each)},
        {"chain": [0], "draw": np.arange(len(terms)), "silo": list(setup.names)},
    )
    set_group(idata, SILO_TERMS, group)


def check_num_draws(num_draws: object) -> None:
    """Raise unless ``num_draws`` is a whole number >= 1."""
    if isinstance(num_draws, bool) or not isinstance(num_draws, int | np.integer) or num_draws < 1:
        raise ValueError(f"num_draws: expected a whole number >= 1, got {num_draws!r}")


def of_structure(
    config: FitConfig,
    number: int,
    silos: Silos,
    draws: Draws,
    params: dict,
    log_likelihood: bool,
) -> tuple[dict, dict, dict, dict]:
    """Return draws, pointwise log likelihood, observed values and dimensions of one structure."""
    suffix = config.suffix(number)
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
                if s["type"] == "sample" and s["is_observed"] and not is_of(s["fn"], Unit)
            }

        return values(arrays)


def _told(setup: Setup, params: dict, result: VIResult, found: Weighed) -> Facts:
    """Return the attributes of the posterior that describe the fit.

    They are its ledger, learned parameters, the latents that stay in remote silos, and privacy.
    """
    config = setup.config
    arrays = {
        k: np.asarray(params[k]).tolist()
        for k in config.learned
        if isinstance(params[k], jax.Array)
    }
    networks = [k for k in config.learned if k not in arrays]  # too large for an attribute
    told: Facts = {**ledger_attrs(result.ledger.after(found.cost)), "structures": len(setup.parts)}
    told |= {
        "candidates": found.candidates,
        "effective_draws": found.worth,
        "placed": int(found.placed),
        "mixture": found.mixture,
        "falling": result.falling,
    }
    told |= {"learned": json.dumps(arrays), "networks": json.dumps(networks)}
    if setup.globals_alone:
        told["remote"] = json.dumps([s.name for s in config.factors.local_sites])
    if result.privacy is not None:
        told |= {"privacy": str(result.privacy), "privacy_error": result.privacy.error}
    return told
