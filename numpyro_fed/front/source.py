"""The text of an ordinary NumPyro model, written from the parts of a formula."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from numpyro_fed.front.families import FAMILIES
from numpyro_fed.front.holes import HolePart, argument_names, level_lines, number_lines


@dataclass(frozen=True)
class GroupPart:
    """Effects of a group, as a model has them.

    :param name: name of the group, and of the argument with each row's element.
    :param effects: names of the columns, the first of them ``"1"`` or not.
    :param scales: prior scale of each effect's sd.
    :param levels: number of elements if they cross silos, ``None`` if each lives in one silo.
    :param by: group whose elements each lie in one of this group's, so that they lead rows to it.
    """

    name: str
    effects: tuple[str, ...]
    scales: tuple[float, ...]
    levels: int | None
    by: str | None = None

    @property
    def index(self) -> str:
        """Name of the argument that says in which element a row, or one of ``by``, lies."""
        return index_name(self.name, self.by)

    @property
    def has_columns(self) -> bool:
        """True where the model gets a matrix, since there are more effects than an intercept."""
        return self.effects != ("1",)


@dataclass(frozen=True)
class Parts:
    """Parts that a model is written from.

    :param title: the formula.
    :param family: name of the family.
    :param intercept: prior mean and sd, at the columns' means; ``None`` without one.
    :param slopes: prior mean and sd of each column's coefficient, per sd of the column.
    :param smooths: prior scale of each smooth's bends, by name.
    :param groups: the groups.
    :param holes: columns with missing values; that of levels, if there is one, is last.
    :param parameters: prior of each parameter of the family.
    :param extras: the arguments ``offset`` and ``weights``, where the model has them.
    :param correlated: whether effects of one group are correlated.
    """

    title: str
    family: str
    intercept: tuple[float, float] | None
    slopes: Sequence[tuple[float, float]]
    smooths: Mapping[str, float]
    groups: Sequence[GroupPart]
    holes: Sequence[HolePart]
    parameters: Mapping[str, str]
    extras: tuple[str, ...]
    correlated: bool


def index_name(group: str, by: str | None) -> str:
    """Return the name of the argument with the element of each row, or of each of ``by``."""
    return group if by is None else f"{group}_of_{by}"


def write(parts: Parts) -> str:
    """Return the text of a module with a function ``model``."""
    body = [*_common(parts)]
    for name, scale in parts.smooths.items():
        body += _smooth(name, scale)
    for group in parts.groups:
        body += _group(group, parts)
    body += [f'{n} = numpyro.sample("{n}", {prior})' for n, prior in parts.parameters.items()]
    inside: list[str] = []
    for hole in parts.holes:
        before, observed = (level_lines if hole.levels else number_lines)(hole)
        body += before
        inside += observed
    body += _outcome(parts, inside)
    imports = [
        "import jax",
        "import jax.numpy as jnp",
        "import numpyro",
        "import numpyro.distributions as dist",
        "",
        "import numpyro_fed as fed",
        "",
        "",
    ]
    last = "y" if FAMILIES[parts.family].event else "y=None"
    names = textwrap.wrap(", ".join([*arguments(parts)[:-1], last]), 90)
    head = [
        *([f"def model({names[0]}):"] if len(names) == 1 else ["def model("]),
        *([*(f"    {line}" for line in names), "):"] if len(names) > 1 else []),
        f'    """{parts.title}"""',
    ]
    return "\n".join([*imports, *head, *(f"    {line}" for line in body), ""])


def make(text: str, name: str) -> Callable:
    """Return the function ``model`` of a module's text."""
    scope: dict = {"__name__": name}
    exec(compile(text, f"<{name}>", "exec"), scope)
    return scope["model"]


def arguments(parts: Parts) -> list[str]:
    """Return the model's arguments, all of them rows; the outcome is last."""
    names = ["x", *parts.smooths]
    for group in parts.groups:
        names += [group.index]
        names += [] if group.levels else [f"{group.name}_elements"]
        names += [f"{group.name}_columns"] if group.has_columns else []
    for hole in parts.holes:
        names += argument_names(hole)
    names += parts.extras
    names += ["trials"] if parts.family == "binomial" else []
    names += ["stratum", "strata"] if parts.family == "cox" else []
    return [*names, *(["event"] if FAMILIES[parts.family].event else []), "y"]


def _common(parts: Parts) -> list[str]:
    lines = ["# columns are centered and of sd 1"] if parts.intercept else []
    eta = ["x @ slopes"] if parts.slopes else []
    if parts.intercept:
        lines.append(
            f'intercept = numpyro.sample("intercept", dist.Normal{_pair(parts.intercept)})'
        )
        eta.insert(0, "intercept")
    if parts.slopes:
        mean, sd = (_array(column) for column in zip(*parts.slopes, strict=True))
        normal = f"dist.Normal({mean}, {sd})"
        if len({_pair(prior) for prior in parts.slopes}) == 1:
            normal = f"dist.Normal{_pair(parts.slopes[0])}.expand([x.shape[1]])"
        lines.append(f'slopes = numpyro.sample("slopes", {normal}.to_event(1))')
    eta += ["offset"] if "offset" in parts.extras else []
    if not parts.slopes:
        eta.append("jnp.zeros(x.shape[0])")
    return [*lines, f"eta = {' + '.join(eta)}"]


def _smooth(name: str, scale: float) -> list[str]:
    return [
        f'sd_{name} = numpyro.sample("sd_{name}", dist.HalfNormal({_number(scale)}))',
        f'bends_{name} = numpyro.sample("bends_{name}", '
        f"dist.Normal(0.0, 1.0).expand([{name}.shape[1]]).to_event(1))",
        f"eta = eta + {name} @ (sd_{name} * bends_{name})",
    ]


def _element(group: GroupPart, groups: Sequence[GroupPart]) -> str:
    """Return the expression of each row's element."""
    inner = [_element(g, groups) for g in groups if g.name == group.by]
    return f"{group.index}[{inner[0]}]" if inner else group.index


def _group(group: GroupPart, parts: Parts) -> list[str]:
    name, number = group.name, len(group.effects)
    single = number == 1
    scale = f"{_number(group.scales[0])}" if single else _array(group.scales)
    event = "" if single else ".to_event(1)"
    lines = [f'sd_{name} = numpyro.sample("sd_{name}", dist.HalfNormal({scale}){event})']
    together = parts.correlated and not single
    if together:
        lines.append(
            f'root_{name} = numpyro.sample("root_{name}", dist.LKJCholesky({number}, 1.0))'
        )
    normal = "dist.Normal(0.0, 1.0)" if single else f"dist.Normal(0.0, 1.0).expand([{number}])"
    if group.levels:
        shape = f"[{group.levels}]" if single else f"[{group.levels}, {number}]"
        lines.append(
            f'z_{name} = numpyro.sample("z_{name}", '
            f"dist.Normal(0.0, 1.0).expand({shape}).to_event({1 if single else 2}))"
        )
    else:
        lines += [
            f'with fed.silo_plate("{name}", {name}_elements.shape[0]):',
            f'    z_{name} = numpyro.sample("z_{name}", {normal}{event})',
        ]
    scaled = (
        f"z_{name} @ (sd_{name}[:, None] * root_{name}).T" if together else f"sd_{name} * z_{name}"
    )
    effects = f"({scaled})[{_element(group, parts.groups)}]"
    if single and group.has_columns:
        effects = f"{name}_columns[:, 0] * {effects}"
    elif group.has_columns:
        effects = f"({name}_columns * {effects}).sum(-1)"
    return [*lines, f"eta = eta + {effects}"]


def _outcome(parts: Parts, inside: Sequence[str]) -> list[str]:
    """Return the plate of rows, with the lines of columns with holes in it."""
    family = FAMILIES[parts.family]
    before: list[str] = []
    plate = 'with fed.silo_plate("rows", x.shape[0]):'
    if parts.family == "cox":
        before = ["log_risk = fed.log_risk(eta, y, stratum)"]
        plate = 'with fed.silo_plate("rows", x.shape[0], row_wise=False):'
        own = ['numpyro.factor("y", event * (eta - log_risk))']
    elif family.event:  # proportional hazards: shape * t^(shape - 1) * exp(eta)
        before = ["hazard = jnp.log(shape) + (shape - 1.0) * jnp.log(y) + eta"]
        own = ['numpyro.factor("y", event * hazard - y**shape * jnp.exp(eta))']
    else:
        likelihood = family.likelihood
        mixed = [hole.name for hole in parts.holes if hole.levels]
        if mixed:
            likelihood = likelihood.replace("trials", "trials[:, None]")
            before = [f"of_level = {likelihood}"]
            shares = f"dist.Categorical(logits=shares_{mixed[0]})"
            likelihood = f"dist.MixtureSameFamily({shares}, of_level)"
        own = [f'numpyro.sample("y", {likelihood}, obs=y)']
        if "weights" in parts.extras:
            own = ["with numpyro.handlers.scale(scale=weights):", f"    {own[0]}"]
    return [*before, plate, *(f"    {line}" for line in (*inside, *own))]


def _pair(pair: tuple[float, float]) -> str:
    return f"({_number(pair[0])}, {_number(pair[1])})"


def _array(values: Sequence[float]) -> str:
    return f"jnp.array([{', '.join(map(_number, values))}])"


def _number(value: float) -> str:
    return repr(float(f"{value:.6g}"))
