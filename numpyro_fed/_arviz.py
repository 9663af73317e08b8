"""Both forms of ArviZ: 0.2x, whose results are ``InferenceData``, and 1.x, with ``DataTree``.

Other modules take results apart, and put them together, by these functions alone.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpyro.infer import MCMC

if TYPE_CHECKING:
    from arviz import InferenceData
    from matplotlib.figure import Figure
    from xarray import Dataset

_STATISTICS: dict[str, tuple[str, dict[str, Any]]] = {
    "mcse_mean": ("mcse", {"method": "mean"}),
    "mcse_sd": ("mcse", {"method": "sd"}),
    "ess_bulk": ("ess", {"method": "bulk"}),
    "ess_tail": ("ess", {"method": "tail", "prob": (0.05, 0.95)}),
    "r_hat": ("rhat", {"method": "rank"}),
}


def import_arviz() -> ModuleType:
    """Import ArviZ without the notice of 1.x, a daily warning of 0.23 that can be an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz
    return arviz


def has_trees() -> bool:
    """Return True for ArviZ 1.x, whose results are xarray's ``DataTree``."""
    return hasattr(import_arviz(), "convert_to_datatree")


def is_result(fit: object) -> "TypeGuard[InferenceData]":
    """Return True for ``InferenceData``, or a ``DataTree`` in ArviZ 1.x."""
    if has_trees():
        from xarray import DataTree

        return isinstance(fit, DataTree)
    return isinstance(fit, import_arviz().InferenceData)


def groups_of(idata: "InferenceData") -> list[str]:
    """Return the names of the groups."""
    return list(idata.children) if has_trees() else list(idata.groups())


def group_of(idata: "InferenceData", name: str) -> "Dataset":
    """Return a group as a Dataset."""
    return idata[name].to_dataset() if has_trees() else idata[name]


def set_group(idata: "InferenceData", name: str, data: "Dataset") -> None:
    """Add a group, or put it in the place of another."""
    if has_trees():
        from xarray import DataTree

        idata[name] = DataTree(data)
    elif name in idata.groups():
        setattr(idata, name, data)
    else:
        idata.add_groups({name: data}, warn_on_custom_groups=False)


def assign_coords(idata: "InferenceData", dim: str, coords: Mapping[str, Any]) -> None:
    """Assign coordinates in each group that has a dimension."""
    for name in groups_of(idata):
        data = group_of(idata, name)
        if dim in data.dims:
            set_group(idata, name, data.assign_coords(coords))


def from_groups(groups: Mapping[str, Mapping[Any, Any] | None], **options: Any) -> "InferenceData":
    """Return a result of arrays by group and name.

    :param groups: groups; those that are ``None`` or empty are left out.
    :param options: ``coords`` and ``dims`` of ``arviz.from_dict``.
    """
    given = {name: dict(group) for name, group in groups.items() if group}
    az = import_arviz()
    return az.from_dict(given, **options) if has_trees() else az.from_dict(**given, **options)


def read_netcdf(place: str | Path) -> "InferenceData":
    """Return the result in a netCDF file.

    :raises ValueError: for a file without a posterior.
    """
    try:
        found = import_arviz().from_netcdf(place)
    except (OSError, ValueError) as error:
        raise ValueError(f"{place}: expected a netCDF file of a posterior ({error})") from error
    if not hasattr(found, "posterior"):
        raise ValueError(f"{place}: expected a posterior, got {groups_of(found)}")
    return found


def infer_dims(model: Callable, model_args: tuple) -> dict[str, list[str]]:
    """Return the names of the dimensions of a model's sites, from its plates."""
    if has_trees():
        from arviz_base.io_numpyro import infer_dims as infer
    else:
        import_arviz()
        from arviz.data.io_numpyro import infer_dims as infer
    return infer(model, model_args, {})


def posterior_dataset(obj: object) -> "Dataset":
    """Return the posterior group as an xarray Dataset."""
    az = import_arviz()
    if not has_trees():
        data = az.convert_to_inference_data(obj)
    elif isinstance(obj, MCMC):
        data = az.from_numpyro(obj)
    elif isinstance(obj, Mapping) and not is_result(obj):
        data = from_groups({"posterior": obj})  # 1.x takes groups, and not draws
    else:
        data = az.convert_to_datatree(obj)
    if "posterior" not in groups_of(data):
        raise ValueError(
            f"expected a posterior group, got the groups {groups_of(data)}; "
            "convert the fit with arviz.from_numpyro(mcmc) or pass a dict of draws"
        )
    found = group_of(data, "posterior")
    # ArviZ sorts a dict's names where the package dm-tree is installed
    if isinstance(obj, Mapping) and set(obj) == set(found.data_vars):
        return found[list(obj)]
    return found


def chain_statistic(name: str, draws: np.ndarray) -> float:
    """Return an ArviZ diagnostic of a scalar's draws ``(chains, draws)``; NaN if too few."""
    if name == "r_hat" and len(draws) < 2:  # R-hat compares chains
        return float("nan")
    function, options = _STATISTICS[name]
    # The variance of chains that never move is zero, and an R-hat of inf is right for them.
    with np.errstate(all="ignore"):
        return float(getattr(import_arviz(), function)(draws, **options))


def density_curve(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return grid and kernel density of flat, finite draws."""
    if has_trees():
        from arviz_stats.base import array_stats

        return array_stats.kde(draws)[:2]
    return import_arviz().kde(draws)


def pareto_smoothed(log_weight: np.ndarray) -> tuple[np.ndarray, float]:
    """Return Pareto-smoothed log weights, and Pareto's k, infinite for a tail of few values."""
    if has_trees():
        from arviz_stats.base import array_stats

        try:
            found, k = array_stats.psislw(-log_weight)  # of log likelihoods that are left out
        except ValueError:
            return log_weight, float("inf")
    else:
        found, k = import_arviz().psislw(log_weight)
    return found, float(k) if np.isfinite(k) else float("inf")


def plot_ranks(ranks: Mapping[str, np.ndarray]) -> "Figure":
    """Draw the difference of ranks' ECDFs from the uniform one, with 95 % bands.

    :param ranks: numbers between 0 and 1, by name.
    """
    az = import_arviz()
    if has_trees():
        tree = from_groups({"prior_sbc": {name: x[None] for name, x in ranks.items()}})
        drawn = az.plot_ecdf_pit(tree, envelope_prob=0.95, backend="matplotlib")
        return drawn.viz["figure"].item()
    import matplotlib.pyplot as plt
    from scipy import stats

    columns = min(3, len(ranks))
    lines = -(-len(ranks) // columns)
    size = (3.2 * columns, 2.4 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained")
    for axis in np.ravel(axes)[len(ranks) :]:
        axis.set_axis_off()
    for (name, x), axis in zip(ranks.items(), np.ravel(axes), strict=False):
        az.plot_ecdf(
            x,
            cdf=stats.uniform.cdf,
            rvs=stats.uniform(0, 1).rvs,
            eval_points=np.linspace(0, 1, 51),
            difference=True,
            confidence_bands="simulated",
            ci_prob=0.95,
            ax=axis,
        )
        axis.set(title=name, xlabel="rank", ylabel="ECDF - uniform")
    return figure
