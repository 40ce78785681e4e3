"""Checks that every part of a recipe shares: where a value stands, what kind it is, which keys it may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path

from mergepipe.errors import RecipeError, did_you_mean
from mergepipe.recipes.parse.problems import Findings
from mergepipe.recipes.parse.yaml_source import KeyPath, Value, YamlSource, shortened


@dataclass(frozen=True, slots=True)
class Reading:
    """A recipe file while it is read: its values and what was found wrong so far."""

    source: YamlSource
    findings: Findings
    located: Mapping[str, Path] = field(default_factory=dict)  # where models lie, if not where the recipe says
    documents: frozenset[str] = frozenset()  # names of the other recipes in the file
    places: dict[str, Path] = field(default_factory=dict)  # the path under which each place was first named

    def refuse(self, code: str, key_path: KeyPath, message: str, hint: str | Callable[[], str] = "") -> None:
        """Note that the recipe is wrong at `key_path`."""
        self.findings.add(RecipeError, code, self.source.where(*key_path), message, hint)

    def unsupported(self, key_path: KeyPath, what: str, hint: str = "") -> None:
        """Note that mergekit knows `what` and this version does not."""
        self.refuse("recipe.unsupported", key_path, f"{what} not supported yet", hint)

    def mapping(self, value: Value, key_path: KeyPath, hint: str = "") -> dict[str, Value] | None:
        """Return `value` if it is a mapping (nothing at all is an empty one); else note the problem, return None."""
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.wrong_kind(value, key_path, "names with values", hint)
        return None

    def text(self, value: Value, key_path: KeyPath) -> str | None:
        """Return `value` if it is text that is not blank; else note the problem and return None."""
        if isinstance(value, str) and value.strip():
            return value
        is_bare = isinstance(value, bool | int | float)
        self.wrong_kind(value, key_path, "text", "put it in quotes if it is meant as text" if is_bare else "")
        return None

    def wrong_kind(self, value: Value, key_path: KeyPath, needed: str, hint: str = "") -> None:
        """Note that `value` is not of the `needed` kind."""
        self.refuse("recipe.wrong-kind", key_path, f"needs {needed}, found {describe(value)}", hint)

    def unknown_keys(self, found: Mapping[str, Value], known: Sequence[str], key_path: KeyPath) -> None:
        """Note every key of `found` that is not `known`."""
        for key in found:
            if key not in known:
                name = shortened(key)
                self.refuse(
                    "recipe.unknown-key", (*key_path, key), f"unknown key '{name}'", partial(did_you_mean, name, known)
                )


def describe(value: Value) -> str:
    """Name a value in an error message: its kind, and itself where it is short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not isfinite(value):
        return f"{value}"
    if isinstance(value, int | float):
        return f"the number {value:g}" if abs(value) < 1e300 else "a number that large"
    if isinstance(value, str):
        return f"the text {shortened(value)!r}" if value.strip() else "empty text"
    return "a list" if isinstance(value, list) else "a mapping"
