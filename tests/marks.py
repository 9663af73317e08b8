"""Cases of a test that README's command leaves to .ci/run (docs/contributing.md)."""

from collections.abc import Iterable

import pytest


def heavy(values: Iterable, *of_them: object) -> list:
    """Mark some of a test's values ``ci``."""
    return [pytest.param(v, marks=pytest.mark.ci) if v in of_them else v for v in values]
