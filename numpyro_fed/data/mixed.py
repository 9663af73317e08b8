"""Silos of different structure: data for which one model takes different branches.

A silo's *structure* is what a compiled program depends on: which arguments it has, the values of
those that are no arrays, and the type and trailing shape of its rows. Silos of one structure are a
:class:`~numpyro_fed.data.silos.Silos`, and the joint density is a product over structures c of
products over their silos,

    p(theta, z, y) = p(theta) * prod_c prod_{s in c} p_c(y_s, z_s | theta),

with the same global sites theta in all of them. Which arguments are rows, and of which plate, is
decided over all silos at once: a structure of a single silo could only guess.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from numpyro_fed.data.checks import all_equal, check_numbers, check_sizes, check_told, silo_names
from numpyro_fed.data.silos import Silos, as_column, put_together

__all__ = ["MixedSilos"]

_SHOWN_NAMES = 8
_Table = dict[str, dict[str, Any]]  # argument -> silo -> column, where the silo has it
_Span = dict[str, int]  # number of rows in each silo that has the argument


class MixedSilos:
    """The data of silos that do not all have the same arguments, or differ in static (non-array)
    ones.

    An argument that is absent or ``None`` is lacking. One that differs in value between any two
    silos that have it, or that ``rows`` or ``index`` names, is rows where it is an array, and sets
    structures apart where it is not. Row arguments whose lengths agree in every silo that has both
    belong to one group. An argument that is equal in all silos that have it is shared, unless it is
    as long as the rows of a group in each of them.

    :param data: for every silo's name, the model's keyword arguments there, as for :class:`Silos`.
    :param rows: the silo plate of each row argument, where lengths alone do not tell.
    :param index: for an argument that holds positions in another silo plate, that plate's row
        group; its values count from zero inside each silo.
    :ivar names: all silos, in the order given.
    :ivar parts: silos of one structure each, structures in the order of their first silo.
    :ivar places: for each silo its part's number, and its number within that part.
    :raises ValueError: for data that are no ``{silo: {argument: value}}``, a silo without rows, an
        argument that may belong to two row groups, a differing array without a leading axis, and
        what :class:`Silos` refuses.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> silos = fed.MixedSilos({
        ...     "oslo": {"y": np.zeros(3)}, "rome": {"y": np.ones(2), "proxy": np.ones(2)}, "bern": {"y": np.ones(4)}
        ... })
        >>> [part.names for part in silos.parts], silos.places
        ([('oslo', 'bern'), ('rome',)], ((0, 0), (1, 0), (0, 1)))
    """

    names: tuple[str, ...]
    parts: tuple[Silos, ...]
    places: tuple[tuple[int, int], ...]

    def __init__(
        self,
        data: Mapping[str, Mapping[str, Any]],
        *,
        rows: Mapping[str, str] | None = None,
        index: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(data, Mapping):
            for name, kwargs in data.items():
                if not isinstance(kwargs, Mapping):
                    raise ValueError(
                        f"silo {name!r}: expected {{argument: value}}, got {type(kwargs).__name__}"
                    )
        self.names = silo_names(data)
        rows, index = dict(rows or {}), dict(index or {})
        silos = {
            n: {k: as_column(v) for k, v in kw.items()}
            for n, kw in zip(self.names, data.values(), strict=True)
        }
        leaves = list(dict.fromkeys(leaf for kwargs in silos.values() for leaf in kwargs))
        check_told(rows, index, leaves)
        table = {k: {n: kw[k] for n, kw in silos.items() if kw.get(k) is not None} for k in leaves}
        for leaf, values in table.items():
            check_numbers(leaf, values.values())
        group, guessed = _row_groups(table, rows, {*rows, *index}, len(silos))
        members: dict[tuple, list[str]] = {}
        for name in self.names:
            members.setdefault(_structure(name, table, group, index), []).append(name)
        # None is passed on where a silo of the structure has it: the model may want to be told
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

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The keyword arguments of one silo."""
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
    """The group of each row argument, decided over all silos, and the groups that lengths alone
    tell.
    """
    spans = {leaf: _span(leaf, column, leaf in told) for leaf, column in table.items()}
    arrays = [leaf for leaf, span in spans.items() if span]
    differ = [leaf for leaf in arrays if leaf in told or _differs(table[leaf])]
    if num_silos == 1 and not differ:  # nothing differs: rows are as long as the first array
        differ = arrays[:1]
    named: dict[str, _Span] = {}
    for leaf in differ:
        if leaf in rows:
            named[rows[leaf]] = {**spans[leaf], **named.get(rows[leaf], {})}
    guessed: list[tuple[set[str], _Span]] = []
    # an argument of many silos ties together those of few
    for leaf in sorted(
        (leaf for leaf in differ if leaf not in rows), key=lambda leaf: -len(spans[leaf])
    ):
        _join(guessed, leaf, spans[leaf])
    known = [*named.values(), *(span for _, span in guessed)]
    for leaf in arrays:  # equal values as long as rows are: labels may well be equal
        if leaf not in differ and any(spans[leaf].items() <= span.items() for span in known):
            _join(guessed, leaf, spans[leaf])
    group = {leaf: g for leaf, g in rows.items() if leaf in differ}
    for leaves, _ in guessed:
        first = next(leaf for leaf in table if leaf in leaves)
        group.update(dict.fromkeys(leaves, first))
    return group, frozenset(g for leaf, g in group.items() if leaf not in rows)


def _differs(column: Mapping[str, Any]) -> bool:
    values = list(column.values())
    return len({isinstance(v, np.ndarray) for v in values}) > 1 or not all_equal(values)


def _span(leaf: str, column: Mapping[str, Any], told: bool) -> _Span:
    """Number of rows in every silo where the argument is an array.

    None for one that is a scalar everywhere.
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
                f"{type(v).__name__}; a tuple in place of a list will do"
            )
        if isinstance(v, np.ndarray) and v.ndim == 0 and (told or _differs(column)):
            raise ValueError(
                f"silo {name!r}, argument {leaf!r}: expected an array with a leading axis, since "
                "it differs between "
                f"silos or rows= or index= names it, got {v!r}; give one row per element of a silo "
                "plate, or a plain "
                "Python value (.item()), which makes a structure of its own"
            )
    return {name: len(v) for name, v in column.items() if isinstance(v, np.ndarray) and v.ndim}


def _join(groups: list[tuple[set[str], _Span]], leaf: str, span: _Span) -> None:
    """Put an argument into the group whose lengths agree with its own, bringing together those that
    it links.
    """
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
                    f"{sorted(members)}, which "
                    f"differ in silo {name!r}; expected its silo plate by name: rows={{{leaf!r}: "
                    "...}"
                )
        leaves |= members
        total.update(other)
    groups[:] = [*others, (leaves, total)]


def _structure(
    name: str, table: _Table, group: Mapping[str, str], index: Mapping[str, str]
) -> tuple:
    """What a compiled program depends on, apart from numbers of rows."""
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
    """Silos of one structure, their rows as told."""
    own = {leaf: [column[n] for n in names] for leaf, column in table.items() if names[0] in column}
    shared: dict[str, Any] = {}
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
            "ones "
            f"{sorted(shared)}; where values of an argument are equal in all silos, rows= says "
            "that it is rows"
        )
    parts_index = {leaf: g for leaf, g in index.items() if leaf in own}
    return Silos._from_flat(
        *put_together(
            tuple(names), own, groups, shared, parts_index, tuple(sorted(guessed & groups.keys()))
        )
    )
