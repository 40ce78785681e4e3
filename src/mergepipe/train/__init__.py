"""Partial saving while training: chosen units of a model with their optimizer state, per rank, crash-safe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe.train.callback import PartialCheckpointCallback
    from mergepipe.train.changes import ChangeTracker
    from mergepipe.train.choice import Filter, LatestChanged, Parity, Strategy
    from mergepipe.train.frameworks import restore_random_state
    from mergepipe.train.function import save_partial

__all__ = [
    "ChangeTracker",
    "Filter",
    "LatestChanged",
    "Parity",
    "PartialCheckpointCallback",
    "Strategy",
    "restore_random_state",
    "save_partial",
]

_HOMES = {
    "ChangeTracker": "changes",
    "Filter": "choice",
    "LatestChanged": "choice",
    "Parity": "choice",
    "PartialCheckpointCallback": "callback",
    "Strategy": "choice",
    "restore_random_state": "frameworks",
    "save_partial": "function",
}


def __getattr__(name: str) -> object:
    """Import what is asked for only now: the callback needs transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
