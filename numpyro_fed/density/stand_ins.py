"""Stand-in silos for the check of the factorization: made-up rows, or a silo cut in two."""

import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from numpyro_fed.data.silos import Silos

# rows of the two made-up silos; each further row group has two more. They are unequal, so that a
# model shows that it reads its number of rows
_MADE_UP = (3, 5)
# most rows of a silo to cut in two, as the cut copies them: 52 MB of 100 numbers a row
_CUT_ROWS = 1 << 17


def random_silos(
    silos: Silos, rng: np.random.Generator, low: int, high: int, all_whole: bool
) -> Silos:
    """Return two silos of made-up rows with the arguments and types of ``silos``.

    Whole numbers are from ``low`` to below ``high``. Other numbers are between .2 and .8, unless
    ``all_whole``.
    """
    sizes = {g: tuple(n + 2 * i for n in _MADE_UP) for i, g in enumerate(silos.sizes)}

    def made(leaf: str) -> np.ndarray:
        spec, own = silos.rows[leaf], sizes[silos.group[leaf]]
        shape, dtype = (sum(own), *spec.shape[1:]), np.dtype(spec.dtype)
        if leaf in silos.index:
            most = np.repeat(sizes[silos.index[leaf]], own)
            return rng.integers(0, most.reshape(-1, *[1] * (len(shape) - 1)), shape)
        if dtype.kind == "b":
            return rng.integers(0, 2, shape)
        if all_whole or np.issubdtype(dtype, np.integer):
            return rng.integers(low, high, shape)
        return rng.uniform(0.2, 0.8, shape)

    rows = {leaf: jnp.asarray(made(leaf), spec.dtype) for leaf, spec in silos.rows.items()}
    order = {g: jnp.arange(sum(n), dtype=jnp.int32) for g, n in sizes.items()}
    return silos.like(("made up", "made up, too"), sizes, rows, order)


def cut_in_two(silos: Silos, seed: int) -> Silos | None:
    """Cut one silo's rows into two silos of unequal size.

    Each element goes to the same silo as all rows that point to it.

    :return: the two silos. ``None`` where a row group has no two parts that no index connects, or
        where rows are very many.
    """
    sizes = {group: n[0] for group, n in silos.sizes.items()}
    first = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    total = sum(sizes.values())
    if total > _CUT_ROWS:
        return None
    ends = [
        (first[silos.group[leaf]] + np.arange(len(x)), first[target] + np.asarray(x))
        for leaf, target in silos.index.items()
        for x in [silos.rows[leaf]]
    ]
    none = np.zeros(0, int)
    one, other = (np.concatenate([none, *(pair[side] for pair in ends)]) for side in range(2))
    links = coo_matrix((np.ones(len(one)), (one, other)), (total, total))
    num, part = connected_components(links, directed=False)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        second = rng.random(num) < 1 / 3
        place = {g: np.flatnonzero(second[part[first[g] : first[g] + n]]) for g, n in sizes.items()}
        rest = {g: np.flatnonzero(~second[part[first[g] : first[g] + n]]) for g, n in sizes.items()}
        if all(len(place[g]) and len(rest[g]) for g in sizes):
            return _arranged(silos, {g: (rest[g], place[g]) for g in sizes})
    return None


def _arranged(silos: Silos, parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> Silos:
    """Return one silo's rows as two silos; ``parts`` has their places by row group."""
    order = {g: np.concatenate(places) for g, places in parts.items()}
    inside = {g: np.empty(len(places), np.int32) for g, places in order.items()}
    for g, places in parts.items():
        for own in places:
            inside[g][own] = np.arange(len(own))
    rows = {}
    for leaf, x in silos.rows.items():
        moved = np.asarray(x)[order[silos.group[leaf]]]
        rows[leaf] = jnp.asarray(inside[silos.index[leaf]][moved] if leaf in silos.index else moved)
    sizes = {g: tuple(map(len, places)) for g, places in parts.items()}
    return silos.like(
        silos.names * 2, sizes, rows, {g: jnp.asarray(x, jnp.int32) for g, x in order.items()}
    )
