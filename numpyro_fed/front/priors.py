"""Priors of a model from a formula, scaled from the dictionary."""

from collections.abc import Mapping

import numpy as np

from numpyro_fed.front.families import FAMILIES
from numpyro_fed.front.formula import Group, python_name
from numpyro_fed.front.holes import HolePart
from numpyro_fed.front.rows import Coder
from numpyro_fed.front.source import GroupPart, Parts

_WIDE = 2.5  # prior sd of a coefficient, for an outcome and a column of sd 1: as Bambi, rstanarm
Prior = float | tuple[float, float]


def make_parts(coder: Coder, given: Mapping[str, Prior] | None, correlated: bool) -> Parts:
    """Return what the model is written from.

    :param given: priors by name, in the columns' units.
    :raises ValueError: for a name that the model does not have, and numbers that are no prior.
    """
    if not isinstance(given, Mapping | None):
        raise ValueError(f"priors: expected {{name: sd or (mean, sd)}}, got {given!r}")
    priors = dict(given or {})
    family, outcome = FAMILIES[coder.family], coder.words.columns[coder.formula.outcome[0]]
    sd_y = (outcome.sd or 1.0) if family.identity else 1.0
    wide = _WIDE * sd_y

    def prior(name: str, mean: float, sd: float) -> tuple[float, float]:
        return _pair(name, priors.pop(name, (mean, sd)))

    intercept = None
    if family.intercept and coder.common.intercept:
        mean = (outcome.mean or 0.0) if family.identity else 0.0
        intercept = prior("Intercept", mean, wide)
    slopes = []
    for name, scale in zip(coder.common.labels, coder.scale, strict=True):
        mean, sd = prior(name, 0.0, wide / scale)
        slopes.append((mean * scale, sd * scale))
    slopes += [(0.0, wide)] * len(coder.formula.smooths)
    smooths = {
        f"s_{python_name(name)}": _scale(f"s({name})", priors.pop(f"s({name})", wide))
        for name in coder.formula.smooths
    }
    groups = [_group(g, coder, wide, priors) for g in coder.formula.groups]
    cuts = len(outcome.counts) - 1
    parameters = {
        name: text.replace("SD", f"{sd_y:.6g}").replace("CUTS", str(cuts))
        for name, text in family.parameters.items()
    }
    if priors:
        known = ["Intercept", *coder.labels, *(g.name for g in coder.formula.groups)]
        raise ValueError(f"priors: expected names among {known}, got {sorted(priors)}")
    extras = ("offset",) * coder.common.offset + ("weights",) * (coder.weights is not None)
    return Parts(
        coder.formula.text.strip(),
        coder.family,
        intercept,
        slopes,
        smooths,
        groups,
        [HolePart(h.name, len(h.levels), bool(h.regression.labels)) for h in coder.holes],
        parameters,
        extras,
        correlated,
    )


def _group(group: Group, coder: Coder, wide: float, priors: dict[str, Prior]) -> GroupPart:
    effects, scales = ["1"], [wide]
    if group.rhs != "1":
        design = coder.columns[group.name]
        effects = ["1"] * design.intercept + design.labels
        scales = [wide] * design.intercept + [wide / s for s in design.centers_and_scales()[1]]
    if group.name in priors:
        common = _scale(group.name, priors.pop(group.name))
        scales = [common * s / scales[0] for s in scales]
    crossing = coder.crossing.get(group.name)
    levels = None if crossing is None else len(crossing)
    return GroupPart(group.name, tuple(effects), tuple(scales), levels, coder.by(group))


def _scale(name: str, value: object) -> float:
    """Return the scale of sds, which have no mean."""
    if isinstance(value, tuple):
        raise ValueError(f"priors: {name!r}: expected the scale of its sds, a number, got {value}")
    return _pair(name, value)[1]


def _pair(name: str, value: object) -> tuple[float, float]:
    pair = value if isinstance(value, tuple) else (0.0, value)
    try:
        mean, sd = map(float, pair)
    except (TypeError, ValueError):
        mean, sd = np.nan, np.nan
    if not (np.isfinite(mean) and 0 < sd < np.inf):
        raise ValueError(f"priors: {name!r}: expected (mean, sd) or an sd > 0, got {value!r}")
    return mean, sd
