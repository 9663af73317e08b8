"""The built site in a browser: pages at two widths, and what their scripts complain of.

    python -m sphinx -W docs site && python -m pytest -n 0 -m slow tests/test_site.py

The folder is ``site``, or ``NUMPYRO_FED_SITE``. Screenshots are kept in pytest's folder
(``--basetemp``), to be looked at.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread

SITE = Path(os.environ.get("NUMPYRO_FED_SITE", Path(__file__).parents[1] / "site"))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PAGES = (
    *("index", "start", "which", "glossary", "formulas", "models", "api", "results/verdicts"),
    *("tutorials/first_fit", "tutorials/three_organizations"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium"),
    pytest.mark.skipif(not SITE.is_dir(), reason="needs a built site"),
]


def opened(page: Path, width: int, shot: Path) -> str:
    """Return what a page's scripts say in the browser's console, after a screenshot."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size={width},1600", f"--screenshot={shot}", "--virtual-time-budget=5000"]
    options += ["--enable-logging=stderr", f"--user-data-dir={shot.parent / 'profile'}"]
    command = [str(BROWSER), *options, page.as_uri()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    return "\n".join(line for line in said.splitlines() if "CONSOLE" in line)


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_drawn_without_complaints(page, width, tmp_path):
    shot = tmp_path / f"{page.replace('/', '_')}_{width}.png"
    assert opened(SITE / f"{page}.html", width, shot) == ""
    image = imread(shot)
    assert image.shape[1] == width
    assert image[..., :3].std() > 0.03  # not one color


def test_complaints_are_heard(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>nothing.there()</script>")
    assert "nothing is not defined" in opened(page, 420, tmp_path / "shot.png")
