"""MixedSilos: how silos are grouped by structure, and which arguments become rows.

Also what is refused.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from scipy import stats

from numpyro_fed import MixedSilos, Silos, silo_plate
from numpyro_fed.density.factorize import factorize

Y = np.arange(5.0)
Data = dict[str, dict[str, Any]]


def model(
    x: Array, y: Array | None = None, proxy: Array | None = None, kind: str = "probit"
) -> None:
    """Hospitals without x measure a proxy of it; one of them reports another kind of outcome."""
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with silo_plate("patients", x.shape[0]):
        if proxy is not None:
            numpyro.sample("proxy", dist.Normal(x, 0.5), obs=proxy)
        noise = dist.Normal(beta * x, 1) if kind == "probit" else dist.Laplace(beta * x, 1)
        numpyro.sample("y", noise, obs=y)


def hospital(n: int, seed: int, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=n), "y": rng.normal(size=n), **more}


def three_structures() -> Data:
    """Return plain hospitals (oslo, bern, pisa), one with a proxy, two with another outcome.

    The proxy is at rome; lyon and nice have the other outcome.
    """
    return {
        "oslo": hospital(4, 0),
        "rome": hospital(3, 1, proxy=Y[:3]),
        "lyon": hospital(2, 2, kind="laplace"),
        "bern": hospital(6, 3, proxy=None),
        "nice": hospital(5, 4, kind="laplace", proxy=None),
        "pisa": hospital(3, 5),
    }


def partition(silos: MixedSilos) -> list[tuple[str, ...]]:
    return [part.names for part in silos.parts]


# Structures


def test_three_structures_in_one_federation() -> None:
    silos = MixedSilos(three_structures())
    assert silos.names == tuple(silos) == ("oslo", "rome", "lyon", "bern", "nice", "pisa")
    assert len(silos) == 6
    assert partition(silos) == [("oslo", "bern", "pisa"), ("rome",), ("lyon", "nice")]
    assert silos.places == ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2))
    assert [part.group for part in silos.parts] == [
        {"x": "x", "y": "x"},
        {"x": "x", "y": "x", "proxy": "x"},
        {"x": "x", "y": "x"},
    ]
    assert [part.sizes for part in silos.parts] == [{"x": (4, 6, 3)}, {"x": (3,)}, {"x": (2, 5)}]
    assert [part.shared for part in silos.parts] == [
        {"proxy": None},
        {},
        {"proxy": None, "kind": "laplace"},
    ]
    assert [part.guessed for part in silos.parts] == [("x",)] * 3


def test_a_silo_s_arguments_are_those_given() -> None:
    data = three_structures()
    silos = MixedSilos(data)
    for name, given_ in data.items():
        own = {leaf: v for leaf, v in silos[name].items() if v is not None}
        assert set(own) == {leaf for leaf, v in given_.items() if v is not None}
        for leaf in own:
            np.testing.assert_array_equal(
                own[leaf], given_[leaf] if leaf == "kind" else np.float32(given_[leaf])
            )


def test_parts_have_the_density_of_their_branch() -> None:
    silos = MixedSilos(three_structures())
    theta = {"beta": jnp.array(0.3)}
    for name, (part, _) in zip(silos, silos.places, strict=True):
        factors = factorize(model, silos.parts[part])
        assert factors.plates == (("patients", "x"),)
        _, local = factors.terms(theta, {}, silos[name], {"x": 1.0})
        own = {
            leaf: np.asarray(v, np.float64) for leaf, v in silos[name].items() if leaf in ("x", "y")
        }
        noise = stats.laplace if name in ("lyon", "nice") else stats.norm
        expected = noise.logpdf(own["y"], 0.3 * own["x"])
        if name == "rome":
            expected += stats.norm.logpdf(Y[:3], own["x"], 0.5)
        np.testing.assert_allclose(local["x"], expected, rtol=1e-5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.booleans()), min_size=1, max_size=7)
)
def test_parts_are_the_classes_of_equal_structure(kinds: list[tuple[str, bool, bool]]) -> None:
    data = {
        f"s{s}": {
            **hospital(3 + s % 4, s, kind=kind),
            **({"proxy": np.arange(3.0 + s % 4) + s} if has_proxy else {}),
            **({"z": None} if says_none else {}),
        }
        for s, (kind, has_proxy, says_none) in enumerate(kinds)
    }
    silos = MixedSilos(data)
    classes: dict[tuple[str, bool], list[str]] = {}
    for s, (kind, proxy, _) in enumerate(kinds):
        classes.setdefault((kind, proxy), []).append(f"s{s}")
    assert partition(silos) == [tuple(names) for names in classes.values()]
    for name, (part, number) in zip(silos, silos.places, strict=True):
        assert silos.parts[part].names[number] == name


def test_one_structure_is_what_silos_makes_of_it() -> None:
    rng = np.random.default_rng(0)
    data = {
        name: {
            "x": rng.normal(size=(n, 2)),
            "d": rng.normal(size=k),
            "label": np.ones(n),
            "c": np.ones(2),
            "k": 2.0,
        }
        for name, n, k in (("oslo", 4, 2), ("rome", 4, 3))
    }
    for rows in ({}, {"x": "patients"}, {"d": "districts", "label": "patients"}):
        (part,) = MixedSilos(data, rows=rows).parts
        whole = Silos(data, rows=rows)
        assert part.spec == whole.spec
        for leaf in whole.rows:
            np.testing.assert_array_equal(part.rows[leaf], whole.rows[leaf])
        np.testing.assert_array_equal(part.shared["c"], whole.shared["c"])
        assert repr(part) == repr(whole)


def test_a_single_silo_is_what_silos_makes_of_it() -> None:
    data = {"all": {"scale": 2.0, "y": Y, "label": np.ones(5), "c": np.ones(2)}}
    (part,) = MixedSilos(data).parts
    assert part.spec == Silos(data).spec
    assert part.group == {"y": "y", "label": "y"}


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        (Y, np.arange(3), 2),
        (Y, np.ones((3, 2)), 2),
        (Y, np.float32([1, 2, 3]), 1),  # float64 is stored as float32
        (np.arange(5), np.int8([1, 2, 3]), 2),
        (Y, pd.Series([1.0, 2.0], index=[7, 8]), 1),
        (Y, jnp.ones(2), 1),
    ],
)
def test_types_and_trailing_shapes_of_rows(one: Any, other: Any, parts: int) -> None:
    assert len(MixedSilos({"oslo": {"y": one}, "rome": {"y": other}}).parts) == parts


@pytest.mark.parametrize(
    ("one", "other"), [(1, 2), (1, True), (1, 1.0), ("a", "b"), ((1, 2), (1, 3)), (None, "a")]
)
def test_static_arguments_set_structures_apart(one: Any, other: Any) -> None:
    silos = MixedSilos(
        {
            "oslo": {"y": Y, "k": one},
            "rome": {"y": Y[1:], "k": other},
            "bern": {"y": Y[2:], "k": one},
        }
    )
    assert partition(silos) == [("oslo", "bern"), ("rome",)]
    assert [silos[name]["k"] for name in silos] == [one, other, one]
    assert type(silos["rome"]["k"]) is type(other)


# Rows


def test_rows_of_a_part_of_one_silo_are_told_by_the_others() -> None:
    # in rome everything has 3 rows; only the other silos tell the plates, and what is shared
    def city(n: int, k: int, **more: Any) -> dict[str, Any]:
        return {
            "centers": np.arange(3.0),
            "y": np.arange(n) + 10.0 * n,
            "d": np.arange(k) - 10.0 * k,
            **more,
        }

    silos = MixedSilos({"oslo": city(4, 2), "rome": city(3, 3, kind="new"), "bern": city(5, 3)})
    assert partition(silos) == [("oslo", "bern"), ("rome",)]
    for part in silos.parts:
        assert part.group == {"y": "y", "d": "d"}
        np.testing.assert_array_equal(part.shared["centers"], np.arange(3.0))
    alone = Silos({"rome": city(3, 3, kind="new")})
    assert set(alone.group.values()) == {"centers"}  # the guess that is avoided


def test_equal_labels_in_one_part_are_rows() -> None:
    data = {
        "oslo": {"y": Y[:3], "label": np.ones(3)},
        "rome": {"y": Y[:3], "label": np.ones(3)},
        "bern": {"y": Y[:3] + 1, "label": np.zeros(3), "kind": "new"},
    }
    silos = MixedSilos(data)
    assert [part.group for part in silos.parts] == [{"y": "y", "label": "y"}] * 2
    assert silos.parts[0].sizes == {"y": (3, 3)}


def test_labels_equal_in_all_silos_are_rows_where_as_long_as_rows() -> None:
    data = {
        "oslo": {"y": Y[:3], "label": np.ones(3)},
        "rome": {"y": Y[2:], "label": np.ones(3), "kind": "new"},
    }
    assert [part.group for part in MixedSilos(data).parts] == [{"y": "y", "label": "y"}] * 2
    data["rome"]["y"] = Y
    silos = MixedSilos(data)
    assert [part.group for part in silos.parts] == [{"y": "y"}] * 2
    assert all(part.shared["label"].shape == (3,) for part in silos.parts)


def test_an_argument_of_one_silo_is_rows_where_as_long_as_them() -> None:
    data = {"oslo": {"y": Y}, "rome": {"y": Y[:3], "proxy": np.ones(3), "knots": np.ones(2)}}
    rome = MixedSilos(data).parts[1]
    assert rome.group == {"y": "y", "proxy": "y"}
    assert set(rome.shared) == {"knots"}
    rome = MixedSilos(data, rows={"knots": "visits"}).parts[1]
    assert rome.group == {"y": "y", "proxy": "y", "knots": "visits"}
    assert rome.guessed == ("y",)


def test_an_argument_that_is_an_array_in_some_silos_only() -> None:
    silos = MixedSilos({"oslo": {"y": Y, "w": 1.0}, "rome": {"y": Y[:3], "w": np.ones(3)}})
    assert [part.group for part in silos.parts] == [{"y": "y"}, {"y": "y", "w": "y"}]
    assert silos["oslo"]["w"] == 1.0


def test_groups_are_linked_by_an_argument_that_silos_have_in_common() -> None:
    a, b = {"x": Y, "y": Y}, {"y": Y[:3], "z": Y[:3]}
    silos = MixedSilos(
        {"oslo": a, "rome": {"x": Y[1:], "y": Y[1:]}, "bern": b, "pisa": {"y": Y[:2], "z": Y[:2]}}
    )
    assert [part.group for part in silos.parts] == [{"x": "x", "y": "x"}, {"y": "x", "z": "x"}]
    # without a common argument, equal lengths in other silos tie nothing
    apart = MixedSilos(
        {"oslo": {"x": Y}, "rome": {"x": Y[1:]}, "bern": {"z": Y[:2]}, "pisa": {"z": Y[:1]}}
    )
    assert [part.group for part in apart.parts] == [{"x": "x"}, {"z": "z"}]


def test_index_to_districts_inside_silos() -> None:
    def region(district: list[int], k: int, **more: Any) -> dict[str, Any]:
        n = len(district)
        return {
            "y": Y[:n] + 0.1 * k,
            "district": np.int8(district),
            "districts": np.arange(k),
            **more,
        }

    data = {
        "north": region([0, 1, 1, 0], 2),
        "south": region([0, 0, 1, 1], 2),
        "east": region([2, 0, 1], 3, age=Y[:3]),
        "west": {**region([0], 1, age=Y[1:2]), "district": np.array([0])},
        "isle": {"y": Y[:2], "kind": "no districts"},
    }
    rows = {"districts": "districts"}
    silos = MixedSilos(data, rows=rows, index={"district": "districts"})
    assert partition(silos) == [("north", "south"), ("east", "west"), ("isle",)]
    women = {"y": "y", "district": "y"}
    assert [part.group for part in silos.parts] == [
        {**women, "districts": "districts"},
        {**women, "districts": "districts", "age": "y"},
        {"y": "y"},
    ]
    assert [part.index for part in silos.parts] == [{"district": "districts"}] * 2 + [{}]
    assert silos.parts[1].sizes == {"y": (3, 1), "districts": (3, 1)}
    np.testing.assert_array_equal(silos.parts[0].pooled["district"], [0, 1, 1, 0, 2, 2, 3, 3])
    np.testing.assert_array_equal(silos["south"]["district"], [0, 0, 1, 1])
    assert silos["west"]["district"].dtype == jnp.int32


def test_shared_arrays_are_the_same_in_all_parts() -> None:
    center = np.array([1.0, 2.0])
    silos = MixedSilos(
        {name: {**kwargs, "center": center} for name, kwargs in three_structures().items()}
    )
    assert len(silos.parts) == 3
    for part in silos.parts:
        assert "center" not in part.group
        np.testing.assert_array_equal(part.shared["center"], center)


# As a value


def test_repr() -> None:
    data = {name: {**kwargs, "center": np.ones(2)} for name, kwargs in three_structures().items()}
    assert repr(MixedSilos(data, rows={"x": "patients", "y": "patients"})).splitlines() == [
        "MixedSilos: 6 silos, 3 structures",
        "  0: 3 silos (oslo, bern, pisa), 13 rows of 'patients'",
        "    x: float32['patients']",
        "    y: float32['patients']",
        "    center: shared",
        "    proxy: None",
        "  1: 1 silo (rome), 3 rows of 'patients', 3 rows of 'proxy'",
        "    x: float32['patients']",
        "    y: float32['patients']",
        "    proxy: float32['proxy']",
        "    center: shared",
        "  2: 2 silos (lyon, nice), 7 rows of 'patients'",
        "    x: float32['patients']",
        "    y: float32['patients']",
        "    center: shared",
        "    proxy: None",
        "    kind: 'laplace'",
    ]
    many = repr(MixedSilos({str(s): {"y": Y + s} for s in range(20)})).splitlines()
    assert many == [
        "MixedSilos: 20 silos, 1 structure",
        "  0: 20 silos (0, 1, 2, 3, 4, 5, 6, ... 19), 100 rows of 'y'",
        "    y: float32['y']",
    ]


def test_unknown_silo() -> None:
    with pytest.raises(
        KeyError,
        match=r"no silo 'paris'; there are \['oslo', 'rome', 'lyon', 'bern', 'nice', 'pisa'",
    ):
        MixedSilos(three_structures())["paris"]


# What is refused


def nan_at(row: int) -> np.ndarray:
    y = Y.copy()
    y[row] = np.nan
    return y


def with_new(**new: Any) -> Data:
    """Two plain silos and a new one of a structure of its own."""
    return {
        "oslo": {"y": Y, "d": Y[:2]},
        "rome": {"y": Y[:3], "d": Y[:3]},
        "new": {"kind": "new", **new},
    }


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no silo": (lambda: MixedSilos({}), r"expected at least one silo, got none"),
    "no mapping": (
        lambda: MixedSilos([Y]),
        r"expected \{silo name: \{argument: value\}\}.*got list",
    ),  # type: ignore[arg-type]
    "silo that is no mapping": (
        lambda: MixedSilos({"oslo": {"y": Y}, "rome": Y}),
        r"silo 'rome': expected the model's arguments as a dict, .* got ndarray",
    ),
    "names": (
        lambda: MixedSilos({1: {"y": Y}, "1": {"y": Y}}),
        r"silo names that differ, got \['1', '1'\]",
    ),  # type: ignore[dict-item]
    "unknown rows": (
        lambda: MixedSilos(with_new(y=Y), rows={"z": "a"}),
        r"name arguments that data lack: \['z'\]",
    ),
    "unknown index": (
        lambda: MixedSilos(with_new(y=Y), index={"z": "a"}),
        r"name arguments that data lack: \['z'\]",
    ),
    "told, but no array": (
        lambda: MixedSilos(with_new(y=Y, d=2.0), rows={"d": "ds"}),
        r"silo 'new', argument 'd': expected an array of rows, as rows= or index= say, got 2\.0",
    ),
    "scalar array": (
        lambda: MixedSilos(
            {"oslo": {"y": Y, "k": np.float64(1)}, "rome": {"y": Y, "k": np.float64(2)}}
        ),
        r"silo 'oslo', argument 'k': expected an array with a leading axis.*got "
        r"array\(1\.\).*plain Python value",
    ),
    "scalar array beside a number": (
        lambda: MixedSilos({"oslo": {"y": Y, "k": np.float64(1)}, "rome": {"y": Y[1:], "k": 1.0}}),
        r"silo 'oslo', argument 'k': expected an array with a leading axis.*got array\(1\.\)",
    ),
    "unhashable": (
        lambda: MixedSilos(with_new(y=Y, k=[1])),
        r"silo 'new', argument 'k': expected an array or a hashable value, got list; use a tuple "
        r"in place",
    ),
    "two plates as long": (
        lambda: MixedSilos(with_new(y=Y[:3], d=Y[:3], age=Y[:3])),
        r"argument 'age' has as many rows as \['.'\] and as \['.'\], which differ in silo 'oslo'; "
        r"expected its silo plate by name: rows=\{'age': \.\.\.\}",
    ),
    "two plates as long, told last": (
        lambda: MixedSilos(
            {
                "new": {"age": Y[:3], "y": Y[:3], "d": Y[:3]},
                "old": {"age": Y[:2], "y": Y[:2], "d": Y[:2]},
                "oslo": {"y": Y, "d": Y[:2]},
            }
        ),
        r"argument 'age' has as many rows as \['y'\] and as \['d'\], which differ in silo 'oslo'",
    ),
    "rows disagree": (
        lambda: MixedSilos(with_new(y=Y, age=Y[:3]), rows={"y": "women", "age": "women"}),
        r"silo 'new', argument 'age': expected 5 rows of 'women', as many as 'y' has, got 3",
    ),
    "no rows": (
        lambda: MixedSilos(with_new(other=Y[:4])),
        r"silos \['new'\]: expected at least one argument with rows, got only shared or static "
        r"ones "
        r"\['kind', 'other'\]; name an argument in rows= ",
    ),
    "empty silo": (
        lambda: MixedSilos(with_new(y=Y[:0])),
        r"silo 'new' is empty: it has no row of 'y'; leave it out",
    ),
    "NaN": (
        lambda: MixedSilos(with_new(y=nan_at(1))),
        r"silo 'new', argument 'y', row 1: expected finite numbers",
    ),
    "text": (
        lambda: MixedSilos(with_new(y=np.array(["a"]))),
        r"argument 'y': expected numbers, got <U1",
    ),
    "shared NaN": (
        lambda: MixedSilos(with_new(y=Y, c=nan_at(0)[:4])),
        r"shared argument 'c': expected finite",
    ),
    "index without rows": (
        lambda: MixedSilos(with_new(y=Y, to=np.zeros(5, int)), index={"to": "districts"}),
        r"no argument has rows of 'districts'; give one",
    ),
    "index outside": (
        lambda: MixedSilos(
            with_new(y=Y[:2], d=Y[:1], to=np.array([0, 1])), rows={"to": "y"}, index={"to": "d"}
        ),
        r"silo 'new', argument 'to', row 1: index 1 is outside the silo's 1 elements of 'd'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        make()


def test_rows_settle_what_is_as_long_as_two_plates() -> None:
    silos = MixedSilos(with_new(y=Y[:3], d=Y[:3], age=Y[:3]), rows={"age": "y"})
    assert silos.parts[1].group == {"y": "y", "d": "d", "age": "y"}
