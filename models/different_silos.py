"""Silos that measured different things, on whether exposure raises the rate of attacks.

Simulated persons have an exposure x, N(m, s) in the population, and a Poisson number of attacks of
rate exp(a + b x). One silo measured x itself, one has a noisy proxy of it, and one has only the
counts. In the last, x is a latent of each person. The data of that silo inform a, b, m and s
together, as the mixture over x does. One function is the model of all three. The arguments of a
silo decide which branch it takes (:class:`numpyro_fed.MixedSilos`).

    python models/different_silos.py [--quick]

fits all three with :func:`numpyro_fed.fit`, the first alone, and NUTS on everything pooled, and
prints them side by side.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

GLOBALS = ["a", "b", "m", "s"]
TRUTH = {"a": -0.5, "b": 0.6, "m": 0.8, "s": 1.0}
NOISE = 0.7  # sd of the proxy, which the model knows
EXACT, PROXY, COUNTS = 60, 300, 600  # numbers of persons


def population() -> dict[str, Array]:
    """Sample the global sites: the rate's intercept and slope, and the law of the exposure."""
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 1))
    m = numpyro.sample("m", dist.Normal(0, 2))
    s = numpyro.sample("s", dist.HalfNormal(2))
    return {"a": a, "b": b, "m": m, "s": s}


def persons(theta, y, x=None, proxy=None, label=""):  # type: ignore[no-untyped-def]
    """Sample persons with a known exposure, with a proxy of it, or with their count alone."""
    with fed.silo_plate(f"persons{label}", y.shape[0]):
        if x is None:  # non-centered
            x = theta["m"] + theta["s"] * numpyro.sample(f"z{label}", dist.Normal(0, 1))
        else:
            numpyro.sample(f"x{label}", dist.Normal(theta["m"], theta["s"]), obs=x)
        if proxy is not None:
            numpyro.sample(f"proxy{label}", dist.Normal(x, NOISE), obs=proxy)
        numpyro.sample(f"y{label}", dist.Poisson(jnp.exp(theta["a"] + theta["b"] * x)), obs=y)


def model(y, x=None, proxy=None):  # type: ignore[no-untyped-def]
    persons(population(), y, x, proxy)


def pooled(parts):  # type: ignore[no-untyped-def]
    """Sample the same law of all silos in one program, for NUTS."""
    theta = population()
    for i, rows in enumerate(parts):
        persons(theta, **rows, label=f"_{i}")


def silos(scale: float = 1.0, seed: int = 0) -> fed.MixedSilos:
    """Return one silo of each kind, of ``scale`` times the persons."""
    rng = np.random.default_rng(seed)

    def persons(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(TRUTH["m"], TRUTH["s"], int(scale * count))
        return x.astype(np.float32), rng.poisson(np.exp(TRUTH["a"] + TRUTH["b"] * x))

    (x, y), (hidden, y_proxy), (_, y_counts) = (persons(n) for n in (EXACT, PROXY, COUNTS))
    noisy = (hidden + NOISE * rng.normal(size=len(hidden))).astype(np.float32)
    return fed.MixedSilos(
        {
            "exact": {"y": y, "x": x},
            "proxy": {"y": y_proxy, "proxy": noisy},
            "counts": {"y": y_counts},
        },
        rows={"y": "persons", "x": "persons", "proxy": "persons"},
    )


def fit(silos: fed.MixedSilos | fed.Silos, num_draws: int = 4000) -> "az.InferenceData":
    """Run conducive rounds and the last round, and print a report."""
    return fed.fit(model, silos, num_draws=num_draws)


def reference(silos: fed.MixedSilos, num_warmup: int = 1000, num_samples: int = 4000) -> MCMC:
    """Run NUTS on the pooled data."""
    mcmc = MCMC(
        NUTS(pooled),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(1), [silos[name] for name in silos])
    return mcmc


def main(arguments: Sequence[str] | None = None) -> dict[str, fed.Comparison]:
    parser = argparse.ArgumentParser(
        description="Silos that measured different things, beside pooled NUTS."
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the persons, few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures/different_silos.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    data = silos(0.1 if args.quick else 1.0)
    print(data)
    everyone, alone = fit(data), fit(fed.Silos({"exact": data["exact"]}))
    draws = {"num_warmup": 500, "num_samples": 1000} if args.quick else {}
    nuts = az.from_numpyro(reference(data, **draws), log_likelihood=False)
    found = {}
    for label, idata in (("three silos", everyone), ("the exact one alone", alone)):
        found[label] = fed.compare(_globals(idata), _globals(nuts))
        print(f"\n{label}, beside pooled NUTS (truth: {TRUTH})\n{found[label]}")
    args.figure.parent.mkdir(parents=True, exist_ok=True)
    fed.plot_compare(
        _globals(everyone), _globals(nuts), labels=("three silos", "pooled NUTS")
    ).savefig(args.figure, dpi=150)
    print(f"figure written to {args.figure}")
    return found


def _globals(idata: "az.InferenceData") -> dict[str, np.ndarray]:
    draws = {name: idata.posterior[name].values for name in GLOBALS}
    if len(draws["a"]) > 1:
        return draws
    return {
        k: v.reshape(4, -1) for k, v in draws.items()
    }  # draws are independent, so any split into chains will do


if __name__ == "__main__":
    main()
