"""Read the metadata of an input's own model card, the YAML on top of its `README.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import yaml

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.errors import CorruptError, NotFoundError
from mergepipe.runs.publication.hub_ids import is_hub_id
from mergepipe.snapshots.manifest import CARD_NAME
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import CARD_BYTES

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
