r"""Seconds of an epoch of ProdLDA with an inference network.

SFVI over three silos beside NumPyro's SVI on the pooled documents.

    NUMPYRO_FED_DATA=... python tests/benchmarks/prod_lda_speed.py [--turns 9] [--record]

The same model, network, optimizer and number of documents in a step (200 of each silo, 600 of the
pool). NumPyro's epoch is written in the manner of its ProdLDA example: a shuffle, and a compiled
loop of ``SVI.update`` over the batches. Both are compiled whole, called once to warm up, and timed
in turn in one process; ratios are taken within each turn. ``--documents`` takes some of them.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.contrib.module import eqx_module
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import prod_lda
from record import record

import numpyro_fed as fed
from numpyro_fed.vi import sfvi
from numpyro_fed.vi.inline import advance

GOAL = 1.2
TOPICS = prod_lda.NUM_TOPICS
Epoch = Callable[[Any, Array], Any]


def pooled(counts: Array, batch: int) -> tuple[Any, Epoch]:
    """Return a first state, and an epoch of NumPyro's SVI."""
    num, num_words = counts.shape
    scale = num / batch
    network = prod_lda.Encoder(num_words, TOPICS, random.key(1))

    def model(batch: Array) -> None:
        prior = dist.Normal(0, prod_lda.TOPIC_SD).expand([TOPICS, num_words])
        topics = numpyro.sample("topics", prior.to_event(2))
        with numpyro.plate("documents", batch.shape[0]), numpyro.handlers.scale(scale=scale):
            z = numpyro.sample(
                "z", dist.Normal(0, (1 - 1 / TOPICS) ** 0.5).expand([TOPICS]).to_event(1)
            )
            numpyro.sample("counts", prod_lda.Words(jax.nn.softmax(z) @ topics), obs=batch)

    def guide(batch: Array) -> None:
        first = prod_lda.START_SD[True] * random.normal(random.key(0), (TOPICS, num_words))
        loc = numpyro.param("loc", first)
        sd = numpyro.param(
            "scale",
            jnp.full(first.shape, prod_lda.INIT_SCALE),
            constraint=constraints.softplus_positive,
        )
        numpyro.sample("topics", dist.Normal(loc, sd).to_event(2))
        z_loc, log_scale = jax.vmap(eqx_module("encoder", network))(batch)
        with numpyro.plate("documents", batch.shape[0]), numpyro.handlers.scale(scale=scale):
            numpyro.sample("z", dist.Normal(z_loc, jnp.exp(log_scale)).to_event(1))

    svi = SVI(model, guide, prod_lda.OPTIM, Trace_ELBO())
    steps = num // batch

    @jax.jit
    def epoch(state: Any, key: Array, counts: Array) -> Any:
        places = random.permutation(key, num)[: steps * batch].reshape(steps, batch)
        return lax.scan(lambda state, place: svi.update(state, counts[place]), state, places)

    def run(state: Any, key: Array) -> Any:
        return epoch(state, key, counts)

    return svi.init(random.key(0), counts[:batch]), run


def ours(silos: fed.Silos, batch: int) -> tuple[Any, Epoch]:
    """Return a first state, and an epoch of SFVI's rounds as ``run`` makes them."""
    own = partial(prod_lda.model, num_topics=TOPICS)
    num, num_words = silos.pooled["counts"].shape
    guide = prod_lda.guide(own, TOPICS, num_words, amortized=True)
    svi = fed.SFVI(own, guide, prod_lda.OPTIM, 1, 1, batch_size=batch, validate=False)
    setup = svi.setup(silos)
    rounds = num // (len(silos) * batch)

    @jax.jit
    def epoch(state: Any, stacks: Any) -> Any:
        return lax.scan(
            lambda s, _: advance(sfvi.federated, setup.config, None, s, stacks),
            state,
            length=rounds,
        )

    def run(state: Any, key: Array) -> Any:
        del key  # the state has its own
        return epoch(state, setup.stacks)

    return svi.init(random.key(0), silos), run


def in_turn(forms: dict[str, tuple[Any, Epoch]], turns: int) -> dict[str, np.ndarray]:
    """Seconds of an epoch of each form in each turn, going on from the last.

    After two that are not counted.
    """
    states = {name: state for name, (state, _) in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for key in random.split(random.key(2), turns + 2):
        for name, (_, run) in forms.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(run(states[name], key))[0]
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(each[2:]) for name, each in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description="ProdLDA's epoch: SFVI over silos against pooled SVI."
    )
    parser.add_argument("--documents", type=int, help="default: all")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    args = parser.parse_args(arguments)

    start = time.time()
    counts = prod_lda.corpus(args.documents).train
    silos = prod_lda.silos(counts)
    batch = prod_lda.BATCH
    forms = {"SFVI": ours(silos, batch), "SVI": pooled(jnp.asarray(counts), prod_lda.SILOS * batch)}
    times = in_turn(forms, args.turns)
    for name, each in times.items():
        print(f"{name:5} {np.median(each):7.3f} s an epoch of {len(counts):,} documents")
    low, ratio, high = np.quantile(times["SFVI"] / times["SVI"], [0.25, 0.5, 0.75])
    verdict = "reached" if ratio <= GOAL else "NOT reached"
    print(f"ratio {ratio:.3f}  [{low:.3f}, {high:.3f}]   goal {GOAL}: {verdict}")
    if args.record:
        medians = {name.lower(): float(np.median(each)) for name, each in times.items()}
        quartiles = {"low": float(low), "ratio": float(ratio), "high": float(high)}
        row = {"documents": len(counts), "turns": args.turns, "goal": GOAL, **medians, **quartiles}
        record("prod_lda_speed", [row], start)
    return float(ratio)


if __name__ == "__main__":
    main()
