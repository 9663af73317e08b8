"""The automatic step: predicted against measured inflation of the sds.

    python tests/benchmarks/inflation.py [--quick] [--record]

Normal data with known variance in ten shifted silos, so that the posterior is known exactly;
surrogates are exact, or displaced on purpose. Then, in ten shifted silos too and with the library's
own surrogates, a logistic regression, a regression with a Student-t likelihood of unknown scale on
few rows, and a normal regression of unknown scale with one row a silo, whose posterior has heavy
tails (without the priors a Student-t law of seven degrees of freedom); their sds are those of a
long run of NUTS. A row per surrogate, minibatch and number of local steps, with the checks of
``diagnose`` that give it away. The measured ratio is the root mean square over the parameters, and
the largest of them, with Monte-Carlo standard errors.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS
from record import record

import numpyro_fed as fed

NUM_SILOS, ROWS, DIM = 10, 200, 2
FEW = 6  # rows of a silo under the Student-t likelihood
CHAINS: dict[str, Any] = {"chain_method": "vectorized", "progress_bar": False}


def model(x):  # type: ignore[no-untyped-def]
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1).to_event(1), obs=x)


def data() -> fed.Silos:
    rng = np.random.default_rng(0)
    centers = rng.uniform(-6, 6, (NUM_SILOS, 1, DIM))
    x = (centers + rng.normal(size=(NUM_SILOS, ROWS, DIM))).reshape(-1, DIM)
    return fed.split({"x": x}, by=np.repeat(np.arange(NUM_SILOS), ROWS))


def surrogates(silos: fed.Silos, kind: str) -> fed.surrogates.Surrogates:
    """Exact likelihoods.

    Or means displaced by a third of a silo's posterior sd, as a fit might leave them.
    """
    means = np.stack([np.asarray(silos[name]["x"]).mean(0) for name in silos])
    precisions = np.full((NUM_SILOS, DIM), float(ROWS))
    if kind == "near":
        displaced = np.random.default_rng(1).normal(size=means.shape) / (3 * np.sqrt(ROWS))
        means += displaced - displaced.mean(0)
    return fed.surrogates.analytic(silos, means, precisions, prior=(np.zeros(DIM), np.ones(DIM)))


def logistic(x, y):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def student(x, y):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))
    log_sigma = numpyro.sample("log_sigma", dist.Normal(0, 1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.StudentT(2, x @ beta, jnp.exp(log_sigma)), obs=y)


def one_row(x, y):  # type: ignore[no-untyped-def]
    beta = numpyro.sample("beta", dist.Normal(0, 50).expand([x.shape[1]]).to_event(1))
    log_sigma = numpyro.sample("log_sigma", dist.Normal(0, 3))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, jnp.exp(log_sigma)), obs=y)


def regression(rows: int, heavy: bool) -> fed.Silos:
    """Return an intercept and two covariates, whose means differ between silos."""
    rng = np.random.default_rng(2)
    by = np.repeat(np.arange(NUM_SILOS), rows)
    x = rng.normal(size=(len(by), 3)) + rng.normal(size=(NUM_SILOS, 3))[by]
    x[:, 0] = 1
    mean = x @ np.array([0.5, 1.0, -1.0])
    y = (
        mean + rng.standard_t(2, len(by))
        if heavy
        else rng.random(len(by)) < 1 / (1 + np.exp(-mean))
    )
    return fed.split({"x": x, "y": y.astype(np.float32)}, by=by)


def flat(mcmc: MCMC) -> np.ndarray:
    """All global sites' draws, ``(chains, draws, scalars)``."""
    draws = mcmc.get_samples(group_by_chain=True)
    return np.concatenate(
        [np.asarray(x, float).reshape(*x.shape[:2], -1) for x in draws.values()], axis=2
    )


def sds(mcmc: MCMC) -> tuple[np.ndarray, np.ndarray]:
    """Sds of all scalars, and their standard errors."""
    draws = flat(mcmc)
    errors = [
        az.mcse(np.ascontiguousarray(draws[..., j]), method="sd") for j in range(draws.shape[2])
    ]
    return draws.std((0, 1)), np.array(errors, float)


def exact_sds(model: Callable, silos: fed.Silos, num: int) -> tuple[np.ndarray, np.ndarray]:
    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=num, num_chains=4, **CHAINS)
    mcmc.run(jax.random.key(3), **silos.pooled)
    draws = flat(mcmc)
    kurtosis = ((draws - draws.mean((0, 1))) ** 4).mean((0, 1)) / draws.var((0, 1)) ** 2
    print(f"{model.__name__}: kurtosis {kurtosis.round(2)}")
    return sds(mcmc)


def flags(mcmc: MCMC) -> list[str]:
    """Return the checks of ``diagnose`` that fail, without the one that only repeats the target."""
    table = fed.diagnose(mcmc).table
    return [
        str(check)
        for check in table.index[table["verdict"] == "unsound"]
        if check != "inflation predicted"
    ]


def measure(
    model: Callable, silos: fed.Silos, exact: tuple[np.ndarray, np.ndarray], kind: str,
    surrogate: Any, batch: int | None, steps: int, num: int, target: float = 0.1,
) -> dict[str, Any]:  # fmt: skip
    kernel = fed.FSGLD(model, fed.Step(bias_target=target), steps, batch, surrogate)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=num, num_chains=8, **CHAINS)
    mcmc.run(jax.random.key(2), silos)
    sd, error = sds(mcmc)
    ratios = sd / exact[0]
    errors = ratios * np.hypot(error / sd, exact[1] / exact[0])
    ratio, worst = np.sqrt(np.mean(ratios**2)), int(ratios.argmax())
    fields = mcmc.get_extra_fields()
    return {
        "model": model.__name__,
        "surrogates": kind,
        "m": batch or "all",
        "T": steps,
        "step size": f"{float(fields['step_size'][0]):.4f}",
        "predicted": f"{float(fields['inflation'][0]):.3f}",
        "measured": f"{ratio:.3f} ± {np.sqrt(np.mean(errors**2) / len(errors)):.3f}",
        "largest": f"{ratios[worst]:.3f} ± {errors[worst]:.3f}",
        "cut %": f"{100 * float(fields['cut_rate'].mean()):.2f}",
        "flagged by": ", ".join(flags(mcmc)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    args = parser.parse_args()
    num, long = (200, 2000) if args.quick else (2000, 20_000)
    silos, rows, start = data(), [], time.time()
    exact = np.full(DIM, 1 / np.sqrt(NUM_SILOS * ROWS + 1)), np.zeros(DIM)
    for kind in ("exact", "near"):
        for batch, steps in ((None, 40), (10, 40), (10, 1000)):
            rows.append(
                measure(model, silos, exact, kind, surrogates(silos, kind), batch, steps, num)
            )
    for other, few, small in ((logistic, ROWS, 10), (student, FEW, 2), (one_row, 1, None)):
        silos = regression(few, other is not logistic)
        exact = exact_sds(other, silos, long)
        for batch, steps in ((None, 40), (None, 1000), (small, 40), (small, 1000))[
            : 4 if small else 2
        ]:
            rows.append(measure(other, silos, exact, "score", "score", batch, steps, num))
    print(pd.DataFrame(rows).to_string(index=False))
    if args.record:
        record("automatic_step", rows, start)
