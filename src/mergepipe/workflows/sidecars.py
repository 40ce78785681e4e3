"""The small files of a snapshot: the base's configuration and tokenizer, and a model card."""

from __future__ import annotations

import json
from importlib import resources

from jinja2 import Environment, StrictUndefined

from mergepipe.blocks import DType
from mergepipe.manifest import Manifest
from mergepipe.readers.base import Checkpoint
from mergepipe.recipe.model import Recipe
from mergepipe.storage.base import Store

CONFIG_NAME = "config.json"
CARD_NAME = "README.md"
_DTYPE_KEYS = ("torch_dtype", "dtype")


def sidecar_contents(recipe: Recipe, base: Checkpoint, store: Store, manifest: Manifest) -> dict[str, bytes]:
    """Name and content of every small file but the manifest and the index."""
    contents = {}
    for name in base.sidecars:
        path = base.root / name
        contents[name] = store.read_metadata(path, 0, store.size_bytes(path))
    dtype = recipe.out_dtype or recipe.dtype
    if dtype is not None and CONFIG_NAME in contents:
        contents[CONFIG_NAME] = with_dtype(contents[CONFIG_NAME], dtype)
    contents[CARD_NAME] = model_card(recipe, manifest)
    return contents


def with_dtype(config: bytes, dtype: DType) -> bytes:
    """The configuration with its dtype set to the output's, so that loaders do not cast; else the same bytes."""
    try:
        content = json.loads(config)
    except ValueError:
        return config
    if not isinstance(content, dict):
        return config
    changed = False
    for section in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key in _DTYPE_KEYS:
            if isinstance(section.get(key), str) and section[key] != dtype.recipe_name:
                section[key] = dtype.recipe_name
                changed = True
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode() if changed else config


def model_card(recipe: Recipe, manifest: Manifest) -> bytes:
    """A model card in the Hub's form: metadata, inputs, recipe, digests."""
    template = resources.files("mergepipe.report").joinpath("templates/model_card.md.j2").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(template).render(recipe=recipe, manifest=manifest)
    return text.encode()
