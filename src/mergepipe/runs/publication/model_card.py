"""Write the model card of a snapshot in the Hub's form, and its recipe with Hub ids for local paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe.core.escaping import printable
from mergepipe.core.values import dataclass
from mergepipe.planning.plan import Plan
from mergepipe.recipes.parse.written_paths import with_renamed
from mergepipe.runs.budget.verdict import verdict_of
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.runs.publication.card_lines import body_lines, metadata_lines
from mergepipe.runs.publication.hub_ids import hub_names, without_revision
from mergepipe.runs.publication.input_cards import InputCard
from mergepipe.snapshots.manifest import BASE_MODEL_IDS_KEY, Manifest
from mergepipe.storage.contract import Store

TAGS = ("merge", "mergepipe")
_LIBRARY = "transformers"
_SENTENCE_LIBRARY = "sentence-transformers"
_MODULES_NAME = "modules.json"


@dataclass(frozen=True, slots=True)
class Origins:
    """Statements about the inputs in a card: their ids on the Hub, what the base's card lends, the recipe for others.

    `names` shows each input of the manifest, `revisions` its commit on the Hub or nothing. `licenses` are those that
    inputs state, if they state different ones.
    """

    base_models: tuple[str, ...]
    names: tuple[str, ...]
    revisions: tuple[str, ...]
    card: InputCard
    library: str
    licenses: tuple[tuple[str, str], ...]
    recipe: str


def origins_of(inputs: Inputs, store: Store, manifest: Manifest, cards: Sequence[InputCard]) -> Origins:
    """Collect what the card says of the inputs, by their own cards and by where they lie."""
    leaves = tuple(inputs.leaves())
    by_name: dict[str, str] = {}
    for (_, model, _), record in zip(leaves, manifest.inputs, strict=True):
        by_name |= hub_names(model, record.hub_id, store)
    shown = [
        " + ".join(map(without_revision, record.hub_id.split("+"))) if record.hub_id else record.model
        for record in manifest.inputs
    ]
    base_card = cards[0]
    has_modules = _MODULES_NAME in inputs.base.sidecars
    return Origins(
        base_models=tuple(dict.fromkeys(_base_models(manifest, cards))),
        names=tuple(shown),
        revisions=tuple(_revision(record.hub_id) for record in manifest.inputs),
        card=base_card,
        library=base_card.library or (_SENTENCE_LIBRARY if has_modules else _LIBRARY),
        licenses=_different_licenses(shown, cards),
        recipe=with_renamed(manifest.recipe, lambda text: _hub_name(text, by_name)) if by_name else manifest.recipe,
    )


def model_card(manifest: Manifest, plan: Plan | None, origins: Origins) -> bytes:
    """Write a model card in the Hub's form: metadata, inputs, recipe, budget, digests. `plan` is the manifest's."""
    verdict = None if plan is None else verdict_of(plan)
    tags = tuple(dict.fromkeys((*origins.card.tags, *TAGS)))
    lines = (*metadata_lines(manifest, origins, tags), *body_lines(manifest, origins, verdict))
    return "".join(f"{printable(line)}\n" for line in lines).encode()


def _base_models(manifest: Manifest, cards: Sequence[InputCard]) -> Iterator[str]:
    """Yield Hub ids: each input's own, else those that its card names, and what the user stated of the whole merge."""
    for record, card in zip(manifest.inputs, cards, strict=True):
        if record.hub_id is not None:
            yield from map(without_revision, record.hub_id.split("+"))
        else:
            yield from card.base_models
    yield from map(without_revision, str(manifest.run.get(BASE_MODEL_IDS_KEY, "")).split())


def _revision(hub_id: str | None) -> str:
    ids = [] if hub_id is None else hub_id.split("+")
    return " + ".join(filter(None, (hub_id.partition("@")[2] for hub_id in ids)))


def _different_licenses(names: Sequence[str], cards: Sequence[InputCard]) -> tuple[tuple[str, str], ...]:
    stated = [(name, card.license_name or card.license) for name, card in zip(names, cards, strict=True)]
    stated = [(name, license_) for name, license_ in stated if license_]
    return tuple(stated) if len({license_ for _, license_ in stated}) > 1 else ()


def _hub_name(text: str, by_name: dict[str, str]) -> str:
    """Return the Hub id, with the revision that mergekit writes behind `@`, of a model or of `model+adapter`."""
    if text in by_name:
        return by_name[text]
    return "+".join(by_name.get(part, part) for part in text.split("+")) if "+" in text else text
