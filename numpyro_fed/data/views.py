"""View of one silo's rows, whole or as a minibatch, for a traced silo number.

Unequal silos share one compiled program. A whole silo is padded to a static size by its last row,
repeated, and padded rows have weight zero. (Padding by zeros would make NaN gradients in many log
densities.)
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import Column, ModelArgs, PyTree
from numpyro_fed.data.silos import Silos

# rows, padding included, that cost less than another program: a gradient of 8,192 rows of 20
# numbers takes .4 ms, its compilation a second. Up to so many, all silos form a single bucket
SMALL = 1 << 13


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SiloView:
    """Rows of one silo, as a step of an algorithm sees them.

    :param silos: the storage of the silo (in a real federation, of this silo alone).
    :param number: the silo's place in ``silos``; may be traced.
    :param pad: static number of rows to show of each row group, at least as many as the silo has.
    """

    silos: Silos
    number: Array
    pad: tuple[tuple[str, int], ...] = field(metadata={"static": True})

    def size(self, group: str) -> Array:
        """Return the number of the silo's rows in a group, an integer scalar."""
        return jnp.asarray(self.silos.sizes[group], jnp.int32)[self.number]

    def start(self, group: str) -> Array:
        """Return the flat position of the silo's first row of a group."""
        return jnp.asarray(self.silos.offsets(group), jnp.int32)[self.number]

    def mask(self, group: str) -> Array:
        """Return a mask of the shown rows that are not padding, shape ``(pad,)``."""
        return jnp.arange(dict(self.pad)[group]) < self.size(group)

    def positions(self, group: str) -> Array:
        """Return flat positions of the shown rows, padded by the last row's, shape ``(pad,)``."""
        shown = jnp.arange(dict(self.pad)[group])
        return self.start(group) + jnp.minimum(shown, self.size(group) - 1)

    def units(self, group: str | None) -> tuple[Array, Array]:
        """Return flat positions and mask of a group's elements.

        For ``None`` the only element is the silo, and its position is its number.
        """
        if group is None:
            return jnp.asarray(self.number)[None], jnp.ones(1, bool)
        return self.positions(group), self.mask(group)

    def whole(self) -> tuple[ModelArgs, dict[str, Array]]:
        """Return keyword arguments with all rows, and each row's weight (1, or 0 for padding)."""
        return self._select({g: self.positions(g) for g, _ in self.pad}), {
            g: self.mask(g).astype(jnp.result_type(float)) for g, _ in self.pad
        }

    def batch(self, group: str, index: Array) -> dict[str, Array]:
        """Return rows ``index`` of one group as keyword arguments.

        ``index`` counts inside the silo and may have any leading shape. A minibatch of m rows
        stands for the silo's N_s: give its terms the weight N_s / m.
        """
        # unsigned, as a gather by signed indices compares and selects for every number it copies
        flat = (self.start(group) + index).astype(jnp.uint32)
        return {k: v[flat] for k, v in self.silos.rows.items() if self.silos.group[k] == group}

    def _select(self, positions: dict[str, Array]) -> ModelArgs:
        rows = {k: v[positions[self.silos.group[k]]] for k, v in self.silos.rows.items()}
        return {**self.silos.shared, **rows}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SiloRows:
    """Rows of one silo, gathered once and not per step.

    They are the rows that :class:`SiloView` shows. :func:`stack` gives them a leading axis over a
    bucket of silos (except for ``shared``), for :func:`jax.vmap`.

    :param rows: row arguments, ``(pad, ...)``, padded by repeating the last row.
    :param shared: shared arguments that are arrays.
    :param sizes: number of the silo's rows in each group, integer scalars.
    :param order: pooled place of each shown row of each group, ``(pad,)``.
    :param number: the silo's place in the storage it comes from.
    :param static: shared arguments that are not arrays.
    :param pad: static number of shown rows of each group.
    :param part: static number of the silo's structure, where silos differ in structure.
    """

    rows: dict[str, Array]
    shared: dict[str, PyTree]
    sizes: dict[str, Array]
    order: dict[str, Array]
    number: Array
    static: tuple[tuple[str, Hashable], ...] = field(metadata={"static": True})
    pad: tuple[tuple[str, int], ...] = field(metadata={"static": True})
    part: int = field(default=0, metadata={"static": True})

    def mask(self, group: str) -> Array:
        """Return a mask of the shown rows that are not padding, shape ``(pad,)``."""
        return jnp.arange(dict(self.pad)[group]) < self.sizes[group]

    def size(self, group: str) -> Array:
        """Return the number of the silo's rows in a group, an integer scalar."""
        return self.sizes[group]

    def take(self, leaves: Iterable[str], index: Array) -> dict[str, Array]:
        """Return rows ``index`` of some row arguments (of one group) as keyword arguments."""
        return {leaf: self.rows[leaf][index.astype(jnp.uint32)] for leaf in leaves}

    def whole(self) -> tuple[ModelArgs, dict[str, Array]]:
        """Return keyword arguments with all rows, and each row's weight (1, or 0 for padding)."""
        weights = {g: self.mask(g).astype(jnp.result_type(float)) for g, _ in self.pad}
        return {**dict(self.static), **self.shared, **self.rows}, weights

    @property
    def axes(self) -> "SiloRows":
        """Axes for ``jax.vmap`` over a stack of silos: 0, but ``None`` for shared arguments."""
        mapped: SiloRows = jax.tree.map(lambda _: 0, self)
        return replace(mapped, shared=jax.tree.map(lambda _: None, self.shared))


def stack(
    silos: Silos, part: int = 0, pad: tuple[tuple[str, int], ...] | None = None
) -> list[SiloRows]:
    """Return all silos in a few stacks, one for each of :func:`buckets`.

    Arrays of a stack have a leading axis over its silos.

    :param pad: padding of all stacks, needed where a silo's latents are one row; with ``None`` each
        bucket has its own padding.
    """
    return [
        replace(known, rows=rows, order=order)
        for known, (rows, order) in zip(
            outlines(silos, part, pad), _stacked_rows(silos, pad), strict=True
        )
    ]


@partial(jax.jit, static_argnames=("pad",))
def _stacked_rows(
    silos: Silos, pad: tuple[tuple[str, int], ...] | None
) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """Return each stack's rows, and their pooled places."""
    out = []
    for numbers, own in buckets(silos):
        shown = {
            group: _stacked_positions(silos, group, numbers, count) for group, count in pad or own
        }
        order = {group: silos.order[group][place] for group, place in shown.items()}
        out.append(({k: v[shown[silos.group[k]]] for k, v in silos.rows.items()}, order))
    return out


def outlines(
    silos: Silos, part: int = 0, pad: tuple[tuple[str, int], ...] | None = None
) -> list[SiloRows]:
    """Return the stacks of :func:`stack` without the rows and their places, for remote silos."""
    shared, static = split_shared(silos.shared)
    out = []
    for numbers, own in buckets(silos):
        sizes = {
            g: jnp.asarray(np.asarray(silos.sizes[g])[numbers], jnp.int32) for g, _ in pad or own
        }
        out.append(
            SiloRows(
                {}, shared, sizes, {}, jnp.asarray(numbers, jnp.int32), static, pad or own, part
            )
        )
    return out


def split_shared(
    shared: Mapping[str, Column],
) -> tuple[dict[str, PyTree], tuple[tuple[str, Hashable], ...]]:
    """Split shared arguments into arrays and other values, as :class:`SiloRows` has them."""
    static = {
        k: v for k, v in shared.items() if isinstance(v, Hashable) and not isinstance(v, Array)
    }
    return {k: v for k, v in shared.items() if k not in static}, tuple(sorted(static.items()))


def stack_states(states: PyTree, silos: Silos, group: str | None) -> list:
    """Return a pytree of rows in the stacks of :func:`stack`, each of shape ``(S, pad, ...)``.

    The rows are elements of ``group``, or silos where it is ``None``.
    """
    out = []
    for numbers, pad in buckets(silos):
        if group is None:
            place = jnp.asarray(numbers[:, None])
        else:
            place = _stacked_positions(silos, group, numbers, dict(pad)[group])
        out.append(gather(states, place))
    return out


def _stacked_positions(silos: Silos, group: str, numbers: np.ndarray, count: int) -> Array:
    """Return flat positions ``(S, count)`` of some silos' rows, padded by the last row's."""
    inside = np.minimum(np.arange(count), np.asarray(silos.sizes[group])[numbers][:, None] - 1)
    return jnp.asarray(silos.offsets(group)[numbers][:, None] + inside)


class Bucket(NamedTuple):
    """Silos of similar size: their numbers, and the padding that fits the largest of them."""

    numbers: np.ndarray
    pad: tuple[tuple[str, int], ...]


def largest(silos: Silos) -> tuple[tuple[str, int], ...]:
    """Return the padding that fits every silo."""
    return tuple((g, max(n)) for g, n in silos.sizes.items())


def buckets(silos: Silos) -> list[Bucket]:
    """Group silos by size, so that padding less than doubles the rows of every row group.

    Few small silos form one bucket, whatever their sizes. To compile another bucket would cost more
    than to pad up to a few thousand rows.
    """
    sizes = np.array([silos.sizes[g] for g in silos.sizes])
    if (sizes.max(1) * len(silos)).max() <= SMALL:
        return [Bucket(np.arange(len(silos)), largest(silos))]
    left = list(np.lexsort(-sizes[::-1]))  # largest first, by the first group
    out = []
    while left:
        most = sizes[:, left].max(1)
        alike = [s for s in left if (2 * sizes[:, s] > most).all()] or [left[0]]
        left = [s for s in left if s not in alike]
        numbers = np.sort(alike)
        pad = tuple((g, int(n)) for g, n in zip(silos.sizes, sizes[:, numbers].max(1), strict=True))
        out.append(Bucket(numbers, pad))
    return out


def sweep(
    fn: Callable[[SiloView, PyTree], tuple[PyTree, PyTree]],
    silos: Silos,
    states: PyTree,
    group: str | None,
) -> tuple[PyTree, PyTree]:
    """Evaluate ``fn(view, own_states) -> (reply, own_states)`` for every silo.

    Calls are vmapped over the silos of each of :func:`buckets`.

    :param states: a pytree of rows over the elements of ``group``, silo after silo (over silos
        where ``group`` is ``None``), or ``None``. Each call sees the rows of its silo.
    :return: the replies stacked over silos in the order of ``silos.names``, and all new states.
    """
    replies, order, places, rows = [], [], [], []
    for numbers, pad in buckets(silos):

        def one(number: Array, pad: tuple = pad) -> tuple[PyTree, PyTree, Array]:
            view = SiloView(silos, number, pad)
            positions, mask = view.units(group)
            reply, own = fn(view, gather(states, positions))
            return reply, own, jnp.where(mask, positions, -1)

        reply, own, place = jax.vmap(one)(jnp.asarray(numbers))
        replies.append(reply)
        order.append(numbers)
        places.append(place.reshape(-1))
        rows.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own))
    back = np.argsort(np.concatenate(order))
    stacked = jax.tree.map(lambda *xs: jnp.concatenate(xs)[back], *replies)
    total = len(silos) if group is None else sum(silos.sizes[group])
    place = jnp.concatenate(places)

    def collect(*parts: Array) -> Array:
        new = jnp.concatenate(parts)
        out = jnp.zeros((total, *new.shape[1:]), new.dtype)
        return out.at[jnp.where(place < 0, total, place)].set(new, mode="drop")

    return stacked, jax.tree.map(collect, *rows)


def thin(silos: Silos, group: str, most: int) -> Silos:
    """Return silos that keep about ``most`` rows of a group in all, evenly spaced in each silo.

    No index may point to the group.
    """
    sizes = np.asarray(silos.sizes[group])
    if sizes.sum() <= most:
        return silos
    kept = np.minimum(sizes, -(-most // len(silos)))
    positions = np.concatenate(
        [
            start + np.arange(k) * n // k
            for start, n, k in zip(silos.offsets(group), sizes, kept, strict=True)
        ]
    )
    part = copy.copy(silos)
    part.sizes = {**silos.sizes, group: tuple(kept.tolist())}
    # in NumPy, as JAX would compile a gather for each type of row
    part.rows = {
        k: jnp.asarray(np.asarray(v)[positions]) if silos.group[k] == group else v
        for k, v in silos.rows.items()
    }
    rank = np.argsort(np.argsort(np.asarray(silos.order[group])[positions]))
    part.order = {**silos.order, group: jnp.asarray(rank, jnp.int32)}
    return part


def gather(tree: PyTree, positions: Array) -> PyTree:
    """Return rows ``positions`` of every leaf."""
    return jax.tree.map(lambda x: x[positions], tree)


@partial(jax.jit, static_argnames=("group",))
def to_pooled_order(out: Array, rows: SiloRows, group: str, x: Array) -> Array:
    """Write a stack's elements ``(S, pad, ...)`` to their pooled places in a copy of ``out``.

    Padding is dropped.
    """
    return scatter(
        out,
        rows.order[group].reshape(-1),
        stacked_mask(rows, group).reshape(-1),
        x.reshape(-1, *x.shape[2:]),
    )


def stacked_mask(rows: SiloRows, group: str) -> Array:
    """Return a mask ``(S, pad)`` of the rows shown in a stack that are not padding."""
    return jnp.arange(dict(rows.pad)[group]) < rows.sizes[group][:, None]


def scatter(tree: PyTree, positions: Array, mask: Array, rows: PyTree) -> PyTree:
    """Write ``rows`` to ``positions`` in a copy of ``tree`` where ``mask`` holds.

    All other rows are padding, and are dropped.
    """

    def write(x: Array, new: Array) -> Array:
        return x.at[jnp.where(mask, positions, x.shape[0])].set(new, mode="drop")

    return jax.tree.map(write, tree, rows)


# most rows of a minibatch: the square of this still fits in 32 bits
MAX_BATCH = 46_340


def systematic(start: Array, total: Array, count: Array | int, shown: int) -> Array:
    """Return ``(j total + start) // count`` for j < ``shown``: a systematic sample without gaps.

    Exact for ``count`` up to :data:`MAX_BATCH`.

    :param start: a uniform whole number below ``total``.
    :param total: number of rows.
    :param count: number of rows drawn, at most ``total``.
    :param shown: length of the result.
    """
    j = jnp.arange(shown)
    return j * (total // count) + (j * (total % count) + start) // count
