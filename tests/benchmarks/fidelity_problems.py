"""The models of `fidelity.py`, and what is compared in each.

Fixed effects, scales and correlations, local latents.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
import bird_counts
import eight_schools
import exam
import gu_immun
import heart_disease
import heart_disease_hospitals
import horseshoe
import hospital_effects
import intake_shares
import kidiq
import lung_survival
import ordinal_intake
import six_cities
import sleepstudy

Draws = dict[str, np.ndarray]  # (chains, draws, ...)
__all__ = ["NESTED", "PROBLEMS", "Draws", "Problem"]

NESTED = ("hospital_effects", "gu_immun")  # a silo plate within another


@dataclass(frozen=True)
class Problem:
    """A model, its silos, and what a statistician reads of it.

    :param fixed: sites compared as they are.
    :param scales: positive sites, compared as logs.
    :param correlation: a site of Cholesky factors, compared as correlations.
    :param local: local latents on the scale that is read; ``None`` without any.
    :param reference: name of the reference, which problems may share.
    :param reference_model: what NUTS runs, where it is another one.
    :param reference_draws: published draws in place of NUTS's.
    """

    model: Callable
    silos: Callable[[], fed.Silos]
    fixed: tuple[str, ...]
    scales: tuple[str, ...] = ()
    correlation: str = ""
    local: Callable[[Draws], Draws] | None = None
    reference: str = ""
    reference_model: Callable | None = None
    reference_draws: Callable[[], Draws] | None = None
    target_accept_prob: float = 0.8

    def read(self, draws: Draws) -> dict[str, Draws]:
        """Draws of all sites as what is compared, in three groups.

        Without local latents where ``draws`` have none.
        """
        groups = {
            "fixed": {k: draws[k] for k in self.fixed},
            "scales": {f"log {k}": np.log(draws[k]) for k in self.scales},
        }
        if self.correlation:
            root = draws[self.correlation]
            below = np.tril_indices(root.shape[-1], -1)
            groups["scales"]["correlation"] = (root @ np.swapaxes(root, -1, -2))[..., *below]
        try:
            groups["local"] = {} if self.local is None else self.local(draws)
        except KeyError:  # a method for the global sites only
            groups["local"] = {}
        return groups


def site(*names: str) -> Callable[[Draws], Draws]:
    """Return the model's own local sites."""
    return lambda draws: {name: draws[name] for name in names}


def scaled(**pairs: str) -> Callable[[Draws], Draws]:
    """Non-centered sites times their scale: ``z="sigma"`` is sigma z."""

    def local(draws: Draws) -> Draws:
        out = {}
        for name, scale in pairs.items():
            z, sigma = draws[name], draws[scale]
            chains = z.shape[:2]
            if sigma.ndim == 2:
                z, sigma = z.reshape(*chains, -1), sigma[..., None]
            else:  # a scale for each coordinate of the element
                sigma = sigma[..., None, :]
            out[f"{scale} {name}"] = sigma * z
        return out

    return local


def _school(draws: Draws) -> Draws:
    """Sample a school's effect, centered or not."""
    if "effect" in draws:
        return {"effect": draws["effect"]}
    return {"effect": draws["mu"][..., None] + draws["tau"][..., None] * draws["z"]}


_SIX = {
    "fixed": ("intercept", "age", "smoke", "age_smoke"),
    "scales": ("sigma",),
    "local": scaled(z="sigma"),
    "reference": "six_cities",
}
_SCHOOLS: dict[str, Any] = {
    "fixed": ("mu",),
    "scales": ("tau",),
    "local": _school,
    "reference": "eight_schools",
    "reference_model": eight_schools.model,
    "target_accept_prob": 0.95,
}
_EXAM: dict[str, Any] = {
    "fixed": ("beta",),
    "scales": ("tau", "sigma"),
    "correlation": "correlation_cholesky",
    "local": site("own"),
    "reference": "exam",
}
_BIRDS: dict[str, Any] = {
    "fixed": ("mean", "year_effect"),
    "local": site("level"),
    "target_accept_prob": 0.9,
}

PROBLEMS: dict[str, Problem] = {
    "six_cities": Problem(six_cities.model, six_cities.silos, **_SIX),
    "six_cities_ten": Problem(six_cities.model, lambda: six_cities.silos(six_cities.TEN), **_SIX),
    "six_cities_sixty": Problem(
        six_cities.model, lambda: six_cities.silos([9] * 57 + [8] * 3), **_SIX
    ),
    "heart_disease": Problem(heart_disease.model, heart_disease.silos, ("intercept", "beta")),
    "heart_disease_hospitals": Problem(
        heart_disease_hospitals.model,
        heart_disease_hospitals.silos,
        ("intercept", "beta"),
        ("tau",),
        local=scaled(z="tau"),
        target_accept_prob=0.95,
    ),
    "sleepstudy": Problem(
        sleepstudy.model,
        sleepstudy.silos,
        ("mean",),
        ("tau", "sigma"),
        "correlation_cholesky",
        local=site("coefficients"),
        target_accept_prob=0.95,
    ),
    "lung_survival": Problem(
        lung_survival.model,
        lung_survival.silos,
        ("intercept", "beta"),
        ("shape", "tau"),
        local=scaled(z="tau"),
        target_accept_prob=0.95,
    ),
    "eight_schools": Problem(eight_schools.model, eight_schools.silos, **_SCHOOLS),
    "eight_schools_centered": Problem(
        eight_schools.model_centered, eight_schools.silos, **_SCHOOLS
    ),
    "kidiq": Problem(
        kidiq.model, kidiq.silos, ("beta",), ("sigma",), reference_draws=kidiq.reference_draws
    ),
    "bird_counts": Problem(
        bird_counts.model, bird_counts.silos, scales=("sigma_year", "sigma_site"), **_BIRDS
    ),
    "bird_counts_negative_binomial": Problem(
        bird_counts.model_negative_binomial,
        bird_counts.silos,
        scales=("sigma_year", "sigma_site", "concentration"),
        **_BIRDS,
    ),
    "intake_shares": Problem(
        intake_shares.model,
        intake_shares.silos,
        ("base",),
        ("concentration",),
        local=site("shares"),
    ),
    "ordinal_intake": Problem(
        ordinal_intake.model, ordinal_intake.silos, ("cuts", "slope"), ("tau",), local=site("own")
    ),
    "exam": Problem(exam.model, exam.silos, **_EXAM),
    "horseshoe": Problem(
        horseshoe.model,
        horseshoe.silos,
        ("beta",),
        ("common", "slab", "sigma", "local"),
        target_accept_prob=0.99,
    ),
    "hospital_effects": Problem(
        hospital_effects.model,
        hospital_effects.silos,
        ("intercept", "age", "smoke"),
        ("sigma_child", "sigma_city"),
        local=scaled(u="sigma_city", z="sigma_child"),
        target_accept_prob=0.95,
    ),
    "gu_immun": Problem(
        gu_immun.model,
        gu_immun.silos,
        ("intercept", "beta"),
        ("sigma_family", "sigma_community"),
        local=scaled(u="sigma_community", v="sigma_family"),
    ),
    "exam_by_school": Problem(exam.model, exam.silos_by_school, **_EXAM),
}
