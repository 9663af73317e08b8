"""Data in silos: each silo's keyword arguments of the model, and its rows' places in pooled data.

A :class:`Silos` holds the keyword arguments of one model for every named silo. An argument is
either rows or shared. *Rows* are arrays whose leading axis runs over the elements of a silo plate.
Arrays over the same plate form a *row group* and are stored once, flat, silo after silo. A
minibatch of any silo is then one gather at ``offset + index``. A *shared* argument is equal in all
silos.

An *index* argument holds positions in another row group (each row's district). Inside a silo these
count from the silo's first element; in :attr:`Silos.pooled` they count over all pooled elements.
"""

import copy
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed._typing import Column, ModelArgs, PyTree
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
from numpyro_fed.data.columns import columns_of_silos
from numpyro_fed.data.spec import SilosSpec

_ALIGNED = 64  # bytes; JAX uses NumPy's memory without a copy where it is so aligned


class Flat(NamedTuple):
    """Parts of a :class:`Silos`: flat columns, silo after silo, and their groups."""

    names: tuple[str, ...]
    rows: dict[str, np.ndarray]
    shared: ModelArgs
    group: dict[str, str]
    sizes: dict[str, tuple[int, ...]]
    order: dict[str, np.ndarray]
    targets: dict[str, str]  # the row group that each index argument points to
    guessed: tuple[str, ...] = ()


class Silos:
    """Data of several silos, as keyword arguments of one model.

    :param data: the model's keyword arguments of each silo, by silo name: a dict, or a pandas or an
        Arrow table with a column for each argument. Arrays whose leading axis or values differ
        between silos are rows. Arguments that are equal in all silos are shared, unless they are as
        long as rows are.
    :param rows: the silo plate of each row argument, needed where sizes alone do not decide it:
        ``{"x": "patients"}``.
    :param index: the row group that an argument of positions points to:
        ``{"district": "districts"}``. The positions count from zero inside each silo.
    :raises ValueError: for an empty silo, missing arguments, rows of different trailing shapes, and
        indices outside their silo; for NaN, infinite or non-numeric values (naming silo, argument
        and row).
    :warns UserWarning: where rounding to float32 moves numbers by much of their spread.

    The object is a JAX pytree (its arrays are leaves), so it may be passed through :func:`jax.jit`.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> silos = fed.Silos({"oslo": {"y": np.ones(3)}, "rome": {"y": np.zeros(2)}})
        >>> silos.names, silos.pooled["y"].shape
        (('oslo', 'rome'), (5,))
    """

    names: tuple[str, ...]
    rows: dict[str, Array]
    shared: ModelArgs
    order: dict[str, Array]
    group: dict[str, str]
    sizes: dict[str, tuple[int, ...]]
    index: dict[str, str]
    guessed: tuple[str, ...]
    _arrays: tuple[str, ...]

    def __init__(
        self,
        data: Mapping[str, object],
        *,
        rows: Mapping[str, str] | None = None,
        index: Mapping[str, str] | None = None,
    ) -> None:
        names = silo_names(data)
        given = columns_of_silos(names, data)
        check_same_arguments(given)
        table = {leaf: [kwargs[leaf] for kwargs in given.values()] for leaf in given[names[0]]}
        for leaf, values in table.items():
            check_numbers(leaf, values)
        rows, index = dict(rows or {}), dict(index or {})
        check_told(rows, index, table)
        groups: dict[str, list[str]] = {}
        by_sizes: dict[tuple[int, ...], str] = {}
        shared: ModelArgs = {}
        told = {*rows, *index}
        differ = [leaf for leaf, values in table.items() if leaf in told or not all_equal(values)]
        row_sizes = {lengths(table[leaf]) for leaf in differ} - {None}
        # one silo shows no difference: rows are as long as the first array
        if len(names) == 1 and not row_sizes:
            row_sizes = {next((n for n in map(lengths, table.values()) if n is not None), None)}
        for leaf, values in table.items():
            # labels may be equal in all silos, so equal values as long as rows are not shared
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
            put_together(names, table, groups, shared, index, tuple(sorted(by_sizes.values())))
        )

    @classmethod
    def from_flat(cls, flat: Flat) -> Self:
        """Return silos of flat columns, after the checks of their values."""
        self = cls.__new__(cls)
        self._set(flat)
        return self

    def _set(self, flat: Flat) -> None:
        names, rows, shared, group, sizes, order, index, guessed = flat
        if not rows:
            raise ValueError(
                "expected at least one argument with rows that differ between silos, got only "
                f"shared arguments {sorted(shared)}"
            )
        check_flat(names, rows, group, sizes, index)
        self.names, self.group, self.sizes, self.index = names, group, sizes, index
        self.guessed = guessed  # row groups that follow from sizes alone
        # positions become int32, as small integer types (pandas categories) would overflow over
        # all silos; other rows are used without a copy where JAX can do so
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
        """Return the flat position of each silo's first row of a group, shape ``(S,)``."""
        sizes = np.asarray(self.sizes[group])
        return np.cumsum(sizes) - sizes

    def silo_of_row(self, group: str) -> np.ndarray:
        """Return the silo number of each flat row of a group."""
        return np.repeat(np.arange(len(self)), self.sizes[group])

    def __getitem__(self, name: str) -> ModelArgs:
        """Return the keyword arguments of one silo."""
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
        """Return the flat position of each pooled row of a group (the inverse of ``order``)."""
        order = self.order[group]
        return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))

    @property
    def pooled(self) -> ModelArgs:
        """Keyword arguments of the model for all data at once, rows in their original order."""
        return {**self.shared, **_pooled_rows(self)}

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
        """Return a line for each row argument: its type, row group and trailing shape."""
        lines = []
        for leaf, flat in self.rows.items():
            note = f", index into {self.index[leaf]!r}" if leaf in self.index else ""
            shape = (f"{self.group[leaf]!r}", *map(str, flat.shape[1:]))
            lines.append(f"{leaf}: {flat.dtype}[{', '.join(shape)}]{note}")
        return lines

    @property
    def shared_arrays(self) -> dict[str, PyTree]:
        """Shared arguments that are arrays, or pytrees of arrays."""
        return {k: self.shared[k] for k in self._arrays}

    @property
    def spec(self) -> SilosSpec:
        """Facts on which shapes and compiled programs depend."""
        static = {k: v for k, v in self.shared.items() if k not in self._arrays}
        mappings = (self.group, self.sizes, self.index, static)
        return SilosSpec.of_mappings(self.names, self._arrays, self.guessed, *mappings)

    @classmethod
    def from_spec(
        cls,
        spec: SilosSpec,
        rows: dict[str, PyTree],
        order: dict[str, PyTree],
        shared_arrays: dict[str, PyTree],
    ) -> Self:
        """Return silos of these facts, rows and shared arrays, which are not checked."""
        return cls.__new__(cls)._filled(spec, rows, order, shared_arrays)

    def _filled(
        self,
        spec: SilosSpec,
        rows: dict[str, PyTree],
        order: dict[str, PyTree],
        shared_arrays: dict[str, PyTree],
    ) -> Self:
        self.names, self._arrays, self.guessed = spec.names, spec.arrays, spec.guessed
        self.group, self.sizes, self.index = dict(spec.group), dict(spec.sizes), dict(spec.index)
        self.rows, self.order = rows, order
        self.shared = {**shared_arrays, **dict(spec.static)}
        return self

    def with_shared(self, **values: PyTree) -> Self:
        """Return these silos with further shared arguments (pytrees of arrays)."""
        spec = self.spec.without(*values)
        spec = replace(spec, arrays=tuple(sorted({*spec.arrays, *values})))
        arrays = {**self.shared_arrays, **values}
        return copy.copy(self)._filled(spec, self.rows, self.order, arrays)

    def like(
        self,
        names: tuple[str, ...],
        sizes: Mapping[str, Sequence[int]],
        rows: dict[str, PyTree],
        order: dict[str, Array],
    ) -> "Silos":
        """Return silos of other names, sizes and rows, with these silos' shared arguments."""
        return Silos.from_spec(self.spec.of(names, sizes), rows, order, self.shared_arrays)

    def among(self, names: Sequence[str]) -> "Silos":
        """Return some of the silos."""
        numbers = [self.names.index(name) for name in names]
        places = {
            group: np.concatenate([self.offsets(group)[n] + np.arange(sizes[n]) for n in numbers])
            for group, sizes in self.sizes.items()
        }
        rows = {leaf: x[places[self.group[leaf]]] for leaf, x in self.rows.items()}
        order = {  # ranks among the rows that are left
            group: jnp.asarray(np.argsort(np.argsort(np.asarray(x)[places[group]])))
            for group, x in self.order.items()
        }
        return Silos.from_spec(self.spec.among(names), rows, order, self.shared_arrays)

    def as_one(self) -> Self:
        """Return a single silo that has all rows, in their flat order."""
        rows = dict(self.rows)
        for leaf, target in self.index.items():
            start = self.offsets(target)[self.silo_of_row(self.group[leaf])]
            rows[leaf] = rows[leaf] + start.astype(rows[leaf].dtype)
        spec = self.spec.of(("all",), {g: (sum(n),) for g, n in self.sizes.items()})
        return copy.copy(self)._filled(spec, rows, self.order, self.shared_arrays)

    # JAX pytree: arrays are children, and all that shapes depend on is static

    def tree_flatten(self) -> tuple[tuple, SilosSpec]:
        """Return arrays and static facts: programs are compiled anew where the facts differ."""
        return (self.rows, self.order, self.shared_arrays), self.spec

    @classmethod
    def tree_unflatten(cls, spec: SilosSpec, children: tuple) -> Self:
        """Rebuild silos without the checks of ``__init__``, because leaves may be tracers."""
        return cls.from_spec(spec, *children)

    # numpyro.infer.MCMC caches compiled programs by its arguments; arrays count by id

    def _key(self) -> tuple:
        leaves = jax.tree.leaves(self)
        return (
            self.tree_flatten()[1],
            tuple(x if isinstance(x, Hashable) else id(x) for x in leaves),
        )

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Silos) and self._key() == other._key()


jax.tree_util.register_pytree_node(
    Silos, Silos.tree_flatten, lambda spec, children: Silos.tree_unflatten(spec, children)
)


@jax.jit
def _pooled_rows(silos: Silos) -> dict[str, Array]:
    """Return the rows in their pooled order, and indices as pooled positions."""
    out = {}
    for leaf, flat in silos.rows.items():
        group = silos.group[leaf]
        if leaf in silos.index:
            target = silos.index[leaf]
            start = jnp.asarray(silos.offsets(target))[silos.silo_of_row(group)]
            flat = silos.order[target][flat + start].astype(flat.dtype)
        out[leaf] = flat[silos.pooled_position(group)]
    return out


def put_together(
    names: tuple[str, ...],
    table: Mapping[str, Sequence[Column]],
    groups: Mapping[str, Sequence[str]],
    shared: ModelArgs,
    index: dict[str, str],
    guessed: tuple[str, ...],
) -> Flat:
    """Return the parts of a :class:`Silos` from the silos' columns."""
    sizes = {g: tuple(len(v) for v in table[leaves[0]]) for g, leaves in groups.items()}
    return Flat(
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
    """Concatenate arrays in memory aligned for JAX, so that rows are copied only once."""
    dtype = np.result_type(*parts)
    if dtype.kind not in "biufc":
        return np.concatenate(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    space = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNED, np.uint8)
    start = -space.ctypes.data % _ALIGNED
    out = space[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return np.concatenate(parts, out=out)
