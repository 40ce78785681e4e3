"""Check the kind and the keys of recipe values, and report problems and notices with their position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from mergepipe.errors import RecipeError, did_you_mean
from mergepipe.recipes.parse.names_elsewhere import key_elsewhere
from mergepipe.recipes.parse.problems import Findings, near_miss
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

    def notice(self, code: str, key_path: KeyPath, message: str, elsewhere: str = "") -> None:
        """Report that something has no effect."""
        self.findings.add_notice(code, self.source.where(*key_path), message, elsewhere)

    def warning(self, code: str, key_path: KeyPath, message: str, elsewhere: str = "") -> None:
        """Report that something has another effect than it asks for."""
        self.findings.add_notice(code, self.source.where(*key_path), message, elsewhere, changes_result=True)

    def misspelt(self, code: str, key_path: KeyPath, message: str, hint: str) -> None:
        """Report a name that is nearly a real one: an error, unless the recipe is read leniently."""
        self.findings.add_misspelt(code, self.source.where(*key_path), message, hint)

    def unknown_keys(
        self,
        entry: Mapping[str, Value],
        real_keys: Sequence[str],
        key_path: KeyPath,
        elsewhere: Callable[[str], str] = key_elsewhere,
        further_names: Sequence[str] = (),
    ) -> None:
        """Report every key of `entry` not in `real_keys`: near misses of these or `further_names`, and the rest.

        `elsewhere` says what a key means at another place; a key that means something is no near miss.
        """
        for key in entry:
            if key in real_keys:
                continue
            name, meaning = shortened(key), elsewhere(key)
            real_name = None if meaning else near_miss(name, *real_keys, *further_names)
            if real_name is not None:
                message, hint = f"unknown key '{name}'", f"did you mean '{real_name}'?"
                self.misspelt("recipe.unknown-key", (*key_path, key), message, hint)
            else:
                self.notice("recipe.ignored-key", (*key_path, key), f"the key '{name}' has no effect here", meaning)

    def refuse_unknown_keys(self, entry: Mapping[str, Value], known: Sequence[str], key_path: KeyPath) -> None:
        """Report every key of `entry` not in `known` as a problem: in recipes where nothing may be without effect."""
        for key in entry:
            if key not in known:
                name = shortened(key)
                message, hint = f"unknown key '{name}'", did_you_mean(name, known)
                self.refuse("recipe.unknown-key", (*key_path, key), message, hint)


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
