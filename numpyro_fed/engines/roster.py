"""What parties tell of their silos, and whether these fit together: names, sizes, types, shared arguments, the model's program, versions."""

import hashlib
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_fed.density import Factors
from numpyro_fed.silos import Silos

__all__ = ["as_values", "description", "fingerprint", "from_values", "known_of", "versions"]


def versions() -> dict[str, Any]:
    """What has to be the same on both sides for the same draws."""
    return {
        "numpyro_fed": version("numpyro-fed"),
        "numpyro": numpyro.__version__,
        "jax": jax.__version__,
        "float": str(jnp.result_type(float)),
    }


def as_values(silos: Silos) -> dict[str, Any]:
    """Of silos all but the rows: what they are, types of the rows, shared arguments."""
    rows = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in silos.rows.items()}
    return {"what": silos._aux()[:7], "rows": rows, "shared": {k: silos.shared[k] for k in silos._arrays}}


def from_values(values: dict[str, Any]) -> Silos:
    """Silos without rows, of :func:`as_values`."""
    shared = {k: jnp.asarray(v) for k, v in values["shared"].items()}
    return Silos.tree_unflatten(values["what"], (values["rows"], {}, shared))


def description(silos: Silos) -> dict[str, Any]:
    """What is told of silos: names, sizes, types; shared arguments by value."""
    shared = {k: np.asarray(v).tolist() if k in silos._arrays else repr(v) for k, v in silos.shared.items()}
    return {
        "names": list(silos.names),
        "sizes": {g: list(n) for g, n in silos.sizes.items()},
        "rows": {k: [silos.group[k], str(x.dtype), list(x.shape[1:])] for k, x in sorted(silos.rows.items())},
        "index": dict(sorted(silos.index.items())),
        "shared": dict(sorted(shared.items())),
    }


def known_of(silos: Silos, told: Sequence[dict[str, Any]], who: Sequence[str]) -> Silos:
    """What is known of all silos, from what each party says of its own.

    :param silos: any that are like them, whose shared arguments are taken.
    :param told: descriptions.
    :param who: whose, for messages.
    :raises ValueError: naming the party, where they do not fit together.
    """
    for party, other in zip(who[1:], told[1:], strict=True):
        wrong = [k for k in told[0] if k not in ("names", "sizes") and told[0][k] != other[k]]
        if wrong:
            raise ValueError(
                f"{party} has silos of another kind than {who[0]}: {wrong[0]} {other[wrong[0]]}, expected {told[0][wrong[0]]}; "
                "give all the same arguments and types, and say with rows= which group each argument with rows is of: told by sizes alone, it may differ"
            )
    names = [name for other in told for name in other["names"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"silos {twice} are with more than one party; expected each name once")
    sizes = {g: tuple(n for other in told for n in other["sizes"][g]) for g in silos.sizes}
    aux = list(silos._aux())
    aux[0], aux[4] = tuple(names), tuple(sorted(sizes.items()))
    rows = {k: jax.ShapeDtypeStruct((sum(sizes[silos.group[k]]), *x.shape[1:]), x.dtype) for k, x in silos.rows.items()}
    return Silos.tree_unflatten(tuple(aux), (rows, {}, {k: silos.shared[k] for k in silos._arrays}))


def fingerprint(factors: Factors, known: Silos, fit: Any = None) -> dict[str, Any]:
    """What tells a model from another: its sites, and a hash of the program of its log density with all numbers in it; and what tells a fit."""
    rows = {leaf: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype) for leaf, _, spec in factors.rows}
    arrays = {k: known.shared[k] for k in known._arrays}
    static = {k: v for k, v in known.shared.items() if k not in arrays}
    theta = {name: jax.ShapeDtypeStruct(shape, jnp.result_type(float)) for name, shape in factors.global_sites}
    z = {s.name: jax.ShapeDtypeStruct((1, *s.shape), jnp.result_type(float)) for s in factors.local_sites}

    def density(theta: dict, z: dict, rows: dict, arrays: dict) -> Any:
        with numpyro.validation_enabled(False):
            return factors.terms(theta, z, {**static, **arrays, **rows}, {g: 1.0 for _, g, _ in factors.rows})

    program = jax.make_jaxpr(density)(theta, z, rows, arrays)
    text = re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr))  # where in memory a function is
    digest = hashlib.sha256(text.encode())
    for value in program.consts:
        digest.update(np.asarray(value).tobytes())
    return {
        "global sites": [[name, list(shape)] for name, shape in factors.global_sites],
        "local sites": [[s.name, s.plate, list(s.shape)] for s in factors.local_sites],
        "program": digest.hexdigest()[:16],
        **(fit.described() if fit is not None else {"fit": "of chains"}),
    }
