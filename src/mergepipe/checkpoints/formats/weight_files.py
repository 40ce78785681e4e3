"""Choose the file of a directory that holds the weights, from the names alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mergepipe.checkpoints.formats.torch_weights import SUFFIXES as TORCH_SUFFIXES
from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, UnsupportedError
from mergepipe.storage.location import Location

SAFETENSORS_SUFFIXES = (".safetensors",)
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
STORE_HEADER_NAME = "mergepipe-store.json"
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.[a-z]+$", re.ASCII)
_INDEX_ENDING = ".index.json"
_FOREIGN_SUFFIXES = (".gguf", ".h5", ".msgpack", ".onnx")
GGUF_MAGIC = b"GGUF"
_GGUF_ADVICE = "name the safetensors model that it was converted from"
# What training leaves beside the weights, in files of the same kind.
_NOT_WEIGHTS = (
    "training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "*optim_states.pt", "adapter_model.*",
    "*.distcp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a directory: the `name` of an index, or of the only file of weights."""

    name: str
    is_index: bool


@dataclass(frozen=True, slots=True)
class _Format:
    """The file names of one format. `single` and `index` win over other names."""

    suffixes: tuple[str, ...]
    single: str
    index: str

    def files(self, names: Sequence[str]) -> list[str]:
        return [
            name for name in names
            if name.endswith(self.suffixes) and not any(fnmatchcase(name, other) for other in _NOT_WEIGHTS)
        ]  # fmt: skip

    def indices(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name.endswith(tuple(f"{suffix}{_INDEX_ENDING}" for suffix in self.suffixes))]


SAFETENSORS = _Format(SAFETENSORS_SUFFIXES, "model.safetensors", f"model.safetensors{_INDEX_ENDING}")
TORCH = _Format(TORCH_SUFFIXES, "pytorch_model.bin", f"pytorch_model.bin{_INDEX_ENDING}")


def is_adapter(names: Collection[str]) -> bool:
    """Whether a directory holds an adapter and no weights of a model beside it."""
    if ADAPTER_CONFIG_NAME not in names and not any(name in names for name in ADAPTER_NAMES):
        return False
    visible = _visible(names)
    return not any(fmt.files(visible) or fmt.indices(visible) for fmt in (SAFETENSORS, TORCH))


def choose_weights(root: Location, names: Collection[str]) -> Weights:
    """Decide from the file names of the directory `root` which of them holds the tensors; safetensors come first.

    Raises:
        NotFoundError, UnsupportedError, CorruptError: nothing, nothing readable, or no single answer.
    """
    visible = _visible(names)
    if STORE_HEADER_NAME in names:
        raise UnsupportedError.of(
            "model.store", root, f"is a delta store (it has a {STORE_HEADER_NAME}), read only as an expert of a recipe",
            "restore the model with `mergepipe unpack`, and use that",
        )  # fmt: skip
    for fmt in (SAFETENSORS, TORCH):
        if fmt.index in visible:
            return Weights(fmt.index, is_index=True)
        if fmt.single in visible:
            return Weights(fmt.single, is_index=False)
        indices, singles = fmt.indices(visible), fmt.files(visible)
        if len(indices) == 1:
            return Weights(indices[0], is_index=True)
        if not indices and len(singles) == 1:
            return _whole_file(root, singles[0], fmt)
        if indices or singles:
            raise _ambiguous(root, indices or singles, fmt)
    raise _no_weights(root, visible)


def _visible(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _whole_file(root: Location, name: str, fmt: _Format) -> Weights:
    shard = _SHARD.search(name)
    if shard and int(shard[2]) > 1:
        raise CorruptError.of(
            "checkpoint.directory.incomplete", root,
            f"holds only {shown(name)}, one of {int(shard[2])} shards, and no {fmt.index}", "download it again",
        )  # fmt: skip
    return Weights(name, is_index=False)


def gguf_refusal(path: Location, message: str) -> MergePipeError:
    """The error for GGUF files in place of weights."""
    return UnsupportedError.of("checkpoint.gguf", path, f"{message}, which are not read", _GGUF_ADVICE)


def _ambiguous(root: Location, candidates: list[str], fmt: _Format) -> MergePipeError:
    return CorruptError.of(
        "checkpoint.directory.ambiguous", root,
        f"there is neither {fmt.index} nor {fmt.single}, but {len(candidates)} candidates: {names_shown(candidates)}",
        "add the index of the shards, or name one file",
    )  # fmt: skip


def _no_weights(root: Location, visible: list[str]) -> MergePipeError:
    if is_adapter(visible):
        return UnsupportedError.of(
            "checkpoint.directory.adapter", root, "this is an adapter, which means something only beside its base",
            "use it as an expert, or write base+adapter",
        )  # fmt: skip
    foreign = [name for name in visible if name.endswith(_FOREIGN_SUFFIXES)]
    gguf = [name for name in foreign if name.endswith(".gguf")]
    if gguf:
        return gguf_refusal(root, f"holds {names_shown(gguf)}, GGUF files: weights as llama.cpp quantises them")
    if foreign:
        return UnsupportedError.of(
            "checkpoint.directory.format", root, f"holds {names_shown(foreign)}: not yet read", "convert to safetensors"
        )
    return NotFoundError.of(
        "checkpoint.directory.no_weights", root, f"no weights here, found: {names_shown(visible) or 'nothing'}"
    )


def names_shown(names: Sequence[str]) -> str:
    """At most ten names for a message."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(shown(name) for name in names[:10]) + more
