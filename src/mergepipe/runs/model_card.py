"""Write the model card of a snapshot in the Hub's form, from the inputs' own cards and the ids of models on the Hub."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import yaml

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import MODULES_NAME, PIPELINE_NAME
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TOKENIZER_NAMES
from mergepipe.core.blocks import DTYPES
from mergepipe.core.display import as_line, markdown_code, markdown_text, yaml_scalar
from mergepipe.core.rounding import RoundingMode
from mergepipe.core.units import format_bytes, plural
from mergepipe.errors import CorruptError, NotFoundError, RecipeError
from mergepipe.planning.plan import Plan
from mergepipe.recipes.output_config import parsed_config
from mergepipe.recipes.recipe import ModelInput, Recipe
from mergepipe.recipes.references import reference_text, with_renamed
from mergepipe.runs.budget import verdict_of
from mergepipe.runs.inputs import Inputs
from mergepipe.snapshots.manifest import (
    BASE_MODEL_IDS_KEY,
    CACHED_MODEL,
    CARD_NAME,
    ROUNDING_KEY,
    Manifest,
    is_relative_part,
)
from mergepipe.storage.contract import CARD_BYTES, Store
from mergepipe.storage.location import HUB_SCHEME, Location

if TYPE_CHECKING:
    from jinja2 import Template

_PEFT_WEIGHTS = "adapter_model.safetensors"
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


def stated_base_id(text: str | None) -> str:
    """Parse the one base that `--base-model-id` states of an adapter; empty without."""
    ids = parse_base_model_ids([] if text is None else [text]).of_merge
    return ids[0] if ids else ""


def base_id(text: str) -> str:
    """Return the name of a base in an adapter's configuration where it is an id of the Hub; empty for a path."""
    return text if is_hub_id(text) and not Path(text).exists() else ""


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


_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_KEYS = "license|license_name|license_link|library_name|pipeline_tag|language|tags|base_model"
_ENTRY = re.compile(rf"^([\"']?)(?:{_KEYS})\1[ \t]*:[^\n]*\n(?:(?:[ \t\r#-][^\n]*)?\n)*+", re.MULTILINE)
"""One entry that is inherited: its line and those that belong to it. Results of evaluations fill megabytes beside."""
_PARSED_CHARACTERS = 32 << 10  # YAML takes 150 times its size in memory, and 12 s a megabyte
_MOST_VALUES = 100
_MOST_CHARACTERS = 500
_WRITTEN_BY_THE_HUB = re.compile(r"(base_model|license|region|arxiv|doi|dataset|model-index)\b.*:|endpoints_compatible")


@dataclass(frozen=True, slots=True)
class InputCard:
    """The entries of an input's model card that a merge inherits; empty where the card lacks them."""

    license: str = ""
    license_name: str = ""
    license_link: str = ""
    library: str = ""
    pipeline_tag: str = ""
    languages: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    base_models: tuple[str, ...] = ()


def read_input_card(store: Store, model: Checkpoint) -> InputCard:
    """Read the card of a model's directory; an empty one where there is none, or none that can be parsed.

    A card is prose of somebody else: what cannot be read of it is not inherited, and is no reason to fail.
    """
    path = model.root / CARD_NAME
    if model.path != model.root:
        return InputCard()
    try:
        status = store.stat(path)
        if status is None or not status.is_file:
            return InputCard()
        return parse_card(store.read_small(path, CARD_BYTES))
    except (CorruptError, NotFoundError):
        return InputCard()


def parse_card(raw: bytes) -> InputCard:
    """Parse the text of a card: of long metadata only the entries that are inherited, unless these are long, too."""
    top = _FRONT_MATTER.match(raw.decode("utf-8", "replace"))
    metadata = "" if top is None else top[1]
    if len(metadata) > _PARSED_CHARACTERS:
        metadata = "".join(entry[0] for entry in islice(_ENTRY.finditer(metadata), _MOST_VALUES))
    if len(metadata) > _PARSED_CHARACTERS:
        return InputCard()
    try:
        content = yaml.load(metadata, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return InputCard()
    if not isinstance(content, dict):
        return InputCard()
    return InputCard(
        license=_text(content, "license"),
        license_name=_text(content, "license_name"),
        license_link=_text(content, "license_link"),
        library=_text(content, "library_name"),
        pipeline_tag=_text(content, "pipeline_tag"),
        languages=_texts(content, "language"),
        tags=tuple(tag for tag in _texts(content, "tags") if not _WRITTEN_BY_THE_HUB.match(tag)),
        base_models=tuple(text for text in _texts(content, "base_model") if is_hub_id(text)),
    )


def _text(content: Mapping[str, object], key: str) -> str:
    """Return the text under a key; of a list the first."""
    return next(iter(_texts(content, key)), "")


def _texts(content: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = content.get(key)
    values = value if isinstance(value, list) else [value]
    texts = (text.strip() for text in values[:_MOST_VALUES] if isinstance(text, str))
    return tuple(dict.fromkeys(text for text in texts if text and len(text) <= _MOST_CHARACTERS))


# --- the card of an output ---

_BACKTICKS = re.compile("`+")
TAGS = ("merge", "mergepipe")
_FOLDED_TAGS = ("lora", *TAGS)
_LIBRARY = "transformers"
_LIBRARY_OF = {MODULES_NAME: "sentence-transformers", PIPELINE_NAME: "diffusers"}
_LOADERS = {  # of those: what to import from where, and how it is called
    "sentence-transformers": ("sentence_transformers", "SentenceTransformer", "SentenceTransformer(name)"),
    "diffusers": ("diffusers", "DiffusionPipeline", "DiffusionPipeline.from_pretrained(name)"),
}


def card_and_recipe(
    inputs: Inputs,
    store: Store,
    manifest: Manifest,
    plan: Plan | None,
    cards: Sequence[InputCard],
    files: Mapping[str, bytes],
) -> tuple[bytes, str]:
    """Write a model card in the Hub's form, and the recipe for others, in which models go by their ids on the Hub.

    `plan` is the manifest's, `cards` are those of the inputs, and `files` the small files of the output.
    """
    by_name = _last_names([part for record in manifest.inputs for part in record.model.split("+")])
    shown = [
        " + ".join(map(without_revision, (record.hub_id or "").split("+"))) or _hub_name(record.model, by_name)
        for record in manifest.inputs
    ]
    for (_, model, _), record in zip(inputs.sources(), manifest.inputs, strict=True):
        by_name |= hub_names(model, record.hub_id, store)
    recipe = with_renamed(manifest.recipe, lambda text: _hub_name(text, by_name)) if by_name else manifest.recipe
    listed = (library for name, library in _LIBRARY_OF.items() if name in inputs.base.sidecars)
    library = cards[0].library or next(listed, _LIBRARY)
    base_models = tuple(dict.fromkeys(_base_models(manifest, cards)))
    folds_adapters = inputs.folds_adapters
    text = _template().render(
        manifest=manifest,
        card=cards[0],
        base_models=base_models,
        relation="finetune" if folds_adapters and len(base_models) == 1 else "merge",
        method="lora" if folds_adapters else manifest.operator,
        library=library,
        tags=tuple(dict.fromkeys((*cards[0].tags, *(_FOLDED_TAGS if folds_adapters else TAGS)))),
        title=_with_names(markdown_text(manifest.summary), by_name) if folds_adapters else _title(inputs.recipe),
        inputs=[
            {"role": record.role, "name": name, "revision": _revision(record.hub_id)}
            for record, name in zip(manifest.inputs, shown, strict=True)
        ],
        licenses=_different_licenses(shown, cards),
        usage=_usage(library, files),
        verdict=None if plan is None else verdict_of(plan),
        rounded=_rounded(inputs.recipe, manifest),
        fence=_fence(recipe),
        recipe=recipe.expandtabs().splitlines(),
    )
    return text.encode(), recipe


def _rounded(recipe: Recipe, manifest: Manifest) -> str:
    """Say how results were rounded if not to nearest, and what that kept of the change, where it is known."""
    how = ", stochastically" if recipe.rounding is RoundingMode.STOCHASTIC else ""
    kept = manifest.run.get(ROUNDING_KEY)
    return f"{how}; that kept {100 * kept:.0f} % of the change" if isinstance(kept, float | int) else how


def adapter_card(manifest: Manifest, method: str, quality: str, base_model: str) -> bytes:
    """Write the card of an adapter in the Hub's form.

    `quality` is a sentence on what it leaves out, `base_model` the id of its base on the Hub, empty if unknown. No path
    of this machine is in the card.
    """
    names = _last_names([record.model for record in manifest.inputs])
    names |= {record.model: record.hub_id for record in manifest.inputs if record.hub_id is not None}
    recipe = with_renamed(manifest.recipe, lambda text: _hub_name(text, names))
    text = _template("adapter_card.md.j2").render(
        manifest=manifest,
        method=method,
        quality=quality,
        base_model=base_model,
        title=_with_names(manifest.title, names),
        inputs=[{"role": record.role, "name": _hub_name(record.model, names)} for record in manifest.inputs],
        is_for_peft=any(file.name == _PEFT_WEIGHTS for file in manifest.files),
        dtypes=sorted({DTYPES[tensor.dtype].recipe_name for tensor in manifest.tensors}),
        fence=_fence(recipe),
        recipe=recipe.splitlines(),
    )
    return text.encode()


def _with_names(title: str, names: Mapping[str, str]) -> str:
    """Return a title in which models go by the names that others know them by."""
    for path in sorted(names, key=len, reverse=True):
        title = title.replace(path, without_revision(names[path]))
    return title


def _fence(text: str) -> str:
    """Return the fence of a block of Markdown that holds a text."""
    return "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(text)), default=0))


@cache
def _template(name: str = "card.md.j2") -> Template:
    from jinja2 import Environment, StrictUndefined  # nothing that only checks needs templates

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False, finalize=as_line
    )
    environment.filters |= {"code": markdown_code, "text": markdown_text, "yaml": yaml_scalar, "size": _size}
    environment.globals["plural"] = plural
    return environment.from_string(resources.files("mergepipe.runs").joinpath(name).read_text("utf-8"))


def _size(nbytes: object) -> str:
    return format_bytes(nbytes) if isinstance(nbytes, int) else str(nbytes)


def _title(recipe: Recipe) -> str:
    mixture = recipe.mixture
    if mixture is None:
        return f"Merge by {markdown_text(recipe.operator.name)}"
    if mixture.is_dense:
        return f"Expert {mixture.chosen[0]} of a mixture, as a dense model"
    return (
        f"{len(mixture.chosen)} experts of a mixture"
        if mixture.chosen
        else f"Mixture of {len(mixture.experts)} experts"
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
    if library in _LOADERS:
        module, imported, call = _LOADERS[library]
        return f"from {module} import {imported}", "", name, f"model = {call}"
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
