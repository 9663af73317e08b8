r"""Minibatches of plate elements with latents, each element with all rows that point to it.

An element's Metropolis move needs its own rows only. A minibatch takes m of a silo's N_s elements:
element :math:`\lfloor (j N_s + b) / m \rfloor` for j = 0 ... m - 1, with one integer b uniform
below N_s. Each element has probability m / N_s, and none appears twice. These elements move, and
the gradient is that of their terms with weight N_s / m. A step costs m times the rows of the
largest element.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, systematic
from numpyro_fed.density.factors import Factors
from numpyro_fed.rounds.serialization import wire_name


@wire_name("Members")
class Members(NamedTuple):
    """Rows of another group that point to each element, and their number.

    They are flat positions ``(G, R)``, padded by the last one, and numbers ``(G,)``.
    """

    positions: Array
    number: Array


def pointing_groups(factors: Factors, group: str) -> dict[str, str]:
    """Return the row groups that point to ``group``, each with its pointing argument.

    :raises ValueError: if a row group of the model does not point to it.
    """
    groups = {leaf: g for leaf, g, _ in factors.rows}
    pointing = {groups[leaf]: leaf for leaf, target in factors.index if target == group}
    for leaf, target in factors.index:
        if target != group:
            raise ValueError(
                f"batch_size takes elements of {group!r} with the rows that point to them, but "
                f"{leaf!r} points to {target!r}, and a minibatch has only some rows of that "
                "group; expected batch_size=None"
            )
    for other in dict.fromkeys(groups.values()):
        if other not in (group, *pointing):
            raise ValueError(
                f"batch_size takes elements of {group!r}, which have latents, with the rows that "
                f"point to them, but rows of {other!r} do not point there; expected index= for "
                "these rows, or batch_size=None"
            )
    return pointing


def find_members(factors: Factors, silos: Silos, group: str) -> dict[str, Members]:
    """Return the rows of every group that points to ``group``."""
    total, out = sum(silos.sizes[group]), {}
    for other, leaf in pointing_groups(factors, group).items():
        sizes = np.asarray(silos.sizes[other])
        silo = np.repeat(np.arange(len(silos)), sizes)
        element = silos.offsets(group)[silo] + np.asarray(silos.rows[leaf])
        order = np.argsort(element, kind="stable")
        count = np.bincount(element, minlength=total)
        start = np.concatenate([[0], np.cumsum(count)[:-1]])
        inside = np.minimum(np.arange(count.max(initial=1)), np.maximum(count - 1, 0)[:, None])
        found = order[np.minimum(start[:, None] + inside, len(order) - 1)]
        out[other] = Members(jnp.asarray(found, jnp.int32), jnp.asarray(count, jnp.int32))
    return out


def pick_elements(key: Array, length: int, size: int, total: Array) -> Array:
    """Draw elements for ``length`` steps, numbered within the silo, ``(length, size)``."""
    start = random.randint(key, (length, 1), 0, total)
    return systematic(start, total, size, size)


def rows_of(
    factors: Factors, members: dict[str, Members], group: str, view: SiloView, index: Array
) -> tuple[SiloView, dict[str, Array], dict[str, Array]]:
    """Return a silo's elements ``index`` as a silo of their own.

    :return: the view for the masks, row arguments, and weights (0 for padding).
    """
    silos, m = view.silos, len(index)
    flat = view.start(group) + index
    kwargs = view.batch(group, index)
    weights = {group: jnp.ones(m)}
    for other, (positions, number) in members.items():
        places = positions[flat]
        rows = {k: v[places.reshape(-1)] for k, v in silos.rows.items() if silos.group[k] == other}
        own = {
            leaf: jnp.repeat(jnp.arange(m), places.shape[1])
            for leaf, target in factors.index
            if target == group
        }
        kwargs |= {**rows, **{leaf: x for leaf, x in own.items() if leaf in rows}}
        weights[other] = (
            (jnp.arange(places.shape[1]) < number[flat][:, None])
            .astype(weights[group].dtype)
            .reshape(-1)
        )
    return SiloView(silos, view.number, ((group, m),)), kwargs, weights
