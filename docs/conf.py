"""Sphinx's settings for the site: ``python -m sphinx -W docs site``."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpyro_fed  # noqa: E402

project = "numpyro_fed"
author = copyright = "numpyro_fed developers"
version = release = numpyro_fed.__version__
extensions = [
    "myst_nb",  # Markdown, and pages whose code is run
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # paths of the machine
# pages link to the README, to models and to tests, which are no pages of the site
suppress_warnings = ["myst.xref_missing", "myst.header"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings tell shapes, which types do not
html_theme = "furo"
html_title = "numpyro_fed"
