"""Logistic regression on Magic and Credit: accuracy over time of DSGLD and FSGLD.

There are ten silos, a hundred local steps per visit, and a thousand rows held out. The paper deals
the rows at random. Beside that, silos here also have skewed labels, where long visits matter more.
The paper's surrogates are the moments of 3,000 draws by SGLD in each silo. The available text of
the paper lacks its numbers of silos and repetitions, its batch and step size, and its prior; those
below are chosen here. Silos are chosen in proportion to their rows. With equal chances a chain
overshoots in a large silo, and at this length of visit FSGLD's may not come back. FSGLD with the
library's defaults runs beside both.

Reference: El Mekkaoui et al. (2020), Variance reduction for distributed stochastic gradient MCMC,
appendix E.2, figure 7.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arviz as az
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _data import path
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel

import numpyro_fed as fed

NUM_SILOS, NUM_TEST = 10, 1000
STEP_SIZE, BATCH_SIZE, VISIT = 1e-5, 100, 100
DATA = ("magic", "credit")
PARTITIONS = ("iid", "skewed")
METHODS = ("DSGLD", "FSGLD", "defaults")
CHAINS = {"num_chains": 4, "chain_method": "vectorized"}
Accuracies = dict[tuple[str, str, str], np.ndarray]


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return features with mean 0 and sd 1, and labels: Magic (19020, 10) or Credit (30000, 23)."""
    if name == "magic":
        place = path(
            "magic04",
            "magic04.data.gz",
            "the UCI repository, data set 159 (magic04.data, compressed by gzip)",
            "19,020 rows of 10 features and the class g or h, without a header",
        )
        table = pd.read_csv(place, header=None)
        labels = table.pop(10) == "g"
    else:
        place = path(
            "credit_default",
            "credit_default.csv.gz",
            "the UCI repository, data set 350 (its sheet as csv with one header line, the last "
            "column called default, compressed by gzip)",
            "30,000 rows: ID, 23 features, default",
        )
        table = pd.read_csv(place).drop(columns="ID")
        labels = table.pop("default") == 1
    x = table.to_numpy(np.float64)
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32), labels.to_numpy(np.float32)


def silos(
    name: str, partition: str = "iid", seed: int = 0, num_rows: int | None = None
) -> tuple[fed.Silos, dict[str, np.ndarray]]:
    """Return the training rows in ten silos, and the test rows.

    The training rows are the first ``num_rows`` of a shuffle.
    """
    x, y = data(name)
    order = np.random.default_rng(seed).permutation(len(y))
    test, train = order[:NUM_TEST], order[NUM_TEST:][:num_rows]
    if partition == "iid":
        by = fed.partitioners.iid(seed, len(train), NUM_SILOS)
    else:
        by = fed.partitioners.dirichlet(seed, y[train], NUM_SILOS, 0.5, min_rows=BATCH_SIZE)
    return fed.split({"x": x[train], "y": y[train]}, by=by), {"x": x[test], "y": y[test]}


def model(x, y=None):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x @ beta), obs=y)


def fit(silos: fed.Silos, kernel: MCMCKernel, num_warmup: int, num_samples: int) -> MCMC:
    """Run a kernel with one draw per visit (a round)."""
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    return mcmc


def kernel(method: str, silos: fed.Silos) -> MCMCKernel:
    """Return one of the paper's two kernels, at a fixed step size, or FSGLD with its defaults.

    The paper's kernels choose silos in proportion to their size.
    """
    if method == "defaults":
        return fed.FSGLD(model)
    sizes = np.array(silos.sizes[silos.group["y"]])
    settings: dict[str, Any] = {
        "step_size": fed.Step(STEP_SIZE, preconditioner=None),
        "num_local_steps": VISIT,
        "batch_size": BATCH_SIZE,
        "selection": sizes / sizes.sum(),
    }
    if method == "DSGLD":
        return fed.DSGLD(model, **settings)
    return fed.FSGLD(model, surrogate=moments(silos), **settings)


def moments(silos: fed.Silos) -> fed.surrogates.Surrogates:
    """Return the paper's surrogates.

    They come from NUTS's draws where local SGLD does not converge (Credit, skewed labels).
    """
    try:
        return fed.surrogates.moments(model, silos)
    except ValueError as error:
        print(f"  {error}; NUTS's draws instead")
        return fed.surrogates.moments(model, silos, method="nuts")


def accuracy(mcmc: MCMC, test: dict[str, np.ndarray]) -> np.ndarray:
    """Return the cumulative average over draws of the test accuracy, shape ``(chains, draws)``."""
    draws = mcmc.get_samples(group_by_chain=True)
    logits = draws["intercept"][..., None] + draws["beta"] @ test["x"].T
    right = np.asarray(((logits > 0) == (test["y"] > 0.5)).mean(-1))
    return right.cumsum(1) / np.arange(1, right.shape[1] + 1)


def figure_7(
    names: Sequence[str], num_rows: int | None, num_samples: int, repetitions: int, place: Path
) -> Accuracies:
    """Draw the accuracy of the methods on data sets.

    The first 30 visits, 3,000 steps, are dropped.
    """
    size = (9, 3 * len(names))
    figure, axes = plt.subplots(len(names), 2, figsize=size, sharey="row", layout="constrained")
    found = {}
    panels = [(name, partition) for name in names for partition in PARTITIONS]
    for (name, partition), ax in zip(panels, axes.flat, strict=True):
        for method in METHODS:
            curves = []
            for seed in range(repetitions):
                train, test = silos(name, partition, seed, num_rows)
                curves.append(accuracy(fit(train, kernel(method, train), 30, num_samples), test))
            found[name, partition, method] = value = np.concatenate(curves)
            mean, sd = value.mean(0), value.std(0)
            ax.plot(mean, label=method)
            ax.fill_between(np.arange(len(mean)), mean - sd, mean + sd, alpha=0.2)
            print(f"{name:<6} {partition:<6} {method:<8} accuracy {mean[-1]:.4f} ± {sd[-1]:.4f}")
        ax.set(title=f"{name}, {partition}", xlabel="stays", ylabel="cumulative accuracy")
        ax.legend()
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)
    return found


def main(arguments: Sequence[str] | None = None) -> tuple[Accuracies, fed.Comparison]:
    parser = argparse.ArgumentParser(description="Logistic regression: DSGLD and FSGLD.")
    parser.add_argument("--quick", action="store_true", help="one data set, 2,000 rows, few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures/logistic_regression.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    names, num_rows, repetitions = (DATA[:1], 2_000, 1) if args.quick else (DATA, None, 3)
    found = figure_7(names, num_rows, 60 if args.quick else 200, repetitions, args.figure)

    # The library's step size in place of a fixed one, beside NUTS on the pooled rows.
    train, test = silos("magic", "skewed", 0, num_rows)
    federated = fit(train, fed.FSGLD(model), 200, 300 if args.quick else 2000)
    nuts = MCMC(NUTS(model), num_warmup=300, num_samples=300 if args.quick else 1000, **CHAINS)
    nuts.run(jax.random.key(1), **train.pooled)
    idata = fed.to_inference_data(federated, train, log_likelihood=False)
    comparison = fed.compare(idata, az.from_numpyro(nuts, log_likelihood=False))
    print(comparison)
    for label, mcmc in (("FSGLD", federated), ("NUTS", nuts)):
        print(f"accuracy of {label}: {accuracy(mcmc, test)[:, -1].mean():.4f}")
    return found, comparison


if __name__ == "__main__":
    main()
