"""Read every block of a snapshot once, sequentially, and compute its digest."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.safetensors import MAX_HEADER_BYTES, PREFIX_BYTES
from mergepipe.core.blocks import BF16, F8_E4M3, F8_E5M2, F16, F32, F64, DType
from mergepipe.errors import CorruptError, NotFoundError, StorageError
from mergepipe.snapshots.block_digests import block_digest
from mergepipe.snapshots.layout import PlacedBlock, PlacedFile, SnapshotLayout
from mergepipe.storage.buffers import PAGE_BYTES, aligned_buffer, round_up
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

READ_BYTES = 8 << 20
FEWEST_READERS = 4
_QUEUED_READS = 64

# Values with all of these bits set are not finite: the exponent's, or all but the sign in formats without infinities.
_NOT_FINITE: dict[DType, int] = {
    F64: 0x7FF0 << 48, F32: 0x7F800000, F16: 0x7C00, BF16: 0x7F80, F8_E4M3: 0x7F, F8_E5M2: 0x7C,
}  # fmt: skip

OnBytes = Callable[[int], None]


@dataclass(slots=True)
class Scan:
    """The digest of every block by tensor index (None if it could not be read).

    `headers` are the digests of the files' headers, `unreadable` the reasons why files could not be read, `not_finite`
    the number of infinities and NaN of each tensor, by name.
    """

    blocks: list[list[bytes | None]]
    headers: list[bytes | None]
    unreadable: dict[str, str] = field(default_factory=dict)
    not_finite: dict[str, int] = field(default_factory=dict)
    n_bytes: int = 0


def scan_snapshot(store: Store, directory: Location, layout: SnapshotLayout, threads: int, on_bytes: OnBytes) -> Scan:
    """Read and digest all blocks of all files. Memory: about 8 MiB a thread.

    `on_bytes` is called on the calling thread with the bytes read since the last call.
    """
    tensors = layout.tensors
    scan = Scan(
        [[None] * -(-tensor.n_elements // layout.block_elements) for tensor in tensors], [None] * len(layout.files)
    )
    workers = max(FEWEST_READERS, 2 * threads)
    with ThreadPoolExecutor(workers, "mergepipe-scan") as pool, contextlib.ExitStack() as stack:
        buffers = _Buffers(_largest_read(layout))
        for file in layout.files:
            opened = _open(store, directory / file.name, scan, file)
            if opened is None:
                continue
            stack.callback(opened.close)
            scan.headers[file.index] = _header_digest(store, opened.location, file)
            reads = _bounded(pool, [_Read(opened, blocks, buffers) for blocks in _runs(layout, file)])
            for read in reads:
                _take(scan, read)
                on_bytes(read.n_bytes)
    return scan


def _open(store: Store, path: Location, scan: Scan, file: PlacedFile) -> RangeFile | None:
    try:
        return store.open(path, direct=True)
    except (NotFoundError, StorageError) as error:
        scan.unreadable[file.name] = error.problems[0].message
        return None


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


def _largest_read(layout: SnapshotLayout) -> int:
    widest = max((tensor.dtype.itemsize for tensor in layout.tensors), default=1)
    return max(READ_BYTES, layout.block_elements * widest) + 2 * PAGE_BYTES


class _Buffers:
    """One page-aligned buffer for each thread."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = round_up(nbytes, PAGE_BYTES)
        self._local = threading.local()

    def take(self) -> NDArray[np.uint8]:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = aligned_buffer(self._nbytes)
        buffer: NDArray[np.uint8] = self._local.buffer
        return buffer


@dataclass(frozen=True, slots=True)
class _Found:
    """The digests of the blocks of one read; unread ones have none."""

    digests: tuple[tuple[PlacedBlock, bytes | None], ...]
    not_finite: Mapping[str, int]
    n_bytes: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Read:
    """One request and its processing, on a thread of the pool."""

    file: RangeFile
    blocks: tuple[PlacedBlock, ...]
    buffers: _Buffers

    def __call__(self) -> _Found:
        first, last = self.blocks[0].start, self.blocks[-1].stop
        try:
            read = read_exact(self.file, first, last, Purpose.ANALYSIS, self.buffers.take())
        except StorageError as error:
            return _Found(tuple((block, None) for block in self.blocks), {}, 0, error.problems[0].message)
        except CorruptError:  # the file ends before: some of the blocks may be there
            return self._missing() if len(self.blocks) == 1 else self._each_alone()
        digests: list[tuple[PlacedBlock, bytes | None]] = []
        not_finite: dict[str, int] = {}
        for block in self.blocks:
            content = read[block.start - first : block.stop - first]
            digests.append((block, block_digest(content.data)))
            count = count_not_finite(content, block.tensor.dtype)
            if count:
                not_finite[block.tensor.name] = not_finite.get(block.tensor.name, 0) + count
        return _Found(tuple(digests), not_finite, last - first)

    def _missing(self) -> _Found:
        nbytes = self.blocks[-1].stop - self.blocks[0].start
        return _Found(tuple((block, None) for block in self.blocks), {}, nbytes)

    def _each_alone(self) -> _Found:
        """Read every block on its own, for a file that ends inside the request for all."""
        alone = [replace(self, blocks=(block,))() for block in self.blocks]
        not_finite: Counter[str] = Counter()
        for read in alone:
            not_finite.update(read.not_finite)
        digests = tuple(pair for read in alone for pair in read.digests)
        failures = [read.failure for read in alone if read.failure]
        return _Found(digests, not_finite, sum(read.n_bytes for read in alone), failures[0] if failures else "")


def _bounded(pool: ThreadPoolExecutor, reads: list[_Read]) -> Iterator[_Found]:
    """Run reads in order, with a bounded number of them waiting."""
    waiting = [pool.submit(read) for read in reads[:_QUEUED_READS]]
    for position in range(len(reads)):
        read = waiting[position].result()
        if len(waiting) < len(reads):
            waiting.append(pool.submit(reads[len(waiting)]))
        yield read


def _take(scan: Scan, read: _Found) -> None:
    scan.n_bytes += read.n_bytes
    for block, digest in read.digests:
        scan.blocks[block.tensor.index][block.index] = digest
        if read.failure:
            scan.unreadable[block.file.name] = read.failure
    for name, count in read.not_finite.items():
        scan.not_finite[name] = scan.not_finite.get(name, 0) + count


def count_not_finite(content: NDArray[np.uint8], dtype: DType) -> int:
    """Count the infinities and NaN among stored values; 0 if they are not floats."""
    mask = _NOT_FINITE.get(dtype)
    if mask is None or not len(content):
        return 0
    bits_N = content.view(np.dtype(f"<u{dtype.itemsize}"))
    exponents_N = bits_N & bits_N.dtype.type(mask)
    return int(np.count_nonzero(exponents_N == mask)) if int(exponents_N.max()) == mask else 0
