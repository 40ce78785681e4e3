"""Adapters as they are stored, by PEFT, MLX and Kohya's scripts: their configuration, and their tensors by module."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from blake3 import blake3

from mergepipe.checkpoints.adapted_tensors import Composed, Factor
from mergepipe.checkpoints.contract import CheckpointFile, TensorEntry
from mergepipe.checkpoints.directory import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAMES,
    hint_of_adapters,
    list_names,
    read_weight_file,
    stat_present,
    without_wrappers,
)
from mergepipe.checkpoints.embedding_rows import embedding_ending, is_head
from mergepipe.checkpoints.name_patterns import EndPatterns, PatternError
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, MergePipeError, MismatchError, NotFoundError, UnsupportedError
from mergepipe.storage.contract import ADAPTER_CONFIG_BYTES, FileId, Store
from mergepipe.storage.location import Location

# --- the configuration of a PEFT adapter: what it scales its products by, or by name why it is no plain LoRA ---


T = TypeVar("T")

BASE_LAYER = ".base_layer"
TOKEN_ADAPTER = ".token_adapter"
INNER, OUTER = "gate_up_proj", "down_proj"
"""Parameters of stacked experts, in the order in which models have them, and PEFT wraps them."""
CONVERT_HINT = "convert it to LoRA by `peft.save_as_lora`, or merge it into its base with peft first"
MERGE_HINT = "merge it into its base with peft first, and use the result as an expert"
_MOST_LAYERS = 100_000
_ADALORA_EPSILON = 1e-5  # as PEFT adds to the rank
_PATTERN_HINT = "name the modules one by one"
# Configured for training only, or already in the stored tensors: without effect on what is merged.
_HARMLESS = frozenset({
    "alpha", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "init_weights",
    "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias",
    "lora_dropout", "megatron_core", "merge_weights", "module_dropout", "modules_to_save", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_dropout", "rank_pattern", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type", "trainable_token_indices", "use_dora", "use_effective_conv2d", "use_rslora",
    "decompose_both", "decompose_factor", "feedforward_modules", "init_ia3_weights",
    "rank_dropout_scale",
    "beta1", "beta2", "deltaT", "init_r", "orth_reg_weight", "target_r", "tfinal", "tinit", "total_step",
})  # fmt: skip
_VARIANTS = {
    "use_qalora": "QA-LoRA, which pools its inputs",
    "alora_invocation_tokens": "aLoRA, which acts on some tokens only",
    "use_bdlora": "BD-LoRA, with block-diagonal factors",
    "arrow_config": "Arrow, which routes by its inputs",
    "kasa_config": "KaSA, which takes singular values from the base weights",
    "monteclora_config": "MonteCLoRA, which samples its factors",
    "velora_config": "VeLoRA, which compresses its inputs",
}
ADALORA = "ADALORA"
# The options that hold alpha, by kind.
_ALPHAS = {"LORA": "lora_alpha", ADALORA: "lora_alpha", "LOHA": "alpha", "LOKR": "alpha", "IA3": ""}
MLX, KOHYA, DIFFUSERS, LLAMA_CPP = "MLX", "Kohya", "diffusers", "GGUF"  # kinds of other programs
BY_MODULE = (KOHYA, DIFFUSERS, LLAMA_CPP)
"""Kinds of one file: rank and alpha of each module are known by its whole name."""
# Ways to begin training that leave the base weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take
# something away from them, and the stored adapter does not say what.
_STARTS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter of a `kind`. `ranks` and `alphas` map patterns of module names, tried in order, to what differs there.

    `parameters` are the ends of the names of adapted parameters that are no module's weight, such as stacked experts.
    `tokens` are the rows of trained tokens, by the end of the name of their module; "" stands for the only one.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilised: bool
    is_transposed: bool  # fan_in_fan_out
    parameters: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keeps_tied: bool = False  # ensure_weight_tying: embedding and head were trained as one
    is_dora: bool = False
    kind: str = "LORA"  # a key of `_ALPHAS`, or MLX: transposed factors; or one of `BY_MODULE`
    base: str = ""  # the model that it was trained on, as the configuration names it
    layers: tuple[tuple[int, int], ...] = ()  # layer_replication: the ranges of layers that the model was made of
    names: Mapping[str, str] = field(default_factory=dict)  # of modules under other names: the one in training

    def rank_of(self, module: str) -> int:
        """The rank of one module's factors; LoHa multiplies two products of the configured one."""
        rank = self._value(self.ranks, module, self.rank)
        return rank**2 if self.kind == "LOHA" else rank

    def _value(self, stated: Mapping[str, T], module: str, default: T) -> T:
        """Return what is stated of a module: by the first pattern that matches the end of its name at a dot."""
        module = self.names.get(module, module)
        if self.kind == ADALORA or self.kind in BY_MODULE:
            return stated.get(module, default)
        try:
            index = _end_patterns(tuple(stated)).first(module)
        except PatternError as error:
            message = f"rank_pattern and alpha_pattern: matching {shown(module)} {error}"
            raise unsupported_adapter(ADAPTER_CONFIG_NAME, message, _PATTERN_HINT) from error
        return default if index is None else tuple(stated.values())[index]

    def parameters_of(self, module: str) -> list[str]:
        """List the bare parameters that factors under the name of a module may be of, as the base names them.

        A last name alone, as PEFT writes where `gate_proj` is asked for, is that of stacked experts.
        """
        stem = module.replace(BASE_LAYER, "")
        texts = [text for text in self.parameters if "." in text or stem.endswith(".experts")]
        names = [(text, f"{stem}.{text.rpartition('.')[2]}") for text in texts]
        return list(dict.fromkeys(name for text, name in names if f".{name}".endswith(f".{text}")))

    def nested_parameters(self, module: str) -> list[str]:
        """List those of `parameters_of` that its name leaves: PEFT nests `gate_up_proj` of experts in `down_proj`."""
        names, is_inner = self.parameters_of(module), module.endswith(BASE_LAYER)
        return [name for name in names if name.endswith(f".{INNER}") == is_inner] or names

    def scale_of(self, module: str) -> float:
        """Return the factor of one module's product: alpha / r, or alpha / sqrt(r) for rsLoRA; 1 without alpha."""
        if not _ALPHAS.get(self.kind, MLX):
            return 1.0
        if self.kind == ADALORA:  # of the rank that training began with, however many directions are left
            return (self.alpha if self.alpha > 0 else self.rank) / (self.rank + _ADALORA_EPSILON)
        rank = self._value(self.ranks, module, self.rank)
        return self._value(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def damaged_adapter(where: object, message: str) -> MergePipeError:
    """Make the error for an adapter that contradicts itself."""
    return CorruptError.of("adapter.damaged", where, message)


def unsupported_adapter(where: object, message: str, hint: str = "") -> MergePipeError:
    """Make the error for an adapter that is sound, and that is not read."""
    return UnsupportedError.of("adapter.unsupported", where, message, hint)


def read_adapter_config(store: Store, path: Location) -> AdapterConfig:
    """Read `adapter_config.json`."""
    raw = store.read_small(path, ADAPTER_CONFIG_BYTES)
    return parse_adapter_config(parse_object(raw, where=path, code="adapter.damaged"), path)


def parse_adapter_config(config: Mapping[str, JsonValue], path: Location) -> AdapterConfig:
    """Check the content of an `adapter_config.json`."""
    if "peft_type" not in config and "lora_parameters" in config:
        return _mlx_config(config, path)
    alpha = _check_kind(config, path)
    is_adalora = config["peft_type"] == ADALORA
    rank = _rank(config.get("init_r", 12), "init_r", path) if is_adalora else _rank(config.get("r", 8), "r", path)
    # AdaLoRA keeps there which directions it has cut away.
    rank_patterns = [] if is_adalora else _patterns(config, "rank_pattern", path)
    ranks = {key: _rank(value, key, path) for key, value in rank_patterns}
    alphas = {key: _alpha(value, key, path) for key, value in _patterns(config, "alpha_pattern", path)}
    return AdapterConfig(
        rank,
        _alpha(config.get(alpha, 8), alpha, path),
        MappingProxyType(ranks),
        MappingProxyType(alphas),
        _flag(config, "use_rslora", path),
        _flag(config, "fan_in_fan_out", path),
        tuple(_texts(config.get("target_parameters") or [], "target_parameters", path)),
        _tokens(config.get("trainable_token_indices") or {}, path),
        _flag(config, "ensure_weight_tying", path),
        _flag(config, "use_dora", path),
        str(config["peft_type"]),
        base=str(config.get("base_model_name_or_path") or ""),
        layers=_layers(config.get("layer_replication") or [], path),
    )


def _mlx_config(config: Mapping[str, JsonValue], path: Location) -> AdapterConfig:
    """Read the configuration that mlx-lm writes: one rank and one scale; releases of 2024 also have an alpha."""
    kind, stated = config.get("fine_tune_type", "lora"), config["lora_parameters"]
    if kind not in ("lora", "dora") or not isinstance(stated, dict):
        message = f"fine_tune_type is {shown(kind)}, only 'lora' and 'dora' are read, with lora_parameters"
        raise unsupported_adapter(path, message)
    rank, scale = _rank(stated.get("rank", 8), "rank", path), _alpha(stated.get("scale", 20.0), "scale", path)
    alpha = _alpha(stated["alpha"], "alpha", path) if "alpha" in stated else rank
    base = str(config.get("model") or "")
    return AdapterConfig(rank, scale * alpha, {}, {}, False, False, is_dora=kind == "dora", kind=MLX, base=base)


def _check_kind(config: Mapping[str, JsonValue], path: Location) -> str:
    """Refuse what is not read; return the option that holds alpha."""
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in _ALPHAS:
        message = f"the adapter is {shown(kind)}, only {', '.join(map(repr, _ALPHAS))} are read"
        raise unsupported_adapter(path, message, CONVERT_HINT)
    for key, what in _VARIANTS.items():
        if config.get(key):
            raise unsupported_adapter(path, f"{key}: {what}, is not read", MERGE_HINT)
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in _STARTS:
        message = f"init_lora_weights is {shown(start)}, which changes the base weights; how is not stored"
        hint = "save it with path_initial_model_for_weight_conversion, or merge it with peft first"
        raise unsupported_adapter(path, message, hint)
    for key, value in config.items():
        if key not in _HARMLESS and key not in _VARIANTS and value:
            raise unsupported_adapter(path, f"the option {shown(key)} is not known", MERGE_HINT)
    return _ALPHAS[kind] or "alpha"


def _texts(value: JsonValue, key: str, path: Location) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise damaged_adapter(path, f"'{key}' must be a list of names, found {shown(value)}")
    return [str(text) for text in value]


def _layers(value: JsonValue, path: Location) -> tuple[tuple[int, int], ...]:
    ranges = value if isinstance(value, list) else [value]
    pairs = [(pair[0], pair[1]) for pair in ranges if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) != len(ranges) or not all(type(n) is int and 0 <= n <= _MOST_LAYERS for pair in pairs for n in pair):
        raise damaged_adapter(path, f"'layer_replication' must be a list of ranges of layers, found {shown(value)}")
    return tuple((int(start), int(stop)) for start, stop in pairs if isinstance(start, int) and isinstance(stop, int))


def _tokens(value: JsonValue, path: Location) -> Mapping[str, tuple[int, ...]]:
    """Read the trained tokens: a list for the embedding, or lists by module."""
    lists = value if isinstance(value, dict) else {"": value}
    tokens: dict[str, tuple[int, ...]] = {}
    for module, indices in lists.items():
        if not isinstance(indices, list) or not all(type(index) is int and index >= 0 for index in indices):
            raise damaged_adapter(path, f"'trainable_token_indices' must be lists of rows, found {shown(indices)}")
        tokens[module] = tuple(index for index in indices if type(index) is int)
    return MappingProxyType(tokens)


def _patterns(config: Mapping[str, JsonValue], key: str, path: Location) -> list[tuple[str, JsonValue]]:
    patterns = config.get(key)
    if patterns is None:
        return []
    if not isinstance(patterns, dict):
        raise damaged_adapter(path, f"'{key}' must be an object, found {shown(patterns)}")
    try:
        _end_patterns(tuple(patterns))
    except PatternError as error:
        raise unsupported_adapter(path, f"'{key}': the pattern {error}", _PATTERN_HINT) from error
    except re.error as error:
        message = f"the pattern {shown(error.pattern)} of '{key}' is not a regular expression: {error}"
        raise damaged_adapter(path, message) from error
    return list(patterns.items())


@lru_cache(maxsize=8)
def _end_patterns(expressions: tuple[str, ...]) -> EndPatterns:
    return EndPatterns(expressions)


def _rank(value: JsonValue, key: str, path: Location) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise damaged_adapter(path, f"the rank {shown(key)} must be > 0, found {shown(value)}")
    return value


def _alpha(value: JsonValue, key: str, path: Location) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise damaged_adapter(path, f"{shown(key)} must be a number, found {shown(value)}")
    return float(value)


def _flag(config: Mapping[str, JsonValue], key: str, path: Location) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise damaged_adapter(path, f"'{key}' must be true or false, found {shown(value)}")
    return value


# --- read what an adapter stores, module by module ---


PREFIX = "base_model.model."
_UNEMBEDDING = re.compile(r"^(?:model\.)?unembed_tokens\.")  # Tinker's name of the output head
_NAMED = re.compile(r"\.default(?=\.weight$|\.bias$|$)")
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|hada_w[12]_[ab]|lokr_w[12](?:_[ab])?|ia3_l"
    r"|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
_MLX_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_ADALORA_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_[ABE])")
_PARTS_OF_KIND = {MLX: _MLX_PART, ADALORA: _ADALORA_PART}
ROLES = {
    "lora_down.weight": "down", "lora_up.weight": "up", "lora.down.weight": "down", "lora.up.weight": "up",
    "lora_a": "down", "lora_b": "up", "m": "magnitude",
    "lora_A": "down", "lora_B": "up", "lora_E": "values",
    "lora_A.weight": "down", "lora_embedding_A": "down", "lora_B.weight": "up", "lora_embedding_B": "up",
    "hada_w1_b": "down", "hada_w1_a": "up", "hada_w2_b": "down_2", "hada_w2_a": "up_2",
    "lokr_w1": "first", "lokr_w1_a": "first_a", "lokr_w1_b": "first_b",
    "lokr_w2": "second", "lokr_w2_a": "second_a", "lokr_w2_b": "second_b",
    "ia3_l": "gains",
    "lora_B.bias": "bias", "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
_VARIANT = re.compile(r"lora_[A-Za-z_]+|prompt_embeddings|ia3_l|hada_t|lokr_|vera_lambda")
_MAGNITUDE = ".lora_magnitude_vector.weight"  # PEFT's files leave out its end
_OF_PEFT = re.compile(
    r"\.(?:lora_[A-Za-z_]+|hada_\w+|lokr_\w+|ia3_l|vera_lambda_[bd]|oft_R|boft_[RS]|modules_to_save"
    r"|trainable_tokens_delta)(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?:weight|bias))?$"
)
"""The end of the name of a tensor that PEFT adds to a model: with the adapter's name, which its files leave out."""


def name_in_peft_file(name: str) -> tuple[str, str] | None:
    """Return the adapter and the name in PEFT's files of a tensor that PEFT has added to a model; None of any other.

    The adapter is empty where the name leaves it out.
    """
    match = _OF_PEFT.search(name)
    if match is None:
        return None
    adapter = match["adapter"]
    if adapter is None:
        return "", name
    in_file = name[: match.start("adapter") - 1] + name[match.end("adapter") :]
    if in_file.endswith(_MAGNITUDE):
        in_file = in_file.removesuffix(".weight")
    return adapter, in_file


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """The stored tensors of one module: `down` is (R, N), `up` (M, R); of fused experts (E * R, N) and (M, R * E).

    Where it `is_kronecker`, the delta is that of each element of `up` times all of `down`.
    """

    down: Factor
    up: Factor
    bias: StoredTensor | None = None
    magnitude: StoredTensor | None = None
    is_embedding: bool = False
    is_kronecker: bool = False
    kernel: tuple[int, ...] = ()  # of a convolution: the shape of a row of `down` as it is stored

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the delta."""
        (rows, inner), (other, columns) = self.up.shape, self.down.shape
        return (rows * other, inner * columns) if self.is_kronecker else (rows, columns)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as it is stored: factors by module, full tensors by name, rows of trained tokens by module.

    `copies` are weights of the base, stored beside the factors of embeddings and to be taken in their place. `gains`,
    by module, multiply rows, (M, 1), or columns, (1, N).
    """

    path: Location
    config: AdapterConfig
    modules: Mapping[str, AdaptedModule]
    full: Mapping[str, StoredTensor]
    copies: Mapping[str, StoredTensor]
    tokens: Mapping[str, StoredTensor]
    files: tuple[CheckpointFile, ...]
    gains: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """The modules that are stored in full."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.full))

    def renamed(self, names: Mapping[str, str]) -> StoredAdapter:
        """Return the adapter with parts of its names changed, one after the other; ranks and alphas stay as they were.

        Raises:
            MergePipeError: two names become one.
        """
        if not names:
            return self
        config = replace(
            self.config,
            parameters=tuple(_with_parts(text, names) for text in self.config.parameters),
            tokens=self._under(self.config.tokens, names),
            names={_with_parts(module, names): module for module in self.modules},
        )
        return replace(
            self, config=config, modules=self._under(self.modules, names), full=self._under(self.full, names),
            copies=self._under(self.copies, names), tokens=self._under(self.tokens, names),
            gains=self._under(self.gains, names),
        )  # fmt: skip

    def _under(self, values: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
        """Return what is stored under names whose parts are changed."""
        renamed: dict[str, T] = {}
        for name, value in values.items():
            other = _with_parts(name, names)
            if other in renamed:
                message = f"{shown(name)} and another name of it both become {shown(other)}"
                raise MismatchError.of("adapter.mismatch", self.path, message, "rename longer parts of its names")
            renamed[other] = value
        return renamed


def _with_parts(name: str, names: Mapping[str, str]) -> str:
    """Change parts of a dotted name, each of them one or more words between dots."""
    dotted = f".{name}."
    for part, other in names.items():
        dotted = dotted.replace(f".{part}.", f".{other}." if other else ".")
    return dotted.strip(".")


def read_adapter_folder(store: Store, path: Location) -> StoredAdapter:
    """Read the headers and the configuration of the adapter in the directory `path`; no tensor byte."""
    config, config_file = _read_config(store, path)
    name = next((candidate for candidate in ADAPTER_NAMES if candidate in list_names(store, path)), None)
    if name is None:
        raise NotFoundError.of("checkpoint.incomplete", path, f"holds neither {' nor '.join(ADAPTER_NAMES)}")
    file = read_weight_file(store, path, name, stat_present(store, path, name))
    _check_spellings(store, path, file.entries)
    return sorted_out(path, config, file.entries, (file.source, config_file))


_STACKED_PART = re.compile(
    r"(?P<layer>.+)\.(?:experts|switch_mlp)\.(?P<matrix>gate_proj|up_proj|down_proj|w1|w2|w3)"
    r"\.(?P<part>lora_[AB]\.weight|lora_[ab])"
)
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _single_experts(path: Location, entries: Sequence[StoredTensor]) -> Iterator[StoredTensor]:
    """Yield the entries, the factors of stacked experts as those of each expert.

    Tinker and MLX stack the experts of one matrix: A is (E, R, N), B (E, M, R). One that all of them share is stored
    once. Where a model has no such matrix both are empty.
    """
    stacks: dict[tuple[str, str], dict[str, TensorEntry]] = defaultdict(dict)
    for entry in entries:
        match = _STACKED_PART.fullmatch(_plain_name(entry.name))
        if match is None or len(entry.shape) != 3 or not isinstance(entry, TensorEntry):
            yield entry
        elif entry.n_elements:
            stacks[match["layer"], match["matrix"]][match["part"]] = entry
    for (layer, matrix), parts in stacks.items():
        n_experts = max(entry.shape[0] for entry in parts.values())
        if any(entry.shape[0] not in (1, n_experts) for entry in parts.values()):
            message = f"the factors of {shown(f'{layer}.experts.{matrix}')} are of different numbers of experts"
            raise damaged_adapter(path, message)
        for expert in range(n_experts):
            module = f"{layer}.experts.{expert}.{_MATRICES.get(matrix, matrix)}"
            for part, entry in parts.items():
                nbytes = entry.nbytes // entry.shape[0]
                at = entry.offset + (expert * nbytes if entry.shape[0] > 1 else 0)
                name = f"{module}.{part}"
                yield replace(entry, name=name, shape=entry.shape[1:], offset=at, nbytes=nbytes)


_EXPERT = re.compile(r"\.experts\.\d+\.")
_COMPARED_BYTES = 1 << 20


def _check_spellings(store: Store, path: Location, entries: Sequence[TensorEntry]) -> None:
    """Refuse two values of one tensor, which are stored under two spellings of its name; equal ones are one."""
    first_entries: dict[str, TensorEntry] = {}
    for entry in entries:
        first = first_entries.setdefault(_plain_name(entry.name), entry)
        if first is entry:
            continue
        is_same = (first.dtype, first.shape) == (entry.dtype, entry.shape)
        for start in range(0, entry.nbytes if is_same else 0, _COMPARED_BYTES):
            nbytes = min(_COMPARED_BYTES, entry.nbytes - start)
            raw = store.read_metadata(entry.file, entry.offset + start, nbytes)
            is_same = is_same and raw == store.read_metadata(first.file, first.offset + start, nbytes)
        if not is_same:
            message = f"{shown(first.name)} and {shown(entry.name)} are one tensor, with two values"
            raise damaged_adapter(path, message)


def _plain_name(stored: str) -> str:
    """Return the name of a tensor in its model, whichever way a trainer has spelled it."""
    name = _NAMED.sub("", without_wrappers(stored)).removeprefix(PREFIX).replace(".modules_to_save.", ".")
    name = _UNEMBEDDING.sub("lm_head.", name)
    return name.removesuffix(".weight") if name.endswith(_MAGNITUDE) else name


def _read_config(store: Store, path: Location) -> tuple[AdapterConfig, CheckpointFile]:
    names = list_names(store, path)
    if ADAPTER_CONFIG_NAME not in names:
        message = f"is not an adapter: it has no {ADAPTER_CONFIG_NAME}"
        raise NotFoundError.of("checkpoint.incomplete", path, message, hint_of_adapters(store, path, names))
    status = stat_present(store, path, ADAPTER_CONFIG_NAME)
    config = read_adapter_config(store, path / ADAPTER_CONFIG_NAME)
    raw = store.read_small(path / ADAPTER_CONFIG_NAME, ADAPTER_CONFIG_BYTES)
    digest = blake3(raw).hexdigest(length=16)
    identity = FileId(ADAPTER_CONFIG_NAME, status.size_bytes, status.version, digest)
    return config, CheckpointFile(path / ADAPTER_CONFIG_NAME, identity)


def sorted_out(
    path: Location, config: AdapterConfig, entries: Sequence[StoredTensor], files: tuple[CheckpointFile, ...]
) -> StoredAdapter:
    """Sort entries into the parts of modules, and tensors stored in full."""
    parts: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    full: dict[str, StoredTensor] = {}
    copies: dict[str, StoredTensor] = {}
    tokens: dict[str, StoredTensor] = {}
    gains: dict[str, StoredTensor] = {}
    embeddings = set()
    for entry in _single_experts(path, entries):
        name = _plain_name(entry.name)
        if ".original_module." in name:  # what PEFT keeps of the base beside a module that it saves in full
            continue
        if not entry.n_elements and config.kind == ADALORA:  # all directions of the module were cut away
            continue
        if not entry.n_elements:
            message = f"its tensors are empty ({shown(entry.name)}): it was saved under ZeRO-3 without gathering them"
            hint = "save it again with stage3_gather_16bit_weights_on_model_save, or export the training checkpoint"
            raise CorruptError.of("adapter.damaged", path, message, hint)
        match = _PARTS_OF_KIND.get(config.kind, _PART).fullmatch(name)
        if match is None and (variant := _VARIANT.search(name)) is not None:
            raise unsupported_adapter(path, f"{shown(entry.name)}: '{variant[0]}' is not read", MERGE_HINT)
        if match is None:
            is_copy = name.endswith(f"{BASE_LAYER}.weight")
            plain = name.replace(f"{TOKEN_ADAPTER}{BASE_LAYER}.", ".").replace(f"{BASE_LAYER}.", ".")
            (copies if is_copy else full)[plain] = entry
            continue
        check_part(path, entry, match["part"])
        if match["part"].startswith(("token_adapter", "ia3_l")):
            (gains if match["part"] == "ia3_l" else tokens)[match["module"]] = entry
        else:
            parts[match["module"]][ROLES[match["part"]]] = entry
            is_embedding = embedding_ending(f"{match['module']}.weight") and not is_head(f"{match['module']}.weight")
            if is_embedding if config.kind == MLX else "embedding" in match["part"]:
                embeddings.add(match["module"])
    modules = {
        module: paired(path, stored, is_embedding=module in embeddings, kind=config.kind)
        for module, stored in parts.items()
    }
    if config.kind == ADALORA:
        config = replace(config, ranks={module: adapted.down.shape[0] for module, adapted in modules.items()})
    stray = [name for name in copies if name.removesuffix(".weight") not in modules.keys() | tokens.keys()]
    full |= {name: copies.pop(name) for name in stray}
    return StoredAdapter(path, config, modules, full, copies, tokens, files, gains)


def check_part(path: Location, entry: StoredTensor, part: str) -> None:
    """Refuse a tensor that is no matrix or, of a magnitude or bias, no vector."""
    is_vector = ROLES.get(part) in ("magnitude", "bias")
    if len(entry.shape) != (1 if is_vector else 2):
        message = f"{shown(entry.name)} has shape {list(entry.shape)}: only factors with two dimensions are read"
        raise unsupported_adapter(path, message, MERGE_HINT)
    if entry.dtype.kind is not DTypeKind.FLOAT:
        raise unsupported_adapter(path, f"{shown(entry.name)} is {entry.dtype.name}")


def paired(path: Location, stored: Mapping[str, StoredTensor], *, is_embedding: bool, kind: str) -> AdaptedModule:
    """Pair the factors of a module: two; the four of LoHa, or up to four of LoKr, as two."""
    if kind == "LOKR":
        up, down = (stored.get(role) or _product(path, stored, role) for role in ("first", "second"))
        return AdaptedModule(down, up, is_kronecker=True)
    stored_name = next(iter(stored.values())).name
    is_transposed = kind == MLX and _EXPERT.search(stored_name) is None
    up, down = _pair(path, stored, "up", "down", is_mlx=is_transposed)
    if kind == ADALORA:
        values = stored.get("values")
        if values is None or values.shape != (down.shape[0], 1):
            message = f"{shown(down.name)} has {down.shape[0]} rows, and no lora_E with a value for each"
            raise damaged_adapter(path, message)
        rows = Composed("scaled rows", (down, values), (down.shape[0], down.shape[1]))
        return AdaptedModule(rows, up, is_embedding=is_embedding)
    if not stored.keys() & {"down_2", "up_2"}:
        return AdaptedModule(down, up, stored.get("bias"), stored.get("magnitude"), is_embedding)
    up_2, down_2 = _pair(path, stored, "up_2", "down_2")
    if (up.shape[0], down.shape[1]) != (up_2.shape[0], down_2.shape[1]):
        raise damaged_adapter(path, f"the two products of {shown(up.name)} differ in shape")
    rank = up.shape[1] * up_2.shape[1]
    return AdaptedModule(
        Composed("pairs of rows", (down, down_2), (rank, down.shape[1])),
        Composed("pairs of columns", (up, up_2), (up.shape[0], rank)),
    )


def _pair(
    path: Location, stored: Mapping[str, StoredTensor], left: str, right: str, *, is_mlx: bool = False
) -> tuple[Factor, Factor]:
    """Return two stored matrices that have a product; MLX stores both transposed."""
    if not stored.keys() >= {left, right}:
        stored_name = next(iter(stored.values())).name
        raise damaged_adapter(path, f"{shown(stored_name)} has no counterpart, A or B")
    first, second = (
        Composed("transposed", (stored[role],), (stored[role].shape[1], stored[role].shape[0]))
        if is_mlx
        else stored[role]
        for role in (left, right)
    )
    if second.shape[0] != first.shape[1]:
        shapes = f"{list(second.shape)} and {list(first.shape)}"
        raise damaged_adapter(path, f"{shown(second.name)} and {shown(first.name)} have {shapes}: no product")
    return first, second


def _product(path: Location, stored: Mapping[str, StoredTensor], role: str) -> Composed:
    left, right = _pair(path, stored, f"{role}_a", f"{role}_b")
    return Composed("product", (left, right), (left.shape[0], right.shape[1]))
