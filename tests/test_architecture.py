"""Imports point down, without circles; private names of NumPyro have one place."""

import ast

import architecture
from architecture import LEVEL, files, imports, room_of


def test_every_room_has_a_layer():
    assert {room_of(name) for name in files()} == set(LEVEL)


def test_imports_point_down():
    assert not architecture.upward()


def test_no_files_import_each_other_in_a_circle():
    assert not architecture.circles()


def test_the_picture_stays_small():
    assert len(LEVEL) <= 18
    assert len(architecture.arrows()) <= 80


def test_nothing_reaches_into_another_objects_underscore():
    assert not architecture.reaches()


def test_lines_are_within_100_columns():
    """The linter holds Python files, but for long words, and no pages."""
    rooms = ("numpyro_fed", "models", "tests")
    assert not architecture.wide(*(f"{r}/**/*.py" for r in rooms), "docs/**/*.md", "*.md")


def test_private_names_of_numpyro_only_in_compat():
    for name, path in files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("numpyro.")
                and name != "_compat"
            ):
                assert not [a.name for a in node.names if a.name.startswith("_")], name


def test_a_circle_and_an_arrow_up_would_be_seen(monkeypatch):
    found = imports()
    monkeypatch.setattr(
        architecture, "imports", lambda: {**found, "data.silos": {"data.views", "mcmc.remote"}}
    )
    assert [x for x in architecture.circles()[0] if x.startswith("data.")][-2:] == [
        "data.silos",
        "data.views",
    ]
    assert "data.silos imports mcmc.remote" in architecture.upward()


def test_functions_are_short():
    """The limit is 60 lines without the docstring."""
    assert not architecture.large()[1]
