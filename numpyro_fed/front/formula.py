"""A formula's parts: outcome, common columns, smooths and groups."""

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpyro_fed.front.calls import Calls, take_out

if TYPE_CHECKING:
    from formulae.terms.terms import Model

# functions that take means, sds and knots from the dictionary
OWN = ("scale", "standardize", "center", "bs", "s")
# formulae's, which read all rows that they are given
_REFUSED = ("poly", "rescale", "binary", "B")
_MEND = (
    "expected terms joined by +, -, * and :, groups such as (1 | hospital), and arithmetic and "
    "comparisons inside I(), e.g. I(age ** 2), I(age / 10), I(drug == 'A')"
)
CALL = re.compile(rf"\b({'|'.join(OWN)})\(")
# names in a written model
_USED = {
    *("x", "y", "eta", "intercept", "slopes", "offset", "weights", "trials", "event", "model"),
    *("stratum", "strata", "rows", "hazard", "log_risk", "of_level"),
    *("sigma", "nu", "dispersion", "shape", "precision", "cuts"),
    *("jax", "jnp", "numpyro", "dist", "fed"),
}


@dataclass(frozen=True)
class Group:
    """Effects of a group, such as ``(1 + age | hospital)``.

    :param factor: the columns whose values together name an element.
    :param rhs: the formula of its columns.
    """

    factor: tuple[str, ...]
    rhs: str

    @property
    def name(self) -> str:
        """The factor as a name of Python."""
        return python_name("_".join(self.factor))


@dataclass(frozen=True)
class Formula:
    """The parts of a formula.

    :param outcome: the outcome's columns: one, or successes and trials of ``p(dead, patients)``.
    :param rhs: the formula of the common columns, without smooths.
    :param smooths: columns inside ``s()``.
    :param groups: the groups, one for each factor.
    :param reads: the columns that it reads.
    :param chosen: reference level of each column inside ``C()``, ``None`` where it names none.
    """

    text: str
    outcome: tuple[str, ...]
    rhs: str
    smooths: tuple[str, ...]
    groups: tuple[Group, ...]
    reads: tuple[str, ...]
    chosen: Mapping[str, str | None]


def python_name(text: str) -> str:
    """Return the text as a name of Python that the written model does not use itself."""
    name = re.sub(r"\W+", "_", text).strip("_") or "x"
    name = f"x_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in _USED or keyword.iskeyword(name) else name


def parse(text: object) -> Formula:
    """Return the parts of a formula.

    :raises ValueError: for text that is no formula, has no outcome, or reads rows of other silos.
    """
    if not isinstance(text, str) or text.count("~") != 1:
        raise ValueError(f"formula: expected e.g. 'y ~ x + (1 | hospital)', got {text!r}")
    if "`" in text:
        raise ValueError(
            f"formula {text!r}: expected names of letters, digits, '_' and '.'; rename the others, "
            "e.g. table.rename(columns={'blood pressure': 'blood_pressure'})"
        )
    for name in _REFUSED:
        if re.search(rf"\b{name}\s*\(", text):
            raise ValueError(
                f"formula: {name}() reads all rows, which no silo has; expected one of scale, "
                "center, bs and s, or a column made beforehand"
            )
    left, right = text.split("~")
    masked = take_out(right)
    found = _resolved(text, masked)
    common, smooths, reads = [], [], set()
    groups: dict[tuple[str, ...], list[str]] = {}
    for term in found.terms:
        kind = type(term).__name__
        reads |= set(term.expr.var_names if kind == "GroupSpecificTerm" else term.var_names)
        if numbers := [x for x in reads if not isinstance(x, str)]:
            raise ValueError(f"formula {text!r}: {numbers[0]!r} alone is no term; {_MEND}")
        if kind == "GroupSpecificTerm":
            factor = tuple(masked.put_back(c.name) for c in term.factor.components)
            inner = "1" if type(term.expr).__name__ == "Intercept" else term.expr.name
            groups.setdefault(factor, []).append(_checked(masked.put_back(inner), in_group=True))
        elif kind == "Intercept":
            common.append("1")
        elif (name := masked.put_back(term.name)).startswith("s(") and ":" not in term.name:
            smooths.append(_argument(name))
        elif kind != "NegatedIntercept":
            common.append(_checked(name, in_group=False))
    _check_calls([*common, *(x for inner in groups.values() for x in inner)])
    outcome = _outcome(left.strip())
    reads = set().union(*(masked.reads(name) for name in reads if name))
    if both := reads & {*outcome}:
        raise ValueError(f"formula {text!r}: {min(both)!r} is on both sides")
    return Formula(
        text,
        outcome,
        _rhs(common),
        tuple(smooths),
        tuple(Group(factor, _rhs(inner)) for factor, inner in groups.items()),
        tuple(sorted(reads)),
        masked.chosen,
    )


def _checked(term: str, in_group: bool) -> str:
    """Return a term; raise a ``ValueError`` for an offset that is no term by itself."""
    if "offset(" in term and (in_group or not term.startswith("offset(") or "):" in term):
        raise ValueError(f"formula: expected offset() as a term by itself, got {term!r}")
    return term


def _resolved(text: str, masked: Calls) -> "Model":
    """Return the terms that formulae finds in a formula.

    :param masked: its right-hand side without calls.
    :raises ValueError: for text that it does not read, or of which it would leave out a part.
    """
    try:
        from formulae.parser import Parser
        from formulae.resolver import Resolver
        from formulae.scanner import Scanner
        from formulae.terms.terms import Model
    except ImportError as error:
        raise ImportError('fed.glmm needs formulae: pip install "numpyro-fed[formula]"') from error
    if "[" in masked.text:
        raise ValueError(f"formula {text!r}: expected columns, not single levels; {_MEND}")
    if "||" in text:
        raise ValueError(
            f"formula {text!r}: expected one '|' in a group; effects that are not correlated are "
            "correlated=False"
        )
    try:
        parser = Parser(Scanner(f"outcome ~ {masked.text}").scan())
        expression = parser.parse()

        def model(part: object) -> Model:
            terms = Resolver(part).resolve()
            return terms if isinstance(terms, Model) else Model(terms)

        operations = [*_operations(expression)]
        if any(kind == "STAR_STAR" and _is_column(part.left) for kind, part in operations):
            raise ValueError("a power of one column is that column itself")
        found = model(expression)
        groups = [model(part) for kind, part in operations if kind == "PIPE"]
    except Exception as error:
        raise ValueError(f"formula {text!r}: {error}; {_MEND}") from error
    # formulae ends quietly at a comparison
    if not parser.at_end():
        rest = masked.put_back(parser.peek().lexeme)
        raise ValueError(f"formula {text!r}: cannot read it from {rest!r}; {_MEND}")
    _check_groups(groups)
    return found


def _operations(expression: Any) -> Iterator[tuple[str, Any]]:
    """Yield the operations in formulae's tree of a formula, each with its kind."""
    if hasattr(expression, "operator"):
        yield expression.operator.kind, expression
    for name in ("left", "right", "expression"):
        if hasattr(expression, name):
            yield from _operations(getattr(expression, name))


def _is_column(expression: Any) -> bool:
    """Return whether a part is a column, with or without parentheses around it."""
    while hasattr(expression, "expression"):
        expression = expression.expression
    return type(expression).__name__ == "Variable"


def _check_groups(groups: Iterable["Model"]) -> None:
    """Raise a ``ValueError`` for two groups of one factor, lme4's way of no correlation.

    :param groups: each ``(... | factor)``, where ``a/b`` has two factors.
    """
    factors = [
        factor
        for group in groups
        for factor in {frozenset(c.name for c in t.factor.components) for t in group.group_terms}
    ]
    if twice := [":".join(sorted(x)) for x in factors if factors.count(x) > 1]:
        raise ValueError(
            f"formula: two groups of {twice[0]!r}; expected one, (... | {twice[0]}), with "
            "correlated=False where its effects are not correlated"
        )


def _rhs(terms: list[str]) -> str:
    others = [term for term in terms if term != "1"]
    return " + ".join(["1" if "1" in terms else "0", *others])


def _argument(call: str) -> str:
    inside, *options = call[call.index("(") + 1 : -1].split(",")
    inside = inside.strip()
    if options and not call.startswith("bs("):
        raise ValueError(f"formula: expected a column alone inside {call!r}")
    if not re.fullmatch(r"[\w.]+", inside):
        raise ValueError(
            f"formula: expected the name of a column inside {call!r}, got {inside!r}; make the "
            "column beforehand"
        )
    return inside


def _check_calls(terms: Iterable[str]) -> None:
    """Raise a ``ValueError`` for ``scale(log(age))``: the dictionary describes columns alone."""
    for term in terms:
        for match in CALL.finditer(term):
            if match.group(1) == "s":
                raise ValueError(f"formula: expected s() alone, not inside {term!r}")
            end = term.index(")", match.start())
            _argument(term[match.start() : end + 1])


def _outcome(text: str) -> tuple[str, ...]:
    pair = re.fullmatch(r"(?:p|prop|proportion)\(\s*([\w.]+)\s*,\s*([\w.]+)\s*\)", text)
    if pair:
        return pair.groups()
    if not re.fullmatch(r"[\w.]+", text):
        raise ValueError(
            f"formula: expected a column, or p(successes, trials), before '~', got {text!r}; make "
            "the column beforehand"
        )
    return (text,)
