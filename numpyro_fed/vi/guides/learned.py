"""Learned parameters of a model: its ``numpyro.param`` sites, their supports and first values."""

from collections.abc import Callable

import jax
from jax import Array, random
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.initialization import init_to_uniform

from numpyro_fed._typing import PyTree, Site
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import PARAMS, Factors, LearnedModel, made_up_rows
from numpyro_fed.vi.guides.amortize import as_float


def factored(
    model: Callable, parts: tuple[Silos, ...]
) -> tuple[dict[str, tuple[Constraint, PyTree]], tuple[Silos, ...], list[Factors]]:
    """Factorize the model over each structure of silos, with its learned parameters.

    :return: support and first value of each learned parameter; the silos, with these values among
        their shared arguments; and the factors of each structure.
    """
    learned: dict[str, tuple[Constraint, PyTree]] = {}
    for part in reversed(parts):
        learned |= _learned(model, part)
    if learned:
        start = {name: value for name, (_, value) in learned.items()}
        parts = tuple(part.with_shared(**{PARAMS: start}) for part in parts)
        model = LearnedModel(model)
    return learned, parts, [factorize(model, part) for part in parts]


def probe(model: Callable, silos: Silos, key: Array, init: Callable) -> dict[str, Site]:
    """Trace the model on one made-up row of everything.

    :param init: an initialization strategy for the latent sites, which may have improper priors.
    """
    specs = tuple(
        (k, silos.group[k], jax.ShapeDtypeStruct(v.shape[1:], v.dtype))
        for k, v in silos.rows.items()
    )
    kwargs = {**silos.shared, **made_up_rows(specs, silos.index)}
    return trace(substitute(seed(model, key), substitute_fn=init)).get_trace(**kwargs)


def _learned(model: Callable, silos: Silos) -> dict[str, tuple[Constraint, PyTree]]:
    """Return support and first value of the model's ``numpyro.param`` sites."""
    factors = factorize(model, silos)
    plates = dict(factors.plates)
    if not factors.undrawn:
        return {}
    out = {}
    for name, site in probe(model, silos, random.key(0), init_to_uniform).items():
        if site["type"] == "param":
            if any(f.name in plates for f in site["cond_indep_stack"]):
                raise ValueError(
                    f"learned parameter {name!r} is inside a silo plate; expected parameters that "
                    "all silos share: make "
                    "it a latent site, or move it out of the plate"
                )
            value = jax.tree.map(as_float, site["value"])  # a network's weights are a pytree
            if not jax.tree.leaves(value):
                continue  # a network whose weights all have priors
            out[name] = (site["kwargs"].get("constraint", constraints.real), value)
        elif site["type"] == "mutable":
            raise ValueError(f"mutable site {name!r}: expected a model without mutable state")
    return out
