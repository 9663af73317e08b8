"""Expected outcomes of rows of a table, under the draws of a fitted formula."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
import pandas as pd
from jax import Array
from scipy.special import expit, gamma

from numpyro_fed.front.formula import Group
from numpyro_fed.front.rows import Coder, element_names
from numpyro_fed.front.source import GroupPart, Parts

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import DataArray, Dataset


def expected(
    idata: "InferenceData",
    parts: Parts,
    coder: Coder,
    table: pd.DataFrame,
    silo: str,
    rng_key: Array,
) -> "DataArray":
    """Return the expected outcome of each row, ``(chain, draw, row)``."""
    from xarray import DataArray

    post = getattr(idata, "posterior", None)
    if post is None or (parts.slopes and "b" not in post):
        raise ValueError(
            f"expected the result of GLMM.fit, or of GLMM.in_units, got {type(idata).__name__}"
        )
    lacking = [part.name for part in parts.groups if f"{part.name}_effect" not in post]
    if lacking and silo != "new":
        raise ValueError(
            f'group {lacking[0]!r}: expected silo="new", as effects of its elements stay in '
            f"remote silos; got {silo!r}"
        )
    rows = coder.arguments(table, silo, outcome=False)[0]
    for hole in parts.holes:
        if not rows[f"{hole.name}_known"].all():
            raise ValueError(f"column {hole.name!r}: expected rows without missing values")
    shape = (post.sizes["chain"], post.sizes["draw"], len(table))
    eta = np.zeros(shape) + rows.get("offset", 0.0)
    if parts.intercept:
        eta = eta + post["intercept"].to_numpy()[..., None]
    if parts.slopes:
        eta = eta + post["slopes"].to_numpy() @ rows["x"].T
    for name in parts.smooths:
        bends = post[f"sd_{name}"].to_numpy()[..., None] * post[f"bends_{name}"].to_numpy()
        eta = eta + bends @ rows[name].T
    keys = jax.random.split(rng_key, len(parts.groups) + 1)
    for key, part, group in zip(keys, parts.groups, coder.formula.groups, strict=False):
        eta = eta + _effects(post, part, group, coder, table, silo, rows, key)
    mean = _outcome(parts.family, eta, post, coder)
    dims = ("chain", "draw", "row", "level")[: mean.ndim]
    coords = {"chain": post.chain, "draw": post.draw, "row": np.arange(len(table))}
    return DataArray(mean, dims=dims, coords=coords, name=coder.formula.outcome[0])


def check_change(change: object, reads: Sequence[str]) -> None:
    """Raise a ``ValueError`` for what does not say how columns are changed."""
    pairs = change.items() if isinstance(change, Mapping) else ()
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for _, pair in pairs):
        raise ValueError(f"change: expected {{column: (value, other value)}}, got {change!r}")
    if unknown := [name for name, _ in pairs if name not in reads]:
        raise ValueError(f"change: the formula does not read {unknown}; it reads {list(reads)}")


def _effects(
    post: "Dataset",
    part: GroupPart,
    group: Group,
    coder: Coder,
    table: pd.DataFrame,
    silo: str,
    rows: dict[str, np.ndarray],
    key: Array,
) -> np.ndarray:
    """Return each row's sum of a group's effects: of known elements, or newly drawn ones."""
    own = element_names(table, group, silo, part.name in coder.crossing)
    names, codes = np.unique(own, return_inverse=True)
    sd = post[f"{part.name}_sd"].to_numpy()
    sd = sd.reshape(*sd.shape[:2], -1)
    known, draws = {}, np.zeros((*sd.shape[:2], 0, sd.shape[-1]))
    if f"{part.name}_effect" in post:
        effect = post[f"{part.name}_effect"].to_numpy()
        draws = effect.reshape(*effect.shape[:3], -1)
        known = {str(name): i for i, name in enumerate(post[f"{part.name}_element"].to_numpy())}
    place = [known.get(str(name)) for name in names]
    new = np.asarray(jax.random.normal(key, (*sd.shape[:2], len(names), sd.shape[-1])))
    if f"root_{part.name}" in post:
        new = new @ np.swapaxes(post[f"root_{part.name}"].to_numpy(), -1, -2)
    new = new * sd[:, :, None]
    each = [new[:, :, i] if p is None else draws[:, :, p] for i, p in enumerate(place)]
    columns = rows.get(f"{part.name}_columns", np.ones((len(table), 1)))
    return (np.stack(each, 2)[:, :, codes] * columns).sum(-1)


def _outcome(family: str, eta: np.ndarray, post: "Dataset", coder: Coder) -> np.ndarray:
    """Return the mean of the outcome given its predictor.

    It is a share for ``"binomial"``, a hazard ratio for ``"cox"``, and the shares of all levels for
    ``"ordinal"``.
    """
    if family in ("bernoulli", "binomial", "beta"):
        return expit(eta)
    if family in ("poisson", "negativebinomial", "gamma", "cox"):
        return np.exp(eta)
    if family == "weibull":
        shape = post["shape"].to_numpy()[..., None]
        time = coder.words.columns[coder.formula.outcome[0]].mean or 1.0
        return time * np.exp(-eta / shape) * gamma(1 + 1 / shape)
    if family == "ordinal":
        below = expit(post["cuts"].to_numpy()[:, :, None, :] - eta[..., None])
        ends = np.pad(below, [(0, 0)] * 3 + [(1, 0)])
        return np.diff(np.pad(ends, [(0, 0)] * 3 + [(0, 1)], constant_values=1.0))
    return eta
