r"""Variance of gradient estimators on Bernoulli silos.

The estimators are those of pooled rows (SGLD), of silos (DSGLD), and of silos with conducive
gradients (FSGLD).

Three silos have ten tosses each, with 1, 5 and 9 heads (means 0.1, 0.5 and 0.9). Together they are
thirty tosses of a fair coin. The prior of the chance theta is uniform, and minibatches have m = 5
rows with replacement. Let D = 1 / (theta (1 - theta)) be the distance between the scores of head
and tail, and p_s the silos' means. The estimators of the gradient in theta over N rows have the
variances

.. math::
    \text{SGLD} &= N^2 D^2\, \bar p (1 - \bar p) / m \\
    \text{DSGLD} &= N^2 D^2 \left[ \overline{p_s (1 - p_s)} / m
                    + \operatorname{Var}_s(p_s) \right] \\
    \text{FSGLD} &= N^2 D^2 \left[ \overline{p_s (1 - p_s)} / m
                    + \operatorname{Var}_s(p_s - r_s(\theta)) \right]

with :math:`r_s` the score of :math:`q_s` in the logit of theta, divided by :math:`N_s`. The kernels
move in the logit, where the silos' scores :math:`N_s (p_s - \theta)` differ by constants alone.
Gaussians of equal precision remove that difference for every theta, and score matching finds them.
FSGLD's variance is then below that of pooled minibatches, which are not balanced over silos.

Gradients are the library's own. The paper shows means and one sd over theta for the first two. One
of its two texts has "-0.1, 0.5 and 0.9" for the silos' means (a dash read as a sign), and the other
has each number three times. It does not say whether rows are taken with replacement.

References: el Mekkaoui et al. (2021), Federated stochastic gradient Langevin dynamics, figure 1,
equations 2, 4 and 5.
"""

import argparse
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from jax import Array, random

import numpyro_fed as fed
from numpyro_fed.data.views import SiloView, largest
from numpyro_fed.mcmc.config import LangevinConfig, Tuning
from numpyro_fed.mcmc.gradients import drift, open_silo
from numpyro_fed.mcmc.langevin import batches
from numpyro_fed.mcmc.options import Options
from numpyro_fed.mcmc.setup import make_setup

HEADS, NUM_ROWS, BATCH_SIZE = (1, 5, 9), 10, 5
THETA = np.linspace(0.05, 0.95, 19)
METHODS = ("SGLD", "DSGLD", "FSGLD", "FSGLD, moments")


def silos() -> fed.Silos:
    tosses = (np.arange(NUM_ROWS) < np.array(HEADS)[:, None]).astype(np.float32)
    return fed.split({"y": tosses.ravel()}, by=np.repeat(np.arange(len(HEADS)), NUM_ROWS))


def model(y):  # type: ignore[no-untyped-def]
    theta = numpyro.sample("theta", dist.Uniform(0, 1))
    with fed.silo_plate("tosses", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(theta), obs=y)


class Estimator(NamedTuple):
    """Gradient estimator of a kernel, and the surrogates that it uses (``None``: none)."""

    config: LangevinConfig
    tuning: Tuning
    silos: fed.Silos
    surrogates: fed.surrogates.Surrogates | None


@cache
def estimator(method: str) -> Estimator:
    """Return the estimator of one of the METHODS; pooled rows are one silo."""
    rows, surrogate = silos(), None
    if method.startswith("FSGLD"):
        surrogate = (
            fed.surrogates.moments(model, rows, prior=0.0) if "moments" in method else "score"
        )
    data = rows.as_one() if method == "SGLD" else rows
    own: dict[str, Any] = {"surrogate": surrogate, "alpha": float(surrogate is not None)}
    own |= {"selection": None, "public": (), "validate": False}
    step = fed.Step(1e-4, preconditioner=None)
    options = Options(step, num_local_steps=1, batch_size=BATCH_SIZE, **own).checked()
    found = make_setup(model, data, {}, options)
    return Estimator(found.config, found.tuning, data, found.surrogates)


def gradient(
    config: LangevinConfig,
    tuning: Tuning,
    silos: fed.Silos,
    theta: Array,
    number: Array,
    batch: dict | Array,
) -> Array:
    """Estimate the gradient of log p(theta, y) in theta, a scalar, at one silo.

    :param batch: a minibatch as arguments of the model, or a key to draw one.
    """
    view = SiloView(silos, number, largest(silos))
    silo = open_silo(config, tuning, None, view)
    rows = batch if isinstance(batch, dict) else batches(config, batch, view, ())
    position = jnp.log(theta) - jnp.log1p(-theta)
    here = silo._replace(kwargs={**silo.kwargs, **rows})
    slope = drift(config, tuning, position[None], None, here, view)[0][0]
    return (slope - (1 - 2 * theta)) / (
        theta * (1 - theta)
    )  # without the slope of the logit's Jacobian


@partial(jax.jit, static_argnames=("config", "count"))
def sample(
    config: LangevinConfig, tuning: Tuning, silos: fed.Silos, thetas: Array, key: Array, count: int
) -> Array:
    """Return estimates at each theta, ``(K, count)``.

    Silos and minibatches are drawn as the kernels draw them.
    """

    def one(theta: Array, key: Array) -> Array:
        key_silo, key_batch = random.split(key)
        return gradient(
            config,
            tuning,
            silos,
            theta,
            random.choice(key_silo, len(silos), p=tuning.selection),
            key_batch,
        )

    keys = random.split(key, (len(thetas), count))
    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(thetas, keys)


def variance(
    method: str, thetas: np.ndarray, surrogates: fed.surrogates.Surrogates | None = None
) -> np.ndarray:
    """Return the closed form of the module's docstring, at each theta."""
    p = np.array(HEADS) / NUM_ROWS
    total = (len(p) * NUM_ROWS / (thetas * (1 - thetas))) ** 2
    if method == "SGLD":
        return total * p.mean() * (1 - p.mean()) / BATCH_SIZE
    between = np.broadcast_to(p[:, None], (len(p), len(thetas)))
    if surrogates is not None:
        logits = np.log(thetas / (1 - thetas))[:, None]
        between = between - surrogates.scores(logits)[..., 0] / NUM_ROWS
    return total * ((p * (1 - p)).mean() / BATCH_SIZE + between.var(0))


def table(count: int) -> pd.DataFrame:
    """Return the table of estimates for each theta and method.

    Its columns are mean and sd of ``count`` estimates, the sd of the closed form, and the true
    gradient.
    """
    heads = sum(HEADS)
    tails = len(HEADS) * NUM_ROWS - heads
    found = []
    for number, method in enumerate(METHODS):
        own = estimator(method)
        drawn = np.asarray(
            sample(*own[:3], jnp.asarray(THETA), random.key(number), count), np.float64
        )
        exact = np.sqrt(variance(method, THETA, own.surrogates))
        for theta, values, sd in zip(THETA, drawn, exact, strict=True):
            true = heads / theta - tails / (1 - theta)
            found.append((method, theta, true, values.mean(), values.std(ddof=1), sd))
    names = ["method", "theta", "gradient", "mean", "sd", "closed form"]
    return pd.DataFrame(found, columns=names).set_index(["method", "theta"])


def plot(frame: pd.DataFrame, place: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    shifts = np.linspace(-0.009, 0.009, 3)
    for method, shift, color in zip(METHODS, (*shifts, 0.0), ("C0", "C3", "C2", "C7"), strict=True):
        own = frame.loc[method]
        if method != "FSGLD, moments":
            left.errorbar(
                THETA + shift, own["mean"], own["sd"], fmt=".", color=color, capsize=2, label=method
            )
        right.semilogy(THETA, own["closed form"], color=color)
        right.semilogy(THETA, own["sd"], "o", color=color, markersize=4, label=method)
    left.plot(THETA, frame.loc["SGLD"]["gradient"], color="black", linewidth=0.8, label="all rows")
    left.set(
        xlabel="theta", ylabel="gradient", ylim=(-500, 500), title="Mean and one sd of the estimate"
    )
    right.set(xlabel="theta", ylabel="sd", title="The sd: measured (points), closed form (lines)")
    left.legend()
    right.legend(loc="upper center")
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    """Print the sds, draw the figure, and return the table."""
    parser = argparse.ArgumentParser(
        description="Variance of gradient estimators on three Bernoulli silos."
    )
    parser.add_argument("--quick", action="store_true", help="few minibatches")
    parser.add_argument("--figure", type=Path, default=Path("figures/bernoulli_variance.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    frame = table(1_000 if args.quick else 20_000)
    sds = frame[["sd", "closed form"]].unstack("method").swaplevel(axis=1)[list(METHODS)]
    print("sd of the gradient's estimate in theta:")
    print(sds.iloc[1::2].round(1).to_string())
    ratios = (
        frame["sd"].unstack("method")[list(METHODS)].div(frame["closed form"].loc["SGLD"], axis=0)
    )
    print("as multiples of SGLD's closed form, least and largest over theta:")
    print(ratios.agg(["min", "max"]).round(3).to_string())
    plot(frame, args.figure)
    print(f"figure written to {args.figure}")
    return frame


if __name__ == "__main__":
    main()
