r"""Calibration of a study by simulation, before its data are asked for.

Parameters :math:`\theta^* \sim p(\theta)` and data :math:`y \sim p(y \mid \theta^*)` are drawn from
the model, for silos of the study's sizes and covariates. Where the fit is right,
:math:`\theta^*` is a draw of its own posterior. Its rank among L draws of the posterior is then
uniform on 0, ..., L (Talts et al. 2018, theorem 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.handlers import seed, trace

from numpyro_fed._arviz import plot_ranks, posterior_dataset
from numpyro_fed._typing import Site
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.handlers import unobserved
from numpyro_fed.results.silo_likelihood import coefficients, global_draws

if TYPE_CHECKING:
    import pandas as pd
    from arviz import InferenceData
    from matplotlib.figure import Figure

_LEVELS = (0.5, 0.9)  # of the intervals whose coverage is told


@dataclass(frozen=True)
class Calibration:
    """Ranks of a study's simulated parameters among its posteriors' draws; it prints as a table.

    :ivar ranks: the share of posterior draws below the parameter, simulations by coefficients.
        Where the fit is right, it is uniform on 0, 1 / L, ..., 1.
    :ivar verdicts: verdict of each simulation's fit.
    :ivar table: for each coefficient the coverage of the central 50 and 90 % intervals, and the
        ``p`` value of uniform ranks (Kolmogorov and Smirnov).
    """

    ranks: "pd.DataFrame"
    verdicts: tuple[str, ...]
    table: "pd.DataFrame"

    def __repr__(self) -> str:
        num, sound = len(self.ranks), self.verdicts.count("sound")
        errors = " and ".join(f"{np.sqrt(p * (1 - p) / num):.2f}" for p in _LEVELS)
        return (
            f"{self.table.to_string(float_format=lambda x: f'{x:.2f}')}\n"
            f"{num} simulations, {sound} of them sound; standard errors of coverage {errors}"
        )

    def plot(self) -> "Figure":
        """Draw each coefficient's ranks as ArviZ's difference of ECDFs, with a 95 % band."""
        return plot_ranks({k: x.to_numpy(copy=True) for k, x in self.ranks.items()})


class Simulator:
    """Simulator of a study's data, and of the ranks of its fits.

    :param model: the model.
    :param silos: silos like those of the study.
    :raises ValueError: for an improper prior, and for an observed site whose value is no argument.
    """

    def __init__(self, model: Callable, silos: Silos) -> None:
        self.silos, self.factors = silos, factorize(model, silos)
        outcomes = _outcomes(model, silos, self.factors)
        self._draw = jax.jit(partial(_simulated, model, self.factors, outcomes))

    def draw(self, key: Array) -> tuple[dict[str, Array], Silos]:
        """Draw global sites from the prior, and silos with outcomes drawn given them."""
        theta, data = self._draw(key, self.silos.pooled)
        return theta, _with_outcomes(self.silos, data)

    def ranks(
        self, theta: dict[str, Array], idata: "InferenceData"
    ) -> tuple[list[str], np.ndarray]:
        """Return the coefficients' names, and the share of draws below each."""
        posterior = posterior_dataset(idata)
        drawn = global_draws(posterior, self.factors, posterior.sizes["draw"])
        both = {name: np.append(x, np.asarray(theta[name])[None], 0) for name, x in drawn.items()}
        names, values = coefficients(both)
        return names, (values[:-1] < values[-1]).mean(0)


def calibration(ranks: np.ndarray, names: list[str], verdicts: tuple[str, ...]) -> Calibration:
    """Return the result of all simulations."""
    import pandas as pd
    from scipy import stats

    covered = {
        f"in_{100 * level:.0f}": (np.abs(ranks - 0.5) <= level / 2).mean(0) for level in _LEVELS
    }
    p = [stats.kstest(x, "uniform").pvalue for x in ranks.T]
    table = pd.DataFrame({**covered, "p": p}, pd.Index(names, name="coefficient"))
    return Calibration(pd.DataFrame(ranks, columns=names), verdicts, table)


def _outcomes(model: Callable, silos: Silos, factors: Factors) -> dict[str, str]:
    """Return the argument of each observed site inside silo plates, by site."""
    pooled, plates = silos.pooled, dict(factors.plates)
    found = {}
    try:
        sites = trace(seed(model, random.key(0))).get_trace(**pooled)
    except NotImplementedError as error:
        raise ValueError(
            "expected proper priors, from which parameters are drawn, got a distribution without "
            "draws"
        ) from error
    for name, site in sites.items():
        if not _is_outcome(site, plates):
            continue
        leaves = [leaf for leaf in silos.rows if pooled[leaf] is site["value"]]
        if not leaves:
            raise ValueError(
                f"site {name!r}: expected an argument of the model as it is (obs=y), got a value "
                "that the model computes; compute it before, in the silos"
            )
        found[name] = leaves[0]
    return found


def _is_outcome(site: Site, plates: dict[str, str]) -> bool:
    inside = any(f.name in plates for f in site.get("cond_indep_stack", ()))
    return site["type"] == "sample" and site["is_observed"] and inside


def _simulated(
    model: Callable, factors: Factors, outcomes: dict[str, str], key: Array, kwargs: dict
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return global sites and outcomes' arguments, drawn from the model; rows are pooled."""
    sites = trace(seed(unobserved(model), key)).get_trace(**kwargs)
    theta = {name: sites[name]["value"] for name, _ in factors.global_sites}
    return theta, {leaf: sites[name]["value"] for name, leaf in outcomes.items()}


def _with_outcomes(silos: Silos, data: dict[str, Array]) -> Silos:
    """Return the silos with other outcomes, whose rows are pooled."""
    rows = dict(silos.rows)
    for leaf, x in data.items():
        flat = jnp.asarray(x)[silos.order[silos.group[leaf]]]
        rows[leaf] = flat.astype(rows[leaf].dtype)
    return silos.like(silos.names, silos.sizes, rows, silos.order)
