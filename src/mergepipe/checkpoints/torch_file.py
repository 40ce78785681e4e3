"""Files written by `torch.save`, as inert values and byte ranges: no tensor byte is read, nothing is executed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from blake3 import blake3

from mergepipe.checkpoints.contract import TensorEntry, WeightHeader
from mergepipe.checkpoints.inert_pickle import PickledTensor, Record, load_inert
from mergepipe.checkpoints.zip_directory import Read, Window, ZipMember, read_ahead_directory, reader_of
from mergepipe.core.blocks import element_count
from mergepipe.core.strict_json import canonical_json, shown
from mergepipe.errors import UnsupportedError, damaged, unsupported
from mergepipe.storage.contract import PICKLE_BYTES, Store
from mergepipe.storage.location import Location

# --- the directory of a zip file whose members are stored plain, read strictly and without reading a member ---
#
# `zipfile` is not used: it trusts the central directory's sizes, looks for an archive behind leading bytes, and
# cannot say where a checksum is. A file that an honest writer of stored members would not produce is refused.


# --- files written by `torch.save`, as inert values and byte ranges: no tensor byte is read, nothing is executed ---


_ZIP_START, _END_START = b"PK\x03\x04", b"PK\x05\x06"


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """A parsed `torch.save` file: `root` is what was saved, with every tensor a `PickledTensor`."""

    file: Location
    stem: str
    root: object
    pickle: ZipMember
    members: Mapping[str, ZipMember]
    read: Read  # `Store.read_metadata`, of small members without asking again

    def locate(self, tensor: PickledTensor, path: str) -> TensorEntry:
        """Return the byte range of `tensor`, named by its place in the pickle, as `state.fp32_flat_groups[0]`.

        Several tensors may share bytes. A transposed or strided view has no byte range of its own, and is refused.
        """
        member = self.storage(tensor)
        where = f"{self.file}: {path}"
        if element_count(tensor.shape) and not _is_contiguous(tensor):
            message = f"shape {tensor.shape} with strides {tensor.stride} is not contiguous"
            raise unsupported(where, message, "call .contiguous() on it and save again")
        offset = tensor.storage_offset * tensor.dtype.itemsize
        nbytes = element_count(tensor.shape) * tensor.dtype.itemsize
        if offset + nbytes > member.nbytes:
            raise damaged(where, f"bytes [{offset}, {offset + nbytes}) of a storage of {member.nbytes}")
        return TensorEntry(path, tensor.dtype, tensor.shape, self.file, member.offset + offset, nbytes)

    def storage(self, tensor: PickledTensor) -> ZipMember:
        """Return the member that holds the tensor's storage."""
        storage = tensor.storage
        member = self.members.get(f"{self.stem}/data/{storage.key}")
        if member is None:
            raise damaged(self.file, f"storage {storage.key[:40]!r} is not in the file")
        itemsize = storage.dtype.itemsize if storage.dtype is not None else 1
        if storage.n_elements * itemsize != member.nbytes:
            stated = f"{storage.n_elements * itemsize} are announced"
            raise damaged(self.file, f"storage {storage.key[:40]!r} has {member.nbytes} bytes, {stated}")
        return member

    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor of the file by its path, each object once."""
        return {path: self.locate(tensor, path) for path, tensor in walk_tensors(self.root)}


def read_torch_zip(store: Store, path: Location, window: Window | None = None) -> TorchArchive:
    """Read the structure of a `torch.save` file, or of one that lies in a `window` of a larger file.

    Memory: a small multiple of the pickle (at most 256 MiB).
    """
    window = window or Window(path, 0, store.size_bytes(path))
    read = reader_of(store, window)
    start = read(path, window.start, 4)
    if start[:1] == b"\x80":
        message = "written by torch.save in its older, unzipped format"
        raise unsupported(path, message, "load and save it again with torch 1.6 or later")
    if start not in (_ZIP_START, _END_START):
        raise damaged(path, "not a file written by torch.save")
    members, read = read_ahead_directory(store, read, window)
    stems = {name.partition("/")[0] for name in members}
    stem = next(iter(stems), "")
    if len(stems) != 1 or f"{stem}/data.pkl" not in members:
        raise damaged(path, "a zip file, but not one written by torch.save (no data.pkl)")
    if (order := members.get(f"{stem}/byteorder")) is not None:
        content = read(path, order.offset, min(order.nbytes, 16))
        if content != b"little":
            raise unsupported(path, f"the byte order is {content!r}; only little-endian is read")
    pickle = members[f"{stem}/data.pkl"]
    if pickle.nbytes > PICKLE_BYTES:
        message = f"the pickle has {pickle.nbytes} bytes; at most {PICKLE_BYTES} are read"
        raise UnsupportedError.of("pickle.refused", path, message)
    raw = read(path, pickle.offset, pickle.nbytes)
    if len(raw) != pickle.nbytes or zlib.crc32(raw) != pickle.crc32:
        raise damaged(path, "the checksum of data.pkl does not match; the file is damaged")
    return TorchArchive(path, stem, load_inert(raw, str(path)), pickle, members, read)


def walk_tensors(root: object) -> Iterator[tuple[str, PickledTensor]]:
    """Yield every tensor below `root` with its path, in the order of the pickle."""
    return ((path, value) for path, value in walk(root) if isinstance(value, PickledTensor))


def walk(root: object) -> Iterator[tuple[str, object]]:
    """Yield every value below `root` with its path, in the order of the pickle; each container is visited once."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict | list | tuple | Record):
            if id(value) in seen:
                continue
            seen.add(id(value))
            waiting.extend(reversed(list(_children(path, value))))
        yield path, value


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, Record):
                yield path, key
            yield _joined(path, key), item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, Record):
        yield f"{path}.args", value.args
        yield f"{path}.state", value.state


def _joined(path: str, key: object) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}[{type(key).__name__}]"


def _is_contiguous(tensor: PickledTensor) -> bool:
    expected = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


# --- the weights in one file of `torch.save`, as tensors stored in byte ranges: no tensor byte is read ---


SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Where trainers put the weights beside their own state, in the order in which they are looked for.
WRAPPERS = ("state_dict", "model_state_dict", "module", "model")
_MOST_WRAPPERS = 3


def read_torch_weights(store: Store, path: Location) -> WeightHeader:
    """Read names, dtypes, shapes and places of the tensors in `path`; nothing is executed.

    Tied tensors share their bytes. The digest is that of the pickle's checksum and of each member's place and checksum.
    """
    archive = read_torch_zip(store, path)
    state = _state_of(archive)
    entries = [_entry(archive, name, value) for name, value in state.items() if not _is_nothing(value)]
    granularity = store.terms(path).granularity_bytes
    entries = [replace(entry, granularity_bytes=granularity) for entry in entries]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes, entry.name))
    return WeightHeader(tuple(entries), store.size_bytes(path), _digest(archive))


def _state_of(archive: TorchArchive) -> Mapping[object, object]:
    """The mapping of names to tensors: what was saved, or what a trainer wrapped it in."""
    state = archive.root
    for _ in range(_MOST_WRAPPERS):
        if isinstance(state, dict) and any(isinstance(value, PickledTensor) for value in state.values()):
            return state
        if not isinstance(state, dict):
            break
        state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), dict)), None)
    message = f"has no mapping of names to tensors, neither at the top nor under {', '.join(WRAPPERS)}"
    raise unsupported(archive.file, message, "save the model's state_dict")


def _is_nothing(value: object) -> bool:
    """Whether an entry of a state dict stands for no content, as `_extra_state` mostly does."""
    return value is None or (isinstance(value, dict | list | tuple | str | bytes) and not value)


def _entry(archive: TorchArchive, name: object, value: object) -> TensorEntry:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise damaged(archive.file, f"{shown(name)} cannot be a tensor's name")
    if not isinstance(value, PickledTensor):
        kind = str(value.kind) if isinstance(value, Record) else type(value).__name__
        message = f"{shown(name)} holds a {shown(kind)}, which is not a tensor"
        raise unsupported(archive.file, message, "save the state_dict without it")
    return archive.locate(value, name)


def _digest(archive: TorchArchive) -> str:
    members = sorted((m.offset, m.nbytes, m.crc32) for m in archive.members.values())
    return blake3(canonical_json([archive.pickle.crc32, [list(member) for member in members]])).hexdigest(length=16)
