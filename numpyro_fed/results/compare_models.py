r"""Comparison of models by what they predict of a silo that is left out.

Stacking weights maximize :math:`\sum_s \log \sum_m w_m p_m(y_s \mid y_{-s})` (Yao et al. 2018,
equation 4, with silos in place of rows).
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fed.results.check import SiloCheck

if TYPE_CHECKING:
    import pandas as pd

_STEPS, _STILL = 10_000, 1e-10  # of the weights' fixed point, and the change at which it ends


def compare_models(checks: Mapping[str, SiloCheck]) -> "pd.DataFrame":
    """Compare models of the same silos, best first, in the manner of ``arviz.compare``.

    Columns: ``elpd`` (log density of each silo under all others, summed over silos), ``difference``
    from the best model and its standard error over silos (``se``), stacking ``weight``, ``worst_k``
    (largest Pareto's k of an elpd from weights), ``elpd_loo`` (of each row under all other rows,
    summed), ``difference_loo`` and ``se_loo`` likewise, and the ``log_evidence``. Those of rows
    are NaN where a check has no rows, and evidence where a fit has none. Nothing leaves a silo.

    Both standard errors take silos as the units, since the differences of single rows stay there.
    It warns of models that observe other sites than the first, and of models whose weights, or
    refits, fail for a silo: their elpd may be far off.

    :param checks: for each model its :func:`check`.
    :return: a table with a row for each model.
    :raises TypeError: for values that are no checks.
    :raises ValueError: for fewer than two models, or for checks of different silos.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(sd):
        ...     def of_sd(y):
        ...         mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...         with fed.silo_plate("patients", y.shape[0]):
        ...             numpyro.sample("y", dist.Normal(mu, sd), obs=y)
        ...     return of_sd
        >>> silos = fed.Silos({s: {"y": s + jnp.arange(-3.0, 2.0)} for s in range(3)})
        >>> models = {"one": model(1.0), "ten": model(10.0)}
        >>> fits = {k: fed.fit(m, silos, progress_bar=False) for k, m in models.items()}
        >>> checks = {k: fed.check(fits[k], m, silos) for k, m in models.items()}
        >>> fed.compare_models(checks).index.tolist()
        ['one', 'ten']
    """
    import pandas as pd

    if not isinstance(checks, Mapping):
        raise TypeError(f"expected {{name: fed.check(...)}}, got {type(checks).__name__}")
    wrong = [k for k, v in checks.items() if not isinstance(v, SiloCheck)]
    if wrong:
        raise TypeError(
            f"expected fed.check(...) of each model, got {type(checks[wrong[0]]).__name__} for "
            f"{wrong[0]!r}"
        )
    if len(checks) < 2:
        raise ValueError(f"expected two models or more, got {len(checks)}")
    tables = {name: one.table for name, one in checks.items()}
    silos = {name: list(table.index) for name, table in tables.items()}
    first = next(iter(silos))
    for name, own in silos.items():
        if own != silos[first] or (tables[name]["rows"] != tables[first]["rows"]).any():
            raise ValueError(
                f"expected checks of the same silos; {name!r} has others than {first!r}"
            )
    _warn(checks)
    elpd = np.stack([table["elpd"].to_numpy(float) for table in tables.values()])
    best = int(elpd.sum(1).argmax())
    difference = elpd - elpd[best]
    by_weights = [
        t["pareto_k"].where(t["how"].str.endswith("weights")).max() for t in tables.values()
    ]
    loo = np.stack([_of_rows(check) for check in checks.values()])
    of_loo = loo - loo[best]
    evidence = [np.nan if c.log_evidence is None else c.log_evidence[0] for c in checks.values()]
    table = pd.DataFrame(
        {
            "elpd": elpd.sum(1),
            "difference": difference.sum(1),
            "se": _error(difference),
            "weight": stacking_weights(elpd),
            "worst_k": by_weights,
            "elpd_loo": loo.sum(1),
            "difference_loo": of_loo.sum(1),
            "se_loo": _error(of_loo),
            "log_evidence": evidence,
        },
        pd.Index(list(checks), name="model"),
    )
    return table.sort_values("elpd", ascending=False)


def _warn(checks: Mapping[str, SiloCheck]) -> None:
    """Warn of models of different data, and of those whose elpd is not known."""
    first = next(iter(checks))
    for name, one in checks.items():
        if set(one.observed) != set(checks[first].observed):
            warnings.warn(
                f"{name!r} observes {sorted(one.observed)}, and {first!r} "
                f"{sorted(checks[first].observed)}: their densities are of different data, unless "
                "these are other names of the same; a column in impute= counts as data",
                stacklevel=3,
            )
        bad = list(one.table.index[~one.table["how"].isin(["weights", "refit"])])
        if bad:
            warnings.warn(
                f"{name!r}: the weights, or the refit, of silos {bad} fail, so that its elpd may "
                "be far off; where the column how of its check says 'failed weights', take "
                "fed.check(..., refit=True)",
                stacklevel=3,
            )


def _of_rows(check: SiloCheck) -> np.ndarray:
    """Return the leave-one-row-out log density of each silo's rows, or NaN for each silo."""
    if check.rows is None:
        return np.full(len(check.table), np.nan)
    return check.rows.loo["elpd"].groupby(level="silo").sum()[check.table.index].to_numpy()


def _error(difference: np.ndarray) -> np.ndarray:
    """Return standard errors of sums over silos, ``(models, silos)``."""
    return np.sqrt(difference.shape[1]) * difference.std(1, ddof=1)


def stacking_weights(elpd: np.ndarray) -> np.ndarray:
    """Return weights of the mixture of models that predicts left-out silos best.

    The objective is concave; the steps are those of the EM algorithm for mixture weights.

    :param elpd: log densities, models by silos.
    """
    density = np.exp(elpd - elpd.max(0))
    weight = np.full(len(elpd), 1 / len(elpd))
    for _ in range(_STEPS):
        new = weight * (density / (weight @ density)).mean(1)
        if np.abs(new - weight).max() < _STILL:
            break
        weight = new
    return weight
