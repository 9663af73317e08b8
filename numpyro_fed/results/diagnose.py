r"""Does a federated run hold, by its own lights? Checks that need no reference posterior.

The silos' means of e, which every round brings along, say most of it. In the notation of
:mod:`numpyro_fed.mcmc.step_rule`:

* the *inflation met*: with :math:`\bar e_t` the mean of e in round t and :math:`C_k` the
  autocovariance of :math:`\bar e` at lag k, :math:`N = T (C_0 - C_1)`, since silos are drawn afresh
  each round while theta has hardly moved. The stationary variance :math:`(G G^\top + \tfrac h4 N) /
  (1 - \tfrac h4)` should be I;
* *agreement*: :math:`f_s E[\bar e \mid s]`, by how many posterior sds silo s pulls differently from
  what its surrogate says. It vanishes, up to the surrogate's shape, where chain and surrogates are
  at the same place.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.util import transform_fn

from numpyro_fed._compat import import_arviz
from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.step_rule import persistence

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Diagnosis", "diagnose"]

_SD_RATIO = 1.07  # largest accepted ratio of sds, in either direction
_RATE = 0.01  # largest accepted share of cut steps, undone rounds, stuck units
_REST = 4.0  # T h of a stay in which a chain forgets where it began, up to exp(-2)
_PULL = 0.5  # posterior sds that a silo may pull otherwise than its surrogate
_ERRORS = 4.0  # standard errors by which a mean has to be off to count
_R_HAT, _ESS = 1.05, 100.0  # the latter for each chain; of latents for all chains together
_MOST_LATENTS = 200  # whose draws are looked at
# of the surrogates' posterior beyond the chains' central 95 %, on one side (expected: 0.025)
_MASS = 0.2
_CHANCE = 1e-4  # of so many visits, were the silos drawn as they should be

_MENDS = {
    "R-hat": "run longer, from other starts",
    "effective draws": "run longer",
    "R-hat of latents": "run longer: a latent moves in its silo's rounds alone",
    "effective draws of latents": "run longer: a latent moves in its silo's rounds alone",
    "rounds undone": "lower step_size or bias_target",
    "steps cut": 'lower step_size (under "auto": bias_target), or take fewer num_local_steps',
    "inflation predicted": 'lower step_size, or leave it "auto"',
    "inflation met": (
        'lower step_size (under "auto": bias_target), take fewer num_local_steps, or '
        'surrogate="score"'
    ),
    "silos' pull": (
        'this silo\'s surrogate is not where the chain is: fit it again, surrogate="score"'
    ),
    "visits": (
        "the silos' rounds do not follow selection=, by which their gradients are weighted: "
        "draw them so"
    ),
    "surrogate mass left out": (
        "the chains may have missed a part of the posterior, or the "
        "surrogates have mass where there is none: run longer"
    ),
    "local moves": (
        "the local map is too narrow for some units, or the model too far from it: "
        "reparametrise, or run longer"
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """What :func:`diagnose` found.

    :ivar table: one row a check: ``value``, ``limit``, ``where`` (the silo, site or chain it is
        worst at), ``verdict``.
    """

    table: "DataFrame"

    @property
    def verdict(self) -> str:
        """``"sound"``; ``"undecided"`` where only draws are lacking.

        ``"unsound"`` where a check fails.
        """
        verdicts = set(self.table["verdict"])
        return next((v for v in ("unsound", "undecided") if v in verdicts), "sound")

    def summary(self) -> str:
        """The result in words, with what to do about each check that fails."""
        bad = self.table[self.table["verdict"] != "sound"]
        if not len(bad):
            return "The run holds by its own checks."
        lines = [
            f"{check}: {row['value']:.3g} ({row['where'] or 'all'}; accepted: {row['limit']}). "
            f"{_MENDS[str(check)].capitalize()}."
            for check, row in bad.iterrows()
        ]
        head = "The run does not hold" if self.verdict == "unsound" else "Too few draws to tell"
        return head + ":\n  " + "\n  ".join(lines)

    def _display(self) -> "DataFrame":
        return self.table.assign(value=[f"{v:.3g}" for v in self.table["value"]])

    def __repr__(self) -> str:
        return f"{self._display().to_string()}\n{self.verdict}. {self.summary()}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"{self._display().to_html(border=0)}<p><b>{self.verdict}</b>. {escape(self.summary())}</p>"


def diagnose(mcmc: MCMC) -> Diagnosis:
    """Judge a run over :class:`SGLD`, :class:`DSGLD` or :class:`FSGLD` without any reference.

    Checks: R-hat and effective draws of the global sites, and of the silos' latents (at most 200 of
    them) where they are here; rounds undone and steps cut; the sds' inflation as the pilot
    predicted it and as the run met it; how far each silo pulls otherwise than its surrogate;
    whether the silos were visited as ``selection`` says; how much of the surrogates' posterior lies
    left and right of the chains; local moves that are stuck. Each has a limit, and says the silo or
    site it is worst at.

    It cannot see what no silo's gradient shows where the chains are: a mode they never reached, or
    a tail that is too thin.

    :param mcmc: a run.
    :return: a table with a verdict; it prints as both, with the mend of what fails.
    :raises ValueError: for a run over another kernel, or none.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.arange(20.0)}, "rome": {"y": jnp.arange(30.0)}})
        >>> mcmc = numpyro.infer.MCMC(fed.FSGLD(model), num_warmup=100, num_samples=1500, num_chains=2, chain_method="vectorized",
        ...     progress_bar=False)
        >>> mcmc.run(jax.random.key(0), silos)
        >>> fed.diagnose(mcmc).verdict
        'sound'
    """
    kernel = getattr(mcmc, "sampler", None)
    if not isinstance(kernel, LangevinKernel):
        raise ValueError(
            "expected an MCMC that has run over SGLD, DSGLD or FSGLD, got "
            f"{type(mcmc if kernel is None else kernel).__name__}"
        )
    if kernel.factors is None or mcmc.last_state is None:
        raise ValueError(
            f"expected an MCMC that has run over SGLD, DSGLD or FSGLD, got {type(kernel).__name__} "
            "without a run; call mcmc.run(rng_key, silos) first"
        )
    import pandas as pd

    fields = {k: np.asarray(v) for k, v in mcmc.get_extra_fields(group_by_chain=True).items()}
    rows = [*_draws(mcmc, kernel), *_guards(kernel, fields), *_visits(mcmc, kernel)]
    if "residual" in fields:
        rows += [*_noise(mcmc, kernel, fields), *_surrogate_mass(mcmc, kernel)]
    table = pd.DataFrame(rows, columns=["check", "value", "limit", "where", "verdict"]).set_index(
        "check"
    )
    return Diagnosis(table)


def _row(
    check: str, value: float, limit: str, where: str, sound: bool, verdict: str = "unsound"
) -> tuple:
    return check, float(value), limit, where, "sound" if sound else verdict


def _draws(mcmc: MCMC, kernel: LangevinKernel) -> list[tuple]:
    assert kernel.factors is not None
    draws = mcmc.get_samples(group_by_chain=True)
    out = _mixing(
        {n: draws[n] for n, _ in kernel.factors.global_sites}, "", _ESS * mcmc.num_chains, "unsound"
    )
    # over a wire local draws stay in the silos
    latents = {s.name: draws[s.name] for s in kernel.factors.local_sites if s.name in draws}
    # those of a silo that was visited a few times have few draws, whatever the chain
    return out + (
        _mixing(latents, " of latents", _ESS, "undecided", _MOST_LATENTS) if latents else []
    )


def _mixing(
    draws: dict, whose: str, least: float, bad: str, most: int | None = None
) -> list[tuple]:
    """R-hat and effective draws of some sites, where they are worst.

    :param least: effective draws that are enough.
    :param bad: the verdict of an R-hat that is too high.
    :param most: scalars that are looked at; ``None``: all.
    """
    az = import_arviz()
    flat = {n: np.asarray(x).reshape(*np.shape(x)[:2], -1) for n, x in draws.items()}
    owners = np.repeat(list(flat), [x.shape[-1] for x in flat.values()])
    values = np.concatenate(list(flat.values()), axis=-1)
    if most is not None and most < len(owners):
        some = np.linspace(0, len(owners) - 1, most).astype(int)
        owners, values = owners[some], values[..., some]
    data = az.convert_to_dataset({"x": values})
    rhat, ess = az.rhat(data)["x"].values, az.ess(data)["x"].values
    out = []
    if np.isfinite(rhat).any():  # not of a single chain of few draws
        at = int(np.nanargmax(rhat))
        out.append(
            _row(f"R-hat{whose}", rhat[at], f"<= {_R_HAT}", owners[at], rhat[at] <= _R_HAT, bad)
        )
    if np.isfinite(ess).any():
        at = int(np.nanargmin(ess))
        out.append(
            _row(
                f"effective draws{whose}",
                ess[at],
                f">= {least:.0f}",
                owners[at],
                ess[at] >= least,
                "undecided",
            )
        )
    return out


def _guards(kernel: LangevinKernel, fields: dict[str, np.ndarray]) -> list[tuple]:
    def by_chain(check: str, share: np.ndarray, limit: float = _RATE) -> tuple:
        return _row(
            check,
            share.max(),
            f"<= {limit:.3g}",
            f"chain {int(share.argmax())}",
            share.max() <= limit,
        )

    out = [by_chain("rounds undone", (fields["diverging"] & (fields["cut_rate"] == 0)).mean(1))]
    if kernel._plan.cut:
        # a chain at rest at one silo may be far from where the pilot looked: there it takes fewer
        # cut steps to tell
        reach = float(fields["step_size"].max()) * kernel._plan.num_local_steps
        out.append(
            by_chain("steps cut", fields["cut_rate"].mean(1), _RATE * min(1.0, _REST / reach))
        )
    if kernel._plan.units is not None:
        silo, stuck = fields["silo"].ravel(), fields["local_stuck"].ravel()
        share = np.array(
            [
                stuck[silo == s].mean() if (silo == s).any() else 0.0
                for s in range(len(kernel.silos or ()))
            ]
        )
        name = _names(kernel)[int(share.argmax())]
        out.append(
            _row(
                "local moves",
                share.max(),
                f"<= {_RATE} stuck",
                f"silo {name!r}",
                share.max() <= _RATE,
            )
        )
    predicted = (
        float(np.nanmax(fields["inflation"])) if np.isfinite(fields["inflation"]).any() else np.nan
    )
    if np.isfinite(predicted):
        out.append(
            _row("inflation predicted", predicted, f"<= {_SD_RATIO}", "", predicted <= _SD_RATIO)
        )
    return out


def _visits(mcmc: MCMC, kernel: LangevinKernel) -> list[tuple]:
    from scipy.stats import chi2

    f = np.asarray(kernel._tuning.selection, float)
    if len(f) < 2:
        return []
    visits = np.asarray(mcmc.last_state.visits, float).reshape(-1, len(f)).sum(0)
    expected = f * visits.sum()
    statistic = ((visits - expected) ** 2 / expected).sum()
    chance = float(chi2.sf(statistic, len(f) - 1))
    worst = _names(kernel)[int(np.argmax(np.abs(visits - expected) / np.sqrt(expected)))]
    return [
        _row("visits", chance, f">= {_CHANCE:g} by chance", f"silo {worst!r}", chance >= _CHANCE)
    ]


def _names(kernel: LangevinKernel) -> tuple[str, ...]:
    assert kernel.silos is not None
    return ("all",) if kernel.pooled else kernel.silos.names


def _by_round(
    mcmc: MCMC, kernel: LangevinKernel, fields: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Means of e ``(chains, rounds, d)`` and silos ``(chains, rounds)`` of whole rounds."""
    kept = kernel._plan.num_kept
    residual, silo = fields["residual"].astype(float), fields["silo"]
    made = int(np.ravel(mcmc.last_state.i)[0])  # warm-up included, which may end inside a round
    start = -(made - silo.shape[1]) % kept
    residual, silo = residual[:, start:], silo[:, start:]
    rounds = residual.shape[1] // kept
    residual = residual[:, : rounds * kept].reshape(len(residual), rounds, kept, -1).mean(2)
    return residual, silo[:, : rounds * kept : kept]


def _noise(mcmc: MCMC, kernel: LangevinKernel, fields: dict[str, np.ndarray]) -> list[tuple]:
    residual, silo = _by_round(mcmc, kernel, fields)
    tuning, steps = kernel._tuning, kernel._plan.num_local_steps
    f = np.asarray(tuning.selection, float)
    out = []
    if residual.shape[1] > 2 and kernel._plan.schedule is None:
        h, dim = float(tuning.step_size), residual.shape[2]
        centred = residual - residual.mean((0, 1))
        now, lagged = centred[:, :-1].reshape(-1, dim), centred[:, 1:].reshape(-1, dim)
        # what e has in common with the next round's, at another silo, is drift
        spread = (centred.reshape(-1, dim).T @ centred.reshape(-1, dim)) / centred.size * dim
        shared = now.T @ lagged / len(now)
        noise = persistence(steps, h) * (spread - 0.5 * (shared + shared.T))
        injected = np.eye(dim) if tuning.inject is None else np.asarray(tuning.inject, float)
        ratios = np.sqrt(
            np.maximum(np.linalg.eigvalsh((injected @ injected + h / 4 * noise) / (1 - h / 4)), 0)
        )
        value = float(ratios[-1] if ratios[-1] * ratios[0] >= 1 else ratios[0])
        out.append(
            _row(
                "inflation met",
                value,
                f"{1 / _SD_RATIO:.2f} to {_SD_RATIO}",
                "",
                1 / _SD_RATIO <= value <= _SD_RATIO,
            )
        )
    if len(f) > 1:
        out.append(_pull(kernel, residual, silo, f))
    return out


def _pull(kernel: LangevinKernel, residual: np.ndarray, silo: np.ndarray, f: np.ndarray) -> tuple:
    """The silo whose mean of ``f_s e`` is largest, beyond its standard error."""
    pulls = np.zeros(len(f))
    for s in range(len(f)):
        means = [r[where == s] for r, where in zip(residual, silo, strict=True)]
        e = f[s] * np.concatenate(means)
        if len(e) > 1:
            # visits to a silo are rounds apart; what correlation is left is covered by the number
            # of errors
            error = np.sqrt((e.var(0, ddof=1) / len(e)).sum())
            pulls[s] = max(0.0, np.linalg.norm(e.mean(0)) - _ERRORS * error)
    worst = int(pulls.argmax())
    return _row(
        "silos' pull",
        pulls[worst],
        f"<= {_PULL} sd",
        f"silo {_names(kernel)[worst]!r}",
        pulls[worst] <= _PULL,
    )


def _surrogate_mass(mcmc: MCMC, kernel: LangevinKernel) -> list[tuple]:
    """Mass of the surrogates' posterior left and right of the chains' central 95 %, in each
    whitened direction.
    """
    from scipy.stats import norm

    factors, tuning = kernel.factors, kernel._tuning
    assert factors is not None
    if factors.transforms is None:  # supports that depend on values: their inverse needs the model
        return []
    draws = mcmc.get_samples(group_by_chain=True)
    unconstrained = transform_fn(
        factors.transforms, {n: draws[n] for n, _ in factors.global_sites}, invert=True
    )
    theta = np.concatenate(
        [
            np.asarray(unconstrained[n], float).reshape(-1, int(np.prod(shape)))
            for n, shape in factors.global_sites
        ],
        1,
    )
    scale = np.asarray(tuning.scale, float)
    sds = scale if scale.ndim == 1 else np.sqrt((scale**2).sum(1))
    u = (theta - np.asarray(tuning.loc, float)) / sds
    low, high = np.quantile(u, [0.025, 0.975], axis=0)
    left, right = norm.cdf(low), norm.sf(high)
    mass, side = np.maximum(left, right), np.where(left >= right, "left", "right")
    worst = int(mass.argmax())
    return [
        _row(
            "surrogate mass left out",
            mass[worst],
            f"<= {_MASS}",
            f"{side[worst]} of {factors.owners[worst]}",
            mass[worst] <= _MASS,
        )
    ]
