"""Adapt a model's configuration to the output: its dtype, the number and the order of its layers."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence

from mergepipe.checkpoints.architectures import is_known_type, layer_defaults
from mergepipe.checkpoints.config_files import Json, config_bytes, parse_config
from mergepipe.core.blocks import DType
from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, MismatchError, UnsupportedError
from mergepipe.recipes.layer_names import SIDES, LayerList
from mergepipe.recipes.layer_options import check_layers, follow_slices, layers_of, stated_kinds
from mergepipe.recipes.tasks import LayerCount

_DTYPE_KEYS = ("torch_dtype", "dtype")
_LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "layers",
    "num_blocks", "depth",
)  # fmt: skip
_LAYER_NAME = re.compile(r"(.*?)(?:layers|h|blocks)\.(\d+)\.")
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "text_model")
_SECTION_SUFFIX = "_config"
_ROWS_BEHIND_VOCABULARY = {"mllama_text_model": 8, "moshi": 1}  # for images, for a beginning; by the model's type


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


def shape_contradictions(config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what a configuration says of layers and embeddings that the tensors contradict."""
    counts: dict[str, int] = {}  # a vision tower has layers of its own
    for match in filter(None, map(_LAYER_NAME.match, shapes)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    n_layers = config.get("num_hidden_layers")
    kinds = config.get("layer_types")
    n_halves = kinds.count("mlp") if isinstance(kinds, list) else 0  # of Dory, which counts both halves of a layer
    if counts and isinstance(n_layers, int) and not {n_layers, n_layers - n_halves} & {*counts.values()}:
        yield f"says {n_layers} layers, there are {max(counts.values())}"
    n_rows = config.get("vocab_size")
    if isinstance(n_rows, int):
        n_rows += _ROWS_BEHIND_VOCABULARY.get(str(config.get("model_type")), 0)
    stated = [n_rows, config.get("hidden_size")]
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and None not in stated and list(shape) != stated:
            yield f"says that embeddings are {' x '.join(map(shown, stated))}, {name} is {list(shape)}"


def with_layers(config: bytes, layers: LayerCount, *, where: object) -> bytes:
    """Set the number of layers to that of the slices, and let what is said of single layers follow them."""
    content = parsed_config(config) or {}
    stated = _sections_with_layers(content, layers)
    if not stated:
        raise MismatchError.of(
            "model.mismatch", where,
            f"{layers.after} layers '{layers.prefix}*' cannot be stated: none of {', '.join(_LAYER_KEYS)} is "
            f"{layers.before}, which is their number before",
            "is it the configuration of this model?",
        )  # fmt: skip
    if layers.origins == tuple(range(layers.before)):
        return config
    origins = [origin % layers.before for origin in layers.origins]
    for section, keys in stated:
        _changed(section, keys, layers, origins, where)
    return config_bytes(content)


def _changed(section: Json, keys: Sequence[str], layers: LayerCount, origins: Sequence[int], where: object) -> None:
    """Let a section say of the output's layers what it says of the model's."""
    kept = {}
    if "decoder" in layers.prefix and "attention_window" in section:  # of LED's encoder
        kept["attention_window"] = section["attention_window"]
    section.update(dict.fromkeys(keys, layers.after))
    follow_slices(section, origins, layers.before, layer_defaults(section.get("model_type")), where=where)
    section.update(kept)


def check_layer_kinds(
    config: bytes,
    layers: LayerCount,
    before: Mapping[str, tuple[int, ...]],
    after: Mapping[str, tuple[int, ...]],
    *,
    where: object,
) -> None:
    """Refuse output layers that are not of the kind that the output's configuration says they are.

    `config` is the model's, before its layers were changed; `before` and `after` are the shapes of the model's and the
    output's tensors.
    """
    origins = [origin % layers.before for origin in layers.origins]
    if origins == [*range(layers.before)]:
        return
    for name in before:
        if name.endswith("contact_head.regression.weight"):  # of ESM
            message = f"{shown(name)} has columns for each layer, which slices do not move"
            raise UnsupportedError.of("model.unsupported", where, message, "merge it without slices")
    kinds_before = [""] * layers.before
    kinds_after = [""] * layers.after
    is_known = False
    for section, keys in _sections_with_layers(parsed_config(config) or {}, layers):
        is_known = is_known or is_known_type(section.get("model_type"))
        defaults = layer_defaults(section.get("model_type"))
        kinds_before = [*map(operator.add, kinds_before, stated_kinds(section, layers.before, defaults))]
        _changed(section, keys, layers, origins, where)
        kinds_after = [*map(operator.add, kinds_after, stated_kinds(section, layers.after, defaults))]
    if not is_known and len({*kinds_before}) == 1:
        return  # nothing is known of how such a model builds its layers
    place = LayerList(layers.prefix, layers.before)
    check_layers(layers_of(before, place.split), layers_of(after, place.split), kinds_before, kinds_after, where)


def _sections_with_layers(content: Json, layers: LayerCount) -> list[tuple[Json, list[str]]]:
    """Return the sections that state the number of these layers, each with the options that do."""
    sections = [(section, _layer_keys(section, layers)) for section in _sections_of(content, layers.prefix)]
    return [(section, keys) for section, keys in sections if keys]


def _layer_keys(section: Json, layers: LayerCount) -> list[str]:
    """Find the keys that state the number of these layers, such as `num_hidden_layers` or `decoder_layers`."""
    stated_keys = [key for key in _LAYER_KEYS if section.get(key) == layers.before]
    side = next((side for side in SIDES if side in layers.prefix), None)
    if side is None:
        return stated_keys
    side_keys = [key for key in stated_keys if side in key]
    neutral = [key for key in stated_keys if not any(other_side in key for other_side in SIDES)]
    if side_keys and side == "decoder":
        return side_keys
    return side_keys + neutral  # models with both count encoders without naming them


def _sections_of(content: Json, prefix: str) -> list[Json]:
    """Find the sections that describe the layers of a prefix: `vision_config` for `vision_tower.layers.`.

    A model with two sides may have a section for each, as T5Gemma has: `decoder` for `model.decoder.layers.`.
    """
    side = next((word for word in prefix.split(".") if word in SIDES), None)
    of_side = content.get(side) if side is not None else None
    if isinstance(of_side, dict):
        return [of_side]
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
