r"""Bayesian neural network on silos whose labels differ: the claims of FSGLD's table 1.

A network of layers 18-18-8 (ReLU) has a softmax over two classes, and N(0, 1) on all weights and
biases. Its 30 silos of equal size have shares of positive labels from Beta(100, 100) (alike) or
Beta(0.5, 0.5) (skewed). A chain makes 5,000 rounds of 40 steps on minibatches of 50.

There are two data sets: the 11,000 available rows of 8 features of SUSY (the papers: 2.7 million of
18), and simulated rows. The simulated rows have the papers' number, and a known :math:`p(y = 1 \mid
x) = 1 / (1 + e^{-\eta(x)})`. They are drawn given their labels, so that :math:`p(x \mid y)` is that
of the balanced population in every silo. The best prediction then depends on where a row is:

.. math:: \eta(x) \;\text{(balanced rows)},
          \qquad \eta(x) + \mathrm{logit}\, \bar\pi \;\text{(all silos' rows)},
          \qquad \eta(x) + \mathrm{logit}\, \pi_s \;\text{(silo s)} .

The papers judge single draws by the average over draws of a row's log-likelihood,
:math:`E_\theta[\log p(y \mid x, \theta)]`. The log-likelihood of the posterior prediction,
:math:`\log E_\theta[p(y \mid x, \theta)]`, is never below it. Both are computed. The former is also
computed on the rows of the silo that made each draw.

The papers' surrogates are Gaussians with the means and variances of 3,000 draws of each silo's own
law by SGLD. The papers do not give their prior, nor the steps and starts of those chains. Here a
silo draws from :math:`p(\theta)^{1/S} p(y_s \mid \theta)`, whose prior is divided out again. DSGLD
is FSGLD without conducive gradients (``alpha=0``). A round gives four draws, at equal distances.
These are thinned by 9, and the first tenth is dropped.

References: El Mekkaoui et al. (2021), Federated Stochastic Gradient Langevin Dynamics, section 5.3,
table 1; (2020) Variance reduction for distributed stochastic gradient MCMC, section 5.3, figures 4
and 5.
"""

import argparse
import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _binary_silos import NUM_ROWS, Rows, best, sample, simulated, susy
from flax import nnx
from numpyro import handlers
from numpyro.contrib.module import random_nnx_module
from numpyro.infer import MCMC, init_to_value

import numpyro_fed as fed

HIDDEN = (18, 18, 8)
VISIT, BATCH_SIZE, ROUNDS = 40, 50, 5_000
PARTITIONS = {"alike": 100.0, "skewed": 0.5}  # both parameters of the labels' Beta law
STEPS = {"susy": (1e-4, 1e-5), "simulated": (1e-4, 1e-7)}  # first step sizes of the papers
LOCAL_STEP = {"susy": 1e-4, "simulated": 1e-7}  # step size of a silo's own chain
# draws per round; one in THINNING is stored; JUDGED of these are judged
KEPT, THINNING, JUDGED = 4, 9, 100
VI_ROUNDS = 40
METHODS = {"DSGLD": 0.0, "FSGLD": 1.0}  # weight of the conducive gradient
PAPER = {  # log-likelihood, train and test
    ("alike", "DSGLD"): (-0.69, -0.70),
    ("alike", "FSGLD"): (-0.69, -0.69),
    ("skewed", "DSGLD"): (-0.44, -1.11),
    ("skewed", "FSGLD"): (-0.67, -0.67),
}


class Network(nnx.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, features: int, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List(
            [nnx.Linear(i, o, rngs=rngs) for i, o in pairwise((features, *HIDDEN, 2))]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


network = cache(Network)  # the model ignores the weights of this object


def model(x, y=None):  # type: ignore[no-untyped-def]
    net = random_nnx_module("net", network(x.shape[-1]), dist.Normal(0, 1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=net(x)), obs=y)


def start(features: int, seed: int) -> dict[str, np.ndarray]:
    """Return weights as Flax makes them, because prior draws saturate the softmax."""
    weights = nnx.to_flat_state(nnx.split(Network(features, seed), nnx.Param)[1])
    return {"net/" + ".".join(map(str, name)): np.asarray(v[...]) for name, v in weights}


def flat(draws: dict[str, jax.Array], axes: int) -> np.ndarray:
    """Flatten positions, sites by name (the kernels' order), after ``axes`` axes of draws."""
    return np.concatenate(
        [np.asarray(draws[k]).reshape(*draws[k].shape[:axes], -1) for k in sorted(draws)], -1
    )


def surrogates(
    silos: fed.Silos, step_size: float, num_draws: int = 3_000
) -> fed.surrogates.Surrogates:
    """Return the papers' diagonal Gaussians: a chain's moments in every silo, without its prior.

    One chain of the model to the power 1/S stays in each silo. With f = 1/S its gradients there are
    those of p(theta)^(1/S) p(y_s | theta). The prior is divided out of its moments.
    """
    count = len(silos)
    kernel = fed.FSGLD(
        handlers.scale(model, scale=1 / count),
        fed.Step(step_size, preconditioner=None),
        5 * num_draws,
        BATCH_SIZE,
        alpha=0.0,
        selection="distinct",
        num_kept=num_draws,
    )
    # a third of the visit is burn-in
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=num_draws,
        num_chains=count,
        chain_method="vectorized",
        progress_bar=False,
    )
    first = {k: np.stack([v] * count) for k, v in start(silos.pooled["x"].shape[-1], 99).items()}
    mcmc.run(jax.random.key(5), silos, init_params=first)
    draws = flat(mcmc.get_samples(group_by_chain=True), 2)[:, num_draws // 3 :].astype(np.float64)
    where = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["silo"])[:, -1]
    assert sorted(where) == list(range(count))
    draws = draws[np.argsort(where)]
    precision = 1 / np.maximum(draws.var(1), 1e-12)
    # the prior's mean is zero
    means = precision * draws.mean(1) / np.maximum(precision - 1 / count, 1e-6)
    return fed.surrogates.analytic(silos, means, np.maximum(precision - 1 / count, 1e-6))


class Fit(NamedTuple):
    """Draws by site, the silo that made each draw, and the share of undone rounds.

    A round is undone when it leaves the reals.
    """

    draws: dict[str, np.ndarray]
    silo: np.ndarray
    undone: float = 0.0


def fit(
    silos: fed.Silos,
    method: str,
    step_size: float,
    rounds: int,
    q: fed.surrogates.Surrogates | None,
    seed: int = 0,
) -> Fit:
    """Run the papers' update, from the network's own start."""
    settings: dict[str, Any] = {} if q is None else {"surrogate": q}
    kernel = fed.FSGLD(
        model,
        fed.Step(step_size, preconditioner=None),
        VISIT,
        BATCH_SIZE,
        alpha=METHODS[method],
        num_kept=KEPT,
        **settings,
    )
    mcmc = MCMC(
        kernel, num_warmup=0, num_samples=rounds * KEPT, thinning=THINNING, progress_bar=False
    )
    mcmc.run(jax.random.key(seed), silos, init_params=start(silos.pooled["x"].shape[-1], seed))
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples().items()}
    fields = mcmc.get_extra_fields()
    return Fit(draws, np.asarray(fields["silo"]), float(np.mean(fields["diverging"])))


def judged(found: Fit) -> Fit:
    """Return equally spaced draws after the first tenth."""
    count = len(found.silo)
    which = np.linspace(count // 10, count - 1, JUDGED).astype(int)
    return Fit({k: v[which] for k, v in found.draws.items()}, found.silo[which])


@jax.jit
def log_probability(draws: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return log p(y = 0 or 1 | x, theta), ``(draws, rows, 2)``."""

    def one(sites: dict[str, jax.Array]) -> jax.Array:
        seen = handlers.trace(handlers.substitute(handlers.seed(model, 0), sites)).get_trace(x)
        return jax.nn.log_softmax(seen["y"]["fn"].logits)

    return jax.lax.map(one, draws)


def log_likelihood(draws: dict[str, np.ndarray], rows: Rows) -> np.ndarray:
    """Return the log-likelihood of each row by each draw, ``(draws, rows)``."""
    log_p = log_probability(draws, rows["x"])
    return np.asarray(jnp.where(rows["y"] == 1, log_p[..., 1], log_p[..., 0]), np.float64)


def judge(found: Fit, silos: fed.Silos, test: Rows) -> dict[str, float]:
    """Return both log-likelihoods on train and test rows, and the papers' at each draw's silo."""
    some, every = sample(silos, 1_000), judged(found)
    pooled = {k: v.reshape(-1, *v.shape[2:]) for k, v in some.items()}
    own = [
        log_likelihood(
            {k: v[[i]] for k, v in every.draws.items()}, {k: v[s] for k, v in some.items()}
        ).mean()
        for i, s in enumerate(every.silo)
    ]
    out: dict[str, float] = {}
    for name, rows in (("train", pooled), ("test", test)):
        values = log_likelihood(every.draws, rows)
        out |= {name: values.mean(), f"{name}, mean p": np.log(np.exp(values).mean(0)).mean()}
    return out | {"own silo": float(np.mean(own))}


def plot(found: dict[tuple[str, float, str], tuple[Fit, fed.Silos, Rows]], place: Path) -> None:
    """Draw figures 4 and 5: log-likelihood by draw, and calibration on test rows."""
    cases = list(dict.fromkeys((partition, step) for partition, step, _ in found))
    figure, axes = plt.subplots(
        3, len(cases), figsize=(3.6 * len(cases), 8.5), layout="constrained", squeeze=False
    )
    for column, (partition, step) in zip(axes.T, cases, strict=True):
        for method, color in zip(METHODS, ("C1", "C0"), strict=True):
            one, silos, test = found[partition, step, method]
            which = np.unique(np.linspace(0, len(one.silo) - 1, 150).astype(int))
            draws = {k: v[which] for k, v in one.draws.items()}
            train = {k: v.reshape(-1, *v.shape[2:]) for k, v in sample(silos, 100).items()}
            few = {k: v[:3_000] for k, v in test.items()}
            for ax, rows in zip(column[:2], (train, few), strict=True):
                value = log_likelihood(draws, rows).mean(1)
                ax.plot(
                    which * THINNING / KEPT,
                    np.maximum(np.nan_to_num(value, nan=-99), -3),
                    color=color,
                    label=method,
                    lw=1,
                )
            p = np.exp(np.asarray(log_probability(judged(one).draws, few["x"]))[..., 1]).mean(0)
            bins = np.clip((np.nan_to_num(p, nan=0.5) * 10).astype(int), 0, 9)
            shown = [b for b in range(10) if (bins == b).sum() >= 20]
            column[2].plot(
                [p[bins == b].mean() for b in shown],
                [few["y"][bins == b].mean() for b in shown],
                "o-",
                color=color,
            )
        column[0].set(title=f"{partition}, step {step:g}", ylabel="train", ylim=(-3, 0))
        column[1].set(xlabel="round", ylabel="test", ylim=(-3, 0))
        column[2].plot([0, 1], [0, 1], ":k", lw=1)
        column[2].set(xlabel="predicted probability", ylabel="share of positives, test")
        for ax in column[:2]:
            ax.axhline(-np.log(2), color="gray", lw=0.8, ls="--")
    axes[0, 0].legend(loc="lower right")
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=130)
    plt.close(figure)


def compare(
    name: str,
    rounds: int,
    repetitions: int,
    num_draws: int,
    size: int,
    cases: Sequence[str],
    place: Path,
) -> pd.DataFrame:
    """Run both methods with all steps on the partitions ``cases``; return a row per run."""
    rows: list[dict[str, Any]] = []
    shown: dict[tuple[str, float, str], tuple[Fit, fed.Silos, Rows]] = {}
    for seed in range(repetitions):
        for partition, beta in ((case, PARTITIONS[case]) for case in cases):
            silos, test = susy(beta, seed) if name == "susy" else simulated(beta, seed, size)
            if name == "simulated":
                print(
                    f"  {partition}: best possible",
                    {k: round(v, 3) for k, v in best(silos, test).items()},
                    flush=True,
                )
            q = surrogates(silos, LOCAL_STEP[name], num_draws)
            for step in STEPS[name][:1] if rounds < ROUNDS else STEPS[name]:
                for method in METHODS:
                    begin = time.perf_counter()
                    found = fit(silos, method, step, rounds, q, seed)
                    case: dict[str, Any] = {"partition": partition, "step": step, "method": method}
                    seconds = time.perf_counter() - begin
                    rows.append(
                        {
                            **case,
                            "seed": seed,
                            **judge(found, silos, test),
                            "undone": found.undone,
                            "seconds": seconds,
                        }
                    )
                    shown.setdefault((partition, step, method), (found, silos, test))
                    print(
                        "  "
                        + ", ".join(
                            f"{k} {v:.4g}" if isinstance(v, float) else f"{v}"
                            for k, v in rows[-1].items()
                        ),
                        flush=True,
                    )
    plot(shown, place)
    return pd.DataFrame(rows)


def defaults(silos: fed.Silos, test: Rows, rounds: int) -> tuple[dict[str, float], fed.Diagnosis]:
    """Run FSGLD with its defaults (minibatches of many rows), and return the library's verdict."""
    batch = BATCH_SIZE if silos.sizes[silos.group["y"]][0] > 1_000 else None
    mcmc = MCMC(
        fed.FSGLD(model, batch_size=batch),
        num_warmup=rounds // 5,
        num_samples=rounds,
        num_chains=3,
        chain_method="vectorized",
        progress_bar=False,
    )
    firsts = [start(silos.pooled["x"].shape[-1], seed) for seed in range(3)]
    mcmc.run(
        jax.random.key(0),
        silos,
        init_params={k: np.stack([f[k] for f in firsts]) for k in firsts[0]},
    )
    found = Fit(
        {k: np.asarray(v) for k, v in mcmc.get_samples().items()},
        np.asarray(mcmc.get_extra_fields()["silo"]),
    )
    return judge(found, silos, test), fed.diagnose(mcmc)


def variational(silos: fed.Silos, test: Rows, rounds: int) -> dict[str, float]:
    """Return draws of a diagonal Gaussian that conducive rounds fit.

    Each pair of points looks at a minibatch of rows.
    """
    first = start(silos.pooled["x"].shape[-1], 0)
    guide = fed.AutoSiloNormal(
        model, global_cov="diag", init_scale=0.05, init_loc_fn=init_to_value(values=first)
    )
    size = max(16, silos.sizes[silos.group["y"]][0] // 256)
    avg = fed.ConduciveSFVI(model, guide, batch_size=size)
    result = avg.run(jax.random.key(0), rounds, silos, progress_bar=False)
    idata = fed.to_inference_data(avg, result, silos, num_draws=JUDGED, log_likelihood=False)
    draws = {k: v.to_numpy()[0] for k, v in idata.posterior.data_vars.items()}
    return judge(Fit({k: draws[k] for k in first}, np.arange(JUDGED) % len(silos)), silos, test)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(
        description="A Bayesian neural network: DSGLD and FSGLD on silos whose labels differ."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="100 rounds at the papers' step, skewed silos, small simulated ones",
    )
    parser.add_argument("--data", choices=sorted(STEPS), default="simulated")
    parser.add_argument(
        "--repetitions", type=int, default=1, help="each with silos and a chain of its own"
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="FSGLD as it comes beside DSGLD at the last step of its table, skewed silos",
    )
    parser.add_argument("--figure", type=Path, default=Path("figures/bayesian_mlp.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    rounds, num_draws, size = (100, 60, 300) if args.quick else (ROUNDS, 3_000, NUM_ROWS)
    if args.defaults:
        silos, test = susy(0.5) if args.data == "susy" else simulated(0.5, size=size)
        number = 100 if args.quick else 1_000
        print(
            "always one half: -0.693; best possible:",
            best(silos, test) if args.data == "simulated" else "not known",
        )
        step = STEPS[args.data][-1]
        rows = {f"DSGLD, {step:g}": judge(fit(silos, "DSGLD", step, number, None), silos, test)}
        print(rows, flush=True)
        rows[f"SFVI-Avg, conducive, {VI_ROUNDS} rounds"] = variational(
            silos, test, 5 if args.quick else VI_ROUNDS
        )
        print(rows, flush=True)
        rows["FSGLD, defaults"], verdict = defaults(silos, test, number)
        print(frame := pd.DataFrame(rows).T.round(3), verdict, sep="\n")
        return frame
    cases = list(PARTITIONS)[-1:] if args.quick else list(PARTITIONS)
    frame = compare(args.data, rounds, args.repetitions, num_draws, size, cases, args.figure)
    groups = frame.drop(columns="seed").groupby(["partition", "step", "method"], sort=False)
    shown = groups.agg(["mean", "std"]) if args.repetitions > 1 else groups.mean()
    print(
        "log-likelihood of a row (always one half: -0.693); the papers' average of draws, and of "
        "the posterior prediction ('mean p')"
    )
    print(shown.round(3).to_string())
    if not args.quick:
        print(
            "the paper, train and test:",
            *(f"{' '.join(k)} {v}" for k, v in PAPER.items()),
            sep="\n  ",
        )
    print(f"figure written to {args.figure}")
    return frame


if __name__ == "__main__":
    main()
