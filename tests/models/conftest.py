"""Optimized programs for models that run for long (elsewhere compiling takes most of the time)."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def optimized() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
