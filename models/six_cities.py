"""Six cities: does a mother's smoking make her child wheeze? 537 children, two silos or ten.

The data are wheeze (yes or no) of 537 children of Steubenville, Ohio, at the ages of 7 to 10. The
model has a random intercept for each child, and ``smoke`` says if the mother smoked in the first
year. A child's intercept never leaves the child's silo. Maximum likelihood (lme4, 25-point
quadrature) gives -3.128, -0.216, 0.462, 0.105 and a standard deviation of the intercepts of 2.167.

The run fits by FSGLD and by SFVI, and compares both with pooled NUTS. With ``--alone`` it splits
the children at random, and shows what each silo would learn without the other (figure S1 of the
second reference).

References: Fitzmaurice & Laird (1993), Biometrika 80, 141-151 (the data); Hassan, Salomone &
Mengersen (2023), Federated Variational Inference Methods for Structured Latent Variable Models,
section S3.1 (as two silos, at random). The priors are ours: the text at hand lacks the paper's.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
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
LABELS = ["intercept", "age", "smoking", "age x smoking", "log sd of the intercepts"]


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return wheeze of each child at each visit, (537, 4), and mother's smoking, (537,)."""
    patterns = np.arange(16)[:, None] // np.array([8, 4, 2, 1]) % 2
    y = np.concatenate([np.repeat(patterns, n, axis=0) for n in COUNTS])
    smoke = np.repeat([0, 1], [sum(n) for n in COUNTS])
    return y.astype(np.float32), smoke.astype(np.float32)


def silos(sizes: Sequence[int] = TWO, shuffled: bool = False) -> fed.Silos:
    """Return silos of these sizes, of children sorted by smoking (not first) or at random."""
    y, smoke = data()
    by = np.repeat(np.arange(len(sizes)), sizes)
    return fed.split(
        {"y": y, "smoke": smoke}, by=np.random.default_rng(0).permutation(by) if shuffled else by
    )


def model(y, smoke):  # type: ignore[no-untyped-def]
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    age = numpyro.sample("age", dist.Normal(0, 2.5))
    smoking = numpyro.sample("smoke", dist.Normal(0, 2.5))
    product = numpyro.sample("age_smoke", dist.Normal(0, 2.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    smoke = smoke[:, None]
    with fed.silo_plate("children", y.shape[0], dim=-2):
        # non-centered: a child's intercept is sigma * z
        z = numpyro.sample("z", dist.Normal(0, 1))
        logits = intercept + age * AGE + (smoking + product * AGE) * smoke + sigma * z
        with numpyro.plate("visits", 4, dim=-1):
            numpyro.sample("wheeze", dist.Bernoulli(logits=logits), obs=y)


def fit(silos: fed.Silos, num_warmup: int = 200, num_samples: int = 1800) -> MCMC:
    """Run FSGLD with its defaults: score-matched surrogates, step size from a pilot's noise."""
    mcmc = MCMC(fed.FSGLD(model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(0), silos)
    return mcmc


def fit_sfvi(silos: fed.Silos, num_rounds: int = 6000, num_draws: int = 4000) -> "az.InferenceData":
    """Run SFVI with its defaults, and return draws of its result."""
    svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.01))
    result = svi.run(jax.random.key(2), num_rounds, silos)
    print(result)
    return fed.to_inference_data(svi, result, silos, num_draws=num_draws, log_likelihood=False)


def reference(
    children: Mapping[str, np.ndarray], num_warmup: int = 500, num_samples: int = 3000
) -> MCMC:
    """Run NUTS on children's rows: those of all silos, or those of one."""
    mcmc = MCMC(NUTS(model), num_warmup=num_warmup, num_samples=num_samples, **CHAINS)
    mcmc.run(jax.random.key(1), **children)
    return mcmc


def compared(name: str, fit: "az.InferenceData", nuts: "az.InferenceData") -> fed.Comparison:
    """Print the comparison of a fit with pooled NUTS."""
    comparison = fed.compare(fit, nuts, var_names=GLOBALS)
    print(f"\n{name} beside pooled NUTS\n{comparison}")
    (mean, sd), (mean_ref, sd_ref) = (
        (z.mean(axis=(0, 1)), z.std(axis=(0, 1)))
        for z in (fit.posterior["z"].values, nuts.posterior["z"].values)
    )
    print(
        f"{mean.size} children's intercepts: largest error "
        f"{(abs(mean - mean_ref) / sd_ref).max():.3f} sd, "
        f"sd ratios {(sd / sd_ref).min():.2f} to {(sd / sd_ref).max():.2f}"
    )
    return comparison


def federated(args: argparse.Namespace) -> dict[str, fed.Comparison]:
    """Run FSGLD and SFVI beside pooled NUTS."""
    children = silos(TEN if args.ten else TWO)
    print(children)
    draws = {"num_warmup": 200, "num_samples": 300} if args.quick else {}
    nuts = az.from_numpyro(reference(children.pooled, **draws), log_likelihood=False)
    langevin = fed.to_inference_data(fit(children, **draws), children, log_likelihood=False)
    found = {"FSGLD": compared("FSGLD", langevin, nuts)}
    variational = fit_sfvi(children, num_draws=1000 if args.quick else 4000)
    found["SFVI"] = compared("SFVI", variational, nuts)
    save_figure({"FSGLD": langevin, "SFVI": variational}, nuts, args.figure)
    return found


def save_figure(
    fits: "Mapping[str, az.InferenceData]", nuts: "az.InferenceData", path: Path
) -> None:
    """Draw each fit beside pooled NUTS, one below the other."""
    from matplotlib import pyplot

    whole = pyplot.figure(figsize=(10, 5 * len(fits)))
    for part, (name, idata) in zip(
        whole.subfigures(len(fits), 1, squeeze=False)[:, 0], fits.items(), strict=True
    ):
        fed.plot_compare(idata, nuts, var_names=GLOBALS, labels=(name, "pooled NUTS"), figure=part)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.savefig(path, dpi=150)
    print(f"figure written to {path}")


def alone(args: argparse.Namespace) -> dict[str, fed.Comparison]:
    """Run SFVI on both silos and NUTS on all children, beside NUTS on each silo alone."""
    children = silos(shuffled=True)
    print(children)
    draws = {"num_warmup": 200, "num_samples": 300} if args.quick else {}
    rows = {"NUTS, all children": children.pooled}
    rows |= {f"NUTS, silo {name} alone": children[name] for name in children}
    posteriors = {
        name: az.from_numpyro(reference(part, **draws), log_likelihood=False)
        for name, part in rows.items()
    }
    variational = fit_sfvi(children, num_draws=1000 if args.quick else 4000)
    comparison = compared("SFVI", variational, posteriors["NUTS, all children"])
    draw_alone({"SFVI, both silos": variational, **posteriors}, args.figure)
    return {"SFVI": comparison}


def draw_alone(posteriors: "Mapping[str, az.InferenceData]", path: Path) -> None:
    """Draw posterior densities of the regression coefficients and of log sd of the intercepts."""
    from matplotlib import pyplot
    from scipy.stats import gaussian_kde

    figure, axes = pyplot.subplots(1, len(GLOBALS), figsize=(13, 2.9), layout="constrained")
    styles = (
        ("#0072B2", "-", 2.2),
        ("#222222", "--", 1.4),
        ("#D55E00", ":", 1.6),
        ("#009E73", "-.", 1.4),
    )
    for axis, name, label in zip(axes, GLOBALS, LABELS, strict=True):
        for (posterior, idata), (color, line, width) in zip(
            posteriors.items(), styles, strict=True
        ):
            draws = idata.posterior[name].values.ravel()
            draws = np.log(draws) if name == "sigma" else draws
            x = np.linspace(draws.min(), draws.max(), 200)
            axis.plot(x, gaussian_kde(draws)(x), line, color=color, lw=width, label=posterior)
        axis.set(xlabel=label, yticks=[], ylim=(0, None))
        axis.spines[["left", "right", "top"]].set_visible(False)
    axes[0].set_ylabel("posterior density")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"figure written to {path}")


def main(arguments: Sequence[str] | None = None) -> dict[str, fed.Comparison]:
    parser = argparse.ArgumentParser(
        description="Six cities: FSGLD and SFVI in silos beside pooled NUTS."
    )
    parser.add_argument("--quick", action="store_true", help="few draws")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ten", action="store_true", help="ten unequal silos in place of two")
    what.add_argument(
        "--alone",
        action="store_true",
        help="SFVI on two random silos beside NUTS on each of them alone",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        help="where to write it (figures/six_cities.png, or six_cities_alone.png)",
    )
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()
    args.figure = args.figure or Path(
        "figures", "six_cities_alone.png" if args.alone else "six_cities.png"
    )
    return alone(args) if args.alone else federated(args)


if __name__ == "__main__":
    main()
