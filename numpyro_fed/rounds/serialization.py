"""Conversion of values to bytes and back, for wires and files.

The bytes are a mark, a checksum, a text with the structure of the value, and the arrays' bytes. A
value may hold numbers, texts, ``None``, lists, tuples, dictionaries with texts as keys, arrays,
random keys, types of arrays, and instances of registered classes (:func:`wire_name`). The reader
runs nothing of the bytes, and imports no module that they name. Objects that both sides have (the
model's factors) are sent as names.
"""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar

import jax
import numpy as np
from jax import random

from numpyro_fed._typing import Json

_MARK = b"fed2"
_CHECKSUM = 16  # bytes
_START = len(_MARK) + _CHECKSUM + 8  # where the text begins
_MAX_TEXT = 8 << 20  # bytes; parsing a text of numbers takes some ten times as much memory
# of random keys in a process: JAX compiles a program for each, of 10 MiB, which stays
_MAX_KEY_SHAPES = 16
_KEY_SHAPES: set[tuple[int, ...]] = set()
WIRE_DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")

_CLASSES: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def wire_name(name: str) -> Callable[[_Class], _Class]:
    """Register a named tuple or data class under its own name on the wire, which never changes."""

    def register(kind: _Class) -> _Class:
        if name in _CLASSES:
            raise ValueError(f"two classes have the wire name {name!r}; expected another")
        _CLASSES[name] = kind
        return kind

    return register


@lru_cache(maxsize=1)
def _names(count: int) -> dict[type, str]:
    """Return the name of each registered class; ``count``, their number, is the cache's key."""
    return {kind: name for name, kind in _CLASSES.items()}


@lru_cache(maxsize=1)
def _optax_states(modules: int) -> dict[str, type]:
    """Return the named tuples of the loaded modules of optax, for optimizer states in files."""
    out = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "optax":
            for kind in vars(module).values():
                if isinstance(kind, type) and _names_fields(kind):
                    out[f"{kind.__module__}:{kind.__qualname__}"] = kind
    return out


def _class_of(name: str) -> type | None:
    return _CLASSES.get(name) or _optax_states(len(sys.modules)).get(name)


def name_of(kind: type) -> str:
    """Return the wire name of a class.

    :raises TypeError: for a class that has none.
    """
    name = _names(len(_CLASSES)).get(kind)
    if name is None:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _optax_states(len(sys.modules)).get(name) is not kind:
            raise TypeError(
                f"{name} has no wire name; expected a class with one (wire_name), or a state of "
                "optax"
            )
    return name


def pack(value: object, own: Mapping[str, Hashable] | None = None) -> bytes:
    """Return a value as bytes.

    :param own: objects that the reader has too, by name; they are hashable.
    :raises TypeError: naming the type of a part that cannot be packed.
    """
    arrays: list[np.ndarray] = []
    head = json.dumps(_described(value, _by_value(own), arrays), separators=(",", ":")).encode()
    if len(head) > _MAX_TEXT:
        raise TypeError(f"a text of {len(head):,} bytes; expected at most {_MAX_TEXT:,}")
    body = b"".join([len(head).to_bytes(8, "little"), head, *(x.tobytes() for x in arrays)])
    return _MARK + _checksum(body) + body


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM).digest()


def _by_value(own: Mapping[str, Hashable] | None) -> dict[Hashable, str]:
    return {v: k for k, v in (own or {}).items()}


def outline(value: object, own: Mapping[str, Hashable] | None = None) -> Json:
    """Return the structure of a value, which :func:`pack` writes as text, for a record."""
    return _described(value, _by_value(own), [])


def unpack(data: bytes, own: Mapping[str, Hashable] | None = None, keys: bool = True) -> Any:
    """Return the value that :func:`pack` turned into bytes, with NumPy's arrays.

    :param own: objects for the names in the bytes.
    :param keys: whether random keys may be in it. JAX compiles a program for each of their shapes.
    :raises ValueError: for other bytes.
    """
    if len(data) < _START or data[: len(_MARK)] != _MARK:
        raise ValueError(
            f"expected a packed value, got {len(data)} bytes of something else, or a part of one"
        )
    body = len(_MARK) + _CHECKSUM
    if _checksum(memoryview(data)[body:]) != data[len(_MARK) : body]:
        raise ValueError(
            "a packed value does not match its checksum: it was changed on the way; send it again"
        )
    stop = _START + int.from_bytes(data[body:_START], "little")
    if stop > len(data) or stop - _START > _MAX_TEXT:
        raise ValueError(
            "a packed value has a text of another length than it says, or beyond the limit"
        )
    try:
        tree = json.loads(data[_START:stop])
    except (ValueError, RecursionError) as error:  # ValueError: also of UnicodeDecodeError
        raise ValueError("a packed value's text is no JSON") from error
    reader = _Reader(data, stop, own or {}, keys)
    try:
        value = reader.value(tree)
    except (
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
        ImportError,
    ) as error:
        raise ValueError(
            f"a packed value is not put together as one ({type(error).__name__}: {error})"
        ) from error
    if reader.place != len(data):
        raise ValueError(f"a packed value has {len(data) - reader.place} bytes too many")
    return value


def _described(value: object, own: Mapping[Hashable, str], arrays: list[np.ndarray]) -> Json:
    """Return the structure of a value, and append its arrays to ``arrays``."""
    if own and _hashable(value) and value in own:
        return {"own": own[value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return {"type": [_dtype_name(value.dtype), list(value.shape)]}
    if is_key(value):
        data = _described(random.key_data(value), own, arrays)
        return {"key": [str(random.key_impl(value)), data]}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        x = np.asarray(value)
        name = _dtype_name(x.dtype)
        arrays.append(np.ascontiguousarray(x, x.dtype.newbyteorder("<")))
        return {"array": [name, list(x.shape)]}
    fields = fields_of(value)
    if fields is not None:
        inside = {k: _described(x, own, arrays) for k, x in fields.items()}
        return {"of": name_of(type(value)), "fields": inside}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_described(x, own, arrays) for x in value]}
    if isinstance(value, dict):
        if not all(isinstance(k, str) for k in value):
            raise TypeError("expected dictionaries whose keys are texts")
        return {"dict": {k: _described(v, own, arrays) for k, v in value.items()}}
    raise TypeError(
        f"expected numbers, texts, arrays and what is made of them, got {type(value).__name__}"
    )


def fields_of(value: object) -> dict[str, Any] | None:
    """Return the fields of a data class or of a named tuple; ``None`` for other values."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    named: Any = value
    return named._asdict() if _names_fields(type(value)) else None


def _names_fields(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_key(x: object) -> TypeGuard[jax.Array]:
    """Return whether a value is an array of typed random keys."""
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _dtype_name(dtype: np.dtype) -> str:
    if str(dtype) not in WIRE_DTYPES:
        raise TypeError(f"expected arrays of numbers, got one of {dtype}")
    return str(dtype)


def _hashable(value: object) -> TypeGuard[Hashable]:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class _Reader:
    """Reader of values, in the order in which they were written."""

    def __init__(self, data: bytes, place: int, own: Mapping[str, Hashable], keys: bool) -> None:
        self.data, self.place, self.own, self.keys = data, place, own, keys

    def value(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            if isinstance(tree, list):
                raise ValueError("a packed value has a bare list; expected a list with its type")
            return tree
        if "of" in tree:
            return self._instance(tree["of"], tree["fields"])
        ((kind, inside),) = tree.items()
        match kind:
            case "own":
                return self.own[inside]
            case "type":
                return jax.ShapeDtypeStruct(self._shape(inside[1]), self._dtype(inside[0]))
            case "key":
                return self._key(*inside)
            case "array":
                return self._array(*inside)
            case "list":
                return [self.value(x) for x in inside]
            case "tuple":
                return tuple(self.value(x) for x in inside)
            case "dict":
                return {k: self.value(v) for k, v in inside.items()}
        raise ValueError(f"a packed value has a part {str(kind)[:50]!r} of no known kind")

    @staticmethod
    def _dtype(name: Json) -> np.dtype:
        if name not in WIRE_DTYPES:
            raise ValueError(
                f"a packed array is of type {str(name)[:50]!r}; expected one of {WIRE_DTYPES}"
            )
        return np.dtype(name).newbyteorder("<")

    @staticmethod
    def _shape(shape: Any) -> tuple[int, ...]:
        whole = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**48 for n in shape)
        if not whole or len(shape) > 32:
            raise ValueError("a packed array has no valid shape; expected whole numbers >= 0")
        return tuple(shape)

    def _array(self, dtype: Json, shape: Any) -> np.ndarray:
        kind, shape = self._dtype(dtype), self._shape(shape)
        size = math.prod(shape)
        if self.place + size * kind.itemsize > len(self.data):
            raise ValueError(f"a packed array of shape {shape} has fewer bytes than it says")
        x = np.frombuffer(self.data, kind, size, self.place).reshape(shape)
        self.place += size * kind.itemsize
        return x

    def _key(self, impl: Json, data: Json) -> jax.Array:
        words = self.value(data)
        if impl not in _KEYS or not isinstance(words, np.ndarray) or words.dtype != np.uint32:
            raise ValueError("a packed random key is not valid; expected words of uint32")
        shapes = _KEY_SHAPES | {words.shape}
        if not self.keys or words.size == 0 or words.ndim > 3 or len(shapes) > _MAX_KEY_SHAPES:
            raise ValueError(
                f"packed random keys of shape {words.shape}, after {len(_KEY_SHAPES)} others; "
                f"expected at most {_MAX_KEY_SHAPES} shapes in a process, none of them empty, and "
                "none in replies and connections"
            )
        _KEY_SHAPES.add(words.shape)
        return random.wrap_key_data(jax.numpy.asarray(words), impl=impl)

    def _instance(self, name: Json, fields: Json) -> Any:
        kind = _class_of(name) if isinstance(name, str) else None
        if kind is None or not isinstance(fields, dict):
            raise ValueError(
                f"a packed value is of {str(name)[:80]!r}, which is no registered class"
            )
        return kind(**{k: self.value(v) for k, v in fields.items()})
