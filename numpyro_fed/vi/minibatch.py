r"""Some of a silo's rows for a step.

Systematic sampling, every row with the same probability and none twice.

Of N_s rows, :math:`m = \min(\text{batch size}, N_s)` are taken, row :math:`\lfloor (j N_s + b) / m
\rfloor` for j = 0 ... m - 1 with one b, uniform on 0 ... N_s - 1. Terms of the batch have weight
:math:`N_s / m`. The cost does not depend on N_s. Latents of the batch's own rows come with them,
and only they are moved; latents of other groups stay whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_fed.data.views import SiloRows, gather

__all__ = ["Batch", "pick", "rows_at", "systematic", "whole"]


@dataclass(frozen=True)
class Batch:
    """Rows of a step, the weights of their terms, and how to reach the parameters of their units.

    :param rows: the rows as a silo of their own.
    :param weights: of each row group's terms (beyond the mask of padding).
    :param scale: of the units' parts of the bound, where units are subsampled.
    :param take: the units' rows of a pytree, e.g. of variational parameters.
    :param put: a pytree with the units' rows replaced.
    """

    rows: SiloRows
    weights: dict[str, Array]
    scale: Array | float
    take: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def systematic(start: Array, total: Array, count: Array, shown: int) -> Array:
    """``(j total + start) // count`` for j = 0 ... shown - 1, exactly (``count`` below 46,000)."""
    j = jnp.arange(shown)
    return j * (total // count) + (j * (total % count) + start) // count


def whole(rows: SiloRows) -> Batch:
    """All of a silo's rows."""
    return Batch(rows, {}, 1.0, lambda tree: tree, lambda _, new: new)


def pick(family: Any, size: tuple[str, int] | None, key: Array, rows: SiloRows) -> Batch:
    """The batch of a step: all rows, or a minibatch.

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
    family: Any, group: str, place: Array, count: Array, stands_for: Array, rows: SiloRows
) -> Batch:
    """The batch of the rows of a group at these places, of which the first ``count`` are real.

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

    def put(tree: Any, new: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[inside].set(y, mode="drop"), tree, new)

    return Batch(batch, {}, stands_for, lambda tree: gather(tree, place), put)
