"""May FSGLD be trusted in place of pooling the data? Each model in `models/` beside pooled NUTS.

    python tests/benchmarks/fidelity.py [--baselines] [--start] [--references DIR] [--record NAME]
        [PROBLEM ...]

Without a problem all of them, each in a process of its own. A row a method, a column for each of:
largest error of a mean (reference sds) ± its Monte-Carlo standard error, and range of the sd
ratios, of fixed effects and of log scales with correlations; local latents on the scale that is
read: share within 0.25 sd, largest error, ratios; megabytes that the busiest silo sent; all rounds
of silos before the first of the chains; least effective draws per chain-round and per megabyte of
all silos; share of steps cut; what `diagnose` says. Seconds are those of `first_answer.py`. Below:
what misses the goals

    fixed effects            error <= 0.10 sd, ratio 0.93-1.07
    scales, correlations     error <= 0.15 sd, ratio 0.88-1.12
    local latents            error <= 0.25 sd for 99 % of them

"undecided" where it is outside by less than two standard errors. Then the run is repeated with more
rounds, where these take less than three minutes. ``--baselines``: DSGLD for as many rounds, and
what `baselines.py` combines. ``--start``: FSGLD started at a conducive fit, too.
"""

import argparse
import time
import traceback
from collections.abc import Callable
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import pandas as pd
from baselines import combined
from fidelity_problems import NESTED, PROBLEMS, Draws, Problem
from numpyro.infer import MCMC, NUTS
from record import record
from scipy.stats import kurtosis, skew

import numpyro_fed as fed

CHAINS: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
SHORT, LONG = (200, 1800), (500, 8000)  # rounds of warm-up and kept ones
GOALS = {"fixed": (0.10, 0.93, 1.07), "scales": (0.15, 0.88, 1.12)}
LOCAL_ERROR, LOCAL_SHARE = 0.25, 0.99
# of the reference's halves; draws before they are looked at
AGREEMENT, BLOCK, REFERENCE_SECONDS = 0.03, 3000, 300
ROUNDS_SECONDS, PROCESS_SECONDS = 180, 2400
NOTED = 6  # parameters by name, worst first
COLUMNS = (
    "fixed",
    "fixed ratio",
    "scales",
    "scales ratio",
    "local within",
    "local worst",
    "local ratio",
)
MOST_SILOS, OWN_DRAWS = 20, 1000  # of baselines that run NUTS, and compile it, in each silo


def halves_apart(draws: dict[str, Draws]) -> dict[str, float]:
    """Return the largest difference of means between two halves of the chains, in sds.

    :return: the differences of global and of local quantities.
    """
    out = {}
    for label, groups in (("global", ("fixed", "scales")), ("local", ("local",))):
        gaps = []
        for x in (
            v.astype(float) for group in groups for v in draws[group].values()
        ):  # sums of float32 lose digits
            half = len(x) // 2
            sd = x.std((0, 1))
            gap = np.abs(x[:half].mean((0, 1)) - x[half:].mean((0, 1)))
            gaps.append(float(np.max(gap[sd > 0] / sd[sd > 0], initial=0.0)))
        if gaps:
            out[label] = max(gaps)
    return out


def reference(problem: Problem, name: str, folder: Path | None) -> Draws:
    """Draws of NUTS on the pooled rows. Kept in ``folder``."""
    if problem.reference_draws is not None:
        return problem.reference_draws()
    place = None if folder is None else folder / f"{problem.reference or name}.nc"
    if place is not None and place.is_file():
        kept = az.from_netcdf(place)
        print(kept.posterior.attrs["made"])
        return {str(k): v.values for k, v in kept.posterior.data_vars.items()}
    start = time.perf_counter()
    with jax.enable_x64(True):  # in float32 chains of 75,000 draws differed by ten standard errors
        draws, divergences = nuts_draws(problem, start)
    made = (
        f"NUTS: 8 x {next(iter(draws.values())).shape[1]} draws, {divergences} divergences, "
        f"{time.perf_counter() - start:.0f} s"
    )
    print(made, flush=True)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        kept = az.from_dict(draws)
        kept.posterior.attrs["made"] = made
        kept.to_netcdf(place)
    return draws


def nuts_draws(problem: Problem, start: float) -> tuple[Draws, int]:
    """Until two halves of eight chains agree, or time is up; and how many diverged."""
    kernel = NUTS(
        problem.reference_model or problem.model, target_accept_prob=problem.target_accept_prob
    )
    mcmc = MCMC(kernel, num_warmup=1000, num_samples=BLOCK, **{**CHAINS, "num_chains": 8})
    blocks: list[Draws] = []
    divergences, apart = 0, {"global": np.inf}
    while apart["global"] > AGREEMENT and (
        not blocks or time.perf_counter() - start < REFERENCE_SECONDS
    ):
        if blocks:
            mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(jax.random.key(1), **problem.silos().pooled)
        blocks.append({k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()})
        divergences += int(np.sum(mcmc.get_extra_fields()["diverging"]))
        draws = {k: np.concatenate([b[k] for b in blocks], axis=1) for k in blocks[0]}
        apart = halves_apart(problem.read(draws))
    return draws, divergences


def batch_error(x: np.ndarray, batches: int = 10) -> np.ndarray:
    """Monte-Carlo standard errors of means by batch means, ``x`` of shape (chains, draws, k)."""
    length = x.shape[1] // batches
    means = x[:, : length * batches].reshape(-1, length, x.shape[-1]).mean(1)
    return means.std(0, ddof=1) / np.sqrt(len(means))


def local_table(fit: Draws, reference: Draws) -> pd.DataFrame:
    """Errors, standard errors and sd ratios of local latents, one row each."""
    rows = []
    for name in reference:
        x, y = (d[name].reshape(*d[name].shape[:2], -1).astype(float) for d in (fit, reference))
        sd = y.std((0, 1))
        rows.append(
            pd.DataFrame(
                {
                    "error": np.abs(x.mean((0, 1)) - y.mean((0, 1))) / sd,
                    "mcse": np.hypot(batch_error(x), batch_error(y)) / sd,
                    "sd_ratio": x.std((0, 1)) / sd,
                },
                index=[f"{name}[{i}]" for i in range(len(sd))],
            )
        )
    return pd.concat(rows)


def judge(table: pd.DataFrame, goals: tuple[float, float, float]) -> pd.Series:
    """Of each parameter: "met", "undecided", "missed"."""
    limit, low, high = goals
    ratio, spread = table["sd_ratio"], 2 * table["sd_ratio_mcse"].fillna(0)
    outside = (table["error"] > limit) | (ratio < low) | (ratio > high)
    far = (
        (table["error"] - 2 * table["mcse"].fillna(0) > limit)
        | (ratio + spread < low)
        | (ratio - spread > high)
    )
    far |= ~np.isfinite(table["error"])
    return pd.Series(
        np.where(far, "missed", np.where(outside, "undecided", "met")), index=table.index
    )


class Row:
    """One line of the table, and what it misses."""

    def __init__(self, method: str, fit: Draws, reference: Draws, problem: Problem) -> None:
        self.notes: list[str] = []
        self.cells: dict[str, Any] = {"method": method, "notes": self.notes}
        self.verdicts: list[str] = []
        self.least_ess = np.inf
        found, wanted = problem.read(fit), problem.read(reference)
        for group, goals in GOALS.items():
            if wanted[group]:
                self._globals(group, found[group], wanted[group], goals)
        if found["local"]:
            self._locals(found["local"], wanted["local"])

    def _globals(
        self, group: str, fit: Draws, reference: Draws, goals: tuple[float, float, float]
    ) -> None:
        table = fed.compare(fit, reference).table
        worst = table.loc[table["error"].idxmax()]
        self.cells[group] = f"{worst['error']:.3f} ± {worst['mcse']:.3f}"
        self.cells[f"{group} ratio"] = (
            f"{table['sd_ratio'].min():.3f}-{table['sd_ratio'].max():.3f}"
        )
        self.least_ess = min(self.least_ess, table["ess_bulk"].min())
        verdicts = judge(table, goals)
        self.verdicts += list(verdicts)
        bad = table[verdicts != "met"].sort_values("error", ascending=False)
        for name in bad.index[:NOTED]:
            row = table.loc[name]
            draws = _scalar(reference, name)
            self.notes.append(
                f"{verdicts[name]}: {name}, error {row['error']:.3f} ± {row['mcse']:.3f}, sd ratio "
                f"{row['sd_ratio']:.3f} ± "
                f"{row['sd_ratio_mcse']:.3f}, ess {row['ess_bulk']:.0f}, R-hat {row['r_hat']:.3f}; "
                "the reference's skewness "
                f"{skew(draws):.1f}, excess kurtosis {kurtosis(draws):.1f}"
            )
        if len(bad) > NOTED:
            self.notes.append(f"and {len(bad) - NOTED} more of {group}")

    def _locals(self, fit: Draws, reference: Draws) -> None:
        table = local_table(fit, reference)
        share = (table["error"] <= LOCAL_ERROR).mean()
        perhaps = (table["error"] - 2 * table["mcse"] <= LOCAL_ERROR).mean()
        worst = table.loc[table["error"].idxmax()]
        self.cells["local within"] = f"{100 * share:.1f}"
        self.cells["local worst"] = f"{worst['error']:.3f} ± {worst['mcse']:.3f}"
        self.cells["local ratio"] = f"{table['sd_ratio'].min():.2f}-{table['sd_ratio'].max():.2f}"
        verdict = (
            "met" if share >= LOCAL_SHARE else "undecided" if perhaps >= LOCAL_SHARE else "missed"
        )
        self.verdicts.append(verdict)
        if verdict != "met":
            self.notes.append(
                f"{verdict}: local latents, {100 * share:.1f} % of {len(table)} within "
                f"{LOCAL_ERROR} sd, {100 * perhaps:.1f} % by two "
                f"standard errors; worst {table['error'].idxmax()}"
            )

    @property
    def undecided(self) -> bool:
        """Return True if more draws may decide it."""
        return "undecided" in self.verdicts and "missed" not in self.verdicts

    def finish(self) -> dict[str, Any]:
        """Return the line with its verdict."""
        counts = {v: self.verdicts.count(v) for v in ("missed", "undecided")}
        self.cells["goals"] = ", ".join(f"{n} {v}" for v, n in counts.items() if n) or "met"
        return self.cells


def _scalar(draws: Draws, label: str) -> np.ndarray:
    name, _, place = label.partition("[")
    place = tuple(int(i) for i in place.rstrip("]").split(",")) if place else ()
    return draws[name][(..., *place)].ravel()


def langevin(
    method: str, kernel: Any, problem: Problem, silos: fed.Silos, wanted: Draws, rounds: tuple
) -> Row:
    """Run a kernel, and look at it."""
    mcmc = MCMC(kernel, num_warmup=rounds[0], num_samples=rounds[1], **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    row = Row(f"{method}, {rounds[1]:,}", draws, wanted, problem)
    fields, sent = mcmc.get_extra_fields(), kernel.ledger(mcmc.last_state).bytes_up
    diagnosis = fed.diagnose(mcmc)
    row.cells |= {
        "megabytes": max(sent) / 1e6,
        "rounds before": kernel._setup_cost.rounds,
        "ess a round": row.least_ess / (4 * sum(rounds)),
        "ess a megabyte": 1e6 * row.least_ess / sum(sent),
        "cut": 100 * float(np.mean(fields["cut_rate"])),
        "diagnose": diagnosis.verdict,
    }
    print(
        f"{method}: step size {float(fields['step_size'][0]):.2g}, local acceptance "
        f"{float(np.mean(fields['local_accept_prob'])):.3f}\n"
        f"{diagnosis.table.to_string()}",
        flush=True,
    )
    failing = diagnosis.table[diagnosis.table["verdict"] != "sound"]
    row.notes += [
        f"diagnose: {c} {r['value']:.3g} ({r['where']}), {r['verdict']}"
        for c, r in failing.iterrows()
    ]
    return row


def combination(method: str, draws: Callable[[], Draws], wanted: Draws, problem: Problem) -> Row:
    """Look at what a method makes of the silos' own posteriors."""
    return Row(method, draws(), wanted, problem)


def attempt(rows: list[dict], make: Callable[..., Row], method: str, *args: Any) -> Row | None:
    """Return a row, or the error in its place."""
    try:
        row = make(method, *args)
    except Exception as error:
        traceback.print_exc()
        failed = f"failed: {type(error).__name__}: {str(error)[:300]}"
        rows.append({"method": method, "goals": failed, "notes": []})
        return None
    rows.append(row.finish())
    print(pd.DataFrame([row.finish()]).to_string(index=False), flush=True)
    return row


def started(problem: Problem, silos: fed.Silos, nested: bool) -> fed.FSGLD:
    """FSGLD at the end of conducive rounds, those of `fed.fit`."""
    guide = fed.AutoSiloNormal(problem.model, local_cov="full" if nested else "element")
    result = fed.ConduciveSFVI(problem.model, guide).run(
        jax.random.key(0), 40, silos, tol=0.1, progress_bar=False
    )
    return fed.FSGLD(problem.model, init_from=result)


def run(name: str, baselines: bool, start: bool, folder: Path | None) -> list[dict[str, Any]]:
    """Return the rows of one problem."""
    problem, rows = PROBLEMS[name], []
    silos = problem.silos()
    wanted = reference(problem, name, folder)
    apart = halves_apart(problem.read(wanted))
    plain = fed.FSGLD(problem.model)
    auto = fed.Step(noise_correction=True)
    kernels = {"default": plain, "auto": fed.FSGLD(problem.model, auto, selection="auto")}
    if start:
        kernels["started"] = started(problem, silos, name in NESTED)
    if baselines:
        kernels["DSGLD"] = fed.DSGLD(problem.model, step_size="auto")
    for method, kernel in kernels.items():
        before = time.perf_counter()
        row = attempt(rows, langevin, method, kernel, problem, silos, wanted, SHORT)
        longer = sum(LONG) / sum(SHORT) * (time.perf_counter() - before)
        if row is not None and row.undecided and method != "DSGLD" and longer < ROUNDS_SECONDS:
            attempt(rows, langevin, method, kernel, problem, silos, wanted, LONG)
    if baselines and plain.factors is not None and len(silos) <= MOST_SILOS:
        for method, draws in combined(plain, silos, OWN_DRAWS).items():
            attempt(rows, combination, method, draws, wanted, problem)
    told = {"problem": name, "reference": apart} | dict.fromkeys(COLUMNS, "")
    return [told | row for row in rows]


def main() -> None:
    """Judge the problems asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=", ".join(PROBLEMS))
    parser.add_argument("--baselines", action="store_true", help="other methods, too")
    parser.add_argument(
        "--start", action="store_true", help="FSGLD started at a conducive fit, too"
    )
    parser.add_argument(
        "--references",
        type=Path,
        metavar="DIR",
        help="keep NUTS's draws here, and take them from here",
    )
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    unknown = sorted(set(args.problems) - set(PROBLEMS))
    if unknown:
        parser.error(f"expected problems out of {', '.join(PROBLEMS)}, got {', '.join(unknown)}")
    began, rows = time.time(), []
    for name in args.problems or PROBLEMS:
        print(f"\n=== {name}", flush=True)
        with get_context("spawn").Pool(1) as pool:  # one that fails or hangs does not stop the rest
            job = pool.apply_async(run, (name, args.baselines, args.start, args.references))
            try:
                found = job.get(PROCESS_SECONDS)
            except TimeoutError:
                print(f"{name}: stopped after {PROCESS_SECONDS} s", flush=True)
                continue
        table = pd.DataFrame(found).drop(columns=["problem", "reference", "notes"])
        print(f"{name}\n{table.to_string(index=False)}")
        print(*(f"{row['method']}: {note}" for row in found for note in row["notes"]), sep="\n")
        rows += found
        if args.record:
            record(args.record, rows, began)


if __name__ == "__main__":
    main()
