"""The mean of Gaussian data whose silos differ: what long stays do to DSGLD, and not to FSGLD.

Ten silos of 200 points, each around a centre of its own; the posterior of the overall mean is
known exactly. The more local steps T a chain takes before it moves on, the more DSGLD draws from a
mixture of the silos' own posteriors. FSGLD with exact surrogates does not depend on T: all it has
too much of is the noise of minibatches, which is known in closed form (:func:`discretised_sd`).

The silos being of equal size, that mixture has the posterior's mean, so DSGLD's error of the mean
falls with the number of draws, from a level that grows with T; its spread stays wrong.

Draws are taken at the ends of stays that are 100 or more local steps apart (the paper takes every
100th step, within longer stays too).

Reference: El Mekkaoui et al. (2021), Federated Stochastic Gradient Langevin Dynamics, section 5.1,
figures 2, 3b and 4.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import arviz as az
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed

NUM_SILOS, NUM_ROWS = 10, 200
STEP_SIZE, BATCH_SIZE = 1e-4, 10
STAYS = (1, 10, 100, 1000)


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points, shape (2000, 2), and the silo of each."""
    rng = np.random.default_rng(seed)
    silo = np.repeat(np.arange(NUM_SILOS), NUM_ROWS)
    centres = rng.uniform(-6, 6, (NUM_SILOS, 2))
    return (centres[silo] + rng.normal(size=(len(silo), 2))).astype(np.float32), silo


def silos(seed: int = 0) -> fed.Silos:
    x, silo = data(seed)
    return fed.split({"x": x}, by=silo)


def model(x):  # type: ignore[no-untyped-def]
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("points", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1).to_event(1), obs=x)


def exact(silos: fed.Silos) -> tuple[np.ndarray, float]:
    """Mean and sd of the posterior: N(sum x / (N + 1), 1 / (N + 1))."""
    x = np.asarray(silos.pooled["x"], np.float64)
    return x.sum(0) / (len(x) + 1), (len(x) + 1) ** -0.5


def discretised_sd(silos: fed.Silos) -> float:
    """The sd of FSGLD's draws at this step size, an average over silos and coordinates.

    With exact surrogates a step is theta += -h/2 lam (theta - mean) + N(0, h + h^2 V / 4), where
    lam = N + 1 and V = (N_s S)^2 / m times the variance within a silo is the minibatch's noise.
    """
    n, h = NUM_SILOS * NUM_ROWS, STEP_SIZE
    within = np.mean([np.var(np.asarray(silos[name]["x"]), axis=0) for name in silos])
    noise = h + h**2 / 4 * n**2 / BATCH_SIZE * within
    return float(np.sqrt(noise / (1 - (1 - h * (n + 1) / 2) ** 2)))


def fit(silos: fed.Silos, method: str, stay: int, num_samples: int, num_burn_in: int) -> np.ndarray:
    """Draws of the paper's DSGLD or FSGLD with ``stay`` local steps a round, (chains, draws, 2)."""
    if method == "DSGLD":
        kernel = fed.DSGLD(model, step_size=STEP_SIZE, num_local_steps=stay, batch_size=BATCH_SIZE)
    else:
        kernel = fed.FSGLD(
            model,
            step_size=STEP_SIZE,
            num_local_steps=stay,
            batch_size=BATCH_SIZE,
            surrogate=exact_surrogates(silos),
            preconditioner=None,
        )
    thinning = max(1, 100 // stay)
    mcmc = MCMC(
        kernel,
        num_warmup=num_burn_in // stay,
        num_samples=num_samples * thinning,
        thinning=thinning,
        num_chains=8,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(0), silos)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])


def mse(draws: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """|mean of the first n draws - posterior mean|^2 for n = 1, 2, ..., averaged over chains."""
    running = draws.cumsum(axis=1) / np.arange(1, draws.shape[1] + 1)[:, None]
    return ((running - mean) ** 2).sum(-1).mean(0)


def exact_surrogates(silos: fed.Silos) -> fed.surrogates.Surrogates:
    """N(mean of the silo, 1 / N_s): the silos' likelihoods."""
    means = np.stack([np.asarray(silos[name]["x"], np.float64).mean(0) for name in silos])
    return fed.surrogates.analytic(silos, means, np.full_like(means, NUM_ROWS))


def bounds(silos: fed.Silos) -> dict[str, np.ndarray]:
    """gamma_s^2 of theorem 1 (its mean over rows) and epsilon_s^2 of theorem 2, maxima over a grid of theta."""
    theta = np.stack(np.meshgrid(*[np.linspace(-6, 6, 61)] * 2), -1).reshape(-1, 2)
    found = fed.surrogates.noise(model, silos, exact_surrogates(silos), theta)
    return {"γ² (DSGLD)": found.gamma_squared_mean, "ε² (FSGLD)": found.epsilon_squared}


def plot(silos: fed.Silos, draws: dict[tuple[str, int], np.ndarray], place: Path) -> None:
    figure = plt.figure(figsize=(12, 9.5), layout="constrained")
    grid = figure.add_gridspec(3, 4)
    curves = figure.add_subplot(grid[2, :2], xlabel="draws", title="Squared error of the mean")
    for k, ((method, stay), chains) in enumerate(draws.items()):
        axes = figure.add_subplot(grid[divmod(k, len(draws) // 2)], aspect="equal", title=f"{method} ({stay})")
        for name in silos:
            x = np.asarray(silos[name]["x"])
            axes.scatter(x[:, 0], x[:, 1], s=2, alpha=0.3)
        axes.scatter(chains[0, :, 0], chains[0, :, 1], s=3, color="black")
        line = "-" if method == "FSGLD" else "--"
        error = mse(chains, exact(silos)[0])
        curves.loglog(np.arange(1, len(error) + 1), error, line, label=f"{method} ({stay})")
    curves.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    bars = figure.add_subplot(grid[2, 2:], xlabel="silo", title="Constants of the bounds")
    for shift, (label, values) in zip((-0.2, 0.2), bounds(silos).items(), strict=True):
        bars.bar(np.arange(NUM_SILOS) + shift, values, 0.4, label=label)
    bars.legend()
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, int], np.ndarray]:
    """Print a table and a comparison, draw the figure; return the draws by method and T."""
    parser = argparse.ArgumentParser(description="A Gaussian mean: DSGLD and FSGLD by stay.")
    parser.add_argument("--quick", action="store_true", help="few draws")
    parser.add_argument("--figure", type=Path, default=Path("figures/gaussian_mean.png"))
    args = parser.parse_args(arguments)

    points = silos()
    mean, sd = exact(points)
    num_samples, num_burn_in = (100, 2_000) if args.quick else (500, 20_000)
    stays = (1, 100) if args.quick else STAYS
    runs = [(method, stay) for method in ("DSGLD", "FSGLD") for stay in stays]
    draws = {run: fit(points, *run, num_samples, num_burn_in) for run in runs}
    print(f"posterior sd {sd:.4f}; at this step size FSGLD's is {discretised_sd(points):.4f}")
    print("method     T   squared error of the mean   sd of the draws")
    for (method, stay), chains in draws.items():
        error, spread = mse(chains, mean)[-1], chains.std((0, 1)).mean()
        print(f"{method} {stay:>5}   {error:<25.2e}   {spread:.4f}")
    plot(points, draws, args.figure)

    # The library's own step size in place of the paper's, against NUTS.
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
