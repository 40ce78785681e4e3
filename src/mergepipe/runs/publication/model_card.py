"""Write the model card of a snapshot in the Hub's form, and its recipe with Hub ids for local paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TOKENIZER_NAMES
from mergepipe.core.escaping import printable
from mergepipe.planning.plan import Plan
from mergepipe.recipes.output_tensors import parsed_config
from mergepipe.recipes.references import with_renamed
from mergepipe.runs.budget.verdict import verdict_of
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.runs.publication.card_lines import body_lines, metadata_lines
from mergepipe.runs.publication.hub_ids import hub_names, without_revision
from mergepipe.runs.publication.input_cards import InputCard
from mergepipe.snapshots.manifest import BASE_MODEL_IDS_KEY, Manifest
from mergepipe.snapshots.recorded_paths import is_relative_part
from mergepipe.storage.contract import Store

TAGS = ("merge", "mergepipe")
_LIBRARY = "transformers"
_SENTENCE_LIBRARY = "sentence-transformers"
_MODULES_NAME = "modules.json"


@dataclass(frozen=True, slots=True)
class Origins:
    """Statements about the inputs in a card: their ids on the Hub, what the base's card lends, the recipe for others.

    `names` shows each input of the manifest, a local one without its folders, `revisions` its commit on the Hub or
    nothing. `licenses` are those that inputs state, if they state different ones. `usage` is Python that loads the
    output; empty where that is not known.
    """

    base_models: tuple[str, ...]
    names: tuple[str, ...]
    revisions: tuple[str, ...]
    card: InputCard
    library: str
    licenses: tuple[tuple[str, str], ...]
    recipe: str
    usage: tuple[str, ...]


def origins_of(
    inputs: Inputs, store: Store, manifest: Manifest, cards: Sequence[InputCard], files: Mapping[str, bytes]
) -> Origins:
    """Collect what the card says of the inputs and the small `files` of the output, by their content and places."""
    leaves = tuple(inputs.leaves())
    by_name = _last_names([part for record in manifest.inputs for part in record.model.split("+")])
    shown = [
        " + ".join(map(without_revision, record.hub_id.split("+")))
        if record.hub_id
        else _hub_name(record.model, by_name)
        for record in manifest.inputs
    ]
    for (_, model, _), record in zip(leaves, manifest.inputs, strict=True):
        by_name |= hub_names(model, record.hub_id, store)
    base_card = cards[0]
    has_modules = _MODULES_NAME in inputs.base.sidecars
    library = base_card.library or (_SENTENCE_LIBRARY if has_modules else _LIBRARY)
    return Origins(
        base_models=tuple(dict.fromkeys(_base_models(manifest, cards))),
        names=tuple(shown),
        revisions=tuple(_revision(record.hub_id) for record in manifest.inputs),
        card=base_card,
        library=library,
        licenses=_different_licenses(shown, cards),
        recipe=with_renamed(manifest.recipe, lambda text: _hub_name(text, by_name)) if by_name else manifest.recipe,
        usage=_usage(library, files),
    )


def _last_names(parts: Sequence[str]) -> dict[str, str]:
    """Map local paths to their last names, or, of two that end alike, to what follows their leading `../`."""
    paths = dict.fromkeys(part for part in parts if is_relative_part(part) or part.startswith("/"))
    counts = Counter(PurePosixPath(path).name for path in paths)
    names = {path: PurePosixPath(path).name for path in paths}
    return {path: name if counts[name] == 1 else path.lstrip("./") for path, name in names.items() if name}


def _usage(library: str, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return lines of Python that load the output; code of a model is not published, so none where it needs that."""
    name = 'name = "."  # this folder, or its id on the Hub'
    if library == _SENTENCE_LIBRARY:
        return "from sentence_transformers import SentenceTransformer", "", name, "model = SentenceTransformer(name)"
    config = parsed_config(files.get(CONFIG_NAME, b"")) or {}
    if library != _LIBRARY or not isinstance(config.get("model_type"), str) or "auto_map" in config:
        return ()
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    is_causal = any(str(architecture).endswith("ForCausalLM") for architecture in listed)
    kinds = {"model": "AutoModelForCausalLM" if is_causal else "AutoModel"}
    if any(file in TOKENIZER_NAMES for file in files):
        kinds["tokenizer"] = "AutoTokenizer"
    loads = (f"{variable} = {kind}.from_pretrained(name)" for variable, kind in kinds.items())
    return f"from transformers import {', '.join(kinds.values())}", "", name, *loads


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
    """Return the Hub id, with the revision that mergekit writes behind `@`, or the last name, of `model[+adapter]`."""
    if text in by_name:
        return by_name[text]
    return "+".join(by_name.get(part, part) for part in text.split("+")) if "+" in text else text
