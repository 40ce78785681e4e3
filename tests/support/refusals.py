"""Errors that tests expect, by their class and code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from mergepipe.errors import MergePipeError

E = TypeVar("E", bound=MergePipeError)


def refuses(kind: type[E] | tuple[type[E], ...], code: str, match: str = "") -> pytest.RaisesExc[E]:
    """Expect that the block ends with an error of this class and text, whose first problem has this code."""
    return pytest.raises(kind, match=match or None, check=lambda error: error.code == code)


def refusal(call: Callable[[], object], kind: type[MergePipeError] = MergePipeError) -> MergePipeError:
    """The error that a call ends with, of this class."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value
