"""May FSGLD be trusted in place of pooling the data? Each model in `models/` beside pooled NUTS.

    python tests/benchmarks/fidelity.py [--baselines] [--start] [--references DIR] [PROBLEM ...]

Without a problem all of them, each in a process of its own. A row a method, a column for each of:
largest error of a mean (reference sds) ± its Monte-Carlo standard error, and range of the sd
ratios, of fixed effects and of log scales with correlations; local latents on the scale that is
read: share within 0.25 sd, largest error, ratios; megabytes that the busiest silo sent; seconds of
setup and of rounds (compilation included); least effective draws per chain-round, per second
of both, and per megabyte of all silos; share of steps cut; what `diagnose` says. In the row of NUTS
the megabytes are the pooled rows. Below: what misses the goals

    fixed effects            error <= 0.10 sd, ratio 0.93-1.07
    scales, correlations     error <= 0.15 sd, ratio 0.88-1.12
    local latents            error <= 0.25 sd for 99 % of them

"undecided" where it is outside by less than two standard errors. Then the run is repeated with more
rounds, where these take less than three minutes. ``--baselines``: DSGLD for as many rounds, and
what `baselines.py` combines. ``--start``: FSGLD started at a conducive fit, too, whose rounds and
megabytes are said; "prep" are all rounds of all silos before the first of the chains.
"""

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import pandas as pd
from baselines import combined
from fidelity_problems import NESTED, PROBLEMS, Draws, Problem
from numpyro.infer import MCMC, NUTS
from scipy.stats import kurtosis, skew

import numpyro_fed as fed

CHAINS: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
SHORT, LONG = (200, 1800), (500, 8000)  # rounds of warm-up and kept ones
GOALS = {"fixed": (0.10, 0.93, 1.07), "scales": (0.15, 0.88, 1.12)}
LOCAL_ERROR, LOCAL_SHARE = 0.25, 0.99
AGREEMENT, BLOCK, REFERENCE_SECONDS = (
    0.03,
    3000,
    300,
)  # of the reference's halves; draws before they are looked at
ROUNDS_SECONDS, PROCESS_SECONDS = 180, 2400
NOTED = 6  # parameters by name, worst first
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


def reference(problem: Problem, name: str, folder: Path | None) -> tuple[Draws, float]:
    """Draws of NUTS on the pooled rows and their seconds. Kept in ``folder``."""
    if problem.reference_draws is not None:
        return problem.reference_draws(), np.nan
    place = None if folder is None else folder / f"{problem.reference or name}.nc"
    if place is not None and place.is_file():
        kept = az.from_netcdf(place)
        print(kept.posterior.attrs["made"])
        return {str(k): v.values for k, v in kept.posterior.data_vars.items()}, float(
            kept.posterior.attrs["seconds"]
        )
    start = time.perf_counter()
    with jax.enable_x64(True):  # in float32 chains of 75,000 draws differed by ten standard errors
        draws, divergences = nuts_draws(problem, start)
    seconds = time.perf_counter() - start
    made = (
        f"NUTS: 8 x {next(iter(draws.values())).shape[1]} draws, {divergences} divergences, "
        f"{seconds:.0f} s"
    )
    print(made, flush=True)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        kept = az.from_dict(draws)
        kept.posterior.attrs |= {"made": made, "seconds": seconds}
        kept.to_netcdf(place)
    return draws, seconds


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
        self.cells: dict[str, Any] = {"method": method}
        self.notes: list[str] = []
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
        self.cells["local in 0.25"] = f"{100 * share:.1f} %"
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


def per_cost(ess: float, seconds: float, sent: float) -> dict[str, str]:
    """Effective draws per second, and per megabyte sent."""
    return {"ESS/s": f"{ess / seconds:.1f}", "ESS/MB": f"{1e6 * ess / sent:.0f}"}


def nuts(problem: Problem, silos: fed.Silos, draws: Draws, seconds: float) -> dict[str, Any]:
    """Return the reference's own line; the megabytes are those of the rows, sent once."""
    groups = problem.read(draws)
    ess = az.ess(az.convert_to_dataset({**groups["fixed"], **groups["scales"]}))
    least = min(float(v.min()) for v in ess.data_vars.values())
    sent = sum(np.asarray(v).nbytes for v in silos.pooled.values())
    return {
        "method": "NUTS, pooled",
        "s rounds": f"{seconds:.0f}",
        **per_cost(least, seconds, sent),
    }


def langevin(
    method: str, kernel: Any, problem: Problem, silos: fed.Silos, wanted: Draws, rounds: tuple
) -> Row:
    """Run a kernel, and look at it."""
    start = time.perf_counter()
    kernel.init(jax.random.key(0), rounds[0], None, (silos,), {})
    jax.block_until_ready(kernel._tuning)
    middle = time.perf_counter()
    mcmc = MCMC(kernel, num_warmup=rounds[0], num_samples=rounds[1], **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    seconds = middle - start, time.perf_counter() - middle
    row = Row(f"{method}, 4 x ({rounds[0]} + {rounds[1]})", draws, wanted, problem)
    fields, sent = mcmc.get_extra_fields(), kernel.ledger(mcmc.last_state).bytes_up
    row.cells |= {
        "MB/silo": f"{max(sent) / 1e6:.2f}",
        "prep": kernel._setup_cost.rounds,
        "s prep": f"{seconds[0]:.0f}",
        "s rounds": f"{seconds[1]:.0f}",
        "ESS/round": f"{row.least_ess / (4 * sum(rounds)):.3f}",
        **per_cost(row.least_ess, sum(seconds), sum(sent)),
        "cut %": f"{100 * float(np.mean(fields['cut_rate'])):.2f}",
    }
    diagnosis = fed.diagnose(mcmc)
    row.cells["diagnose"] = diagnosis.verdict
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
    row.notes = [f"{row.cells['method']}: {note}" for note in row.notes]
    return row


def attempt(method: str, rows: list[dict], notes: list[str], make: Any) -> Row | None:
    """Return a row, or the error in its place."""
    try:
        row = make()
    except Exception as error:
        traceback.print_exc()
        rows.append({"method": method, "goals": f"failed: {type(error).__name__}"})
        notes.append(f"{method}: {type(error).__name__}: {str(error)[:300]}")
        return None
    rows.append(row.finish())
    notes.extend(row.notes)
    print(pd.DataFrame([row.finish()]).to_string(index=False), flush=True)
    return row


def started(problem: Problem, silos: fed.Silos, nested: bool) -> fed.FSGLD:
    """FSGLD at the end of conducive rounds, those of `fed.fit`."""
    guide = fed.AutoSiloNormal(problem.model, local_cov="full" if nested else "element")
    start = time.perf_counter()
    result = fed.ConduciveSFVI(problem.model, guide).run(
        jax.random.key(0), 40, silos, tol=0.1, progress_bar=False
    )
    print(
        f"conducive: {len(result.losses)} rounds, {max(result.ledger.bytes_up) / 1e6:.3f} MB/silo, "
        f"{time.perf_counter() - start:.0f} s"
    )
    return fed.FSGLD(problem.model, init_from=result)


def run(name: str, baselines: bool, start: bool, folder: Path | None) -> None:
    """Print the table of one problem."""
    problem, rows, notes = PROBLEMS[name], [], []
    print(f"\n=== {name}", flush=True)
    silos = problem.silos()
    wanted, nuts_seconds = reference(problem, name, folder)
    apart = halves_apart(problem.read(wanted))
    print(
        ", ".join(f"the reference's halves differ by {v:.3f} sd ({k})" for k, v in apart.items()),
        flush=True,
    )
    rows.append(nuts(problem, silos, wanted, nuts_seconds))
    plain = fed.FSGLD(problem.model)
    kernels = {
        "FSGLD": plain,
        "FSGLD, auto": fed.FSGLD(problem.model, fed.Step(noise_correction=True), selection="auto"),
    }
    if start:
        kernels["FSGLD, started"] = started(problem, silos, name in NESTED)
    if baselines:
        kernels["DSGLD"] = fed.DSGLD(problem.model, step_size="auto")
    for method, kernel in kernels.items():

        def fit(kernel: Any = kernel, method: str = method, rounds: tuple = SHORT) -> Row:
            return langevin(method, kernel, problem, silos, wanted, rounds)

        row = attempt(method, rows, notes, fit)
        longer = sum(LONG) / sum(SHORT) * float(row.cells["s rounds"]) if row else np.inf
        if row is not None and row.undecided and method != "DSGLD" and longer < ROUNDS_SECONDS:
            attempt(method, rows, notes, lambda: fit(rounds=LONG))
    if baselines and plain.factors is not None and len(silos) <= MOST_SILOS:
        for method, make in combined(plain, silos, OWN_DRAWS).items():

            def combine(method: str = method, make: Any = make) -> Row:
                draws, seconds = make()
                row = Row(method, draws, wanted, problem)
                row.cells["s rounds"] = f"{seconds:.0f}"
                row.notes = []
                return row

            attempt(method, rows, notes, combine)
    print(
        f"\n{name}\n{pd.DataFrame(rows).to_string(index=False, na_rep='')}\n" + "\n".join(notes),
        flush=True,
    )


if __name__ == "__main__":
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
    args = parser.parse_args()
    unknown = sorted(set(args.problems) - set(PROBLEMS))
    if unknown:
        parser.error(f"expected problems out of {', '.join(PROBLEMS)}, got {', '.join(unknown)}")
    if len(args.problems) == 1:
        run(args.problems[0], args.baselines, args.start, args.references)
    else:
        for problem in (
            args.problems or PROBLEMS
        ):  # a process each: one that fails or hangs does not stop the rest
            command = [
                sys.executable,
                __file__,
                problem,
                *(a for a in sys.argv[1:] if a not in PROBLEMS),
            ]
            try:
                subprocess.run(command, timeout=PROCESS_SECONDS, check=False)
            except subprocess.TimeoutExpired:
                print(f"\n{problem}: stopped after {PROCESS_SECONDS} s", flush=True)
