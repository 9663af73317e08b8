"""Effects of a fitted formula, in the units of the tables' columns."""

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fed.front.rows import Coder
from numpyro_fed.front.source import Parts

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import Dataset


def in_units(
    idata: "InferenceData", parts: Parts, coder: Coder, labels: list[str]
) -> "InferenceData":
    """Add effects in the columns' units to the posterior.

    With x the columns, m and s their means and sds, the model's predictor is
    a + sum_j c_j (x_j - m_j) / s_j. So b_j = c_j / s_j, and the intercept a - sum_j b_j m_j.
    """
    post = idata.posterior
    draws = ("chain", "draw")
    if parts.slopes:
        number = len(coder.scale)  # lines of smooths stay as they are: per sd
        slopes = post["slopes"].to_numpy()
        b = np.concatenate([slopes[..., :number] / coder.scale, slopes[..., number:]], -1)
        post["b"] = ((*draws, "term"), b)
        post = post.assign_coords(term=labels)
        if parts.intercept:
            shift = b[..., :number] @ coder.center
            post["Intercept"] = (draws, post["intercept"].to_numpy() - shift)
    elif parts.intercept:
        post["Intercept"] = post["intercept"]
    for group in parts.groups:
        post = _group(post, group.name, group.effects, parts.correlated)
    idata.posterior = post
    return idata


def _group(post: "Dataset", name: str, effects: tuple[str, ...], correlated: bool) -> "Dataset":
    """Add a group's sds, the effects of its elements, and the correlations."""
    draws, dim = ("chain", "draw"), f"{name}_column"
    z, sd = post[f"z_{name}"], post[f"sd_{name}"].to_numpy()
    elements = z.dims[2]
    if len(effects) == 1:
        post[f"{name}_sd"] = (draws, sd)
        post[f"{name}_effect"] = z * post[f"{name}_sd"]
        return post
    post[f"{name}_sd"] = ((*draws, dim), sd)
    root = sd[..., :, None] * (
        post[f"root_{name}"].to_numpy() if correlated else np.eye(len(effects))
    )
    effect = np.einsum("cdek,cdjk->cdej", z.to_numpy(), root)
    post[f"{name}_effect"] = ((*draws, elements, dim), effect)
    post = post.assign_coords({dim: ["Intercept" if e == "1" else e for e in effects]})
    if correlated:
        lower = post[f"root_{name}"].to_numpy()
        other = f"{name}_column_2"
        post[f"{name}_corr"] = ((*draws, dim, other), lower @ np.swapaxes(lower, -1, -2))
        post = post.assign_coords({other: post[dim].to_numpy()})
    return post
