"""Save partial checkpoints during training: selected units with their optimizer state, per rank, crash-safe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe.tailor.saving.callback import PartialCheckpointCallback, save_partial
    from mergepipe.tailor.saving.frameworks import restore_random_state
    from mergepipe.tailor.saving.partial_run import BackgroundWriter
    from mergepipe.tailor.saving.unit_choice import ChangeTracker, LatestChanged, Schedule, Strategy

__all__ = [
    "BackgroundWriter",
    "ChangeTracker",
    "LatestChanged",
    "PartialCheckpointCallback",
    "Schedule",
    "Strategy",
    "restore_random_state",
    "save_partial",
]

_HOMES = ("unit_choice", "partial_run", "frameworks", "callback")


def __getattr__(name: str) -> object:
    """Import the named attribute lazily: the callback needs transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))
