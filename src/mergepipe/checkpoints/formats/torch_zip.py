"""Files written by `torch.save`, as inert values and byte ranges: no tensor byte is read, nothing is executed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mergepipe.checkpoints.formats.inert_pickle import DEFAULT_LIMITS, load_inert
from mergepipe.checkpoints.formats.inert_values import PickledTensor, Record
from mergepipe.checkpoints.formats.zip_directory import MetadataSource, Window, ZipMember, read_zip_directory
from mergepipe.core.blocks import DType, element_count
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

_SMALL_ARCHIVE_BYTES = 4096
_ZIP_START, _END_START = b"PK\x03\x04", b"PK\x05\x06"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the file: `nbytes` bytes at absolute `offset`, from its first element on, row-major.

    `path` is where the pickle holds it, as in `optimizer_state_dict.fp32_flat_groups[0]`; `storage_offset` is in
    elements. Several tensors may share one storage. A transposed or strided view has no byte range of its own and is
    refused when it is located.
    """

    path: str
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage_key: str
    file: Location
    offset: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """A parsed `torch.save` file: `root` is what was saved, with every tensor a `PickledTensor`."""

    file: Location
    stem: str
    root: object
    pickle: ZipMember
    members: Mapping[str, ZipMember]

    def locate(self, tensor: PickledTensor, path: str) -> StoredTensor:
        """Return the byte range of `tensor`, which the pickle holds at `path`.

        Raises:
            CorruptError: its storage is missing, has another size, or is too small for it.
            UnsupportedError: it is not contiguous.
        """
        member = self.storage(tensor)
        where = f"{self.file}: {path}"
        if element_count(tensor.shape) and not _is_contiguous(tensor):
            raise UnsupportedError.of(
                "torch.stride", where, f"shape {tensor.shape} with strides {tensor.stride} is not contiguous",
                "call .contiguous() on it and save again",
            )  # fmt: skip
        offset = tensor.storage_offset * tensor.dtype.itemsize
        nbytes = element_count(tensor.shape) * tensor.dtype.itemsize
        if offset + nbytes > member.nbytes:
            raise CorruptError.of(
                "torch.storage", where, f"bytes [{offset}, {offset + nbytes}) of a storage of {member.nbytes}"
            )
        key = tensor.storage.key
        at = member.offset + offset
        return StoredTensor(
            path, tensor.dtype, tensor.shape, tensor.stride, tensor.storage_offset, key, self.file, at, nbytes
        )

    def storage(self, tensor: PickledTensor) -> ZipMember:
        """Return the member that holds the tensor's storage."""
        storage = tensor.storage
        member = self.members.get(f"{self.stem}/data/{storage.key}")
        if member is None:
            raise self._corrupt(f"storage {storage.key[:40]!r} is not in the file")
        itemsize = storage.dtype.itemsize if storage.dtype is not None else 1
        if storage.n_elements * itemsize != member.nbytes:
            raise self._corrupt(
                f"storage {storage.key[:40]!r} has {member.nbytes} bytes, {storage.n_elements * itemsize} are announced"
            )
        return member

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the file by its path, each object once."""
        return {path: self.locate(tensor, path) for path, tensor in walk_tensors(self.root)}

    def _corrupt(self, message: str) -> MergePipeError:
        return CorruptError.of("torch.storage", self.file, message)


def read_torch_zip(store: Store, path: Location, window: Window | None = None) -> TorchArchive:
    """Read the structure of a `torch.save` file, or of one that lies in a `window` of a larger file.

    Memory: a small multiple of the pickle (at most 256 MiB).

    Raises:
        CorruptError: the file is cut or contradicts itself.
        UnsupportedError: it is in torch's older, unzipped format, big-endian, or holds what is not inert.
    """
    window = window or Window(path, 0, store.size_bytes(path))
    source = _held(store, window) if window.nbytes <= _SMALL_ARCHIVE_BYTES else store
    _require_zip(source, window)
    members = read_zip_directory(source, window)
    stem = _stem(members, path)
    _require_little_endian(source, path, members, stem)
    pickle = members[f"{stem}/data.pkl"]
    return TorchArchive(path, stem, load_inert(_read_pickle(source, path, pickle), str(path)), pickle, members)


def walk_tensors(root: object) -> Iterator[tuple[str, PickledTensor]]:
    """Yield every tensor below `root` with its path, in the order of the pickle; each container is visited once."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, PickledTensor):
            yield path, value
        elif isinstance(value, dict | list | tuple | Record) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(reversed(list(_children(path, value))))


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
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


@dataclass(frozen=True, slots=True)
class _HeldBytes:
    """A small archive read at once: one request instead of twenty for a scalar."""

    content: bytes
    start: int

    def read_metadata(self, path: Location, offset: int, nbytes: int) -> bytes:
        return self.content[offset - self.start : offset - self.start + nbytes]


def _held(store: MetadataSource, window: Window) -> _HeldBytes:
    return _HeldBytes(store.read_metadata(window.path, window.start, window.nbytes), window.start)


def _require_zip(store: MetadataSource, window: Window) -> None:
    start = store.read_metadata(window.path, window.start, 4)
    if start[:1] == b"\x80":
        raise UnsupportedError.of(
            "torch.legacy", window.path, "written by torch.save in its older, unzipped format",
            "load and save it again with torch 1.6 or later",
        )  # fmt: skip
    if start not in (_ZIP_START, _END_START):
        raise CorruptError.of("torch.not-zip", window.path, "not a file written by torch.save")


def _stem(members: Mapping[str, ZipMember], path: Location) -> str:
    """Return the one directory that holds all members."""
    stems = {name.partition("/")[0] for name in members}
    stem = next(iter(stems), "")
    if len(stems) != 1 or f"{stem}/data.pkl" not in members:
        raise CorruptError.of("torch.layout", path, "a zip file, but not one written by torch.save (no data.pkl)")
    return stem


def _require_little_endian(store: MetadataSource, path: Location, members: Mapping[str, ZipMember], stem: str) -> None:
    member = members.get(f"{stem}/byteorder")
    if member is None:
        return
    order = store.read_metadata(path, member.offset, min(member.nbytes, 16))
    if order != b"little":
        raise UnsupportedError.of("torch.byteorder", path, f"the byte order is {order!r}; only little-endian is read")


def _read_pickle(store: MetadataSource, path: Location, member: ZipMember) -> bytes:
    most = DEFAULT_LIMITS.max_bytes
    if member.nbytes > most:
        raise UnsupportedError.of(
            "pickle.too_large", path, f"the pickle has {member.nbytes} bytes; at most {most} are read"
        )
    raw = store.read_metadata(path, member.offset, member.nbytes)
    if len(raw) != member.nbytes or zlib.crc32(raw) != member.crc32:
        raise CorruptError.of("torch.checksum", path, "the checksum of data.pkl does not match; the file is damaged")
    return raw
