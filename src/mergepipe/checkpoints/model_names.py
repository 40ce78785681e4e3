"""Resolve the name of a model in a recipe: a path of this machine, a location of another store, or a Hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mergepipe.storage.location import HUB_SCHEME, MODELS_BY_BARE_NAME, Location, is_remote

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_REVISION = r"(?:@(?P<revision>[^@:\s]+))?"
_SUBFOLDER = r"(?::(?P<subfolder>[^@:\s]+))?"
_HUB_ID = re.compile(rf"(?P<id>{_PART}/{_PART}|{_PART}){_REVISION}{_SUBFOLDER}")
_PATH = re.compile(rf"(?P<path>.+?){_REVISION}{_SUBFOLDER}")


@dataclass(frozen=True, slots=True)
class ModelName:
    """The meaning of a model's name: `path` as a path of this machine, or `remote`, exactly one of the two.

    `ignored_revision` was written behind the path of a local folder, which has none. `is_hub_id` says that the name was
    written as `org/name` and taken for a model of the Hub because there is no such path.
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
    behind it; a Hub id `org/name[@revision][:subfolder]`, or a name that the Hub knows alone (`gpt2`); and otherwise a
    path that is missing.
    """
    if is_remote(text):
        return ModelName(remote=Location.parse(text))
    if not text or exists(text):
        return ModelName(path=text or ".")
    parts = _PATH.fullmatch(text)
    if parts is not None and parts["path"] != text and exists(parts["path"]):
        path = f"{parts['path']}/{parts['subfolder']}" if parts["subfolder"] else parts["path"]
        return ModelName(path=path, ignored_revision=parts["revision"] or "")
    hub = _HUB_ID.fullmatch(text)
    model = None if hub is None else hub["id"] if "/" in hub["id"] else MODELS_BY_BARE_NAME.get(hub["id"])
    if hub is None or model is None:
        return ModelName(path=text)
    folder = f"/{hub['subfolder']}" if hub["subfolder"] else ""
    location = Location.parse(f"{HUB_SCHEME}://{model}{folder}").with_revision(hub["revision"] or "")
    return ModelName(remote=location, is_hub_id=True)
