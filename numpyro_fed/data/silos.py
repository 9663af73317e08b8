"""Data in silos: what each silo calls the model with, and where its rows stand in the pooled data.

A :class:`Silos` holds, for every named silo, keyword arguments of one model. Arguments are of two
kinds. *Rows* are arrays whose leading axis runs over the elements of a silo plate; arrays over the
same plate form a *row group* and are stored once, flat, silo after silo, so that a minibatch of any
silo is one gather at ``offset + index``. Everything else is *shared*: the same in all silos.

An *index* argument holds positions in another row group (each row's district). Inside a silo it is
numbered from zero, in :attr:`Silos.pooled` it is numbered as in the pooled data.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.data.checks import (
    all_equal,
    check_flat,
    check_numbers,
    check_rows,
    check_same_arguments,
    check_shared,
    check_sizes,
    check_told,
    lengths,
    silo_names,
)

__all__ = ["Silos"]

_ALIGNED = 64  # bytes


class Silos:
    """The data of several silos, as keyword arguments of one model.

    :param data: for every silo's name, the model's keyword arguments there. Arrays (NumPy, JAX,
        pandas or Arrow columns) whose leading axis differs between silos, or whose values do, are
        rows; arguments equal in all silos are shared.
    :param rows: the silo plate of each row argument, where sizes alone do not tell:
        ``{"x": "patients"}``.
    :param index: for an argument that holds positions in another silo plate, that plate's row
        group: ``{"district": "districts"}``. Its values count from zero inside each silo.
    :raises ValueError: for an empty silo, an argument that only some silos have, rows whose
        trailing shapes disagree, NaN or infinite values (naming silo, argument and row), points
        of time, an index that points outside its silo.
    :warns UserWarning: where rounding to float32 moves numbers by much of what they vary by.

    The object is a JAX pytree (its arrays are leaves), so it may be passed through :func:`jax.jit`.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> silos = fed.Silos({"oslo": {"y": np.ones(3)}, "rome": {"y": np.zeros(2)}})
        >>> silos.names, silos.pooled["y"].shape
        (('oslo', 'rome'), (5,))
    """

    names: tuple[str, ...]
    rows: dict[str, Array]
    shared: dict[str, Any]
    order: dict[str, Array]
    group: dict[str, str]
    sizes: dict[str, tuple[int, ...]]
    index: dict[str, str]
    guessed: tuple[str, ...]
    _arrays: tuple[str, ...]

    def __init__(
        self,
        data: Mapping[str, Mapping[str, Any]],
        *,
        rows: Mapping[str, str] | None = None,
        index: Mapping[str, str] | None = None,
    ) -> None:
        names = silo_names(data)
        check_same_arguments(dict(zip(names, data.values(), strict=True)))
        table = {
            leaf: [as_column(kwargs[leaf]) for kwargs in data.values()]
            for leaf in next(iter(data.values()))
        }
        for leaf, values in table.items():
            check_numbers(leaf, values)
        rows, index = dict(rows or {}), dict(index or {})
        check_told(rows, index, table)
        groups: dict[str, list[str]] = {}
        by_sizes: dict[tuple[int, ...], str] = {}
        shared: dict[str, Any] = {}
        told = {*rows, *index}
        differ = [leaf for leaf, values in table.items() if leaf in told or not all_equal(values)]
        row_sizes = {lengths(table[leaf]) for leaf in differ} - {None}
        if (
            len(names) == 1 and not row_sizes
        ):  # nothing differs: rows are as long as the first array
            row_sizes = {next((n for n in map(lengths, table.values()) if n is not None), None)}
        for leaf, values in table.items():
            # equal values are shared, unless they are as long as rows are: labels may well be equal
            if leaf not in differ and lengths(values) not in row_sizes:
                shared[leaf] = values[0]
                continue
            check_rows(leaf, names, values)
            sizes = tuple(len(v) for v in values)
            name = rows.get(leaf) or by_sizes.get(sizes) or leaf
            if leaf not in rows:
                by_sizes[sizes] = name
            check_sizes(leaf, sizes, groups.get(name, []), name, names, table)
            groups.setdefault(name, []).append(leaf)
        self._set(
            *put_together(names, table, groups, shared, index, tuple(sorted(by_sizes.values())))
        )

    @classmethod
    def _from_flat(cls, *parts: Any) -> Self:
        self = cls.__new__(cls)
        self._set(*parts)
        return self

    def _set(
        self,
        names: tuple[str, ...],
        rows: dict[str, np.ndarray],
        shared: dict[str, Any],
        group: dict[str, str],
        sizes: dict[str, tuple[int, ...]],
        order: dict[str, np.ndarray],
        index: dict[str, str],
        guessed: tuple[str, ...] = (),
    ) -> None:
        if not rows:
            raise ValueError(
                "expected at least one argument with rows that differ between silos, got only "
                f"shared arguments {sorted(shared)}"
            )
        check_flat(names, rows, group, sizes, index)
        self.names, self.group, self.sizes, self.index = names, group, sizes, index
        self.guessed = guessed  # row groups told by their sizes alone
        # positions in int32: small integer types (pandas categories) overflow when silos are put
        # together; other rows, which nobody else has, are taken as they lie in memory where they
        # can be
        self.rows = {
            k: jnp.asarray(v, jnp.int32) if k in index else jax.device_put(v)
            for k, v in rows.items()
        }
        self.order = {k: jnp.asarray(v, jnp.int32) for k, v in order.items()}
        self.shared = {
            k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in shared.items()
        }
        self._arrays = tuple(sorted(k for k, v in self.shared.items() if isinstance(v, Array)))
        for leaf, value in self.shared.items():
            check_shared(leaf, value)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def offsets(self, group: str) -> np.ndarray:
        """Where each silo's rows of a group begin in the flat storage, shape ``(S,)``."""
        sizes = np.asarray(self.sizes[group])
        return np.cumsum(sizes) - sizes

    def silo_of_row(self, group: str) -> np.ndarray:
        """The silo (its number) of each flat row of a group."""
        return np.repeat(np.arange(len(self)), self.sizes[group])

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The keyword arguments of one silo."""
        name = str(name)
        if name not in self.names:
            raise KeyError(f"no silo {name!r}; there are {list(self.names)}")
        s = self.names.index(name)
        out = dict(self.shared)
        for leaf, flat in self.rows.items():
            start = self.offsets(self.group[leaf])[s]
            out[leaf] = flat[start : start + self.sizes[self.group[leaf]][s]]
        return out

    def pooled_position(self, group: str) -> Array:
        """For each pooled row of a group its place in the flat storage (the inverse of ``order``)."""
        order = self.order[group]
        return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))

    @property
    def pooled(self) -> dict[str, Any]:
        """The model's keyword arguments for all data at once, rows in the order they came in."""
        out = dict(self.shared)
        for leaf, flat in self.rows.items():
            group = self.group[leaf]
            if leaf in self.index:
                target = self.index[leaf]
                start = jnp.asarray(self.offsets(target))[self.silo_of_row(group)]
                flat = self.order[target][flat + start].astype(flat.dtype)
            out[leaf] = flat[self.pooled_position(group)]
        return out

    def __repr__(self) -> str:
        total = {g: sum(n) for g, n in self.sizes.items()}
        head = f"Silos: {len(self)} silos, " + ", ".join(
            f"{n} rows of {g!r}" for g, n in total.items()
        )
        width = max(len(n) for n in self.names)
        lines = [head]
        shown = range(len(self)) if len(self) <= 12 else [*range(10), len(self) - 1]
        for s in shown:
            if len(self) > 12 and s == len(self) - 1:
                lines.append("  ...")
            lines.append(
                f"  {self.names[s]:<{width}}  "
                + "  ".join(f"{g}={n[s]}" for g, n in self.sizes.items())
            )
        lines += [f"  {line}" for line in self.row_lines()]
        lines += [f"  {leaf}: shared" for leaf in self.shared]
        return "\n".join(lines)

    def row_lines(self) -> list[str]:
        """Each row argument's type, row group and trailing shape, for a repr."""
        lines = []
        for leaf, flat in self.rows.items():
            note = f", index into {self.index[leaf]!r}" if leaf in self.index else ""
            shape = (f"{self.group[leaf]!r}", *map(str, flat.shape[1:]))
            lines.append(f"{leaf}: {flat.dtype}[{', '.join(shape)}]{note}")
        return lines

    def with_shared(self, **values: Any) -> Self:
        """The same silos with further shared arguments (pytrees of arrays)."""
        names = tuple(sorted({*self._arrays, *values}))
        arrays = {**{k: self.shared[k] for k in self._arrays}, **values}
        aux = list(self._aux())
        aux[1] = names
        aux[6] = tuple((k, v) for k, v in aux[6] if k not in values)
        return self.tree_unflatten(tuple(aux), (self.rows, self.order, arrays))

    def like(
        self,
        names: tuple[str, ...],
        sizes: Mapping[str, Sequence[int]],
        rows: dict[str, Any],
        order: dict[str, Array],
    ) -> "Silos":
        """Return silos of the same kind, with these names, sizes and rows, and the same shared
        arguments.
        """
        aux = list(Silos._aux(self))
        aux[0], aux[4] = names, tuple(sorted((g, tuple(n)) for g, n in sizes.items()))
        return Silos.tree_unflatten(
            tuple(aux), (rows, order, {k: self.shared[k] for k in self._arrays})
        )

    def as_one(self) -> Self:
        """All rows as those of a single silo, where they are."""
        aux = list(self._aux())
        aux[0] = ("all",)
        aux[4] = tuple((g, (sum(n),)) for g, n in self.sizes.items())
        rows = dict(self.rows)
        for leaf, target in self.index.items():
            start = self.offsets(target)[self.silo_of_row(self.group[leaf])]
            rows[leaf] = rows[leaf] + start.astype(rows[leaf].dtype)
        arrays = {k: self.shared[k] for k in self._arrays}
        return self.tree_unflatten(tuple(aux), (rows, self.order, arrays))

    # JAX pytree: arrays are children; what shapes depend on is static.

    def _aux(self) -> tuple:
        static = {k: v for k, v in self.shared.items() if k not in self._arrays}
        return (
            self.names,
            self._arrays,
            self.guessed,
            *(tuple(sorted(d.items())) for d in (self.group, self.sizes, self.index)),
            tuple(sorted(static.items())),
        )

    def tree_flatten(self) -> tuple[tuple, tuple]:
        arrays = {k: self.shared[k] for k in self._arrays}
        return (self.rows, self.order, arrays), self._aux()

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> Self:
        self = cls.__new__(cls)
        self.names, self._arrays, self.guessed = aux[:3]
        self.group, self.sizes, self.index = (dict(pairs) for pairs in aux[3:6])
        self.rows, self.order, arrays = children
        self.shared = {**arrays, **dict(aux[6])}
        return self

    # numpyro.infer.MCMC caches compiled programs by its arguments, arrays standing for their id.

    def _key(self) -> tuple:
        leaves = jax.tree.leaves(self)
        return (self._aux(), tuple(x if isinstance(x, Hashable) else id(x) for x in leaves))

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Silos) and self._key() == other._key()


jax.tree_util.register_pytree_node(
    Silos, Silos.tree_flatten, lambda aux, children: Silos.tree_unflatten(aux, children)
)


def as_column(value: Any) -> Any:
    """A column of any library as a NumPy array; scalars and other objects as they are."""
    if np.ma.is_masked(value):
        raise ValueError(
            "expected columns without masked values; drop or impute such rows inside their silo"
        )
    if isinstance(value, Array) or hasattr(value, "__array__"):
        return np.asarray(value)
    return value


def put_together(
    names: tuple[str, ...],
    table: Mapping[str, Sequence[Any]],
    groups: Mapping[str, Sequence[str]],
    shared: dict[str, Any],
    index: dict[str, str],
    guessed: tuple[str, ...],
) -> tuple:
    """Columns of every silo, silo after silo, with what :class:`Silos` stores beside them."""
    sizes = {g: tuple(len(v) for v in table[leaves[0]]) for g, leaves in groups.items()}
    return (
        names,
        {leaf: _concatenated(table[leaf]) for leaves in groups.values() for leaf in leaves},
        shared,
        {leaf: g for g, leaves in groups.items() for leaf in leaves},
        sizes,
        {g: np.arange(sum(n), dtype=np.int32) for g, n in sizes.items()},
        index,
        guessed,
    )


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    """``np.concatenate`` to where JAX's arrays may begin, so that rows are copied once."""
    dtype = np.result_type(*parts)
    if dtype.kind not in "biufc":
        return np.concatenate(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    space = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNED, np.uint8)
    start = -space.ctypes.data % _ALIGNED
    out = space[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return np.concatenate(parts, out=out)
