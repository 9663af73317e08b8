"""The automatic step on Gaussians: predicted against measured inflation of the sds.

    python tests/benchmarks/inflation.py [--quick]

Normal data with known variance in ten shifted silos, so that the posterior is known exactly. Surrogates are exact, or
displaced on purpose; a row per surrogate, minibatch and number of local steps. The measured ratio is the mean over both
parameters, with its Monte-Carlo standard error.
"""

import argparse
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC

import numpyro_fed as fed

NUM_SILOS, ROWS, DIM = 10, 200, 2


def model(x):  # type: ignore[no-untyped-def]
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1).to_event(1), obs=x)


def data() -> fed.Silos:
    rng = np.random.default_rng(0)
    centres = rng.uniform(-6, 6, (NUM_SILOS, 1, DIM))
    x = (centres + rng.normal(size=(NUM_SILOS, ROWS, DIM))).reshape(-1, DIM)
    return fed.split({"x": x}, by=np.repeat(np.arange(NUM_SILOS), ROWS))


def surrogates(silos: fed.Silos, kind: str) -> fed.surrogates.Surrogates:
    """Exact likelihoods; or means displaced by a third of a silo's posterior sd, as a fit might leave them."""
    means = np.stack([np.asarray(silos[name]["x"]).mean(0) for name in silos])
    precisions = np.full((NUM_SILOS, DIM), float(ROWS))
    if kind == "near":
        displaced = np.random.default_rng(1).normal(size=means.shape) / (3 * np.sqrt(ROWS))
        means += displaced - displaced.mean(0)
    return fed.surrogates.analytic(silos, means, precisions, prior=(np.zeros(DIM), np.ones(DIM)))


def measure(silos: fed.Silos, kind: str, batch: int | None, steps: int, target: float, num: int) -> dict[str, Any]:
    kernel = fed.FSGLD(
        model, num_local_steps=steps, batch_size=batch, surrogate=surrogates(silos, kind), bias_target=target
    )
    mcmc = MCMC(kernel, num_warmup=200, num_samples=num, num_chains=8, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(2), silos)
    draws = mcmc.get_samples(group_by_chain=True)["mu"]
    exact = 1 / np.sqrt(NUM_SILOS * ROWS + 1)
    ratio = float(jnp.sqrt(jnp.mean(jnp.var(draws, axis=(0, 1))))) / exact
    error = float(np.sqrt(np.mean(az.mcse(np.asarray(draws[..., 0]), method="sd") ** 2) / DIM)) / exact
    fields = mcmc.get_extra_fields()
    return {
        "surrogates": kind,
        "m": batch or "all",
        "T": steps,
        "step size": f"{float(fields['step_size'][0]):.4f}",
        "predicted": f"{float(fields['inflation'][0]):.3f}",
        "measured": f"{ratio:.3f} ± {error:.3f}",
        "cut %": f"{100 * float(fields['cut_rate'].mean()):.2f}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    silos = data()
    cases = [
        ("exact", None, 40, 0.1),
        ("exact", 10, 40, 0.1),
        ("exact", 10, 1000, 0.1),
        ("near", None, 40, 0.1),
        ("near", 10, 40, 0.1),
        ("near", 10, 1000, 0.1),
    ]
    rows = [measure(silos, *case, num=200 if args.quick else 2000) for case in cases]
    print(pd.DataFrame(rows).to_string(index=False))
