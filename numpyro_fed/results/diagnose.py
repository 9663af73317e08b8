r"""Checks of a run that need no reference posterior.

Two checks of Langevin runs use the silos' means of e, which every round returns. In the notation of
:mod:`numpyro_fed.mcmc.step_rule`:

* *inflation met*: the stationary variance :math:`(G G^\top + \tfrac h4 N) / (1 - \tfrac h4)`
  should be I. Let :math:`\bar e_t` be the mean of e in round t, and :math:`C_k` the autocovariance
  of :math:`\bar e` at lag k. Then :math:`N = T (C_0 - C_1)` for small h T, because each round draws
  its silo anew while theta has hardly moved.
* *silos' pull*: :math:`f_s E[\bar e \mid s]` is the difference of silo s's pull from its
  surrogate's, in posterior sds. It vanishes, up to the surrogate's shape, where chain and
  surrogates are at the same place.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.util import transform_fn

from numpyro_fed._arviz import import_arviz
from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.mcmc.step_rule import persistence
from numpyro_fed.results.compare_scalars import MAX_R_HAT

if TYPE_CHECKING:
    from pandas import DataFrame


_SD_RATIO = 1.07  # largest accepted ratio of sds, in either direction: the tolerance of `compare`
# largest accepted share of cut steps, undone rounds, stuck units; where it was exceeded, 1.3 % of
# steps cut went with an sd 1.28 times too wide, 5 % with one twice too wide (docs/results.md)
MOST_CUT = 0.01
# largest accepted share of cut steps where a coordinate is in its outer 2.5 %, on one side: where
# it was 15 % a log scale was 1.26 times too wide, 66 % with one 2.7 times; 4 % with right ones
_MOST_CUT_OUTSIDE, _OUTER, _FEWEST_OUTER = 0.05, 0.025, 20
# largest accepted share of diverging trajectories; eight schools in the centered form, whose draws
# miss small scales, have .006
MOST_DIVERGED = 0.002
_REST = 4.0  # T h of a visit in which a chain forgets its start, up to exp(-2)
# largest accepted difference of a pull from the surrogate's, in posterior sds: eight schools have
# 5e-5, a network whose surrogates fail has 39 (docs/results.md)
_PULL = 0.5
_ERRORS = 4.0  # standard errors that a mean has to be off to count: by chance once in 16,000
# per chain up to four, for latents of all chains together: Vehtari et al. (2021) ask for 400
_ESS, _CHAINS = 100.0, 4
_MOST_LATENTS = 200  # scalars that are checked: R-hat and draws of 4 x 2,000 each took 7 s
# largest accepted mass of the surrogates' posterior beyond the chains' central 95 %, on one side
# (expected: .025): the chain's end at .84 in place of 1.96 sds; tau of eight schools has .05
_MASS = 0.2
_CHANCE = 1e-4  # smallest accepted p-value of the visits: one sound run in 10,000 is flagged

_MENDS = {
    "R-hat": "run longer, from other starts",
    "effective draws": "run longer",
    "R-hat of latents": "run longer: a latent moves in its silo's rounds alone",
    "effective draws of latents": "run longer: a latent moves in its silo's rounds alone",
    "rounds undone": "lower step_size, or the bias_target of fed.Step",
    "trajectories diverged": (
        "raise target_accept_prob, or reparameterize the model (sigma * z with a standard normal z "
        "in place of latents of sd sigma): the chains do not reach a part of the posterior"
    ),
    "steps cut": "lower step_size or fed.Step(bias_target=), or take fewer num_local_steps",
    "steps cut in a tail": "lower step_size or fed.Step(bias_target=): this tail is too long",
    "step size": (
        "the pilot of FSGLD measures how much wider a step makes the draws, and no check here "
        "does: take FSGLD, or compare with pooled NUTS"
    ),
    "inflation predicted": 'lower step_size, or leave it "auto"',
    "inflation met": (
        "lower step_size or fed.Step(bias_target=), take fewer num_local_steps, or "
        'surrogate="score"'
    ),
    "silos' pull": (
        'this silo\'s surrogate is not where the chain is: fit it again, surrogate="score"'
    ),
    "visits": (
        "the silos' visits do not follow selection=, by which their gradients are weighted: "
        "draw the silos by selection="
    ),
    "surrogate mass left out": (
        "the chains may have missed a part of the posterior, or the "
        "surrogates have mass where the posterior has none: run longer"
    ),
    "local moves": (
        "the local map is too narrow for some units, or the model too far from it: "
        "reparameterize, or run longer"
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """Result of :func:`diagnose`.

    :ivar table: one row per check: ``value``, ``limit``, ``where`` (the silo, site or chain where
        it is worst) and ``verdict``.
    """

    table: "DataFrame"

    @property
    def verdict(self) -> str:
        """Verdict of the run: ``"sound"``, ``"undecided"`` or ``"unsound"``.

        It is ``"unsound"`` where a check fails. It is ``"undecided"`` where draws are lacking, or
        where nothing measured what a step adds to the sds.
        """
        verdicts = set(self.table["verdict"])
        return next((v for v in ("unsound", "undecided") if v in verdicts), "sound")

    def summary(self) -> str:
        """Return the result as text, with a mend for each check that fails."""
        bad = self.table[self.table["verdict"] != "sound"]
        if not len(bad):
            return "The run is sound by its checks."
        lines = [
            f"{check}: {row['value']:.3g} ({row['where'] or 'all'}; accepted: {row['limit']}). "
            f"{(mend := _MENDS[str(check)])[0].upper()}{mend[1:]}."
            for check, row in bad.iterrows()
        ]
        head = "The run is unsound" if self.verdict == "unsound" else "The draws do not tell"
        return head + ":\n  " + "\n  ".join(lines)

    def _display(self) -> "DataFrame":
        return self.table.assign(value=[f"{v:.3g}" for v in self.table["value"]])

    def __repr__(self) -> str:
        return f"{self._display().to_string()}\n{self.verdict}. {self.summary()}"

    def _repr_html_(self) -> str:
        from html import escape

        return (
            f"{self._display().to_html(border=0)}"
            f"<p><b>{self.verdict}</b>. {escape(self.summary())}</p>"
        )


def diagnose(mcmc: MCMC) -> Diagnosis:
    """Judge a run over :class:`SGLD`, :class:`DSGLD`, :class:`FSGLD` or :class:`HMC`.

    No reference is needed. The checks are:

    * R-hat and effective draws of the global sites, and of at most 200 latents of inline silos;
    * rounds undone, and steps cut, in all and in each tail;
    * inflation of the sds, as the pilot predicted it and as the run met it; where neither is
      known, the run is undecided;
    * difference of each silo's pull from its surrogate's;
    * visits to the silos, against ``selection``;
    * mass of the surrogates' posterior left and right of the chains;
    * local moves that are stuck;
    * trajectories of :class:`HMC` that diverged.

    Each check has a limit, and names the silo, site or chain where it is worst.

    The checks miss what no silo's gradient shows at the chains' draws. Examples are a mode that the
    chains never reached, and a tail that is too thin.

    :param mcmc: an :class:`~numpyro.infer.MCMC` after its run.
    :return: a table with a verdict; it prints as both, with a mend for each check that fails.
    :raises ValueError: for a run over another kernel, or before a run.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.arange(20.0)}, "rome": {"y": jnp.arange(30.0)}})
        >>> mcmc = numpyro.infer.MCMC(fed.FSGLD(model), num_warmup=100, num_samples=1500,
        ...     num_chains=2, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(jax.random.key(0), silos)
        >>> fed.diagnose(mcmc).verdict
        'sound'
    """
    kernel = mcmc.sampler if isinstance(mcmc, MCMC) else None
    if not isinstance(kernel, LangevinKernel | HMC):
        raise ValueError(
            "expected an MCMC that has run over SGLD, DSGLD, FSGLD or HMC, got "
            f"{type(mcmc if kernel is None else kernel).__name__}; a posterior of fed.fit has its "
            "verdict in posterior.attrs['report'], and fed.check looks further"
        )
    if kernel.factors is None or mcmc.last_state is None:
        raise ValueError(
            "expected an MCMC that has run over SGLD, DSGLD, FSGLD or HMC, got "
            f"{type(kernel).__name__} without a run; call mcmc.run(rng_key, silos) first"
        )
    import pandas as pd

    fields = {k: np.asarray(v) for k, v in mcmc.get_extra_fields(group_by_chain=True).items()}
    rows = _draws(mcmc, kernel)
    if isinstance(kernel, HMC):
        share = fields["diverging"].mean(1)  # of all chains: each of many has few draws
        where, few = f"most in chain {int(share.argmax())}", share.mean() <= MOST_DIVERGED
        limit = f"<= {MOST_DIVERGED:.3g}"
        rows.append(_row("trajectories diverged", share.mean(), limit, where, few))
    else:
        rows += [*_guards(kernel, fields), *_visits(mcmc, kernel)]
        rows += _tails(mcmc, kernel, fields["cut_rate"]) if kernel.config.cut else []
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


def _by_chain(check: str, share: np.ndarray, limit: float = MOST_CUT) -> tuple:
    """Return a check of a share in each chain, where it is worst."""
    worst = int(share.argmax())
    return _row(check, share.max(), f"<= {limit:.3g}", f"chain {worst}", share.max() <= limit)


def _draws(mcmc: MCMC, kernel: LangevinKernel | HMC) -> list[tuple]:
    assert kernel.factors is not None
    draws = mcmc.get_samples(group_by_chain=True)
    least = _ESS * min(mcmc.num_chains, _CHAINS)
    out = _mixing({n: draws[n] for n, _ in kernel.factors.global_sites}, "", least, "unsound")
    # latents of remote silos stay there
    latents = {s.name: draws[s.name] for s in kernel.factors.local_sites if s.name in draws}
    # few visits to a silo give few effective draws of its latents, however good the chain
    return out + (
        _mixing(latents, " of latents", _ESS, "undecided", _MOST_LATENTS) if latents else []
    )


def _mixing(
    draws: dict, whose: str, least: float, bad: str, most: int | None = None
) -> list[tuple]:
    """Return R-hat and effective draws of sites, where they are worst.

    :param least: smallest accepted number of effective draws.
    :param bad: verdict of an R-hat that is too high.
    :param most: largest number of scalars that are checked. ``None``: all.
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
    if np.isfinite(rhat).any():  # a single chain of few draws has none
        at = int(np.nanargmax(rhat))
        out.append(
            _row(
                f"R-hat{whose}", rhat[at], f"<= {MAX_R_HAT}", owners[at], rhat[at] <= MAX_R_HAT, bad
            )
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


def _tails(mcmc: MCMC, kernel: LangevinKernel, cut_rate: np.ndarray) -> list[tuple]:
    """Return a check of the steps that are cut in a coordinate's tail, where it is worst.

    There the surrogates, which are Gaussian, pull in place of the silos.
    """
    assert kernel.factors is not None
    if _OUTER * cut_rate.size < _FEWEST_OUTER:
        return []
    draws, worst = mcmc.get_samples(group_by_chain=True), (0.0, "")
    for name, _ in kernel.factors.global_sites:
        x = np.asarray(draws[name]).reshape(cut_rate.size, -1)
        low, high = np.quantile(x, [_OUTER, 1 - _OUTER], axis=0)
        for side, outside in (("left", x <= low), ("right", x >= high)):
            share = np.where(outside, cut_rate.reshape(-1, 1), 0).sum(0) / outside.sum(0)
            worst = max(worst, (float(share.max()), f"{side} of {name}"))
    most, where = worst
    limit, sound = f"<= {_MOST_CUT_OUTSIDE}", most <= _MOST_CUT_OUTSIDE
    return [_row("steps cut in a tail", most, limit, where, sound)]


def _guards(kernel: LangevinKernel, fields: dict[str, np.ndarray]) -> list[tuple]:
    out = [_by_chain("rounds undone", (fields["diverging"] & (fields["cut_rate"] == 0)).mean(1))]
    if kernel.config.cut:
        # a long visit may take a chain far from where the pilot looked, so fewer cut steps matter
        reach = float(fields["step_size"].max()) * kernel.config.num_local_steps
        out.append(
            _by_chain("steps cut", fields["cut_rate"].mean(1), MOST_CUT * min(1.0, _REST / reach))
        )
    # remote silos do not say how many latents moved
    if kernel.config.units is not None and np.isfinite(fields["local_stuck"]).any():
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
                f"<= {MOST_CUT} stuck",
                f"silo {name!r}",
                share.max() <= MOST_CUT,
            )
        )
    predicted = (
        float(np.nanmax(fields["inflation"])) if np.isfinite(fields["inflation"]).any() else np.nan
    )
    if np.isfinite(predicted):
        out.append(
            _row("inflation predicted", predicted, f"<= {_SD_RATIO}", "", predicted <= _SD_RATIO)
        )
    elif "residual" not in fields:  # else the run itself shows the inflation
        largest = float(fields["step_size"].max())
        out.append(_row("step size", largest, "one that was measured", "", False, "undecided"))
    return out


def _visits(mcmc: MCMC, kernel: LangevinKernel) -> list[tuple]:
    from scipy.stats import chi2

    f = np.asarray(kernel.tuning.selection, float)
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
    """Return means of e ``(chains, rounds, d)`` and silos ``(chains, rounds)`` of whole rounds."""
    kept = kernel.config.num_kept
    residual, silo = fields["residual"].astype(float), fields["silo"]
    made = int(np.ravel(mcmc.last_state.i)[0])  # warm-up included, which may end inside a round
    start = -(made - silo.shape[1]) % kept
    residual, silo = residual[:, start:], silo[:, start:]
    rounds = residual.shape[1] // kept
    residual = residual[:, : rounds * kept].reshape(len(residual), rounds, kept, -1).mean(2)
    return residual, silo[:, : rounds * kept : kept]


def _noise(mcmc: MCMC, kernel: LangevinKernel, fields: dict[str, np.ndarray]) -> list[tuple]:
    if mcmc.thinning > 1 and kernel.config.num_kept > 1:  # a draw is not of a whole round
        return []
    residual, silo = _by_round(mcmc, kernel, fields)
    tuning, steps = kernel.tuning, kernel.config.num_local_steps
    f = np.asarray(tuning.selection, float)
    out = []
    if residual.shape[1] > 2 and kernel.config.schedule is None:
        h, dim = float(tuning.step_size), residual.shape[2]
        centered = residual - residual.mean((0, 1))
        now, lagged = centered[:, :-1].reshape(-1, dim), centered[:, 1:].reshape(-1, dim)
        # what e shares with the next round's e, at another silo, is drift
        spread = (centered.reshape(-1, dim).T @ centered.reshape(-1, dim)) / centered.size * dim
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
    """Return the row of the silo whose mean of ``f_s e`` is largest, beyond its standard error."""
    pulls = np.zeros(len(f))
    for s in range(len(f)):
        means = [r[where == s] for r, where in zip(residual, silo, strict=True)]
        e = f[s] * np.concatenate(means)
        if len(e) > 1:
            # visits to a silo are rounds apart, and _ERRORS covers the correlation that is left
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
    """Return the check of the surrogates' posterior beyond the chains' central 95 %.

    Its value is the largest mass left or right of that interval, over theta's coordinates.
    """
    from scipy.stats import norm

    factors, tuning = kernel.factors, kernel.tuning
    assert factors is not None
    if factors.transforms is None:  # the inverse of the transforms needs the model
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
