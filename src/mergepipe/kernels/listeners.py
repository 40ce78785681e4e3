"""Tell listeners when kernels are being compiled: the first use on a machine does, later ones load them from disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

TYPICAL_SECONDS = 10.0
"""How long compiling what a merge needs takes, measured on two cores: 8 to 9 s."""

Listener = Callable[[bool], None]

_lock = threading.Lock()
_listeners: list[Listener] = []
_n_compilations = 0


@contextlib.contextmanager
def mark_compilation() -> Iterator[None]:
    """Mark that a kernel is being compiled; listeners are called when the first begins and when none is left."""
    _change(+1)
    try:
        yield
    finally:
        _change(-1)


@contextlib.contextmanager
def listen_to_compilation(listener: Listener) -> Iterator[None]:
    """Call `listener(True)` when compiling begins, `listener(False)` when it ends, from the thread that compiles."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def _change(step: int) -> None:
    global _n_compilations
    with _lock:
        before, _n_compilations = _n_compilations, _n_compilations + step
        listeners = tuple(_listeners) if bool(before) != bool(_n_compilations) else ()
    for listener in listeners:
        listener(step > 0)
