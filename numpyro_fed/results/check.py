r"""Check of a model, silo by silo, from the silos' log likelihoods at draws of the posterior.

With :math:`\ell_{sk} = \log p(y_s \mid \theta_k)` the posterior without silo s has the weights
:math:`e^{-\ell_{sk}}`. They give the log density of its data under all others,

.. math:: \log p(y_s \mid y_{-s}) = -\log \frac1K \sum_k e^{-\ell_{sk}},

and how far each coefficient moves when the silo is left out. Pareto's k judges the weights. Where
it is too large, the model is fitted without the silo. The log density is then the difference of the
two fits' log evidence.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from numpyro_fed._compat import posterior_dataset
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.results.silo_likelihood import global_draws, silo_log_likelihood
from numpyro_fed.results.vi_inference_data import check_num_draws, vi_inference_data
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.importance import POOR, log_mean, smoothed
from numpyro_fed.vi.svi import MOST_ROUNDS, TOL, ConduciveSFVI

if TYPE_CHECKING:
    import pandas as pd
    from arviz import InferenceData
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SiloCheck:
    """Check of a model, silo by silo; it prints as its table.

    :ivar table: for each silo the rows of its largest row group, ``elpd`` (log density of its data
        under all others, in nats), ``se`` (Monte-Carlo error of it), ``pareto_k`` of the weights,
        ``how`` (weights, or a refit without the silo), and the largest ``shift`` of a coefficient
        with its ``site``.
    :ivar shifts: shift of each coefficient when the silo is left out, in posterior sds, silos by
        coefficients.
    :ivar log_likelihood: log likelihood of each silo at the draws, ``(draws, silos)``.
    :ivar verdict: the fit's own verdict; ``None`` where it has none.
    :ivar log_evidence: log marginal likelihood of all data, and its Monte-Carlo error; ``None``
        where the draws were not weighted, or Pareto's k of the weights is above .7.
    """

    table: "pd.DataFrame"
    shifts: "pd.DataFrame"
    log_likelihood: np.ndarray
    verdict: str | None
    log_evidence: tuple[float, float] | None

    def __repr__(self) -> str:
        lines = [self.table.to_string(float_format=lambda x: f"{x:.2f}")]
        total = self.table["elpd"].sum()
        lines.append(f"Leave one silo out: elpd {total:.2f} in all")
        if self.log_evidence is not None:
            lines.append("Log evidence {:.2f} (error {:.2f})".format(*self.log_evidence))
        if self.verdict is not None:
            lines.append(f"The fit is {self.verdict}")
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Draw how far each coefficient moves when a silo is left out, a row for each silo."""
        import matplotlib.pyplot as plt

        shifts = self.shifts
        height = 1 + 0.25 * len(shifts)
        figure, axis = plt.subplots(figsize=(6, height), layout="constrained")
        for place, name in enumerate(shifts.columns[:10]):  # as many as matplotlib has colors
            axis.plot(shifts[name], np.arange(len(shifts)), "o", color=f"C{place}", label=name)
        axis.axvline(0, color="0.6", lw=0.8, zorder=0)
        axis.set_yticks(np.arange(len(shifts)), [str(x) for x in shifts.index])
        axis.invert_yaxis()
        axis.set_xlabel("shift when the silo is left out (posterior sds)")
        axis.legend(frameon=False, fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")
        return figure


def check(
    idata: "InferenceData",
    model: Callable,
    silos: Silos,
    *,
    num_draws: int = 4000,
    refit: bool = True,
) -> SiloCheck:
    """Check a fitted model by silo: which one the others predict badly, which one moves the result.

    Law: the weights are exact up to Monte-Carlo error where Pareto's k is at most .7. Local latents
    are integrated out.

    What leaves a silo: its log likelihood at ``num_draws`` draws, one number each, as in the last
    round of :func:`fit`. A refit has the rounds of a fit among the other silos.

    :param idata: the posterior, from :func:`fit` or :func:`to_inference_data`.
    :param model: the model of the fit.
    :param silos: the silos of the fit, at least two.
    :param num_draws: most draws that are used.
    :param refit: whether to fit the model without each silo whose k is above .7. Silos in this
        process only.
    :raises TypeError: for silos of another type.
    :raises ValueError: for a single silo, for the posterior of another model, and for a model whose
        local latents of a silo depend on each other.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({s: {"y": jnp.zeros(4) + s / 2} for s in range(3)})
        >>> found = fed.check(fed.fit(model, silos, progress_bar=False), model, silos)
        >>> found.shifts["mu"].round().astype(int).tolist()
        [1, 0, -1]
    """
    if isinstance(silos, MixedSilos) or not isinstance(silos, Silos):
        raise TypeError(
            f"expected fed.Silos, fed.split(...) or RemoteSilos, got {type(silos).__name__}"
        )
    if len(silos) < 2:
        raise ValueError("expected two silos or more, as each is left out in turn; got one")
    check_num_draws(num_draws)
    posterior = posterior_dataset(idata)
    sites = global_draws(posterior, factorize(model, silos), num_draws)
    terms = silo_log_likelihood(model, silos, sites)
    names, values = _coefficients(sites)
    mean, sd = values.mean(0), values.std(0)
    here = refit and not isinstance(silos, RemoteSilos)
    rows = []
    for name, own in zip(silos.names, terms.T, strict=True):
        weight, k = smoothed(-own)
        if k > POOR and here:
            density, others = _refitted(model, silos, name, num_draws, _evidence(posterior.attrs))
            how = "refit"
        else:
            density, others, how = log_mean(own, weight), weight @ values, "weights"
        rows.append(_LeftOut(*density, k, how, (others - mean) / sd))
    return _collected(silos, names, rows, terms, posterior.attrs)


@dataclass(frozen=True)
class _LeftOut:
    """Result of leaving one silo out."""

    elpd: float
    se: float
    k: float
    how: str
    shift: np.ndarray


def _coefficients(sites: dict[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    """Return names and draws of all scalars of the global sites."""
    names, columns = [], []
    for name, x in sites.items():
        flat = x.reshape(len(x), -1).astype(np.float64)
        places = [f"[{', '.join(map(str, i))}]" for i in np.ndindex(x.shape[1:])]
        names += [name + place if x.ndim > 1 else name for place in places]
        columns.append(flat)
    return names, np.concatenate(columns, axis=1)


def _refitted(
    model: Callable,
    silos: Silos,
    name: str,
    num_draws: int,
    evidence: tuple[float, float] | None,
) -> tuple[tuple[float, float], np.ndarray]:
    """Return a silo's log density by a fit without it, with its error, and that fit's mean.

    :param evidence: log evidence of the fit of all silos, and its error.
    """
    rest = _among(silos, [other for other in silos.names if other != name])
    # the factorization was checked on all silos
    svi = ConduciveSFVI(model, AutoSiloNormal(model), validate=False)
    result = svi.run(
        jax.random.key(silos.names.index(name)), MOST_ROUNDS, rest, tol=TOL, progress_bar=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Pareto's k of the approximation")
        idata = vi_inference_data(
            svi, result, rest, num_draws=num_draws, log_likelihood=False, resample=True
        )
    sites = global_draws(idata.posterior, factorize(model, silos), num_draws)
    mean, without = _coefficients(sites)[1].mean(0), _evidence(idata.posterior.attrs)
    if evidence is not None and without is not None:
        density = evidence[0] - without[0], float(np.hypot(evidence[1], without[1]))
        return density, mean
    own = silo_log_likelihood(model, _among(silos, [name]), sites)[:, 0]
    return log_mean(own, np.full(len(own), 1 / len(own))), mean


def _evidence(attrs: dict) -> tuple[float, float] | None:
    """Return the log evidence of a fit whose weights are sound, and its error."""
    if "log_evidence" not in attrs or max(attrs["pareto_k"], attrs.get("pareto_k_unit", 0)) > POOR:
        return None
    return float(attrs["log_evidence"]), float(attrs["log_evidence_error"])


def _among(silos: Silos, names: list[str]) -> Silos:
    """Return some of the silos."""
    return Silos({name: silos[name] for name in names}, rows=silos.group, index=silos.index)


def _collected(
    silos: Silos, names: list[str], rows: list[_LeftOut], terms: np.ndarray, attrs: dict
) -> SiloCheck:
    import pandas as pd

    index = pd.Index(silos.names, name="silo")
    shifts = pd.DataFrame([row.shift for row in rows], index, names)
    sizes = np.max([silos.sizes[group] for group in silos.sizes], 0)
    table = pd.DataFrame(
        {
            "rows": sizes,
            "elpd": [row.elpd for row in rows],
            "se": [row.se for row in rows],
            "pareto_k": [row.k for row in rows],
            "how": [row.how for row in rows],
            "shift": [row.shift[np.argmax(np.abs(row.shift))] for row in rows],
            "site": shifts.abs().idxmax(axis=1),
        },
        index,
    )
    return SiloCheck(table, shifts, terms, attrs.get("verdict"), _evidence(attrs))
