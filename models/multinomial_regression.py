r"""Multinomial regression on MNIST with learned prior scales.

The methods are silos alone, SFVI-Avg with one round or fifty, and SFVI.

.. math:: w_{jk} \sim N(0, \sigma_w^2), \quad b_k \sim N(0, \sigma_b^2),
          \quad y_n \sim \text{Categorical}(\text{softmax}(W' x_n + b))

for images x (784 pixels in [0, 1]) of the digits 0 to 9. The two scales are learned (empirical
Bayes), and q of the 7,850 weights is a diagonal Gaussian. The available text of the paper lacks its
formulas: these are derived from its words. It also lacks its number of silos in the first half of
table S1 ("25 200"): both are run. It gives no optimizer, number of steps or batch size. Here every
method makes ``STEPS`` steps of Adam on all rows of a silo, with one draw of the weights each.

Reference: Hassan, Salomone & Mengersen (2023), Federated Variational Inference Methods for
Structured Latent Variable Models, section S3.2, table S1, figure S2.
"""

import argparse
import gzip
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
from _data import path
from numpyro.distributions import constraints

import numpyro_fed as fed

NUM_SILOS = (5, 25, 200)
STEPS, ROUNDS = 300, 50
WARM_ROUNDS, WARM_STEPS = 5, 50
NUM_DRAWS = 32
MOST_ALONE = 10  # largest number of silos that are fitted alone
OPTIM = optax.adam(0.02)
LOOKS = (2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 250)  # rounds after which SFVI is tested
METHODS = ("independent", "SFVI-Avg once", "SFVI-Avg", "SFVI")
PAPER = {  # train and test accuracy in %, of METHODS
    "many": ((73.0, 51.5), (65.7, 63.9), (71.3, 69.3), (83.8, 84.0)),
    "five": ((88.7, 86.8), (90.4, 90.4), (90.1, 90.2), (90.7, 90.8)),
}
Rows = dict[str, Any]


def images(part: str, count: int) -> Rows:
    """Return pixels ``(count, 784)`` in [0, 1] and digits of ``train`` or ``t10k``."""
    out = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        place = path(
            "mnist",
            f"{part}-{kind}-ubyte.gz",
            "any mirror of MNIST (LeCun, Cortes & Burges), compressed by gzip",
            f"{count:,} images of 28 x 28 pixels, and their digits",
        )
        try:
            with gzip.open(place) as file:
                out.append(np.frombuffer(file.read(), np.uint8, offset=header))
        except (EOFError, OSError, ValueError) as error:
            raise ValueError(
                f"{place}: expected a whole file compressed by gzip, got {error!r}; get it anew"
            ) from error
    x, y = out
    if len(x) != 784 * len(y):
        raise ValueError(
            f"{place.parent}: expected 784 pixels of each of {len(y):,} digits of {part!r}, got "
            f"{len(x):,}; get both files anew"
        )
    return {"x": x.reshape(-1, 784).astype(np.float32) / 255, "y": y.astype(np.int32)}


def data(num_rows: int | None = None, seed: int = 0) -> tuple[Rows, Rows]:
    """Return training and test rows; the training rows are the first ``num_rows`` of a shuffle."""
    train, test = images("train", 60_000), images("t10k", 10_000)
    order = np.random.default_rng(seed).permutation(len(train["y"]))[:num_rows]
    return {k: v[order] for k, v in train.items()}, test


def silos(train: Rows, num_silos: int) -> fed.Silos:
    """Return the rows, dealt at random in equal parts."""
    return fed.split(train, by=fed.partitioners.iid(1, len(train["y"]), num_silos))


def model(x, y=None):  # type: ignore[no-untyped-def]
    sigma_w = numpyro.param("sigma_w", 1.0, constraint=constraints.positive)
    sigma_b = numpyro.param("sigma_b", 1.0, constraint=constraints.positive)
    w = numpyro.sample("w", dist.Normal(0, sigma_w).expand([x.shape[-1], 10]).to_event(2))
    b = numpyro.sample("b", dist.Normal(0, sigma_b).expand([10]).to_event(1))
    with fed.silo_plate("images", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=x @ w + b), obs=y)


def guide() -> fed.AutoSiloNormal:
    return fed.AutoSiloNormal(model, global_cov="diag", init_scale=0.1)


@cache
def predictor() -> Callable[[dict[str, jax.Array], np.ndarray], jax.Array]:
    """Return a map from parameters of q and images to the digits of highest predictive probability.

    That probability is a softmax averaged over draws.
    """
    q = guide()
    with numpyro.handlers.seed(rng_seed=0):
        q(jnp.zeros((1, 784)), jnp.zeros(1, int))  # a guide draws only after it has seen the model

    @jax.jit
    def predict(params: dict[str, jax.Array], x: np.ndarray) -> jax.Array:
        draws = q.sample_posterior(jax.random.key(2), params, sample_shape=(NUM_DRAWS,))
        each = jax.lax.map(lambda wb: jax.nn.softmax(x @ wb[0] + wb[1]), (draws["w"], draws["b"]))
        return each.mean(0).argmax(-1)

    return predict


def accuracy(params: dict[str, jax.Array], rows: Rows) -> float:
    """Return the percentage of digits predicted right."""
    return 100 * float(np.mean(np.asarray(predictor()(params, rows["x"])) == np.asarray(rows["y"])))


def independent(rows: fed.Silos, steps: int, test: Rows) -> tuple[float, float]:
    """Fit silos that never communicate.

    Return mean accuracies of the first ten silos, on their own rows and on the test rows.
    """
    svi = fed.SFVI(model, guide(), OPTIM, validate=False)
    found = []
    for i, name in enumerate(rows.names[:MOST_ALONE]):
        alone = fed.Silos({name: rows[name]})
        params = svi.run(jax.random.key(i), steps, alone, progress_bar=False).params
        found.append((accuracy(params, alone.pooled), accuracy(params, test)))
    own, new = np.mean(found, axis=0)
    return float(own), float(new)


def average(rows: fed.Silos, rounds: int, local_steps: int) -> Any:
    svi = fed.SFVIAvg(model, guide(), OPTIM, local_steps)
    return svi.run(jax.random.key(0), rounds, rows, progress_bar=False)


class Course(NamedTuple):
    """SFVI over rounds: its result, minus its bound in each round, and test accuracy at times."""

    result: Any
    losses: np.ndarray
    accuracy: dict[int, float]


def sfvi(rows: fed.Silos, rounds: int, test: Rows, init_from: Any = None) -> Course:
    """Run SFVI, and test it on its way."""
    svi = fed.SFVI(model, guide(), OPTIM)
    state = svi.init(jax.random.key(0), rows, init_from=init_from)
    losses, seen = np.zeros(0), {0: accuracy(svi.get_params(state), test)}
    for look in [*[n for n in LOOKS if n < rounds], rounds]:
        result = svi.run(
            jax.random.key(0), look - len(losses), rows, progress_bar=False, init_state=state
        )
        state, losses = result.state, np.concatenate([losses, result.losses])
        seen[look] = accuracy(svi.get_params(state), test)
    return Course(result, losses, seen)


def smooth(losses: np.ndarray, width: int = 21) -> np.ndarray:
    """Return a running median (single draws of the weights are noisy), shorter at the ends."""
    half = width // 2
    return np.array(
        [np.median(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]
    )


def savings(
    cold: np.ndarray, warm: np.ndarray, targets: Sequence[int], before: int
) -> dict[int, tuple[int, float]]:
    """Return the rounds that a warm start needs, and how many times fewer they are.

    They end at the bound that a cold start has after each of ``targets``, and include ``before``.
    """
    cold, warm = smooth(cold), smooth(warm)
    out = {}
    for target in targets:
        reached = warm <= cold[target - 1]
        if reached.any():
            needed = before + int(np.argmax(reached)) + 1
            out[target] = needed, target / needed
    return out


def figure_s2(paths: dict[int, tuple[Course, Course]], place: Path) -> None:
    """Draw minus the bound and test accuracy over rounds, from a cold and from a warm start."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for i, (num_silos, (cold, warm)) in enumerate(paths.items()):
        for label, run, before, style in (
            ("cold", cold, 0, "--"),
            ("warm", warm, WARM_ROUNDS, "-"),
        ):
            label, color = f"{num_silos} silos, {label}", f"C{i}"
            axes[0].plot(
                before + 1 + np.arange(len(run.losses)),
                smooth(run.losses),
                style,
                color=color,
                label=label,
            )
            axes[1].plot(
                [before + n for n in run.accuracy],
                run.accuracy.values(),
                style,
                color=color,
                label=label,
            )
    axes[0].set(xlabel="rounds", ylabel="minus the bound (nats)", yscale="log")
    axes[1].set(xlabel="rounds", ylabel="test accuracy (%)", ylim=(60, None))
    axes[0].legend()
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def compare(
    count: int, train: Rows, test: Rows, steps: int, rounds: int
) -> tuple[pd.DataFrame, tuple[Course, Course]]:
    """Run the four methods on ``count`` silos, beside the paper, and SFVI from both starts."""
    rows = silos(train, count)
    found = [independent(rows, steps, test)]
    print(f"{count} silos of {len(train['y']) // count} rows", flush=True)
    for made in (1, rounds):
        params = average(rows, made, steps // made).params
        found.append((accuracy(params, train), accuracy(params, test)))
    warm = sfvi(rows, steps, test, init_from=average(rows, WARM_ROUNDS, WARM_STEPS))
    cold = sfvi(rows, steps, test)
    params = cold.result.params
    found.append((accuracy(params, train), accuracy(params, test)))
    print(
        f"  SFVI: sigma_w {params['sigma_w']:.2f}, sigma_b {params['sigma_b']:.2f}; test accuracy "
        "after rounds:"
    )
    print(f"  { ({n: round(a, 1) for n, a in cold.accuracy.items()}) }")
    targets = [n for n in LOOKS if 50 <= n < steps] + [steps]
    for target, (needed, factor) in savings(cold.losses, warm.losses, targets, WARM_ROUNDS).items():
        print(f"  bound of {target} rounds: {needed} from a warm start, {factor:.1f} times fewer")
    frame = pd.DataFrame(found, columns=["train", "test"])
    frame.insert(0, "rounds", [0, 1, rounds, steps])
    frame[["paper's train", "paper's test"]] = np.array(PAPER["five" if count == 5 else "many"])
    frame.index = pd.MultiIndex.from_product([[count], METHODS], names=["silos", "method"])
    print(frame.round(1).to_string(), flush=True)
    return frame, (cold, warm)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(
        description="Multinomial regression on MNIST: table S1 and figure S2."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2,000 rows to learn from and to test on, 20 silos, few steps",
    )
    parser.add_argument("--rows", type=int, help="of the training data (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each method")
    parser.add_argument("--figure", type=Path, default=Path("figures/multinomial_regression.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    num_silos, rounds, steps = ((20,), 10, 100) if args.quick else (NUM_SILOS, ROUNDS, args.steps)
    train, test = data(2_000 if args.quick else args.rows)
    if args.quick:
        test = {k: v[:2_000] for k, v in test.items()}
    found = {count: compare(count, train, test, steps, rounds) for count in num_silos}
    figure_s2({count: courses for count, (_, courses) in found.items()}, args.figure)
    return pd.concat([frame for frame, _ in found.values()])


if __name__ == "__main__":
    main()
