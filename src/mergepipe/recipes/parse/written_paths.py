"""Rewrite names of models in the text of a recipe: absolute paths to relative ones, paths to Hub ids."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from mergepipe.core.escaping import yaml_scalar
from mergepipe.recipes.parse.recipe import Recipe, with_changed_models

_ABSOLUTE = re.compile(r"/|~/|file:///")
_NO_PATHS = ("filter", "name")
"""Keys whose values are patterns or names, whatever they look like."""
_PLAIN = re.compile(r"[A-Za-z_.][A-Za-z0-9_.-]*/[A-Za-z0-9_./+-]*")
"""Texts that are strings in YAML without quotes."""
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")
"""An anchor and a tag, which stand before a value."""
_INLINE_STYLES = (None, "'", '"')


def with_relative_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths written relative to its own folder, in its text and its models' names.

    What the names lead to stays the same.
    """
    if not recipe.path.is_local:
        return recipe
    folder = os.path.realpath(recipe.path.parent.local_path)
    named = with_changed_models(recipe, lambda model: replace(model, text=_relative_reference(model.text, folder)))
    return replace(named, source_text=text_with_relative_paths(recipe.source_text, recipe.path.parent.local_path))


def text_with_relative_paths(text: str, folder: Path) -> str:
    """Return the text of a recipe with absolute paths relative to `folder`, also in comments that repeat one."""
    real_folder = os.path.realpath(folder)
    renames: dict[str, str] = {}

    def relative(value: str) -> str:
        parts = {part: _relative(part, real_folder) for part in value.split("+")}
        renames.update((part, path) for part, path in parts.items() if path != part)
        return _relative_reference(value, real_folder)

    text = with_renamed(text, relative)
    for part in sorted(renames, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./~-]){re.escape(part)}(?![\w-])", renames[part].replace("\\", r"\\"), text)
    return text


def with_renamed(text: str, name: Callable[[str], str]) -> str:
    """Return YAML `text` with every string value replaced by `name(value)` where that differs.

    Comments, order and the style of everything else stay. Block scalars, and the values of `filter` and `name`, are no
    references and stay as they are.
    """
    pieces, end = [], len(text)
    for node in sorted(_values(text), key=lambda node: node.start_mark.index, reverse=True):
        changed = name(node.value)
        if changed == node.value:
            continue
        pieces += [text[node.end_mark.index : end], _scalar(changed)]
        start, stop = node.start_mark.index, node.end_mark.index
        properties = _PROPERTIES.match(text, start, stop)
        end = properties.end() if properties else start
    return "".join(reversed([*pieces, text[:end]]))


def _relative_reference(text: str, folder: str) -> str:
    return "+".join(_relative(part, folder) for part in text.split("+"))


def _relative(part: str, folder: str) -> str:
    if not _ABSOLUTE.match(part) or "\n" in part:
        return part
    path = os.path.relpath(Path(part.removeprefix("file://")).expanduser(), folder)
    return path if path.startswith(("./", "../")) or path in (".", "..") else f"./{path}"


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else yaml_scalar(text)


def _values(text: str) -> Iterator[yaml.ScalarNode]:
    """Yield every inline string that is a value, each once, however many aliases it has."""
    seen: set[int] = set()
    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        yield from _values_below(document, seen)


def _values_below(node: yaml.Node | None, seen: set[int]) -> Iterator[yaml.ScalarNode]:
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        if node.style in _INLINE_STYLES and node.tag == "tag:yaml.org,2002:str":
            yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _values_below(item, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not (isinstance(key, yaml.ScalarNode) and key.value in _NO_PATHS):
                yield from _values_below(value, seen)
