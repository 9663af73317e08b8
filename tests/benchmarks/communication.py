"""What rounds and bytes buy: local steps a round at equal numbers of gradients, FSGLD beside DSGLD and SGLD, and silos that do not answer.

    python tests/benchmarks/communication.py [MODEL ...] [--steps 40000] [--quick]

For T = 1, 10, 40, 100 and 400: largest error of the global sites in sds of pooled NUTS after as many local steps (four chains), and the rounds and megabytes up after which
every running mean of the four chains is, and stays, within 0.1 sd. FSGLD chooses its step for each T; DSGLD has FSGLD's step at T = 1 in the same whitened
coordinates; SGLD on one silo makes a round of each step. The last row has FSGLD at T = 40 with three rounds in ten unanswered.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
CHAINS: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
STAYS = (1, 10, 40, 100, 400)
CLOSE = 0.1


def flat(samples: dict[str, Any], names: list[str]) -> np.ndarray:
    """Draws of the global sites, ``(chains, draws, scalars)``."""
    return np.concatenate([np.asarray(samples[n], float).reshape(*samples[n].shape[:2], -1) for n in names], axis=2)


def row(label: str, mcmc: MCMC, silos: fed.Silos, names: list[str], mean: np.ndarray, sd: np.ndarray) -> dict[str, Any]:
    draws = flat(mcmc.get_samples(group_by_chain=True), names)
    count = draws.shape[1]
    running = (np.abs(draws.mean(0).cumsum(0) / np.arange(1, count + 1)[:, None] - mean) / sd).max(1)
    outside = np.flatnonzero(running > CLOSE)
    ledger = mcmc.sampler.ledger(mcmc.last_state)
    setup = mcmc.sampler._setup_cost
    rounds = len(outside) and int(outside[-1]) + 1
    reached = rounds < count
    up = (sum(ledger.bytes_up) - len(silos) * setup.bytes_up) / max(1, sum(ledger.rounds) - len(silos) * setup.rounds)
    return {
        "kernel": label,
        "step size": float(mcmc.last_state.step_size.ravel()[0]),
        "error": round(float(running[-1]), 3),
        "sd ratio": f"{(draws.std((0, 1)) / sd).min():.2f}-{(draws.std((0, 1)) / sd).max():.2f}",
        "rounds to 0.1 sd": 4 * rounds if reached else f"> {4 * count}",
        "MB up to it": round((4 * rounds * up + len(silos) * setup.bytes_up) / 1e6, 3) if reached else "-",
    }


def run(name: str, steps: int, nuts_draws: int) -> pd.DataFrame:
    module = importlib.import_module(name)
    silos = module.silos()
    nuts = MCMC(NUTS(module.model, target_accept_prob=0.95), num_warmup=1000, num_samples=nuts_draws, **CHAINS)
    nuts.run(jax.random.key(1), **silos.pooled)
    rows, names, small = [], [], 0.0
    for stay in STAYS:
        kernel = fed.FSGLD(module.model, num_local_steps=stay)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=steps // stay, **CHAINS)
        mcmc.run(jax.random.key(0), silos)
        assert kernel.factors is not None
        names = [n for n, _ in kernel.factors.global_sites]
        reference = flat(nuts.get_samples(group_by_chain=True), names)
        law = reference.mean((0, 1)), reference.std((0, 1))
        small = small or float(mcmc.last_state.step_size.ravel()[0])
        rows.append(row(f"FSGLD, T = {stay}", mcmc, silos, names, *law))
    for stay in STAYS:
        kernel = fed.DSGLD(module.model, small, stay, preconditioner="surrogate")
        mcmc = MCMC(kernel, num_warmup=0, num_samples=steps // stay, **CHAINS)
        mcmc.run(jax.random.key(0), silos)
        rows.append(row(f"DSGLD, T = {stay}", mcmc, silos, names, *law))
    mcmc = MCMC(
        fed.SGLD(module.model, "auto", 1, preconditioner="surrogate"), num_warmup=0, num_samples=steps, **CHAINS
    )
    mcmc.run(jax.random.key(0), silos)
    rows.append(row("SGLD, a round a step", mcmc, silos, names, *law))
    mcmc = MCMC(fed.FSGLD(module.model, no_answer=0.3), num_warmup=0, num_samples=steps // 40, **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    rows.append(row("FSGLD, T = 40, 30 % unanswered", mcmc, silos, names, *law))
    return pd.DataFrame(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["heart_disease", "six_cities"])
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    for name in args.models:
        table = run(name, 4000 if args.quick else args.steps, 500 if args.quick else 4000)
        print(f"\n{name}\n{table.to_string(index=False)}\n", flush=True)
