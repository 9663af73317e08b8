"""Calls inside a formula, such as ``I((age - 65)**2)``, in Python's own reading.

formulae names a term without the parentheses inside its calls, and has an order of operators of its
own. So calls are taken out before it reads a formula, and put back into its terms afterwards, with
parentheses around each operation.
"""

import ast
import re
from dataclasses import dataclass

_OPEN = re.compile(r"[A-Za-z_][\w.]*\s*\(|\{")
_HELD = re.compile(r"\bcall_(\d+)_")
_WORDS = ast.BinOp | ast.UnaryOp | ast.Compare


@dataclass(frozen=True)
class Calls:
    """A right-hand side without its calls.

    :param text: the text, with a name in place of each call, and columns in place of ``C()``.
    :param calls: the calls.
    :param chosen: reference level of each column inside ``C()``, ``None`` where it names none.
    """

    text: str
    calls: tuple[str, ...]
    chosen: dict[str, str | None]

    def put_back(self, term: str) -> str:
        """Return a term with its calls."""
        return _HELD.sub(lambda found: self.calls[int(found[1])], term)

    def reads(self, name: str) -> set[str]:
        """Return the columns that a name stands for: itself, or those inside a call."""
        found = _HELD.fullmatch(name)
        return {name} if found is None else columns_in(self.calls[int(found[1])])


def take_out(text: str) -> Calls:
    """Return a right-hand side without its calls.

    :raises ValueError: for a call that Python cannot read.
    """
    out, place = "", 0
    calls: list[str] = []
    chosen: dict[str, str | None] = {}
    while found := _OPEN.search(text, place):
        end = _end(text, found.end() - 1)
        call = text[found.start() : end]
        call = f"I({call[1:-1]})" if call[0] == "{" else call
        try:
            tree = ast.parse(call, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"formula: cannot read {call!r}: {error.msg}") from error
        out += text[place : found.start()]
        if isinstance(tree, ast.Call) and ast.unparse(tree.func) == "C":
            name, reference = _chosen(tree, call)
            if chosen.get(name) not in (None, reference):
                raise ValueError(f"formula: two reference levels of {name!r}; expected one")
            chosen[name] = reference or chosen.get(name)
            out += name
        else:
            made = _explicit(tree)
            calls += [] if made in calls else [made]
            out += f"call_{calls.index(made)}_"
        place = end
    return Calls(out + text[place:], tuple(calls), chosen)


def columns_in(call: str) -> set[str]:
    """Return the names of columns inside a call, dotted ones too."""
    tree = ast.parse(call, mode="eval")
    functions = {id(x.func) for x in ast.walk(tree) if isinstance(x, ast.Call)}
    inside = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
    found = {
        ast.unparse(x)
        for x in ast.walk(tree)
        if isinstance(x, ast.Name | ast.Attribute) and id(x) not in functions | inside
    }
    return {name for name in found if not name.startswith("np.")}


def compared(rhs: str) -> set[tuple[str, object]]:
    """Return the columns that calls of a right-hand side compare with a value, and the value."""
    trees = [x for call in take_out(rhs).calls for x in ast.walk(ast.parse(call))]
    sides = [[x.left, *x.comparators] for x in trees if isinstance(x, ast.Compare)]
    return {
        (ast.unparse(column), value.value)
        for pair in sides
        for column, value in (pair, pair[::-1])
        if isinstance(column, ast.Name | ast.Attribute) and isinstance(value, ast.Constant)
    }


def columns_of_terms(rhs: str) -> dict[str, set[str]]:
    """Return the columns that each term of a right-hand side reads, those inside calls too."""
    held = take_out(rhs)
    parts = {term: term.split(":") for term in held.text.split(" + ")}
    return {
        held.put_back(term): set().union(*(held.reads(x.strip()) for x in names))
        for term, names in parts.items()
    }


def _end(text: str, place: int) -> int:
    """Return the place after the parenthesis that closes the one at a place."""
    depth, quote = 0, ""
    for i in range(place, len(text)):
        letter = text[i]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "({[") - (letter in ")}]")
            if not depth:
                return i + 1
    raise ValueError(f"formula: expected a closing parenthesis after {text[:place]!r}")


def _chosen(tree: ast.Call, call: str) -> tuple[str, str | None]:
    """Return the column inside ``C()``, and its reference level."""
    match [*tree.args, *(x.value for x in tree.keywords)]:
        case [ast.Name() | ast.Attribute() as column]:
            return ast.unparse(column), None
        case [ast.Name() | ast.Attribute() as column, ast.Call(func=ast.Name("Treatment")) as of]:
            match [*of.args, *(x.value for x in of.keywords)]:
                case [ast.Constant(level)]:
                    return ast.unparse(column), str(level)
    raise ValueError(f"formula: expected C(column) or C(column, Treatment('level')), got {call!r}")


def _explicit(tree: ast.AST) -> str:
    """Return the text of an expression with parentheses around each operation inside another."""

    def inner(x: ast.AST) -> str:
        return f"({_explicit(x)})" if isinstance(x, _WORDS) else _explicit(x)

    match tree:
        case ast.Call():
            args = [_explicit(x) for x in tree.args]
            args += [f"{x.arg}={_explicit(x.value)}" for x in tree.keywords]
            return f"{ast.unparse(tree.func)}({', '.join(args)})"
        case ast.BinOp():
            operator = ast.unparse(ast.BinOp(ast.Name("a"), tree.op, ast.Name("b")))[2:-2]
            return f"{inner(tree.left)} {operator} {inner(tree.right)}"
        case ast.UnaryOp() if isinstance(tree.operand, ast.Constant):
            return ast.unparse(tree)
        case ast.UnaryOp(op=ast.USub()):
            return f"-{inner(tree.operand)}"
        case ast.Compare() if len(tree.ops) == 1:
            operator = ast.unparse(ast.Compare(ast.Name("a"), tree.ops, [ast.Name("b")]))[2:-2]
            return f"{inner(tree.left)} {operator} {inner(tree.comparators[0])}"
        case ast.Name() | ast.Attribute() | ast.Constant():
            return ast.unparse(tree)
    text = ast.unparse(tree)
    raise ValueError(f"formula: expected names, numbers, arithmetic, one comparison, got {text!r}")
