"""Imports point down only."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "numpyro_fed"
# from the bottom up; a module may import from its own line and those above it
LAYERS = (
    ("handlers", "_compat", "partitioners", "_silo_checks", "small_matrices", "bounded_features"),
    ("silos",),
    ("splitting", "mixed", "storage", "density"),
    ("factorise", "federation"),
    ("local_map", "nested", "stand_ins", "proof", "engines"),
    ("surrogates",),
    ("mcmc", "vi"),
    ("_silo_coords", "_network_result", "vi_inference_data", "diagnostics"),
    ("inference_data", "_compare_scalars", "_comparison_figure", "_elbo_figure", "results", "prediction"),
    ("one_call", "_model_file"),
    ("_coordinator",),
    ("command_line",),
)
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numpyro_fed"):
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("numpyro_fed.")}
    return names


def modules() -> dict[str, Path]:
    return {str(p.relative_to(PACKAGE)): p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}


def test_imports_point_down():
    wrong = []
    for name, path in modules().items():
        own = Path(name).parts[0].removesuffix(".py")
        wrong += [f"{name} imports {other}" for other in imported(path) if LEVEL[other] > LEVEL[own]]
    assert not wrong


def test_every_module_has_a_layer():
    assert {Path(name).parts[0].removesuffix(".py") for name in modules()} == set(LEVEL)


def test_private_names_of_numpyro_only_in_compat():
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numpyro.") and name != "_compat.py":
                assert not [a.name for a in node.names if a.name.startswith("_")], name


def test_mcmc_knows_engines_only_through_inline():
    for name, path in modules().items():
        if name.startswith("engines"):
            assert not imported(path) & {"mcmc", "surrogates"}


def test_mcmc_and_vi_do_not_know_each_other():
    for name, path in modules().items():
        package = Path(name).parts[0]
        if package in {"mcmc", "vi"}:
            assert not imported(path) & {"mcmc", "vi"} - {package}, name
