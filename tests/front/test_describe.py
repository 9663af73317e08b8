"""Dictionaries: the pooled numbers from what silos say, and what they hide."""

import datetime
import json

import numpy as np
import pandas as pd
import pytest

import numpyro_fed as fed

RNG = np.random.default_rng(0)
WHERE = np.repeat(["a", "b", "c"], [500, 800, 200])
POOLED = pd.DataFrame(
    {
        "x": RNG.normal(5, 2, 1500) + (WHERE == "b"),
        "age": RNG.integers(20, 90, 1500),
        "sex": RNG.choice(["F", "M"], 1500),
        "patient": np.arange(1500) % 7,
    }
)
POOLED.loc[::10, "x"] = np.nan


def tables():
    return {name: POOLED[name == WHERE] for name in "abc"}


def test_pooled_numbers_follow_from_the_silos():
    told = fed.describe(tables(), groups=["patient"]).columns
    x = POOLED["x"]
    assert (told["x"].rows, told["x"].missing) == (1350, 150)
    assert told["x"].mean == pytest.approx(x.mean(), rel=1e-12)
    assert told["x"].sd == pytest.approx(x.std(ddof=0), rel=1e-12)
    assert told["sex"].counts == POOLED["sex"].value_counts().sort_index().to_dict()
    assert told["patient"].elements == 21
    assert not told["patient"].counts
    # within half of the 5 % between the quantiles that silos give; ages are whole years
    for name in ("x", "age"):
        for p, value in told[name].quantiles:
            below = (POOLED[name] <= value).sum() / POOLED[name].notna().sum()
            assert abs(below - p) < 0.025 + (name == "age") / 70, (name, p)


def test_what_few_rows_stand_behind_is_hidden():
    few = {"sex": ["F"] * 5 + ["M"] * 2, "x": [1.0, 2.0] + [None] * 5}
    told = fed.describe({"a": few}).columns
    assert not told["sex"].counts  # with F's five, all would know of two M
    assert told["sex"].hidden == 7
    assert told["x"].mean is None
    assert told["x"].rows == 2
    assert "hidden" in repr(fed.describe({"a": few}))
    shown = fed.describe({"a": few}, min_count=1).columns
    assert shown["sex"].counts == {"F": 5, "M": 2}
    assert shown["x"].mean == 1.5


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["a"] * 9 + ["b"] * 5 + ["c"] * 2, {"a": 9}),
        (["a"] * 9 + ["b"] * 5 + ["c"] * 2 + ["d"], {"a": 9, "b": 5}),  # three are hidden
        (["a"] * 9 + ["b"] * 5, {"a": 9, "b": 5}),
    ],
)
def test_a_hidden_level_does_not_follow_from_the_others(values, shown):
    assert fed.describe({"a": {"x": values}}).columns["x"].counts == shown


@pytest.mark.parametrize(
    ("values", "mean"), [([0] * 19 + [1], None), ([0] * 17 + [1] * 3, 0.15), ([0] * 20, 0.0)]
)
def test_a_mean_does_not_tell_how_rare_one_of_two_values_is(values, mean):
    assert fed.describe({"a": {"dead": values}}).columns["dead"].mean == mean


def test_a_column_silo_by_silo():
    words = fed.describe({"a": {"x": [1.0, 2.0, 3.0]}, "b": {"x": [5.0, None, 7.0]}}, min_count=1)
    assert words.by_silo("x").loc["b", ["rows", "missing", "mean"]].tolist() == [2, 1, "6"]
    with pytest.raises(ValueError, match="'y'"):
        words.by_silo("y")


def test_no_quantile_has_fewer_rows_beyond_it():
    x = np.arange(40.0)
    for p, value in fed.describe({"a": {"x": x}}, min_count=3).columns["x"].quantiles:
        assert min((x <= value).sum(), (x >= value).sum()) >= 3, p
    assert 0.05 not in dict(fed.describe({"a": {"x": x}}).columns["x"].quantiles)


def test_dictionaries_are_saved_and_joined(tmp_path):
    whole = fed.describe(tables(), groups=["patient"])
    paths = []
    for name, table in tables().items():
        paths.append(tmp_path / f"{name}.json")
        fed.describe({name: table}, groups=["patient"]).save(paths[-1])
    joined = fed.Dictionary.load(*paths)
    assert joined.columns == whole.columns
    assert joined.silos == whole.silos
    # nothing in a file but what the description has
    text = json.dumps(json.loads(paths[0].read_text()))
    assert not any(f"{v!r}" in text for v in POOLED["x"].dropna()[:100])


@pytest.mark.parametrize(
    "days",
    [
        pd.date_range("2020-01-01", periods=60),
        ["2020-01-02", None, "2020-03-04"] * 20,
        ["2020-01-02", "", "unknown", "2020-03-04", "2020-03-05", " "] * 10,
        ["1.2.2020", "28.11.2021"] * 30,
        ["11/28/21", "02/01/20"] * 30,
        ["2020-01-02 10:30", "2020-01-03T11:00:00Z"] * 30,
        [datetime.date(2020, 1, 2), datetime.date(2020, 1, 3)] * 30,
    ],
    ids=["dates", "text", "blanks", "points", "slashes", "times", "objects"],
)
def test_dates_and_free_text_are_not_described(days):
    table = {"day": days, "note": [f"n{i}" for i in range(60)], "y": np.arange(60.0)}
    told = fed.describe({"a": table}).columns
    assert told["day"].kind == told["note"].kind == "other"
    assert not told["note"].counts
    for column in ("day", "note"):
        said = f"'{column}': expected numbers or levels.*dates, or text"
        with pytest.raises(ValueError, match=said):
            fed.glmm(f"y ~ {column}", {"a": table})


@pytest.mark.parametrize("levels", [["1.2", "1.3.1"], ["3-4", "5-6-7"], ["2020", "2021"]])
def test_levels_that_look_like_dates_are_levels(levels):
    assert fed.describe({"a": {"x": levels * 9}}).columns["x"].kind == "levels"


def test_dates_may_name_groups():
    told = fed.describe({"a": {"day": ["2020-01-02", "2020-01-03"] * 9}}, groups=["day"])
    assert told.columns["day"].elements == 2


def test_free_text_may_have_few_values_in_a_silo():
    many = {"a": {"note": [f"n{i}" for i in range(60)]}, "b": {"note": ["n0"] * 9}}
    told = fed.describe(many)
    assert told.columns["note"].kind == "other"
    assert not told.columns["note"].counts
    assert "text of more than 50 values" in repr(told)


@pytest.mark.parametrize(
    ("own", "order"),
    [
        (["low", "mid", "high"], ["low", "mid", "high"]),
        (["low", "high"], ["low", "mid", "high"]),  # a silo may lack a level
        (["high", "low", "mid"], ["low", "mid", "high"]),  # text has no order
    ],
)
def test_levels_are_in_the_order_of_the_silos(tmp_path, own, order):
    other = ["low", "mid", "high"]
    grades = {"a": own, "b": other}
    tables = {s: {"grade": pd.Categorical(x * 4, x)} for s, x in grades.items()}
    told = fed.describe(tables)
    assert list(told.columns["grade"].counts) == order
    told.save(tmp_path / "words.json")
    assert list(fed.Dictionary.load(tmp_path / "words.json").columns["grade"].counts) == order


def test_other_orders_are_told():
    tables = {
        s: {"grade": pd.Categorical(x * 4, x)}
        for s, x in {"a": ["2", "1"], "b": ["1", "2"]}.items()
    }
    assert list(fed.describe(tables).columns["grade"].counts) == ["2", "1"]
    opposed = {"a": ["low", "mid", "high"], "b": ["high", "mid", "low"]}
    tables = {s: {"grade": pd.Categorical(x * 4, x)} for s, x in opposed.items()}
    with pytest.warns(UserWarning, match=r"\['high', 'low', 'mid'\] in different orders"):
        fed.describe(tables)


def test_codes_are_in_the_order_of_numbers():
    told = fed.describe({"a": {"code": [10, 2, 9] * 3}}, levels=["code"])
    assert list(told.columns["code"].counts) == ["2", "9", "10"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "polars", "dict"])
def test_tables_of_all_kinds(tmp_path, kind):
    import polars
    import pyarrow

    part = tables()["a"].reset_index(drop=True)
    part.to_csv(tmp_path / "a.csv", index=False)
    part.to_parquet(tmp_path / "a.parquet")
    made = {
        "csv": tmp_path / "a.csv",
        "parquet": str(tmp_path / "a.parquet"),
        "arrow": pyarrow.Table.from_pandas(part),
        "polars": polars.from_pandas(part),
        "dict": part.to_dict("list"),
    }[kind]
    assert fed.describe({"a": made}).columns == fed.describe({"a": part}).columns


REFUSED = {
    "no tables": (POOLED, {}, "expected .silo name: table."),
    "a file": ({"a": "none.csv"}, {}, "no file 'none.csv'"),
    "numbers": ({"a": 3}, {}, "expected a table"),
    "empty": ({"a": {"x": []}}, {}, "expected a table with rows"),
    "min_count": ({"a": {"x": [1]}}, {"min_count": 0}, "expected a whole number >= 1"),
    "groups": ({"a": {"x": [1]}}, {"groups": "x"}, "expected names of columns"),
    "unknown group": ({"a": {"x": [1]}}, {"groups": ["y"]}, "no silo has a column 'y'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    data, options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        fed.describe(data, **options)


def test_files_of_another_kind_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"expected a file of Dictionary\.save"):
        fed.Dictionary.load(tmp_path / "x.json")
    fed.describe({"a": {"x": [1.0] * 5}}).save(tmp_path / "a.json")
    with pytest.raises(ValueError, match="silo 'a' is in another file"):
        fed.Dictionary.load(tmp_path / "a.json", tmp_path / "a.json")


def test_a_person_at_the_silo_sees_all_that_leaves(tmp_path):
    from click.testing import CliRunner

    from numpyro_fed.cli.main import main

    tables()["a"].to_csv(tmp_path / "a.csv", index=False)
    args = ["describe", "--data", tmp_path / "a.csv", "--name", "a", "--group", "patient"]
    args = [str(x) for x in (*args, "--out", tmp_path / "a.json")]
    refused = CliRunner().invoke(main, args, input="n\n")
    assert refused.exit_code == 1
    assert not (tmp_path / "a.json").exists()
    written = CliRunner().invoke(main, args, input="y\n")
    assert written.exit_code == 0, written.output
    told = fed.Dictionary.load(tmp_path / "a.json").columns
    assert told == fed.describe({"a": tables()["a"]}, groups=["patient"]).columns
    for name in ("x", "age"):
        for share, value in told[name].quantiles:
            assert f"{share:.0%} {value:.6g}" in written.output


@pytest.mark.parametrize(("text", "words"), [("x,x\n1,2\n", "has 'x' twice"), ("x\n1,2\n", "CSV")])
def test_files_that_pandas_would_shift_or_rename_are_refused(tmp_path, text, words):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=words):
        fed.describe({"a": tmp_path / "a.csv"})


def test_the_order_of_levels_is_the_same_in_every_process():
    """Twenty levels before one and in no order among each other: a set would shuffle them."""
    first = [f"level {chr(98 + i)}" for i in range(20)]
    tables = {x: {"x": pd.Categorical([x, "a"] * 4, [x, "a"])} for x in first}
    assert list(fed.describe(tables).columns["x"].counts) == [*first, "a"]


def test_what_reticulate_makes_of_a_missing_integer_is_refused():
    table = {"n": np.array([1, 2, -(2**31), 4] * 4), "y": np.arange(16.0)}
    with pytest.raises(ValueError, match=r"column 'n', row 2: -2147483648 is.*expected the path"):
        fed.describe({"a": table})
