r"""Minibatches of a silo's rows, by systematic sampling.

Every row has the same probability, and no row is drawn twice. Of :math:`N_s` rows a batch takes
:math:`m = \min(\text{batch size}, N_s)`: the rows :math:`\lfloor (j N_s + b) / m \rfloor` for j = 0
... m - 1, with one b, uniform on 0 ... N_s - 1. The terms of the batch have weight :math:`N_s / m`.
The cost does not depend on :math:`N_s`. A step moves the latents of the batch's own rows alone;
latents of other row groups stay whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows, gather, systematic
from numpyro_fed.vi.guides.family import Family


@dataclass(frozen=True)
class Batch:
    """The rows of a step, the weights of their terms, and access to their units' parameters.

    :param rows: the rows as a silo of their own.
    :param weights: weights of each row group's terms (beyond the mask of padding).
    :param scale: factor of the units' parts of the bound, where units are subsampled.
    :param take: selects the units' rows of a pytree, e.g. of variational parameters.
    :param put: replaces the units' rows of a pytree.
    """

    rows: SiloRows
    weights: dict[str, Array]
    scale: Array | float
    take: Callable[[PyTree], PyTree]
    put: Callable[[PyTree, PyTree], PyTree]


def whole(rows: SiloRows) -> Batch:
    """Return a batch of all rows of a silo."""
    return Batch(rows, {}, 1.0, lambda tree: tree, lambda _, new: new)


def pick(family: Family, size: tuple[str, int] | None, key: Array, rows: SiloRows) -> Batch:
    """Draw the batch of a step: all rows, or a minibatch.

    :param size: row group and number of rows, or ``None`` for all rows.
    """
    if size is None:
        return whole(rows)
    group, most = size
    shown, total = min(most, dict(rows.pad)[group]), rows.sizes[group]
    count = jnp.minimum(shown, total)
    place = jnp.minimum(
        systematic(random.randint(key, (), 0, total), total, count, shown), total - 1
    )
    place = jnp.where(jnp.arange(shown) < count, place, place[0])
    return rows_at(family, group, place, count, total.astype(jnp.result_type(float)) / count, rows)


def rows_at(
    family: Family, group: str, place: Array, count: Array, stands_for: Array, rows: SiloRows
) -> Batch:
    """Return the batch of a row group's rows at these places.

    :param place: places of the rows; the first ``count`` are real, the others padding.
    :param stands_for: weight of a row's terms.
    """
    groups, pad, shown = (
        {leaf: g for leaf, g, _ in family.factors.rows},
        dict(rows.pad)[group],
        len(place),
    )
    batch = replace(
        rows,
        rows={k: v[place] if groups[k] == group else v for k, v in rows.rows.items()},
        sizes={**rows.sizes, group: count},
        order={**rows.order, group: rows.order[group][place]},
        pad=tuple((g, shown if g == group else n) for g, n in rows.pad),
    )
    if family.group != group:
        return replace(whole(batch), weights={group: stands_for})
    inside = jnp.where(jnp.arange(shown) < count, place, pad)

    def put(tree: PyTree, new: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: x.at[inside].set(y, mode="drop"), tree, new)

    return Batch(batch, {}, stands_for, lambda tree: gather(tree, place), put)
