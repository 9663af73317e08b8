"""Tables of the pages of results are those of the files that benchmarks wrote."""

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SPEC = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)

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
