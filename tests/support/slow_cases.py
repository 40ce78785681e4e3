"""Parameters of a test of which the fast suite runs a few, and `make test-slow` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

Case = TypeVar("Case")


def slow_unless(is_fast: Callable[[Case], bool], cases: Iterable[Case]) -> list[ParameterSet]:
    """Mark the cases as slow that are not fast; a tuple holds the values of several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if is_fast(case) else pytest.mark.slow)
        for case in cases
    ]
