"""What classes of transformers store, tie and rename: the table that `tools/architectures.py` makes by running them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mergepipe.core.strict_json import JsonValue

TABLE_NAME = "architectures.json"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class LayerDefaults:
    """What a model type says of single layers: the lists that it reads, and the options of rules left out of a file."""

    lists: frozenset[str] = frozenset()
    options: Mapping[str, int] = field(default_factory=dict)


def with_beginning(name: str, changes: Mapping[str, str]) -> str:
    """Change the longest beginning of a name that is in `changes`; the name itself where none is."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        changed = changes.get(".".join(parts[:cut]))
        if changed is not None:
            return ".".join([changed, *parts[cut:]])
    return name


_SPELLINGS = (
    (".LayerNorm.gamma", ".LayerNorm.weight"),
    (".LayerNorm.beta", ".LayerNorm.bias"),
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)
"""Two names that one weight has had in releases of transformers and torch, as ends of names, the older first."""


def other_spelling(name: str) -> str | None:
    """Return the name that a weight has in files of other releases of transformers or torch; None if there is none."""
    for older, newer in _SPELLINGS:
        if name.endswith(older):
            return name.removesuffix(older) + newer
        if name.endswith(newer):
            return name.removesuffix(newer) + older
    return None


NO_DEFAULTS = LayerDefaults()


@dataclass(frozen=True, slots=True)
class Architecture:
    """What models of one class store.

    `untied` are the weights that are stored only where the head is not tied to the embedding, each with the weight that
    it is a copy of otherwise. `renamed` are beginnings of names of a loaded model, with what files have instead.
    """

    name: str
    embedding: str | None
    head: str | None
    untied: Mapping[str, str]
    renamed: Mapping[str, str]

    def stored_name(self, name: str, tensors: Collection[str]) -> str | None:
        """Return the name that a weight has among `tensors`: its own, or the one that loading changes to it.

        Names that loading changes may lack the word that all names of the model without its head begin with.
        """
        in_files = self.name_in_files(name)
        candidates = [name, in_files]
        if in_files != name and self.embedding is not None:
            candidates.append(in_files.removeprefix(f"{self.embedding.partition('.')[0]}."))
        for candidate in candidates:
            if candidate in tensors:
                return candidate
        return None

    def name_in_files(self, name: str) -> str:
        """Return the name that files have for a weight of a loaded model."""
        numbers = iter(_NUMBER.findall(name))
        pattern = with_beginning(_NUMBER.sub("*", name), self.renamed)
        stored = ""
        for sign in pattern:
            stored += next(numbers, sign) if sign == "*" else sign
        return stored


def architecture_of(config: Mapping[str, JsonValue]) -> Architecture | None:
    """Return what is known of the class that a configuration names, by its model type first; None if it is unknown.

    The class of a repository's own code counts as that of transformers for the same type and task.
    """
    named = config.get("architectures")
    if not isinstance(named, list):
        return None
    names = []
    for name in named:
        if isinstance(name, str):
            names.append(name)
    if len(names) != 1:
        return None
    keys_of_type = _keys_by_type().get(str(config.get("model_type")), [])
    fitting = [key for key in keys_of_type if key.partition("@")[0] == names[0]]
    fitting = fitting or [key for key in keys_of_type if _task(key) and _task(key) == _task(names[0])]
    if not fitting and not keys_of_type and names[0] in _table()["architectures"]:
        fitting = [names[0]]
    return _architecture(fitting[0]) if len(fitting) == 1 else None


def _task(name: str) -> str:
    """Return the task in the name of a class: `ForCausalLM`."""
    before, separator, task = name.partition("@")[0].rpartition("For")
    return separator + task if before else ""


@cache
def _keys_by_type() -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for key, entry in _table()["architectures"].items():
        for model_type in entry["types"]:
            keys.setdefault(model_type, []).append(key)
    return keys


def is_known_type(model_type: JsonValue) -> bool:
    """Whether the table has a class of a model type."""
    return isinstance(model_type, str) and model_type in _keys_by_type()


def layer_defaults(model_type: JsonValue) -> LayerDefaults:
    """Return what a model type says of single layers; nothing for one that is not in the table."""
    entry = _table()["layers"].get(model_type) if isinstance(model_type, str) else None
    if entry is None:
        return NO_DEFAULTS
    return LayerDefaults(frozenset(entry.get("lists", ())), entry.get("options", {}))


@cache
def _architecture(name: str) -> Architecture:
    entry = _table()["architectures"][name]
    return Architecture(
        name, entry.get("embedding"), entry.get("head"), entry.get("untied", {}),
        entry.get("renamed", {}),
    )  # fmt: skip


@cache
def _table() -> dict[str, Any]:
    content = files("mergepipe.checkpoints").joinpath(TABLE_NAME).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(content)
    return table
