"""MergePipe: merge and tailor large-model checkpoints at disk speed, all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe.errors import MergePipeError
    from mergepipe.reports import AnalyzeReport, CheckReport, MergeReport, Progress
    from mergepipe.session import analyze, check, merge

__version__ = "0.1.0"
__all__ = [
    "AnalyzeReport",
    "CheckReport",
    "MergePipeError",
    "MergeReport",
    "Progress",
    "__version__",
    "analyze",
    "check",
    "merge",
]

_HOMES = {
    "AnalyzeReport": "reports",
    "analyze": "session",
    "CheckReport": "reports",
    "MergePipeError": "errors",
    "MergeReport": "reports",
    "Progress": "reports",
    "check": "session",
    "merge": "session",
}


def __getattr__(name: str) -> object:
    """Load public names when they are first used, so that the command line starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mergepipe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"mergepipe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
