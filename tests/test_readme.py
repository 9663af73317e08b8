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


def test_linked_pages_exist():
    for page in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (Path(__file__).parents[1] / page).is_file(), page


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
