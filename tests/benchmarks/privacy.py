"""What privacy and sums cost a posterior.

The error of q's mean in posterior sds, said beforehand and measured, and what rounding to the sums'
grid does.

Logistic regression with three coefficients, silos of 40 simulated rows. "Alone": the server sees
each silo's noised reply; "sum": silos share the noise of a sum. Errors are of q's mean from the fit
without privacy, root mean square over coefficients and seeds.

"Guesses": an adversary who knows all rows but one and has two guesses for it reads one reply, by
its low bits.

    python tests/benchmarks/privacy.py [--quick] [--silos 100,1000] [--epsilon 1,4,8] [--rounds
    3000] [--seeds 4]
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "privacy"))

from test_privacy import float32_normals, reachable

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect
from numpyro_fed.privacy.differential import noised, noised_exactly
from numpyro_fed.privacy.discrete_gaussian import Words

ROWS, WIDTH, DELTA = 40, 3, 1e-5


def model(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([WIDTH]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def made_up(num: int) -> fed.Silos:
    """Silos alike, but for their covariates' means."""
    rng = np.random.default_rng(0)
    data = {}
    for i in range(num):
        x = rng.normal(rng.normal(size=WIDTH) / 3, 1.0, (ROWS, WIDTH)).astype(np.float32)
        data[f"s{i:04}"] = {"x": x, "y": rng.random(ROWS) < 1 / (1 + np.exp(-x @ [1.0, -0.5, 0.2]))}
    return fed.Silos(data)


def fit_of(
    num_silos: int, rounds: int, privacy: fed.Privacy | None = None, *, secure_sum: bool = False
) -> fed.SFVI:
    """Start as far off as the prior's center is, about as wide as the posterior."""
    guide = fed.AutoSiloNormal(
        model,
        init_scale=2 / np.sqrt(num_silos * ROWS / 5),
        init_loc_fn=numpyro.infer.init_to_value(values={"beta": np.zeros(WIDTH)}),
    )
    step = optax.sgd(optax.cosine_decay_schedule(0.05 / (num_silos * ROWS / 5), rounds))
    return fed.SFVI(model, guide, step, privacy=privacy, secure_sum=secure_sum)


class InProcess:
    """A transport within this process, whose silos have met."""

    def __init__(self, silos: fed.Silos, fit: fed.SFVI, folder: Path) -> None:
        self.names = silos.names
        rows = {n: {k: np.asarray(v) for k, v in silos[n].items()} for n in self.names}
        self.sides = {
            n: SiloSide(fed.Silos({n: rows[n]}), model, folder / n, fit=fit) for n in self.names
        }
        for name in self.names:
            (folder / name / "peers").mkdir()
            for other in self.names:
                shutil.copy(folder / other / f"{other}.pub", folder / name / "peers")

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        return {name: self.sides[name].answer(data) for name, data in messages.items()}


def sds(scale_tril: Array) -> np.ndarray:
    return np.linalg.norm(np.asarray(scale_tril), axis=1)


def noise(args: argparse.Namespace) -> None:
    print(
        f"{'silos':>6} {'epsilon':>8} {'seen':>6} {'clip':>6} {'said':>7} {'measured':>9} "
        f"{'sd ratio':>14}"
    )
    for num in args.silos:
        silos = made_up(num)
        plain = fit_of(num, args.rounds).run(random.key(0), args.rounds, silos, progress_bar=False)
        mean, sd = np.asarray(plain.params["auto_loc"]), sds(plain.params["auto_scale_tril"])
        clip = float(np.sqrt(2 * WIDTH / num))
        for epsilon in args.epsilon:
            for secure_sum in (False, True):
                privacy = fed.Privacy(epsilon, DELTA, clip, args.rounds)
                svi = fit_of(num, args.rounds, privacy, secure_sum=secure_sum)
                errors, ratios = [], []
                for seed in range(args.seeds):
                    result = svi.run(random.key(seed), args.rounds, silos, progress_bar=False)
                    errors.append((np.asarray(result.params["auto_loc"]) - mean) / sd)
                    ratios.append(sds(result.params["auto_scale_tril"]) / sd)
                assert result.privacy is not None
                rms, said = np.sqrt(np.mean(np.square(errors))), result.privacy.error
                print(
                    f"{num:>6} {epsilon:>8g} {'sum' if secure_sum else 'alone':>6} {clip:>6.3f} "
                    f"{said:>7.2f} {rms:>9.2f} {np.min(ratios):>7.2f}-{np.max(ratios):.2f}",
                    flush=True,
                )


def sums(num: int, rounds: int) -> None:
    silos = made_up(num)
    fit = fit_of(num, rounds, secure_sum=True)
    expected = fit.run(random.key(0), rounds, silos, progress_bar=False)
    with tempfile.TemporaryDirectory() as place:
        remote = connect(InProcess(silos, fit, Path(place)), model, fit=fit)
        start = time.perf_counter()
        got = fit.run(random.key(0), rounds, remote, progress_bar=False)
        seconds = (time.perf_counter() - start) / rounds
    sd = sds(expected.params["auto_scale_tril"])
    off = np.abs(np.asarray(got.params["auto_loc"]) - np.asarray(expected.params["auto_loc"])) / sd
    ratio = np.abs(sds(got.params["auto_scale_tril"]) / sd - 1)
    up = got.ledger.bytes_up[0] / rounds
    print(
        f"sums over bytes, {num} silos, {rounds} rounds: means within {off.max():.1e} sds of the "
        f"same rounds at hand, sds within a factor {1 + ratio.max():.6f}; "
        f"{up:.0f} bytes up a round, {1e3 * seconds:.0f} ms a round"
    )


def guesses(num: int) -> None:
    """How often the low bits of a reply of 20 numbers tell which of two guesses is right."""
    rng, clip = np.random.default_rng(0), 0.5
    noise = fed.Privacy(epsilon=0.08, delta=1e-6, clip=clip, num_rounds=1).noise(1)
    two = [rng.normal(size=20).astype(np.float32) for _ in range(2)]
    two = [np.float32(0.9 * clip / np.linalg.norm(g)) * g for g in two]
    normals, truths = np.float32(noise.sd) * float32_normals(), rng.integers(0, 2, num)

    def right(reply: np.ndarray, truth: int) -> bool:
        count = [reachable(reply, g, normals) for g in two]
        return bool(rng.random() < 0.5) if count[0] == count[1] else int(np.argmax(count)) == truth

    exact = [
        right(
            noised_exactly(noise, Words(int(i).to_bytes(32, "little")), two[t]).astype(np.float32),
            t,
        )
        for i, t in enumerate(truths)
    ]
    floating = [
        right(np.asarray(noised(noise, random.key(i), two[t])), t) for i, t in enumerate(truths)
    ]
    error = 0.5 / np.sqrt(num)
    print(
        f"guesses right by the low bits of {num} replies, epsilon .08 a round (chance: .500 +- "
        f"{error:.3f}):"
    )
    print(
        f"  discrete Gaussian {np.mean(exact):.3f}, float32 noise (silos at hand) "
        f"{np.mean(floating):.3f}"
    )


def cost(size: int = 1000) -> None:
    noise, seconds = fed.Privacy(4.0, 1e-5, 0.5, 1000).noise(1), []
    gradient = np.random.default_rng(0).normal(size=size)
    for i in range(200):
        start = time.process_time()
        noised_exactly(noise, Words(i.to_bytes(32, "little")), gradient)
        seconds.append(time.process_time() - start)
    print(
        f"exact noise of {size:,} numbers: median {1e3 * np.median(seconds):.2f} ms of processor "
        "time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave the table of errors out")
    parser.add_argument(
        "--silos", type=lambda x: [int(i) for i in x.split(",")], default=[100, 1000]
    )
    parser.add_argument(
        "--epsilon", type=lambda x: [float(i) for i in x.split(",")], default=[1.0, 4.0, 8.0]
    )
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    cost()
    guesses(400)
    sums(10, 100)
    if not args.quick:
        noise(args)


if __name__ == "__main__":
    main()
