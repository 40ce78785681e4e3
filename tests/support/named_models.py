"""Models as recipes name them."""

from __future__ import annotations

from mergepipe.recipes.recipe import ModelInput
from mergepipe.storage.location import Location


def named(path: Location, adapter: Location | None = None, *, is_delta: bool = False) -> ModelInput:
    """A model as a recipe names it."""
    return ModelInput(str(path), path, {}, "recipe", adapter, None, is_delta)
