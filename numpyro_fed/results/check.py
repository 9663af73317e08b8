r"""Check of a model, silo by silo, from the silos' log likelihoods at draws of the posterior.

With :math:`\ell_{sk} = \log p(y_s \mid \theta_k)` the posterior without silo s has the weights
:math:`e^{-\ell_{sk}}`. They give the log density of its data under all others,

.. math:: \log p(y_s \mid y_{-s}) = -\log \frac1K \sum_k e^{-\ell_{sk}},

and how far each coefficient moves when the silo is left out. Pareto's k judges the weights. Where
it is too large, the model is fitted without the silo. The log density is then the difference of the
two fits' log evidence. Draws of chains have none: then bridge sampling between both fits' draws
gives the log ratio of their constants.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from tqdm.auto import tqdm

from numpyro_fed._arviz import posterior_dataset
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.results.refit import Fit, askable, log_evidence, refitted
from numpyro_fed.results.row_check import RowCheck, check_rows, replicates_without
from numpyro_fed.results.silo_likelihood import (
    JointLatentsError,
    check_enough,
    check_same_silos,
    coefficients,
    global_draws,
    kept_terms,
    question,
)
from numpyro_fed.results.vi_inference_data import check_num_draws
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.importance import POOR, log_mean, smoothed

if TYPE_CHECKING:
    import pandas as pd
    from arviz import InferenceData
    from matplotlib.figure import Figure


_DRAWN = 10  # coefficients in a figure
# ways of leaving a silo out whose numbers may be wrong
_DOUBTS = {
    "failed weights": "Weights fail (Pareto's k above .7), and no refit was made, for",
    "unsound refit": "The refit has not converged, its weights fail, or elpd is not known, for",
}


@dataclass(frozen=True)
class SiloCheck:
    """Check of a model, silo by silo; it prints as its table.

    :ivar table: for each silo the rows of its largest row group, ``elpd`` (log density of its data
        under all others, in nats), ``se`` (Monte-Carlo error of it), ``pareto_k`` of the weights,
        ``how`` (weights, failed weights, a refit without the silo, or an unsound refit),
        and the largest ``shift`` of a coefficient with its ``site``.
    :ivar shifts: shift of each coefficient when the silo is left out, in posterior sds, silos by
        coefficients.
    :ivar log_likelihood: log likelihood of each silo at the draws, ``(draws, silos)``.
    :ivar rows: check of the silos' rows (:class:`RowCheck`), or ``None``.
    :ivar observed: names of the observed sites whose density is in ``elpd``.
    :ivar verdict: the fit's own verdict; ``None`` where it has none.
    :ivar log_evidence: log marginal likelihood of all data, and its Monte-Carlo error; ``None``
        where the draws were not weighted, or Pareto's k of the weights is above .7.
    """

    table: "pd.DataFrame"
    shifts: "pd.DataFrame"
    log_likelihood: np.ndarray
    rows: RowCheck | None
    observed: tuple[str, ...]
    verdict: str | None
    log_evidence: tuple[float, float] | None

    def __repr__(self) -> str:
        lines = [self.table.to_string(float_format=lambda x: f"{x:.2f}")]
        doubts = ", with lines not to be trusted" if self.table["how"].isin(_DOUBTS).any() else ""
        lines.append(f"Leave one silo out: elpd {self.table['elpd'].sum():.2f} in all{doubts}")
        for how, why in _DOUBTS.items():
            doubtful = self.table.index[self.table["how"] == how]
            if len(doubtful):
                lines.append(f"{why} {', '.join(doubtful)}: do not trust their lines")
        if self.rows is not None:
            lines += self.rows.lines()
        if self.log_evidence is not None:
            lines.append("Log evidence {:.2f} (error {:.2f})".format(*self.log_evidence))
        if self.verdict is not None:
            lines.append(f"The fit's own checks: {self.verdict}")
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Draw how far each coefficient moves without a silo, and Pareto's k, a row for each."""
        import matplotlib.pyplot as plt

        shifts, places = self.shifts, np.arange(len(self.shifts))
        # as many as matplotlib has colors: those that move most
        most = np.argsort(-shifts.abs().max().to_numpy(), kind="stable")[:_DRAWN]
        named = shifts.columns[np.sort(most)]
        size = (8, max(1 + 0.25 * len(shifts), 0.4 + 0.2 * len(named)))
        figure, (axis, of_k) = plt.subplots(
            1, 2, figsize=size, width_ratios=(3, 1), sharey=True, layout="constrained"
        )
        for place, name in enumerate(named):
            axis.plot(shifts[name], places, "o", color=f"C{place}", label=name)
        axis.axvline(0, color="0.6", lw=0.8, zorder=0)
        axis.set_yticks(places, [str(x) for x in shifts.index])
        axis.set_ylim(len(shifts) - 0.5, -0.5)
        axis.set_xlabel("shift when the silo is left out (posterior sds)")
        of_k.plot(self.table["pareto_k"], places, "o", color="0.3")
        of_k.axvline(POOR, color="0.6", lw=0.8, ls="--", zorder=0)
        of_k.set_xlabel("Pareto's k")
        hidden = len(shifts.columns) - len(named)
        title = f"{hidden} that move less\nare not shown" if hidden else None
        figure.legend(frameon=False, fontsize="small", loc="outside right upper", title=title)
        return figure


def check(
    idata: "InferenceData",
    model: Callable,
    silos: Silos,
    *,
    num_draws: int = 4000,
    refit: bool | None = None,
    rows: bool = True,
    progress_bar: bool = True,
) -> SiloCheck:
    """Check a fitted model: which silo differs, which decides the result, how rows are predicted.

    Law: the weights are exact up to Monte-Carlo error where Pareto's k is at most .7. Local latents
    are integrated out.

    What leaves a silo: one number for each of ``num_draws`` draws, or nothing where the result has
    the silos' log likelihoods (group ``log_likelihood_silo``, of fits of remote silos). For
    ``rows``, 41 numbers for each observed site (:mod:`numpyro_fed.vi.row_checks`). A refit has the
    rounds of a fit among the other silos. The silo that is left out then answers a second time: six
    numbers for each observed site, and after chains one for each draw.

    :param idata: the posterior, from :func:`fit` or :func:`to_inference_data`.
    :param model: the model of the fit.
    :param silos: the silos of the fit, at least two.
    :param num_draws: most draws that are used.
    :param refit: whether to fit the model without each silo whose k is above .7. ``None``: for
        silos in this process; of remote silos, all others take part in the rounds of each refit.
    :param rows: whether the silos check their rows. Not for models whose latents of a silo, or
        whose rows, depend on each other; two nested plates are no such case.
    :param progress_bar: show how many draws are done, and which silo is left out, where that takes
        more than two seconds.
    :raises TypeError: for silos, a model or a flag of another type.
    :raises ValueError: for a single silo, for other silos than those of the fit, for the posterior
        of another model, for fewer than 25 draws, and for a model whose local latents of a silo
        depend on each other, where the result does not have the silos' log likelihoods.

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
    if not isinstance(refit, bool | None):
        raise TypeError(f"refit: expected True, False or None, got {refit!r}")
    if not isinstance(rows, bool):
        raise TypeError(f"rows: expected True or False, got {rows!r}")
    posterior = posterior_dataset(idata)
    factors = factorize(model, silos)
    check_same_silos(posterior, factors, silos)
    sites = global_draws(posterior, factors, num_draws)
    check_enough(sites)
    terms, of_rows = kept_terms(idata, silos, num_draws), None
    rows = rows and factors.row_wise
    if rows or terms is None:
        try:
            asked = question(model, askable(silos) if rows else silos, sites)
        except JointLatentsError:
            if terms is None:
                raise
        else:
            terms = asked.log_likelihood(progress_bar) if terms is None else terms
            of_rows = check_rows(asked) if rows and asked.draws_latents else None
    names, values = coefficients(sites)
    mean, sd = values.mean(0), values.std(0)
    refit = not isinstance(silos, RemoteSilos) if refit is None else refit
    left_out, evidence = [], log_evidence(posterior.attrs)
    each = tqdm(silos.names, "left out", disable=not progress_bar, delay=2.0)
    for name, own in zip(each, terms.T, strict=True):
        weight, k = smoothed(-own)
        found = None
        if k > POOR and refit:
            of_fit = Fit(evidence, own, names)
            found = refitted(model, silos, name, num_draws, of_fit, of_rows is not None)
        if found is not None:
            density, others, how = found.density, found.mean, found.how
            # else the replicates stay those by weights, which accuse no silo more than they should
            if of_rows is not None and found.asked is not None and how == "refit":
                of_rows = _with_replicates(of_rows, replicates_without(found.asked))
        else:
            density, others = log_mean(own, weight), weight @ values
            how = "weights" if k <= POOR else "failed weights"
        left_out.append(_LeftOut(*density, k, how, (others - mean) / sd))
    tables, verdict = _tables(silos, names, left_out), posterior.attrs.get("verdict")
    return SiloCheck(*tables, terms, of_rows, factors.observed, verdict, evidence)


@dataclass(frozen=True)
class _LeftOut:
    """Result of leaving one silo out."""

    elpd: float
    se: float
    k: float
    how: str
    shift: np.ndarray


def _with_replicates(of_rows: RowCheck, of_silo: "pd.DataFrame") -> RowCheck:
    """Return the check with one silo's replicates by the fit without it."""
    predictive = of_rows.predictive.copy()
    predictive.update(of_silo)
    return replace(of_rows, predictive=predictive)


def _tables(
    silos: Silos, names: list[str], rows: list[_LeftOut]
) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """Return the table of silos, and the shifts of coefficients."""
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
    return table, shifts
