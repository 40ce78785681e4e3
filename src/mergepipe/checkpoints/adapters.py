"""PEFT LoRA adapters: their configuration, and their deltas against a base as a checkpoint."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from blake3 import blake3

from mergepipe.checkpoints.adapted_tensors import Adapted, LowRankDelta
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable, TensorEntry
from mergepipe.checkpoints.directory import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAMES,
    list_names,
    read_weight_file,
    stat_present,
)
from mergepipe.checkpoints.embedding_rows import is_head
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError, did_you_mean
from mergepipe.storage.contract import Store
from mergepipe.storage.file_version import FileId
from mergepipe.storage.limits import ADAPTER_CONFIG_BYTES
from mergepipe.storage.location import Location

# --- the configuration of a PEFT adapter: what it scales its products by, or by name why it is no plain LoRA ---


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
    """Read `adapter_config.json`."""
    config = parse_object(store.read_small(path, ADAPTER_CONFIG_BYTES), where=path, code="adapter.damaged")
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
            "adapter.unsupported", path, f"the adapter is {shown(kind)}, only 'LORA' is read", MERGE_HINT
        )
    for key, what in _VARIANTS.items():
        if config.get(key):
            raise UnsupportedError.of("adapter.unsupported", path, f"{key}: {what}, is not read", MERGE_HINT)
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in _STARTS:
        raise UnsupportedError.of(
            "adapter.unsupported", path,
            f"init_lora_weights is {shown(start)}, which changes the base weights; how is not stored",
            "save it with path_initial_model_for_weight_conversion, or merge it with peft first",
        )  # fmt: skip
    for key, value in config.items():
        if key not in _HARMLESS and key not in _VARIANTS and value:
            raise UnsupportedError.of("adapter.unsupported", path, f"the option {shown(key)} is not known", MERGE_HINT)


def _patterns(config: Mapping[str, JsonValue], key: str, path: Location) -> list[tuple[str, JsonValue]]:
    patterns = config.get(key)
    if patterns is None:
        return []
    if not isinstance(patterns, dict):
        raise CorruptError.of("adapter.damaged", path, f"'{key}' must be an object, found {shown(patterns)}")
    for pattern in patterns:
        _check_pattern(pattern, key, path)
    return list(patterns.items())


def _check_pattern(pattern: str, key: str, path: Location) -> None:
    """Refuse a regular expression that could run for long; module names, as peft writes them, all pass."""
    repeats, choices, groups = (sum(map(pattern.count, characters)) for characters in ("*+", "|", "("))
    is_bounded = (repeats == 0 and groups <= 1) or (repeats <= _MAX_REPEATS and choices == 0)
    if len(pattern) > _MAX_PATTERN or not is_bounded or not _PATTERN.fullmatch(pattern):
        raise UnsupportedError.of(
            "adapter.unsupported", path, f"the pattern {shown(pattern)} of '{key}' is too complex to be matched",
            "name the modules one by one",
        )  # fmt: skip
    try:
        re.compile(pattern)
    except re.error as error:
        raise CorruptError.of(
            "adapter.damaged", path, f"the pattern {shown(pattern)} of '{key}' is no regular expression: {error}"
        ) from error


def _pattern_value(patterns: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that matches the end of the module's name at a dot."""
    for pattern, value in patterns.items():
        if len(module) <= _MAX_NAME and re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _rank(value: JsonValue, key: str, path: Location) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptError.of("adapter.damaged", path, f"the rank {shown(key)} must be > 0, found {shown(value)}")
    return value


def _alpha(value: JsonValue, key: str, path: Location) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CorruptError.of("adapter.damaged", path, f"{shown(key)} must be a number, found {shown(value)}")
    return float(value)


def _flag(config: Mapping[str, JsonValue], key: str, path: Location) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise CorruptError.of("adapter.damaged", path, f"'{key}' must be true or false, found {shown(value)}")
    return value


# --- map an adapter's tensor names to the base's, where the two were saved under different prefixes ---


_FEWEST_PARTS = 2  # what is left of a name after its prefix is gone must still say something
_MOST_CANDIDATES = 500


@dataclass(frozen=True, slots=True)
class Prefix:
    """Names that start with `removed` start with `added` instead."""

    removed: str
    added: str

    def applied(self, name: str) -> str | None:
        """Return the mapped name, or None where the prefix does not match."""
        return self.added + name[len(self.removed) :] if name.startswith(self.removed) else None


def base_names(wanted: Sequence[str], base: Collection[str], where: object) -> dict[str, str]:
    """Map each wanted name to the base's: the same name, or by one prefix change common to all others."""
    renamed = {name: name for name in wanted if name in base}
    changed_names = [name for name in wanted if name not in base]
    if not changed_names:
        return renamed
    prefix = _common_prefix(changed_names, base, where)
    for name in changed_names:
        other = prefix.applied(name) if prefix else None
        if other is None:
            candidates = [base_name for base_name in base if base_name.rpartition(".")[2] == name.rpartition(".")[2]]
            raise MismatchError.of(
                "adapter.mismatch", where, f"{shown(name)} has no counterpart in the base",
                did_you_mean(name, candidates[:_MOST_CANDIDATES]),
            )  # fmt: skip
        renamed[name] = other
    return renamed


def _common_prefix(names: Sequence[str], base: Collection[str], where: object) -> Prefix | None:
    longest = max(names, key=lambda name: name.count("."))
    for candidates in _candidates(longest, base):
        fitting = _most_alike([prefix for prefix in candidates if all(prefix.applied(name) in base for name in names)])
        if len(fitting) > 1:
            both = " or ".join(shown(prefix.applied(longest)) for prefix in fitting[:2])
            raise MismatchError.of("adapter.mismatch", where, f"{shown(longest)} could be the base's {both}")
        if fitting:
            return fitting[0]
    return None


def _most_alike(prefixes: list[Prefix]) -> list[Prefix]:
    """Return the prefix changes that keep most words: `model.language_model.` is no `vision_tower.encoder.`."""
    n_shared = [len({*prefix.removed.split(".")} & {*prefix.added.split(".")} - {""}) for prefix in prefixes]
    return [prefix for prefix, count in zip(prefixes, n_shared, strict=True) if count == max(n_shared)]


def _candidates(name: str, base: Collection[str]) -> Iterator[list[Prefix]]:
    """List prefix changes from `name` to a name of the base, by length removed.

    No prefix holds a number: another layer is not the same tensor saved differently.
    """
    parts = name.split(".")
    for cut in range(len(parts) - _FEWEST_PARTS + 1):
        rest = ".".join(parts[cut:])
        removed = name[: len(name) - len(rest)]
        if _has_number(removed):
            return
        prefixes = (n[: len(n) - len(rest)] for n in base if n == rest or n.endswith(f".{rest}"))
        yield [Prefix(removed, added) for added in prefixes if not _has_number(added)]


def _has_number(prefix: str) -> bool:
    return any(part.isdigit() for part in prefix.split("."))


# --- open a PEFT LoRA adapter as a checkpoint of deltas against a base ---


PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?(embedding)|\.weight)")
_VARIANT = re.compile(r"lora_magnitude_vector|lora_[AB]\.bias|lora_[A-Za-z]+|token_adapter|prompt_embeddings")
_BASE_LAYER = ".base_layer."


@dataclass(slots=True)
class _Factors:
    """The stored factors of one module: `sides["A"]` is (R, N), `sides["B"]` (M, R)."""

    sides: dict[str, TensorEntry] = field(default_factory=dict)
    is_embedding: bool = False


def open_adapter(store: Store, path: Location, base: Checkpoint) -> Checkpoint:
    """Open the adapter in the directory `path`; its tensors are named like the `base` tensors they change.

    Deltas are computed when they are fetched. Weights that the adapter stores in full (`modules_to_save`, biases) are
    stored tensors. What it does not touch is absent. No tensor byte is read.
    """
    config, fingerprint = _read_config(store, path)
    name = next((candidate for candidate in ADAPTER_NAMES if candidate in list_names(store, path)), None)
    if name is None:
        raise NotFoundError.of("checkpoint.incomplete", path, f"holds neither {' nor '.join(ADAPTER_NAMES)}")
    file = read_weight_file(store, path, name, stat_present(store, path, name))
    tensors = _Opener(path / name, config, base).tensors(file.entries)
    files = (file.fingerprint, fingerprint)
    return Checkpoint(path, path, MappingProxyType(tensors), files, (), CheckpointKind.ADAPTER)


def apply_adapter(weights: Checkpoint, adapter: Checkpoint) -> Checkpoint:
    """Apply `adapter`, opened against `weights`: a checkpoint of full tensors, unchanged ones as stored."""
    tensors = {
        name: _applied(weights.path, tensor, adapter.tensors.get(name)) for name, tensor in weights.tensors.items()
    }
    absolute = (replace(file, name=str((adapter.root / file.name).absolute())) for file in adapter.files)
    files = (*weights.files, *absolute)
    return replace(weights, tensors=MappingProxyType(tensors), files=files, content_id=None)


def _applied(path: Location, weights: Readable, change: Readable | None) -> Readable:
    if not isinstance(change, LowRankDelta):
        return weights if change is None else change
    if not isinstance(weights, TensorEntry) or weights.is_delta:
        raise UnsupportedError.of(
            "adapter.unsupported", path, f"{shown(weights.name)} is not stored as weights, so no adapter applies to it"
        )
    return Adapted(weights, change)


def _read_config(store: Store, path: Location) -> tuple[AdapterConfig, FileId]:
    if ADAPTER_CONFIG_NAME not in list_names(store, path):
        raise NotFoundError.of("checkpoint.incomplete", path, f"is no adapter: it holds no {ADAPTER_CONFIG_NAME}")
    status = stat_present(store, path, ADAPTER_CONFIG_NAME)
    config = read_adapter_config(store, path / ADAPTER_CONFIG_NAME)
    raw = store.read_small(path / ADAPTER_CONFIG_NAME, ADAPTER_CONFIG_BYTES)
    digest = blake3(raw).hexdigest(length=16)
    return config, FileId(ADAPTER_CONFIG_NAME, status.size_bytes, status.version, digest)


class _Opener:
    """Turns the stored tensors of one adapter into tensors of its base."""

    def __init__(self, path: Location, config: AdapterConfig, base: Checkpoint) -> None:
        self._path = path
        self._config = config
        self._base = base

    def tensors(self, entries: Sequence[TensorEntry]) -> dict[str, Readable]:
        """Return the tensors by the base's names, in storage order."""
        factors, full = self._sorted_out(entries)
        wanted = [f"{module}.weight" for module in factors]
        self._check_heads(wanted, full)
        names = base_names([*wanted, *(name for name in full if name not in wanted)], self._base.tensors, self._path)
        is_transposed = self._orientation({names[f"{m}.weight"]: f for m, f in factors.items()})
        tensors: dict[str, Readable] = {names[name]: replace(entry, name=names[name]) for name, entry in full.items()}
        for module, parts in factors.items():
            name = names[f"{module}.weight"]
            delta = self._delta(module, name, parts, transposed=is_transposed[name])
            stored = tensors.get(name)
            tensors[name] = Adapted(stored, delta) if isinstance(stored, TensorEntry) else delta
        return tensors

    def _check_heads(self, changed: Sequence[str], full: Collection[str]) -> None:
        """Refuse an output head where the base has none because its weights are tied."""
        heads = [name for name in (*changed, *full) if is_head(name)]
        if not heads or any(map(is_head, self._base.tensors)):
            return
        if heads[0] in changed:
            hint = f"{MERGE_HINT}: the change goes into the embedding"
        else:
            hint = f"{MERGE_HINT}, with --allow-dropped '{heads[0]}', which leaves the head out"
        raise MismatchError.of(
            "adapter.mismatch", self._path,
            f"it changes {shown(heads[0])}, and the base has no output head: its embedding is used for it", hint,
        )  # fmt: skip

    def _sorted_out(self, entries: Sequence[TensorEntry]) -> tuple[dict[str, _Factors], dict[str, TensorEntry]]:
        """Sort entries into factors by module, and tensors stored in full by name."""
        factors: dict[str, _Factors] = defaultdict(_Factors)
        full: dict[str, TensorEntry] = {}
        for entry in entries:
            name = entry.name.removeprefix(PREFIX)
            match = _FACTOR.fullmatch(name)
            if match:
                self._check_factor(entry)
                parts = factors[match["module"]]
                parts.sides[match["side"]] = entry
                parts.is_embedding = match["embedding"] is not None
            elif (variant := _VARIANT.search(name)) is not None:
                raise UnsupportedError.of(
                    "adapter.unsupported", self._path,
                    f"{shown(entry.name)}: '{variant[0]}' is not part of a plain LoRA",
                    MERGE_HINT,
                )  # fmt: skip
            else:
                full[name.replace(_BASE_LAYER, ".")] = entry
        for module, parts in factors.items():
            self._check_pair(module, parts)
        return dict(factors), full

    def _check_factor(self, entry: TensorEntry) -> None:
        if len(entry.shape) != 2:
            raise UnsupportedError.of(
                "adapter.unsupported", self._path,
                f"{shown(entry.name)} has shape {list(entry.shape)}: only factors with two dimensions are read",
                MERGE_HINT,
            )  # fmt: skip
        if entry.dtype.kind is not DTypeKind.FLOAT:
            raise UnsupportedError.of("adapter.unsupported", self._path, f"{shown(entry.name)} is {entry.dtype.name}")

    def _check_pair(self, module: str, parts: _Factors) -> None:
        if len(parts.sides) != 2:
            stored_name = next(iter(parts.sides.values())).name
            raise CorruptError.of("adapter.damaged", self._path, f"{shown(stored_name)} has no counterpart, A or B")
        down, up = parts.sides["A"], parts.sides["B"]
        rank = self._config.rank_of(module)
        if (down.shape[0], up.shape[1]) != (rank, rank):
            raise CorruptError.of(
                "adapter.damaged", self._path,
                f"{shown(module)} has factors {list(up.shape)} and {list(down.shape)}, the configured rank is {rank}",
            )  # fmt: skip

    def _orientation(self, factors: Mapping[str, _Factors]) -> dict[str, bool]:
        """Decide whether each product is transposed in the base: by its shape, else by the others', else by the option.

        Frameworks store some layers (Conv1D of GPT-2) transposed, and one option for all modules cannot say which.
        """
        choices = {name: self._choices(name, parts) for name, parts in factors.items()}
        told = {fits[0] for name, fits in choices.items() if len(fits) == 1 and not factors[name].is_embedding}
        usual = next(iter(told)) if len(told) == 1 else self._config.is_transposed
        for name, fits in choices.items():
            if len(fits) == 2 and len(told) == 2:
                raise UnsupportedError.of(
                    "adapter.unsupported", self._path,
                    f"{shown(name)} is square, and other tensors are stored both ways: it cannot be told which it is",
                    MERGE_HINT,
                )  # fmt: skip
        return {name: fits[0] if len(fits) == 1 else usual for name, fits in choices.items()}

    def _choices(self, name: str, parts: _Factors) -> tuple[bool, ...]:
        """Return the orientations in which a product fits its base tensor; an embedding has only one."""
        shape = (parts.sides["B"].shape[0], parts.sides["A"].shape[1])
        needed = self._base.tensors[name].shape
        allowed = (True,) if parts.is_embedding else (False, True)
        fits = tuple(flipped for flipped in allowed if (shape[::-1] if flipped else shape) == needed)
        if not fits:
            raise MismatchError.of(
                "adapter.mismatch", self._path,
                f"the factors of {shown(name)} make {list(shape)}, the base has {list(needed)}",
            )  # fmt: skip
        return fits

    def _delta(self, module: str, name: str, parts: _Factors, *, transposed: bool) -> LowRankDelta:
        return LowRankDelta(name, parts.sides["B"], parts.sides["A"], self._config.scale_of(module), transposed)
