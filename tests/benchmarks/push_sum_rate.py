r"""How fast push-sum Langevin approaches the posterior.

Slopes of W2 against log t, for graphs and schedules, without Monte Carlo.

    python tests/benchmarks/push_sum_rate.py [--quick]
    python tests/benchmarks/push_sum_rate.py --bounds [--record]

The linear regression of models/decentralized_linear_regression.py, whose law at every step is
known: all rows, Gaussian laws, from the prior. A row per schedule and graph; "c" is a mu / m.
Slopes are those of log W2 (the worst node's, and the average's) and of the log consensus error over
the last decade of t. "limit" is what they tend to: -min(c, 1) for steps a / (b + t), and -gamma for
a / (b + t)^gamma, gamma < 1. Before it, W2 may fall faster: the mean of the start is forgotten like
t^-c, its covariance like t^-2c. "theorem" is -min(c, 1/2), the least that theorem 5.7 of Kolesov
and Kungurtsev allows. Of links that fail, medians over sequences. The constant step is the control:
its W2 does not fall.

With ``--bounds``: the constants of the theorem on graphs without failures, beside what they bound.
delta is the least push-sum weight of a node in the long run (of weights that sum to m), at least
1 / m^(mB). lambda is the factor by which disagreement shrinks in a step, at most
(1 - 1 / m^(mB))^(1 / (mB)); its distance from 1 is shown. B is the number of steps whose links
together connect all nodes. Slopes of W2 are those of steps 2 m / mu / (50 + t).
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

from decentralized_linear_regression import (
    OFFSET,
    STEEPNESS,
    Decay,
    distance,
    exact_law,
    graphs,
    potentials,
    slope,
)
from record import record

import numpyro_fed as fed


def schedules() -> dict[str, tuple[Decay, str, str]]:
    """Return the schedule, the slope in the limit, and the theorem's."""
    scale = potentials().scale
    values = np.linalg.eigvalsh(potentials().hessian.sum(0))
    largest = values[0] / values[-1] / 2  # c of alpha0 = m / (2 L), the theorem's largest
    found: dict[str, tuple[Decay, str, str]] = {}
    for c in (0.25, largest, 0.75, 1.5):
        found[f"a / (1 + t), c = {c:.2f}"] = (
            (c * scale, 1.0, 1.0),
            f"{-min(c, 1):.2f}",
            f"{-min(c, 0.5):.2f}",
        )
    for c in (1.5, 3.0):
        found[f"a / (50 + t), c = {c:.2f}"] = (
            (c * scale, 50.0, 1.0),
            f"{-min(c, 1):.2f}",
            f"{-min(c, 0.5):.2f}",
        )
    found["a / (50 + t)^0.65"] = ((scale, 50.0, 0.65), "-0.65", "")
    found["constant"] = ((0.1 * scale, 1.0, 1e-9), "0", "")
    return found


def measure(num_steps: int, num_sequences: int) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for name, (decay, limit, theorem) in schedules().items():
        for kind, graph in graphs().items():
            law = exact_law(
                graph, decay, num_steps, num_sequences=num_sequences if graph.fails else 1
            )
            w2 = distance(law)
            slopes = slope(w2)
            rows.append(
                {
                    "steps": name,
                    "graph": kind,
                    f"W2 at {num_steps:,}": f"{w2[-1, :-1].max():.1e}",
                    "nodes": f"{slopes[:-1].max():.2f}",
                    "average": f"{slopes[-1]:.2f}",
                    "limit": limit,
                    "theorem": theorem,
                    "consensus": f"{slope(np.median(law.consensus, 1)).max():.2f}",
                }
            )
    return pd.DataFrame(rows)


def bounds(num_steps: int) -> list[dict[str, Any]]:
    """Return a row of the table of constants for each graph."""
    rows = []
    for name, graph in {
        "ring of four": fed.graphs.ring(4),
        "its halves by turns": graphs()["periodic"],
        "star of four": fed.graphs.star(4),
        "almost circular (the paper's figure 2)": fed.graphs.almost_circular(),
    }.items():
        m, together = graph.num_nodes, graph.connectivity()
        least = float(m) ** (-m * together)
        decay = STEEPNESS * potentials(m).scale, OFFSET, 1.0
        w2 = distance(exact_law(graph, decay, num_steps))
        slopes = slope(w2)
        rows.append(
            {
                "graph": name,
                "nodes": m,
                "together": together,
                "delta": graph.least_weight()[0],
                "delta_bound": least,
                "gap": 1 - graph.contraction_rate(),
                "gap_bound": -np.expm1(np.log1p(-least) / (m * together)),
                "w2": w2[-1, :-1].max(),
                "nodes_slope": slopes[:-1].max(),
                "average_slope": slopes[-1],
            }
        )
    return rows


if __name__ == "__main__":
    start = time.time()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    num_steps, num_sequences = (2_000, 5) if args.quick else (10_000, 10)
    if args.bounds:
        rows = bounds(num_steps)
        print(pd.DataFrame(rows).to_string(index=False))
        if args.record:
            record("push_sum_bounds", rows, start)
    else:
        print(measure(num_steps, num_sequences).to_string(index=False))
