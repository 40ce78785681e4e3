"""Compute where every byte of a snapshot is from its manifest, check the manifest, and read and digest every block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NoReturn, TypeAlias

import numpy as np

from mergepipe.checkpoints.directory import is_contained
from mergepipe.checkpoints.safetensors import MAX_HEADER_BYTES, PREFIX_BYTES
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, DTYPES, BlockGrid, DType, element_count
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import CorruptError, NotFoundError, StorageError
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest, OutputTensor
from mergepipe.snapshots.shards import BLOCKS_NAME, BlockTable, block_digest, block_table_of, count_not_finite
from mergepipe.storage.contract import BESIDE, BLOCK_TABLE_BYTES, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import read_exact, request_bytes, scratch

_HINT = "the manifest is damaged: merge again"
READ_BYTES = 8 << 20


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
    """One block: bytes `[start, stop)` of a file."""

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
                yield PlacedBlock(tensor, index, tensor.offset + span.start * size, tensor.offset + span.stop * size)


def layout_of(manifest: Manifest, where: object, block_elements: int = DEFAULT_BLOCK_ELEMENTS) -> SnapshotLayout:
    """Locate every tensor of a manifest."""

    def refuse(message: str) -> NoReturn:
        raise CorruptError.of("manifest.damaged", where, message, _HINT)

    by_file: dict[str, list[tuple[int, OutputTensor]]] = {file.name: [] for file in manifest.files}
    names = [*by_file, *(sidecar.name for sidecar in manifest.sidecars), BLOCKS_NAME, MANIFEST_NAME]
    is_file = len(manifest.files) + len(manifest.sidecars) == 1  # which then may lie beside the folder of its record
    inside = [name.removeprefix(BESIDE) if is_file else name for name in names]
    if len(set(names)) < len(manifest.files) + len(manifest.sidecars) + 2 or not all(map(is_contained, inside)):
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
    for start in range(0, size if size == size_bytes else 0, READ_BYTES):
        hasher.update(store.read_metadata(path, start, min(READ_BYTES, size - start)))
    return size, hasher.hexdigest(16)


def small_digest(content: bytes) -> str:
    """BLAKE3-128 of a small file, as manifests record it."""
    from blake3 import blake3

    return blake3(content).hexdigest(16)


FEWEST_READERS = 4


@dataclass(slots=True)
class Scan:
    """The digest of every block by tensor index (None if it could not be read).

    `headers` are the digests of the files' headers, `unreadable` the reasons why files could not be read, `not_finite`
    the number of infinities and NaN of each tensor, by name.
    """

    blocks: list[list[bytes | None]]
    headers: list[bytes | None]
    unreadable: dict[str, str] = field(default_factory=dict)
    not_finite: Counter[str] = field(default_factory=Counter)
    n_bytes: int = 0


def scan_snapshot(
    store: Store, directory: Location, layout: SnapshotLayout, threads: int, on_bytes: Callable[[int], None]
) -> Scan:
    """Read and digest all blocks of all files. Memory: about 8 MiB a thread.

    `on_bytes` is called on the calling thread with the bytes read since the last call.
    """
    blocks: list[list[bytes | None]] = [[None] * -(-t.n_elements // layout.block_elements) for t in layout.tensors]
    scan = Scan(blocks, [None] * len(layout.files))
    with ExitStack() as stack, ThreadPoolExecutor(max(FEWEST_READERS, 2 * threads), "mergepipe-scan") as pool:
        for file in layout.files:
            try:
                opened = store.open(directory / file.name, direct=True)
            except (NotFoundError, StorageError) as error:
                scan.unreadable[file.name] = error.problems[0].message
                continue
            stack.callback(opened.close)
            scan.headers[file.index] = _header_digest(store, opened.location, file)
            reads = pool.map(partial(_read_blocks, opened), _runs(layout, file))
            with closing(reads):  # type: ignore[type-var]  # a generator: left early, no other read begins
                for examined in reads:
                    on_bytes(_take(scan, file, examined))
    return scan


def _header_digest(store: Store, path: Location, file: PlacedFile) -> bytes | None:
    if file.data_start > PREFIX_BYTES + MAX_HEADER_BYTES:
        return None
    header = store.read_metadata(path, 0, file.data_start)
    return block_digest(header) if len(header) == file.data_start else None


def _runs(layout: SnapshotLayout, file: PlacedFile) -> Iterator[tuple[PlacedBlock, ...]]:
    """Group blocks that are read together."""
    run: list[PlacedBlock] = []
    for block in layout.blocks(file):
        if run and block.stop - run[0].start > READ_BYTES:
            yield tuple(run)
            run = []
        run.append(block)
    if run:
        yield tuple(run)


_Examined: TypeAlias = tuple[PlacedBlock, bytes | None, int, str]
"""A block, its digest if it is there, how many of its values are not finite, and why it cannot be read, if so."""


def _read_blocks(file: RangeFile, blocks: Sequence[PlacedBlock]) -> list[_Examined]:
    """Read blocks by one request, and digest them."""
    first, last = blocks[0].start, blocks[-1].stop
    try:
        room = scratch("scan", request_bytes(file, first, last), np.uint8)
        read = read_exact(file, first, last, Purpose.ANALYSIS, room)
    except StorageError as error:
        return [(block, None, 0, error.problems[0].message) for block in blocks]
    except CorruptError:  # the file ends before: some of the blocks may be there
        if len(blocks) == 1:
            return [(blocks[0], None, 0, "")]
        return list(chain.from_iterable(_read_blocks(file, [block]) for block in blocks))
    contents = ((block, read[block.start - first : block.stop - first]) for block in blocks)
    return [(block, block_digest(raw.data), count_not_finite(raw, block.tensor.dtype), "") for block, raw in contents]


def _take(scan: Scan, file: PlacedFile, examined: Sequence[_Examined]) -> int:
    """Note what was read of a file; return its bytes."""
    nbytes = 0
    for block, digest, n_not_finite, failure in examined:
        scan.blocks[block.tensor.index][block.index] = digest
        if failure:
            scan.unreadable[file.name] = failure
        else:
            nbytes += block.stop - block.start
        if n_not_finite:
            scan.not_finite[block.tensor.name] += n_not_finite
    scan.n_bytes += nbytes
    return nbytes
