"""The weights in one file of `torch.save`, as tensors stored in byte ranges: no tensor byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from blake3 import blake3

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.formats.inert_values import PickledTensor, Record
from mergepipe.checkpoints.formats.torch_zip import TorchArchive, read_torch_zip
from mergepipe.core.canonical_json import canonical_json
from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Where trainers put the weights beside their own state, in the order in which they are looked for.
WRAPPERS = ("state_dict", "model_state_dict", "module", "model")
_MOST_WRAPPERS = 3


@dataclass(frozen=True, slots=True)
class TorchWeights:
    """The tensors of one file. `entries` are sorted by offset; tied tensors share their bytes."""

    entries: tuple[TensorEntry, ...]
    size_bytes: int
    digest: str  # BLAKE3-128 of the pickle's checksum and of each member's place and checksum


def read_torch_weights(store: Store, path: Location) -> TorchWeights:
    """Read names, dtypes, shapes and places of the tensors in `path`; nothing is executed.

    Raises:
        CorruptError: the file is cut or contradicts itself.
        UnsupportedError: it is in torch's unzipped format, names something that is not inert, holds no weights, or a
            tensor is not contiguous.
        NotFoundError, StorageError: from the store.
    """
    archive = read_torch_zip(store, path)
    state = _state_of(archive)
    entries = [_entry(archive, name, value) for name, value in state.items() if not _is_nothing(value)]
    granularity = store.terms(path).granularity_bytes
    entries = [replace(entry, granularity_bytes=granularity) for entry in entries]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes, entry.name))
    return TorchWeights(tuple(entries), store.size_bytes(path), _digest(archive))


def _state_of(archive: TorchArchive) -> Mapping[object, object]:
    """The mapping of names to tensors: what was saved, or what a trainer wrapped it in."""
    state = archive.root
    for _ in range(_MOST_WRAPPERS):
        if isinstance(state, dict) and any(isinstance(value, PickledTensor) for value in state.values()):
            return state
        if not isinstance(state, dict):
            break
        state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), dict)), None)
    raise UnsupportedError.of(
        "torch.weights.none", archive.file,
        f"holds no mapping of names to tensors, neither by itself nor under {', '.join(WRAPPERS)}",
        "save the model's state_dict",
    )  # fmt: skip


def _is_nothing(value: object) -> bool:
    """Whether an entry of a state dict stands for no content, as `_extra_state` mostly does."""
    return value is None or (isinstance(value, dict | list | tuple | str | bytes) and not value)


def _entry(archive: TorchArchive, name: object, value: object) -> TensorEntry:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise CorruptError.of("torch.weights.name", archive.file, f"{shown(name)} cannot be a tensor's name")
    if not isinstance(value, PickledTensor):
        kind = str(value.kind) if isinstance(value, Record) else type(value).__name__
        raise UnsupportedError.of(
            "torch.weights.not_tensor", archive.file, f"{shown(name)} holds a {shown(kind)}, which is no tensor",
            "save the state_dict without it",
        )  # fmt: skip
    stored = archive.locate(value, name)
    return TensorEntry(name, stored.dtype, stored.shape, stored.file, stored.offset, stored.nbytes)


def _digest(archive: TorchArchive) -> str:
    members = sorted((m.offset, m.nbytes, m.crc32) for m in archive.members.values())
    return blake3(canonical_json([archive.pickle.crc32, [list(member) for member in members]])).hexdigest(length=16)
