"""Tell which model of the Hub an input is, by its location alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mergepipe.errors import RecipeError
from mergepipe.recipes.recipe import ModelInput
from mergepipe.recipes.references import reference_text
from mergepipe.snapshots.manifest import BASE_MODEL_IDS_KEY, Manifest
from mergepipe.snapshots.recorded_paths import CACHED_MODEL
from mergepipe.storage.contract import Store
from mergepipe.storage.location import HUB_SCHEME, Location

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_HUB_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
_WITH_REVISION = re.compile(rf"(?P<id>(?:{_PART}/)?{_PART})(?:@[^@\s]+)?")


@dataclass(frozen=True, slots=True)
class BaseModelIds:
    """The Hub ids that the user states: of single models by their names in the recipe, and of the merge as a whole."""

    by_model: Mapping[str, str] = field(default_factory=dict)
    of_merge: tuple[str, ...] = ()

    @classmethod
    def recorded(cls, manifest: Manifest) -> BaseModelIds:
        """The ids that a snapshot was published with."""
        of_models = {record.model: record.hub_id for record in manifest.inputs if record.hub_id is not None}
        return cls(of_models, tuple(str(manifest.run.get(BASE_MODEL_IDS_KEY, "")).split()))

    def of_model(self, model: ModelInput) -> str | None:
        """The stated id of a model, by its name in the recipe or by its absolute path."""
        return self.by_model.get(model.text) or self.by_model.get(reference_text(model))

    def check_names(self, models: Sequence[ModelInput]) -> None:
        """Refuse an id of a model that the recipe does not name."""
        names = {name for model in models for name in (model.text, reference_text(model))}
        for name in self.by_model:
            if name not in names:
                message, hint = f"the recipe names no model '{name}'", ", ".join(model.text for model in models)
                raise RecipeError.of("option.invalid", "--base-model-id", message, f"it names {hint}")


def parse_base_model_ids(texts: Iterable[str]) -> BaseModelIds:
    """Parse values of `--base-model-id`: `org/name`, or `MODEL=org/name`."""
    by_model: dict[str, str] = {}
    of_merge: list[str] = []
    for text in texts:
        model, equals, hub_id = text.rpartition("=")
        if not _WITH_REVISION.fullmatch(hub_id) or (equals and not model):
            message = f"'{text}' was given"
            raise RecipeError.of("option.invalid", "--base-model-id", message, "give org/name or MODEL=org/name")
        if equals:
            by_model[model] = hub_id
        else:
            of_merge.append(hub_id)
    return BaseModelIds(by_model, tuple(of_merge))


def hub_id_of(location: Location, store: Store) -> str | None:
    """Return `org/name@commit` of a location on the Hub or in a local copy of its cache; None for any other."""
    if location.scheme == HUB_SCHEME:
        return f"{location.root}@{location.revision}" if location.revision else location.root
    if not location.is_local:
        return None
    places = (location.normal(), store.real_path(location))
    for place in (str(place) for place in places if place is not None):
        cached = CACHED_MODEL.search(place)
        hub_id = cached["name"].replace("--", "/") if cached else ""
        if cached and _HUB_ID.fullmatch(hub_id):
            return f"{hub_id}@{cached['commit']}"
    return None


def hub_names(model: ModelInput, stated: str | None, store: Store) -> dict[str, str]:
    """Map the names of a model in its recipe, and of its adapter, to their Hub ids, as far as these are known."""
    if model.adapter is None:
        hub_id = stated or hub_id_of(model.path, store)
        return {} if hub_id is None else {model.text: hub_id}
    if stated is not None:
        return {model.text: stated}
    ids = [hub_id_of(model.path, store), hub_id_of(model.adapter, store)]
    parts = model.text.split("+")
    hub_ids = {part: hub_id for part, hub_id in zip(parts, ids, strict=False) if hub_id is not None}
    return hub_ids if len(parts) == len(ids) else {}


def without_revision(hub_id: str) -> str:
    """Return `org/name` of `org/name@revision`."""
    return hub_id.partition("@")[0]


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a Hub id with an organisation."""
    return "/" in text and _HUB_ID.fullmatch(text) is not None
