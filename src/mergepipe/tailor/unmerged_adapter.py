"""Adapters of PEFT in training checkpoints: beside the weights that they change, or alone. Folded in, or kept apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mergepipe.checkpoints.adapters import apply_adapter, matched_adapter
from mergepipe.checkpoints.contract import Checkpoint, Readable
from mergepipe.checkpoints.directory import ADAPTER_CONFIG_NAME, without_wrappers
from mergepipe.checkpoints.embedding_rows import embedding_ending, is_head
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.checkpoints.stored_adapters import (
    BASE_LAYER,
    PREFIX,
    AdapterConfig,
    StoredAdapter,
    name_in_peft_file,
    parse_adapter_config,
    sorted_out,
)
from mergepipe.core.blocks import F32, DTypeKind
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.core.units import first_names, plural
from mergepipe.errors import NotFoundError, RecipeError, mismatched, unsupported
from mergepipe.storage.contract import ADAPTER_CONFIG_BYTES, Store, is_file, is_folder, map_at_once
from mergepipe.storage.location import Location
from mergepipe.tailor.assignment import state_to_copy
from mergepipe.tailor.checkpoint import FP32, WEIGHT, StoredState, TrainingCheckpoint
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.model_names import names_without_wrappers
from mergepipe.tailor.recipes import AverageRequest
from mergepipe.tailor.selection import model_units

_WRAPPED = ("base_layer", "original_module", "token_adapter")
"""Parts of names under which PEFT keeps the modules that it wraps."""
_VERL_SETTINGS_NAME = "lora_train_meta.json"
_VERL_FOLDER = "lora_adapter"
_ALONE_HINT = "export --adapter writes it; mergepipe lora apply adds it to the model that it was trained on"


@dataclass(frozen=True, slots=True)
class UnmergedAdapter:
    """An adapter in a training checkpoint, and the weights of its base that are there.

    `base` maps the names that tensors have in the model, `factors` those that they have in PEFT's files, to the names
    under which they are stored. `names` are the adapters', of which there must be one; empty where the stored names
    leave it out.
    """

    source: TrainingCheckpoint
    names: tuple[str, ...]
    base: Mapping[str, str]
    factors: Mapping[str, str]

    @property
    def has_base(self) -> bool:
        return any(_is_wrapped(stored) for stored in self.base.values())

    @property
    def text(self) -> str:
        """Say in words what the checkpoint holds."""
        held = "next to its base" if self.has_base else "without its base"
        if len(self.names) > 1:
            return f"several adapters of PEFT, {first_names(list(map(shown, self.names)))}, {held}"
        adapter = "an adapter of PEFT"
        for name in filter(None, self.names):
            adapter += f" {shown(name)}"
        return f"{adapter}, {plural(len(self.factors), 'tensor')}, {held}"


def find_adapter(source: TrainingCheckpoint) -> UnmergedAdapter | None:
    """Find the adapter that a checkpoint holds, by the names of its tensors; None where there is none."""
    base: dict[str, str] = {}
    factors: dict[str, str] = {}
    adapters: list[str] = []
    for name, stored in _names_in_model([*source.weight_shapes]).items():
        in_file = name_in_peft_file(name)
        if in_file is None:
            parts = [part for part in name.split(".") if part not in _WRAPPED]
            base.setdefault(".".join(parts), stored)
            continue
        adapter, rest = in_file
        adapters.append(adapter)
        factors[PREFIX + rest.replace(".modules_to_save.", ".")] = stored
    if not factors:
        return None
    return UnmergedAdapter(source, tuple(dict.fromkeys(adapters)), base, factors)


def _names_in_model(stored: list[str]) -> dict[str, str]:
    """Map the names that tensors have in the model that PEFT has wrapped to the stored ones."""
    inner = {}
    for name in stored:
        inner[without_wrappers(name).rpartition(PREFIX)[2]] = name
    if len(inner) < len(stored):
        inner = dict(zip(stored, stored, strict=True))
    names = {}
    for name, wrapped in names_without_wrappers([*inner]).items():
        names[name] = inner[wrapped]
    return names


def _is_wrapped(stored: str) -> bool:
    return any(part in _WRAPPED for part in stored.split("."))


def read_settings(store: Store, adapter: UnmergedAdapter, request: AverageRequest) -> tuple[bytes, str]:
    """Return the content of an `adapter_config.json` of the adapter, and where it comes from.

    That is the request's, else a file inside the checkpoint or next to it.

    Raises:
        RecipeError: two sources in the request.
        UnsupportedError: `checkpoint.unsupported`: there is none, or there are several adapters.
    """
    if len(adapter.names) > 1:
        hint = "load it with peft, and save the right adapter"
        raise unsupported(adapter.source.path, f"holds {adapter.text}", hint)
    if request.adapter_config is not None and request.lora_alpha is not None:
        message = "the configuration states it"
        raise RecipeError.of("option.conflict", "--lora-alpha", message, "leave out --lora-alpha or --adapter-config")
    if request.lora_alpha is not None:
        return _settings_of_alpha(adapter, request.lora_alpha), "--lora-alpha"
    if request.adapter_config is not None:
        path = request.adapter_config
        if is_folder(store, path):
            path = path / ADAPTER_CONFIG_NAME
        if not is_file(store, path):
            raise NotFoundError.of("model.not-found", path, "there is no such file", "give an adapter_config.json")
        return store.read_small(path, ADAPTER_CONFIG_BYTES), path.name
    source = adapter.source
    folders = [source.path, source.path / _VERL_FOLDER, source.root, source.lender, source.path.parent]
    for folder in filter(None, folders):
        if is_file(store, folder / ADAPTER_CONFIG_NAME):
            return store.read_small(folder / ADAPTER_CONFIG_NAME, ADAPTER_CONFIG_BYTES), ADAPTER_CONFIG_NAME
    of_verl = source.path / _VERL_SETTINGS_NAME
    if is_file(store, of_verl):
        alpha = _parsed(store.read_small(of_verl, ADAPTER_CONFIG_BYTES), of_verl).get("lora_alpha")
        if isinstance(alpha, int | float) and not isinstance(alpha, bool):
            return _settings_of_alpha(adapter, alpha), _VERL_SETTINGS_NAME
    message = f"holds {adapter.text}, and there is no {ADAPTER_CONFIG_NAME} in it or next to it, which says its scale"
    hint = "give --adapter-config FILE, or --lora-alpha NUMBER"
    raise unsupported(source.path, message, hint)


def _parsed(raw: bytes, path: Location) -> dict[str, JsonValue]:
    return parse_object(raw, where=path, code="adapter.damaged")


def _settings_of_alpha(adapter: UnmergedAdapter, alpha: float) -> bytes:
    """Write the configuration of a LoRA whose ranks are those of its factors."""
    shapes = adapter.source.weight_shapes
    ranks: dict[str, int] = {}
    saved = []
    for name, stored in adapter.factors.items():
        module = name.removeprefix(PREFIX)
        for ending in (".lora_A.weight", ".lora_embedding_A"):
            if module.endswith(ending):
                ranks[module.removesuffix(ending)] = shapes[stored][0]
        if ".modules_to_save." in stored:
            saved.append(module.rpartition(".")[0])
    if not ranks:
        message = "holds an adapter of PEFT that is not a LoRA"
        raise unsupported(adapter.source.path, message, "give --adapter-config FILE")
    rank = max(ranks.values())
    rank_pattern = {}
    for module, own_rank in ranks.items():
        if own_rank != rank:
            rank_pattern[module] = own_rank
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({*saved}) or None,
        "use_dora": any(".lora_magnitude_vector" in name for name in adapter.factors),
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    return (json.dumps(settings, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def folded(
    store: Store, adapter: UnmergedAdapter, settings: bytes, config: Mapping[str, JsonValue]
) -> TrainingCheckpoint:
    """Return the checkpoint of the weights of the model of `config`, those that the adapter changes with it applied.

    These are computed in float32 when they are read, and count as masters.

    Raises:
        MergePipeError: the adapter does not fit its base, or is not read: see `checkpoints.adapters`.
    """
    source = adapter.source
    _check_folding(adapter)
    values: dict[str, StoredState] = {}
    tensors: dict[str, Readable] = {}
    wrapped = []
    for name, stored in adapter.base.items():
        state = _value(source, stored)
        values[name] = state
        tensors[name] = StoredState.planned(name, WEIGHT, state.dtype, state.shape).tensor(name)
        if _is_wrapped(stored):
            wrapped.append(name)
    located = map_at_once(store, [source.path], lambda name: _tensor(store, values[name], name), wrapped)
    tensors.update(zip(wrapped, located, strict=True))
    base = Checkpoint(source.path, source.root, MappingProxyType(tensors), (), ())
    of_peft = sorted_out(source.path, _config(adapter, settings), _factors(store, adapter), ())
    _check_tied(source, of_peft, config)
    applied = apply_adapter(base, matched_adapter(store, of_peft, base))
    states: dict[tuple[str, str], StoredState] = {}
    for name, tensor in applied.tensors.items():
        if tensor is tensors[name]:
            states[name, WEIGHT] = replace(values[name], parameter=name, kind=WEIGHT)
            continue
        assert not isinstance(tensor, StoredTensor)
        if tensor.dtype == F32:
            states[name, WEIGHT] = StoredState.planned(name, WEIGHT, tensor.stored_dtype, tensor.shape)
            states[name, FP32] = StoredState.of_computed(name, FP32, tensor)
        else:
            states[name, WEIGHT] = StoredState.of_computed(name, WEIGHT, tensor)
    return _with_states(source, states)


def _check_folding(adapter: UnmergedAdapter) -> None:
    source = adapter.source
    if not adapter.has_base:
        raise unsupported(source.path, f"holds {adapter.text}", _ALONE_HINT)
    for name, stored in adapter.base.items():
        is_weight = stored.endswith((f"{BASE_LAYER}.weight", ".original_module.weight"))
        if is_weight and _value(source, stored).dtype.kind is not DTypeKind.FLOAT:
            raise unsupported(source.path, f"its adapter changes {shown(name)}, which is quantised", _ALONE_HINT)


def _check_tied(source: TrainingCheckpoint, adapter: StoredAdapter, config: Mapping[str, JsonValue]) -> None:
    """Refuse an adapter of one of embedding and head where the model has one tensor for both."""
    is_tied = any(is_head(alias) for alias in source.units.tied)
    if config:
        is_tied |= config.get("tie_word_embeddings", True) is not False
    if not is_tied or adapter.config.keeps_tied:
        return
    changed = [f"{module}.weight" for module in adapter.modules]
    changed += adapter.full
    for name in changed:
        if embedding_ending(name):
            message = f"its adapter changes {shown(name)}, and embedding and head are tied"
            raise unsupported(source.path, message, _ALONE_HINT)


def alone(adapter: UnmergedAdapter) -> TrainingCheckpoint:
    """Return the checkpoint of the adapter's tensors, by the names that they have in PEFT's files."""
    source = adapter.source
    states = {}
    for name, stored in adapter.factors.items():
        states[name, WEIGHT] = replace(_value(source, stored), parameter=name, kind=WEIGHT)
    return _with_states(source, states)


def _with_states(source: TrainingCheckpoint, states: Mapping[tuple[str, str], StoredState]) -> TrainingCheckpoint:
    """Return the checkpoint with other weights, and without an optimizer."""
    parameters = {}
    for (name, _), state in states.items():
        parameters[name] = state.shape
    return replace(
        source, units=model_units(parameters), parameters=parameters, states=states, steps=(), flat_groups=(),
        untrained={},
    )  # fmt: skip


def _config(adapter: UnmergedAdapter, settings: bytes) -> AdapterConfig:
    where = adapter.source.path
    return parse_adapter_config(_parsed(settings, where), where)


def _factors(store: Store, adapter: UnmergedAdapter) -> list[StoredTensor]:
    source = adapter.source
    names = [*adapter.factors]
    states = {name: _value(source, stored) for name, stored in adapter.factors.items()}
    return map_at_once(store, [source.path], lambda name: _tensor(store, states[name], name), names)


def _value(source: TrainingCheckpoint, stored: str) -> StoredState:
    """Return the state that holds a weight: of what is trained, the master."""
    state = source.untrained.get(stored) or source.states.get((stored, FP32)) or state_to_copy(source, stored, WEIGHT)
    if state is None or state.gaps:
        raise mismatched(source.path, f"lacks weights of {stored}", "a model needs all weights of its checkpoint")
    return state


def _tensor(store: Store, state: StoredState, name: str) -> StoredTensor:
    return unpacked(store, state).tensor(name)
