"""Adapters in GGUF, as llama.cpp reads them: two matrices for each tensor, one alpha, no configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.adapted_tensors import ROWS_IN_PAIRS, Composed
from mergepipe.checkpoints.contract import CheckpointFile, TensorEntry
from mergepipe.checkpoints.directory import stat_present
from mergepipe.checkpoints.gguf_files import (
    ARCHITECTURES,
    EMBEDDING,
    IN_PAIRS,
    PAIRED,
    READ_ARCHITECTURES,
    Header,
    Info,
    Json,
    gguf_library,
    rows_of_head,
    stored_names,
)
from mergepipe.checkpoints.stored_adapters import (
    LLAMA_CPP,
    AdaptedModule,
    AdapterConfig,
    StoredAdapter,
    sorted_out,
    unsupported_adapter,
)
from mergepipe.core.blocks import BF16
from mergepipe.core.strict_json import shown
from mergepipe.errors import UnsupportedError, damaged
from mergepipe.storage import owned
from mergepipe.storage.contract import Digested, FileId, Store
from mergepipe.storage.location import Location

_ADAPTER_PART: Final = re.compile(r"(?P<tensor>.+)\.(?P<part>lora_[ab])")
_ADAPTED_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_MOST_LAYERS: Final = 1 << 12
_EMBEDDING_MODULE: Final = EMBEDDING.removesuffix(".weight")
_EMBEDDING_FACTORS: Final = (f"{_EMBEDDING_MODULE}.lora_A.weight", f"{_EMBEDDING_MODULE}.lora_B.weight")
_TYPE_KEY: Final = "adapter.type"
_ALPHA_KEY: Final = "adapter.lora.alpha"


def read_gguf_adapter(store: Store, path: Location, base_config: Json) -> StoredAdapter:
    """Read the header of an adapter of llama.cpp, under the names of Hugging Face.

    Raises:
        UnsupportedError: `adapter.unsupported`; a model, an unknown architecture, or quantised factors.
        CorruptError: `checkpoint.damaged`, it is cut off or contradicts itself.
    """
    gguf = gguf_library(path)
    header = Header(store, path)
    facts, infos = header.read()
    if facts.get(_TYPE_KEY) != "lora":
        message = f"is no LoRA: its {_TYPE_KEY} is {shown(facts.get(_TYPE_KEY))}"
        raise unsupported_adapter(path, message, "name an adapter that llama.cpp's convert_lora_to_gguf.py wrote")
    architecture = str(facts.get("general.architecture"))
    if architecture not in READ_ARCHITECTURES:
        message = (
            f"is of the architecture {shown(architecture)}; of GGUF adapters {', '.join(READ_ARCHITECTURES)} are read"
        )
        raise unsupported_adapter(path, message)
    heads = heads_of(base_config)
    if architecture in IN_PAIRS and not heads:
        message = "its rows of Q and K are in llama.cpp's order, and only the base says how many heads there are"
        raise unsupported_adapter(path, message, "name the base: `mergepipe lora convert --base BASE`")
    version = stat_present(store, path.parent, path.name).version
    file = CheckpointFile(path, FileId(path.name, header.size_bytes, version, header.digest))
    alpha = facts.get(_ALPHA_KEY, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise header.damaged(f"has the {_ALPHA_KEY} {shown(alpha)}")
    entries = _named_entries(gguf, header, architecture, infos)
    of_embedding = {entry.name: entry for entry in entries if entry.name in _EMBEDDING_FACTORS}
    config = AdapterConfig(1, 1.0, {}, {}, False, False, kind=LLAMA_CPP)
    adapter = sorted_out(path, config, [entry for entry in entries if entry.name not in of_embedding], (file,))
    modules = dict(adapter.modules)
    if of_embedding:
        modules[_EMBEDDING_MODULE] = _embedding(header, of_embedding)
    if architecture in IN_PAIRS:
        for module, parts in modules.items():
            modules[module] = _in_halves(path, module, parts, heads)
    ranks = {module: parts.down.shape[0] for module, parts in modules.items()}
    alphas = {module: alpha or float(rank) for module, rank in ranks.items()}
    return replace(adapter, modules=modules, config=replace(config, ranks=ranks, alphas=alphas))


def _named_entries(gguf: Any, header: Header, architecture: str, infos: Sequence[Info]) -> list[TensorEntry]:
    """Return the factors of an adapter by the names that PEFT gives them."""
    layers = [int(match[1]) for info in infos if (match := _ADAPTED_LAYER.match(info[0]))]
    n_layers = max(layers, default=0) + 1
    if n_layers > _MOST_LAYERS:
        raise header.damaged(f"names the layer {n_layers - 1}")
    names = {stored: name for name, stored in stored_names(gguf, architecture, n_layers)}
    entries: list[TensorEntry] = []
    for info in infos:
        match = _ADAPTER_PART.fullmatch(info[0])
        name = names.get(match["tensor"], "") if match else ""
        if match is None or not name.endswith(".weight"):
            message = f"holds {shown(info[0])}, which is no factor of {architecture} models"
            raise unsupported_adapter(header.path, message)
        entry = header.tensor(gguf, name, info, {})
        if not isinstance(entry, TensorEntry):
            hint = "convert the adapter to F16 or F32"
            raise unsupported_adapter(header.path, f"{shown(info[0])} is quantised", hint)
        part = match["part"][-1].upper()
        entries.append(replace(entry, name=f"{name.removesuffix('.weight')}.lora_{part}.weight"))
    return entries


def _embedding(header: Header, factors: Mapping[str, TensorEntry]) -> AdaptedModule:
    """Return the module of the embedding, whose A is stored transposed."""
    down, up = (factors.get(name) for name in _EMBEDDING_FACTORS)
    if down is None or up is None or (len(down.shape), len(up.shape)) != (2, 2) or down.shape[1] != up.shape[1]:
        raise header.damaged("does not hold two factors of the embedding that have a product")
    flipped = Composed("transposed", (down,), (down.shape[1], down.shape[0]))
    return AdaptedModule(flipped, up, is_embedding=True)


def _in_halves(path: Location, module: str, parts: AdaptedModule, heads: Mapping[str, int]) -> AdaptedModule:
    """Return a module with the rows of Q and K in the order of Hugging Face; any other unchanged."""
    match = PAIRED.fullmatch(f"{module}.weight")
    if match is None:
        return parts
    rows_of_head(f"{module}.weight", parts.up.shape, heads, path)
    shape = (parts.up.shape[0], parts.up.shape[1])
    return replace(parts, up=Composed(ROWS_IN_PAIRS, (parts.up,), shape, heads[match["role"]]))


@dataclass(frozen=True, slots=True)
class GGUFAdapter:
    """How an adapter of a base is written as GGUF: the architecture, and the base's configuration."""

    name: str
    config: Json

    @property
    def architecture(self) -> str:
        """GGUF's name of the base's architecture.

        Raises:
            UnsupportedError: it is not known.
        """
        kinds = {**ARCHITECTURES, "qwen3_moe": "qwen3moe"}
        architecture = kinds.get(str(self.config.get("model_type")), "")
        if not architecture:
            message = f"the base is of the type {shown(self.config.get('model_type'))}"
            hint = f"adapters of {', '.join(kinds)} are written as GGUF; convert to peft for llama.cpp's converter"
            raise UnsupportedError.of("adapter.unsupported", self.name, message, hint)
        return architecture

    def names(self, modules: Sequence[str]) -> dict[str, str]:
        """Return GGUF's name of each module's tensor.

        Raises:
            UnsupportedError: a module has none.
        """
        gguf = gguf_library(self.name)
        stated = self.config.get("num_hidden_layers")
        n_layers = stated if type(stated) is int and 0 < stated <= _MOST_LAYERS else 1
        stored = dict(stored_names(gguf, self.architecture, n_layers))
        names = {}
        for module in modules:
            name = stored.get(f"{module}.weight")
            if name is None:
                message = f"{shown(module)} has no name in GGUF models of {self.architecture}"
                raise UnsupportedError.of("adapter.unsupported", self.name, message, "convert the adapter to peft")
            names[module] = name
        return names

    def in_file_order(self, module: str, up_MR: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows of B in the order in which GGUF has those of its tensor."""
        match = PAIRED.fullmatch(f"{module}.weight")
        if match is None or self.architecture not in IN_PAIRS:
            return up_MR
        heads = heads_of(self.config)
        if not heads:
            raise damaged(self.name, "the configuration of the base does not say how many heads there are")
        head_rows = rows_of_head(f"{module}.weight", up_MR.shape, heads, self.name)
        halves = up_MR.reshape(-1, 2, head_rows // 2, up_MR.shape[1]).swapaxes(1, 2)
        return np.ascontiguousarray(halves.reshape(up_MR.shape))

    def write(self, path: Path, alpha: float, tensors: Iterator[tuple[str, NDArray[Any], str]]) -> Digested:
        """Write the file durably and return its record; `tensors` are names, values, and dtypes by name.

        Memory: all factors, as gguf's writer keeps them.
        """
        gguf = gguf_library(self.name)
        writer = gguf.GGUFWriter(None, self.architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(_TYPE_KEY, "lora")
        writer.add_float32(_ALPHA_KEY, alpha)
        for name, values, dtype in tensors:
            stored = values
            raw_dtype = None
            if dtype == BF16.name:  # numpy has no such type: its bytes
                stored = values.view(np.uint8)
                raw_dtype = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, stored, raw_dtype=raw_dtype)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        stream = writer.fout[0]
        stream.flush()
        owned.sync_file(stream.fileno())
        writer.close()
        digest = blake3()
        digest.update_mmap(path)
        return Digested(path.name, path.stat().st_size, digest.hexdigest(length=16))


def heads_of(config: Json) -> dict[str, int]:
    """Return the number of heads of Q and of K that a model's configuration states; nothing where it does not."""
    queries = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads") or queries
    if type(queries) is not int or type(keys) is not int or min(queries, keys) < 1:
        return {}
    return {"q": queries, "k": keys}
