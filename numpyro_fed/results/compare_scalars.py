"""Pairs of scalar parameters of two posteriors, and one row of numbers and a verdict for each."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_fed._arviz import chain_statistic, posterior_dataset

if TYPE_CHECKING:
    from xarray import DataArray

COLUMNS = ["mean_ref", "sd_ref", "mean_fed", "sd_fed", "error", "mcse", "sd_ratio"]
COLUMNS += ["sd_ratio_mcse", "w2", "ess_bulk", "ess_tail", "r_hat", "verdict", "note"]
VERDICTS = ("agrees", "undecided", "differs")  # from best to worst
# standard errors to spare: a parameter that is off by the tolerance agrees in 2.3 % of cases, and
# differs in .1 %
AGREE_SE, DIFFER_SE = 2.0, 3.0
# the means of half chains then scatter by .32 sds, and their average over four chains is known to
# about .11 sds, the tolerance of a mean
MAX_R_HAT = 1.05
_MIN_DRAWS = 4  # ArviZ has no diagnostics for shorter chains
# label, draws of the fit, draws of the reference, both of shape (chains, draws)
Scalar = tuple[str, np.ndarray, np.ndarray]


def paired_scalars(
    fed: object, reference: object, var_names: str | Sequence[str] | None
) -> list[Scalar]:
    """Pair the scalar parameters of both fits, with labels; raise where the fits do not match."""
    pair = posterior_dataset(fed), posterior_dataset(reference)
    in_fed, in_ref = (set(map(str, posterior.data_vars)) for posterior in pair)
    if var_names is None:
        if in_fed != in_ref:
            raise ValueError(
                "expected the same sites in both posteriors, got only in the fit: "
                f"{sorted(in_fed - in_ref)}, only in the reference: {sorted(in_ref - in_fed)}; "
                f"pass var_names={sorted(in_fed & in_ref)} to compare what they share"
            )
        names = list(map(str, pair[0].data_vars))
    else:
        names = [var_names] if isinstance(var_names, str) else list(var_names)
        for side, known in (("fit", in_fed), ("reference", in_ref)):
            if not known.issuperset(names):
                raise ValueError(f"var_names {sorted(set(names) - known)} are not in the {side}")
    scalars = [scalar for name in names for scalar in _of_site(name, *(p[name] for p in pair))]
    if not scalars:
        raise ValueError("expected at least one parameter to compare, got none")
    return scalars


def _of_site(name: str, fed: "DataArray", ref: "DataArray") -> list[Scalar]:
    for side, array in (("fit", fed), ("reference", ref)):
        if not {"chain", "draw"} <= set(array.dims):
            raise ValueError(
                f"expected dimensions chain and draw of site {name!r} in the {side}, got "
                f"{array.dims}"
            )
    fed, ref = (array.transpose("chain", "draw", ...) for array in (fed, ref))
    if fed.shape[2:] != ref.shape[2:]:
        raise ValueError(
            f"site {name!r}: expected one shape in both, got {fed.shape[2:]} in the fit and "
            f"{ref.shape[2:]} in the reference; a local site needs the same rows in both"
        )
    for dim, dim_ref in zip(fed.dims[2:], ref.dims[2:], strict=True):
        if dim != dim_ref or not np.array_equal(fed[dim].values, ref[dim_ref].values):
            raise ValueError(
                f"site {name!r}: dimension {dim!r} of the fit and {dim_ref!r} of the reference "
                "differ in name or coordinates; give arviz the same coords= and dims= for both"
            )
    places = itertools.product(*(fed[dim].values for dim in fed.dims[2:]))
    names = [f"{name}[{', '.join(map(str, place))}]" if place else name for place in places]
    flat = (x.values.reshape(*x.shape[:2], -1) for x in (fed, ref))
    fed_draws, ref_draws = (x if x.dtype.kind == "f" else x.astype(float) for x in flat)
    return [(label, fed_draws[..., i], ref_draws[..., i]) for i, label in enumerate(names)]


def compare_scalar(
    fed: np.ndarray, ref: np.ndarray, mean_tolerance: float, sd_tolerance: float
) -> dict:
    """Return one row of the table from draws of one scalar, each ``(chains, draws)``."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, np.nan) | {"verdict": "undecided", "note": ""}
    constant = is_constant(fed), is_constant(ref)
    rounding = _rounding(fed, ref)
    fed, ref = fed.astype(float), ref.astype(float)
    with np.errstate(all="ignore"):
        for side, draws in (("fed", fed), ("ref", ref)):
            row[f"mean_{side}"] = draws.mean()
            row[f"sd_{side}"] = draws.std(ddof=1) if draws.size > 1 else np.nan
    bad = int(np.count_nonzero(~np.isfinite(fed)))
    if bad:
        return row | {"verdict": "differs", "note": f"{bad} of {fed.size} draws not finite"}
    if not np.isfinite(ref).all():
        return row | {"note": "reference draws not finite"}
    if min(fed.shape[1], ref.shape[1]) < _MIN_DRAWS:
        return row | {"note": f"fewer than {_MIN_DRAWS} draws a chain"}
    if constant[1]:
        same = constant[0] and abs(row["mean_fed"] - row["mean_ref"]) <= rounding
        gap = {"error": 0.0, "mcse": 0.0, "w2": 0.0} if same else {"error": np.inf, "w2": np.inf}
        note = "constant in both fits" if constant[0] else "constant in the reference only"
        return row | gap | {"verdict": "agrees" if same else "differs", "note": note}
    # Standardized first, because ArviZ takes a range below 1e-15 for a constant.
    fed, ref = ((x - row["mean_ref"]) / row["sd_ref"] for x in (fed, ref))
    if constant[0]:
        gap = {"error": abs(fed.mean()), "sd_ratio": 0.0, "w2": _w2(fed, ref)}
        return row | gap | {"verdict": "differs", "note": "constant in the fit only"}
    row |= _statistics(fed, ref)
    return row | _judge(row, chain_statistic("r_hat", ref), mean_tolerance, sd_tolerance)


def _statistics(fed: np.ndarray, ref: np.ndarray) -> dict[str, float]:
    sd_fed, sd_ref = fed.std(ddof=1), ref.std(ddof=1)
    relative_fed = chain_statistic("mcse_sd", fed) / sd_fed
    relative_ref = chain_statistic("mcse_sd", ref) / sd_ref
    return {
        "error": abs(fed.mean() - ref.mean()),
        "mcse": np.hypot(chain_statistic("mcse_mean", fed), chain_statistic("mcse_mean", ref)),
        "sd_ratio": sd_fed / sd_ref,
        "sd_ratio_mcse": sd_fed / sd_ref * np.hypot(relative_fed, relative_ref),
        "w2": _w2(fed, ref),
        **{name: chain_statistic(name, fed) for name in ("ess_bulk", "ess_tail", "r_hat")},
    }


def _judge(row: dict, r_hat_ref: float, mean_tolerance: float, sd_tolerance: float) -> dict:
    """Return verdict and note; a comparison with NaN is False and leaves the row undecided."""
    error, mcse, ratio, se = (row[c] for c in ("error", "mcse", "sd_ratio", "sd_ratio_mcse"))
    low, high = 1 / (1 + sd_tolerance), 1 + sd_tolerance
    unmixed = {"r_hat": row["r_hat"] > MAX_R_HAT, "reference r_hat": r_hat_ref > MAX_R_HAT}
    note = ", ".join(f"{name} > {MAX_R_HAT}" for name, above in unmixed.items() if above)
    inside = low <= ratio - AGREE_SE * se and ratio + AGREE_SE * se <= high
    outside = ratio - DIFFER_SE * se > high or ratio + DIFFER_SE * se < low
    if error - DIFFER_SE * mcse > mean_tolerance or outside:
        return {"verdict": "differs", "note": note}
    agrees = error + AGREE_SE * mcse <= mean_tolerance and inside and not note
    return {"verdict": "agrees" if agrees else "undecided", "note": note}


def _w2(x: np.ndarray, y: np.ndarray) -> float:
    """Return the exact Wasserstein-2 distance of two empirical laws of any sizes."""
    x, y = np.sort(x, axis=None), np.sort(y, axis=None)
    # Both quantile functions are constant between these levels.
    steps = np.union1d(np.arange(x.size + 1) / x.size, np.arange(y.size + 1) / y.size)
    width, middle = np.diff(steps), (steps[1:] + steps[:-1]) / 2
    gap = x[(middle * x.size).astype(int)] - y[(middle * y.size).astype(int)]
    return float(np.sqrt(np.sum(width * gap**2)))


def _rounding(*draws: np.ndarray) -> float:
    """Return the largest difference that rounding explains, a few units in the last place.

    The diagonal of a correlation matrix, say, is constant up to such differences.
    """
    return max(8 * float(np.finfo(x.dtype).eps * np.abs(x).max()) for x in draws)


def is_constant(draws: np.ndarray) -> bool:
    """Return True if draws differ by rounding alone."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return bool(np.ptp(draws) <= _rounding(draws))
