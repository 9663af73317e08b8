"""Likelihood of ProdLDA, and measures of how good its topics are.

The measures are how often the first words of a topic occur together, and how well topics predict
new documents.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints

TOP = 10
STEPS, START = 300, 0.5  # steps and first sds of the fit to held-out documents


class Words(dist.Distribution):
    """Multinomial of all counts, without its factorials.

    The factorials depend on no parameter, and would take as long as the rest.
    """

    arg_constraints: ClassVar = {"logits": constraints.real_vector}
    support = constraints.independent(constraints.nonnegative_integer, 1)

    def __init__(self, logits, *, validate_args=None):  # type: ignore[no-untyped-def]
        self.logits = logits
        super().__init__(
            jnp.shape(logits)[:-1], jnp.shape(logits)[-1:], validate_args=validate_args
        )

    def log_prob(self, value):  # type: ignore[no-untyped-def]
        return jnp.sum(value * jax.nn.log_softmax(self.logits), axis=-1)


def best_words(topics: np.ndarray, top: int = TOP) -> np.ndarray:
    """Return places of each topic's first words, ``(K, top)``."""
    return np.argsort(-topics, axis=1, kind="stable")[:, :top]


def coherence(topics: np.ndarray, documents: np.ndarray, top: int = TOP) -> np.ndarray:
    """Return the UMass coherence of each topic.

    For every pair of its top words it measures how often documents with the commoner word have the
    other.
    """
    out = []
    for words in best_words(topics, top):
        has = (documents[:, words] > 0).astype(np.float64)
        both = has.T @ has
        before = np.tri(top, k=-1, dtype=bool)  # pairs (m, l), word l above word m
        out.append(np.log((both + 1) / np.diag(both))[before].sum())
    return np.array(out)


def npmi(topics: np.ndarray, documents: np.ndarray, top: int = TOP) -> np.ndarray:
    """Return the mean normalized pointwise mutual information of pairs of each topic's top words.

    It goes from -1 (never together) to 1.
    """
    out = []
    for words in best_words(topics, top):
        has = (documents[:, words] > 0).astype(np.float64)
        both = has.T @ has / len(has)
        alone = np.diag(both)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log(both / np.outer(alone, alone)) / -np.log(both)
        pairs = np.where(both > 0, found, -1.0)[np.tri(top, k=-1, dtype=bool)]
        out.append(pairs.mean())
    return np.array(out)


def minus_bounds(
    q: tuple[jax.Array, jax.Array], topics: jax.Array, counts: jax.Array, key: jax.Array
) -> jax.Array:
    """Return minus the bound of each document at fixed topics, by one draw of z."""
    loc, log_scale = q
    variance = 1 - 1 / len(topics)
    z = loc + jnp.exp(log_scale) * jax.random.normal(key, loc.shape)
    spread = (loc**2 + jnp.exp(2 * log_scale)) / variance
    divergence = 0.5 * jnp.sum(spread - 1 + jnp.log(variance) - 2 * log_scale, axis=-1)
    return divergence - Words(jax.nn.softmax(z) @ topics).log_prob(counts)


@jax.jit
def fitted(topics: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fit diagonal Gaussians to the z of documents at fixed topics."""
    shape, optim = (len(counts), len(topics)), optax.adam(0.1)
    first = jnp.zeros(shape), jnp.full(shape, jnp.log(START))

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        q, state = carry
        gradient = jax.grad(lambda q: minus_bounds(q, topics, counts, key).sum())(q)
        updates, state = optim.update(gradient, state)
        return (optax.apply_updates(q, updates), state), None

    keys = jax.random.split(jax.random.key(3), STEPS)
    return jax.lax.scan(step, (first, optim.init(first)), keys)[0][0]


def perplexity(topics: np.ndarray, counts: np.ndarray, q: Any = None) -> float:
    """Return ``exp(-bound / words)`` of documents at fixed topics.

    The q of their z is the argument, or is fitted to the documents.
    """
    beta, x = jnp.asarray(topics), jnp.asarray(counts)
    q = fitted(beta, x) if q is None else q
    keys = jax.random.split(jax.random.key(4), 10)
    total = jax.lax.map(lambda key: minus_bounds(q, beta, x, key).sum(), keys).mean()
    return float(jnp.exp(total / x.sum()))
