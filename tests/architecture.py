"""Figures of the library's shape: rooms and imports, words of docstrings, columns, reaches, lines.

    python tests/architecture.py

A *room* is a file or folder directly in ``numpyro_fed``; an *arrow* leads from a room to one that
it imports from. Imports within functions count.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "numpyro_fed"
# from the bottom up: a file may import from its own room, and from rooms of lower layers
LAYERS = (
    ("_typing",),
    ("_compat", "_arviz", "data"),
    ("rounds",),
    ("density", "privacy"),
    ("surrogates",),
    ("mcmc", "vi"),
    ("decentralized",),
    ("results",),
    ("front",),
    ("__init__",),
    ("engines",),
    ("cli", "examples"),
)
LEVEL = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
WEAK = ("What", "Whether", "Where", "Of", "How", "The same")
COLUMNS = 100


def files() -> dict[str, Path]:
    """Return the library's files by dotted name, without the package's."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in paths}


def room_of(name: str) -> str:
    return name.split(".")[0]


def imports() -> dict[str, set[str]]:
    """Return for each file the files that it imports from."""
    every = files()

    def found(name: str) -> set[str]:
        out = set()
        for node in ast.walk(ast.parse(every[name].read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == PACKAGE.name
            ):
                base = ".".join(node.module.split(".")[1:])
                for alias in node.names:
                    for guess in (
                        f"{base}.{alias.name}".strip("."),
                        base,
                        f"{base}.__init__".strip("."),
                    ):
                        if guess in every:
                            out.add(guess)
                            break
            elif isinstance(node, ast.Import):
                out |= {
                    a.name.split(".", 1)[1]
                    for a in node.names
                    if a.name.startswith(f"{PACKAGE.name}.")
                }
        return out - {name}

    return {name: found(name) for name in every}


def arrows() -> set[tuple[str, str]]:
    """Return pairs of rooms; the first imports from the second."""
    pairs = {(room_of(a), room_of(b)) for a, others in imports().items() for b in others}
    return {(a, b) for a, b in pairs if a != b}


def upward() -> list[str]:
    """Return imports from a room of the same or a higher layer."""
    pairs = [(a, b) for a, others in imports().items() for b in sorted(others)]
    return [
        f"{a} imports {b}"
        for a, b in pairs
        if room_of(a) != room_of(b) and LEVEL[room_of(b)] >= LEVEL[room_of(a)]
    ]


def circles() -> list[list[str]]:
    """Return sets of files that import each other in a circle; a package's own file re-exports."""
    graph = {a: {b for b in bs if not b.endswith("__init__")} for a, bs in imports().items()}
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), list(graph[start])
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                todo += graph.get(one, ())
        reach[start] = seen
    rings = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [list(ring) for ring in sorted(rings)]


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield file and text of every docstring of a function or class."""
    for name, path in files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                text := ast.get_docstring(node)
            ):
                yield f"{name}:{node.name}", text


def weak_openings() -> list[str]:
    """Return docstrings that begin with a relative clause."""
    begins = re.compile(rf"({'|'.join(WEAK)})\b")
    return [
        f"{where}: {text.splitlines()[0]}" for where, text in docstrings() if begins.match(text)
    ]


def reaches() -> list[str]:
    """Return uses of another object's, or another module's, underscore, but in ``_compat``."""
    out = []
    for name, path in files().items():
        if name == "_compat":  # the door to other packages' private names
            continue
        tree = ast.parse(path.read_text())
        own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and of_self(n)}
        own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        own |= {
            t.id
            for n in ast.walk(tree)
            if isinstance(n, ast.AnnAssign) and isinstance(t := n.target, ast.Name)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and private(node.attr)
                and not of_self(node)
                and node.attr not in own
            ):
                out.append(f"{name}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                kinds = [a.name for a in node.names if private(a.name)]
                out += [
                    f"{name}:{node.lineno} {n}"
                    for n in kinds
                    if n not in ("_arviz", "_compat", "_typing", "_base", "_kernel")
                ]
    return out


def private(name: str) -> bool:
    public = ("_replace", "_asdict", "_fields", "_make")  # of named tuples
    return name.startswith("_") and not name.startswith("__") and name not in public


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names(word: str) -> int:
    """Return how often a name is used."""
    trees = [ast.parse(p.read_text()) for p in files().values()]
    return sum(isinstance(n, ast.Name) and n.id == word for tree in trees for n in ast.walk(tree))


def wide(*patterns: str) -> int:
    """Return how many lines are longer than the limit; rows of tables cannot be broken."""
    paths = [p for pattern in patterns for p in sorted(ROOT.glob(pattern))]
    lines = [line for p in paths for line in p.read_text().splitlines()]
    return sum(len(line) > COLUMNS and not line.startswith("| ") for line in lines)


def large() -> tuple[list[str], list[str]]:
    """Return files of more than 330 lines, and functions of more than 60 without docstring."""
    long_files, functions = [], []
    for name, path in files().items():
        text = path.read_text()
        if (lines := text.count("\n")) > 330:
            long_files.append(f"{name} {lines}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = (
                    node.end_lineno
                    - node.lineno
                    + 1
                    - len((ast.get_docstring(node) or "").splitlines())
                )
                functions += [f"{name}:{node.name} {lines}"] if lines > 60 else []
    return long_files, functions


def parameters(room: str, kind: str) -> int:
    """Return how many parameters a class takes."""
    for node in ast.walk(ast.parse(files()[room].read_text())):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            init = next(
                n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"
            )
            return len(init.args.args) + len(init.args.kwonlyargs) - 1
    raise ValueError(kind)


def main() -> None:
    rooms = {room_of(name) for name in files()}
    count = {name: p.read_text().count("\n") for name, p in files().items()}
    long_files, functions = large()
    print(
        f"rooms {len(rooms)}, arrows {len(arrows())}, circles {len(circles())}, arrows up "
        f"{len(upward())}"
    )
    for room in sorted(rooms, key=lambda r: (LEVEL[r], r)):
        lines = sum(n for name, n in count.items() if room_of(name) == room)
        print(
            f"  {LEVEL[room]:2} {room:14} {lines:6} lines <- "
            f"{' '.join(sorted(b for a, b in arrows() if a == room))}"
        )
    print(f"docstrings that begin with {' / '.join(WEAK)}: {len(weak_openings())}")
    print(
        f"lines over {COLUMNS} columns: library {wide('numpyro_fed/**/*.py')}, "
        f"docs {wide('docs/**/*.md', '*.md')}, tests {wide('tests/**/*.py')}, models "
        f"{wide('models/**/*.py')}"
    )
    print(f"reaches into another object's underscore: {len(reaches())}")
    print(", ".join(f"{word} {names(word)}" for word in ("getattr", "hasattr", "Any")))
    print(f"parameters of FSGLD: {parameters('mcmc.fsgld', 'FSGLD')}")
    print(f"files over 330 lines: {long_files}")
    print(f"functions over 60 lines: {functions}")
    print(f"lines of the library: {sum(count.values()):,}")


if __name__ == "__main__":
    main()
