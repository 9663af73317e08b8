"""The R session of docs/from_r.md runs, and prints what the page shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "from_r.md").read_text()


def r(script: str, folder: Path) -> str:
    environment = os.environ | {"RETICULATE_PYTHON": sys.executable}
    return subprocess.run(
        ["Rscript", "-e", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.ci
def test_the_session_runs(tmp_path):
    if not shutil.which("Rscript"):
        pytest.skip("no R")
    lacking = r(
        'for (x in c("reticulate", "ncdf4", "posterior", "lme4")) '
        "if (!requireNamespace(x, quietly = TRUE)) cat(x)",
        tmp_path,
    )
    if lacking:
        pytest.skip(f"R lacks {lacking}")
    blocks = re.findall(r"```r\n(.*?)```", PAGE, flags=re.S)
    printed = r("\n".join(blocks), tmp_path)
    shown = re.findall(r"^(?:1 )?([A-Z][\w, ]*\w)  +(-?\d+\.\d+)", PAGE, flags=re.M)
    assert len(shown) == 5
    for name, number in shown:
        found = re.findall(rf"{name} +(-?\d+\.\d+)", printed)
        assert any(float(x) == pytest.approx(float(number), rel=0.05) for x in found), name
