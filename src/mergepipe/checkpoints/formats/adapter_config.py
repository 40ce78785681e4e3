"""The configuration of a PEFT adapter: what it scales its products by, or by name why it is no plain LoRA."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import ADAPTER_CONFIG_BYTES
from mergepipe.storage.location import Location

T = TypeVar("T")

MERGE_HINT = "merge it into its base with peft first, and use the result as an expert"
_MAX_PATTERN = 256
_MAX_NAME = 512
# Literals, classes, groups, repeats of one character: no look-around, no repeated group.
_PATTERN = re.compile(r"(?:[\w.^$|\-]|\\[.dw\-]|\[[\w\-]+\]|\(|\)(?![*+?{])|[*+](?![*+?]))+", re.ASCII)
_MAX_REPEATS = 2
# Configured for training only, or already in the stored tensors: without effect on what is merged.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "alpha_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
_VARIANTS = {
    "use_dora": "DoRA, whose delta needs the norms of the adapted base weights",
    "use_qalora": "QA-LoRA, which pools its inputs",
    "lora_bias": "biases in its factors",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "single trained tokens",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "aLoRA, which acts on some tokens only",
}
# Ways to begin training that leave the base weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take
# something away from them, and the stored adapter does not say what.
_STARTS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A plain LoRA. `ranks` and `alphas` map patterns of module names, tried in order, to what differs there."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilised: bool
    is_transposed: bool  # fan_in_fan_out

    def rank_of(self, module: str) -> int:
        """The rank of one module's factors."""
        return _pattern_value(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of one module's product: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        rank = self.rank_of(module)
        return _pattern_value(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter_config(store: Store, path: Location) -> AdapterConfig:
    """Read `adapter_config.json`.

    Raises:
        UnsupportedError: another kind of adapter, or a variant whose delta is not `scale * B @ A`; each by its name.
        CorruptError: it contradicts itself or is no configuration.
        NotFoundError, StorageError: from the store.
    """
    config = parse_object(store.read_small(path, ADAPTER_CONFIG_BYTES), where=path, code="adapter.config.not_json")
    _check_kind(config, path)
    rank = _rank(config.get("r", 8), "r", path)
    ranks = {key: _rank(value, key, path) for key, value in _patterns(config, "rank_pattern", path)}
    alphas = {key: _alpha(value, key, path) for key, value in _patterns(config, "alpha_pattern", path)}
    return AdapterConfig(
        rank,
        _alpha(config.get("lora_alpha", 8), "lora_alpha", path),
        MappingProxyType(ranks),
        MappingProxyType(alphas),
        _flag(config, "use_rslora", path),
        _flag(config, "fan_in_fan_out", path),
    )


def _check_kind(config: Mapping[str, JsonValue], path: Location) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError.of(
            "adapter.type", path, f"the adapter is {shown(kind)}, only 'LORA' is read", MERGE_HINT
        )
    for key, what in _VARIANTS.items():
        if config.get(key):
            raise UnsupportedError.of("adapter.variant", path, f"{key}: {what}, is not read", MERGE_HINT)
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in _STARTS:
        raise UnsupportedError.of(
            "adapter.variant", path,
            f"init_lora_weights is {shown(start)}, which changes the base weights; how is not stored",
            "save it with path_initial_model_for_weight_conversion, or merge it with peft first",
        )  # fmt: skip
    for key, value in config.items():
        if key not in _HARMLESS and key not in _VARIANTS and value:
            raise UnsupportedError.of("adapter.option", path, f"the option {shown(key)} is not known", MERGE_HINT)


def _patterns(config: Mapping[str, JsonValue], key: str, path: Location) -> list[tuple[str, JsonValue]]:
    patterns = config.get(key)
    if patterns is None:
        return []
    if not isinstance(patterns, dict):
        raise CorruptError.of("adapter.config.pattern", path, f"'{key}' must be an object, found {shown(patterns)}")
    for pattern in patterns:
        _check_pattern(pattern, key, path)
    return list(patterns.items())


def _check_pattern(pattern: str, key: str, path: Location) -> None:
    """Refuse a regular expression that could run for long; module names, as peft writes them, all pass."""
    repeats, choices, groups = (sum(map(pattern.count, characters)) for characters in ("*+", "|", "("))
    is_bounded = (repeats == 0 and groups <= 1) or (repeats <= _MAX_REPEATS and choices == 0)
    if len(pattern) > _MAX_PATTERN or not is_bounded or not _PATTERN.fullmatch(pattern):
        raise UnsupportedError.of(
            "adapter.config.pattern", path, f"the pattern {shown(pattern)} of '{key}' is too complex to be matched",
            "name the modules one by one",
        )  # fmt: skip
    try:
        re.compile(pattern)
    except re.error as error:
        raise CorruptError.of(
            "adapter.config.pattern", path, f"the pattern {shown(pattern)} of '{key}' is no regular expression: {error}"
        ) from error


def _pattern_value(patterns: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that matches the end of the module's name at a dot."""
    for pattern, value in patterns.items():
        if len(module) <= _MAX_NAME and re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _rank(value: JsonValue, key: str, path: Location) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptError.of("adapter.config.rank", path, f"the rank {shown(key)} must be > 0, found {shown(value)}")
    return value


def _alpha(value: JsonValue, key: str, path: Location) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CorruptError.of("adapter.config.alpha", path, f"{shown(key)} must be a number, found {shown(value)}")
    return float(value)


def _flag(config: Mapping[str, JsonValue], key: str, path: Location) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise CorruptError.of("adapter.config.flag", path, f"'{key}' must be true or false, found {shown(value)}")
    return value
