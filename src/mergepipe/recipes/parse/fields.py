"""Check the kind and the keys of recipe values, and report problems with their position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

from mergepipe.errors import RecipeError, did_you_mean
from mergepipe.recipes.parse.problems import Findings
from mergepipe.recipes.parse.yaml_source import KeyPath, Value, YamlSource, shortened
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class DocumentReader:
    """A recipe document that is being parsed: its values, and the problems found so far."""

    source: YamlSource
    findings: Findings
    store: Store  # looks up the models that the document names
    model_paths: Mapping[str, str] = field(default_factory=dict)  # overrides the paths of models in the recipe
    documents: frozenset[str] = frozenset()  # names of the other recipes in the file
    places: dict[Location, Location] = field(default_factory=dict)  # resolved path -> the spelling first used for it

    def refuse(self, code: str, key_path: KeyPath, message: str, hint: str | Callable[[], str] = "") -> None:
        """Report that the recipe is wrong at `key_path`."""
        self.findings.add(RecipeError, code, self.source.where(*key_path), message, hint)

    def unsupported(self, key_path: KeyPath, what: str, hint: str = "") -> None:
        """Report a feature of mergekit that this version does not support."""
        self.refuse("recipe.unsupported", key_path, f"{what} not supported yet", hint)

    def mapping(self, value: Value, key_path: KeyPath, hint: str = "") -> dict[str, Value] | None:
        """Return `value` if it is a mapping (null counts as empty); else report it and return None."""
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.wrong_kind(value, key_path, "names with values", hint)
        return None

    def text(self, value: Value, key_path: KeyPath) -> str | None:
        """Return `value` if it is text that is not blank; else report it and return None."""
        if isinstance(value, str) and value.strip():
            return value
        is_bare = isinstance(value, bool | int | float)
        self.wrong_kind(value, key_path, "text", "put it in quotes if it is meant as text" if is_bare else "")
        return None

    def wrong_kind(self, value: Value, key_path: KeyPath, needed: str, hint: str = "") -> None:
        """Report that `value` is not of the `needed` kind."""
        self.refuse("recipe.wrong-kind", key_path, f"needs {needed}, found {describe(value)}", hint)

    def unknown_keys(self, found: Mapping[str, Value], known: Sequence[str], key_path: KeyPath) -> None:
        """Report every key of `found` that is not `known`."""
        for key in found:
            if key not in known:
                name = shortened(key)
                self.refuse(
                    "recipe.unknown-key", (*key_path, key), f"unknown key '{name}'", partial(did_you_mean, name, known)
                )


def describe(value: Value) -> str:
    """Describe a value for an error message: its kind, and the value itself if it is short."""
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
