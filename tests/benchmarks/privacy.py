"""What privacy and sums cost a posterior.

The error of q's mean in posterior sds, said beforehand and measured, and what rounding to the sums'
grid does.

Logistic regression with three coefficients, silos of 40 simulated rows. "Alone": the server sees
each silo's noised reply; "sum": silos share the noise of a sum. Errors are of q's mean from the fit
without privacy, root mean square over coefficients and seeds.

"Guesses": an adversary who knows all rows but one and has two guesses for it reads one reply, by
its low bits.

    python tests/benchmarks/privacy.py [--quick] [--silos 100,1000] [--epsilon 1,4,8] [--rounds
    3000] [--seeds 4] [--record]
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from record import record

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


def noise(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
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
                row = {"silos": num, "epsilon": epsilon, "seen": "sum" if secure_sum else "each"}
                row |= {"clip": clip, "said": said, "measured": float(rms)}
                row |= {"least": float(np.min(ratios)), "most": float(np.max(ratios))}
                rows.append(row)
                print(row, flush=True)
    return rows


def sums(num: int, rounds: int) -> dict[str, float]:
    """Compare fits by sums over bytes with the same rounds at hand."""
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
    return {
        "off": float(off.max()),
        "ratio": float(ratio.max()),
        "bytes": up,
        "milliseconds": 1e3 * seconds,
    }


def guesses(num: int) -> dict[str, float]:
    """Return how often the low bits of a reply of 20 numbers tell which of two guesses is right."""
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
    return {
        "replies": num,
        "chance": 0.5 / np.sqrt(num),
        "exact": float(np.mean(exact)),
        "floating": float(np.mean(floating)),
    }


def cost(size: int = 1000) -> dict[str, float]:
    """Return the processor time of exact noise."""
    noise, seconds = fed.Privacy(4.0, 1e-5, 0.5, 1000).noise(1), []
    gradient = np.random.default_rng(0).normal(size=size)
    for i in range(200):
        start = time.process_time()
        noised_exactly(noise, Words(i.to_bytes(32, "little")), gradient)
        seconds.append(time.process_time() - start)
    return {"noise_ms": 1e3 * float(np.median(seconds))}


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
    parser.add_argument("--record", action="store_true", help="write files of docs/results")
    args = parser.parse_args()
    start = time.time()
    once = {**cost(), **guesses(400), **sums(10, 100)}
    print(once)
    if args.record:
        record("privacy_once", [once], start)
    if not args.quick:
        rows = noise(args)
        if args.record:
            record("privacy", rows, start)


if __name__ == "__main__":
    main()
