"""The only door to NumPyro's private names, and to what will differ with ArviZ 1.x."""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.handlers import substitute

# _unconstrain_reparam: substitutes unconstrained values and adds each Jacobian as a factor site
# inside the site's own plates, scales and masks; potential_energy is built on it, so our factors
# agree with it term by term. _transforms_from_trace: whether transforms alone constrain a draw or
# the model must be replayed.
from numpyro.infer.util import _transforms_from_trace, _unconstrain_reparam

# XLA's CPU client has as many threads as the machine has cores. LAPACK's batched solves, which a
# model's MultivariateNormal is enough for, split their work over these threads and wait for it in
# one of them: on two cores two such calls can wait for each other for ever (jaxlib 0.10.1). The
# client reads these variables when it starts, which importing JAX does not yet do.
for _variable in ("NPROC", "PJRT_NPROC"):
    os.environ.setdefault(_variable, str(max(8, os.cpu_count() or 1)))


def unconstrained(model: Callable, values: Mapping[str, Array]) -> Callable:
    """The model with latent sites set to ``values``, given in unconstrained space, Jacobians as
    factors.
    """
    return substitute(model, substitute_fn=partial(_unconstrain_reparam, values))


def transforms(trace: Any) -> dict[str, Any] | None:
    """Transforms that constrain each latent site of a trace, or ``None`` where a draw needs the
    model.

    (It does for deterministic sites, for supports that depend on values, and for supports that hold
    arrays made inside the model, which would be tracers here: NumPyro does not look for those
    inside ``Independent``.)
    """
    info = _transforms_from_trace(trace, raise_warnings=False)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(info.inv_transforms))
    return None if info.has_deterministic or info.dynamic_support or traced else info.inv_transforms


def fill_mcmc(mcmc: Any, states: dict[str, Any], last_state: Any, args: tuple) -> None:
    """Hand an ``MCMC`` the draws ``(chains, draws, ...)`` of rounds that it has not run itself."""
    mcmc._states, mcmc._states_flat, mcmc._last_state = states, None, last_state
    mcmc._args, mcmc._kwargs = args, {}


_STATISTICS = {
    "mcse_mean": ("mcse", {"method": "mean"}),
    "mcse_sd": ("mcse", {"method": "sd"}),
    "ess_bulk": ("ess", {"method": "bulk"}),
    "ess_tail": ("ess", {"method": "tail"}),
    "r_hat": ("rhat", {"method": "rank"}),
}


def import_arviz() -> ModuleType:
    """ArviZ, without the notice of 1.x that 0.23 gives daily (an error where warnings are)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz
    return arviz


def infer_dims(model: Callable, model_args: tuple) -> dict[str, list[str]]:
    """Names of the dimensions of a model's sites, from its plates (private in 0.23)."""
    import_arviz()
    from arviz.data.io_numpyro import infer_dims as infer

    return infer(model, model_args, {})


def posterior_dataset(obj: Any) -> Any:
    """The posterior group as an xarray Dataset (1.x: ``convert_to_datatree``, a DataTree node)."""
    data = import_arviz().convert_to_inference_data(obj)
    if "posterior" not in data.groups():
        raise ValueError(
            f"expected a posterior group, got the groups {list(data.groups())}; "
            "convert the fit with arviz.from_numpyro(mcmc) or pass a dict of draws"
        )
    # arviz sorts a dict's names where the package dm-tree is installed
    ordered = isinstance(obj, Mapping) and set(obj) == set(data.posterior.data_vars)
    return data.posterior[list(obj)] if ordered else data.posterior


def chain_statistic(name: str, draws: np.ndarray) -> float:
    """One of arviz's diagnostics of one scalar, draws of shape (chains, draws); NaN if too few."""
    if name == "r_hat" and len(draws) < 2:  # it compares chains
        return float("nan")
    function, options = _STATISTICS[name]
    # Chains that never move divide by their variance, zero: R-hat inf is then the answer.
    with np.errstate(all="ignore"):
        return float(getattr(import_arviz(), function)(draws, **options))


def density_curve(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Grid and kernel density of flat, finite draws (1.x keeps ``kde`` in arviz-stats)."""
    return import_arviz().kde(draws)
