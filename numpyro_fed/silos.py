"""Data in silos: what each silo calls the model with, and where its rows stand in the pooled data.

A :class:`Silos` holds, for every named silo, keyword arguments of one model. Arguments are of two kinds.
*Rows* are arrays whose leading axis runs over the elements of a silo plate; arrays over the same plate
form a *row group* and are stored once, flat, silo after silo, so that a minibatch of any silo is one gather
at ``offset + index``. Everything else is *shared*: the same in all silos.

An *index* argument holds positions in another row group (each row's district). Inside a silo it is numbered
from zero, in :attr:`Silos.pooled` it is numbered as in the pooled data.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["Silos"]


class Silos:
    """The data of several silos, as keyword arguments of one model.

    :param data: for every silo's name, the model's keyword arguments there. Arrays (NumPy, JAX, pandas or
        Arrow columns) whose leading axis differs between silos, or whose values do, are rows; arguments equal
        in all silos are shared.
    :param rows: the silo plate of each row argument, where sizes alone do not tell:
        ``{"x": "patients"}``.
    :param index: for an argument that holds positions in another silo plate, that plate's row group:
        ``{"district": "districts"}``. Its values count from zero inside each silo.
    :raises ValueError: for an empty silo, an argument that only some silos have, rows whose
        trailing shapes disagree, NaN or infinite values (naming silo, argument and row), an
        index that points outside its silo.

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
        if not isinstance(data, Mapping) or not all(isinstance(kwargs, Mapping) for kwargs in data.values()):
            raise ValueError(
                "expected {silo name: {argument: value}}, e.g. {'oslo': {'x': x, 'y': y}}, got "
                f"{type(data).__name__}; tables are split by fed.split(table, by=column)"
            )
        if not data:
            raise ValueError("expected at least one silo, got none")
        names = tuple(str(n) for n in data)
        if len(set(names)) < len(names):
            raise ValueError(f"expected silo names that differ, got {list(names)}")
        table = _same_arguments(dict(zip(names, data.values(), strict=True)))
        rows, index = dict(rows or {}), dict(index or {})
        unknown = {*rows, *index} - set(table)
        if unknown:
            raise ValueError(f"rows= and index= name arguments that data lack: {sorted(unknown)}")
        groups: dict[str, list[str]] = {}
        by_sizes: dict[tuple[int, ...], str] = {}
        shared: dict[str, Any] = {}
        told = {*rows, *index}
        differ = [leaf for leaf, values in table.items() if leaf in told or not _all_equal(values)]
        row_sizes = {_lengths(table[leaf]) for leaf in differ} - {None}
        if len(names) == 1 and not row_sizes:  # nothing differs: rows are as long as the first array
            row_sizes = {next((n for n in map(_lengths, table.values()) if n is not None), None)}
        for leaf, values in table.items():
            # equal values are shared, unless they are as long as rows are: labels may well be equal
            if leaf not in differ and _lengths(values) not in row_sizes:
                shared[leaf] = values[0]
                continue
            _check_rows(leaf, names, values)
            sizes = tuple(len(v) for v in values)
            name = rows.get(leaf) or by_sizes.get(sizes) or leaf
            if leaf not in rows:
                by_sizes[sizes] = name
            _check_sizes(leaf, sizes, groups.get(name, []), name, names, table)
            groups.setdefault(name, []).append(leaf)
        self._set(
            names,
            {leaf: np.concatenate(table[leaf]) for g in groups.values() for leaf in g},
            shared,
            {leaf: g for g, leaves in groups.items() for leaf in leaves},
            {g: tuple(len(v) for v in table[leaves[0]]) for g, leaves in groups.items()},
            {g: np.arange(sum(map(len, table[leaves[0]]))) for g, leaves in groups.items()},
            index,
            tuple(sorted(by_sizes.values())),
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
        _check_flat(names, rows, group, sizes, index)
        self.names, self.group, self.sizes, self.index = names, group, sizes, index
        self.guessed = guessed  # row groups told by their sizes alone
        # positions in int32: small integer types (pandas categories) overflow when silos are put together
        self.rows = {k: jnp.asarray(v, jnp.int32 if k in index else None) for k, v in rows.items()}
        self.order = {k: jnp.asarray(v, jnp.int32) for k, v in order.items()}
        self.shared = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in shared.items()}
        self._arrays = tuple(sorted(k for k, v in self.shared.items() if isinstance(v, Array)))
        for leaf, value in self.shared.items():
            if leaf in self._arrays and not np.isfinite(np.asarray(value, np.float64)).all():
                raise ValueError(f"shared argument {leaf!r}: expected finite numbers, got NaN or infinity")
            if not isinstance(value, (Array, Hashable)):
                raise ValueError(
                    f"argument {leaf!r}: expected an array or a hashable value, got "
                    f"{type(value).__name__}; a tuple in place of a list will do"
                )

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
        head = f"Silos: {len(self)} silos, " + ", ".join(f"{n} rows of {g!r}" for g, n in total.items())
        width = max(len(n) for n in self.names)
        lines = [head]
        shown = range(len(self)) if len(self) <= 12 else [*range(10), len(self) - 1]
        for s in shown:
            if len(self) > 12 and s == len(self) - 1:
                lines.append("  ...")
            lines.append(f"  {self.names[s]:<{width}}  " + "  ".join(f"{g}={n[s]}" for g, n in self.sizes.items()))
        for leaf, flat in self.rows.items():
            note = f", index into {self.index[leaf]!r}" if leaf in self.index else ""
            shape = (f"{self.group[leaf]!r}", *map(str, flat.shape[1:]))
            lines.append(f"  {leaf}: {flat.dtype}[{', '.join(shape)}]{note}")
        lines += [f"  {leaf}: shared" for leaf in self.shared]
        return "\n".join(lines)

    def with_shared(self, **values: Any) -> Self:
        """The same silos with further shared arguments (pytrees of arrays)."""
        names = tuple(sorted({*self._arrays, *values}))
        arrays = {**{k: self.shared[k] for k in self._arrays}, **values}
        aux = list(self._aux())
        aux[1] = names
        aux[6] = tuple((k, v) for k, v in aux[6] if k not in values)
        return self.tree_unflatten(tuple(aux), (self.rows, self.order, arrays))

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


jax.tree_util.register_pytree_node(Silos, Silos.tree_flatten, lambda aux, children: Silos.tree_unflatten(aux, children))


def as_column(value: Any) -> Any:
    """A column of any library as a NumPy array; scalars and other objects as they are."""
    if np.ma.is_masked(value):
        raise ValueError("expected columns without masked values; drop or impute such rows inside their silo")
    if isinstance(value, Array) or hasattr(value, "__array__"):
        return np.asarray(value)
    return value


def _same_arguments(data: dict[str, Mapping[str, Any]]) -> dict[str, list]:
    first = next(iter(data))
    for name, kwargs in data.items():
        if set(kwargs) != set(data[first]):
            raise ValueError(
                f"silo {name!r}: expected the arguments {sorted(data[first])} as in silo {first!r}, "
                f"got {sorted(kwargs)}"
            )
    return {leaf: [as_column(kwargs[leaf]) for kwargs in data.values()] for leaf in data[first]}


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, np.ndarray):
        return all(np.array_equal(first, v) for v in values[1:])
    return all(type(v) is type(first) and v == first for v in values)


def _lengths(values: Sequence[Any]) -> tuple[int, ...] | None:
    if all(isinstance(v, np.ndarray) and v.ndim for v in values):
        return tuple(len(v) for v in values)
    return None


def _check_rows(leaf: str, names: tuple[str, ...], values: Sequence[Any]) -> None:
    for name, v in zip(names, values, strict=True):
        if not isinstance(v, np.ndarray) or v.ndim == 0:
            raise ValueError(
                f"argument {leaf!r} differs between silos, so it must be an array of rows; silo {name!r} has "
                f"{v!r}. Give it one row per element of a silo plate, or the same value everywhere"
            )
        if v.shape[1:] != values[0].shape[1:]:
            raise ValueError(
                f"argument {leaf!r}: rows of silo {name!r} have shape {v.shape[1:]}, those of silo "
                f"{names[0]!r} {values[0].shape[1:]}; expected equal shapes after the leading axis"
            )


def _check_sizes(
    leaf: str,
    sizes: tuple[int, ...],
    others: Sequence[str],
    group: str,
    names: tuple[str, ...],
    table: Mapping[str, Sequence[Any]],
) -> None:
    """Rows of one group must be as many in every silo: equal totals alone would tear silos apart."""
    for other in others[:1]:
        for name, own, v in zip(names, sizes, table[other], strict=True):
            if own != len(v):
                raise ValueError(
                    f"silo {name!r}, argument {leaf!r}: expected {len(v)} rows as {other!r} has of {group!r}, got {own}"
                )


def _check_flat(
    names: tuple[str, ...],
    rows: dict[str, np.ndarray],
    group: dict[str, str],
    sizes: dict[str, tuple[int, ...]],
    index: dict[str, str],
) -> None:
    for g, n in sizes.items():
        if min(n) == 0:
            raise ValueError(f"silo {names[n.index(0)]!r} is empty: it has no row of {g!r}; leave it out")
    for leaf, values in rows.items():
        n = sizes[group[leaf]]
        starts = np.cumsum(n) - np.asarray(n)
        silo = np.repeat(np.arange(len(names)), n)

        def place(row: int, silo: np.ndarray = silo, starts: np.ndarray = starts, leaf: str = leaf) -> str:
            return f"silo {names[silo[row]]!r}, argument {leaf!r}, row {row - starts[silo[row]]}"

        _check_values(leaf, values, place)
        if leaf in index:
            if index[leaf] not in sizes:
                raise ValueError(
                    f"index={{{leaf!r}: {index[leaf]!r}}}: no argument has rows of {index[leaf]!r}; give one, "
                    f'e.g. np.arange(number of {index[leaf]}) with rows={{...: "{index[leaf]}"}}'
                )
            if not np.issubdtype(values.dtype, np.integer):
                raise ValueError(f"argument {leaf!r}: expected integers, got {values.dtype}")
            bad = (values < 0) | (values >= np.asarray(sizes[index[leaf]])[silo])
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(
                    f"{place(row)}: index {values[row]} is outside the silo's "
                    f"{sizes[index[leaf]][silo[row]]} elements of {index[leaf]!r}"
                )


def _check_values(leaf: str, values: np.ndarray, place: Callable[[int], str]) -> None:
    if values.dtype == object or values.dtype.kind in "USMm":
        raise ValueError(f"argument {leaf!r}: expected numbers, got {values.dtype}; encode it first")
    stored = jax.dtypes.canonicalize_dtype(values.dtype)
    if values.dtype.kind in "iu" and values.size:
        limits = np.iinfo(stored)
        if values.min() < limits.min or values.max() > limits.max:
            raise ValueError(
                f"argument {leaf!r}: {values.min()} to {values.max()} does not fit into {stored}; divide it, make it "
                "floating-point, or enable float64 (numpyro.enable_x64())"
            )
    if values.dtype.kind in "fc":
        with np.errstate(over="ignore"):  # what float64 holds and float32 does not becomes infinite
            finite = np.isfinite(values.astype(stored).reshape(len(values), -1)).all(axis=1)
        if not finite.all():
            raise ValueError(
                f"{place(int(np.argmin(finite)))}: expected finite numbers, got NaN or infinity; "
                "drop or impute such rows inside their silo"
            )
