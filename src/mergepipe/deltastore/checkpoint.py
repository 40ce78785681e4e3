"""Open a delta store as a checkpoint relative to its base; the index is read when it is first needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from mergepipe.checkpoints.contained_files import stat_regular
from mergepipe.checkpoints.contract import Checkpoint, FileFingerprint, Readable, TensorEntry
from mergepipe.checkpoints.directory import SIDECAR_NAMES
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.chained_tensor import ChainedTensor
from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.header import (
    HEADER_NAME,
    HEADERS_NAME,
    INDEX_NAME,
    PIECE_NAMES,
    PackedEntry,
    StoreHeader,
    is_store,
    parse_header,
)
from mergepipe.deltastore.index import ROW_BYTES, StoreIndex
from mergepipe.deltastore.index_reader import Charged, StoreIndexReader, as_expert, as_metadata
from mergepipe.deltastore.plain_tensor import PlainTensor
from mergepipe.deltastore.tensor import PackedTensor, StandaloneTensor
from mergepipe.errors import MismatchError, NotFoundError
from mergepipe.snapshots.recorded_paths import absolute_reference
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import STORE_HEADER_BYTES
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """Header and index of a store, checked against each other and against the sizes of its files."""

    root: Location
    header: StoreHeader
    index_reader: StoreIndexReader
    fingerprints: tuple[FileFingerprint, ...]

    @property
    def index(self) -> StoreIndex:
        return self.index_reader.index


def read_store(store: Store, path: Location) -> OpenedStore:
    """Read and check header and index, both charged as metadata.

    Raises:
        CorruptError: one of them is damaged, or a file has another size than the index implies.
        UnsupportedError: a newer version.
        NotFoundError, StorageError: from the store.
    """
    if not is_store(store, path):
        raise NotFoundError.of(
            "store.not-found", path, f"is not a delta store: it has no {HEADER_NAME}", "name a store that `pack` made"
        )
    opened = read_header(store, path)
    _ = opened.index
    return opened


def read_header(store: Store, path: Location) -> OpenedStore:
    """Read and check the header of a store; the index is read when it is first needed, charged as metadata.

    Raises:
        CorruptError, UnsupportedError, NotFoundError, StorageError: as `read_store`.
    """
    return _read_header(store, path, as_metadata)


def _read_header(store: Store, path: Location, read_index: Charged) -> OpenedStore:
    """Read everything but the index, which is read when it is first needed."""
    header_path = path / HEADER_NAME
    raw = store.read_small(header_path, STORE_HEADER_BYTES)
    written = parse_header(raw, header_path)
    base, expert = (absolute_reference(text, path) for text in (written.base, written.expert))
    header = replace(written, base=base, expert=expert)
    n_rows = sum(tensor.n_rows for tensor in header.tensors)
    sizes: dict[str, int | None] = {PIECE_NAMES[piece]: None for piece in Piece}
    sizes[HEADERS_NAME] = sum(file.header_bytes for file in header.files)
    sizes |= {HEADER_NAME: len(raw), INDEX_NAME: n_rows * ROW_BYTES}
    sizes |= {file.name: file.size_bytes for file in header.kept}
    prints = tuple(_fingerprint(store, path, name, size, header) for name, size in sorted(sizes.items()))
    sizes_bytes = {file.name: file.size_bytes for file in prints}
    return OpenedStore(path, header, StoreIndexReader(store, path, header, sizes_bytes, read_index), prints)


def open_store(store: Store, path: Location, base: Checkpoint | None) -> Checkpoint:
    """Open the store in `path` as the full checkpoint that was packed, relative to `base` if any.

    The index is read when it is first needed, charged to the expert. Blocks are checked against the digests of the
    base's blocks as they are read.

    Raises:
        MismatchError: the base lacks a tensor that was packed relative to it, or has another dtype or shape.
        CorruptError, UnsupportedError, NotFoundError, StorageError: as `read_store`.
    """
    opened = _read_header(store, path, as_expert)
    tensors: dict[str, Readable] = {entry.name: _readable(opened, entry, base) for entry in opened.header.tensors}
    sidecars = tuple(sorted(file.name for file in opened.header.kept if file.name in SIDECAR_NAMES))
    content_id = opened.header.content_id
    return Checkpoint(
        path, path, MappingProxyType(tensors), opened.fingerprints, sidecars,
        content_id=content_id, encoded=opened.index_reader,
    )  # fmt: skip


def _readable(opened: OpenedStore, entry: PackedEntry, base: Checkpoint | None) -> Readable:
    index, first_row = opened.index_reader, entry.first_row
    if not entry.has_base:
        kind = PlainTensor if entry.is_plain else StandaloneTensor
        return kind(entry.name, entry.dtype, entry.shape, opened.root, index, first_row)
    if base is None:
        message = f"tensor {shown(entry.name)} was packed relative to its base, which is not named"
        raise MismatchError.of("store.base", opened.root, message, f"name its base: it was {opened.header.base}")
    base_tensor = base.tensors.get(entry.name)
    can_be_base = opened.header.depth or isinstance(base_tensor, TensorEntry)
    if base_tensor is None or not can_be_base:
        what = "no such tensor" if base_tensor is None else "one that is computed, not stored"
        raise MismatchError.of(
            "store.base", opened.root,
            f"tensor {shown(entry.name)} was packed relative to its base; {base.path} has {what}",
            f"give the base that it was packed with: it was {opened.header.base}",
        )  # fmt: skip
    if (base_tensor.dtype, base_tensor.shape) != (entry.base_dtype, entry.shape):
        base_dtype = "" if entry.base_dtype is None else entry.base_dtype.name
        raise MismatchError.of(
            "store.base", opened.root,
            f"tensor {shown(entry.name)} was packed relative to {base_dtype} {list(entry.shape)}, "
            f"that of {base.path} is {base_tensor.dtype.name} {list(base_tensor.shape)}",
            f"give the base that it was packed with: it was {opened.header.base}",
        )  # fmt: skip
    bands = None if entry.cuts is None else Bands(entry.cuts)
    if isinstance(base_tensor, TensorEntry):
        return PackedTensor(entry.name, entry.dtype, entry.shape, opened.root, index, first_row, base_tensor, bands)
    base_bytes = base_tensor.n_elements * base_tensor.dtype.itemsize
    described = TensorEntry(entry.name, base_tensor.dtype, entry.shape, base.root, 0, base_bytes)
    packed = PackedTensor(entry.name, entry.dtype, entry.shape, opened.root, index, first_row, described, bands)
    return ChainedTensor(packed, base_tensor)


def _fingerprint(
    store: Store, root: Location, name: str, size_bytes: int | None, header: StoreHeader
) -> FileFingerprint:
    """A file as it is, of `size_bytes` where that is known."""
    status = stat_regular(store, root, name)
    if status is None or (size_bytes is not None and status.size_bytes != size_bytes):
        what = "is missing" if status is None else f"has {status.size_bytes} bytes"
        needed = "it is needed" if size_bytes is None else f"{size_bytes} bytes are needed"
        raise corrupt(root / name, f"{what}, {needed}")
    return FileFingerprint(name, status.size_bytes, status.version, header.index_blake3)
