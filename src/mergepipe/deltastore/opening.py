"""Opens a delta store as a checkpoint beside its base: header and index are read, no piece."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mergepipe.deltastore.bands import Bands
from mergepipe.deltastore.header import (
    HEADER_NAME,
    HEADERS_NAME,
    INDEX_NAME,
    PIECE_NAMES,
    PackedEntry,
    StoreHeader,
    parse_header,
)
from mergepipe.deltastore.index import StoreIndex
from mergepipe.deltastore.levels import Codec, Piece
from mergepipe.deltastore.packed import PackedTensor
from mergepipe.deltastore.parts import corrupt
from mergepipe.deltastore.writer import index_digest
from mergepipe.errors import MismatchError
from mergepipe.readers.base import Checkpoint, FileFingerprint, Readable, TensorEntry
from mergepipe.readers.contained import stat_regular
from mergepipe.readers.hf import SIDECAR_NAMES
from mergepipe.readers.strict_json import shown
from mergepipe.storage.base import Store

MAX_HEADER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """Header and index of a store, held against each other and against the sizes of its files."""

    root: Path
    header: StoreHeader
    index: StoreIndex
    fingerprints: tuple[FileFingerprint, ...]


def read_store(store: Store, path: Path) -> OpenedStore:
    """Read and check header and index.

    Raises:
        CorruptError: one of them is damaged, or a file has not the size that the index says.
        UnsupportedError: a newer version.
        NotFoundError, StorageError: from the store.
    """
    header_path, index_path = path / HEADER_NAME, path / INDEX_NAME
    size_bytes = store.size_bytes(header_path)
    if size_bytes > MAX_HEADER_BYTES:
        raise corrupt(header_path, f"a header of {size_bytes} bytes; at most {MAX_HEADER_BYTES} are read")
    header = parse_header(store.read_metadata(header_path, 0, size_bytes), header_path)
    content = store.read_metadata(index_path, 0, store.size_bytes(index_path))
    if index_digest(content) != header.index_blake3:
        raise corrupt(index_path, "the index is damaged: its digest does not fit the header's")
    index = StoreIndex.parse(content, str(index_path))
    n_rows = sum(tensor.n_rows for tensor in header.tensors)
    if n_rows != len(index.rows):
        raise corrupt(index_path, f"{len(index.rows)} blocks, the tensors of the header have {n_rows}")
    sizes = {PIECE_NAMES[piece]: index.file_bytes(piece) for piece in Piece}
    sizes[HEADERS_NAME] = sum(file.header_bytes for file in header.files)
    sizes |= {HEADER_NAME: size_bytes, INDEX_NAME: len(content)}
    sizes |= {kept.name: kept.size_bytes for kept in header.kept}
    prints = tuple(_fingerprint(path, name, size, header) for name, size in sorted(sizes.items()))
    return OpenedStore(path, header, index, prints)


def open_store(store: Store, path: Path, base: Checkpoint) -> Checkpoint:
    """Open the store in `path` as the full checkpoint that was packed, beside `base`.

    Its content is bound to the base's, block by block: that is checked as blocks are read.

    Raises:
        MismatchError: the base lacks a tensor that was packed beside it, or has another dtype or shape.
        CorruptError, UnsupportedError, NotFoundError, StorageError: as `read_store`.
    """
    opened = read_store(store, path)
    tensors: dict[str, Readable] = {entry.name: _readable(opened, entry, base) for entry in opened.header.tensors}
    sidecars = tuple(sorted(kept.name for kept in opened.header.kept if kept.name in SIDECAR_NAMES))
    return Checkpoint(path, path, MappingProxyType(tensors), opened.fingerprints, sidecars)


def _readable(opened: OpenedStore, entry: PackedEntry, base: Checkpoint) -> Readable:
    if not entry.has_base:
        return _plain(opened, entry)
    found = base.tensors.get(entry.name)
    if not isinstance(found, TensorEntry):
        what = "none of that name" if found is None else "one that is not stored as it is"
        raise MismatchError.of(
            "store.base", opened.root,
            f"tensor {shown(entry.name)} was packed beside the base's; {base.path} has {what}",
            f"give the base that it was packed with: it was {opened.header.base}",
        )  # fmt: skip
    if (found.dtype, found.shape) != (entry.dtype, entry.shape):
        raise MismatchError.of(
            "store.base", opened.root,
            f"tensor {shown(entry.name)} is {entry.dtype.name} {list(entry.shape)}, "
            f"that of {base.path} is {found.dtype.name} {list(found.shape)}",
            f"give the base that it was packed with: it was {opened.header.base}",
        )  # fmt: skip
    bands = None if entry.cuts is None else Bands(entry.cuts)
    return PackedTensor(entry.name, entry.dtype, entry.shape, opened.root, opened.index, entry.first_row, found, bands)


def _plain(opened: OpenedStore, entry: PackedEntry) -> TensorEntry:
    """A tensor that the base has not: its bytes as they are, in one range."""
    stop = entry.first_row + entry.n_rows
    if any(opened.index.codec(row) is not Codec.RAW for row in range(entry.first_row, stop)):
        raise corrupt(opened.root, f"tensor {shown(entry.name)} has no base, and is not stored as it is")
    first, last = opened.index.piece_range(Piece.WHOLE, entry.first_row, stop)
    if last - first != entry.nbytes:
        raise corrupt(opened.root, f"tensor {shown(entry.name)} has {last - first} bytes, {entry.nbytes} are needed")
    return TensorEntry(
        entry.name, entry.dtype, entry.shape, opened.root / PIECE_NAMES[Piece.WHOLE], first, entry.nbytes
    )


def _fingerprint(root: Path, name: str, size_bytes: int, header: StoreHeader) -> FileFingerprint:
    found = stat_regular(root, name)
    if found is None or found.st_size != size_bytes:
        what = "is missing" if found is None else f"has {found.st_size} bytes"
        raise corrupt(root / name, f"{what}, {size_bytes} bytes are needed")
    return FileFingerprint(name, size_bytes, found.st_mtime_ns, header.index_blake3)
