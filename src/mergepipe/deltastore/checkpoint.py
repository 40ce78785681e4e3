"""Open a delta store as a checkpoint relative to its base, which may be a store as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from blake3 import blake3

from mergepipe.checkpoints.contract import (
    BaseBytes,
    Checkpoint,
    CheckpointFile,
    ComputedTensor,
    Fetch,
    Readable,
    TensorEntry,
)
from mergepipe.checkpoints.directory import SIDECAR_NAMES, is_packed, open_checkpoint, stat_regular, stored_name
from mergepipe.checkpoints.safetensors import parse_header
from mergepipe.core.blocks import DType, Span
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.index import (
    HEADER_FORMAT,
    HEADER_NAME,
    HEADERS_NAME,
    INDEX_NAME,
    PIECE_NAMES,
    ROW_BYTES,
    PackedEntry,
    StoreHeader,
    StoreIndex,
    StoreIndexReader,
)
from mergepipe.deltastore.pieces import BLOCK_ELEMENTS, Piece, RawBytes, corrupt
from mergepipe.deltastore.tensor import EncodedTensor, PackedTensor, PlainTensor
from mergepipe.errors import MergePipeError, MismatchError, NotFoundError, RecipeError
from mergepipe.snapshots.manifest import absolute_reference
from mergepipe.storage.contract import STORE_HEADER_BYTES, FileId, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

# --- a packed tensor whose base is a tensor of another store ---
# a checkpoint of a training run, packed on the one before


@dataclass(frozen=True, slots=True)
class ChainedTensor(ComputedTensor):
    """One tensor of a store on the same tensor of its base's store, which may be chained as well; read in full."""

    packed: PackedTensor
    base: ComputedTensor

    is_delta = False

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def dtype(self) -> DType:
        return self.packed.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.base.nbytes

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The byte ranges of this store, of those below it, and of the first one's base."""
        below = () if self.base.encoded_on is None else (self.base.encoded_on,)
        return (*self.packed.stored, *self.base.stored, *below)

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to fetch `span` on its own, in whole pages, of all stores of the chain."""
        return self.packed.cost_bytes(span) + self.base.cost_bytes(self._whole_blocks(span))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Make the fetch over open files; it keeps nothing between calls.

        All that it reads is charged to its purpose, but for the first store's base. Memory: the elements of the span's
        blocks, once for each store of the chain.
        """
        fetch_base, fetch_packed = self.base.opened(files), self.packed.opened_on_base(files)

        def fetch(span: Span, out: RawBytes, purpose: Purpose) -> None:
            size, blocks = self.dtype.itemsize, self._whole_blocks(span)
            base = np.empty(blocks.n_elements * self.base.dtype.itemsize, np.uint8)
            fetch_base(blocks, base, purpose)
            whole = out if blocks == span else np.empty(blocks.n_elements * size, np.uint8)
            fetch_packed(blocks, BaseBytes(base), whole, purpose)
            if whole is not out:
                out[:] = whole[(span.start - blocks.start) * size :][: len(out)]

        return fetch

    def _whole_blocks(self, span: Span) -> Span:
        start = span.start // BLOCK_ELEMENTS * BLOCK_ELEMENTS
        return Span(start, min(-(-span.stop // BLOCK_ELEMENTS) * BLOCK_ELEMENTS, self.n_elements))


# --- open a delta store as a checkpoint relative to its base; the index is read when it is first needed ---


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """Header and index of a store, checked against each other and against the sizes of its files."""

    root: Location
    header: StoreHeader
    index_reader: StoreIndexReader
    fingerprints: tuple[FileId, ...]

    @property
    def index(self) -> StoreIndex:
        return self.index_reader.index


def read_store(store: Store, path: Location) -> OpenedStore:
    """Read and check header and index, both charged as metadata."""
    if not is_packed(store, path):
        message = f"is not a delta store: it has no {HEADER_NAME}"
        raise NotFoundError.of("snapshot.not-found", path, message, "name a store that `pack` made")
    opened = read_header(store, path)
    _ = opened.index
    return opened


def read_header(store: Store, path: Location) -> OpenedStore:
    """Read and check the header of a store; the index is read when it is first needed, charged as metadata."""
    return _read_header(store, path, Purpose.METADATA)


def _read_header(store: Store, path: Location, purpose: Purpose) -> OpenedStore:
    """Read everything but the index, which is read when it is first needed."""
    header_path = path / HEADER_NAME
    raw = store.read_small(header_path, STORE_HEADER_BYTES)
    written = HEADER_FORMAT.parse(raw, header_path)
    base, expert = (absolute_reference(text, path) for text in (written.base, written.expert))
    header = replace(written, base=base, expert=expert)
    n_rows = sum(tensor.n_rows for tensor in header.tensors)
    sizes: dict[str, int | None] = {PIECE_NAMES[piece]: None for piece in Piece}
    sizes[HEADERS_NAME] = sum(file.header_bytes for file in header.files)
    sizes |= {HEADER_NAME: len(raw), INDEX_NAME: n_rows * ROW_BYTES}
    sizes |= {file.name: file.size_bytes for file in header.kept}
    prints = tuple(_fingerprint(store, path, name, size, header) for name, size in sorted(sizes.items()))
    sizes_bytes = {file.name: file.size_bytes for file in prints}
    return OpenedStore(path, header, StoreIndexReader(store, path, header, sizes_bytes, purpose), prints)


def open_store(store: Store, path: Location, base: Checkpoint | None) -> Checkpoint:
    """Open the store in `path` as the full checkpoint that was packed, relative to `base` if any.

    The index is read when it is first needed, charged to the expert. Blocks are checked against the digests of the
    base's blocks as they are read.
    """
    opened = _read_header(store, path, Purpose.EXPERT)
    tensors: dict[str, Readable] = {entry.name: _readable(opened, entry, base) for entry in opened.header.tensors}
    sidecars = tuple(sorted(file.name for file in opened.header.kept if file.name in SIDECAR_NAMES))
    content_id = opened.header.content_id
    files = tuple(CheckpointFile(path / identity.name, identity) for identity in opened.fingerprints)
    return Checkpoint(
        path, path, MappingProxyType(tensors), files, sidecars,
        content_id=content_id, encoded=opened.index_reader,
    )  # fmt: skip


def _readable(opened: OpenedStore, entry: PackedEntry, base: Checkpoint | None) -> Readable:
    index, first_row = opened.index_reader, entry.first_row
    if not entry.has_base:
        kind = PlainTensor if entry.is_plain else EncodedTensor
        return kind(entry.name, entry.dtype, entry.shape, opened.root, index, first_row)
    if base is None:
        message = f"tensor {shown(entry.name)} was packed relative to its base, which is not named"
        raise MismatchError.of(
            "base.mismatch",
            opened.root,
            message,
            f"name its base as base, and the pack as an expert: it was {opened.header.base}",
        )
    base_tensor = base.tensors.get(entry.name)
    can_be_base = opened.header.depth or isinstance(base_tensor, TensorEntry)
    if base_tensor is None or not can_be_base:
        what = "no such tensor" if base_tensor is None else "one that is computed, not stored"
        message = f"tensor {shown(entry.name)} was packed relative to its base; {base.path} has {what}"
        hint = f"give the base that it was packed with: it was {opened.header.base}"
        raise MismatchError.of("base.mismatch", opened.root, message, hint)
    if (base_tensor.dtype, base_tensor.shape) != (entry.base_dtype, entry.shape):
        base_dtype = "" if entry.base_dtype is None else entry.base_dtype.name
        raise MismatchError.of(
            "base.mismatch", opened.root,
            f"tensor {shown(entry.name)} was packed relative to {base_dtype} {list(entry.shape)}, "
            f"that of {base.path} is {base_tensor.dtype.name} {list(base_tensor.shape)}",
            f"give the base that it was packed with: it was {opened.header.base}",
        )  # fmt: skip
    if isinstance(base_tensor, TensorEntry):
        return PackedTensor(entry.name, entry.dtype, entry.shape, opened.root, index, first_row, base_tensor)
    base_bytes = base_tensor.n_elements * base_tensor.dtype.itemsize
    described = TensorEntry(entry.name, base_tensor.dtype, entry.shape, base.root, 0, base_bytes)
    packed = PackedTensor(entry.name, entry.dtype, entry.shape, opened.root, index, first_row, described)
    return ChainedTensor(packed, base_tensor)


def _fingerprint(store: Store, root: Location, name: str, size_bytes: int | None, header: StoreHeader) -> FileId:
    """A file as it is, of `size_bytes` where that is known."""
    status = stat_regular(store, root, name)
    if status is None or (size_bytes is not None and status.size_bytes != size_bytes):
        what = "is missing" if status is None else f"has {status.size_bytes} bytes"
        needed = "it is needed" if size_bytes is None else f"{size_bytes} bytes are needed"
        raise corrupt(root / name, f"{what}, {needed}")
    return FileId(name, status.size_bytes, status.version, header.index_blake3)


# --- open a store by itself, with the base that it was packed with, which may be a store as well ---


MOST_DEPTH = 32
"""A longer chain is taken for damage: each store of it is opened, and decoded for each block."""


def open_packed(
    store: Store, path: Location, base: Location | None = None
) -> tuple[OpenedStore, Checkpoint, tuple[Checkpoint, ...]]:
    """Open a packed expert by itself: header and index, the expert, and its bases, which lie where it was packed.

    There is no base for one that was packed without. That of a checkpoint in a chain is the store of the one before,
    which may have moved together with it, with its own bases behind it; or that one unpacked, if it is given as `base`.
    """
    opened = read_store(store, path)
    is_chained = opened.header.depth > 0 and (base is None or is_packed(store, base))
    bases = _open_chain(store, opened, base) if is_chained else _open_base(store, opened, base)
    return opened, open_store(store, path, bases[0] if bases else None), bases


def _open_chain(store: Store, opened: OpenedStore, base: Location | None) -> tuple[Checkpoint, ...]:
    """Open the bases of a store that is packed on another one; that one's chain is shorter, so that none is endless."""
    _check_depth(opened.root, opened.header.depth)
    place = base or Location.parse(opened.header.base)
    if not is_packed(store, place):
        place = opened.root.parent / place.name
    if not is_packed(store, place):
        raise _missing(opened)
    depth = read_header(store, place).header.depth
    if depth != opened.header.depth - 1:  # before it is opened: it may name itself
        message = f"its base {place} is at depth {depth} of a chain, {opened.header.depth - 1} is needed"
        raise corrupt(opened.root, message)
    _, below, bases = open_packed(store, place)
    return below, *bases


def _open_base(store: Store, opened: OpenedStore, base: Location | None) -> tuple[Checkpoint, ...]:
    if not opened.header.base:
        if base is not None:
            message = f"{opened.root} was packed without a base"
            raise RecipeError.of("option.conflict", "--base", message, "leave it out")
        return ()
    try:
        return (open_checkpoint(store, Location.parse(opened.header.base) if base is None else base),)
    except NotFoundError as error:
        if base is not None:
            raise
        raise _missing(opened) from error


def _check_depth(place: Location, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise corrupt(place, f"is at depth {depth} of a chain, at most {MOST_DEPTH} is allowed")


def _missing(opened: OpenedStore) -> MergePipeError:
    message = f"its base is not at {opened.header.base} any more"
    return NotFoundError.of("input.not-found", opened.root, message, "give it with --base")


def next_base(store: Store, last: Location, length: int) -> Location:
    """The base of the checkpoint after `last` in a chain: `last`, or what its chain begins on once that is long enough.

    `length` is the most stores that are decoded to restore a checkpoint.
    """
    if not is_packed(store, last):
        return last
    header = read_header(store, last).header
    if header.depth + 1 < length:
        return last
    _check_depth(last, header.depth)
    for depth in range(header.depth - 1, -1, -1):
        place = Location.parse(header.base)
        place = place if is_packed(store, place) else last.parent / place.name
        header = read_header(store, place).header
        if header.depth != depth:
            raise corrupt(place, f"is at depth {header.depth} of a chain, {depth} is needed")
        last = place
    return Location.parse(header.base) if header.base else last


# --- the headers of the weight files that a store was packed from ---
# read, and compared with what the store says of them


def read_original_header(store: Store, opened: OpenedStore, number: int) -> bytes:
    """Read the header of weight file `number`, length prefix included, and check it."""
    packed = opened.header.files
    start = sum(file.header_bytes for file in packed[:number])
    where = opened.root / HEADERS_NAME
    content = store.read_metadata(where, start, packed[number].header_bytes)
    if blake3(content).hexdigest(16) != packed[number].header_blake3:
        raise corrupt(where, f"the header of {shown(packed[number].name)} is damaged")
    header = parse_header(content, where, packed[number].size_bytes)
    name = packed[number].name
    of_file = [(stored_name(t.name, name), t.dtype, t.shape) for t in opened.header.tensors if t.file == number]
    if [(entry.name, entry.dtype, entry.shape) for entry in header.entries] != of_file:
        raise corrupt(where, f"the header of {shown(packed[number].name)} has other tensors than the store")
    return content


def check_original_headers(store: Store, opened: OpenedStore) -> None:
    """Check the headers of all weight files. Raises as `read_original_header`."""
    for number in range(len(opened.header.files)):
        read_original_header(store, opened, number)


def original_checkpoint(opened: OpenedStore) -> Checkpoint:
    """Return the tensors as they lay in the original files, which need not be there any more."""
    tensors: dict[str, Readable] = {}
    ends = [file.header_bytes for file in opened.header.files]
    for tensor in opened.header.tensors:
        file, start = opened.root / opened.header.files[tensor.file].name, ends[tensor.file]
        tensors[tensor.name] = TensorEntry(tensor.name, tensor.dtype, tensor.shape, file, start, tensor.nbytes)
        ends[tensor.file] += tensor.nbytes
    return Checkpoint(opened.root, opened.root, MappingProxyType(tensors), (), ())
