"""What a recipe calls a model, turned into paths: only folders and files of this machine are models here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.errors import NotFoundError
from mergepipe.recipes.parse.fields import Reading
from mergepipe.recipes.parse.recipe import ModelInput, Setting
from mergepipe.recipes.parse.yaml_source import KeyPath, Value, shortened

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+(?:@[A-Za-z0-9_./-]+)?")
_REFERENCE_KEYS = ("path", "model", "lora", "delta", "revision", "override_architecture")
_REFUSED_KEYS = ("revision", "override_architecture")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model as a recipe refers to it: the text, and what it stands for."""

    text: str
    path: Path
    adapter: Path | None = None
    intermediate: str | None = None
    is_delta: bool = False


def read_reference(reading: Reading, value: Value, key_path: KeyPath) -> Reference | None:
    """Return what the reference stands for; None if it names no path at all.

    A path that does not exist is noted as a problem and returned all the same, so that the rules can go on. One place
    on disk gets one path, whatever names it goes by.
    """
    if isinstance(value, dict):
        return _long_form(reading, value, key_path)
    text = reading.text(value, key_path)
    if text is None:
        return None
    target = str(reading.located[text]) if text in reading.located else text
    model, adapter = _parts(reading, target)
    if adapter is None and "+" in text and "+" not in target:
        message, hint = f"where the adapter of '{shortened(text)}' lies is not known", "merge again by the recipe"
        where = reading.source.where(*key_path)
        reading.findings.add(NotFoundError, "recipe.model.not-found", where, message, hint)
    path = _path(reading, model, key_path)
    adapter_path = None if adapter is None else _path(reading, adapter, key_path)
    return Reference(text, path, adapter_path, model if model in reading.documents else None)


def read_model(
    reading: Reading, value: Value, key_path: KeyPath, parameters: dict[str, Setting], entry: KeyPath
) -> ModelInput | None:
    """Return the model that a reference at `key_path` names, with the parameters of its `entry`; None if none."""
    reference = read_reference(reading, value, key_path)
    if reference is None:
        return None
    where = reading.source.where(*entry)
    return ModelInput(
        reference.text, reference.path, parameters, where, reference.adapter, reference.intermediate, reference.is_delta
    )


def reference_text(model: ModelInput) -> str:
    """What `read_reference` reads as the same model, from any folder: the path, and `+` its adapter's."""
    return f"{model.path}+{model.adapter}" if model.adapter is not None else str(model.path)


def referenced_paths(text: str) -> tuple[Path, ...]:
    """The places that what `reference_text` wrote stands for: a model, and its adapter if it has one."""
    cuts = [(Path(text[:i]), Path(text[i + 1 :])) for i, character in enumerate(text) if character == "+"]
    whole = Path(text)
    if whole.exists() or not cuts:
        return (whole,)
    return next((cut for cut in cuts if all(path.exists() for path in cut)), cuts[0])


def _parts(reading: Reading, text: str) -> tuple[str, str | None]:
    """Cut `model+adapter`; a path that exists may have a plus in its name."""
    pluses = [index for index, character in enumerate(text) if character == "+"]
    if not pluses or text in reading.documents or _exists(reading, text):
        return text, None
    cuts = [(text[:index], text[index + 1 :]) for index in pluses if 0 < index < len(text) - 1]
    known = (cut for cut in cuts if cut[0] in reading.documents or _exists(reading, cut[0]))
    return next(known, cuts[0] if cuts else (text, None))


def _exists(reading: Reading, text: str) -> bool:
    return _why_missing(_absolute(text, reading.source.path.parent), text) is None


def _path(reading: Reading, text: str, key_path: KeyPath) -> Path:
    if text in reading.located:
        path = reading.located[text]
    else:
        path = _absolute(text, reading.source.path.parent)
        if text in reading.documents:
            return path
        _note_if_missing(reading, text, path, key_path)
    return reading.places.setdefault(os.path.realpath(path), path)


def _long_form(reading: Reading, value: dict[str, Value], key_path: KeyPath) -> Reference | None:
    """mergekit writes references back as `{model: {path: ...}, lora: ...}`; other keys change the model."""
    given = {key: item for key, item in value.items() if item is not None}
    for key in _REFUSED_KEYS:
        if key in given:
            hint = "give the folder of the model as it is to be merged"
            reading.unsupported((*key_path, key), f"'{key}' in a model reference is", hint)
    reading.unknown_keys(given, _REFERENCE_KEYS, key_path)
    inner = next((key for key in ("path", "model") if key in given), None)
    if inner is None:
        reading.refuse("recipe.missing-key", key_path, "the model reference has no path")
        return None
    if {"path", "model"} <= given.keys():
        reading.refuse("recipe.wrong-kind", key_path, "needs either 'path' or 'model', found both")
    if inner == "path" and isinstance(given["path"], dict):
        reading.text(given["path"], (*key_path, "path"))
        return None
    model = read_reference(reading, given[inner], (*key_path, inner))
    if model is not None and "delta" in given:
        model = _as_delta(reading, model, given["delta"], key_path)
    if model is None or "lora" not in given:
        return model
    return _with_adapter(reading, model, read_reference(reading, given["lora"], (*key_path, "lora")), key_path)


def _as_delta(reading: Reading, model: Reference, value: Value, key_path: KeyPath) -> Reference | None:
    """The same model with its tensors read as differences from the base, if the recipe says so."""
    if not isinstance(value, bool):
        reading.wrong_kind(value, (*key_path, "delta"), "true or false")
        return None
    if value and (model.adapter is not None or model.intermediate is not None):
        message = f"'{shortened(model.text)}' is no checkpoint of differences"
        reading.refuse("recipe.reference.delta", (*key_path, "delta"), message, "remove 'delta'")
        return None
    return replace(model, is_delta=value)


def _with_adapter(reading: Reading, model: Reference, adapter: Reference | None, key_path: KeyPath) -> Reference | None:
    if adapter is None:
        return None
    if model.is_delta or adapter.is_delta:
        message = "an adapter applies to weights, and 'delta' says that these are differences"
        reading.refuse("recipe.reference.delta", (*key_path, "delta"), message, "remove 'delta' or 'lora'")
        return None
    if model.adapter is not None or adapter.adapter is not None:
        message = f"needs one adapter at most, found '{shortened(model.text)}' and '{shortened(adapter.text)}'"
        reading.refuse("recipe.reference.adapters", (*key_path, "lora"), message)
        return None
    return Reference(f"{model.text}+{adapter.text}", model.path, adapter.path, model.intermediate)


def _absolute(text: str, folder: Path) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # `~name` of nobody known
        path = Path(text)
    return folder / path


def _note_if_missing(reading: Reading, text: str, path: Path, key_path: KeyPath) -> None:
    shown = shortened(text)
    reason = _why_missing(path, shown)
    if reason is None:
        return
    if _HUB_ID.fullmatch(text):
        message = f"there is no '{shown}' in the recipe's folder, and models must be local"
        hint = "if it is a Hub id, download it first, e.g. with huggingface-cli, and give the folder"
    else:
        message, hint = reason, f"looked for {shortened(str(path), 200)}"
    where = reading.source.where(*key_path)
    reading.findings.add(NotFoundError, "recipe.model.not-found", where, message, hint)


def _why_missing(path: Path, shown: str) -> str | None:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no '{shown}'"
    except OSError as error:
        return f"cannot look at '{shown}': {error.strerror}"
    return None
