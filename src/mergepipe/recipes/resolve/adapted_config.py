"""Adapt a model's configuration to the output: its dtype, the number and order of its layers."""

from __future__ import annotations

from mergepipe.checkpoints.formats.config_json import Json, config_bytes, parse_config
from mergepipe.core.blocks import DType
from mergepipe.errors import CorruptError, MismatchError
from mergepipe.recipes.resolve.tasks import LayerCount

_DTYPE_KEYS = ("torch_dtype", "dtype")
_LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "depth",
)  # fmt: skip
_SIDES = ("decoder", "encoder")  # of a model with layers of both
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "text_model")
_SECTION_SUFFIX = "_config"


def with_dtype(config: bytes, dtype: DType) -> bytes:
    """Set the configuration's dtype to the output's, so that loaders do not cast; unchanged if it states none."""
    content = parsed_config(config)
    if content is None:
        return config
    changed = False
    for section in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key in _DTYPE_KEYS:
            if isinstance(section.get(key), str) and section[key] != dtype.recipe_name:
                section[key] = dtype.recipe_name
                changed = True
    return config_bytes(content) if changed else config


def with_layers(config: bytes, layers: LayerCount, *, where: object) -> bytes:
    """Set the number of layers to that of the slices, and reorder lists with one entry per layer likewise.

    Raises:
        MismatchError: `config.layers`, nothing states the number of layers before.
    """
    content = parsed_config(config) or {}
    sections = _sections_of(content, layers.prefix)
    stated = [(section, keys) for section in sections if (keys := _layer_keys(section, layers))]
    if not stated:
        raise MismatchError.of(
            "config.layers", where,
            f"{layers.after} layers '{layers.prefix}*' cannot be stated: none of {', '.join(_LAYER_KEYS)} is "
            f"{layers.before}, which is their number before",
            "is it the configuration of this model?",
        )  # fmt: skip
    if layers.origins == tuple(range(layers.before)):
        return config
    for section, keys in stated:
        section.update(dict.fromkeys(keys, layers.after))
        for name in _LAYER_LISTS:
            listed = section.get(name)
            if isinstance(listed, list) and len(listed) == layers.before:
                section[name] = [listed[origin % layers.before] for origin in layers.origins]
    return config_bytes(content)


def states_layers(config: bytes, layers: LayerCount) -> bool:
    """Whether the configuration states the number of these layers."""
    sections = _sections_of(parsed_config(config) or {}, layers.prefix)
    return any(_layer_keys(section, layers) for section in sections)


def _layer_keys(section: Json, layers: LayerCount) -> list[str]:
    """Find the keys that state the number of these layers, such as `num_hidden_layers` or `decoder_layers`."""
    stated_keys = [key for key in _LAYER_KEYS if section.get(key) == layers.before]
    side = next((side for side in _SIDES if side in layers.prefix), None)
    if side is None:
        return stated_keys
    side_keys = [key for key in stated_keys if side in key]
    neutral = [key for key in stated_keys if not any(other_side in key for other_side in _SIDES)]
    if side_keys and side == "decoder":
        return side_keys
    return side_keys + neutral  # models with both count encoders without naming them


def _sections_of(content: Json, prefix: str) -> list[Json]:
    """Find the sections that describe the layers of a prefix: `vision_config` for `vision_tower.layers.`."""
    named = [
        section
        for name, section in content.items()
        if isinstance(section, dict) and name.endswith(_SECTION_SUFFIX) and name.removesuffix(_SECTION_SUFFIX) in prefix
    ]
    return named or text_sections(content)


def text_sections(content: Json) -> list[Json]:
    """List the configuration and, for a multimodal model, its text section."""
    return [content, *(content[name] for name in _TEXT_SECTIONS if isinstance(content.get(name), dict))]


def parsed_config(raw: bytes) -> Json | None:
    """Parse a JSON object; None if the file holds none, in which case it is copied as it is."""
    try:
        return parse_config(raw, "")
    except CorruptError:
        return None
