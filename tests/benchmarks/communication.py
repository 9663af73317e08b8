"""What rounds and bytes buy.

Local steps a round at equal numbers of gradients, FSGLD beside DSGLD and SGLD, and silos that do
not answer.

    python tests/benchmarks/communication.py [MODEL ...] [--steps 40000] [--quick]

For T = 1, 10, 40, 100 and 400: largest error of the global sites in sds of pooled NUTS after as
many local steps (four chains), with its Monte-Carlo standard error, and the rounds and megabytes
up, all chains and silos, after which every running mean of the four chains is within 0.1 sd for
good. "Prepared": megabytes up before the first round. FSGLD chooses its step for each T; DSGLD has
FSGLD's step at T = 1 in the same whitened coordinates, and then its own; SGLD, on one silo with all
rows, makes a round of each step (in a federation each silo would have to send its part). The last
row has FSGLD at T = 40 with three rounds in ten unanswered.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import pandas as pd
from fidelity_problems import PROBLEMS
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_models import SilentSilos

CHAINS: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
VISITS = (1, 10, 40, 100, 400)
CLOSE = 0.1


def flat(samples: dict[str, Any], names: list[str]) -> np.ndarray:
    """Draws of the global sites, ``(chains, draws, scalars)``."""
    return np.concatenate(
        [np.asarray(samples[n], float).reshape(*samples[n].shape[:2], -1) for n in names], axis=2
    )


def standard_errors(draws: np.ndarray) -> np.ndarray:
    return az.mcse(az.convert_to_dataset({"x": draws}))["x"].values


def row(label: str, mcmc: MCMC, names: list[str], reference: np.ndarray) -> dict[str, Any]:
    moves = reference.std((0, 1)) > 1e-6  # a Cholesky factor has constants
    draws, reference = (
        flat(mcmc.get_samples(group_by_chain=True), names)[..., moves],
        reference[..., moves],
    )
    mean, sd = reference.mean((0, 1)), reference.std((0, 1))
    count = draws.shape[1]
    errors = np.abs(draws.mean(0).cumsum(0) / np.arange(1, count + 1)[:, None] - mean) / sd
    worst = int(errors[-1].argmax())
    noise = np.hypot(standard_errors(draws), standard_errors(reference))[worst] / sd[worst]
    outside = np.flatnonzero(errors.max(1) > CLOSE)
    rounds = int(outside[-1]) + 2 if len(outside) else 1
    reached = rounds <= count
    ledger, setup = mcmc.sampler.ledger(mcmc.last_state), mcmc.sampler._setup_cost
    setup = len(ledger.silos) * setup.bytes_up
    up = (sum(ledger.bytes_up) - setup) / (4 * count)
    ratio = draws.std((0, 1)) / sd
    return {
        "kernel": label,
        "step size": round(float(mcmc.last_state.step_size.ravel()[0]), 5),
        "error": f"{errors[-1, worst]:.3f} ± {noise:.3f}",
        "sd ratio": f"{ratio.min():.2f}-{ratio.max():.2f}",
        "ESS a round": round(
            float(az.ess(az.convert_to_dataset({"x": draws}))["x"].min()) / (4 * count), 4
        ),
        "rounds to 0.1 sd": 4 * rounds if reached else f"> {4 * count}",
        "MB up": round(4 * rounds * up / 1e6, 3) if reached else f"> {4 * count * up / 1e6:.3f}",
        "prepared": round(setup / 1e6, 3),
    }


def run(name: str, steps: int, nuts_draws: int) -> pd.DataFrame:
    problem = PROBLEMS[name]
    model, silos = problem.model, problem.silos()
    nuts = MCMC(
        NUTS(problem.reference_model or model, target_accept_prob=0.95),
        num_warmup=1000,
        num_samples=nuts_draws,
        **CHAINS,
    )
    nuts.run(jax.random.key(1), **silos.pooled)
    exact = nuts.get_samples(group_by_chain=True)
    rows: list[dict[str, Any]] = []

    def add(label: str, kernel: Any, stay: int) -> float:
        mcmc = MCMC(kernel, num_warmup=0, num_samples=steps // stay, **CHAINS)
        mcmc.run(jax.random.key(0), silos)
        names = [n for n, _ in kernel.factors.global_sites]
        rows.append(row(label, mcmc, names, flat(exact, names)))
        print(f"{name} {rows[-1]}", file=sys.stderr, flush=True)
        return float(mcmc.last_state.step_size.ravel()[0])

    steps_found = [
        add(f"FSGLD, T = {stay}", fed.FSGLD(model, num_local_steps=stay), stay) for stay in VISITS
    ]
    for stay in VISITS:
        add(f"DSGLD, T = {stay}", fed.DSGLD(model, fed.Step(steps_found[0]), stay), stay)
    for stay in (1, 40):
        add(f"DSGLD, T = {stay}, own step", fed.DSGLD(model, "auto", stay), stay)
    add("SGLD, a round a step", fed.SGLD(model, "auto", 1), 1)
    add("FSGLD, T = 40, 30 % unanswered", SilentSilos(model, silence=0.3), 40)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "models",
        nargs="*",
        default=["heart_disease", "six_cities"],
        choices=PROBLEMS,
        metavar="MODEL",
    )
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    for name in args.models:
        table = run(name, 4000 if args.quick else args.steps, 500 if args.quick else 4000)
        print(f"\n{name}\n{table.to_string(index=False)}\n", flush=True)
