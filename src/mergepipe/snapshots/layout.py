"""Compute where every byte of a snapshot is, from its manifest, and check the manifest for consistency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mergepipe.checkpoints.directory import is_contained
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, DTYPES, BlockGrid, DType, element_count
from mergepipe.core.canonical_json import digest_of
from mergepipe.errors import CorruptError
from mergepipe.snapshots.block_digests import BLOCKS_NAME, BlockTable, block_table_of
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest, OutputTensor
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import BLOCK_TABLE_BYTES
from mergepipe.storage.location import Location

_HINT = "the manifest is damaged: merge again"
_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor: its index in the manifest, and the position of its bytes in its file."""

    index: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    root: str
    offset: int

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def nbytes(self) -> int:
        return self.n_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """One weight file: its header up to `data_start`, then its tensors without holes."""

    index: int
    name: str
    size_bytes: int
    data_start: int
    tensors: tuple[PlacedTensor, ...]


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """One block: bytes `[start, stop)` of its file."""

    file: PlacedFile
    tensor: PlacedTensor
    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SnapshotLayout:
    """All weight files of a snapshot.

    Law: the blocks of a file, in order, tile its bytes from `data_start` on.
    """

    files: tuple[PlacedFile, ...]
    block_elements: int

    @property
    def tensors(self) -> tuple[PlacedTensor, ...]:
        """All tensors in the manifest's order."""
        return tuple(sorted((t for file in self.files for t in file.tensors), key=lambda tensor: tensor.index))

    def blocks(self, file: PlacedFile) -> Iterator[PlacedBlock]:
        """The blocks of one file in order."""
        for tensor in file.tensors:
            size = tensor.dtype.itemsize
            for index, span in enumerate(BlockGrid(tensor.n_elements, self.block_elements).spans()):
                yield PlacedBlock(
                    file, tensor, index, tensor.offset + span.start * size, tensor.offset + span.stop * size
                )


def layout_of(manifest: Manifest, where: object, block_elements: int = DEFAULT_BLOCK_ELEMENTS) -> SnapshotLayout:
    """Locate every tensor of a manifest."""

    def refuse(message: str) -> NoReturn:
        raise CorruptError.of("manifest.damaged", where, message, _HINT)

    by_file: dict[str, list[tuple[int, OutputTensor]]] = {file.name: [] for file in manifest.files}
    names = [*by_file, *(sidecar.name for sidecar in manifest.sidecars), BLOCKS_NAME, MANIFEST_NAME]
    if len(set(names)) < len(manifest.files) + len(manifest.sidecars) + 2 or not all(map(is_contained, names)):
        refuse("a file is listed twice, or is outside of the snapshot")
    if len({tensor.name for tensor in manifest.tensors}) < len(manifest.tensors):
        refuse("a tensor is listed twice")
    for index, tensor in enumerate(manifest.tensors):
        if tensor.file not in by_file or tensor.dtype not in DTYPES:
            refuse(f"'{tensor.name}' is {tensor.dtype} in {tensor.file}")
        by_file[tensor.file].append((index, tensor))
    files = []
    for number, record in enumerate(manifest.files):
        placed_tensors = by_file[record.name]
        rows = [[t.name, t.dtype, list(t.shape), t.blake3] for _, t in placed_tensors]
        if digest_of(rows) != record.blake3:
            refuse(f"the digest of {record.name} is not that of its tensors")
        file = _placed(number, record.name, record.size_bytes, placed_tensors)
        if file.data_start < 0:
            refuse(f"{record.name} has {record.size_bytes} bytes, its tensors {record.size_bytes - file.data_start}")
        files.append(file)
    return SnapshotLayout(tuple(files), block_elements)


def _placed(number: int, name: str, size_bytes: int, placed_tensors: Sequence[tuple[int, OutputTensor]]) -> PlacedFile:
    sizes = [element_count(t.shape) * DTYPES[t.dtype].itemsize for _, t in placed_tensors]
    data_start = offset = size_bytes - sum(sizes)
    tensors = []
    for (index, tensor), nbytes in zip(placed_tensors, sizes, strict=True):
        tensors.append(PlacedTensor(index, tensor.name, DTYPES[tensor.dtype], tensor.shape, tensor.blake3, offset))
        offset += nbytes
    return PlacedFile(number, name, size_bytes, data_start, tuple(tensors))


def read_table(store: Store, directory: Location, manifest: Manifest) -> BlockTable:
    """Read the digests of all blocks."""
    record = manifest.blocks
    path = directory / record.name
    raw = read_small_file(store, path, record.size_bytes)
    table = block_table_of(raw, path, len(manifest.files), [element_count(t.shape) for t in manifest.tensors])
    if small_digest(raw) != record.blake3:
        hint = "`mergepipe repair` makes it again"
        raise CorruptError.of("manifest.damaged", path, "its digest is not the manifest's", hint)
    return table


def read_small_file(store: Store, path: Location, size_bytes: int) -> bytes:
    """Read a file of a snapshot that should have `size_bytes`. Raises as `Store.read_small` does."""
    return store.read_small(path, min(size_bytes, BLOCK_TABLE_BYTES))


def file_digest(store: Store, path: Location, size_bytes: int) -> tuple[int, str]:
    """Size and BLAKE3-128 of a file in 8 MiB of memory; of another size than `size_bytes` it is not read."""
    from blake3 import blake3

    hasher, size = blake3(), store.size_bytes(path)
    for start in range(0, size if size == size_bytes else 0, _READ_BYTES):
        hasher.update(store.read_metadata(path, start, min(_READ_BYTES, size - start)))
    return size, hasher.hexdigest(16)


def small_digest(content: bytes) -> str:
    """BLAKE3-128 of a small file, as manifests record it."""
    from blake3 import blake3

    return blake3(content).hexdigest(16)


def weight_map(manifest: Manifest) -> Mapping[str, str]:
    """Map each tensor to its file."""
    return {tensor.name: tensor.file for tensor in manifest.tensors}
