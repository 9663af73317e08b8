r"""Bayesian metric learning on Isolet: silos whose letters do not overlap.

Pairs (i, j) of spoken letters are similar (the same letter) or not. The metric is :math:`A = \sum_k
\gamma_k v_k v_k^\top`, with v the top K eigenvectors of the features' second moments. With its
distance a pair's law is a logistic regression on its squared differences along them:

.. math:: P(\text{similar}) = \frac{1}{1 + \exp(\|x_i - x_j\|_A^2 - \mu)},
          \qquad \|x_i - x_j\|_A^2 = \sum_k \gamma_k (v_k^\top (x_i - x_j))^2,

with normal priors on :math:`\gamma` and the threshold :math:`\mu`. Nothing keeps :math:`\gamma`
positive. The paper's text writes Ber(1 / (1 + exp(y (...)))) with y in {0, 1}, which says 1/2 of
every dissimilar pair. It is Yang et al.'s probability of the label itself, y = 1 or -1.

There are 5,000 similar and 5,000 dissimilar pairs. Each of ten silos has 500 of either, of two or
three letters that no other silo has, and 100 more pairs are held out. The paper says h = 1e-3, m =
256, equal chances of the silos. Its surrogates come from 3,000 draws of each silo's likelihood by
SGLD, or are Laplace's (appendix F.2, which the available text lacks). It does not say K, the
priors, the features' scale, where chains start, or how many rounds there are. It gives local steps
between rounds only in section 5.3 (40). The other values are chosen here, in capitals below. The
scale matters: distances of unscaled features have curvatures of 1.5e6, and a step of 1e-3 leaves
the reals above 4e3. Here squared distances in the K dimensions are 1 on average.

References: El Mekkaoui et al. (2021), Federated Stochastic Gradient Langevin Dynamics, section 5.2,
figure 5; Yang, Jin & Sukthankar (2007), Bayesian active distance metric learning.
"""

import argparse
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _data import path
from jax import Array
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel
from scipy import optimize
from scipy.special import expit

import numpyro_fed as fed

ROWS, FEATURES, LETTERS = 7_797, 617, 26
NUM_SILOS, NUM_PAIRS, NUM_TEST = 10, 1_000, 100  # pairs of each silo; half of them are similar
STEP_SIZE, BATCH_SIZE, NUM_DRAWS = 1e-3, 256, 3_000
DIRECTIONS, PRIOR_SD, VISIT, ROUNDS = 10, 10.0, 40, 1_000
NUM_STEPS = 10_000  # at least, also for short visits; a fifth of the rounds is burn-in
METHODS = ("DSGLD", "FSGLD, moments", "FSGLD, Laplace", "FSGLD, score", "FSGLD, default", "NUTS")
SETS = ("learning", "held-out")
# log likelihoods of a pair: largest gap to NUTS that counts as equal, and the level of a chain that
# has left and does not come back
NEAR, LOST = 0.01, -10.0
Pairs = dict[str, np.ndarray]


class Curves(NamedTuple):
    """Results of :func:`log_likelihoods` of a method and a set of pairs, ``(seeds, 2, draws)``.

    They are for all draws, and for those after the burn-in.
    """

    whole: np.ndarray
    late: np.ndarray


Found = dict[tuple[str, str], Curves]


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return features in [-1, 1], shape (7797, 617), and letters 1 to 26."""
    rows = (
        f"{ROWS:,} rows: X_int16, {FEATURES} features times 10,000, and y, the letters 1 to "
        f"{LETTERS}"
    )
    source = (
        "the UCI repository, data set 54 (isolet1+2+3+4.data, then isolet5.data, saved by "
        "numpy.savez_compressed)"
    )
    place = path("isolet", "isolet.npz", source, rows)
    try:
        with place.open("rb") as raw, np.load(raw) as file:  # NumPy does not close a broken file
            x, y = file["X_int16"], file["y"]
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise ValueError(
            f"{place} is truncated or no such file ({error}). Get it again from {source}; expected "
            f"are {rows}."
        ) from error
    if x.shape != (ROWS, FEATURES) or y.shape != (ROWS,):
        raise ValueError(
            f"{place}: expected {rows}, got shapes {x.shape} and {y.shape}. Get it again from "
            f"{source}."
        )
    return x.astype(np.float64) / 10_000, y.astype(int)


def scores(x: np.ndarray) -> np.ndarray:
    """Return coordinates of rows along the top eigenvectors of X'X, largest eigenvalue first."""
    vectors = np.linalg.eigh(x.T @ x)[1]
    return x @ vectors[:, : -DIRECTIONS - 1 : -1]


def choose(
    rng: np.random.Generator, letters: np.ndarray, rows: np.ndarray, similar: bool, count: int
) -> np.ndarray:
    """Return ``count`` different pairs of these rows, similar or dissimilar, ``(count, 2)``."""
    i, j = (rows[k] for k in np.triu_indices(len(rows), 1))
    found = np.flatnonzero((letters[i] == letters[j]) == similar)
    if len(found) < count:
        kind = "similar" if similar else "dissimilar"
        raise ValueError(
            f"expected {count} {kind} pairs in a silo of {len(rows)} rows, got {len(found)}; use "
            "fewer pairs or silos"
        )
    taken = rng.choice(found, count, replace=False)
    return np.stack([i[taken], j[taken]], axis=1)


def silos(
    x: np.ndarray,
    letters: np.ndarray,
    seed: int = 0,
    num_silos: int = NUM_SILOS,
    num_pairs: int = NUM_PAIRS,
    num_test: int = NUM_TEST,
) -> tuple[fed.Silos, Pairs]:
    """Return pairs to learn from, in silos, and pairs held out.

    They hold the squared differences ``w`` along the directions, and ``similar``.
    """
    rng = np.random.default_rng(seed)
    silo_of_row = fed.partitioners.disjoint(rng, letters, num_silos, min_labels=2)
    half, half_test = num_pairs // 2, num_test // 2
    parts = [
        choose(rng, letters, np.flatnonzero(silo_of_row == s), similar, half + half_test)
        for s in range(num_silos)
        for similar in (True, False)
    ]
    pairs = np.stack(parts)  # (silos and kinds, pairs, 2)
    z = scores(x)
    w = (z[pairs[..., 0]] - z[pairs[..., 1]]) ** 2
    w = (w / w[:, :half].sum(-1).mean()).astype(np.float32)
    learn, test = (
        {
            "w": part.reshape(-1, DIRECTIONS),
            "similar": np.tile(np.repeat([1.0, 0.0], part.shape[1]), num_silos).astype(np.float32),
        }
        for part in (w[:, :half], w[:, half:])
    )
    return fed.split(learn, by=np.repeat(np.arange(num_silos), 2 * half)), test


def model(w, similar=None):  # type: ignore[no-untyped-def]
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD))
    gamma = numpyro.sample("gamma", dist.Normal(0, PRIOR_SD).expand([w.shape[-1]]).to_event(1))
    with fed.silo_plate("pairs", w.shape[0]):
        numpyro.sample("similar", dist.Bernoulli(logits=mu - w @ gamma), obs=similar)


def design(silo: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return covariates of the logits, for gamma and then mu, and the sign of each pair.

    The sign is 1 for a similar pair and -1 for a dissimilar one.
    """
    covariates = np.insert(-np.asarray(silo["w"], np.float64), DIRECTIONS, 1, axis=1)
    return covariates, 2 * np.asarray(silo["similar"], np.float64) - 1


def curvature(covariates: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Return the negative Hessian of a log likelihood."""
    p = expit(covariates @ theta)
    return covariates.T @ (covariates * (p * (1 - p))[:, None])


def mode(silo: Mapping[str, Any]) -> np.ndarray:
    """Return the mode of the posterior that a silo (or all pairs) has alone."""
    a, sign = design(silo)
    prior = np.eye(DIRECTIONS + 1) / PRIOR_SD**2

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        logits = -sign * (a @ theta)
        value = np.logaddexp(0, logits).sum() + theta @ prior @ theta / 2
        return value, prior @ theta - a.T @ (sign * expit(logits))

    start = np.zeros(DIRECTIONS + 1)
    found = optimize.minimize(
        loss, start, jac=True, hess=lambda t: curvature(a, t) + prior, method="trust-exact"
    )
    return np.asarray(found.x)


def laplace(silos: fed.Silos) -> fed.surrogates.Surrogates:
    """Return second-order expansions of the silos' likelihoods.

    Each is at the mode of the silo's own posterior.
    """
    modes = [mode(silos[name]) for name in silos]
    curvatures = [
        curvature(design(silos[name])[0], theta) for name, theta in zip(silos, modes, strict=True)
    ]
    # at that mode the likelihood's slope is the prior's, theta / sd^2
    means = [
        theta + np.linalg.solve(c, theta) / PRIOR_SD**2
        for theta, c in zip(modes, curvatures, strict=True)
    ]
    return fed.surrogates.analytic(silos, np.stack(means), np.stack(curvatures))


def growth(silos: fed.Silos, surrogates: fed.surrogates.Surrogates, stay: int) -> float:
    """Return the factor by which a visit to the worst silo stretches distances from the mode.

    The mode is the posterior's, and distances are small. A factor above 1 drives chains away, until
    other silos draw them back.

    Near the mode a step multiplies the distance by I - h/2 (L + S (H_s - L_s)). H_s is the silo's
    curvature, L_s its surrogate's, and L that of all surrogates and the prior.
    """
    theta, own = mode(silos.pooled), np.asarray(surrogates.factors.precision, np.float64)
    whole = own.sum(0) + np.eye(len(theta)) / PRIOR_SD**2
    steps = [
        np.eye(len(theta))
        - STEP_SIZE / 2 * (whole + len(silos) * (curvature(design(silos[name])[0], theta) - q))
        for name, q in zip(silos, own, strict=True)
    ]
    return float(max(abs(np.linalg.eigvalsh(step)).max() for step in steps) ** stay)


def kernel(method: str, silos: fed.Silos, stay: int) -> MCMCKernel:
    """Return the paper's DSGLD or FSGLD, or FSGLD with nothing but the model.

    The paper's FSGLD has its surrogates or the library's.
    """
    if method == "FSGLD, default":
        return fed.FSGLD(model)
    paper: dict[str, Any] = {
        "step_size": fed.Step(STEP_SIZE, preconditioner=None),
        "num_local_steps": stay,
        "batch_size": BATCH_SIZE,
    }
    if method == "DSGLD":
        return fed.DSGLD(model, **paper)
    surrogate: Any = "score"
    if method == "FSGLD, moments":
        surrogate = fed.surrogates.moments(model, silos, num_samples=NUM_DRAWS)
    elif method == "FSGLD, Laplace":
        surrogate = laplace(silos)
    return fed.FSGLD(model, surrogate=surrogate, **paper)


def fit(
    silos: fed.Silos, method: str, stay: int, rounds: int, seed: int = 0
) -> tuple[dict[str, Array], float]:
    """Return one chain's draws, one per round from gamma = 0, mu = 0, and the :func:`growth`.

    NUTS draws from all pairs after a warm-up, and has no growth.
    """
    start = {"gamma": np.zeros(DIRECTIONS, np.float32), "mu": np.zeros((), np.float32)}
    if method == "NUTS":
        mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=rounds, progress_bar=False)
        mcmc.run(jax.random.key(seed), **silos.pooled, init_params=start)
        return mcmc.get_samples(), np.nan
    chosen = kernel(method, silos, stay)
    mcmc = MCMC(chosen, num_warmup=0, num_samples=rounds, progress_bar=False)
    mcmc.run(jax.random.key(seed), silos, init_params=start)
    conducive = method in ("FSGLD, moments", "FSGLD, Laplace", "FSGLD, score")
    return mcmc.get_samples(), growth(silos, chosen.surrogates, stay) if conducive else np.nan


@jax.jit
def log_likelihoods(draws: dict[str, Array], pairs: dict[str, Array]) -> tuple[Array, Array]:
    """Return means over pairs of two log likelihoods, for n = 1, 2, ...

    The first is draw n's log likelihood. The second is the log of the mean likelihood of draws 1 to
    n.
    """
    sign = 2 * pairs["similar"] - 1

    def one(total: Array, draw: dict[str, Array]) -> tuple[Array, tuple[Array, Array]]:
        log_p = jax.nn.log_sigmoid(sign * (draw["mu"] - pairs["w"] @ draw["gamma"]))
        total = jnp.logaddexp(total, log_p)
        return total, (log_p.mean(), total.mean())

    each, total = jax.lax.scan(one, jnp.full(len(sign), -jnp.inf), draws)[1]
    return each, total - jnp.log(jnp.arange(1, len(total) + 1))


def compare(
    x: np.ndarray, letters: np.ndarray, stay: int, seeds: int, rounds: int, **sizes: int
) -> tuple[Found, dict[str, np.ndarray]]:
    """Return curves of every method and set of pairs, and growths of visits.

    Each seed has its own silos and pairs.
    """
    found: dict[tuple[str, str], list[Curves]] = {
        (method, name): [] for method in METHODS for name in SETS
    }
    growths: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        learn, test = silos(x, letters, seed, **sizes)
        for method in METHODS:
            own = rounds if method in ("FSGLD, default", "NUTS") else max(rounds, NUM_STEPS // stay)
            draws, grown = fit(learn, method, stay, own, seed)
            late = {k: v[own // 5 :] for k, v in draws.items()}
            for name, pairs in zip(SETS, (learn.pooled, test), strict=True):
                curves = Curves(*(np.stack(log_likelihoods(d, pairs)) for d in (draws, late)))
                found[method, name].append(curves)
            growths[method].append(grown)
            value = curves.late[0].mean()
            print(
                f"  seed {seed}, {method}: held-out {value:.4f}, growth of a stay {grown:.3g}",
                flush=True,
            )
    stacked = {key: Curves(*map(np.stack, zip(*each, strict=True))) for key, each in found.items()}
    return stacked, {method: np.array(values) for method, values in growths.items()}


def kept(found: Found, method: str) -> np.ndarray:
    """Return the mask of seeds whose chains did not leave."""
    return np.asarray(found[method, "held-out"].whole[:, 0].min(-1) > LOST)  # NaN counts as left


def reached(curve: np.ndarray, level: float) -> float:
    """Return the round from which a curve stays at a level or above; infinite if it ends below."""
    below = np.flatnonzero(curve < level)
    return (
        1.0 if not below.size else np.inf if below[-1] == len(curve) - 1 else float(below[-1] + 2)
    )


def spread(values: np.ndarray) -> str:
    return (
        f"{values.mean():.4f} ({values.std(ddof=int(len(values) > 1)):.4f})" if len(values) else "-"
    )


def table(found: Found, growths: dict[str, np.ndarray]) -> pd.DataFrame:
    """Return means (sds) over the seeds whose chain did not leave, and the number that did."""
    rows: dict[str, dict[str, str]] = {method: {} for method in METHODS}
    levels = found["NUTS", "held-out"].late[:, 1, -1] - NEAR
    floor = found["DSGLD", "held-out"].late[:, 0].mean(-1)
    for method, row in rows.items():
        own, curves = kept(found, method), found[method, "held-out"]
        for name in SETS:
            late = found[method, name].late[own]
            row |= {
                f"{name}, average": spread(late[:, 0].mean(-1)),
                f"{name}, log mean": spread(late[:, 1, -1]),
            }
        short = (curves.late[:, 0] - found["NUTS", "held-out"].late[:, 0].mean(-1)[:, None]).mean(
            -1
        )[own]
        row["less NUTS"] = spread(short) if method != "NUTS" else ""
        row["sd of draws"] = f"{late[:, 0].std(-1).mean():.4f}" if own.any() else "-"
        reach = [reached(*pair) for pair in zip(curves.whole[:, 1], levels, strict=True)]
        row["rounds"] = "" if method == "NUTS" else f"{np.median(np.where(own, reach, np.inf)):.0f}"
        row["left"] = f"{(~own).sum()}"
        row["above DSGLD"] = (
            "" if method == "DSGLD" else f"{(own & (curves.late[:, 0].mean(-1) > floor)).sum()}"
        )
        row["growth"] = (
            ""
            if np.isnan(growths[method]).any()
            else f"{np.median(growths[method]):.2g}, {growths[method].max():.2g}"
        )
    return pd.DataFrame(rows).T


def plot(found: Found, place: Path) -> None:
    """Draw figure 5, less NUTS's level of the same seed: mean and sd over seeds.

    Above are averages of samples so far; below, the log of their mean likelihood.
    """
    figure, axes = plt.subplots(
        2, 2, figsize=(10, 7), sharex=True, sharey="row", layout="constrained"
    )
    for (row, label), (column, name) in product(
        enumerate(("average of logs", "log of the average")), enumerate(SETS)
    ):
        ax, late = axes[row, column], found["NUTS", name].late
        level = late[:, 1, -1:] if row else late[:, 0].mean(-1, keepdims=True)
        for color, method in enumerate(METHODS[:-1]):
            own = kept(found, method)
            if not own.any():
                continue
            curves = found[method, name].whole[own, row]
            samples = np.arange(1, curves.shape[-1] + 1)
            curves = (curves if row else curves.cumsum(-1) / samples) - level[own]
            mean, sd = curves.mean(0), curves.std(0)
            left = "" if own.all() else f" ({own.sum()} of {len(own)} seeds)"
            style = "--" if method == "FSGLD, Laplace" else "-"
            ax.plot(samples, mean, style, color=f"C{color}", label=method + left)
            ax.fill_between(
                samples, mean - sd, mean + sd, alpha=0.2, linewidth=0, color=f"C{color}"
            )
        ax.axhline(0, color="black", linestyle=":", label="NUTS")
        ax.set(
            xscale="log",
            xlabel="samples (rounds)" if row else "",
            ylabel="" if column else f"{label}, less NUTS's",
        )
        ax.set_title("" if row else f"{name} pairs")
    axes[0, 0].legend(loc="lower right")
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(
        description="Metric learning from pairs of letters: DSGLD and FSGLD."
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, four silos of few pairs, few rounds"
    )
    parser.add_argument(
        "--seeds", type=int, default=10, help="repetitions, each with silos and pairs of its own"
    )
    parser.add_argument("--stay", type=int, default=VISIT, help="local steps between rounds")
    parser.add_argument("--figure", type=Path, default=Path("figures/metric_learning.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    x, letters = data()
    if args.quick:
        found, growths = compare(x, letters, args.stay, 1, 100, num_silos=4, num_pairs=300)
    else:
        found, growths = compare(x, letters, args.stay, args.seeds, ROUNDS)
    frame = table(found, growths)
    print(
        "log likelihood of a pair, mean (sd) over the seeds whose chain did not leave (left: how "
        "many did); less NUTS: held-out, average, by seed; rounds: median until the "
        f"log mean of held-out pairs stays within {NEAR} of NUTS's; growth: of a stay, median and "
        "largest"
    )
    print(frame.to_string(), flush=True)
    plot(found, args.figure)
    print(f"figure written to {args.figure}")
    return frame


if __name__ == "__main__":
    main()
