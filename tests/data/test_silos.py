"""Silos and split: where rows go, how they come back, and what is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry import ENTRIES

from numpyro_fed import Silos, split

Y = np.arange(5.0)
WOMEN = ENTRIES["women_in_districts"]
PUPILS = ENTRIES["pupils_in_classes_in_schools"]
FAST = settings(max_examples=12, deadline=None, derandomize=True)


def two(**arguments: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of two silos, given side by side."""
    return {
        name: {leaf: v[s] for leaf, v in arguments.items()}
        for s, name in enumerate(("oslo", "rome"))
    }


# What a silo holds


def test_rows_and_shared_arguments() -> None:
    silos = Silos(
        two(
            y=(Y[:3], Y[3:]),
            scale=(2.0, 2.0),
            centers=(np.ones(4), np.ones(4)),
            link=("log", "log"),
        )
    )
    assert silos.names == ("oslo", "rome")
    assert list(silos) == ["oslo", "rome"]
    assert len(silos) == 2
    assert silos.sizes == {"y": (3, 2)}
    assert set(silos.rows) == {"y"}
    assert silos.shared["scale"] == 2.0
    assert silos.shared["link"] == "log"
    assert set(silos["rome"]) == {"y", "scale", "centers", "link"}
    np.testing.assert_array_equal(silos["rome"]["y"], Y[3:])
    np.testing.assert_array_equal(silos["rome"]["centers"], np.ones(4))
    np.testing.assert_array_equal(silos.pooled["y"], Y)
    np.testing.assert_array_equal(silos.offsets("y"), [0, 3])
    np.testing.assert_array_equal(silos.silo_of_row("y"), [0, 0, 0, 1, 1])


def test_arguments_of_as_many_rows_are_one_group() -> None:
    silos = Silos(two(x=(np.ones((3, 2)), np.ones((2, 2))), y=(Y[:3], Y[3:]), d=(Y[:1], Y[1:3])))
    assert silos.group == {"x": "x", "y": "x", "d": "d"}
    assert silos.sizes == {"x": (3, 2), "d": (1, 2)}
    assert silos.guessed == ("d", "x")


def test_equal_values_as_long_as_rows_are_rows() -> None:
    silos = Silos(two(x=(Y[:3], Y[2:]), label=(np.ones(3), np.ones(3))))
    assert silos.group == {"x": "x", "label": "x"}


def test_rows_are_the_silos_own() -> None:
    """Arrays that are changed later leave the silos as they were.

    They are of one silo and of two, and of every alignment.
    """
    space = np.zeros(40, np.float32)
    for start in range(16):
        y = space[start : start + 4]
        for data in ({"oslo": {"y": y}}, {"oslo": {"y": y}, "rome": {"y": np.ones(2, np.float32)}}):
            silos = Silos(data)
            y[:] = 5
            np.testing.assert_array_equal(silos["oslo"]["y"], np.zeros(4))
            y[:] = 0
        parts = split({"y": y}, by=np.zeros(4, int))
        y[:] = 5
        np.testing.assert_array_equal(parts["0"]["y"], np.zeros(4))
        y[:] = 0


def test_rows_names_the_group() -> None:
    silos = Silos(two(deaths=(Y[:3], Y[2:]), births=(Y[:3], Y[1:4])), rows={"births": "babies"})
    assert silos.group == {"deaths": "deaths", "births": "babies"}
    assert silos.guessed == ("deaths",)


def test_one_silo() -> None:
    silos = Silos({"all": {"y": Y, "scale": 2.0}})
    assert silos.sizes == {"y": (5,)}
    np.testing.assert_array_equal(silos.pooled["y"], silos["all"]["y"])


def test_unknown_silo() -> None:
    with pytest.raises(KeyError, match="no silo 'paris'; there are"):
        Silos({"all": {"y": Y}})["paris"]


# Splitting


@FAST
@given(st.lists(st.integers(-1, 4), min_size=5, max_size=12))
def test_pooled_is_what_was_split(by: list[int]) -> None:
    by[0] = 2  # one row at least
    kept = np.array(by) >= 0
    x = np.arange(2.0 * len(by)).reshape(-1, 2)
    silos = split({"x": x, "y": x[:, 0], "scale": 3.0}, by=np.array(by))
    assert silos.names == tuple(str(b) for b in sorted(set(by) - {-1}))
    assert silos.sizes == {"rows": tuple(by.count(int(name)) for name in silos)}
    np.testing.assert_array_equal(silos.pooled["x"], x[kept])
    assert silos.pooled["scale"] == 3.0
    for name in silos:
        np.testing.assert_array_equal(silos[name]["x"], x[np.array(by) == int(name)])
    np.testing.assert_array_equal(
        silos.order["rows"][silos.pooled_position("rows")], np.arange(kept.sum())
    )
    np.testing.assert_array_equal(silos.as_one().pooled["x"], x[kept])


@FAST
@given(st.lists(st.integers(-1, 3), min_size=5, max_size=5))
def test_index_is_renumbered_in_silos_and_back(by: list[int]) -> None:
    by[2] = 1
    label = np.array(by)[WOMEN.unit]
    names = 100 + WOMEN.data["districts"]  # so that a position is not mistaken for its value
    data = {**WOMEN.data, "districts": names, "y": np.arange(8.0)}
    silos = split(data, by=label, rows=WOMEN.rows, index=WOMEN.index)
    true_names = names[WOMEN.unit]
    for view, kept in [(silos.pooled, label >= 0)] + [(silos[s], label == int(s)) for s in silos]:
        np.testing.assert_array_equal(view["districts"][view["district"]], true_names[kept])
        np.testing.assert_array_equal(view["y"], np.flatnonzero(kept))
    for name in silos:
        assert sorted(silos[name]["districts"].tolist()) == [
            100 + d for d in range(5) if by[d] == int(name)
        ]
    one = silos.as_one()
    assert one.names == ("all",)
    for view in (one["all"], one.pooled):
        woman = np.asarray(view["y"], int)
        assert sorted(woman) == list(np.flatnonzero(label >= 0))
        np.testing.assert_array_equal(view["districts"][view["district"]], true_names[woman])


def test_a_chain_of_indices() -> None:
    silos = PUPILS.silos()
    assert silos.sizes == {"pupils": (2, 6), "classes": (1, 4), "schools": (1, 2)}
    for view in (silos.pooled, silos.as_one()["all"]):
        school = np.asarray(view["schools"])[view["school"]][view["room"]]
        order = np.argsort(view["y"])
        expected = PUPILS.data["school"][PUPILS.data["room"]][np.argsort(PUPILS.data["y"])]
        np.testing.assert_array_equal(school[order], expected)


@FAST
@given(st.lists(st.integers(-1, 3), min_size=5, max_size=5))
def test_elements_are_labeled_as_well_as_the_rows_that_point_to_them(by: list[int]) -> None:
    by[2] = 1
    labels = np.array(by)
    by_rows, by_elements = (
        split(WOMEN.data, by=each, rows=WOMEN.rows, index=WOMEN.index)
        for each in (labels[WOMEN.unit], labels)
    )
    assert jax.tree.structure(by_rows) == jax.tree.structure(by_elements)
    jax.tree.map(np.testing.assert_array_equal, by_rows, by_elements)


def test_labels_go_down_a_chain_of_indices() -> None:
    schools = np.array([7, 4, 7])
    needed = {leaf: g for leaf, g in PUPILS.rows.items() if leaf != "y"}
    for by in (schools, schools[PUPILS.data["school"]]):  # of schools, of classes
        silos = split(PUPILS.data, by=by, rows=needed, index=PUPILS.index)
        assert silos.sizes == PUPILS.silos().sizes
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.leaves(silos), jax.tree.leaves(PUPILS.silos())
        )


def test_a_labeled_element_may_have_no_row() -> None:
    silos = pointing(to=np.array([0, 1, 0, 1, 1]), by=np.array([0, 1, 0]))
    assert silos.sizes == {"rows": (2, 3), "ds": (2, 1)}
    assert (
        pointing(by=np.array([0, 1, 0]), rows={"to": "rows", "d": "ds"}).group["y"] == "rows"
    )  # as long as "to"
    assert [silos[name]["to"].tolist() for name in silos] == [[0, 0], [0, 0, 0]]


def test_split_equals_silos_made_by_hand() -> None:
    by = np.array([0, 0, 0, 1, 1])
    made = Silos(two(y=(Y[:3], Y[3:]), scale=(2.0, 2.0)), rows={"y": "rows"})
    cut = split({"y": Y, "scale": 2.0}, by=by)
    assert made.group == cut.group
    assert made.sizes == cut.sizes
    np.testing.assert_array_equal(made.rows["y"], cut.rows["y"])
    np.testing.assert_array_equal(made.order["rows"], cut.order["rows"])


TABLE = {"y": [3.0, 1.0, 2.0], "n": [1, 2, 3], "city": ["rome", "oslo", "rome"]}
TABLES: dict[str, Callable[[], Any]] = {
    "numpy": lambda: {k: np.array(v) for k, v in TABLE.items()},
    "jax": lambda: {
        "y": jnp.array(TABLE["y"]),
        "n": jnp.array(TABLE["n"]),
        "city": np.array(TABLE["city"]),
    },
    "pandas frame": lambda: pd.DataFrame(TABLE, index=[7, 8, 9]),
    "pandas series": lambda: {k: pd.Series(v, index=[7, 8, 9]) for k, v in TABLE.items()},
    "arrow table": lambda: pa.table(TABLE),
    "arrow arrays": lambda: {k: pa.array(v) for k, v in TABLE.items()},
}


@pytest.mark.parametrize("kind", TABLES)
def test_columns_of_any_library(kind: str) -> None:
    data = TABLES[kind]()
    silos = split(data, by="city")
    assert silos.names == ("oslo", "rome")
    assert set(silos.rows) == {"y", "n"}
    np.testing.assert_array_equal(silos["rome"]["y"], [3.0, 2.0])
    assert silos["rome"]["n"].dtype == jnp.int32
    column = data.column("city") if isinstance(data, pa.Table) else data["city"]
    other = split({"y": data["y"]}, by=column)
    np.testing.assert_array_equal(other["rome"]["y"], [3.0, 2.0])


def test_silos_take_columns_of_any_library() -> None:
    silos = Silos(
        two(y=(pd.Series([1.0, 2.0], index=[5, 6]), pa.array([3.0])), x=(jnp.ones(2), np.zeros(1)))
    )
    np.testing.assert_array_equal(silos.pooled["y"], [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(silos.pooled["x"], [1.0, 1.0, 0.0])


def test_a_silo_may_be_a_table() -> None:
    """A hospital's table is its arguments, a column each."""
    tables = {"rome": pa.table({"y": [3.0], "n": [1]}), "oslo": pd.DataFrame({"y": Y, "n": 1})}
    silos = Silos(tables)
    assert silos.names == ("rome", "oslo")
    np.testing.assert_array_equal(silos["oslo"]["y"], Y)
    with pytest.raises(ValueError, match="silo 'oslo': expected the model's arguments as a dict"):
        Silos({"oslo": 3.0})


# As a value


def test_repr() -> None:
    text = repr(WOMEN.silos())
    lines = text.splitlines()
    assert lines[0] == "Silos: 3 silos, 8 rows of 'women', 5 rows of 'districts'"
    assert lines[2] == "  1  women=4  districts=2"
    assert "  district: int32['women'], index into 'districts'" in lines
    assert "  x: float32['women', 2]" in lines
    many = repr(split({"y": np.arange(40.0), "k": 1}, by=np.arange(40) % 20)).splitlines()
    assert "  ..." in many
    assert many[-3:] == ["  19  rows=2", "  y: float32['rows']", "  k: shared"]
    assert len(many) < 16


def test_hash_and_equality() -> None:
    silos = WOMEN.silos()
    copy = jax.tree.unflatten(jax.tree.structure(silos), jax.tree.leaves(silos))
    assert silos == copy
    assert hash(silos) == hash(copy)
    assert {silos: 1}[copy] == 1
    assert silos != WOMEN.silos()  # other arrays, though equal values: no comparison of data
    assert silos != silos.as_one()
    assert silos != silos.with_shared(k=jnp.ones(2))
    assert silos != "silos"


def test_silos_pass_through_jit() -> None:
    silos = split(
        {"y": Y, "centers": np.array([1.0, 2.0]), "link": "log"}, by=np.array([0, 1, 0, 1, 1])
    )
    traced = []

    @jax.jit
    def total(silos: Silos) -> tuple[jax.Array, Silos]:
        traced.append(silos.shared["link"])
        assert isinstance(silos.pooled["y"], jax.core.Tracer)
        return silos.pooled["y"] @ jnp.arange(5.0) + silos.shared["centers"].sum(), silos

    value, same = total(silos)
    assert value == Y @ Y + 3
    assert same.names == silos.names
    assert same.shared["link"] == "log"
    assert repr(same) == repr(silos)
    np.testing.assert_array_equal(same.pooled["y"], Y)
    total(jax.tree.map(lambda x: x + 1, silos))
    assert traced == ["log"]
    total(silos.as_one())
    assert traced == ["log", "log"]


def test_with_shared() -> None:
    silos = split({"y": Y, "center": 0.0}, by=np.array([0, 1, 0, 1, 1]))
    sites = {"beta": jnp.ones(2)}
    more = silos.with_shared(_gibbs_sites=sites, center=jnp.array(1.0))
    assert more["0"]["_gibbs_sites"] is sites
    assert more.pooled["center"] == 1
    assert len(jax.tree.leaves(more)) == len(jax.tree.leaves(silos)) + 2
    assert silos.shared == {"center": 0.0}


# What is refused


def nan_at(row: int) -> np.ndarray:
    y = Y.copy()
    y[row] = np.nan
    return y


GROUPS = {"y": "rows", "to": "rows", "d": "ds"}
DAYS = np.datetime64("2024-02-27") + np.arange(5)
REFUSED_BY_SILOS: dict[str, tuple[Callable[[], Any], str]] = {
    "no silo": (lambda: Silos({}), "at least one silo, got none"),
    "names": (
        lambda: Silos({1: {"y": Y}, "1": {"y": Y}}),
        "silo names that differ, got \\['1', '1'\\]",
    ),
    "missing argument": (
        lambda: Silos({"oslo": {"y": Y, "x": Y}, "rome": {"y": Y}}),
        "silo 'rome': expected the arguments \\['x', 'y'\\] as in silo 'oslo', got \\['y'\\]; "
        r"silos of different structure: fed\.MixedSilos \(variational fits alone\)$",
    ),
    "differing scalar": (
        lambda: Silos(two(y=(Y, Y + 1), k=(1, 2))),
        r"argument 'k' differs between silos.*silo 'oslo' has 1\. .*or the same value everywhere; "
        r"silos of different structure: fed\.MixedSilos \(variational fits alone\)$",
    ),
    "differing scalar array": (
        lambda: Silos(two(y=(Y, Y + 1), k=(np.float64(1), np.float64(2)))),
        r"argument 'k' differs between silos.*or the same value everywhere$",
    ),
    "trailing shape": (
        lambda: Silos(two(y=(np.ones((3, 2)), np.ones((2, 3))))),
        "argument 'y': rows of silo 'rome' have shape \\(3,\\), those of silo 'oslo' \\(2,\\)",
    ),
    "only shared": (
        lambda: Silos(two(k=(1, 1))),
        "at least one argument with rows that differ between silos, got only shared arguments "
        "\\['k'\\]",
    ),
    "unhashable": (
        lambda: Silos(two(y=(Y, Y[:2]), k=([1], [1]))),
        "argument 'k': expected an array or a hashable",
    ),
    "empty silo": (
        lambda: Silos(two(y=(Y, Y[:0]))),
        "silo 'rome' is empty: it has no row of 'y'; leave it out",
    ),
    "rows disagree": (
        lambda: Silos(two(y=(Y, Y[:3]), x=(Y[:3], Y)), rows={"y": "rows", "x": "rows"}),
        "silo 'oslo', argument 'x': expected 5 rows of 'rows', as many as 'y' has, got 3",
    ),
    "text": (
        lambda: Silos(two(y=(Y, Y[:3]), t=(np.array(["a"]), np.array(["b"])))),
        "argument 't': expected numbers",
    ),
    "objects": (
        lambda: Silos(two(y=(np.array([1, None]), np.array([2, None])))),
        "argument 'y': expected numbers, got object; encode it first",
    ),
    "shared text": (
        lambda: Silos(two(y=(Y, Y[:3]), z=(np.array(["a"]), np.array(["a"])))),
        "argument 'z': expected numbers, got <U1; encode it first",
    ),
    "shared periods": (
        lambda: Silos(
            two(y=(Y, Y[:3]), z=(pd.Series(pd.period_range("2024", periods=2, freq="Y")),) * 2)
        ),
        "argument 'z': expected numbers, got object; encode it first",
    ),
    "points of time": (
        lambda: Silos(two(y=(Y, Y[:3]), t=(DAYS, DAYS[:3]))),
        r"argument 't': expected numbers, got datetime64\[D\]; subtract an origin and make it a "
        r"number of days, "
        r"e.g. \(x - x.min\(\)\) / np.timedelta64\(1, 'D'\)",
    ),
    "a shared point of time": (
        lambda: Silos(two(y=(Y, Y[:3]), t=(DAYS[0], DAYS[0]))),
        r"argument 't': expected numbers, got datetime64\[D\]",
    ),
    "time and numbers": (
        lambda: Silos(two(y=(Y, DAYS))),
        r"argument 'y': expected numbers, got datetime64\[D\]",
    ),
    "durations": (
        lambda: Silos(two(y=(DAYS - DAYS[0], DAYS[:3] - DAYS[0]))),
        r"argument 'y': expected numbers, got timedelta64\[D\]; make it a number of days, e.g. x "
        r"/ np.timedelta64",
    ),
    "pandas": (
        lambda: Silos(two(y=(pd.Series(DAYS), pd.Series(DAYS[:3])))),
        r"argument 'y': expected numbers, got datetime64\[.*subtract an origin",
    ),
    "a time zone": (
        lambda: Silos(
            two(
                y=(pd.Series(DAYS).dt.tz_localize("UTC"), pd.Series(DAYS[:3]).dt.tz_localize("UTC"))
            )
        ),
        "argument 'y': expected numbers, got objects of type Timestamp; subtract an origin",
    ),
    "dates": (
        lambda: Silos(two(y=(DAYS.astype(object), DAYS[:3].astype(object)))),
        "argument 'y': expected numbers, got objects of type date; subtract an origin",
    ),
    "NaN": (
        lambda: Silos(two(y=(Y[:3], nan_at(1)))),
        "silo 'rome', argument 'y', row 1: expected finite numbers, got NaN or infinity",
    ),
    "NaN far down": (
        lambda: Silos(two(y=(np.ones(3), np.append(np.ones(70_000), np.nan)))),
        "silo 'rome', argument 'y', row 70000: expected finite numbers, got NaN or infinity",
    ),
    "infinity": (
        lambda: Silos(two(y=(Y[:3], np.array([1.0, -np.inf])))),
        "silo 'rome', argument 'y', row 1: expected finite",
    ),
    "unknown rows": (
        lambda: Silos(two(y=(Y, Y[:3])), rows={"z": "a"}),
        "name arguments that data lack: \\['z'\\]",
    ),
    "unknown index": (
        lambda: Silos(two(y=(Y, Y[:3])), index={"z": "a"}),
        "name arguments that data lack: \\['z'\\]",
    ),
    "index without rows": (
        lambda: Silos(
            two(y=(Y, Y[:3]), to=(np.array([0]), np.array([0]))), index={"to": "districts"}
        ),
        "no argument has rows of 'districts'; give one",
    ),
    "index not whole": (
        lambda: Silos(
            two(y=(Y, Y[:3]), to=(Y, Y[:3]), d=(Y[:1], Y[:2])), rows=GROUPS, index={"to": "ds"}
        ),
        "argument 'to': expected integers, got float64",
    ),
    "index outside": (
        lambda: Silos(
            two(y=(Y[:2], Y[:3]), to=(np.array([0, 1]), np.array([0, 2, 1])), d=(Y[:2], Y[:2])),
            rows=GROUPS,
            index={"to": "ds"},
        ),
        "silo 'rome', argument 'to', row 1: index 2 is outside the silo's 2 elements of 'ds'",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_SILOS)
def test_silos_refuse(case: str) -> None:
    make, words = REFUSED_BY_SILOS[case]
    with pytest.raises(ValueError, match=words):
        make()


BY = np.array([0, 1, 0, 1, 1])
TO = np.array([0, 1, 0, 2, 2])


def pointing(
    to: Any = TO,
    by: Any = BY,
    d: int = 3,
    index: dict[str, str] | None = None,
    rows: dict[str, str] | None = None,
) -> Silos:
    index = {"to": "ds"} if index is None else index
    return split(
        {"y": Y, "to": to, "d": np.arange(d)},
        by=by,
        rows=GROUPS if rows is None else rows,
        index=index,
    )


def two_indices() -> Silos:
    return split(
        {"y": Y, "to": TO, "d": np.arange(3), "v": np.ones(5), "back": np.array([1, 0, 1, 2, 2])},
        by=BY,
        rows={**GROUPS, "v": "visits", "back": "rows"},
        index={"to": "ds", "back": "ds"},
    )


REFUSED_BY_SPLIT: dict[str, tuple[Callable[[], Any], str]] = {
    "no such column": (
        lambda: split({"y": Y}, by="city"),
        "by='city' names no column of the data: \\['y'\\]",
    ),
    "labels in two axes": (
        lambda: split({"y": Y}, by=np.ones((5, 1))),
        "by: expected labels of shape \\(N,\\)",
    ),
    "no labels": (
        lambda: split({"y": Y[:0]}, by=[]),
        "by: expected labels of shape \\(N,\\) with N > 0, got \\(0,\\)",
    ),
    "NaN label": (lambda: split({"y": Y}, by=nan_at(2)), "by: row 2 has no label \\(nan\\)"),
    "NaN in a list of text": (
        lambda: split({"y": Y}, by=["a", "b", float("nan"), "a", "b"]),
        "by: row 2 has no label \\(nan\\)",
    ),
    "no table": (lambda: split(None, by=BY), "as a pandas or an Arrow table, got NoneType"),
    "text and numbers": (
        lambda: split({"y": Y}, by=["a", 1, "b", 2, "a"]),
        "by: expected text or numbers, got both: \\['int', 'str'\\]",
    ),
    "two columns of one name": (
        lambda: split(pd.DataFrame([[1.0, 2.0]] * 5, columns=["y", "y"]), by=BY),
        "there are two columns 'y'",
    ),
    "None label": (
        lambda: split({"y": Y}, by=pd.Series(["a", "b", None, "a", "b"])),
        "by: row 2 has no label",
    ),
    "all left out": (
        lambda: split({"y": Y}, by=-np.ones(5, int)),
        "silo of at least one row, got -1",
    ),
    "unknown argument": (
        lambda: split({"y": Y}, by=BY, rows={"z": "a"}),
        "name arguments that data lack: \\['z'\\]",
    ),
    "rows of a scalar": (
        lambda: split({"y": Y, "k": 1}, by=BY, rows={"k": "a"}),
        "rows= names 'k', which is no array",
    ),
    "no rows": (
        lambda: split({"y": Y[:3]}, by=BY),
        "by has 5 labels, but no argument is an array of 5 rows.*3",
    ),
    "a list": (
        lambda: split({"y": list(Y)}, by=BY),
        "no argument is an array of 5 rows: {'y': 'list'}",
    ),
    "two groups": (
        lambda: split({"y": Y, "x": Y}, by=BY, rows={"y": "a", "x": "b"}),
        "the row groups \\['a', 'b'\\] all have that many rows; expected index=",
    ),
    "group of two sizes": (
        lambda: split({"y": Y, "x": Y[:3]}, by=BY, rows={"y": "a", "x": "a"}),
        "argument 'x': expected 5 rows as the other arguments of 'a', got 3",
    ),
    "longer than by": (
        lambda: split({"y": Y, "x": np.ones(7)}, by=BY, rows={"y": "a", "x": "a"}),
        "argument 'x': expected 5 rows as the other arguments of 'a', got 7",
    ),
    "NaN": (
        lambda: split({"y": nan_at(4)}, by=BY),
        "silo '1', argument 'y', row 2: expected finite numbers",
    ),
    "points of time": (
        lambda: split({"y": Y, "t": DAYS}, by=BY),
        r"argument 't': expected numbers, got datetime64\[D\]; subtract an origin",
    ),
    "an index of durations": (
        lambda: pointing(to=DAYS - DAYS[0]),
        r"argument 'to': expected numbers, got timedelta64\[D\]; make it a number of days",
    ),
    "columns of pandas": (
        lambda: split(pd.DataFrame({"y": Y, "t": pd.to_timedelta(Y, "h"), "silo": BY}), by="silo"),
        r"argument 't': expected numbers, got timedelta64\[.s\]; make it a number of days",
    ),
    "index of two axes": (
        lambda: pointing(to=TO[:, None]),
        r"argument 'to': expected positions of shape \(N,\) with N > 0, got shape \(5, 1\)",
    ),
    "index of no rows": (
        lambda: split(
            {"to": TO[:0], "d": np.arange(3)},
            by=[0, 1, 0],
            rows={"to": "rows", "d": "ds"},
            index={"to": "ds"},
        ),
        r"argument 'to': expected positions of shape \(N,\) with N > 0, got shape \(0,\)",
    ),
    "index of no group": (
        lambda: pointing(by=np.array([0, 1, 0]), rows={"d": "ds"}),
        "index argument 'to' is of no row group; expected rows=",
    ),
    "group out of reach": (
        lambda: pointing(index={}),
        "the silos of \\['ds'\\] are unknown: expected an index=",
    ),
    "index out of reach": (
        lambda: pointing(index={"d": "es"}),
        "index arguments \\['d'\\]: expected one that points from or to the group of by=",
    ),
    "index without rows": (
        lambda: pointing(index={"to": "es"}),
        "no argument has rows of 'es'; give one",
    ),
    "index not whole": (
        lambda: pointing(to=TO + 0.5),
        "argument 'to': expected integer positions 0..2 in 'ds'",
    ),
    "index outside": (
        lambda: pointing(d=2),
        "expected integer positions 0..1 in 'ds', got int64 from 0 to 2",
    ),
    "two silos": (
        lambda: pointing(to=np.array([0, 1, 1, 2, 2])),
        "element 1 of 'ds' is in two silos, .*\\(argument 'to', row .\\)",
    ),
    "two indices": (two_indices, "and an earlier one put element 0 of 'ds' in two silos"),
    "no row": (
        lambda: pointing(d=4),
        "element 3 of 'ds' has no row in 'to', so its silo is unknown",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_SPLIT)
def test_split_refuses(case: str) -> None:
    make, words = REFUSED_BY_SPLIT[case]
    with pytest.raises(ValueError, match=words):
        make()


def test_labels_may_be_points_of_time() -> None:
    assert split({"y": Y}, by=DAYS[BY]).names == ("2024-02-27", "2024-02-28")


# What is rounded


SECONDS = 1.7e9 + 3600.0 * np.arange(50.0)  # of two days: float32 has every 128th second


def test_rounding_is_told_where_it_moves_numbers_by_much_of_their_spread() -> None:
    with pytest.warns(
        UserWarning,
        match=r"^argument 't': stored as float32, its numbers move by up to 0.001 of their .*; "
        r"subtract",
    ) as told:
        Silos(two(t=(SECONDS, SECONDS[:20]), y=(SECONDS - 1.7e9, SECONDS[:20] - 1.7e9)))
    assert len(told) == 1
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="^silo 'oslo', argument 't': stored as float32"):
        Silos({"oslo": {"t": SECONDS}})
    two_columns = np.stack(
        [SECONDS - 1.7e9, SECONDS / 1.7e9], axis=1
    )  # the second is as coarse, by its own spread
    with pytest.warns(UserWarning, match="^argument 't': stored as float32"):
        split({"t": two_columns}, by=np.arange(50) % 2)


def test_rounding_that_matters_little_is_not_told() -> None:
    for y in (
        SECONDS - 1.7e9,
        SECONDS.astype(np.int64),  # remains whole
        SECONDS.astype(np.float32),  # was rounded before
        np.full(50, 0.1),
        1 + np.arange(50.0) / 1000,
        np.append(np.arange(49.0), 1e9),
        np.zeros((50, 0)),
    ):
        Silos({"oslo": {"y": y}})
    with jax.enable_x64(True):
        Silos({"oslo": {"y": SECONDS}})
