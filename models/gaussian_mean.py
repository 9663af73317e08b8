"""Mean of Gaussian data whose silos differ: long visits harm DSGLD, and not FSGLD.

Ten silos have 200 points each, around a center of their own. The posterior of the overall mean is
known exactly. Draws are taken every 100 local steps, also within longer visits, as in the paper.
The more local steps T a chain takes per visit, the more DSGLD draws from a mixture of the silos'
own posteriors. FSGLD with exact surrogates does not depend on T: its only excess variance is the
noise of minibatches.

At this step size nine tenths of a position are left after a step, and nothing after a hundred. So
the law of the draws is known in closed form (:func:`variances`), and so is the squared error of the
mean of n draws (:func:`expected_mse`). Since the silos have equal sizes, DSGLD's mixture has the
posterior's mean. Its error of the mean therefore does not level off. It falls like that of few
draws from a wide law (one per visit), and its spread stays wrong.

The paper prints q_s = N(mean of the silo, I / N) and says that it is the silo's likelihood, so its
N is the silo's 200 rows. It does not give its grid for the constants of the bounds. The gradients
of a Gaussian are not bounded (assumption 1), so the grid determines gamma_s^2, which is largest at
corners.

Reference: El Mekkaoui et al. (2021), Federated Stochastic Gradient Langevin Dynamics, section 5.1,
figures 2, 3 and 4.
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
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

NUM_SILOS, NUM_ROWS = 10, 200
STEP_SIZE, BATCH_SIZE = 1e-4, 10
VISITS, EVERY, BURN_IN = (1, 10, 100, 1000), 100, 20_000
NUM_CHAINS = 8
METHODS = ("DSGLD", "FSGLD", "FSGLD, defaults")
Draws = dict[tuple[str, int], np.ndarray]


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return points, shape (2000, 2), and the silo of each."""
    rng = np.random.default_rng(seed)
    silo = np.repeat(np.arange(NUM_SILOS), NUM_ROWS)
    centers = rng.uniform(-6, 6, (NUM_SILOS, 2))
    return (centers[silo] + rng.normal(size=(len(silo), 2))).astype(np.float32), silo


def silos(seed: int = 0) -> fed.Silos:
    x, silo = data(seed)
    return fed.split({"x": x}, by=silo)


def model(x):  # type: ignore[no-untyped-def]
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("points", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1).to_event(1), obs=x)


def exact(silos: fed.Silos) -> tuple[np.ndarray, float]:
    """Return mean and sd of the posterior N(sum x / (N + 1), 1 / (N + 1))."""
    x = np.asarray(silos.pooled["x"], np.float64)
    return x.sum(0) / (len(x) + 1), (len(x) + 1) ** -0.5


def variances(silos: fed.Silos, method: str, stay: int) -> tuple[float, float]:
    """Return the variances of a draw at the paper's step size, averaged over coordinates.

    The first comes from differing silos, the second from single steps.

    With a = 1 - h lam / 2 and lam = N + 1 a step of DSGLD is theta <- a theta + (1 - a) c_s + N(0,
    h + h^2 V / 4). Here c_s is the silo's own posterior mean, and V = (N_s S)^2 / m times the
    variance within a silo is the minibatch's noise. FSGLD has c, the posterior mean, in place of
    all c_s.
    """
    rows, h = NUM_SILOS * NUM_ROWS, STEP_SIZE
    points = [np.asarray(silos[name]["x"], np.float64) for name in silos]
    within, centers = (
        np.mean([x.var(0) for x in points]),
        np.stack([x.mean(0) for x in points]) * rows / (rows + 1),
    )
    left = 1 - h * (rows + 1) / 2
    noise = (h + h**2 / 4 * rows**2 / BATCH_SIZE * within) / (1 - left**2)
    share = (1 - left**stay) / (1 + left**stay) if method == "DSGLD" else 0.0
    return float(share * centers.var(0).mean()), float(noise)


def expected_mse(silos: fed.Silos, method: str, stay: int, num_draws: np.ndarray) -> np.ndarray:
    """Return the expectation of :func:`mse`; draws share nothing but the silo of their visit."""
    between, noise = variances(silos, method, stay)
    kept = max(1, stay // EVERY)
    stays, rest = np.divmod(num_draws, kept)
    return 2 * (between * (stays * kept**2 + rest**2) / num_draws**2 + noise / num_draws)


def fit(
    silos: fed.Silos, method: str, stay: int, num_draws: int, burn_in: int = BURN_IN
) -> np.ndarray:
    """Return draws every 100 local steps, ``(chains, draws, 2)``, with ``stay`` steps per round.

    They are those of the paper's kernels, or of the library's defaults.
    """
    kept, thinning = max(1, stay // EVERY), max(1, EVERY // stay)
    settings: dict[str, Any] = {"num_local_steps": stay, "num_kept": kept}
    paper: dict[str, Any] = {
        "step_size": fed.Step(STEP_SIZE, preconditioner=None),
        "batch_size": BATCH_SIZE,
    }
    if method == "DSGLD":
        kernel: fed.DSGLD | fed.FSGLD = fed.DSGLD(model, **settings, **paper)
    elif method == "FSGLD":
        kernel = fed.FSGLD(model, surrogate=exact_surrogates(silos), **settings, **paper)
    else:
        kernel = fed.FSGLD(model, **settings)
    chains: dict[str, Any] = {"num_chains": NUM_CHAINS, "chain_method": "vectorized"}
    counts = {
        "num_warmup": kept * burn_in // stay,
        "num_samples": num_draws * thinning,
        "thinning": thinning,
    }
    mcmc = MCMC(kernel, **counts, **chains)
    mcmc.run(jax.random.key(0), silos)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], np.float64)


def mse(draws: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return |mean of n draws - posterior mean|^2 for n = 1, 2, ..., averaged over chains."""
    running = draws.cumsum(axis=1) / np.arange(1, draws.shape[1] + 1)[:, None]
    return ((running - mean) ** 2).sum(-1).mean(0)


def exact_surrogates(silos: fed.Silos) -> fed.surrogates.Surrogates:
    """Return the silos' likelihoods N(mean of the silo, 1 / N_s)."""
    means = np.stack([np.asarray(silos[name]["x"], np.float64).mean(0) for name in silos])
    return fed.surrogates.analytic(silos, means, np.full_like(means, NUM_ROWS))


def bounds(silos: fed.Silos) -> tuple[pd.DataFrame, tuple[float, float]]:
    """Return gamma_s^2 of theorem 1, epsilon_s^2 of theorem 2, and both bounds after 100,000 steps.

    The mean squared error of an average is at most a constant times sum_s N_s^2 epsilon_s^2 / (f_s
    m T) + 1 / (h T) + h^2 (theorem 2), or that with gamma_s^2 (theorem 1). Maxima are over a grid
    on the square of the centers: of all rows (assumption 1), and of the mean over rows, which
    suffices for the theorem's proof. The table also has the maximum of that mean over a grid six
    posterior sds wide.
    """
    square = np.stack(np.meshgrid(*[np.linspace(-6, 6, 25)] * 2), -1).reshape(-1, 2)
    mean, sd = exact(silos)
    rows = np.stack([np.asarray(silos[name]["x"], np.float64) for name in silos])
    # a row's gradient at theta is x - theta, its surrogate's share (mean of the silo) - theta
    wide, near = (
        ((rows[:, :, None] - thetas) ** 2).sum(-1) for thetas in (square, mean + sd * square / 2)
    )
    columns = {
        "γ², rows": wide.max((1, 2)),
        "γ², mean": wide.mean(1).max(1),
        "γ², near": near.mean(1).max(1),
        "ε²": rows.var(1).sum(-1),
    }
    num_steps, f = 100_000, 1 / NUM_SILOS
    rest = 1 / (STEP_SIZE * num_steps) + STEP_SIZE**2
    of_dsgld, of_fsgld = (
        float(NUM_ROWS**2 / f * columns[name].sum() / (BATCH_SIZE * num_steps) + rest)
        for name in ("γ², rows", "ε²")
    )
    return pd.DataFrame(columns, index=list(silos.names)), (of_dsgld, of_fsgld)


def table(silos: fed.Silos, draws: Draws) -> pd.DataFrame:
    """Return squared errors of the mean of 10, 100, ... draws and the sd of draws.

    Their closed forms are beside them.
    """
    rows = {}
    for (method, stay), chains in draws.items():
        error, count = mse(chains, exact(silos)[0]), chains.shape[1]
        ends = [n for n in (10, 100, 1000) if n <= count]
        rows[method, stay] = {f"{n:,} draws": error[n - 1] for n in ends} | {
            "sd": np.sqrt(chains.var((0, 1)).mean())
        }
        if method != "FSGLD, defaults":
            expected = expected_mse(silos, method, stay, np.array([ends[-1]]))[0]
            rows[method, stay] |= {
                "expected": expected,
                "expected sd": sum(variances(silos, method, stay)) ** 0.5,
            }
    return pd.DataFrame(rows).T


def plot(silos: fed.Silos, draws: Draws, place: Path) -> None:
    figure = plt.figure(figsize=(13, 10), layout="constrained")
    grid = figure.add_gridspec(3, 8)
    shown = [run for run in draws if run[0] != "FSGLD, defaults"]
    columns = len(shown) // 2
    mean, sd = exact(silos)
    analytic = mean + sd * np.random.default_rng(0).normal(size=(500, 2))
    panels = {f"{method} ({stay})": draws[method, stay][0] for method, stay in shown} | {
        "Posterior": analytic
    }
    for k, (title, points) in enumerate(panels.items()):
        row, column = divmod(k, columns)
        axes = figure.add_subplot(
            grid[row, 2 * column : 2 * column + 2], aspect="equal", title=title
        )
        for name in silos:
            x = np.asarray(silos[name]["x"])
            axes.scatter(x[:, 0], x[:, 1], s=2, alpha=0.3)
        axes.scatter(points[:, 0], points[:, 1], s=3, color="black")
    curves = figure.add_subplot(
        grid[2, 2:5], xlabel="draws", title="Squared error of the mean (dotted: expected)"
    )
    for (method, stay), chains in draws.items():
        error, place_in = mse(chains, mean), sorted({run[1] for run in draws}).index(stay)
        numbers, color = np.arange(1, len(error) + 1), f"C{place_in}"
        if method == "DSGLD":
            curves.loglog(numbers, error, color=color, label=f"{method} ({stay})")
            curves.loglog(numbers, expected_mse(silos, method, stay, numbers), ":", color=color)
        elif stay == 100:
            curves.loglog(
                numbers,
                error,
                color="black" if method == "FSGLD" else "C7",
                label=f"{method} ({stay})",
            )
    curves.legend(fontsize="x-small", loc="lower left")
    found = bounds(silos)[0].drop(columns="γ², rows")
    bars = figure.add_subplot(
        grid[2, 5:], xlabel="silo", title="Constants of the bounds", yscale="log"
    )
    for shift, (label, values) in zip((-0.27, 0, 0.27), found.items(), strict=True):
        bars.bar(np.arange(NUM_SILOS) + shift, values, 0.27, label=label)
    bars.set(ylim=(1, 2e3))
    bars.legend(fontsize="small", ncols=3)
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> Draws:
    """Print tables and a comparison, draw the figure, and return the draws by method and T."""
    parser = argparse.ArgumentParser(description="A Gaussian mean: DSGLD and FSGLD by visit.")
    parser.add_argument("--quick", action="store_true", help="few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures/gaussian_mean.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    points = silos()
    num_draws, burn_in = (100, 2_000) if args.quick else (1_000, BURN_IN)
    methods, stays = (METHODS[:2], (1, 100)) if args.quick else (METHODS, VISITS)
    runs = [(method, stay) for method in methods for stay in stays]
    draws = {run: fit(points, *run, num_draws, burn_in) for run in runs}
    print(
        f"posterior sd {exact(points)[1]:.4f}; {NUM_CHAINS} chains; squared error of the mean, and "
        "sd of draws:"
    )
    print(table(points, draws).map("{:.3g}".format).to_string())
    constants, (of_dsgld, of_fsgld) = bounds(points)
    print("constants of the bounds by silo:")
    print(constants.round(2).to_string())
    print(
        f"bounds after 100,000 steps, up to a constant: DSGLD {of_dsgld:.3g}, FSGLD {of_fsgld:.3g}"
    )
    plot(points, draws, args.figure)

    # The library's step size in place of the paper's, beside NUTS.
    settings = {"num_samples": 1000, "num_chains": 4, "chain_method": "vectorized"}
    mcmc = MCMC(fed.FSGLD(model), num_warmup=200, **settings)
    mcmc.run(jax.random.key(1), points)
    nuts = MCMC(NUTS(model), num_warmup=500, **settings)
    nuts.run(jax.random.key(2), **points.pooled)
    fed_idata = fed.to_inference_data(mcmc, points, log_likelihood=False)
    print(fed.compare(fed_idata, az.from_numpyro(nuts, log_likelihood=False)))
    print(f"figure written to {args.figure}")
    return draws


if __name__ == "__main__":
    main()
