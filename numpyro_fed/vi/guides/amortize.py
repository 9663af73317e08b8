r"""Inference networks that amortize local latents.

A network computes location and log scale of a local latent from its element's own data:

.. math:: z_g = m_\psi(y_g) + e^{l_\psi(y_g)} \odot \epsilon_g, \qquad \epsilon_g \sim N(0, I)

in unconstrained space, for each element g of the site's silo plate. The weights :math:`\psi` are
global parameters of the guide. The server sends them to every silo, and each silo returns its
gradient in them; data and latents stay. A new element has its approximation at once.

Reference: *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
Salomone & Mengersen (2023), remark "Amortized inference".
"""

import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.contrib.module import eqx_module, nnx_module
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint
from numpyro.handlers import block, seed, substitute, trace

from numpyro_fed._typing import AnyArray, ModelArgs, PyTree
from numpyro_fed.density.factors import Factors


@dataclass(frozen=True, eq=False)
class _Module:
    """A network object as a function that declares its weights by ``numpyro.contrib.module``."""

    name: str
    network: Callable
    declare: Callable

    def __call__(self, *args: Array) -> PyTree:
        return self.declare(self.name, self.network)(*args)


@dataclass(frozen=True)
class Encoder:
    """The network of one site; equal encoders share compiled programs.

    :param site: the local site.
    :param shape: shape of one element in unconstrained space.
    :param network: a function of one element's rows, with its weights in ``numpyro.param``
        statements.
    :param inputs: names of the model's arguments whose rows it takes.
    :param start: first values of the weights, by parameter name; pytrees.
    :param supports: the weights' supports.
    """

    site: str
    shape: tuple[int, ...]
    network: Callable
    inputs: tuple[str, ...]
    start: dict[str, PyTree] = field(default_factory=dict, compare=False, repr=False)
    supports: dict[str, Constraint] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        site: str,
        shape: tuple[int, ...],
        network: Callable,
        rows: Mapping[str, AnyArray],
        plate: str,
    ) -> "Encoder":
        """Build an encoder, with its inputs and the first values of its weights.

        Inputs are found among the arguments that have a row for each element.

        :param rows: these arguments, by name (at least one row of each).
        :param plate: their plate, for the messages.
        :raises ValueError: for a network with noise, mutable state, no parameters or a wrong
            output.
        """
        encoder = cls(site, shape, network, _inputs(site, network, rows, plate))
        one = [jnp.asarray(rows[name])[0] for name in encoder.inputs]
        key = random.key(0)
        sites = trace(seed(network, key)).get_trace(*one).values()
        for found in sites:
            if found["type"] in ("mutable", "sample"):
                raise ValueError(
                    f"amortize: the encoder of {site!r} has the {found['type']} site "
                    f"{found['name']!r}; expected a network whose output is a "
                    "function of its weights and one element's data (no batch statistics, no noise)"
                )
        weights = {s["name"]: s for s in sites if s["type"] == "param"}
        if not weights:
            raise ValueError(
                f"amortize: the encoder of {site!r} declares no parameters, so nothing could be "
                "learned; give the equinox or flax.nnx module itself, "
                "or declare it inside the function: numpyro.contrib.module.eqx_module(name, "
                "module)(x)"
            )
        _check_output(site, shape, jax.eval_shape(lambda *x: seed(network, key)(*x), *one))
        start = {k: jax.tree.map(as_float, s["value"]) for k, s in weights.items()}
        supports = {k: s["kwargs"].get("constraint", constraints.real) for k, s in weights.items()}
        return replace(encoder, start=start, supports=supports)

    def __call__(
        self, weights: Mapping[str, PyTree], rows: Mapping[str, AnyArray]
    ) -> tuple[Array, Array]:
        """Return each element's location and log scale, ``(E, *shape)``, unconstrained."""

        def one(*args: Array) -> tuple[Array, Array]:
            with block():
                out = substitute(self.network, data=dict(weights))(*args)
            loc, log_scale = _halves(out)
            return loc.reshape(self.shape), log_scale.reshape(self.shape)

        return jax.vmap(one)(*(jnp.asarray(rows[name]) for name in self.inputs))


def encoders_of(
    networks: Mapping[str, Callable],
    factors: Factors,
    rows: Mapping[str, Mapping[str, AnyArray]],
) -> tuple[Encoder, ...]:
    """Return the encoders of a model's local sites.

    :param networks: a network for each amortized site, by name.
    :param rows: for each row group the arguments that have a row for each of its elements.
    """
    sites, groups = {s.name: s for s in factors.local_sites}, factors.local_groups()
    unknown = sorted(set(networks) - set(sites))
    if unknown:
        raise ValueError(
            f"amortize: {unknown} are no latent sites inside a silo plate; expected some of "
            f"{sorted(sites)}"
        )
    return tuple(
        Encoder.of(name, sites[name].shape, network, rows.get(groups[name], {}), sites[name].plate)
        for name, network in networks.items()
    )


def registered(site: str, network: Callable, prefix: str) -> Callable:
    """Return a network as a function that declares its weights.

    This is for an equinox or flax.nnx module; a function is returned as it is.
    """
    for library, declare in (("equinox", eqx_module), ("flax.nnx", nnx_module)):
        module = sys.modules.get(library)
        if module is not None and isinstance(network, module.Module):
            return _Module(f"{prefix}_{site}_encoder", network, declare)
    if not callable(network) or isinstance(network, type):
        raise TypeError(
            f"amortize: expected an equinox or flax.nnx module, or a function, for {site!r}, got "
            f"{type(network).__name__}"
        )
    return network


def arrays_of(model: Callable, args: tuple, kwargs: ModelArgs) -> dict[str, Array]:
    """Return the arguments of a model that are arrays, by name."""
    given = inspect.signature(model).bind_partial(*args, **kwargs)
    flat: ModelArgs = {}
    for name, value in given.arguments.items():
        named = given.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        flat |= value if named else {name: value}
    return {k: jnp.asarray(v) for k, v in flat.items() if isinstance(v, Array | np.ndarray)}


def as_float(x: ArrayLike) -> Array:
    """Return an array of floating type, which can be learned."""
    x = jnp.asarray(x)
    return x.astype(jnp.result_type(x, float))


def _inputs(site: str, network: Callable, rows: Collection[str], plate: str) -> tuple[str, ...]:
    """Return the names of the arguments that a network takes.

    If there is only one argument, the network may name it differently.
    """
    called = network.network if isinstance(network, _Module) else network
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in inspect.signature(called).parameters.values() if p.kind in kinds]
    needed = [p.name for p in named if p.default is inspect.Parameter.empty]
    if needed and all(name in rows for name in needed):
        return tuple(needed)
    if len(rows) == 1 and len(needed) == 1:
        return tuple(rows)
    raise ValueError(
        f"amortize: the encoder of {site!r} takes {needed}; expected the model's arguments that "
        f"have a row for each element of {plate!r}, by "
        f"name: some of {sorted(rows)}"
    )


def _halves(out: Array | tuple[Array, ...] | list[Array]) -> tuple[Array, Array]:
    if isinstance(out, tuple | list):
        return jnp.asarray(out[0]), jnp.asarray(out[1])
    return tuple(jnp.split(jnp.ravel(out), 2))  # type: ignore[return-value]


def _check_output(site: str, shape: tuple[int, ...], out: PyTree) -> None:
    size, pair = math.prod(shape), isinstance(out, tuple | list)
    parts = list(out) if pair else [out]
    sizes = [[x.size for x in jax.tree.leaves(part)] for part in parts]
    if sizes != ([[size], [size]] if pair else [[2 * size]]):
        shapes = [jax.tree.map(lambda x: x.shape, part) for part in parts]
        raise ValueError(
            f"amortize: the encoder of {site!r} returns {shapes if pair else shapes[0]} for one "
            f"element; expected a pair (loc, log_scale), each of shape {shape}, or one array of "
            f"{2 * size} numbers, the location first (unconstrained)"
        )
