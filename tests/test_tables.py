"""Pages that are written from files: tables of results, and the gallery of models."""

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, gallery = script("tables"), script("gallery")

PAGE = """Before.

<!-- table speed
kernel = {name}
s = {seconds:.1f} ± {error:.1f}
-->
what was here
<!-- end -->

After.
"""


def test_a_table_is_written_from_its_file(tmp_path):
    facts = {"command": "python speed.py", "date": "2026-01-02", "commit": "abc", "machine": "m"}
    facts |= {"versions": {"jax": "1.0"}, "seconds": 3}
    rows = [{"name": "SGLD", "seconds": 1.26, "error": 0.1}]
    (tmp_path / "speed.json").write_text(json.dumps({**facts, "rows": rows}))
    page = tables.rendered(PAGE, tmp_path)
    assert "| kernel | s |\n| --- | --- |\n| SGLD | 1.3 ± 0.1 |\n" in page
    assert "`python speed.py` on 2026-01-02, 3 s (commit abc; m; jax 1.0)." in page
    assert page.startswith("Before.")
    assert page.endswith("After.\n")
    assert "what was here" not in page
    assert tables.rendered(page, tmp_path) == page


@pytest.mark.parametrize("place", sorted((DOCS / "results").glob("*.md")), ids=lambda p: p.stem)
def test_no_number_is_typed_by_hand_where_there_is_a_file(place):
    page = place.read_text()
    assert tables.rendered(page) == page, "run: python docs/tables.py"


def test_every_file_has_a_page():
    pages = "".join(place.read_text() for place in (DOCS / "results").glob("*.md"))
    files = {place.stem for place in (DOCS / "results").glob("*.json")}
    assert files == set(tables.names(pages))


def test_every_model_is_in_the_gallery():
    assert gallery.PAGE.read_text() == gallery.page()
    listed = sorted(name for names in gallery.TOPICS.values() for name in names)
    assert listed == sorted(file.stem for file in DOCS.parent.glob("models/[a-z]*.py"))
    assert {file.stem for file in gallery.FIGURES.glob("*.webp")} <= set(listed)
