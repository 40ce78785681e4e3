"""Resolve the names of models in a recipe to locations, and rewrite them in its text."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

import yaml

from mergepipe.core.display import shortened, yaml_scalar
from mergepipe.errors import MergePipeError, NotFoundError, RecipeError
from mergepipe.recipes.fields import DocumentReader
from mergepipe.recipes.model_location import (
    ModelName,
    cut_adapter,
    cut_at_address,
    locate_model,
    missing_path,
    no_path_and_no_hub_model,
    nothing_there,
    path_exists,
    resolve_model_name,
)
from mergepipe.recipes.recipe import ModelInput, Recipe, Setting, with_changed_models
from mergepipe.recipes.yaml_source import KeyPath, Value
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location, is_remote

_REFERENCE_KEYS = ("path", "model", "lora", "delta", "override_architecture")


def read_reference(reader: DocumentReader, value: Value, key_path: KeyPath) -> ModelInput | None:
    """Resolve a reference to a model without parameters; None if it names no path.

    A path that does not exist is reported and still returned, so that the remaining checks can run. One place
    on disk gets one path, whatever names it goes by.
    """
    if isinstance(value, dict):
        return _long_form(reader, value, key_path)
    text = reader.text(value, key_path)
    if text is None:
        return None
    target = reader.model_paths.get(text, text)
    model, adapter = _parts(reader, target)
    if adapter is None and "+" in text and "+" not in target:
        message = f"the location of the adapter of '{shortened(text)}' is not recorded"
        hint = "merge again with the recipe"
        where = reader.source.where(*key_path)
        reader.findings.add(NotFoundError, "model.not-found", where, message, hint)
    path = _path(reader, model, key_path)
    adapter_path = None if adapter is None else _path(reader, adapter, key_path)
    intermediate = model if model in reader.documents else None
    return ModelInput(text, path, {}, "", adapter_path, intermediate)


def read_model(
    reader: DocumentReader, value: Value, key_path: KeyPath, parameters: dict[str, Setting], entry: KeyPath
) -> ModelInput | None:
    """Resolve the model reference at `key_path`, with the parameters of its `entry`; None if it names no path."""
    model = read_reference(reader, value, key_path)
    return None if model is None else replace(model, parameters=parameters, where=reader.source.where(*entry))


def reference_text(model: ModelInput) -> str:
    """Format a reference that resolves to the same model from any directory: `path` or `path+adapter`."""
    return f"{model.path}+{model.adapter}" if model.adapter is not None else str(model.path)


def locate_reference(store: Store, place: str | os.PathLike[str]) -> ModelInput:
    """Find the model that a caller names, `model+adapter` or a model alone; its text names where both are.

    Raises as `locate_model` does.
    """

    def exists(part: str) -> bool:
        try:
            return path_exists(store, Location.of(part))
        except MergePipeError:
            return False

    model, adapter = str(place), ""
    if isinstance(place, str):
        model, adapter = cut_adapter(place, exists)
    if not adapter:
        path = locate_model(store, place)
        return ModelInput(str(path), store.pin(path.absolute()), {}, "")
    paths = [locate_model(store, part) for part in (model, adapter)]
    of_model, of_adapter = (store.pin(path.absolute()) for path in paths)
    return ModelInput("+".join(map(str, paths)), of_model, {}, "", of_adapter)


def referenced_paths(text: str, store: Store) -> tuple[Location, ...]:
    """Return the paths in a text that `reference_text` wrote: the model's, and its adapter's if it has one."""
    before, adapter = cut_at_address(text)
    if adapter:
        return Location.parse(before), Location.parse(adapter)
    pluses = [index for index, character in enumerate(text) if character == "+"]
    whole = Location.parse(text)
    if not pluses or path_exists(store, whole):
        return (whole,)
    cuts = [(Location.parse(text[:index]), Location.parse(text[index + 1 :])) for index in pluses]
    return next((cut for cut in cuts if all(path_exists(store, path) for path in cut)), cuts[0])


def _parts(reader: DocumentReader, text: str) -> tuple[str, str | None]:
    """Cut `model+adapter`; a path that exists may have a plus in its name."""
    if text in reader.documents:
        return text, None

    def exists(part: str) -> bool:
        return part in reader.documents or _exists(reader, part)

    model, adapter = cut_adapter(text, exists, reader.model_paths)
    return model, adapter or None


def _exists(reader: DocumentReader, text: str) -> bool:
    try:
        return path_exists(reader.store, _absolute(text, reader.source.folder))
    except MergePipeError:  # what is wrong with it is said where it is opened
        return False


def _path(reader: DocumentReader, text: str, key_path: KeyPath) -> Location:
    folder = reader.source.folder
    if text in reader.model_paths:
        path = Location.parse(reader.model_paths[text])
    elif text in reader.documents:
        return folder / text
    else:
        try:
            name = _name(reader, text)
            if name.ignored_revision:
                message = f"the revision '{shortened(name.ignored_revision)}' of a local path has no effect"
                elsewhere = "a revision is a version of a model on the Hub; a local folder has none"
                reader.warning("recipe.unclear", key_path, message, elsewhere)
            path = name.remote or _absolute(name.path, folder)
            if not _is_there(reader, name, text, path, key_path):
                return path
        except RecipeError as error:
            problem = error.problems[0]
            reader.findings.add(RecipeError, problem.code, reader.source.where(*key_path), str(error))
            return folder
    path = reader.store.pin(path.without_detours())
    return reader.places.setdefault(real_location(reader.store, path), path)


def _name(reader: DocumentReader, text: str) -> ModelName:
    """Resolve a name; one that is a path of the folder that paths are not relative to is no model of the Hub."""
    name = resolve_model_name(text, lambda candidate: _exists(reader, candidate))
    if name.is_hub_id and _path_in_other_folder(reader, text) is not None:
        return ModelName(path=text)
    return name


def _long_form(reader: DocumentReader, value: dict[str, Value], key_path: KeyPath) -> ModelInput | None:
    """mergekit writes references back as `{model: {path: ...}, lora: ...}`; other keys change the model."""
    entry = {key: item for key, item in value.items() if item is not None}
    if "override_architecture" in entry:
        message = "'override_architecture' has no effect: names and shapes of tensors decide what is merged"
        elsewhere = "in mergekit it chooses the expected names, and is written to the output's config.json"
        reader.notice("recipe.no-effect", (*key_path, "override_architecture"), message, elsewhere)
    if isinstance(entry.get("path"), str) and isinstance(entry.get("revision"), str):
        entry["path"] = f"{entry['path']}@{entry.pop('revision')}"
    reader.unknown_keys(entry, _REFERENCE_KEYS, key_path)
    inner = next((key for key in ("path", "model") if key in entry), None)
    if inner is None:
        reader.refuse("recipe.incomplete", key_path, "the model reference has no path")
        return None
    if {"path", "model"} <= entry.keys():
        reader.refuse("recipe.value", key_path, "needs either 'path' or 'model', found both")
    if inner == "path" and isinstance(entry["path"], dict):
        reader.text(entry["path"], (*key_path, "path"))
        return None
    model = read_reference(reader, entry[inner], (*key_path, inner))
    if model is not None and "delta" in entry:
        model = _as_delta(reader, model, entry["delta"], key_path)
    if model is None or "lora" not in entry:
        return model
    return _with_adapter(reader, model, read_reference(reader, entry["lora"], (*key_path, "lora")), key_path)


def _as_delta(reader: DocumentReader, model: ModelInput, value: Value, key_path: KeyPath) -> ModelInput | None:
    """Mark the model as deltas from the base, if the recipe says so."""
    if not isinstance(value, bool):
        reader.wrong_kind(value, (*key_path, "delta"), "true or false")
        return None
    if value and (model.adapter is not None or model.intermediate is not None):
        message = f"'{shortened(model.text)}' is not a checkpoint of differences"
        reader.refuse("recipe.value", (*key_path, "delta"), message, "remove 'delta'")
        return None
    return replace(model, is_delta=value)


def _with_adapter(
    reader: DocumentReader, model: ModelInput, adapter: ModelInput | None, key_path: KeyPath
) -> ModelInput | None:
    if adapter is None:
        return None
    if model.is_delta or adapter.is_delta:
        message = "an adapter applies to weights, and 'delta' says that these are differences"
        reader.refuse("recipe.value", (*key_path, "delta"), message, "remove 'delta' or 'lora'")
        return None
    if model.adapter is not None or adapter.adapter is not None:
        message = f"needs one adapter at most, found '{shortened(model.text)}' and '{shortened(adapter.text)}'"
        reader.refuse("recipe.value", (*key_path, "lora"), message)
        return None
    return replace(model, text=f"{model.text}+{adapter.text}", adapter=adapter.path)


def real_location(store: Store, path: Location) -> Location:
    """Return the target of a location, equal for all spellings of one place; itself where there is nothing."""
    return store.real_path(path) or path.normal()


def _absolute(text: str, folder: Location) -> Location:
    """The location that a text names, relative to the recipe's folder where it is a relative path."""
    if is_remote(text):
        return Location.parse(text)
    path = Location.parse(text).local_path
    with contextlib.suppress(RuntimeError):  # `~name` of an unknown user
        path = path.expanduser()
    return Location.local(path) if path.is_absolute() else folder / PurePosixPath(path)


def _is_there(reader: DocumentReader, name: ModelName, text: str, path: Location, key_path: KeyPath) -> bool:
    """Whether there is anything; reports that there is nothing."""
    where = reader.source.where(*key_path)
    if path.is_local:
        if path_exists(reader.store, path):
            return True
        problem = missing_path(reader.store, text, path).problems[0]
        hint = _hint_of_other_folder(reader, text) or problem.hint
        reader.findings.add(NotFoundError, problem.code, where, problem.message, hint)
        return False
    try:
        if reader.store.stat(path) is not None:
            return True
        error: MergePipeError = nothing_there(path)
    except NotFoundError as refusal:
        error = refusal
    except MergePipeError as refusal:  # access, or the network: nothing is known of the recipe
        problems = (replace(problem, where=f"{where}: {problem.where}") for problem in refusal.problems)
        raise type(refusal)(*problems) from refusal
    if name.is_hub_id:
        error = no_path_and_no_hub_model(text, error)
    problem = error.problems[0]
    reader.findings.add(NotFoundError, problem.code, where, problem.message, problem.hint)
    return False


def _path_in_other_folder(reader: DocumentReader, text: str) -> Location | None:
    """The path that a relative name has in the folder that names of this recipe are not relative to, if it is there."""
    other = reader.source.other_folder
    if other is None:
        return None
    try:
        path = _absolute(text, other)
    except MergePipeError:
        return None
    if not path_exists(reader.store, path):
        return None
    return path


def _hint_of_other_folder(reader: DocumentReader, text: str) -> str:
    """Say that a missing path is there in the other folder, and what to write instead."""
    other = _path_in_other_folder(reader, text)
    if other is None:
        return ""
    folder = reader.source.folder
    names = ["the recipe's folder", "the working folder"]
    if folder == Location.local(Path.cwd()):
        names.reverse()
    written = shortened(other.relative_text(folder), 200)
    return f"paths are relative to {names[0]}, and {names[1]} has one: write {written}"


# --- rewrite names of models in the text of a recipe: absolute paths to relative ones, paths to Hub ids ---


_ABSOLUTE = re.compile(r"/|~/|file:///")
_PATH_START = re.compile(r"(?<![\w./~-])(?:/|~/|file:///)")
_PATH_GOES_ON = re.compile(r"[\w-]")
_NO_PATHS = ("filter", "name", "positive_prompts", "negative_prompts")
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

    return _with_replaced_paths(with_renamed(text, relative), renames)


def _with_replaced_paths(text: str, renames: Mapping[str, str]) -> str:
    """Replace whole paths in a text, in one pass; of several that begin at one place, the longest."""
    lengths = sorted({len(path) for path in renames}, reverse=True)
    pieces = []
    end = 0
    for match in _PATH_START.finditer(text):
        start = match.start()
        if start < end:
            continue
        for length in lengths:
            path = text[start : start + length]
            if path in renames and not _PATH_GOES_ON.match(text, start + length):
                pieces += [text[end:start], renames[path]]
                end = start + length
                break
    return "".join([*pieces, text[end:]])


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
        pieces += [text[node.end_mark.index : end], changed if _PLAIN.fullmatch(changed) else yaml_scalar(changed)]
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
