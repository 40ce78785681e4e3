"""Training checkpoints: what they hold, and one resumable checkpoint out of parts of several."""

from __future__ import annotations

from importlib import import_module

__all__ = ["Averager", "average", "check", "compose", "diff", "export", "inspect", "recipe"]


def __getattr__(name: str) -> object:
    """Load public names when they are first used, so that the command line starts at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "averaging" if name == "Averager" else "api"
    return getattr(import_module(f"mergepipe.tailor.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
