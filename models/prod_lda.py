r"""Topics of 20 Newsgroups by ProdLDA in three silos: SFVI, SFVI-Avg, and each silo alone.

.. math:: \beta_{kv} \sim N(0, \sigma^2), \quad z_n \sim N(0, (1 - 1/K) I), \quad
          x_n \sim \text{Multinomial}\left( \text{softmax}(\beta' \, \text{softmax}(z_n)) \right)

for the counts x of V = 2,000 words in document n and K = 50 topics: a product of experts, where LDA
has a mixture. The prior of z is the Laplace approximation of a symmetric Dirichlet with parameter
one. The available text of the paper lacks its formulas: these are derived from its words and from
Srivastava & Sutton. Its q is a diagonal Gaussian in all latents, topics included, and so is the one
here; sigma is chosen here. There is no batch normalization, which would tie the documents of a
batch together. Words are not lemmatized.

UMass coherence is highest where all topics are alike and consist of the commonest words. So the
number of different top words is printed beside it, and NPMI, which divides by how common words are.
``--amortized`` adds SFVI with a network from a document's counts to its q(z), which all silos
learn. Losses of SFVI-Avg are the silos' own objectives.

Reference: Hassan, Salomone & Mengersen (2023), Federated Variational Inference Methods for
Structured Latent Variable Models, section 4.2, figure 2; Srivastava & Sutton (2017), Autoencoding
Variational Inference for Topic Models; Mimno et al. (2011), Optimizing Semantic Coherence in Topic
Models.
"""

import argparse
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
from _data import path
from _topics import Words, best_words, coherence, npmi, perplexity
from numpyro.infer import init_to_value
from scipy.sparse import csr_matrix

import numpyro_fed as fed

NUM_TOPICS, TOPIC_SD = 50, 2.0
SILOS, BATCH = 3, 200
EPOCHS, ROUNDS = 80, 20
HELD_OUT = 2_000
HIDDEN, LEAST_SD = 100, 0.05
# length of a network's input, and factor of its locations, so that it tells documents apart early
INPUT_LENGTH, GAIN = 10.0, 3.0
START_SD, INIT_SCALE = {False: 1.0, True: 2.0}, 0.5  # with a network topics start farther apart


def is_network(params: Any) -> Any:
    """Return True for the weights of a network, which learn at a rate of their own."""
    return jax.tree_util.tree_map_with_path(
        lambda at, _: "encoder" in jax.tree_util.keystr(at), params
    )


OPTIM = optax.multi_transform({False: optax.adam(0.02), True: optax.adam(0.002)}, is_network)
LOCAL_OPTIM = optax.adam(0.1)


class Corpus(NamedTuple):
    """Counts ``(N, V)`` of the documents to learn from and of those held out, and the words."""

    train: np.ndarray
    test: np.ndarray
    words: np.ndarray


def corpus(num_documents: int | None = None, num_words: int | None = None) -> Corpus:
    """Return documents that have a word.

    They are ``num_documents`` of a shuffle, with the ``num_words`` words that are in most of them.
    """
    place = path(
        "20newsgroups",
        "bow_clean_2000.npz",
        'the "bydate" version of 20 Newsgroups (scikit-learn\'s fetch_20newsgroups without '
        "headers, footers and quotes), counted by "
        "CountVectorizer(max_features=2000, binary document frequencies, stop words out)",
        "counts of 18,846 documents x 2,000 words as the parts of a CSR matrix (data, indices, "
        "indptr, shape), vocab, is_train",
    )
    with np.load(place) as file:
        parts = (file["data"], file["indices"].astype(np.int32), file["indptr"])
        counts, words, is_train = (
            csr_matrix(parts, file["shape"]),
            file["vocab"],
            file["is_train"].astype(bool),
        )
    if num_words is not None:
        most = np.sort(
            np.argsort(-np.asarray((counts[is_train] > 0).sum(0)).ravel(), kind="stable")[
                :num_words
            ]
        )
        counts, words = counts[:, most], words[most]
    filled = np.asarray(counts.sum(1)).ravel() > 0
    rng = np.random.default_rng(0)

    def some(part: np.ndarray) -> np.ndarray:
        return (
            counts[rng.permutation(np.flatnonzero(part & filled))[:num_documents]]
            .toarray()
            .astype(np.float32)
        )

    return Corpus(some(is_train), some(~is_train), words)


def silos(counts: np.ndarray) -> fed.Silos:
    """Return the documents, dealt at random in equal parts."""
    return fed.split({"counts": counts}, by=fed.partitioners.iid(1, len(counts), SILOS))


def model(counts, num_topics=NUM_TOPICS):  # type: ignore[no-untyped-def]
    prior = dist.Normal(0, TOPIC_SD).expand([num_topics, counts.shape[-1]])
    topics = numpyro.sample("topics", prior.to_event(2))
    with fed.silo_plate("documents", counts.shape[0]):
        z = numpyro.sample(
            "z", dist.Normal(0, (1 - 1 / num_topics) ** 0.5).expand([num_topics]).to_event(1)
        )
        numpyro.sample("counts", Words(jax.nn.softmax(z) @ topics), obs=counts)


@cache
def sized(num_topics: int) -> Any:
    """Return the model with ``num_topics`` topics.

    It is one object, so that silos of equal size share a compiled program.
    """
    return partial(model, num_topics=num_topics)


class Encoder(eqx.Module):
    """Network from a document's counts to location and log scale of its z.

    The scale is between ``LEAST_SD`` and one, lest it run away early.
    """

    layers: eqx.nn.MLP

    def __init__(self, num_words: int, num_topics: int, key: jax.Array) -> None:
        self.layers = eqx.nn.MLP(num_words, 2 * num_topics, HIDDEN, 1, jax.nn.softplus, key=key)

    def __call__(self, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = jnp.log1p(counts)
        # 1e-6, because a batch's padding has no words
        seen = INPUT_LENGTH * seen / jnp.sqrt(1e-6 + jnp.sum(seen**2))
        loc, scale = jnp.split(self.layers(seen), 2)
        return GAIN * loc, jnp.log(LEAST_SD + (1 - LEAST_SD) * jax.nn.sigmoid(scale))


def guide(
    model: Any, num_topics: int, num_words: int, amortized: bool = False
) -> fed.AutoSiloNormal:
    """Return q: independent in all latents, or amortized for documents by a network.

    Topics start at draws of ``START_SD``.
    """
    start = START_SD[amortized] * jax.random.normal(jax.random.key(0), (num_topics, num_words))
    settings: dict[str, Any] = {
        "init_scale": INIT_SCALE,
        "init_loc_fn": init_to_value(values={"topics": start}),
    }
    if amortized:
        settings["amortize"] = {"z": Encoder(num_words, num_topics, jax.random.key(1))}
    return fed.AutoSiloNormal(
        model, "diag", "diag", coupling=False, scale_coupling=False, **settings
    )


class Fit(NamedTuple):
    """Means of the topics ``(K, V)``, perplexities of held-out documents, and minus the bound.

    Perplexities are with q fitted to the documents, and by the network, if there is one. The bound
    is after several numbers of steps of a silo.
    """

    topics: np.ndarray
    perplexity: float
    by_network: float
    steps: np.ndarray
    losses: np.ndarray


class Task(NamedTuple):
    """Documents, and the length of a fit."""

    corpus: Corpus
    num_topics: int
    batch: int
    epochs: int
    rounds: int

    @property
    def steps(self) -> int:
        """Number of steps of a silo by any method; whole rounds of SFVI-Avg."""
        all_steps = self.epochs * len(self.corpus.train) // (SILOS * self.batch)
        return all_steps // self.rounds * self.rounds


def fit(task: Task, rows: fed.Silos, averaged: bool = False, amortized: bool = False) -> Fit:
    """Run SFVI or SFVI-Avg on these silos."""
    held_out, num_words = task.corpus.test[:HELD_OUT], len(task.corpus.words)
    own = sized(task.num_topics)
    q = guide(own, task.num_topics, num_words, amortized)
    options: dict[str, Any] = {
        "num_local_particles": 1,
        "local_optim": LOCAL_OPTIM,
        "batch_size": task.batch,
    }
    options["validate"] = len(rows) > 1
    svi = (
        fed.SFVIAvg(own, q, OPTIM, task.steps // task.rounds, **options)
        if averaged
        else fed.SFVI(own, q, OPTIM, **options)
    )
    rounds = task.rounds if averaged else task.steps
    result = svi.run(jax.random.key(0), rounds, rows, progress_bar=False)
    topics = np.asarray(result.params["auto_loc"]).reshape(task.num_topics, num_words)
    steps = np.arange(1, rounds + 1) * (task.steps // rounds)
    by_network = np.nan
    if amortized:
        by_network = perplexity(topics, held_out, q.encode(result.params, counts=held_out)["z"])
    return Fit(topics, perplexity(topics, held_out), by_network, steps, result.losses)


def figure_2(fits: dict[str, Fit], documents: np.ndarray, place: Path) -> None:
    """Draw coherence of the topics by method, and minus the bound over the steps of a silo."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    found = [coherence(fit.topics, documents) for fit in fits.values()]
    axes[0].boxplot(found, showfliers=False, medianprops={"color": "C3"})
    jitter = np.random.default_rng(0).uniform(-0.15, 0.15, len(found[0]))
    for i, each in enumerate(found):
        axes[0].plot(i + 1 + jitter, each, ".", color="C0", alpha=0.5)
    axes[0].set(ylabel="UMass coherence, ten words")
    axes[0].set_xticks(range(1, len(fits) + 1), list(fits), rotation=30, ha="right")
    for name, fit in fits.items():
        if "alone" in name:
            continue
        width = max(1, len(fit.losses) // 50)
        count = len(fit.losses) // width
        each = np.median(fit.losses[: count * width].reshape(count, width), axis=1) / len(documents)
        axes[1].plot(fit.steps[width - 1 :: width][:count], each, label=name)
    axes[1].set(xlabel="steps of each silo", ylabel="minus the bound (nats a document)")
    axes[1].legend()
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=150)
    plt.close(figure)


def measures(fit: Fit, corpus: Corpus) -> dict[str, float]:
    """Return measures of a fit's topics.

    They are quartiles of UMass, different top words, median NPMI in documents held out, and
    perplexities of these.
    """
    low, median, high = np.quantile(coherence(fit.topics, corpus.train), [0.25, 0.5, 0.75])
    return {
        "UMass": float(median),
        "lower": float(low),
        "upper": float(high),
        "top words": len(np.unique(best_words(fit.topics))),
        "NPMI": float(np.median(npmi(fit.topics, corpus.test))),
        "perplexity": fit.perplexity,
        "by network": fit.by_network,
    }


def compare(task: Task, amortized: bool = False) -> tuple[pd.DataFrame, dict[str, Fit]]:
    """Run all methods; return their measures and their fits."""
    rows = silos(task.corpus.train)
    methods = {
        "SFVI": partial(fit, task, rows),
        "SFVI-Avg": partial(fit, task, rows, averaged=True),
    }
    methods |= {
        f"silo {name} alone": partial(fit, task, fed.Silos({name: rows[name]}))
        for name in rows.names
    }
    if amortized:
        methods["SFVI, amortized"] = partial(fit, task, rows, amortized=True)
    fits, found = {}, {}
    for name, method in methods.items():
        fits[name] = method()
        found[name] = measures(fits[name], task.corpus)
        print(
            f"{name:16}" + "".join(f"  {key} {value:.4g}" for key, value in found[name].items()),
            flush=True,
        )
    return pd.DataFrame.from_dict(found, orient="index"), fits


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(
        description="ProdLDA's topics of 20 Newsgroups in three silos: figure 2."
    )
    parser.add_argument("--quick", action="store_true", help="600 documents, 300 words, 8 topics")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of each method")
    parser.add_argument(
        "--amortized", action="store_true", help="also SFVI with a network for q(z)"
    )
    parser.add_argument("--figure", type=Path, default=Path("figures/prod_lda.png"))
    args = parser.parse_args(arguments)
    fed.enable_compilation_cache()

    if args.quick:
        task = Task(corpus(600, 300), 8, 50, 40, 8)
    else:
        task = Task(corpus(), NUM_TOPICS, BATCH, args.epochs, ROUNDS)
    table, fits = compare(task, args.amortized)
    figure_2(fits, task.corpus.train, args.figure)
    topics = fits["SFVI"].topics
    each = coherence(topics, task.corpus.train)
    for k in np.argsort(-each)[:: max(1, len(each) // 6)]:
        print(f"{each[k]:7.1f}  {' '.join(task.corpus.words[best_words(topics)[k]])}")
    return table


if __name__ == "__main__":
    main()
