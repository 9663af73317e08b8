"""Six cities: does a mother's smoking make her child wheeze? 537 children, two silos or ten.

Wheeze (yes or no) of 537 children of Steubenville, Ohio, at the ages of 7 to 10, with a random
intercept for each child; smoke: whether the mother smoked in the first year. A child's intercept
never leaves the child's silo. Maximum likelihood (lme4, 25-point quadrature) gives -3.128, -0.216,
0.462, 0.105 and a standard deviation of the intercepts of 2.167.

References: Fitzmaurice & Laird (1993), Biometrika 80, 141-151 (the data);
Hassan, Salomone & Mengersen (2023), Federated Variational Inference Methods for Structured Latent
Variable Models, section S3.1 (as two silos).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

# Children by pattern of wheeze at 7, 8, 9, 10: 0000, 0001, 0010, ..., 1111. First not smoking.
COUNTS = (
    (237, 10, 15, 4, 16, 2, 7, 3, 24, 3, 3, 2, 6, 2, 5, 11),
    (118, 6, 8, 2, 11, 1, 6, 4, 7, 3, 3, 1, 4, 2, 4, 7),
)
AGE = np.array([-2.0, -1.0, 0.0, 1.0], np.float32)  # years from 9
TWO = (300, 237)
TEN = (20, 25, 30, 36, 43, 50, 58, 70, 88, 117)
CHAINS = {"num_chains": 4, "chain_method": "vectorized"}
GLOBALS = ["intercept", "age", "smoke", "age_smoke", "sigma"]


def data() -> tuple[np.ndarray, np.ndarray]:
    """Wheeze of each child at each visit, shape (537, 4), and mother's smoking, shape (537,)."""
    patterns = np.arange(16)[:, None] // np.array([8, 4, 2, 1]) % 2
    y = np.concatenate([np.repeat(patterns, n, axis=0) for n in COUNTS])
    smoke = np.repeat([0, 1], [sum(n) for n in COUNTS])
    return y.astype(np.float32), smoke.astype(np.float32)


def silos(sizes: Sequence[int] = TWO) -> fed.Silos:
    """The children in the published order (not smoking first), cut into silos of these sizes."""
    y, smoke = data()
    return fed.split({"y": y, "smoke": smoke}, by=np.repeat(np.arange(len(sizes)), sizes))


def model(y, smoke):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    age = numpyro.sample("age", dist.Normal(0, 2.5))
    smoking = numpyro.sample("smoke", dist.Normal(0, 2.5))
    product = numpyro.sample("age_smoke", dist.Normal(0, 2.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    smoke = smoke[:, None]
    with fed.silo_plate("children", y.shape[0], dim=-2):
        # non-centred: a child's intercept is sigma * z
        z = numpyro.sample("z", dist.Normal(0, 1))
        logits = intercept + age * AGE + (smoking + product * AGE) * smoke + sigma * z
        with numpyro.plate("visits", 4, dim=-1):
            numpyro.sample("wheeze", dist.Bernoulli(logits=logits), obs=y)


def fit(silos: fed.Silos, num_warmup: int = 200, num_samples: int = 1800) -> MCMC:
    """FSGLD with its defaults: score-matched surrogates, step size from the noise of a pilot."""
    mcmc = MCMC(fed.FSGLD(model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    return mcmc


def reference(silos: fed.Silos, num_warmup: int = 500, num_samples: int = 3000) -> MCMC:
    """NUTS on the pooled children."""
    mcmc = MCMC(NUTS(model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(1), **silos.pooled)
    return mcmc


def main(arguments: Sequence[str] | None = None) -> fed.Comparison:
    parser = argparse.ArgumentParser(description="Six cities: FSGLD in silos beside pooled NUTS.")
    parser.add_argument("--quick", action="store_true", help="few draws")
    parser.add_argument("--ten", action="store_true", help="ten unequal silos in place of two")
    parser.add_argument("--figure", type=Path, default=Path("figures/six_cities.png"))
    args = parser.parse_args(arguments)

    children = silos(TEN if args.ten else TWO)
    print(children)
    draws = {"num_warmup": 200, "num_samples": 300} if args.quick else {}
    federated = fit(children, **draws)
    fed_idata = fed.to_inference_data(federated, children, log_likelihood=False)
    nuts_idata = az.from_numpyro(reference(children, **draws), log_likelihood=False)
    comparison = fed.compare(fed_idata, nuts_idata, var_names=GLOBALS)
    print(comparison)
    local = fed.compare(fed_idata, nuts_idata, var_names="z").table
    print(
        f"{len(local)} children's intercepts: largest error {local['error'].max():.3f} sd, "
        f"sd ratios {local['sd_ratio'].min():.2f} to {local['sd_ratio'].max():.2f}"
    )

    args.figure.parent.mkdir(parents=True, exist_ok=True)
    fed.plot_compare(fed_idata, nuts_idata, var_names=GLOBALS).savefig(args.figure, dpi=150)
    print(f"figure written to {args.figure}")
    return comparison


if __name__ == "__main__":
    main()
