"""Tables of the pages of results, from the files that benchmarks wrote.

    python docs/tables.py

A table stands between two comments. The first names the file without its suffix, and gives for
each column a heading and a format of a row's numbers (tests/test_tables.py compares all pages):

    <!-- table criticism_loo
    model = {problem}
    elpd = {elpd:.2f}
    -->
    <!-- end -->
"""

import json
import re
import textwrap
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_TABLE = re.compile(r"(<!-- table (\w+)\n(.*?)-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def rendered(page: str, folder: Path = RESULTS) -> str:
    """Return a page whose tables are those of the files in a folder."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2], found[3], folder) + found[5], page)


def names(page: str) -> list[str]:
    """Return the names of the files that a page takes tables from."""
    return [found[2] for found in _TABLE.finditer(page)]


def _table(name: str, columns: str, folder: Path) -> str:
    told = json.loads((folder / f"{name}.json").read_text())
    heads, formats = zip(
        *(line.split(" = ", 1) for line in columns.strip().splitlines()), strict=True
    )
    lines = [heads, ["---"] * len(heads)]
    lines += [[cell.format_map(row) for cell in formats] for row in told["rows"]]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    versions = ", ".join(f"{package} {number}" for package, number in told["versions"].items())
    how = (
        f"`{told['command']}` on {told['date']}, {told['seconds']} s (commit {told['commit']}; "
        f"{told['machine']}; {versions})."
    )
    above = "\n".join(textwrap.wrap(how, 100, break_long_words=False, break_on_hyphens=False))
    return f"\n{above}\n\n{rows}\n\n"


if __name__ == "__main__":
    for place in RESULTS.glob("*.md"):
        place.write_text(rendered(place.read_text()))
