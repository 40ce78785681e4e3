"""Training checkpoints: what they hold, and one resumable checkpoint out of parts of several."""

from __future__ import annotations

from importlib import import_module
from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe.tailor.api import average, check, compose, diff, export, inspect, recipe
    from mergepipe.tailor.running_average import Averager

__all__ = ["Averager", "average", "check", "compose", "diff", "export", "inspect", "recipe"]


class _Facade(ModuleType):
    """The package, in which a public function keeps its name where a module is called the same."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            return  # importing `mergepipe.tailor.compose` would put the module in the place of the function
        super().__setattr__(name, value)


modules[__name__].__class__ = _Facade


def __getattr__(name: str) -> object:
    """Load public names when they are first used, so that the command line starts at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "running_average" if name == "Averager" else "api"
    return getattr(import_module(f"mergepipe.tailor.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
