"""Names of types that say what the most used values are."""

from typing import Any, TypeAlias

import numpy as np
from jax import Array

PyTree: TypeAlias = Any
"""Pytree of arrays, or of the arrays' types; ``None`` is the empty pytree."""

AnyArray: TypeAlias = np.ndarray | Array
"""Array of NumPy on the server, or of JAX inside a program."""

Column: TypeAlias = Any
"""Value of one argument of the model: an array of rows, or any value without rows."""

ModelArgs: TypeAlias = dict[str, Column]
"""Keyword arguments of the model, of one silo, of a minibatch or of all data."""

Site: TypeAlias = dict[str, Any]
"""Message of a site in a NumPyro trace: its name, type, distribution, value and plates."""

Facts: TypeAlias = dict[str, Any]
"""Texts, numbers, and lists and dicts of them by name: whatever JSON can hold."""

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
"""Tree that JSON can hold."""

Values: TypeAlias = dict[str, Any]
"""Values of a message or a file by name: facts, arrays, and instances with a wire name."""
