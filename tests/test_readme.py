"""The README's example runs as printed, and does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs_and_agrees_with_nuts(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(code.splitlines()) <= 30
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Checks: sound" in printed
    shown = re.findall(r"```text\n(.*?)```", README, flags=re.S)[0]
    for name in ("beta[0]", "beta[1]"):
        (promised,) = re.findall(rf"{re.escape(name)} +(\S+)", shown)
        (found,) = re.findall(rf"{re.escape(name)} +(\S+)", printed)
        assert float(found) == pytest.approx(float(promised), abs=0.02)
    table = names["fed"].compare(names["idata"], names["nuts"]).table
    assert (table["error"] < 0.1 + 3 * table["mcse"]).all()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_linked_pages_and_headings_exist():
    root = Path(__file__).parents[1]
    pages = [root / "README.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md")]
    links = [(page, x) for page in pages for x in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    own = [(page, *x.partition("#")[::2]) for page, x in links if not x.startswith("http")]
    assert len(own) > 200
    wrong = [
        f"{page.name}: {path}#{anchor}"
        for page, path, anchor in own
        if not (target := page.parent / path if path else page).exists()
        or (anchor and anchor not in anchors(target))
    ]
    assert not wrong


def test_import_is_light():
    heavy = "arviz matplotlib ott pandas xarray flwr nvflare numpyro_fed.engines.spmd"
    code = (
        "import numpyro_fed, numpyro_fed.results.compare, sys\n"
        f"print([m for m in {heavy.split()} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_in_the_reference():
    import numpyro_fed as fed

    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    listed = re.findall(r"(?:autoclass|autofunction):: numpyro_fed\.(\w+)$", page, flags=re.M)
    modules = re.findall(r"automodule:: numpyro_fed\.(\S+)$", page, flags=re.M)
    names = listed + [m.rpartition(".")[2] for m in modules]
    missing = [name for name in fed.__all__ if name not in names]
    assert not missing
    assert not [name for name in listed if name not in fed.__all__]
