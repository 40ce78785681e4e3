"""Modules of the torch extra, imported by their first use: collecting the tests that use them must not take seconds."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class LateModule:
    """A module by its name; its tests are marked `transformers`, so that of many workers one imports it."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks for such of everything that it collects
            raise AttributeError(attribute)
        return getattr(import_module(self.name), attribute)


torch: Any = LateModule("torch")
transformers: Any = LateModule("transformers")
