"""FSGLD with its defaults beside pooled NUTS, and beside what combines the silos' own posteriors.

    python tests/benchmarks/accuracy.py [--quick] [six_cities six_cities_ten heart_disease]

For each problem a row per method: largest error of a mean (in NUTS's sds) with its Monte-Carlo standard error, range
of sd ratios, least effective sample size per chain-round, megabytes that left all silos, seconds. Fixed effects and log scales
apart; for six cities also the children's intercepts.

Methods: FSGLD (defaults, 4 chains x 2,000 rounds in all, warm-up included); the one-shot product of its surrogates;
Consensus Monte Carlo (Scott et al. 2016) and the parametric product (Neiswanger et al. 2014), both from
`numpyro.infer.hmc_util`, on NUTS draws of each silo's posterior with the prior to the power 1/S.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import random
from numpyro.infer import MCMC, NUTS
from numpyro.infer.hmc_util import consensus, parametric
from numpyro.infer.util import transform_fn

import numpyro_fed as fed
from numpyro_fed.density import Factors

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
import heart_disease
import six_cities

CHAINS = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
PROBLEMS: dict[str, tuple[Any, Callable[[], fed.Silos]]] = {
    "six_cities": (six_cities, six_cities.silos),
    "six_cities_ten": (six_cities, lambda: six_cities.silos(six_cities.TEN)),
    "heart_disease": (heart_disease, heart_disease.silos),
}


def parameters(samples: dict[str, Any]) -> dict[str, np.ndarray]:
    """What is compared: fixed effects, log scales, and random intercepts, (chains, draws, ...)."""
    out = {k: np.asarray(v) for k, v in samples.items() if k not in ("z", "sigma")}
    if "sigma" in samples:
        out["log_sigma"] = np.log(samples["sigma"])
        if "z" in samples:
            z = np.asarray(samples["z"])
            out["b"] = np.asarray(samples["sigma"])[..., None] * z.reshape(*z.shape[:2], -1)
    return out


def silo_draws(factors: Factors, silos: fed.Silos, num_samples: int) -> list[jnp.ndarray]:
    """Draws of each silo's own posterior, the prior shared out: flat unconstrained global positions."""
    draws = []
    for s, name in enumerate(silos.names):
        kwargs = silos[name]
        groups = factors.local_groups()
        weights = dict.fromkeys(silos.sizes, 1.0)
        local = {v.name: (silos.sizes[groups[v.name]][s], *v.shape) for v in factors.local_sites}

        def potential(z: dict, kwargs: dict = kwargs, weights: dict = weights) -> jnp.ndarray:
            theta = factors.unravel(z["theta"])
            prior = factors.log_prior(theta, silos.shared) / len(silos)
            return -prior - factors.log_local(theta, z["local"], kwargs, weights)

        start = {"theta": jnp.zeros(factors.dim), "local": {k: jnp.zeros(v) for k, v in local.items()}}
        mcmc = MCMC(NUTS(potential_fn=potential), num_warmup=500, num_samples=num_samples, progress_bar=False)
        mcmc.run(random.key(s), init_params=start)
        draws.append(mcmc.get_samples()["theta"])
    return draws


def as_chains(factors: Factors, flat: jnp.ndarray) -> dict[str, np.ndarray]:
    """Flat unconstrained draws as constrained sites of four chains."""
    sites = transform_fn(factors.transforms, jax.vmap(factors.unravel)(flat))
    return parameters({k: np.asarray(v).reshape(4, -1, *v.shape[1:]) for k, v in sites.items()})


def row(method: str, fit: dict, reference: dict, rounds: int = 0, megabytes: float = 0.0, seconds: float = 0.0) -> dict:
    """One line of the table."""
    shared = [k for k in reference if k in fit and k != "b"]
    table = fed.compare(fit, reference, var_names=shared).table
    scale = table.index.str.startswith("log_")
    out: dict[str, Any] = {"method": method}
    for label, part in (("fixed effects", table[~scale]), ("log scale", table[scale])):
        if len(part):
            worst = part.loc[part["error"].idxmax()]
            out[label] = f"{worst['error']:.3f} ± {worst['mcse']:.3f}"
            out[f"sd ratio, {label}"] = f"{part['sd_ratio'].min():.3f}-{part['sd_ratio'].max():.3f}"
    if "b" in fit:
        intercepts = fed.compare(fit, reference, var_names=["b"]).table
        out["intercepts within 0.25 sd"] = f"{100 * (intercepts['error'] <= 0.25).mean():.1f} %"
    if rounds:
        out["ESS/round"] = f"{table['ess_bulk'].min() / rounds:.3f}"
        out["MB up"] = f"{megabytes:.2f}"
    out["s"] = f"{seconds:.0f}"
    return out


def run(name: str, quick: bool) -> pd.DataFrame:
    module, data = PROBLEMS[name]
    silos = data()
    num_warmup, num_samples = (100, 200) if quick else (200, 1800)
    nuts = MCMC(NUTS(module.model), num_warmup=500, num_samples=500 if quick else 4000, **CHAINS)
    nuts.run(random.key(1), **silos.pooled)
    reference = parameters(nuts.get_samples(group_by_chain=True))

    start = time.perf_counter()
    mcmc = MCMC(fed.FSGLD(module.model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(random.key(0), silos)
    draws = parameters(mcmc.get_samples(group_by_chain=True))
    kernel = mcmc.sampler
    megabytes = sum(kernel.ledger(mcmc.last_state).bytes_up) / 1e6
    fields = mcmc.get_extra_fields()
    print(
        f"{name}: step size {float(fields['step_size'][0]):.4f}, predicted inflation {float(fields['inflation'][0]):.3f}, "
        f"local acceptance {float(fields['local_accept_prob'].mean()):.3f}, cut {100 * float(fields['cut_rate'].mean()):.3f} %"
    )
    seconds = time.perf_counter() - start
    rows = [row("FSGLD", draws, reference, 4 * (num_warmup + num_samples), megabytes, seconds)]

    factors = kernel.factors
    one_shot = kernel.surrogates.posterior()
    flat = random.multivariate_normal(random.key(2), one_shot.mean, one_shot.covariance, (8000,))
    rows.append(row("one-shot surrogate product", as_chains(factors, flat), reference))
    start = time.perf_counter()
    subposteriors = silo_draws(factors, silos, 500 if quick else 4000)
    seconds = time.perf_counter() - start
    combined = consensus(subposteriors, rng_key=random.key(3))
    rows.append(row("Consensus Monte Carlo", as_chains(factors, combined), reference, seconds=seconds))
    # parametric_draws refuses a covariance that rounding made asymmetric; its moments are what we want
    mean, covariance = parametric(subposteriors)
    product = random.multivariate_normal(random.key(4), mean, 0.5 * (covariance + covariance.T), (8000,))
    rows.append(row("parametric product", as_chains(factors, product), reference, seconds=seconds))
    return pd.DataFrame(rows).fillna("")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=", ".join(PROBLEMS))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    for problem in args.problems or PROBLEMS:
        table = run(problem, args.quick)
        print(f"\n{problem}\n{table.to_string(index=False)}\n", flush=True)
