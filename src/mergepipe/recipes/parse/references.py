"""Resolve model references of a recipe to local paths."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.errors import NotFoundError
from mergepipe.recipes.parse.fields import DocumentReader
from mergepipe.recipes.parse.recipe import ModelInput, Setting
from mergepipe.recipes.parse.yaml_source import KeyPath, Value, shortened

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+(?:@[A-Za-z0-9_./-]+)?")
_REFERENCE_KEYS = ("path", "model", "lora", "delta", "override_architecture")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model reference: its text, and the path, adapter or document that it names."""

    text: str
    path: Path
    adapter: Path | None = None
    intermediate: str | None = None
    is_delta: bool = False


def read_reference(reader: DocumentReader, value: Value, key_path: KeyPath) -> Reference | None:
    """Resolve a reference; None if it names no path.

    A path that does not exist is reported and still returned, so that the remaining checks can run. One place
    on disk gets one path, whatever names it goes by.
    """
    if isinstance(value, dict):
        return _long_form(reader, value, key_path)
    text = reader.text(value, key_path)
    if text is None:
        return None
    target = str(reader.model_paths[text]) if text in reader.model_paths else text
    model, adapter = _parts(reader, target)
    if adapter is None and "+" in text and "+" not in target:
        message, hint = f"where the adapter of '{shortened(text)}' lies is not known", "merge again by the recipe"
        where = reader.source.where(*key_path)
        reader.findings.add(NotFoundError, "recipe.model.not-found", where, message, hint)
    path = _path(reader, model, key_path)
    adapter_path = None if adapter is None else _path(reader, adapter, key_path)
    return Reference(text, path, adapter_path, model if model in reader.documents else None)


def read_model(
    reader: DocumentReader, value: Value, key_path: KeyPath, parameters: dict[str, Setting], entry: KeyPath
) -> ModelInput | None:
    """Resolve the model reference at `key_path`, with the parameters of its `entry`; None if it names no path."""
    reference = read_reference(reader, value, key_path)
    if reference is None:
        return None
    where = reader.source.where(*entry)
    return ModelInput(
        reference.text, reference.path, parameters, where, reference.adapter, reference.intermediate, reference.is_delta
    )


def reference_text(model: ModelInput) -> str:
    """Format a reference that resolves to the same model from any directory: `path` or `path+adapter`."""
    return f"{model.path}+{model.adapter}" if model.adapter is not None else str(model.path)


def referenced_paths(text: str) -> tuple[Path, ...]:
    """Return the paths in a text that `reference_text` wrote: the model's, and its adapter's if it has one."""
    cuts = [(Path(text[:i]), Path(text[i + 1 :])) for i, character in enumerate(text) if character == "+"]
    whole = Path(text)
    if whole.exists() or not cuts:
        return (whole,)
    return next((cut for cut in cuts if all(path.exists() for path in cut)), cuts[0])


def _parts(reader: DocumentReader, text: str) -> tuple[str, str | None]:
    """Cut `model+adapter`; a path that exists may have a plus in its name."""
    pluses = [index for index, character in enumerate(text) if character == "+"]
    if not pluses or text in reader.documents or _exists(reader, text):
        return text, None
    cuts = [(text[:index], text[index + 1 :]) for index in pluses if 0 < index < len(text) - 1]
    known = (cut for cut in cuts if cut[0] in reader.documents or _exists(reader, cut[0]))
    return next(known, cuts[0] if cuts else (text, None))


def _exists(reader: DocumentReader, text: str) -> bool:
    path = _absolute(_without_revision(reader, text), reader.source.path.parent)
    return _why_missing(path, text) is None


def _without_revision(reader: DocumentReader, text: str) -> str:
    """Return the `path` of `path@revision` where that is a local path, and other texts as they are."""
    folder, (path, at, _) = reader.source.path.parent, text.rpartition("@")
    is_missing = bool(at) and _why_missing(_absolute(text, folder), text) is not None
    return path if path and is_missing and _why_missing(_absolute(path, folder), path) is None else text


def _path(reader: DocumentReader, text: str, key_path: KeyPath) -> Path:
    if text in reader.model_paths:
        path = reader.model_paths[text]
    else:
        local = text if text in reader.documents else _without_revision(reader, text)
        path = _absolute(local, reader.source.path.parent)
        if text in reader.documents:
            return path
        if local != text:
            message = f"the revision '{shortened(text[len(local) + 1 :])}' of a local path has no effect"
            elsewhere = "it names a version of a model on the Hub; a local folder is read as it is"
            reader.notice("recipe.ignored-revision", key_path, message, elsewhere)
        _note_if_missing(reader, text, path, key_path)
    return reader.places.setdefault(os.path.realpath(path), path)


def _long_form(reader: DocumentReader, value: dict[str, Value], key_path: KeyPath) -> Reference | None:
    """mergekit writes references back as `{model: {path: ...}, lora: ...}`; other keys change the model."""
    given = {key: item for key, item in value.items() if item is not None}
    if "override_architecture" in given:
        hint = "give the folder of the model as it is to be merged"
        reader.unsupported(
            (*key_path, "override_architecture"), "'override_architecture' in a model reference is", hint
        )
    if isinstance(given.get("path"), str) and isinstance(given.get("revision"), str):
        given["path"] = f"{given['path']}@{given.pop('revision')}"
    reader.unknown_keys(given, _REFERENCE_KEYS, key_path)
    inner = next((key for key in ("path", "model") if key in given), None)
    if inner is None:
        reader.refuse("recipe.missing-key", key_path, "the model reference has no path")
        return None
    if {"path", "model"} <= given.keys():
        reader.refuse("recipe.wrong-kind", key_path, "needs either 'path' or 'model', found both")
    if inner == "path" and isinstance(given["path"], dict):
        reader.text(given["path"], (*key_path, "path"))
        return None
    model = read_reference(reader, given[inner], (*key_path, inner))
    if model is not None and "delta" in given:
        model = _as_delta(reader, model, given["delta"], key_path)
    if model is None or "lora" not in given:
        return model
    return _with_adapter(reader, model, read_reference(reader, given["lora"], (*key_path, "lora")), key_path)


def _as_delta(reader: DocumentReader, model: Reference, value: Value, key_path: KeyPath) -> Reference | None:
    """Mark the model as deltas from the base, if the recipe says so."""
    if not isinstance(value, bool):
        reader.wrong_kind(value, (*key_path, "delta"), "true or false")
        return None
    if value and (model.adapter is not None or model.intermediate is not None):
        message = f"'{shortened(model.text)}' is no checkpoint of differences"
        reader.refuse("recipe.reference.delta", (*key_path, "delta"), message, "remove 'delta'")
        return None
    return replace(model, is_delta=value)


def _with_adapter(
    reader: DocumentReader, model: Reference, adapter: Reference | None, key_path: KeyPath
) -> Reference | None:
    if adapter is None:
        return None
    if model.is_delta or adapter.is_delta:
        message = "an adapter applies to weights, and 'delta' says that these are differences"
        reader.refuse("recipe.reference.delta", (*key_path, "delta"), message, "remove 'delta' or 'lora'")
        return None
    if model.adapter is not None or adapter.adapter is not None:
        message = f"needs one adapter at most, found '{shortened(model.text)}' and '{shortened(adapter.text)}'"
        reader.refuse("recipe.reference.adapters", (*key_path, "lora"), message)
        return None
    return Reference(f"{model.text}+{adapter.text}", model.path, adapter.path, model.intermediate)


def _absolute(text: str, folder: Path) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # `~name` of an unknown user
        path = Path(text)
    return folder / path


def _note_if_missing(reader: DocumentReader, text: str, path: Path, key_path: KeyPath) -> None:
    shown = shortened(text)
    reason = _why_missing(path, shown)
    if reason is None:
        return
    if _HUB_ID.fullmatch(text):
        message = f"there is no '{shown}' in the recipe's folder, and models must be local"
        hint = "if it is a Hub id, download it first, e.g. with huggingface-cli, and give the folder"
    else:
        message, hint = reason, f"looked for {shortened(str(path), 200)}"
    where = reader.source.where(*key_path)
    reader.findings.add(NotFoundError, "recipe.model.not-found", where, message, hint)


def _why_missing(path: Path, shown: str) -> str | None:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no '{shown}'"
    except OSError as error:
        return f"cannot look at '{shown}': {error.strerror}"
    return None
