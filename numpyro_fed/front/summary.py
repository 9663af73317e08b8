"""Effects of a fitted formula, in the units of the tables' columns."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fed._arviz import group_of, set_group
from numpyro_fed.front.rows import Coder
from numpyro_fed.front.source import GroupPart, Parts

if TYPE_CHECKING:
    import pandas as pd
    from arviz import InferenceData
    from xarray import Dataset


def in_units(
    idata: "InferenceData", parts: Parts, coder: Coder, elements: Mapping[str, Sequence[str]]
) -> "InferenceData":
    """Add effects in the columns' units to the posterior.

    With x the columns, m and s their means and sds, the model's predictor is
    a + sum_j c_j (x_j - m_j) / s_j. So b_j = c_j / s_j, and the intercept a - sum_j b_j m_j.

    :param elements: names of the elements of groups that do not cross silos.
    """
    check_columns(idata, coder)
    post = group_of(idata, "posterior")
    draws = ("chain", "draw")
    if parts.slopes:
        number = len(coder.scale)  # lines of smooths stay as they are: per sd
        slopes = post["slopes"].to_numpy()
        b = np.concatenate([slopes[..., :number] / coder.scale, slopes[..., number:]], -1)
        post["b"] = ((*draws, "term"), b)
        post = post.assign_coords(term=coder.labels)
        if parts.intercept:
            shift = b[..., :number] @ coder.center
            post["Intercept"] = (draws, post["intercept"].to_numpy() - shift)
    elif parts.intercept:
        post["Intercept"] = post["intercept"]
    for group in parts.groups:
        names = coder.crossing.get(group.name) or elements.get(group.name, ())
        post = _group(post, group, names, parts.correlated)
    post.attrs["columns"] = _columns(coder)
    set_group(idata, "posterior", post)
    return idata


def check_columns(idata: "InferenceData", coder: Coder) -> None:
    """Raise a ``ValueError`` for the posterior of another formula, or of another dictionary.

    Its coefficients would be read as those of other columns.
    """
    fitted = group_of(idata, "posterior").attrs.get("columns")
    if fitted is not None and fitted != (own := _columns(coder)):
        raise ValueError(
            "idata: expected a fit of this formula, its terms in this order, by this dictionary: "
            f"the model has the columns {_names(own)}, the fit {_names(fitted)}"
            + " with other means and sds"
            * (_names(own) == _names(fitted))
        )


def _columns(coder: Coder) -> str:
    """Return the columns' labels, means and sds, as text for a file."""
    pairs = [[f"{m:.6g}", f"{s:.6g}"] for m, s in zip(coder.center, coder.scale, strict=True)]
    return json.dumps([coder.labels, pairs])


def _names(columns: str) -> list[str]:
    names: list[str] = json.loads(columns)[0]
    return names


def _group(
    post: "Dataset", group: GroupPart, elements: Sequence[str], correlated: bool
) -> "Dataset":
    """Add a group's sds, the effects of its elements, and the correlations."""
    name, draws = group.name, ("chain", "draw")
    element, column = f"{name}_element", f"{name}_column"
    sd = post[f"sd_{name}"].to_numpy()
    z = post[f"z_{name}"].to_numpy() if f"z_{name}" in post else None  # remote silos keep them
    if z is not None:
        post = post.assign_coords({element: list(elements)})
    if len(group.effects) == 1:
        post[f"{name}_sd"] = (draws, sd)
        if z is not None:
            post[f"{name}_effect"] = ((*draws, element), z * sd[..., None])
        return post
    post[f"{name}_sd"] = ((*draws, column), sd)
    together = post[f"root_{name}"].to_numpy() if correlated else np.eye(len(group.effects))
    if z is not None:
        effect = np.einsum("cdek,cdjk->cdej", z, sd[..., :, None] * together)
        post[f"{name}_effect"] = ((*draws, element, column), effect)
    post = post.assign_coords({column: ["Intercept" if e == "1" else e for e in group.effects]})
    if correlated:
        other = f"{column}_2"
        post[f"{name}_corr"] = (
            (*draws, column, other),
            together @ np.swapaxes(together, -1, -2),
        )
        post = post.assign_coords({other: post[column].to_numpy()})
    return post


def summary(idata: "InferenceData", parts: Parts, exp: bool) -> "pd.DataFrame":
    """Return median, sd and interval of 95 % of coefficients and groups' sds, or of ratios."""
    import pandas as pd

    post = group_of(idata, "posterior")
    columns: dict[str, np.ndarray] = {}
    if parts.slopes:
        columns |= {str(x): post["b"].sel(term=x).to_numpy() for x in post["term"].to_numpy()}
    if exp:
        columns = {name: np.exp(x) for name, x in columns.items()}
    else:
        first = {"Intercept": post["Intercept"].to_numpy()} if parts.intercept else {}
        columns = first | columns
        for group in parts.groups:
            sd = post[f"{group.name}_sd"].to_numpy()
            for i, effect in enumerate(group.effects):
                own = sd if len(group.effects) == 1 else sd[..., i]
                columns[f"{group.name}_sd" + (f", {effect}" if effect != "1" else "")] = own
    draws = pd.DataFrame({name: np.asarray(x, float).ravel() for name, x in columns.items()})
    return pd.DataFrame(
        {
            "median": draws.median(),
            "sd": draws.std(ddof=0),
            "2.5%": draws.quantile(0.025),
            "97.5%": draws.quantile(0.975),
        }
    )
