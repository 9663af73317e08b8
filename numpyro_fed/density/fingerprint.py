"""Descriptions of silos, models and versions that parties exchange, and checks of them."""

import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_fed._typing import Column, Facts, ModelArgs, PyTree, Values
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.spec import SilosSpec
from numpyro_fed.density.factors import Factors
from numpyro_fed.rounds.serialization import WIRE_DTYPES


class Described(Protocol):
    """Variational fit that tells its facts."""

    def described(self, factors: Factors, shared: ModelArgs) -> Facts:
        """Return the facts that distinguish the fit from another one of the same model."""


def versions() -> dict[str, str]:
    """Return the versions that must be equal on both sides for equal draws."""
    return {
        "numpyro_fed": version("numpyro-fed"),
        "numpyro": numpyro.__version__,
        "jax": jax.__version__,
        "float": str(jnp.result_type(float)),
    }


def as_values(silos: Silos) -> Values:
    """Return silos without rows: static facts, types of rows and shared arguments."""
    rows = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in silos.rows.items()}
    return {"what": silos.spec.values(), "rows": rows, "shared": silos.shared_arrays}


def from_values(values: Values) -> Silos:
    """Build silos without rows from the result of :func:`as_values`."""
    shared = {k: jnp.asarray(v) for k, v in values["shared"].items()}
    return Silos.from_spec(SilosSpec(*values["what"]), values["rows"], {}, shared)


def description(silos: Silos, values: bool = False) -> Facts:
    """Return the description of silos that leaves them first: names, sizes and types.

    :param values: add a hash of each shared argument, for parties who may know the values. A hash
        reveals a value that a party can guess.
    """

    def outlined(name: str, value: Column) -> list[str]:
        if name not in silos.shared_arrays:
            return [type(value).__name__, _hash(repr(value)) if values else ""]
        x = np.asarray(value)
        return [f"{x.dtype}{list(x.shape)}", _hash(x.tobytes()) if values else ""]

    return {
        "names": list(silos.names),
        "sizes": {g: list(n) for g, n in silos.sizes.items()},
        "rows": {
            k: [silos.group[k], str(x.dtype), list(x.shape[1:])]
            for k, x in sorted(silos.rows.items())
        },
        "index": dict(sorted(silos.index.items())),
        "shared": {k: outlined(k, v) for k, v in sorted(silos.shared.items())},
    }


def checked(about: object, who: str, max_rows: int) -> Facts:
    """Check the form of a description, and return its parts.

    :param about: a description from another party.
    :param who: name of that party, for messages.
    :param max_rows: largest number of rows of a silo in a row group.
    :raises ValueError: with the name of the party.
    """
    parts = {"names": list, "sizes": dict, "rows": dict, "index": dict, "shared": dict}
    if not isinstance(about, dict) or any(
        not isinstance(about.get(k), kind) for k, kind in parts.items()
    ):
        raise ValueError(f"{who} does not describe its data; expected {list(parts)}")
    texts = [*about["names"], *about["index"].values()]
    rows = [x for x in about["rows"].values() if isinstance(x, list) and len(x) == 3]
    whole = len(rows) == len(about["rows"]) > 0 and all(
        isinstance(g, str)
        and d in WIRE_DTYPES
        and isinstance(s, list)
        and all(type(n) is int and n >= 0 for n in s)
        for g, d, s in rows
    )
    groups = {g for g, _, _ in rows if isinstance(g, str)}
    if not all(isinstance(x, str) for x in texts) or not whole or set(about["sizes"]) != groups:
        raise ValueError(
            f"{who} describes rows of no known kind; expected names, and types of arrays of numbers"
        )
    if not set(about["index"]) <= set(about["rows"]) or not set(about["index"].values()) <= groups:
        raise ValueError(
            f"{who} describes indices of arguments, or into rows, that it does not have"
        )
    for group, sizes in about["sizes"].items():
        if not isinstance(sizes, list) or len(sizes) != len(about["names"]):
            raise ValueError(f"{who} does not say how many rows of {group!r} each of its silos has")
        wrong = [n for n in sizes if type(n) is not int or not 1 <= n <= max_rows]
        if wrong:
            raise ValueError(
                f"{who} says that it has {repr(wrong[0])[:30]} rows of {group!r}; expected 1 to "
                f"{max_rows:,}; if the number is right, raise the limit: "
                "connect(..., max_rows=...)"
            )
    return {part: about[part] for part in parts}


def fit_together(told: Sequence[Facts], who: Sequence[str]) -> None:
    """Raise a ``ValueError`` unless all silos have the same arguments and types.

    :param told: a description for each party.
    :param who: names of the parties, for messages.
    :raises ValueError: with the name of the party whose description differs.
    """
    for party, other in zip(who[1:], told[1:], strict=True):
        wrong = [k for k in told[0] if k not in ("names", "sizes") and told[0][k] != other[k]]
        if wrong == ["shared"]:
            mine, theirs = told[0]["shared"], other["shared"]
            different = sorted(k for k in {*mine, *theirs} if mine.get(k) != theirs.get(k))
            raise ValueError(
                f"{party} has other values than {who[0]} of {different}, which without rows= count "
                "as shared arguments; expected equal values at all parties, or an entry in rows= "
                "for arguments that differ between silos"
            )
        if wrong:
            raise ValueError(
                f"{party} has silos of another kind than {who[0]}: {wrong[0]} {other[wrong[0]]}, "
                f"expected {told[0][wrong[0]]}; give all parties the same arguments and types, and "
                "name the group of each argument with rows in rows=: groups that follow from "
                "sizes alone may differ"
            )


def joined_spec(told: Sequence[Facts], who: Sequence[str], shared: ModelArgs) -> Silos:
    """Return silos without rows that join all parties' descriptions.

    :param told: a description for each party.
    :param who: names of the parties, for messages.
    :param shared: values of the shared arguments.
    :raises ValueError: with the name of the party whose description does not fit the others.
    """
    fit_together(told, who)
    names = [name for other in told for name in other["names"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"silos {twice} are with more than one party; expected each name once")
    first = told[0]
    sizes = {g: tuple(n for other in told for n in other["sizes"][g]) for g in first["sizes"]}
    rows = {
        k: jax.ShapeDtypeStruct((sum(sizes[group]), *shape), jnp.dtype(dtype))
        for k, (group, dtype, shape) in first["rows"].items()
    }
    arrays = {k: jnp.asarray(v) for k, v in shared.items() if isinstance(v, np.ndarray | Array)}
    static = {k: v for k, v in shared.items() if k not in arrays}
    group = {k: g for k, (g, _, _) in first["rows"].items()}
    mappings = (group, sizes, first["index"], static)
    spec = SilosSpec.of_mappings(tuple(names), tuple(sorted(arrays)), (), *mappings)
    return Silos.from_spec(spec, rows, {}, arrays)


def fingerprint(factors: Factors, known: Silos, fit: Described | None = None) -> Facts:
    """Return the facts that distinguish a model, and a fit, from another one.

    For a model these are its sites, and a hash of the program of its log density with all numbers
    in it.
    """
    rows = {
        leaf: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype) for leaf, _, spec in factors.rows
    }
    arrays = known.shared_arrays
    static = {k: v for k, v in known.shared.items() if k not in arrays}
    theta = {
        name: jax.ShapeDtypeStruct(shape, jnp.result_type(float))
        for name, shape in factors.global_sites
    }
    z = {
        s.name: jax.ShapeDtypeStruct((1, *s.shape), jnp.result_type(float))
        for s in factors.local_sites
    }

    def density(theta: dict, z: dict, rows: dict, arrays: dict) -> PyTree:
        with numpyro.validation_enabled(False):
            return factors.terms(
                theta, z, {**static, **arrays, **rows}, {g: 1.0 for _, g, _ in factors.rows}
            )

    return {
        "global sites": [[name, list(shape)] for name, shape in factors.global_sites],
        "local sites": [[s.name, s.plate, list(s.shape)] for s in factors.local_sites],
        "program": program_hash(density, theta, z, rows, arrays),
        **(fit.described(factors, known.shared) if fit is not None else {"fit": "of chains"}),
    }


def program_hash(fn: Callable, *args: PyTree) -> str:
    """Return a hash of a function's program for arguments of some types, with all numbers in it.

    It does not hash the program's text, because that depends on what JAX has traced before.
    """
    digest = hashlib.sha256()

    def walk(jaxpr: Jaxpr, consts: Sequence[Array] = ()) -> None:
        places = {var: i for i, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}
        for value in consts:
            digest.update(np.asarray(value).tobytes())
        for eqn in jaxpr.eqns:
            digest.update(eqn.primitive.name.encode())
            for var in eqn.invars:
                what = f"{var.val!r} {var.aval}" if isinstance(var, Literal) else f"{places[var]}"
                digest.update(what.encode())
            for name, value in sorted(eqn.params.items()):
                setting(name, value)
            for var in eqn.outvars:
                places[var] = len(places)
                digest.update(str(var.aval).encode())
        out = [
            repr(var.val) if isinstance(var, Literal) else str(places[var]) for var in jaxpr.outvars
        ]
        digest.update(" ".join(out).encode())

    def setting(name: str, value: object) -> None:
        if isinstance(value, ClosedJaxpr):
            walk(value.jaxpr, value.consts)
        elif isinstance(value, Jaxpr):
            walk(value)
        elif isinstance(value, list | tuple):
            for one in value:
                setting(name, one)
        elif isinstance(value, np.ndarray | Array):
            digest.update(np.asarray(value).tobytes())
        elif not callable(value):
            digest.update(f"{name}={re.sub('0x[0-9a-f]+', '', repr(value))}".encode())

    # in another thread, as the caller's context, e.g. jax.ensure_compile_time_eval, would change
    # the program
    with ThreadPoolExecutor(1) as apart:
        program = apart.submit(jax.make_jaxpr(fn), *args).result()
    walk(program.jaxpr, program.consts)
    return digest.hexdigest()[:16]


def rows_hash(silos: Silos) -> str:
    """Return a hash of silos' rows."""
    digest = hashlib.sha256()
    for name in sorted(silos.rows):
        digest.update(name.encode() + np.asarray(silos.rows[name]).tobytes())
    return digest.hexdigest()


def _hash(value: bytes | str) -> str:
    return hashlib.sha256(value if isinstance(value, bytes) else value.encode()).hexdigest()[:16]
