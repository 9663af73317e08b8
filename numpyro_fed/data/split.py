"""Split of pooled data into silos by a column of labels."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed._typing import Column, ModelArgs
from numpyro_fed.data.checks import check_numbers
from numpyro_fed.data.columns import columns_of
from numpyro_fed.data.silos import Flat, Silos


def split(
    data: Mapping[str, Column],
    *,
    by: ArrayLike,
    rows: Mapping[str, str] | None = None,
    index: Mapping[str, str] | None = None,
) -> Silos:
    """Split pooled data into silos by a column of labels.

    The silos keep each row's place in the pooled data.

    :param data: the model's keyword arguments (a dict, a pandas or an Arrow table). Arrays as long
        as ``by`` are rows, and the rest is shared, unless ``rows`` says otherwise. If ``by`` labels
        elements that ``index`` points to, arrays as long as the ``index`` argument are rows, too.
    :param by: the silo of each row: labels of shape ``(N,)``, or the name of a column of ``data``,
        which the model then does not get. Rows with the label ``-1`` are left out. If ``index``
        leads to another group, ``by`` may label either: the patients of hospitals, or the
        hospitals.
    :param rows: row group (name of the silo plate) of each row argument; needed if the data have
        several plates, e.g. ``{"x": "women", "district": "women", "districts": "districts"}``.
    :param index: the row group that an argument of positions points to:
        ``{"district": "districts"}``. If ``by`` labels the rows that point, their elements' silos
        follow from them; if ``by`` labels the elements, the rows' silos follow.
    :return: the silos, in the sorted order of their labels.
    :raises ValueError: where :class:`Silos` raises one; also for labels of another length, an
        element that rows of two silos point to, and an element that no row points to.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> y, hospital = np.arange(4.0), np.array(["oslo", "rome", "oslo", "rome"])
        >>> silos = fed.split({"y": y}, by=hospital)
        >>> silos["rome"]["y"].tolist(), silos.pooled["y"].tolist()
        ([1.0, 3.0], [0.0, 1.0, 2.0, 3.0])
    """
    columns = columns_of(data)
    rows, index = dict(rows or {}), dict(index or {})
    if isinstance(by, str):
        if by not in columns:
            raise ValueError(f"by={by!r} names no column of the data: {sorted(columns)}")
        by = columns.pop(by)
    for leaf, value in columns.items():
        check_numbers(leaf, [value])
    labels = np.asarray(by)
    if labels.dtype.kind == "U" and not hasattr(by, "dtype"):
        labels = np.asarray(by, object)  # in a list, NumPy makes NaN and numbers text, too
    if labels.ndim != 1 or len(labels) == 0:
        raise ValueError(f"by: expected labels of shape (N,) with N > 0, got {labels.shape}")
    _check_labels(labels)
    unknown = (set(rows) | set(index)) - set(columns)
    if unknown:
        raise ValueError(f"rows= and index= name arguments that data lack: {sorted(unknown)}")
    group = _row_groups(columns, rows, index, len(labels))
    primary = {g for leaf, g in group.items() if len(columns[leaf]) == len(labels)}
    if len(primary) > 1 and not index:
        raise ValueError(
            f"by= has {len(labels)} labels and the row groups {sorted(primary)} all have that many "
            "rows; expected index= to tell how one follows from the other"
        )
    names, silo_of = _silo_numbers(columns, labels, group, index)
    # checked before rows are taken, as excess rows would be dropped without a warning
    for leaf, g in group.items():
        if len(columns[leaf]) != len(silo_of[g]):
            raise ValueError(
                f"argument {leaf!r}: expected {len(silo_of[g])} rows as the other arguments of "
                f"{g!r}, got {len(columns[leaf])}"
            )
    order = {g: np.argsort(silo, kind="stable")[np.sum(silo < 0) :] for g, silo in silo_of.items()}
    sizes = {
        g: tuple(np.bincount(silo[silo >= 0], minlength=len(names)).tolist())
        for g, silo in silo_of.items()
    }
    flat = {leaf: columns[leaf][order[g]] for leaf, g in group.items()}
    for leaf, target in index.items():
        place = np.zeros(len(silo_of[target]), int)
        place[order[target]] = np.arange(len(order[target]))
        starts = np.cumsum(sizes[target]) - np.asarray(sizes[target])
        flat[leaf] = place[flat[leaf]] - starts[silo_of[group[leaf]][order[group[leaf]]]]
    # pooled positions count only the rows that are not left out
    position = {g: np.argsort(np.argsort(o)) for g, o in order.items()}
    shared = {k: v for k, v in columns.items() if k not in group}
    return Silos.from_flat(Flat(names, flat, shared, group, sizes, position, index))


def _check_labels(labels: np.ndarray) -> None:
    if labels.dtype.kind in "fO":
        import pandas as pd  # imported here because it is slow to import

        missing = np.asarray(pd.isna(labels))
        if missing.any():
            raise ValueError(
                f"by: row {int(np.argmax(missing))} has no label ({labels[np.argmax(missing)]}); "
                "expected each row's silo, or integer labels with -1 for rows to leave out"
            )
    if labels.dtype.kind == "O" and len({isinstance(x, str) for x in labels}) > 1:
        kinds = sorted({type(x).__name__ for x in labels})
        raise ValueError(f"by: expected text or numbers, got both: {kinds}; make all of them text")
    if labels.dtype.kind == "f" and (labels == -1).any():
        raise ValueError(
            "by: rows to leave out are marked by the integer -1, got floating-point labels; cast "
            "them"
        )
    if labels.dtype.kind in "iu" and (labels == -1).all():
        raise ValueError(
            "by: expected the silo of at least one row, got -1 (left out) for all of them"
        )


def _row_groups(
    columns: ModelArgs, rows: dict[str, str], index: dict[str, str], n: int
) -> dict[str, str]:
    group = dict(rows)
    for leaf in rows:
        if not isinstance(columns[leaf], np.ndarray) or columns[leaf].ndim == 0:
            raise ValueError(f"rows= names {leaf!r}, which is no array with a leading axis")
    named = {g for leaf, g in rows.items() if len(columns[leaf]) == n}
    lengths_of = {n: next(iter(named)) if len(named) == 1 else "rows"}
    # repeated, as labels may pass through several index arguments
    for leaf, target in [*index.items()] * len(index):
        if leaf in rows and any(
            g == target and len(columns[other]) in lengths_of for other, g in rows.items()
        ):
            lengths_of.setdefault(len(columns[leaf]), rows[leaf])
    for leaf, value in columns.items():
        if (
            leaf not in group
            and isinstance(value, np.ndarray)
            and value.ndim
            and len(value) in lengths_of
        ):
            group[leaf] = lengths_of[len(value)]
    for leaf in index:
        if leaf not in group:
            raise ValueError(
                f'index argument {leaf!r} is of no row group; expected rows={{"{leaf}": ...}}, the '
                "plate of its rows"
            )
    if not any(len(columns[leaf]) == n for leaf in group):
        lengths = {
            k: v.shape[:1] if isinstance(v, np.ndarray) else type(v).__name__
            for k, v in columns.items()
        }
        raise ValueError(f"by has {n} labels, but no argument is an array of {n} rows: {lengths}")
    return group


def _silo_numbers(
    columns: ModelArgs, labels: np.ndarray, group: dict[str, str], index: dict[str, str]
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Return silo names, and by group the silo number of each pooled row (-1: left out)."""
    kept = labels != -1 if np.issubdtype(labels.dtype, np.integer) else np.ones(len(labels), bool)
    unique = np.unique(labels[kept])
    names = tuple(str(u) for u in unique)
    numbers = np.where(kept, np.searchsorted(unique, labels), -1)
    labeled = {g for leaf, g in group.items() if len(columns[leaf]) == len(labels)}
    silo_of = dict.fromkeys(labeled - set(index.values()) or labeled, numbers)
    pending = {leaf for leaf in index}
    while pending:
        ready = sorted(leaf for leaf in pending if group[leaf] in silo_of)
        if not ready:
            below = sorted(leaf for leaf in pending if index[leaf] in silo_of)
            if not below:
                raise ValueError(
                    f"index arguments {sorted(pending)}: expected one that points from or to the "
                    f"group of by='s {len(labels)} labels"
                )
            pending.remove(below[0])
            elements = silo_of[index[below[0]]]
            silo_of[group[below[0]]] = elements[
                _positions(below[0], index[below[0]], columns, len(elements))
            ]
        for leaf in ready:
            pending.remove(leaf)
            target = index[leaf]
            found = _follow(leaf, target, columns, group, silo_of[group[leaf]], names)
            if target in silo_of and not np.array_equal(silo_of[target], found):
                element = int(np.argmax(silo_of[target] != found))
                raise ValueError(
                    f"index argument {leaf!r} and an earlier one put element {element} of "
                    f"{target!r} in two silos; expected every element, and all that points to it, "
                    "in one silo"
                )
            silo_of[target] = found
    lost = set(group.values()) - set(silo_of)
    if lost:
        raise ValueError(
            f"the silos of {sorted(lost)} are unknown: expected an index= argument that points to "
            "them"
        )
    return names, silo_of


def _follow(
    leaf: str,
    target: str,
    columns: ModelArgs,
    group: dict[str, str],
    silo: np.ndarray,
    names: tuple[str, ...],
) -> np.ndarray:
    lengths = {len(columns[other]) for other, g in group.items() if g == target}
    if not lengths:
        raise ValueError(
            f"index={{{leaf!r}: {target!r}}}: no argument has rows of {target!r}; give one, e.g. "
            f'"{target}": np.arange(...) with rows={{"{target}": "{target}"}}'
        )
    found = np.full(max(lengths), -1)
    if len(columns[leaf]) != len(silo):
        raise ValueError(
            f"argument {leaf!r}: expected {len(silo)} rows as the others of its group, got "
            f"{len(columns[leaf])}"
        )
    values = _positions(leaf, target, columns, len(found))
    used = silo >= 0
    found[values[used]] = silo[used]
    clash = used & (found[values] != silo)
    if clash.any():
        row = int(np.argmax(clash))
        raise ValueError(
            f"element {values[row]} of {target!r} is in two silos, {names[silo[row]]!r} and "
            f"{names[found[values[row]]]!r} (argument {leaf!r}, row {row}); a silo plate's element "
            "belongs to exactly one silo"
        )
    if (found < 0).any() and used.all():
        raise ValueError(
            f"element {int(np.argmin(found))} of {target!r} has no row in {leaf!r}, so its silo is "
            "unknown; leave such elements out"
        )
    return found


def _positions(leaf: str, target: str, columns: ModelArgs, num: int) -> np.ndarray:
    """Return an index argument after a check that it points to a group of ``num`` elements."""
    values = columns[leaf]
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            f"argument {leaf!r}: expected positions of shape (N,) with N > 0, got shape "
            f"{values.shape}"
        )
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 0 or values.max() >= num:
        raise ValueError(
            f"argument {leaf!r}: expected integer positions 0..{num - 1} in {target!r}, got "
            f"{values.dtype} from {values.min()} to {values.max()}"
        )
    return values
