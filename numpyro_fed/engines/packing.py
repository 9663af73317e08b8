"""Values as bytes and back, for wires and files: a text that says how they are put together, and arrays. Nothing in them is run.

What may be packed: numbers, texts, ``None``, lists, tuples, dictionaries, arrays, random keys, types of arrays, and named tuples and data classes of this
package and of optax. What both sides have of their own (the model's factors) goes by name.
"""

import dataclasses
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import random

__all__ = ["outline", "pack", "unpack", "write_whole"]

_PACKAGES = (__name__.split(".")[0], "optax")  # whose named tuples and data classes hold numbers alone


def pack(value: Any, own: Mapping[str, Any] | None = None) -> bytes:
    """A value as bytes.

    :param own: what the reader has, by name; hashable.
    :raises TypeError: naming the type of what cannot be packed.
    """
    arrays: list[np.ndarray] = []
    head = json.dumps(_described(value, {v: k for k, v in (own or {}).items()}, arrays), separators=(",", ":")).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *(x.tobytes() for x in arrays)])


def outline(value: Any, own: Mapping[str, Any] | None = None) -> Any:
    """What :func:`pack` says of a value beside its arrays, for a record."""
    return _described(value, {v: k for k, v in (own or {}).items()}, [])


def write_whole(place: Path, data: bytes) -> None:
    """Write a file as a whole, or not at all: under a name of its own first."""
    beside = place.with_name(place.name + ".new")
    beside.write_bytes(data)
    os.replace(beside, place)


def unpack(data: bytes, own: Mapping[str, Any] | None = None) -> Any:
    """The value of :func:`pack`; arrays are NumPy's.

    :raises ValueError: for bytes that are none of it.
    """
    stop = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or stop > len(data):
        raise ValueError(f"expected a packed value, got {len(data)} bytes of something else, or a part of one")
    try:
        tree = json.loads(data[8:stop])
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"expected a packed value, got {len(data)} bytes of something else") from error
    reader = _Reader(data, stop, own or {})
    try:
        value = reader.value(tree)
    except (KeyError, TypeError, IndexError, AttributeError, ImportError, RecursionError) as error:
        raise ValueError(f"a packed value is not put together as one ({type(error).__name__}: {error})") from error
    if reader.place != len(data):
        raise ValueError(f"a packed value has {len(data) - reader.place} bytes too many")
    return value


def _described(value: Any, own: Mapping[Any, str], arrays: list[np.ndarray]) -> Any:
    """What the text says of a value, whose arrays are appended."""
    if own and _hashable(value) and value in own:
        return {"own": own[value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return {"type": [str(value.dtype), list(value.shape)]}
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"key": [str(random.key_impl(value)), _described(random.key_data(value), own, arrays)]}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        x = np.asarray(value)
        if x.dtype.kind not in "biufc":
            raise TypeError(f"expected arrays of numbers, got one of {x.dtype}")
        arrays.append(np.ascontiguousarray(x))
        return {"array": [x.dtype.str, list(x.shape)]}
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        names = value._fields if hasattr(value, "_fields") else [f.name for f in dataclasses.fields(value)]
        kind = type(value)
        if kind.__module__.split(".")[0] not in _PACKAGES:
            raise TypeError(f"expected classes of {_PACKAGES}, got {kind.__module__}.{kind.__qualname__}")
        fields = {name: _described(getattr(value, name), own, arrays) for name in names}
        return {"of": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_described(x, own, arrays) for x in value]}
    if isinstance(value, dict):
        if not all(isinstance(k, str) for k in value):
            raise TypeError("expected dictionaries whose keys are texts")
        return {"dict": {k: _described(v, own, arrays) for k, v in value.items()}}
    raise TypeError(f"expected numbers, texts, arrays and what is made of them, got {type(value).__name__}")


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class _Reader:
    """Reads values in the order in which they were described."""

    def __init__(self, data: bytes, place: int, own: Mapping[str, Any]) -> None:
        self.data, self.place, self.own = data, place, own

    def value(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "of" in tree:
            return self._instance(tree["of"], tree["fields"])
        ((kind, inside),) = tree.items()
        match kind:
            case "own":
                return self.own[inside]
            case "type":
                return jax.ShapeDtypeStruct(tuple(inside[1]), np.dtype(inside[0]))
            case "key":
                return random.wrap_key_data(jax.numpy.asarray(self.value(inside[1])), impl=inside[0])
            case "array":
                return self._array(*inside)
            case "list":
                return [self.value(x) for x in inside]
            case "tuple":
                return tuple(self.value(x) for x in inside)
            case "dict":
                return {k: self.value(v) for k, v in inside.items()}
        raise ValueError(f"a packed value has a part {kind!r} of no known kind")

    def _array(self, dtype: str, shape: list[int]) -> np.ndarray:
        kind = np.dtype(dtype)
        if kind.kind not in "biufc" or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"a packed array is of {dtype}, shape {shape}")
        size = kind.itemsize * int(np.prod(shape, dtype=object))
        if self.place + size > len(self.data):
            raise ValueError(f"a packed array of shape {shape} has fewer bytes than it says")
        x = np.frombuffer(self.data, kind, size // kind.itemsize, self.place).reshape(shape)
        self.place += size
        return x

    def _instance(self, name: str, fields: dict[str, Any]) -> Any:
        module, _, qualname = name.partition(":")
        if module.split(".")[0] not in _PACKAGES or not qualname.isidentifier():
            raise ValueError(f"a packed value is of {name!r}; expected a class of {_PACKAGES}")
        kind = getattr(importlib.import_module(module), qualname)
        if not isinstance(kind, type) or not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
            raise ValueError(f"a packed value is of {name!r}; expected a named tuple or data class")
        return kind(**{k: self.value(v) for k, v in fields.items()})
