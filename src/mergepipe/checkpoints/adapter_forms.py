"""Forms in which programs store adapters, recognised by what is there: folders of PEFT, MLX and Tinker, and files."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from mergepipe.checkpoints.contract import GGUF_SUFFIX, TensorEntry
from mergepipe.checkpoints.directory import ADAPTER_NAMES, SAFETENSORS_SUFFIXES, read_weight_file, stat_present
from mergepipe.checkpoints.open_files import decoded
from mergepipe.checkpoints.safetensors import ADAPTER_METADATA_KEY
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.checkpoints.stored_adapters import (
    DIFFUSERS,
    KOHYA,
    PREFIX,
    ROLES,
    AdapterConfig,
    StoredAdapter,
    check_part,
    damaged_adapter,
    paired,
    parse_adapter_config,
    read_adapter_folder,
    unsupported_adapter,
)
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.location import Location

NO_CONFIG: Mapping[str, JsonValue] = MappingProxyType({})


def read_adapter(store: Store, path: Location, base_config: Mapping[str, JsonValue] = NO_CONFIG) -> StoredAdapter:
    """Read the headers and the configuration of the adapter at `path`; no tensor byte.

    A folder is PEFT's, MLX's or Tinker's; a file has the names of Kohya's scripts, of diffusers or ComfyUI, which state
    the scale beside the factors or in the header, or is llama.cpp's, of which some need the configuration of the base:
    the order of rows depends on its heads.
    """
    if is_folder(store, path):
        return read_adapter_folder(store, path)
    if path.suffix == GGUF_SUFFIX:
        from mergepipe.checkpoints.gguf_adapters import read_gguf_adapter

        return read_gguf_adapter(store, path, base_config)
    if path.suffix in SAFETENSORS_SUFFIXES and path.name not in ADAPTER_NAMES:
        return _read_file(store, path)
    raise unsupported_adapter(path, "is a file, and an adapter is read with its configuration", "give its folder")


@dataclass(frozen=True, slots=True)
class _FileForm:
    """A form of one safetensors file: how the names of modules look, and what a name that it does not have is told."""

    kind: str
    module: re.Pattern[str]
    refusal: str


_PARTS = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_down\.weight|lora_up\.weight|lora_A\.weight|lora_B\.weight|lora\.down\.weight"
    r"|lora\.up\.weight|alpha)"
)
_FILE_FORMS = (
    _FileForm(KOHYA, re.compile(r"[^.]+"), "is not a factor of a LoRA in Kohya's names (lora_down, lora_up, alpha)"),
    _FileForm(DIFFUSERS, re.compile(r".+"), "is not a factor of a LoRA (lora_A, lora_B, lora_down, lora_up, alpha)"),
)
_HINT = "give the folder of an adapter of PEFT or MLX, or the file of a plain LoRA"


def _read_file(store: Store, path: Location) -> StoredAdapter:
    """Read a file of factors and scalars by module."""
    file = read_weight_file(store, path.parent, path.name, stat_present(store, path.parent, path.name))
    matches = {entry.name: _PARTS.fullmatch(entry.name) for entry in file.entries}
    modules_named = [match["module"] for match in matches.values() if match is not None]
    form = next(form for form in _FILE_FORMS if all(map(form.module.fullmatch, modules_named)))
    parts, kernels = _parts_of_file(path, form, file.entries, matches)
    modules = {
        module: replace(paired(path, stored, is_embedding=False, kind=form.kind), kernel=kernels[module])
        for module, stored in parts.items()
    }
    ranks = {module: adapted.down.shape[0] for module, adapted in modules.items()}
    stated = _stated_scales(file.metadata, path)
    alphas = {}
    for module, stored in parts.items():
        default = stated(module) * ranks[module]
        alphas[module] = _alpha(store, path, stored, default)
    config = AdapterConfig(1, 1.0, ranks, alphas, False, False, kind=form.kind)
    return StoredAdapter(path, config, modules, {}, {}, {}, (file.source,))


def _parts_of_file(
    path: Location, form: _FileForm, entries: Sequence[TensorEntry], matches: Mapping[str, re.Match[str] | None]
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, tuple[int, ...]]]:
    """Return the tensors of each module by their roles, and the kernel of each module as it is stored."""
    parts: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    kernels: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        match = matches[entry.name]
        if match is None:
            raise unsupported_adapter(path, f"{shown(entry.name)} {form.refusal}", _HINT)
        if entry.name.startswith(PREFIX):
            message = f"{shown(entry.name)} is a name of PEFT, whose adapter_config.json holds the scale"
            raise unsupported_adapter(path, message, "give the folder of both")
        module = match["module"]
        role = ROLES.get(match["part"], "alpha")
        if role in parts[module]:
            raise damaged_adapter(path, f"{shown(entry.name)} and another tensor are one factor of {shown(module)}")
        if role == "alpha":
            parts[module][role] = entry
            continue
        if role == "down":
            kernels[module] = entry.shape[1:]
        flat = entry
        if _is_kernel(entry, role):
            flat = replace(entry, shape=(entry.shape[0], math.prod(entry.shape[1:])))
        check_part(path, flat, match["part"])
        parts[module][role] = flat
    return parts, kernels


def _is_kernel(entry: TensorEntry, role: str) -> bool:
    """Whether a factor is that of a convolution: `down` with a kernel, `up` with one of 1 x 1."""
    return len(entry.shape) in (3, 4, 5) and (role == "down" or set(entry.shape[2:]) == {1})


def _alpha(store: Store, path: Location, stored: Mapping[str, StoredTensor], default: float) -> float:
    """Read the scalar of one module, `default` where there is none."""
    entry = stored.get("alpha")
    if not isinstance(entry, TensorEntry):
        return default
    if entry.n_elements != 1 or entry.dtype.kind is not DTypeKind.FLOAT:
        message = f"{shown(entry.name)} is {entry.dtype.name} {list(entry.shape)}, and must be one number"
        raise damaged_adapter(path, message)
    raw = np.frombuffer(store.read_metadata(path, entry.offset, entry.nbytes), np.uint8)
    value = float(decoded(raw, entry.dtype.kernel_code)[0])
    if not math.isfinite(value):
        raise CorruptError.of("tensor.not-finite", path, f"{shown(entry.name)} is {value}")
    return value


def _stated_scales(metadata: Mapping[str, str], path: Location) -> Callable[[str], float]:
    """Return the scales of modules that diffusers states in the header, by component; 1 where it states none."""
    text = metadata.get(ADAPTER_METADATA_KEY)
    if text is None:
        return lambda _: 1.0
    options: dict[str, dict[str, JsonValue]] = defaultdict(dict)
    for key, value in parse_object(text.encode(), where=path, code="adapter.damaged").items():
        component, _, option = key.partition(".")
        options[component][option] = value
    configs = {
        component: parse_adapter_config({"peft_type": "LORA", **stated}, path) for component, stated in options.items()
    }
    if any(config.is_dora for config in configs.values()):
        raise unsupported_adapter(path, "it is DoRA, whose file of diffusers is not read")

    def scale_of(name: str) -> float:
        component, _, module = name.partition(".")
        return configs[component].scale_of(module) if component in configs else 1.0

    return scale_of
