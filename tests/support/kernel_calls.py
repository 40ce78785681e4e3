"""Calls of exported kernels, recorded so that they can be repeated elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from mergepipe.kernels.compiled import ExportedKernel


@dataclass(frozen=True, slots=True)
class Call:
    """The name of a kernel and the arguments that it was called with."""

    kernel: str
    arguments: tuple[Any, ...]


@contextmanager
def recorded_calls(most: int) -> Iterator[list[Call]]:
    """Record the first calls of each exported kernel, at most so many, while the context lasts."""
    calls: list[Call] = []
    numbers: Counter[str] = Counter()
    run = ExportedKernel.__call__

    def noted(kernel: ExportedKernel, *arguments: Any) -> Any:
        if numbers[kernel.__name__] < most:
            numbers[kernel.__name__] += 1
            calls.append(Call(kernel.__name__, copied(arguments)))
        return run(kernel, *arguments)

    with patch.object(ExportedKernel, "__call__", noted):
        yield calls


def copied(value: Any) -> Any:
    """Return an argument with copies of its arrays, which start where such an array starts for its elements."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        fields = [copied(field) for field in value]
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    return value


def arrays_of(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the arrays of arguments."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for field in value:
            yield from arrays_of(field)


def outcome(call: Call, run: Callable[..., Any]) -> list[bytes]:
    """Return what a call returns, and what is in all of its arrays then."""
    arguments = copied(call.arguments)
    returned = run(*arguments)
    return [repr(np.asarray(returned).tolist()).encode(), *(array.tobytes() for array in arrays_of(arguments))]
