"""LoRA and LoHa adapters of PEFT, those of MLX, and Kohya's: their configuration, and their deltas against a base."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from blake3 import blake3

from mergepipe.checkpoints.adapted_tensors import (
    Adapted,
    Factor,
    LowRankDelta,
    PairProducts,
    SavedTensor,
    StackedDelta,
    Transposed,
)
from mergepipe.checkpoints.contract import (
    AdapterAccount,
    Checkpoint,
    CheckpointKind,
    LeveledTensor,
    Readable,
    TensorEntry,
)
from mergepipe.checkpoints.directory import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAMES,
    SAFETENSORS_SUFFIXES,
    list_names,
    parse_config,
    read_weight_file,
    stat_present,
)
from mergepipe.checkpoints.embedding_rows import embedding_ending, is_head
from mergepipe.checkpoints.gathered_rows import with_rows
from mergepipe.checkpoints.open_files import decoded
from mergepipe.checkpoints.stacked_experts import Piece, fused_name, pieces_of
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError, did_you_mean
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.file_version import FileId
from mergepipe.storage.limits import ADAPTER_CONFIG_BYTES, CONFIG_BYTES
from mergepipe.storage.location import Location

# --- the configuration of a PEFT adapter: what it scales its products by, or by name why it is no plain LoRA ---


T = TypeVar("T")

BASE_LAYER = ".base_layer"
MERGE_HINT = "merge it into its base with peft first, and use the result as an expert"
_MAX_PATTERN = 256
_MAX_NAME = 512
_MOST_LAYERS = 100_000
# Literals, classes, groups, repeats of one character: no look-around, no repeated group.
_PATTERN = re.compile(r"(?:[\w.^$|\-]|\\[.dw\-]|\[[\w\-]+\]|\(|\)(?![*+?{])|[*+](?![*+?]))+", re.ASCII)
_MAX_REPEATS = 2
# Configured for training only, or already in the stored tensors: without effect on what is merged.
_HARMLESS = frozenset({
    "alpha", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "init_weights",
    "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias",
    "lora_dropout", "megatron_core", "module_dropout", "modules_to_save", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_dropout", "rank_pattern", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type", "trainable_token_indices", "use_dora", "use_effective_conv2d", "use_rslora",
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
_ALPHAS = {"LORA": "lora_alpha", "LOHA": "alpha"}  # by kind, the option that holds alpha
# Ways to begin training that leave the base weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take
# something away from them, and the stored adapter does not say what.
_STARTS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA. `ranks` and `alphas` map patterns of module names, tried in order, to what differs there.

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
    is_loha: bool = False
    is_mlx: bool = False  # factors are stored transposed, under names of their own
    is_kohya: bool = False  # module names are flattened, ranks and alphas are those of the tensors
    base: str = ""  # the model that it was trained on, as the configuration names it
    layers: tuple[tuple[int, int], ...] = ()  # layer_replication: the ranges of layers that the model was made of

    def rank_of(self, module: str) -> int:
        """The rank of one module's factors; LoHa multiplies two products of the configured one."""
        rank = self._value(self.ranks, module, self.rank)
        return rank**2 if self.is_loha else rank

    def _value(self, stated: Mapping[str, T], module: str, default: T) -> T:
        return stated[module] if self.is_kohya else _pattern_value(stated, module, default)

    def parameters_of(self, module: str) -> list[str]:
        """List the bare parameters that factors under the name of a module may be of, as the base names them."""
        stem = module.replace(BASE_LAYER, "")
        ends = [text.rpartition(".") for text in self.parameters]
        return list(dict.fromkeys(f"{stem}.{leaf}" for end, _, leaf in ends if f".{stem}".endswith(f".{end}")))

    def scale_of(self, module: str) -> float:
        """Return the factor of one module's product: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        rank = self._value(self.ranks, module, self.rank)
        return self._value(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter_config(store: Store, path: Location) -> AdapterConfig:
    """Read `adapter_config.json`."""
    config = parse_object(store.read_small(path, ADAPTER_CONFIG_BYTES), where=path, code="adapter.damaged")
    if "peft_type" not in config and "lora_parameters" in config:
        return _mlx_config(config, path)
    alpha = _check_kind(config, path)
    rank = _rank(config.get("r", 8), "r", path)
    ranks = {key: _rank(value, key, path) for key, value in _patterns(config, "rank_pattern", path)}
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
        config["peft_type"] == "LOHA",
        base=str(config.get("base_model_name_or_path") or ""),
        layers=_layers(config.get("layer_replication") or [], path),
    )


def _mlx_config(config: Mapping[str, JsonValue], path: Location) -> AdapterConfig:
    """Read the configuration that mlx-lm writes: one rank and one scale; releases of 2024 also have an alpha."""
    kind, stated = config.get("fine_tune_type", "lora"), config["lora_parameters"]
    if kind not in ("lora", "dora") or not isinstance(stated, dict):
        message = f"fine_tune_type is {shown(kind)}, only 'lora' and 'dora' are read, with lora_parameters"
        raise UnsupportedError.of("adapter.unsupported", path, message)
    rank, scale = _rank(stated.get("rank", 8), "rank", path), _alpha(stated.get("scale", 20.0), "scale", path)
    alpha = _alpha(stated["alpha"], "alpha", path) if "alpha" in stated else rank
    return AdapterConfig(
        rank,
        scale * alpha,
        {},
        {},
        False,
        False,
        is_dora=kind == "dora",
        is_mlx=True,
        base=str(config.get("model") or ""),
    )


def _check_kind(config: Mapping[str, JsonValue], path: Location) -> str:
    """Refuse what is not read; return the option that holds alpha."""
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in _ALPHAS:
        message = f"the adapter is {shown(kind)}, only {' and '.join(map(repr, _ALPHAS))} are read"
        raise UnsupportedError.of("adapter.unsupported", path, message, MERGE_HINT)
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
    return _ALPHAS[kind]


def _texts(value: JsonValue, key: str, path: Location) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CorruptError.of("adapter.damaged", path, f"'{key}' must be a list of names, found {shown(value)}")
    return [str(text) for text in value]


def _layers(value: JsonValue, path: Location) -> tuple[tuple[int, int], ...]:
    ranges = value if isinstance(value, list) else [value]
    pairs = [(pair[0], pair[1]) for pair in ranges if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) != len(ranges) or not all(type(n) is int and 0 <= n <= _MOST_LAYERS for pair in pairs for n in pair):
        message = f"'layer_replication' must be a list of ranges of layers, found {shown(value)}"
        raise CorruptError.of("adapter.damaged", path, message)
    return tuple((int(start), int(stop)) for start, stop in pairs if isinstance(start, int) and isinstance(stop, int))


def _tokens(value: JsonValue, path: Location) -> Mapping[str, tuple[int, ...]]:
    """Read the trained tokens: a list for the embedding, or lists by module."""
    lists = value if isinstance(value, dict) else {"": value}
    tokens: dict[str, tuple[int, ...]] = {}
    for module, indices in lists.items():
        if not isinstance(indices, list) or not all(type(index) is int and index >= 0 for index in indices):
            message = f"'trainable_token_indices' must be lists of rows, found {shown(indices)}"
            raise CorruptError.of("adapter.damaged", path, message)
        tokens[module] = tuple(index for index in indices if type(index) is int)
    return MappingProxyType(tokens)


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


def base_names(
    wanted: Sequence[str], base: Collection[str], where: object, optional: Collection[str] = ()
) -> dict[str, str]:
    """Map each wanted name to the base's: the same name, or by one prefix change common to all others.

    Names of `optional` that have no counterpart are left out.
    """
    renamed = {name: name for name in wanted if name in base}
    changed_names = [name for name in wanted if name not in base]
    needed = [name for name in changed_names if name not in optional]
    if not changed_names:
        return renamed
    prefix = _common_prefix(needed or changed_names, base, where)
    for name in changed_names:
        other = prefix.applied(name) if prefix else None
        if other is not None and other in base:
            renamed[name] = other
        elif name not in optional:
            candidates = [base_name for base_name in base if base_name.rpartition(".")[2] == name.rpartition(".")[2]]
            raise MismatchError.of(
                "adapter.mismatch", where, f"{shown(name)} has no counterpart in the base",
                did_you_mean(name, candidates[:_MOST_CANDIDATES]),
            )  # fmt: skip
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


# --- read what an adapter stores, module by module ---


PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
"""Parts of names that training frameworks leave, where weights were saved without PEFT."""
_NAMED = re.compile(r"\.default(?=\.weight$|\.bias$|$)")
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|hada_w[12]_[ab]|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
_MLX_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_KOHYA_PART = re.compile(r"(?P<module>[^.]+)\.(?P<part>lora_down\.weight|lora_up\.weight|alpha)")
_ROLES = {
    "lora_down.weight": "down", "lora_up.weight": "up",
    "lora_a": "down", "lora_b": "up", "m": "magnitude",
    "lora_A.weight": "down", "lora_embedding_A": "down", "lora_B.weight": "up", "lora_embedding_B": "up",
    "hada_w1_b": "down", "hada_w1_a": "up", "hada_w2_b": "down_2", "hada_w2_a": "up_2",
    "lora_B.bias": "bias", "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
_VARIANT = re.compile(r"lora_[A-Za-z_]+|prompt_embeddings|ia3_l|hada_t|lokr_|vera_lambda")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """The stored tensors of one module: `down` is (R, N), `up` (M, R); of fused experts (E * R, N) and (M, R * E)."""

    down: Factor
    up: Factor
    bias: TensorEntry | None = None
    magnitude: TensorEntry | None = None
    is_embedding: bool = False
    kernel: tuple[int, ...] = ()  # of a convolution: the shape of a row of `down` as it is stored


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as it is stored: factors by module, full tensors by name, rows of trained tokens by module.

    `copies` are weights of the base, stored beside the factors of embeddings and to be taken in their place.
    """

    path: Location
    config: AdapterConfig
    modules: Mapping[str, AdaptedModule]
    full: Mapping[str, TensorEntry]
    copies: Mapping[str, TensorEntry]
    tokens: Mapping[str, TensorEntry]
    files: tuple[FileId, ...]

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """The modules that are stored in full."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.full))


def read_adapter(store: Store, path: Location) -> StoredAdapter:
    """Read the headers and the configuration of the adapter in the directory `path`; no tensor byte.

    A file is one in the names of Kohya's scripts, which keeps its configuration in scalars beside the factors.
    """
    if not is_folder(store, path) and path.suffix in SAFETENSORS_SUFFIXES and path.name not in ADAPTER_NAMES:
        return _read_kohya(store, path)
    config, fingerprint = _read_config(store, path)
    name = next((candidate for candidate in ADAPTER_NAMES if candidate in list_names(store, path)), None)
    if name is None:
        raise NotFoundError.of("checkpoint.incomplete", path, f"holds neither {' nor '.join(ADAPTER_NAMES)}")
    file = read_weight_file(store, path, name, stat_present(store, path, name))
    return _sorted_out(path, config, file.entries, (file.fingerprint, fingerprint))


def _read_kohya(store: Store, path: Location) -> StoredAdapter:
    file = read_weight_file(store, path.parent, path.name, stat_present(store, path.parent, path.name))
    parts: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    kernels: dict[str, tuple[int, ...]] = {}
    for entry in file.entries:
        match = _KOHYA_PART.fullmatch(entry.name)
        if match is None:
            message = f"{shown(entry.name)} is no factor of a LoRA in Kohya's names (lora_down, lora_up, alpha)"
            hint = "give the folder of an adapter of PEFT or MLX, or the file of a plain LoRA"
            raise UnsupportedError.of("adapter.unsupported", path, message, hint)
        if match["part"] == "alpha":
            parts[match["module"]]["alpha"] = entry
            continue
        if match["part"].startswith("lora_down"):
            kernels[match["module"]] = entry.shape[1:]
        flat = replace(entry, shape=(entry.shape[0], math.prod(entry.shape[1:]))) if _is_kernel(entry) else entry
        _check_part(path, flat, match["part"])
        parts[match["module"]][_ROLES[match["part"]]] = flat
    alphas = {module: _kohya_alpha(store, path, stored) for module, stored in parts.items()}
    modules = {
        module: replace(_paired(path, stored, is_embedding=False, is_mlx=False), kernel=kernels[module])
        for module, stored in parts.items()
    }
    ranks = {module: adapted.down.shape[0] for module, adapted in modules.items()}
    config = AdapterConfig(1, 1.0, ranks, alphas, False, False, is_kohya=True)
    return StoredAdapter(path, config, modules, {}, {}, {}, (file.fingerprint,))


def _is_kernel(entry: TensorEntry) -> bool:
    """Whether a factor is that of a convolution: `down` with a kernel, `up` with one of 1 x 1."""
    return len(entry.shape) == 4 and (entry.name.endswith("lora_down.weight") or entry.shape[2:] == (1, 1))


def _kohya_alpha(store: Store, path: Location, stored: Mapping[str, TensorEntry]) -> float:
    """Read the scalar of one module; its rank where there is none, as the scripts that read these files take it."""
    entry = stored.get("alpha")
    if entry is None:
        return float(stored["down"].shape[0]) if "down" in stored else 1.0
    if entry.n_elements != 1 or entry.dtype.kind is not DTypeKind.FLOAT:
        message = f"{shown(entry.name)} is {entry.dtype.name} {list(entry.shape)}, and must be one number"
        raise CorruptError.of("adapter.damaged", path, message)
    raw = np.frombuffer(store.read_metadata(path, entry.offset, entry.nbytes), np.uint8)
    value = float(decoded(raw, entry.dtype.kernel_code)[0])
    if not math.isfinite(value):
        raise CorruptError.of("tensor.not-finite", path, f"{shown(entry.name)} is {value}")
    return value


def _read_config(store: Store, path: Location) -> tuple[AdapterConfig, FileId]:
    if ADAPTER_CONFIG_NAME not in list_names(store, path):
        raise NotFoundError.of("checkpoint.incomplete", path, f"is no adapter: it holds no {ADAPTER_CONFIG_NAME}")
    status = stat_present(store, path, ADAPTER_CONFIG_NAME)
    config = read_adapter_config(store, path / ADAPTER_CONFIG_NAME)
    raw = store.read_small(path / ADAPTER_CONFIG_NAME, ADAPTER_CONFIG_BYTES)
    digest = blake3(raw).hexdigest(length=16)
    return config, FileId(ADAPTER_CONFIG_NAME, status.size_bytes, status.version, digest)


def _sorted_out(
    path: Location, config: AdapterConfig, entries: Sequence[TensorEntry], files: tuple[FileId, ...]
) -> StoredAdapter:
    """Sort entries into the parts of modules, and tensors stored in full."""
    parts: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    full: dict[str, TensorEntry] = {}
    copies: dict[str, TensorEntry] = {}
    tokens: dict[str, TensorEntry] = {}
    embeddings = set()
    for entry in entries:
        name = _NAMED.sub("", _WRAPPERS.sub("", entry.name)).removeprefix(PREFIX)
        if ".original_module." in name:  # what PEFT keeps of the base beside a module that it saves in full
            continue
        name = name.replace(".modules_to_save.", ".")
        match = (_MLX_PART if config.is_mlx else _PART).fullmatch(name)
        if match is None and (variant := _VARIANT.search(name)) is not None:
            message = f"{shown(entry.name)}: '{variant[0]}' is not read"
            raise UnsupportedError.of("adapter.unsupported", path, message, MERGE_HINT)
        if match is None:
            is_copy = name.endswith(f"{BASE_LAYER}.weight")
            (copies if is_copy else full)[name.replace(f"{BASE_LAYER}.", ".")] = entry
            continue
        _check_part(path, entry, match["part"])
        if match["part"].startswith("token_adapter"):
            tokens[match["module"]] = entry
        else:
            parts[match["module"]][_ROLES[match["part"]]] = entry
            is_embedding = embedding_ending(f"{match['module']}.weight") and not is_head(f"{match['module']}.weight")
            if is_embedding if config.is_mlx else "embedding" in match["part"]:
                embeddings.add(match["module"])
    modules = {
        module: _paired(path, stored, is_embedding=module in embeddings, is_mlx=config.is_mlx)
        for module, stored in parts.items()
    }
    stray = [name for name in copies if name.removesuffix(".weight") not in modules]
    full |= {name: copies.pop(name) for name in stray}
    return StoredAdapter(path, config, modules, full, copies, tokens, files)


def _check_part(path: Location, entry: TensorEntry, part: str) -> None:
    is_vector = _ROLES.get(part) in ("magnitude", "bias")
    if len(entry.shape) != (1 if is_vector else 2):
        message = f"{shown(entry.name)} has shape {list(entry.shape)}: only factors with two dimensions are read"
        raise UnsupportedError.of("adapter.unsupported", path, message, MERGE_HINT)
    if entry.dtype.kind is not DTypeKind.FLOAT:
        raise UnsupportedError.of("adapter.unsupported", path, f"{shown(entry.name)} is {entry.dtype.name}")


def _paired(path: Location, stored: Mapping[str, TensorEntry], *, is_embedding: bool, is_mlx: bool) -> AdaptedModule:
    """Pair the factors of a module: two, or the four of LoHa, as two."""
    pairs = [(f"down{index}", f"up{index}") for index in (("", "_2") if stored.keys() & {"down_2", "up_2"} else ("",))]
    for pair in pairs:
        if not stored.keys() >= {*pair}:
            stored_name = next(iter(stored.values())).name
            raise CorruptError.of("adapter.damaged", path, f"{shown(stored_name)} has no counterpart, A or B")
        down, up = (Transposed(stored[role]) if is_mlx else stored[role] for role in pair)
        if down.shape[0] != up.shape[1]:
            shapes = f"{list(down.shape)} and {list(up.shape)}"
            message = f"{shown(down.name)} and {shown(up.name)} have {shapes}: no product"
            raise CorruptError.of("adapter.damaged", path, message)
    if len(pairs) == 1:
        return AdaptedModule(down, up, stored.get("bias"), stored.get("magnitude"), is_embedding)
    down, down_2, up, up_2 = (stored[role] for role in ("down", "down_2", "up", "up_2"))
    if (up.shape[0], down.shape[1]) != (up_2.shape[0], down_2.shape[1]):
        raise CorruptError.of("adapter.damaged", path, f"the two products of {shown(up.name)} differ in shape")
    return AdaptedModule(PairProducts(down, down_2, by_rows=True), PairProducts(up, up_2, by_rows=False))


# --- open a PEFT LoRA adapter as a checkpoint of deltas against a base ---


def open_adapter(store: Store, path: Location, base: Checkpoint, allow_unapplied: Sequence[str] = ()) -> Checkpoint:
    """Open the adapter in the directory `path`; its tensors are named like the `base` tensors they change.

    Deltas are computed when they are fetched. Weights that the adapter stores in full (`modules_to_save`, biases) are
    stored tensors. What it does not touch is absent. What the base lacks is an error, unless a pattern of
    `allow_unapplied` has it. No tensor byte is read.
    """
    adapter = read_adapter(store, path)
    if adapter.config.is_kohya:
        message = "its names are Kohya's, which do not say which tensors of the base it changes"
        raise UnsupportedError.of("adapter.unsupported", path, message, "merge such adapters by `mergepipe lora merge`")
    opener = _Opener(adapter, base, allow_unapplied)
    tensors = opener.tensors()
    lost = {name.rpartition(".")[0] for name in opener.left_over}
    adapted = {*adapter.modules, *adapter.tokens}
    n_saved = len([module for module in adapter.saved_modules if module not in adapted | lost])
    account = AdapterAccount(len(adapted), len(adapted - lost), n_saved, tuple(opener.left_over), adapter.config.base)
    return Checkpoint(
        path, path, MappingProxyType(tensors), adapter.files, (), CheckpointKind.ADAPTER, adapters=(account,)
    )


def with_own_head(store: Store, weights: Checkpoint, adapter: Location) -> Checkpoint:
    """Give `weights` an output head of its own, equal to the embedding, where `adapter` changes only one of the two.

    In training one of them stayed as it was, though the model stores one tensor for both. Trained tokens change both.
    """
    stored = read_adapter(store, adapter)
    changed = [*(f"{module}.weight" for module in stored.modules), *stored.full]
    heads = [name for name in changed if is_head(name)]
    embeddings = [name for name in weights.tensors if embedding_ending(name) and not is_head(name)]
    if any(map(is_head, weights.tensors)) or len(embeddings) != 1:
        return weights
    is_embedding_alone = any(embedding_ending(name) for name in changed) and not heads
    if not heads and (not is_embedding_alone or stored.config.keeps_tied or not _is_tied(store, weights)):
        return weights
    embedding = weights.tensors[embeddings[0]]
    is_resized = any(
        embedding_ending(name) and stored.full[name].shape[0] != embedding.shape[0] for name in stored.full
    )
    if not isinstance(embedding, TensorEntry) or (is_resized and not heads):
        return weights
    head = heads[0] if heads else "lm_head.weight"
    tensors = {**weights.tensors, head: replace(embedding, name=head)}
    return replace(weights, tensors=MappingProxyType(tensors), is_untied=True)


def _is_tied(store: Store, weights: Checkpoint) -> bool:
    """Whether a model without an output head of its own has one, which is its embedding."""
    if CONFIG_NAME not in weights.sidecars:
        return False
    config = parse_config(store.read_small(weights.root / CONFIG_NAME, CONFIG_BYTES), weights.root / CONFIG_NAME)
    names = config.get("architectures")
    has_head = isinstance(names, list) and any(str(name).endswith(_WITH_HEAD) for name in names)
    return has_head and config.get("tie_word_embeddings", True) is not False


def apply_adapter(weights: Checkpoint, adapter: Checkpoint) -> Checkpoint:
    """Apply `adapter`, opened against `weights`: a checkpoint of full tensors, unchanged ones as stored."""
    tensors = {
        name: _applied(weights.path, tensor, adapter.tensors.get(name)) for name, tensor in weights.tensors.items()
    }
    absolute = (replace(file, name=str((adapter.root / file.name).absolute())) for file in adapter.files)
    files = (*weights.files, *absolute)
    accounts = (*weights.adapters, *adapter.adapters)
    resized = [name for name, tensor in tensors.items() if tensor.shape != weights.tensors[name].shape]
    rows = {name: tensors[name].shape[0] for name in tensors if embedding_ending(name)} if resized else {}
    if len({*rows.values()}) > 1:
        told = ", ".join(f"{shown(name)} has {n_rows}" for name, n_rows in rows.items())
        message = f"it stores {shown(resized[0])} with another number of rows than the base: {told}"
        raise MismatchError.of("adapter.mismatch", adapter.path, message, "save embedding and head with the adapter")
    return replace(
        weights, tensors=MappingProxyType(tensors), files=files, content_id=None, adapters=accounts,
        resized_by=adapter.path if resized else weights.resized_by,
    )  # fmt: skip


def _applied(path: Location, weights: Readable, change: Readable | None) -> Readable:
    if isinstance(change, SavedTensor):
        return replace(change, model_dtype=weights.stored_dtype)
    if change is None or (not change.is_delta and change.stored_dtype == weights.stored_dtype):
        return weights if change is None else change
    if not isinstance(change, LowRankDelta | StackedDelta):  # stored in full in another dtype than the model
        return replace(with_rows(change, change, ()), model_dtype=weights.stored_dtype)
    if not _takes_deltas(weights):
        raise UnsupportedError.of(
            "adapter.unsupported", path, f"{shown(weights.name)} is packed, so no adapter applies to it",
            "unpack it, and apply the adapter to that",
        )  # fmt: skip
    return Adapted(weights, change)


def _takes_deltas(weights: Readable) -> bool:
    """Whether a delta can be added to a tensor: it has weights, which no other bytes are needed for."""
    return not weights.is_delta and not isinstance(weights, LeveledTensor)


class _Opener:
    """Turns the stored tensors of one adapter into tensors of its base; `left_over` is what the base lacks."""

    def __init__(self, adapter: StoredAdapter, base: Checkpoint, allow_unapplied: Sequence[str]) -> None:
        self._adapter = adapter
        self._path = adapter.path
        self._config = adapter.config
        self._base = base
        self._allow = allow_unapplied
        self._experts = _BaseExperts(base)
        self.left_over: list[str] = []

    def tensors(self) -> dict[str, Readable]:
        """Return the tensors by the base's names, in storage order."""
        adapter = self._adapter
        plain, expert_targets = self._targets()
        wanted = [*plain, *(f"{module}.bias" for module, parts in adapter.modules.items() if parts.bias)]
        wanted += [*adapter.full, *(f"{module}.weight" for module in adapter.tokens)]
        wanted = list(dict.fromkeys(wanted))
        self._check_layers()
        self._check_heads([*plain, *(f"{module}.weight" for module in adapter.tokens)])
        optional = [name for name in wanted if self._is_allowed(name)]
        names = base_names(wanted, self._base.tensors, self._path, optional)
        self.left_over += [name for name in wanted if name not in names]
        for name, entry in adapter.full.items():
            needed = self._base.tensors[names[name]].shape if name in names else entry.shape
            is_resized = embedding_ending(name) and entry.shape[1:] == needed[1:]
            if entry.shape != needed and not is_resized:
                message = f"it stores {shown(name)} of shape {list(entry.shape)}, the base has {list(needed)}"
                raise MismatchError.of("adapter.mismatch", self._path, message, "is it an adapter of this base?")
        tensors: dict[str, Readable] = {
            names[name]: replace(entry, name=names[name]) for name, entry in adapter.full.items() if name in names
        }
        fitting = {names[name]: adapter.modules[module] for name, module in plain.items() if name in names}
        is_stack = {name: len(self._base.tensors[name].shape) == 3 for name in fitting}
        is_transposed = self._orientation({name: parts for name, parts in fitting.items() if not is_stack[name]})
        is_transposed |= self._orientation({name: parts for name, parts in fitting.items() if is_stack[name]})
        for name, module in plain.items():
            if name in names:
                self._add_module(tensors, names[name], module, transposed=is_transposed[names[name]])
                bias = adapter.modules[module].bias
                if bias is not None and f"{module}.bias" in names:
                    self._add_bias(tensors, names[f"{module}.bias"], module, bias)
        self._add_experts(tensors, expert_targets)
        for module, rows in adapter.tokens.items():
            if f"{module}.weight" in names:
                self._add_tokens(tensors, names[f"{module}.weight"], module, rows)
        return {
            name: SavedTensor(name, tensor) if isinstance(tensor, TensorEntry) else tensor
            for name, tensor in tensors.items()
        }

    def _is_allowed(self, name: str) -> bool:
        module = name.rpartition(".")[0]
        return any(fnmatchcase(candidate, glob) for glob in self._allow for candidate in (name, module))

    # --- pair modules with tensors of the base ---

    def _targets(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the modules of each target: weights by name, and matrices of experts that the base lays out otherwise.

        Adapters of a parameter that is no module's weight are named by its module; shapes tell which one is meant.
        """
        plain: dict[str, str] = {}
        experts: dict[str, str] = {}
        for module, parts in self._adapter.modules.items():
            name = f"{module}.weight"
            parameters = self._config.parameters_of(module)
            if parameters and name.replace(BASE_LAYER, "") not in self._base.tensors:
                name = self._parameter(parameters, parts)
            is_elsewhere = name not in self._base.tensors and self._experts.has(name)
            (experts if is_elsewhere else plain)[name] = module
        return plain, experts

    def _parameter(self, names: Sequence[str], parts: AdaptedModule) -> str:
        """Return which of the parameters of a module the factors of bare parameters change."""
        stem = names[0].rpartition(".")[0]
        shapes = {
            name: shape
            for name in names
            for key, shape in [
                *((k, t.shape) for k, t in self._base.tensors.items()),
                *self._experts.fused_shapes(name),
            ]
            if key == name or key.endswith(f".{name}")
        }
        fitting = [name for name, shape in shapes.items() if self._fits(shape, parts, self._config.rank_of(name))]
        if len(fitting) > 1:
            message = f"the factors of {shown(stem)} fit {' and '.join(map(shown, fitting))}"
            raise UnsupportedError.of("adapter.unsupported", self._path, message, MERGE_HINT)
        if not fitting and shapes:
            made = [parts.up.shape[0], parts.down.shape[1]]
            needed = " or ".join(f"{list(shape)} ({name})" for name, shape in shapes.items())
            message = f"the factors of {shown(stem)} make {made} for each expert, the base has {needed}"
            raise MismatchError.of("adapter.mismatch", self._path, message)
        return fitting[0] if fitting else names[0]

    @staticmethod
    def _fits(shape: tuple[int, ...], parts: AdaptedModule, rank: int) -> bool:
        made = _Opener._made(parts)
        n_experts = shape[0] if len(shape) == 3 else 1
        return parts.down.shape[0] == rank * n_experts and shape[-2:] in (made, made[::-1])

    def _check_layers(self) -> None:
        """Refuse a base that does not have the repeated layers that the adapter was trained on."""
        ranges = self._config.layers
        last = sum(stop - start for start, stop in ranges) - 1
        if ranges and not any(f".{last}." in name for name in self._base.tensors):
            slices = ", ".join(f"[{start}, {stop}]" for start, stop in ranges)
            raise MismatchError.of(
                "adapter.mismatch", self._path,
                f"it was trained on repeated layers (layer_replication), and the base has no layer {last}",
                f"merge the base with slices of layer_range {slices} by passthrough, and apply the adapter to that",
            )  # fmt: skip

    def _check_heads(self, changed: Sequence[str]) -> None:
        """Refuse an output head where the base has none because its weights are tied."""
        heads = [name for name in (*changed, *self._adapter.full) if is_head(name)]
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

    def _orientation(self, modules: Mapping[str, AdaptedModule]) -> dict[str, bool]:
        """Decide whether each product is transposed in the base: by its shape, else by the others', else by the option.

        Frameworks store some layers (Conv1D of GPT-2) transposed, and one option for all modules cannot say which.
        PEFT before 0.19 took the first dimension of stacked experts for their inputs, later the last: shapes tell.
        """
        choices = {name: self._choices(name, parts) for name, parts in modules.items()}
        told = {fits[0] for name, fits in choices.items() if len(fits) == 1 and not modules[name].is_embedding}
        usual = next(iter(told)) if len(told) == 1 else self._config.is_transposed
        for name, fits in choices.items():
            if len(fits) == 2 and len(told) == 2:
                raise UnsupportedError.of(
                    "adapter.unsupported", self._path,
                    f"{shown(name)} is square, and other tensors are stored both ways: it cannot be told which it is",
                    MERGE_HINT,
                )  # fmt: skip
        return {name: fits[0] if len(fits) == 1 else usual for name, fits in choices.items()}

    def _choices(self, name: str, parts: AdaptedModule) -> tuple[bool, ...]:
        """Return the orientations in which a product fits its base tensor; an embedding has only one."""
        shape = (parts.up.shape[0], parts.down.shape[1])
        needed = self._base.tensors[name].shape
        allowed = (True,) if parts.is_embedding else (False, True)
        fits = tuple(flipped for flipped in allowed if (shape[::-1] if flipped else shape) == needed[-2:])
        if not fits:
            raise MismatchError.of(
                "adapter.mismatch", self._path,
                f"the factors of {shown(name)} make {list(shape)}, the base has {list(needed)}",
            )  # fmt: skip
        return fits

    # --- compute what changes ---

    def _check_rank(self, module: str, parts: AdaptedModule, n_experts: int) -> None:
        rank = self._config.rank_of(module)
        if parts.down.shape[0] != rank * n_experts:
            of_experts = f" for each of {n_experts} experts" if n_experts > 1 else ""
            raise CorruptError.of(
                "adapter.damaged", self._path,
                f"{shown(module)} has factors {list(parts.up.shape)} and {list(parts.down.shape)}, the configured rank "
                f"is {rank}{of_experts}",
            )  # fmt: skip

    def _check_magnitude(self, module: str, parts: AdaptedModule) -> None:
        if parts.magnitude is None and self._config.is_dora:
            message = f"it is DoRA, and {shown(module)} has no lora_magnitude_vector"
        elif parts.magnitude is not None and parts.magnitude.n_elements != parts.up.shape[0]:
            message = f"{shown(module)} has {parts.magnitude.n_elements} magnitudes for {parts.up.shape[0]} rows"
        else:
            return
        raise CorruptError.of("adapter.damaged", self._path, message)

    def _add_module(self, tensors: dict[str, Readable], name: str, module: str, *, transposed: bool) -> None:
        parts, shape = self._adapter.modules[module], self._base.tensors[name].shape
        module = name if len(shape) == 3 else module
        n_experts = shape[0] if len(shape) == 3 else 1
        self._check_rank(module, parts, n_experts)
        self._check_magnitude(module, parts)
        scale = self._config.scale_of(module)
        if len(shape) == 3:
            deltas = tuple(
                LowRankDelta(name, parts.up, parts.down, scale, transposed, n_experts, expert)
                for expert in range(n_experts)
            )
            tensors[name] = StackedDelta(name, shape, deltas)
            return
        delta = LowRankDelta(name, parts.up, parts.down, scale, transposed)
        copy = self._adapter.copies.get(f"{module}.weight")
        stored = tensors.get(name) or (copy and replace(copy, name=name))
        if parts.magnitude is not None and stored is None:
            stored = self._base.tensors[name]
        if stored is None:
            tensors[name] = delta
        elif _takes_deltas(stored):
            tensors[name] = Adapted(stored, delta, parts.magnitude)
        else:
            message = f"{shown(name)} is packed, so no DoRA applies to it"
            raise UnsupportedError.of("adapter.unsupported", self._path, message)

    def _add_bias(self, tensors: dict[str, Readable], name: str, module: str, bias: TensorEntry) -> None:
        up = replace(bias, shape=(*bias.shape, 1))
        delta = LowRankDelta(name, up, None, self._config.scale_of(module))
        stored = tensors.get(name)
        tensors[name] = Adapted(stored, delta) if isinstance(stored, TensorEntry) else delta

    def _add_tokens(self, tensors: dict[str, Readable], name: str, module: str, rows: TensorEntry) -> None:
        """Replace rows of an embedding by those that were trained."""
        config = self._config.tokens
        indices = next((config[end] for end in config if not end or f".{module}".endswith(f".{end}")), ())
        stored = tensors.get(name) or self._base.tensors[name]
        if len(indices) != rows.shape[0] or max(indices, default=-1) >= stored.shape[0] or stored.is_delta:
            message = f"{shown(rows.name)} has {rows.shape[0]} rows, for {len(indices)} tokens of {stored.shape[0]}"
            raise CorruptError.of("adapter.damaged", self._path, message)
        tensors[name] = with_rows(stored, SavedTensor(name, rows), indices)

    def _add_experts(self, tensors: dict[str, Readable], targets: Mapping[str, str]) -> None:
        """Add matrices of experts that the base stores in the other layout."""
        stacks: dict[str, list[LowRankDelta | None]] = {}
        needed = {name: self._matrix_shape(name) for name in targets}
        made = {name: self._made(self._adapter.modules[module]) for name, module in targets.items()}
        is_transposed = any(made[name] != needed[name] for name in targets)  # squares as the others
        for name, module in targets.items():
            parts, places = self._adapter.modules[module], self._experts.places(name)
            if needed[name] != (made[name][::-1] if is_transposed else made[name]):
                message = f"the factors of {shown(name)} make {list(made[name])}, the base has {list(needed[name])}"
                raise MismatchError.of("adapter.mismatch", self._path, message)
            n_experts = len({place.expert for place in places}) if fused_name(name) else 1
            configured = name if fused_name(name) else module
            self._check_rank(configured, parts, n_experts)
            for place in places:
                delta = LowRankDelta(
                    place.tensor, parts.up, parts.down, self._config.scale_of(configured), is_transposed, n_experts,
                    place.expert if n_experts > 1 else 0, (place.row, place.row + place.shape[0]),
                )  # fmt: skip
                if place.n_chunks == 1:
                    tensors[place.tensor] = delta
                else:
                    stacks.setdefault(place.tensor, [None] * place.n_chunks)[place.chunk] = delta
        for name, deltas in stacks.items():
            tensors[name] = StackedDelta(name, self._base.tensors[name].shape, tuple(deltas))

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the shape of the matrix of one expert that an adapter changes as one."""
        places = self._experts.places(name)
        n_rows = sum(place.shape[0] for place in places if place.expert == places[0].expert)
        return n_rows, places[0].shape[1]

    @staticmethod
    def _made(parts: AdaptedModule) -> tuple[int, int]:
        return parts.up.shape[0], parts.down.shape[1]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the base stores one matrix of an expert: chunk `chunk` of `n_chunks` equal ones of a tensor.

    `row` is its first row among those of the matrix that an adapter changes as one.
    """

    tensor: str
    chunk: int
    n_chunks: int
    shape: tuple[int, int]
    expert: int
    row: int = 0


class _BaseExperts:
    """The matrices of a base's experts, whichever way it stores them."""

    def __init__(self, base: Checkpoint) -> None:
        self._places: dict[Piece, _Place] = {}
        self._of_layer: dict[str, set[int]] = defaultdict(set)
        for name, tensor in base.tensors.items():
            pieces = pieces_of(name, tensor.shape)
            for chunk, piece in enumerate(pieces):
                if piece.role != "router":
                    n_rows = tensor.shape[-2] * (tensor.shape[0] if len(tensor.shape) == 3 else 1) // len(pieces)
                    shape = (n_rows, tensor.shape[-1])
                    self._places[piece] = _Place(name, chunk, len(pieces), shape, piece.expert)
                    self._of_layer[piece.layer].add(piece.expert)

    def has(self, name: str) -> bool:
        """Whether there are all matrices that a name of the other layout stands for."""
        return bool(self.places(name))

    def places(self, name: str) -> list[_Place]:
        """List the matrices of a name, expert by expert; none where one is missing."""
        fused = fused_name(name)
        if fused is None:
            pieces = list(pieces_of(name, ()))
        else:
            layer, roles = fused
            experts = sorted(self._of_layer.get(layer, ()))
            pieces = [Piece(layer, expert, role) for expert in experts for role in roles]
        if not all(piece in self._places for piece in pieces):
            return []
        placed, row = [], 0
        for index, piece in enumerate(pieces):
            place = self._places[piece]
            row = row if index and pieces[index - 1].expert == piece.expert else 0
            placed.append(replace(place, row=row))
            row += place.shape[0]
        return placed

    def fused_shapes(self, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return the name with the shape that it would have, were the experts fused."""
        places = self.places(name)
        if not places:
            return []
        experts = {place.expert for place in places}
        n_rows = sum(place.shape[0] for place in places) // len(experts)
        return [(name, (len(experts), n_rows, places[0].shape[1]))]
