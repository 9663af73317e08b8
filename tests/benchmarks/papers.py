"""Experiments of the Langevin papers and of SFVI's topics, as rows of tables.

    NUMPYRO_FED_DATA=... python tests/benchmarks/papers.py [--record] [--quick] EXPERIMENT ...

The experiments are those of models/, whose functions run them at the same settings. ``bernoulli``
and ``gaussian``: figures 1 to 4 of the FSGLD paper. ``linear`` and ``visits``: figure 6, and the
same by the length of a visit. ``logistic``: figure 7. ``metric``: figure 5. ``topics``: figure 2 of
the SFVI paper. With ``--record`` each has a file of its own, ``papers_EXPERIMENT.json``. With
``--quick`` runs are short, to try the script; they are not recorded.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import bernoulli_variance
import gaussian_mean
import linear_regression
import logistic_regression
import metric_learning
import prod_lda
from record import record

import numpyro_fed as fed

Rows = list[dict[str, Any]]
SCALES = {"sd": "standard scores", "range": "[0, 1]"}
FAR_OFF = 0.7  # accuracy below which a chain of logistic regression is counted


def bernoulli(quick: bool) -> Rows:
    """Return sds of the gradient's estimates, and their ratios to SGLD's over theta."""
    frame = bernoulli_variance.table(1_000 if quick else 20_000)
    closed = frame["closed form"]
    rows = []
    for method in bernoulli_variance.METHODS:
        ratio = closed.loc[method] / closed.loc["SGLD"]
        row = {"method": method, "least": ratio.min(), "largest": ratio.max()}
        for name, theta in (("tenth", 0.1), ("half", 0.5)):
            at = int(np.abs(bernoulli_variance.THETA - theta).argmin())
            row |= {
                name: frame.loc[method]["sd"].iloc[at],
                f"{name}_closed": closed[method].iloc[at],
            }
        rows.append(row)
    return rows


def gaussian(quick: bool) -> Rows:
    """Return errors of means of draws, and sds of draws, by method and steps of a visit."""
    points = gaussian_mean.silos()
    num_draws, burn_in = (100, 2_000) if quick else (1_000, gaussian_mean.BURN_IN)
    runs = [(m, stay) for m in gaussian_mean.METHODS for stay in gaussian_mean.VISITS]
    draws = {run: gaussian_mean.fit(points, *run, num_draws, burn_in) for run in runs}
    rows = []
    for (method, stay), told in gaussian_mean.table(points, draws).iterrows():
        closed = {  # the defaults have no closed form
            name: "" if np.isnan(told[key]) else f" ({told[key]:{form}})"
            for name, key, form in (
                ("closed", "expected", ".2g"),
                ("sd_closed", "expected sd", ".3g"),
            )
        }
        errors = {f"after_{n}": told.get(f"{n:,} draws", np.nan) for n in (10, 100, 1_000)}
        rows.append({"method": method, "stay": stay, **errors, "sd": told["sd"], **closed})
    return rows


def linear(quick: bool) -> Rows:
    """Return test errors after numbers of rounds, and their variance over chains."""
    lr = linear_regression
    num_steps, num_chains = (60 * lr.VISIT, 3) if quick else (lr.ROUNDS * lr.VISIT, 10)
    names, scalings = (lr.DATA[:1], ["sd"]) if quick else (lr.DATA, list(lr.SCALINGS))
    with tempfile.TemporaryDirectory() as folder:
        tables = lr.figure_6(names, scalings, num_steps, num_chains, Path(folder) / "figure.png")
    rows = []
    for (name, scaling), frame in tables.items():
        columns = f"{lr.TITLES[name]}, {SCALES[scaling]}"
        best = lr.exact(*lr.split(name, scaling))
        for method, told in frame.iterrows():
            after = {f"after_{n}": told[n] for n in ("1", "10", "100", "all")}
            row = {"columns": columns, "method": method, "posterior": best, **after}
            rows.append({**row, "variance": told["variance"]})
    return rows


def visits(quick: bool) -> Rows:
    """Return errors over the posterior's, and their variances, by the steps of a visit."""
    lr = linear_regression
    num_steps, num_chains = (20 * lr.VISIT, 3) if quick else (lr.ROUNDS * lr.VISIT // 4, 10)
    rows = []
    frame = lr.by_visit(lr.DATA[:1] if quick else lr.DATA, num_steps, num_chains)
    for (title, scaling, method), told in frame.iterrows():
        row = {"columns": f"{title}, {SCALES[scaling]}", "method": method}
        for stay in lr.VISITS:
            row |= {f"error_{stay}": told[f"T = {stay:,}"]}
            row |= {f"variance_{stay}": told[f"variance, {stay:,}"]}
        rows.append(row)
    return rows


def logistic(quick: bool) -> Rows:
    """Return accuracies by data set and deal, and how many of FSGLD's chains are far off."""
    lr = logistic_regression
    settings: tuple[Any, ...] = (("magic",), 2_000, 60, 1) if quick else (lr.DATA, None, 200, 3)
    with tempfile.TemporaryDirectory() as folder:
        found = lr.figure_7(*settings, Path(folder) / "figure.png")
    rows = []
    for name in settings[0]:
        for partition in lr.PARTITIONS:
            row: dict[str, Any] = {"data": name, "deal": partition}
            for method in lr.METHODS:
                last = found[name, partition, method][:, -1]
                row |= {method: last.mean(), f"{method}_sd": last.std()}
            last = found[name, partition, "FSGLD"][:, -1]
            rows.append({**row, "chains": len(last), "far_off": int((last < FAR_OFF).sum())})
    return rows


def metric(quick: bool) -> Rows:
    """Return log likelihoods of pairs by method; means and sds over seeds are words."""
    ml = metric_learning
    x, letters = ml.data()
    sizes = {"num_silos": 4, "num_pairs": 300} if quick else {}
    seeds, rounds = (2, 100) if quick else (10, ml.ROUNDS)
    found, growths = ml.compare(x, letters, ml.VISIT, seeds, rounds, **sizes)
    frame = ml.table(found, growths)
    rows = [_metric_row(method, seeds, told) for method, told in frame.iterrows()]
    stayed = ml.kept(found, "FSGLD, moments") & ml.kept(found, "FSGLD, Laplace")
    if 0 < stayed.sum() < seeds:
        some = {run: ml.Curves(*(each[stayed] for each in curves)) for run, curves in found.items()}
        frame = ml.table(some, {method: each[stayed] for method, each in growths.items()})
        same = _metric_row(
            "DSGLD, the seeds of moments and Laplace", stayed.sum(), frame.loc["DSGLD"]
        )
        rows.insert(1, same)
    return rows


def _metric_row(method: str, seeds: int, told: pd.Series) -> dict[str, Any]:
    stayed = int(seeds) - int(told["left"])
    names = {
        name: name.replace(", ", " ").replace(" ", "_").replace("-", "_") for name in told.index
    }
    row = {"method": method, "seeds": stayed, **told.rename(names).to_dict()}
    return {**row, "above": told["above DSGLD"] and f"{told['above DSGLD']} of {stayed}"}


def topics(quick: bool) -> Rows:
    """Return coherence and perplexity of topics by method."""
    if quick:
        task = prod_lda.Task(prod_lda.corpus(600, 300), 8, 50, 4, 2)
    else:
        sizes = prod_lda.NUM_TOPICS, prod_lda.BATCH, prod_lda.EPOCHS, prod_lda.ROUNDS
        task = prod_lda.Task(prod_lda.corpus(), *sizes)
    frame, _ = prod_lda.compare(task, amortized=True)
    return [
        {
            "method": method,
            "umass": told["UMass"],
            "words": int(told["top words"]),
            "npmi": told["NPMI"],
            "perplexity": told["perplexity"],
            "network": "" if np.isnan(told["by network"]) else f"{told['by network']:.0f}",
        }
        for method, told in frame.iterrows()
    ]


EXPERIMENTS: dict[str, Callable[[bool], Rows]] = {
    each.__name__: each for each in (bernoulli, gaussian, linear, visits, logistic, metric, topics)
}


def main() -> None:
    """Run the experiments asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="+", metavar="EXPERIMENT", choices=EXPERIMENTS)
    parser.add_argument("--quick", action="store_true", help="short runs, which have no file")
    parser.add_argument("--record", action="store_true", help="write files of docs/results")
    args = parser.parse_args()
    if args.quick and args.record:
        parser.error("--quick has no file; leave out --record")
    fed.enable_compilation_cache()
    for name in args.experiments:
        start = time.time()
        rows = [
            {key: x.item() if isinstance(x, np.generic) else x for key, x in row.items()}
            for row in EXPERIMENTS[name](args.quick)
        ]
        print(pd.DataFrame(rows).to_string(), flush=True)
        if args.record:
            record(f"papers_{name}", rows, start)


if __name__ == "__main__":
    main()
