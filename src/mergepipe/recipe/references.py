"""What a recipe calls a model, turned into a path: only folders and files of this machine are models here."""

from __future__ import annotations

import re
from pathlib import Path

from mergepipe.errors import NotFoundError
from mergepipe.recipe.reading import Reading
from mergepipe.recipe.yaml_source import KeyPath, Value, shortened

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+(?:@[A-Za-z0-9_./-]+)?")


def read_reference(reading: Reading, value: Value, key_path: KeyPath) -> tuple[str, Path] | None:
    """Return the reference as written with its absolute path; None if it names no path at all.

    A path that does not exist is noted as a problem and returned all the same, so that the rules can go on.
    """
    if isinstance(value, dict):
        return _long_form(reading, value, key_path)
    text = reading.text(value, key_path)
    if text is None:
        return None
    path = reading.located.get(text) or _absolute(text, reading.source.path.parent)
    _note_if_missing(reading, text, path, key_path)
    return text, path


def _long_form(reading: Reading, value: dict[str, Value], key_path: KeyPath) -> tuple[str, Path] | None:
    """mergekit writes references back as `{model: {path: ...}}`; all other keys that are set change the model."""
    given = {key: item for key, item in value.items() if item is not None}
    for key in ("revision", "lora", "override_architecture"):
        if key in given:
            hint = "give the folder of the model as it is to be merged"
            reading.unsupported((*key_path, key), f"'{key}' in a model reference is", hint)
    known = ("path", "model", "revision", "lora", "override_architecture")
    reading.unknown_keys(given, known, key_path)
    inner = next((key for key in ("path", "model") if key in given), None)
    if inner is None:
        reading.refuse("recipe.missing-key", key_path, "the model reference has no path")
        return None
    if {"path", "model"} <= given.keys():
        reading.refuse("recipe.wrong-kind", key_path, "needs either 'path' or 'model', found both")
    if inner == "path" and isinstance(given["path"], dict):
        reading.text(given["path"], (*key_path, "path"))
        return None
    return read_reference(reading, given[inner], (*key_path, inner))


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
    if "+" in text:
        what, hint = f"'{shown}': an adapter added to a model with '+' is", "merge the adapter into its model first"
        reading.unsupported(key_path, what, hint)
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
