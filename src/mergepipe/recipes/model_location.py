"""Find the model that a user names: a path of this machine, an address, or `org/name` of the Hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike

from mergepipe.core.display import shortened
from mergepipe.core.units import first_names
from mergepipe.errors import MergePipeError, NotFoundError, StorageError
from mergepipe.storage.contract import FileKind, Store
from mergepipe.storage.location import HUB_SCHEME, MODELS_BY_BARE_NAME, Location, is_remote, meant_address

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_REVISION = r"(?:@(?P<revision>[^@:\s]+))?"
_SUBFOLDER = r"(?::(?P<subfolder>[^@:\s]+))?"
_HUB_ID = re.compile(rf"(?P<id>{_PART}/{_PART}|{_PART}){_REVISION}{_SUBFOLDER}")
_PATH = re.compile(rf"(?P<path>.+?){_REVISION}{_SUBFOLDER}")
_ADDRESS_OF_ADAPTER = re.compile(r"(?<=.)\+(?=[A-Za-z][A-Za-z0-9.-]*://.)")
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_MOST_NAMES = 8
_HINT = "to name a model with an adapter, run `mergepipe lora apply MODEL ADAPTER -o OUT`, and name OUT"


@dataclass(frozen=True, slots=True)
class ModelName:
    """The meaning of a model's name: `path` as a path of this machine, or `remote`, exactly one of the two.

    `ignored_revision` was written behind the path of a local folder, which has none. `is_hub_id` says that the name was
    written as `org/name` and is a model of the Hub because there is no such path.
    """

    path: str = ""
    remote: Location | None = None
    ignored_revision: str = ""
    is_hub_id: bool = False

    def __post_init__(self) -> None:
        if bool(self.path) == (self.remote is not None):
            raise ValueError("the name of a model is either a path or a remote location")


def resolve_model_name(text: str, exists: Callable[[str], bool]) -> ModelName:
    """Decide what `text` names; `exists` probes whether a text is a path of this machine.

    In this order: an address with a scheme; a path that exists; a path that exists, with `@revision` or `:subfolder`
    behind it; a missing path below a folder that exists; a Hub id `org/name[@revision][:subfolder]`, or a name that the
    Hub knows alone (`gpt2`); and otherwise a missing path.
    """
    if is_remote(text):
        return ModelName(remote=Location.parse(text))
    if not text or exists(text):
        return ModelName(path=text or ".")
    parts = _PATH.fullmatch(text)
    if parts is not None and parts["path"] != text and exists(parts["path"]):
        path = f"{parts['path']}/{parts['subfolder']}" if parts["subfolder"] else parts["path"]
        return ModelName(path=path, ignored_revision=parts["revision"] or "")
    model, revision, folder = _hub_id(text)
    if not model or ("/" in text and exists(text.partition("/")[0])):
        return ModelName(path=text)
    location = Location.parse(f"{HUB_SCHEME}://{model}{folder}").with_revision(revision)
    return ModelName(remote=location, is_hub_id=True)


def _hub_id(text: str) -> tuple[str, str, str]:
    """Return the `org/name` of a Hub id, its revision, and its `/subfolder`; three empty texts for any other text."""
    hub = _HUB_ID.fullmatch(text)
    if hub is None:
        return "", "", ""
    model = hub["id"]
    if "/" not in model:
        model = MODELS_BY_BARE_NAME.get(model, "")
    subfolder = hub["subfolder"] or ""
    return model, hub["revision"] or "", f"/{subfolder}".rstrip("/")


def cut_at_address(text: str) -> tuple[str, str]:
    """Cut `model+scheme://adapter` without asking any store; the second text is empty where there is no address."""
    match = _ADDRESS_OF_ADAPTER.search(text)
    return (text, "") if match is None else (text[: match.start()], text[match.start() + 1 :])


def cut_adapter(text: str, exists: Callable[[str], bool], names: Collection[str] = ()) -> tuple[str, str]:
    """Cut `model+adapter` of a reference; the second text is empty where it names a model alone.

    A path that exists may have a plus in its name. Of several cuts the first of two `names` is right, then the first
    whose model exists.
    """
    model, adapter = cut_at_address(text)
    if adapter or "+" not in text or exists(text):
        return model, adapter
    cuts = []
    for index, character in enumerate(text):
        if character == "+" and 0 < index < len(text) - 1:
            cuts.append((text[:index], text[index + 1 :]))
    for cut in cuts:
        if cut[0] in names and cut[1] in names:
            return cut
    for cut in cuts:
        if exists(cut[0]):
            return cut
    return cuts[0] if cuts else (text, "")


def locate_model(store: Store, place: str | PathLike[str] | Location) -> Location:
    """Return where a model is that a caller names; relative paths are those of the working folder, and stay relative.

    Raises:
        NotFoundError: there is no such path; it is no path, and the Hub knows no such model or cannot be asked.
        StorageError: the Hub refuses access.
    """
    if isinstance(place, str) and cut_at_address(place)[1]:
        raise NotFoundError.of("model.not-found", "", f"there is no '{shortened(place)}'", _HINT)
    location = Location.of(place)
    if not location.is_local:
        return location
    text = str(place)
    name = ModelName(path=text)
    if isinstance(place, str):
        name = resolve_model_name(text, lambda path: path_exists(store, Location.of(path)))
    if name.remote is None:
        location = Location.of(name.path)
        if not path_exists(store, location):
            raise missing_path(store, text, location)
        return location
    try:
        if store.stat(name.remote) is None:
            raise nothing_there(name.remote)
    except NotFoundError as error:
        raise no_path_and_no_hub_model(text, error) from error
    return name.remote


def path_exists(store: Store, path: Location) -> bool:
    """Whether there is anything at a path that can be a model; False where it cannot be looked at.

    In the cache of the Hub the folder of a model is none: each of its revisions is one.
    """
    try:
        return store.stat(path) is not None and not _cached_revisions(store, path)
    except MergePipeError:
        return False


def _cached_revisions(store: Store, path: Location) -> list[str]:
    """Return the names of the revisions in the folder of a model in the cache of the Hub; empty for other folders."""
    if not path.name.startswith("models--"):
        return []
    try:
        entries = store.list(path / "snapshots")
    except MergePipeError:
        return []
    return [entry.name for entry in entries]


def missing_path(store: Store, text: str, path: Location, where: str = "") -> MergePipeError:
    """Make the error for a path without a model: it lists what is in the folder that should hold it."""
    revisions = _cached_revisions(store, path)
    if revisions:
        message = f"'{shortened(text)}' is a model in the cache of the Hub, not one of its revisions"
        hint = f"name {_shown(path / 'snapshots')}/{' or '.join(revisions[:_MOST_NAMES])}"
        return NotFoundError.of("model.not-found", where, message, hint)
    address = meant_address(text)
    if address:
        hint = f"an address is written {address}"
        return NotFoundError.of("model.not-found", where, f"there is no folder '{shortened(text)}'", hint)
    model, sign, _ = text.partition("+")
    if sign and path_exists(store, Location.of(model)):
        return NotFoundError.of("model.not-found", where, f"there is no folder '{shortened(text)}'", _HINT)
    kind = "folder"
    if path.suffix in _WEIGHT_SUFFIXES:
        kind = "file"
    try:
        store.stat(path)
        message = f"there is no {kind} '{shortened(text)}'"
    except StorageError as error:
        message = f"'{shortened(text)}' {error.problems[0].message}"
    hint = _HINT if sign else f"looked for {_shown(path)}"
    return NotFoundError.of("model.not-found", where, message, _siblings(store, text, path) or hint)


def nothing_there(place: Location) -> MergePipeError:
    """Make the error for an address where there is no model."""
    return NotFoundError.of("model.not-found", "", f"there is no '{place}'", "check the address")


def no_path_and_no_hub_model(text: str, error: MergePipeError, where: str = "") -> MergePipeError:
    """Make the error for a name that is no path, and no model that the Hub gives."""
    problem = error.problems[0]
    message = f"there is no folder '{shortened(text)}', and on the Hub: {problem.message}"
    return NotFoundError.of(problem.code, where, message, problem.hint)


def _siblings(store: Store, text: str, path: Location) -> str:
    """Say what the folder of a missing path holds, of many names those like the missing one first.

    Of a name without a folder only the nearest name is said. Empty where there is no folder, or no such name.
    """
    folder = path.parent
    try:
        entries = store.list(folder)
    except MergePipeError:
        return ""
    names = [
        entry.name
        for entry in entries
        if not entry.name.startswith(".") and (entry.kind is FileKind.FOLDER or entry.name.endswith(_WEIGHT_SUFFIXES))
    ]
    near = get_close_matches(path.name, names, n=3)
    if "/" not in text:
        return "".join(f"did you mean '{shortened(name)}'?" for name in near[:1])
    ordered = names if len(names) <= _MOST_NAMES else [*near, *(name for name in names if name not in near)]
    listed = first_names([shortened(name) for name in ordered], _MOST_NAMES)
    neighbours = f"{_shown(folder)}/ holds {listed or 'no models'}"
    if near or not _hub_id(text)[0]:
        return neighbours
    return f"{neighbours}; a model on the Hub is written {HUB_SCHEME}://{text.replace(':', '/')}"


def _shown(path: Location) -> str:
    """Write a path relative to the working folder where it is below it."""
    path = path.without_detours()
    working_folder = Location.of(".").absolute()
    if path.is_relative_to(working_folder):
        return shortened(str(path.relative_to(working_folder)), 200)
    return shortened(str(path), 200)
