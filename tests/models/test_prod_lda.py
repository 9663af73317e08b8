"""ProdLDA: its measures against hand counts, its data, topics found again, and a quick run."""

import os
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import prod_lda
import pytest
from _topics import best_words, coherence, npmi
from scipy import stats
from scipy.sparse import csr_matrix

HAVE_DATA = "NUMPYRO_FED_DATA" in os.environ
TOY = np.array([[3, 1, 0, 0], [1, 0, 2, 0], [2, 1, 0, 0], [0, 1, 0, 1]])  # documents x words


# Measures


def test_coherence_is_counted_by_hand() -> None:
    topics = np.array([[3.0, 2.0, 1.0, 0.0], [0.0, 3.0, 1.0, 2.0]])
    np.testing.assert_array_equal(best_words(topics, 3), [[0, 1, 2], [1, 3, 2]])
    # word 0 is in documents 0, 1, 2, word 1 in 0, 2, 3, word 2 in 1, word 3 in 3
    first = (
        np.log((2 + 1) / 3) + np.log((1 + 1) / 3) + np.log((0 + 1) / 3)
    )  # (1, 0), (2, 0), (2, 1)
    second = (
        np.log((1 + 1) / 3) + np.log((0 + 1) / 3) + np.log((0 + 1) / 1)
    )  # (3, 1), (2, 1), (2, 3)
    np.testing.assert_allclose(coherence(topics, TOY, 3), [first, second], rtol=1e-12)
    # negative control: the order of the words counts, since the commoner one's documents are
    # divided by
    assert coherence(topics[1:, [0, 3, 2, 1]], TOY, 3) != pytest.approx(second, abs=0.1)


def test_npmi_is_counted_by_hand() -> None:
    together = np.array([[1, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 1]])
    topics = np.array([[2.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    np.testing.assert_allclose(npmi(topics, together, 2), [1, -1], atol=1e-12)
    half = np.log(0.5 / 0.75**2) / -np.log(0.5)  # words 0 and 1 of the toy corpus
    np.testing.assert_allclose(npmi(np.array([[2.0, 1.0, 0.0, 0.0]]), TOY, 2), half, rtol=1e-12)


def test_words_are_the_multinomial_without_factorials() -> None:
    rng = np.random.default_rng(0)
    logits, counts = rng.normal(size=(3, 5)), rng.poisson(2.0, (3, 5))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    exact = [stats.multinomial.logpmf(x, x.sum(), q) for x, q in zip(counts, p, strict=True)]
    left_out = [
        stats.multinomial.logpmf(x, x.sum(), np.full(5, 0.2)) + x.sum() * np.log(5) for x in counts
    ]
    found = prod_lda.Words(jnp.asarray(logits)).log_prob(jnp.asarray(counts))
    np.testing.assert_allclose(found, np.subtract(exact, left_out), rtol=1e-5)


def test_perplexity_of_topics_that_are_all_alike() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=20)
    counts = rng.multinomial(30, np.exp(logits) / np.exp(logits).sum(), 200).astype(np.float32)
    log_p = logits - np.log(np.exp(logits).sum())
    prior = jnp.zeros((200, 4)), jnp.full((200, 4), 0.5 * np.log(1 - 1 / 4))
    known = np.exp(-(counts @ log_p).sum() / counts.sum())
    topics = np.tile(logits, (4, 1)).astype(np.float32)
    assert prod_lda.perplexity(topics, counts, prior) == pytest.approx(known, rel=1e-5)
    assert prod_lda.perplexity(0 * topics, counts, prior) == pytest.approx(20, rel=1e-5)
    # a fit finds the prior where documents tell nothing of z
    assert prod_lda.perplexity(topics, counts) == pytest.approx(known, rel=2e-3)
    # negative control: another q is further from the posterior
    assert prod_lda.perplexity(topics, counts, (prior[0] + 1, prior[1])) > 1.05 * known


# Data


@pytest.fixture
def made_up_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Write a file in the form of the real one.

    It has 40 words in four themes, a tenth of the documents empty.
    """
    rng = np.random.default_rng(0)
    share = np.exp(2.5 * np.eye(4)[rng.integers(0, 4, 1500)]) @ np.kron(np.eye(4), np.ones(10))
    counts = rng.poisson(25 * share / share.sum(1, keepdims=True)).astype(np.uint16)
    counts[::10] = 0
    sparse = csr_matrix(counts)
    (tmp_path / "20newsgroups").mkdir()
    np.savez(
        tmp_path / "20newsgroups" / "bow_clean_2000.npz",
        data=sparse.data,
        indices=sparse.indices.astype(np.uint16),
        indptr=sparse.indptr.astype(np.int32),
        shape=np.array(counts.shape),
        vocab=np.array([f"word{i}" for i in range(40)]),
        is_train=np.arange(1500) < 1000,
    )
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    return counts


def test_corpus_has_no_empty_documents(made_up_documents: np.ndarray) -> None:
    corpus = prod_lda.corpus()
    assert corpus.train.shape == (900, 40)
    assert corpus.test.shape == (450, 40)
    assert corpus.train.sum() == made_up_documents[:1000].sum()
    assert corpus.train.sum(1).min() > 0
    some = prod_lda.corpus(num_documents=100, num_words=7)
    assert (some.train.shape, some.test.shape, some.words.shape) == ((100, 7), (100, 7), (7,))
    found_in = (made_up_documents[:1000] > 0).sum(0)
    left = [i for i in range(40) if f"word{i}" not in some.words]
    kept = [i for i in range(40) if i not in left]
    assert found_in[kept].min() >= found_in[left].max()
    rows = prod_lda.silos(corpus.train)
    assert rows.sizes[rows.group["counts"]] == (300, 300, 300)


def test_real_corpus_or_the_words_of_its_absence() -> None:
    if not HAVE_DATA:
        with pytest.raises(
            FileNotFoundError, match=r"NUMPYRO_FED_DATA is not set.*18,846 documents.*20newsgroups/"
        ):
            prod_lda.main(["--quick"])
        return
    corpus = prod_lda.corpus()
    assert corpus.train.shape == (10_940, 2_000)  # 653 of 18,846 documents are empty
    assert corpus.test.shape == (7_253, 2_000)
    assert (corpus.train.sum(), corpus.test.sum()) == (573_554, 355_319)
    assert list(corpus.words) == sorted(corpus.words)


# Fits


def simulated(num_documents: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of the model, of 100 words each, and its five topics of 60 words."""
    rng = np.random.default_rng(seed)
    topics = 3 * np.random.default_rng(0).normal(size=(5, 60))
    z = np.sqrt(1 - 1 / 5) * rng.normal(size=(num_documents, 5))
    logits = np.exp(z) / np.exp(z).sum(1, keepdims=True) @ topics
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return rng.multinomial(100, p).astype(np.float32), topics.astype(np.float32)


def likeness(found: np.ndarray, true: np.ndarray) -> float:
    """Return the mean over true topics of their largest correlation with one that was found."""
    return float(np.corrcoef(true, found)[: len(true), len(true) :].max(1).mean())


@pytest.mark.ci
@pytest.mark.parametrize("amortized", [False, True])
def test_topics_are_found_again(amortized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # what documents do not determine remains where it began: far from it with the start of 50
    # topics of 2,000 words
    monkeypatch.setattr(prod_lda, "START_SD", {False: 1.0, True: 1.0})
    counts, topics = simulated(900, 1)
    new, _ = simulated(200, 2)
    task = prod_lda.Task(prod_lda.Corpus(counts, new, np.arange(60)), 5, 100, 120, 6)
    fit = prod_lda.fit(task, prod_lda.silos(counts), amortized=amortized)
    assert likeness(fit.topics, topics) > 0.6
    best = prod_lda.perplexity(topics, new)
    assert 0.98 * best < fit.perplexity < 1.12 * best
    if amortized:
        assert fit.perplexity < fit.by_network < 1.12 * fit.perplexity
    # negative control: topics that are not learned
    other = np.random.default_rng(3).normal(size=(5, 60)).astype(np.float32)
    assert likeness(other, topics) < 0.4
    assert prod_lda.perplexity(other, new) > 2 * best


@pytest.mark.ci
@pytest.mark.usefixtures("made_up_documents")
def test_prod_lda_quick(tmp_path: Path) -> None:
    table = prod_lda.main(["--quick", "--figure", str(tmp_path / "new" / "figure.png")])
    plt.close("all")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000
    alone = [name for name in table.index if "alone" in name]
    assert len(alone) == prod_lda.SILOS
    assert np.isfinite(table.drop(columns="by network").to_numpy()).all()
    # what all silos know tells more of new documents than what one knows
    assert (
        table.loc[["SFVI", "SFVI-Avg"], "perplexity"].max() < table.loc[alone, "perplexity"].min()
    ), table
