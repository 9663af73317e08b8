"""Shared run of many models: FSGLD or `fed.fit` over the silos, beside NUTS on the pooled rows."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed
from numpyro_fed.density.factorize import factorize

__all__ = ["fit", "main", "reference"]

CHAINS: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized"}


def fit(model: Callable, silos: fed.Silos, num_warmup: int = 200, num_samples: int = 1800) -> MCMC:
    """Run FSGLD with its defaults."""
    mcmc = MCMC(fed.FSGLD(model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    return mcmc


def reference(
    model: Callable,
    silos: fed.Silos,
    num_warmup: int = 1000,
    num_samples: int = 2000,
    target_accept_prob: float = 0.8,
    max_tree_depth: int = 10,
) -> MCMC:
    """Run NUTS on the pooled rows."""
    nuts = NUTS(model, target_accept_prob=target_accept_prob, max_tree_depth=max_tree_depth)
    mcmc = MCMC(nuts, num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(1), **silos.pooled, extra_fields=("diverging", "num_steps"))
    return mcmc


def local_line(fit: "az.InferenceData", nuts: "az.InferenceData", names: Sequence[str]) -> str:
    """Return a line on the local latents: largest error in reference sds, and extreme sd ratios."""

    def flat(idata: "az.InferenceData", name: str) -> np.ndarray:
        draws = idata.posterior[name].values
        return draws.reshape(*draws.shape[:2], -1).astype(float)

    pairs = [[flat(idata, name) for idata in (fit, nuts)] for name in names]
    (mean, sd), (mean_ref, sd_ref) = (
        [f(np.concatenate(side, axis=-1), axis=(0, 1)) for f in (np.mean, np.std)]
        for side in zip(*pairs, strict=True)
    )
    ratio = sd / sd_ref
    return (
        f"{mean.size} local latents: largest error {(abs(mean - mean_ref) / sd_ref).max():.3f} sd, "
        f"sd ratios {ratio.min():.2f} to {ratio.max():.2f}"
    )


def main(
    title: str,
    model: Callable,
    silos: Callable[[], fed.Silos],
    figure: str,
    arguments: Sequence[str] | None = None,
    var_names: Sequence[str] | None = None,
    by_fit: bool = False,
    **nuts_options: Any,
) -> fed.Comparison:
    """Fit both, print their comparison, and draw it.

    :param var_names: sites to compare. ``None``: all global latents.
    :param by_fit: whether ``fed.fit`` fits the silos, and not FSGLD with its defaults.
    :param nuts_options: options of :func:`reference`.
    """
    by = "fed.fit" if by_fit else "FSGLD"
    parser = argparse.ArgumentParser(description=f"{title}: {by} beside pooled NUTS.")
    parser.add_argument("--quick", action="store_true", help="few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures", f"{figure}.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    data = silos()
    print(data)
    draws = {"num_warmup": 200, "num_samples": 300} if args.quick else {}
    start = time.perf_counter()
    if by_fit:
        found = fed.fit(model, data, num_draws=1200 if args.quick else 8000, log_likelihood=False)
    else:
        langevin = fit(model, data, **draws)
        found = fed.to_inference_data(langevin, data, log_likelihood=False)
    middle = time.perf_counter()
    nuts = reference(model, data, **{**nuts_options, **draws})
    seconds = middle - start, time.perf_counter() - middle
    factors = factorize(model, data)
    names = var_names or [name for name, _ in factors.global_sites]
    pair = found, az.from_numpyro(nuts, log_likelihood=False)
    comparison = fed.compare(*pair, var_names=names)
    print(f"\n{title}\n{comparison}")
    if factors.local_sites:
        print(local_line(*pair, [site.name for site in factors.local_sites]))
    divergences = int(np.sum(nuts.get_extra_fields()["diverging"]))
    print(f"{by} {seconds[0]:.0f} s, NUTS {seconds[1]:.0f} s with {divergences} divergences")

    args.figure.parent.mkdir(parents=True, exist_ok=True)
    fed.plot_compare(*pair, var_names=names).savefig(args.figure, dpi=150)
    print(f"figure written to {args.figure}")
    return comparison
