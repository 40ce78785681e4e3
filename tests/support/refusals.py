"""Errors that tests expect, by their class and code."""

from __future__ import annotations

from typing import TypeVar

import pytest

from mergepipe.errors import MergePipeError

E = TypeVar("E", bound=MergePipeError)


def refuses(kind: type[E] | tuple[type[E], ...], code: str, match: str = "") -> pytest.RaisesExc[E]:
    """Expect that the block ends with an error of this class and text, whose first problem has this code."""
    return pytest.raises(kind, match=match or None, check=lambda error: error.code == code)
