"""Silos of different structure: data for which one model takes different branches.

A compiled program depends on a silo's *structure*: which arguments the silo has, the values of
arguments that are not arrays, and the type and trailing shape of its rows. Silos of one structure
form a :class:`~numpyro_fed.data.silos.Silos`. The joint density is a product over structures c and
over the silos s of each,

    p(theta, z, y) = p(theta) * prod_c prod_{s in c} p_c(y_s, z_s | theta),

with the same global sites theta in all of them. All silos together decide which arguments are
rows, and of which plate, because a single silo shows no differences.
"""

from collections.abc import Hashable, Iterator, Mapping

import jax
import numpy as np

from numpyro_fed._typing import Column, ModelArgs
from numpyro_fed.data.checks import all_equal, check_numbers, check_sizes, check_told, silo_names
from numpyro_fed.data.columns import columns_of_silos
from numpyro_fed.data.silos import Silos, put_together

_SHOWN_NAMES = 8
_Table = dict[str, dict[str, Column]]  # argument -> silo that has it -> column
_Span = dict[str, int]  # number of rows in each silo that has the argument


class MixedSilos:
    """Data of silos that differ in their arguments or in static (non-array) values.

    A silo lacks an argument that is absent or ``None``. An argument *differs* if two silos that
    have it hold different values, or if ``rows`` or ``index`` names it. A differing argument is
    rows if it is an array; otherwise it sets structures apart. Row arguments belong to one group if
    their lengths agree in every silo that has both. An argument that does not differ is shared,
    unless it is as long as the rows of a group in each of its silos.

    :param data: the model's keyword arguments of each silo, by silo name, as for :class:`Silos`.
    :param rows: the silo plate of each row argument, needed where lengths alone do not decide it.
    :param index: the row group that an argument of positions points to; the positions count from
        zero inside each silo.
    :ivar names: all silos, in the order of ``data``.
    :ivar parts: a :class:`Silos` for each structure, in the order of the structures' first silos.
    :ivar places: for each silo the number of its part, and its number within that part.
    :raises ValueError: for data that are not ``{silo: {argument: value}}``, a silo without rows, an
        argument that may belong to two row groups, and a differing array without a leading axis;
        also where :class:`Silos` raises one.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> silos = fed.MixedSilos({
        ...     "oslo": {"y": np.zeros(3)},
        ...     "rome": {"y": np.ones(2), "proxy": np.ones(2)},
        ...     "bern": {"y": np.ones(4)},
        ... })
        >>> [part.names for part in silos.parts], silos.places
        ([('oslo', 'bern'), ('rome',)], ((0, 0), (1, 0), (0, 1)))
    """

    names: tuple[str, ...]
    parts: tuple[Silos, ...]
    places: tuple[tuple[int, int], ...]

    def __init__(
        self,
        data: Mapping[str, object],
        *,
        rows: Mapping[str, str] | None = None,
        index: Mapping[str, str] | None = None,
    ) -> None:
        self.names = silo_names(data)
        rows, index = dict(rows or {}), dict(index or {})
        silos = columns_of_silos(self.names, data)
        leaves = list(dict.fromkeys(leaf for kwargs in silos.values() for leaf in kwargs))
        check_told(rows, index, leaves)
        table = {k: {n: kw[k] for n, kw in silos.items() if kw.get(k) is not None} for k in leaves}
        for leaf, values in table.items():
            check_numbers(leaf, values.values())
        group, guessed = _row_groups(table, rows, {*rows, *index}, len(silos))
        members: dict[tuple, list[str]] = {}
        for name in self.names:
            members.setdefault(_structure(name, table, group, index), []).append(name)
        # a model may branch on None, so it gets each None that a silo of the structure has
        nones = {
            n: {leaf for leaf, v in kwargs.items() if v is None} for n, kwargs in silos.items()
        }
        self.parts = tuple(
            _part(own, table, {leaf for n in own for leaf in nones[n]}, group, guessed, index)
            for own in members.values()
        )
        place = {name: (p, s) for p, part in enumerate(self.parts) for s, name in enumerate(part)}
        self.places = tuple(place[name] for name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> ModelArgs:
        """Return the keyword arguments of one silo."""
        name = str(name)
        if name not in self.names:
            raise KeyError(f"no silo {name!r}; there are {list(self.names)}")
        return self.parts[self.places[self.names.index(name)][0]][name]

    def __repr__(self) -> str:
        lines = [
            f"MixedSilos: {len(self)} silos, {len(self.parts)} "
            f"structure{'s' * (len(self.parts) > 1)}"
        ]
        for p, part in enumerate(self.parts):
            more = f", ... {part.names[-1]}" if len(part) > _SHOWN_NAMES else ""
            head = ", ".join(part.names[: _SHOWN_NAMES - 1] if more else part.names)
            total = ", ".join(f"{sum(n)} rows of {g!r}" for g, n in part.sizes.items())
            lines.append(f"  {p}: {len(part)} silo{'s' * (len(part) > 1)} ({head}{more}), {total}")
            lines += [f"    {line}" for line in part.row_lines()]
            for leaf, value in part.shared.items():
                lines.append(
                    f"    {leaf}: " + ("shared" if isinstance(value, jax.Array) else f"{value!r}")
                )
        return "\n".join(lines)


def _row_groups(
    table: _Table, rows: dict[str, str], told: set[str], num_silos: int
) -> tuple[dict[str, str], frozenset[str]]:
    """Return each row argument's group, and the groups that follow from lengths alone.

    Lengths in all silos count, whatever the structure.
    """
    spans = {leaf: _span(leaf, column, leaf in told) for leaf, column in table.items()}
    arrays = [leaf for leaf, span in spans.items() if span]
    differ = [leaf for leaf in arrays if leaf in told or _differs(table[leaf])]
    if num_silos == 1 and not differ:  # one silo shows no difference: the first array is rows
        differ = arrays[:1]
    named: dict[str, _Span] = {}
    for leaf in differ:
        if leaf in rows:
            named[rows[leaf]] = {**spans[leaf], **named.get(rows[leaf], {})}
    guessed: list[tuple[set[str], _Span]] = []
    # first the arguments of many silos: they link those that only a few silos have
    for leaf in sorted(
        (leaf for leaf in differ if leaf not in rows), key=lambda leaf: -len(spans[leaf])
    ):
        _join(guessed, leaf, spans[leaf])
    known = [*named.values(), *(span for _, span in guessed)]
    # labels may be equal in all silos, so an equal array as long as rows counts as rows
    for leaf in arrays:
        if leaf not in differ and any(spans[leaf].items() <= span.items() for span in known):
            _join(guessed, leaf, spans[leaf])
    group = {leaf: g for leaf, g in rows.items() if leaf in differ}
    for leaves, _ in guessed:
        first = next(leaf for leaf in table if leaf in leaves)
        group.update(dict.fromkeys(leaves, first))
    return group, frozenset(g for leaf, g in group.items() if leaf not in rows)


def _differs(column: Mapping[str, Column]) -> bool:
    values = list(column.values())
    return len({isinstance(v, np.ndarray) for v in values}) > 1 or not all_equal(values)


def _span(leaf: str, column: Mapping[str, Column], told: bool) -> _Span:
    """Return the number of rows in every silo where the argument is an array.

    The result is empty where the argument is a scalar in every silo.
    """
    for name, v in column.items():
        if told and not isinstance(v, np.ndarray):
            raise ValueError(
                f"silo {name!r}, argument {leaf!r}: expected an array of rows, as rows= or index= "
                f"say, got {v!r}"
            )
        if not isinstance(v, np.ndarray | Hashable):
            raise ValueError(
                f"silo {name!r}, argument {leaf!r}: expected an array or a hashable value, got "
                f"{type(v).__name__}; use a tuple in place of a list"
            )
        if isinstance(v, np.ndarray) and v.ndim == 0 and (told or _differs(column)):
            raise ValueError(
                f"silo {name!r}, argument {leaf!r}: expected an array with a leading axis, since "
                f"it differs between silos or rows= or index= names it, got {v!r}; give one row "
                "per element of a silo plate, or a plain Python value (.item()), which makes a "
                "structure of its own"
            )
    return {name: len(v) for name, v in column.items() if isinstance(v, np.ndarray) and v.ndim}


def _join(groups: list[tuple[set[str], _Span]], leaf: str, span: _Span) -> None:
    """Add an argument to the group whose lengths agree with it, and merge groups that it links."""
    leaves, total, others = {leaf}, dict(span), []
    for members, other in groups:
        common = span.keys() & other.keys()
        if not common or any(span[name] != other[name] for name in common):
            others.append((members, other))
            continue
        for name in total.keys() & other.keys():
            if total[name] != other[name]:
                raise ValueError(
                    f"argument {leaf!r} has as many rows as {sorted(leaves - {leaf})} and as "
                    f"{sorted(members)}, which differ in silo {name!r}; expected its silo plate "
                    f"by name: rows={{{leaf!r}: ...}}"
                )
        leaves |= members
        total.update(other)
    groups[:] = [*others, (leaves, total)]


def _structure(
    name: str, table: _Table, group: Mapping[str, str], index: Mapping[str, str]
) -> tuple:
    """Return what a compiled program depends on, except for numbers of rows."""
    out: list[tuple] = []
    for leaf, column in table.items():
        if name not in column:
            continue
        value = column[name]
        if not isinstance(value, np.ndarray):
            out.append((leaf, type(value), value))
        elif leaf in group:
            out.append((leaf, _stored(value.dtype, leaf in index), value.shape[1:]))
        else:
            out.append((leaf,))
    return tuple(out)


def _stored(dtype: np.dtype, is_index: bool) -> np.dtype:
    if is_index and np.issubdtype(dtype, np.integer):
        return np.dtype(np.int32)
    return dtype if dtype.kind in "OUSMm" else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _part(
    names: list[str],
    table: _Table,
    nones: set[str],
    group: Mapping[str, str],
    guessed: frozenset[str],
    index: Mapping[str, str],
) -> Silos:
    """Return the silos of one structure, with rows in the groups of all silos."""
    own = {leaf: [column[n] for n in names] for leaf, column in table.items() if names[0] in column}
    shared: ModelArgs = {}
    groups: dict[str, list[str]] = {}
    for leaf in table:
        if leaf not in own:
            shared.update({leaf: None} if leaf in nones else {})
            continue
        values = own[leaf]
        if leaf not in group or not isinstance(values[0], np.ndarray):
            shared[leaf] = values[0]
            continue
        g = group[leaf]
        check_sizes(leaf, tuple(map(len, values)), groups.get(g, []), g, tuple(names), own)
        groups.setdefault(g, []).append(leaf)
    if not groups:
        raise ValueError(
            f"silos {names}: expected at least one argument with rows, got only shared or static "
            f"ones {sorted(shared)}; name an argument in rows= if it is rows but equal in all silos"
        )
    parts_index = {leaf: g for leaf, g in index.items() if leaf in own}
    return Silos.from_flat(
        put_together(
            tuple(names), own, groups, shared, parts_index, tuple(sorted(guessed & groups.keys()))
        )
    )
