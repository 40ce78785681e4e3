"""Read a base and the experts packed relative to it in one pass, and encode them in threads; or estimate sizes."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.core.blocks import BlockGrid, DType, Span
from mergepipe.deltastore.codec.arrays import scratch
from mergepipe.deltastore.codec.block import EncodedBlock, RawBytes, encode_block, encode_converted, raw_block
from mergepipe.deltastore.codec.levels import BANDED_DTYPES, BLOCK_ELEMENTS, HEAD_DENSITY, can_be_base_of
from mergepipe.deltastore.index import digest, make_row
from mergepipe.deltastore.pack.builder import Place, StoreBuilder
from mergepipe.kernels.codec import decode_tile
from mergepipe.kernels.compiled import Floats
from mergepipe.kernels.merge import take_delta
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES, BufferPool, read_exact, request_bytes, round_up

# --- the cut of a tensor, chosen from a sample of its deltas before the pass that encodes it ---

READ_WHOLE_ELEMENTS = 128 * 1024
_STRETCHES = 32
_STRETCH_ELEMENTS = 4096
_MARGIN_DEVIATIONS = 4.0
_SMALLEST = float(np.nextafter(np.float32(0), np.float32(1)))


def sample_spans(n_elements: int) -> tuple[Span, ...]:
    """The spans to sample: all of a small tensor, else spans of equal length at equal distances."""
    if n_elements <= READ_WHOLE_ELEMENTS:
        return (Span(0, n_elements),)
    step = (n_elements - _STRETCH_ELEMENTS) // (_STRETCHES - 1)
    return tuple(Span(i * step, i * step + _STRETCH_ELEMENTS) for i in range(_STRETCHES))


def cut_of(base: Sample, expert: Sample) -> float:
    """Choose the cut of a tensor from samples of it and of its base, which has the same dtype."""
    deltas = scratch("cut-sample", sum(map(len, expert.stretches)) // expert.dtype.itemsize, np.float32)
    start = 0
    for stretch, other in zip(base.stretches, expert.stretches, strict=True):
        stop = start + len(stretch) // expert.dtype.itemsize
        _fill_deltas(stretch, other, expert.dtype, deltas[start:stop])
        start = stop
    return choose_cut(deltas, is_sample=expert.n_elements > READ_WHOLE_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Sample:
    """The bytes at `sample_spans` of a tensor of `n_elements`."""

    dtype: DType
    n_elements: int
    stretches: tuple[RawBytes, ...]


def read_sample(entry: TensorEntry, file: RangeFile, purpose: Purpose) -> Sample:
    """Read a sample of a tensor: at most 256 KiB, in whole pages."""
    spans = sample_spans(entry.n_elements)
    return Sample(
        entry.dtype, entry.n_elements, tuple(read_exact(file, *_byte_range(entry, span), purpose) for span in spans)
    )


def fetch_sample(tensor: ComputedTensor, fetch: Fetch, purpose: Purpose) -> Sample:
    """Take a sample of a tensor that is decoded: the stretches of `sample_spans`, fetched one by one."""
    stretches = []
    for span in sample_spans(tensor.n_elements):
        stretches.append(np.empty(span.n_elements * tensor.dtype.itemsize, np.uint8))
        fetch(span, stretches[-1], purpose)
    return Sample(tensor.dtype, tensor.n_elements, tuple(stretches))


def sample_of(content: RawBytes, dtype: DType) -> Sample:
    """Take the sample of a tensor that is in memory as a whole; it consists of views."""
    size = dtype.itemsize
    n = len(content) // size
    return Sample(dtype, n, tuple(content[span.start * size : span.stop * size] for span in sample_spans(n)))


def choose_cut(deltas: Floats, *, is_sample: bool) -> float:
    """Choose the magnitude that `HEAD_DENSITY` of the deltas (float32, not modified) reach.

    From a sample a lower one, so that most likely that share of the whole tensor reaches it.
    """
    magnitudes = np.abs(deltas[np.isfinite(deltas)])
    n = len(magnitudes)
    if not n:
        return _SMALLEST
    margin = _MARGIN_DEVIATIONS * math.sqrt(HEAD_DENSITY * (1 - HEAD_DENSITY) / n) if is_sample else 0.0
    rank = min(math.ceil((HEAD_DENSITY + margin) * n), n)
    magnitudes.sort()  # at 16 lanes a time faster than a partition
    return max(float(magnitudes[n - rank]), _SMALLEST)


def _byte_range(entry: TensorEntry, span: Span) -> tuple[int, int]:
    start = entry.offset + span.start * entry.dtype.itemsize
    return start, start + span.n_elements * entry.dtype.itemsize


def _fill_deltas(base: RawBytes, expert: RawBytes, dtype: DType, deltas: Floats) -> None:
    n = len(deltas)
    base_values, expert_values = (scratch(f"cut-{name}", n, np.float32) for name in ("base", "expert"))
    decode_tile(base, 0, dtype.kernel_code, n, base_values)
    decode_tile(expert, 0, dtype.kernel_code, n, expert_values)
    take_delta(expert_values, base_values, n, deltas)


# --- blocks of a base and of the experts packed relative to it, together in memory, and their encoding ---


@dataclass(frozen=True, slots=True)
class Member:
    """Bytes of tensor number `number` of one expert, whose store is built by `builder`."""

    builder: StoreBuilder
    number: int
    content: RawBytes

    @property
    def place(self) -> Place:
        return self.builder.job.places[self.number]

    @property
    def entry(self) -> TensorEntry:
        return self.place.entry


Encoded: TypeAlias = tuple[StoreBuilder, EncodedBlock, NDArray[np.void]]
"""The next block of a store: who writes it, its pieces, its row of the index."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The elements `span` of tensors of the same name and shape: the base's bytes and those of each expert.

    `span` begins and ends at block boundaries. Without a base both are None.
    """

    span: Span
    base_entry: Readable | None
    base: RawBytes | None
    members: tuple[Member, ...]

    @property
    def blocks(self) -> range:
        """The numbers of the blocks in it."""
        return range(self.span.start // BLOCK_ELEMENTS, -(-self.span.stop // BLOCK_ELEMENTS))

    def encode(self, block: int) -> list[Encoded]:
        """Encode one block of every expert; called from many threads."""
        base = None
        if self.base is not None and self.base_entry is not None:
            base = self._part(self.base, self.base_entry, block)
        base_digest = None if base is None else digest(base)
        made = []
        for member in self.members:
            content = self._part(member.content, member.entry, block)
            member.builder.show(member.number, block, content)
            encoded = self._encoded(base, member, content)
            made.append((member.builder, encoded, make_row(encoded, base_digest, content)))
        return made

    def _encoded(self, base: RawBytes | None, member: Member, content: RawBytes) -> EncodedBlock:
        dtype = member.entry.dtype
        if member.place.stays_plain:
            return raw_block(content)
        if base is not None and self.base_entry is not None and self.base_entry.dtype is not dtype:
            return encode_converted(base, self.base_entry.dtype, content, dtype)
        return encode_block(base, content, dtype, member.builder.cut(member.number))

    def _part(self, content: RawBytes, entry: Readable, block: int) -> RawBytes:
        block_span = BlockGrid(entry.n_elements, BLOCK_ELEMENTS).span(block)
        first, size = self.span.start, entry.dtype.itemsize
        return content[(block_span.start - first) * size : (block_span.stop - first) * size]


class CutChooser:
    """Chooses the cuts of tensors before their first blocks are encoded. Safe to use from many threads.

    Tensors that are not in memory as a whole are sampled from `files`, the base's tensor once for all experts.
    """

    def __init__(self, files: Mapping[Location, RangeFile]) -> None:
        self._files = files
        self._lock = threading.Lock()

    def choose(self, blocks: BlockGroup) -> None:
        """Make sure that the builders of a `BlockGroup` have the cuts of their tensors."""
        with self._lock:
            lacking = [member for member in blocks.members if member.builder.lacks_cut(member.number)]
            if not lacking or blocks.base_entry is None or blocks.base is None:
                return
            base = self._sample(blocks.base_entry, blocks.base, Purpose.BASE)
            for member in lacking:
                expert = self._sample(member.entry, member.content, Purpose.ANALYSIS)
                member.builder.set_cut(member.number, cut_of(base, expert))

    def _sample(self, entry: Readable, content: RawBytes, purpose: Purpose) -> Sample:
        if len(content) == entry.n_elements * entry.dtype.itemsize:
            return sample_of(content, entry.dtype)
        if isinstance(entry, TensorEntry):
            return read_sample(entry, self._files[entry.file], purpose)
        return fetch_sample(entry, entry.opened(self._files), purpose)


def block_bytes(entry: Readable) -> int:
    """The size of a whole block of a tensor."""
    return BLOCK_ELEMENTS * entry.dtype.itemsize


# --- read a base and the experts packed relative to it in one pass, and encode them in threads ---


EXPERTS_AT_ONCE = 8
REQUEST_BYTES = 4 << 20
GROUP_BYTES = 32 << 20
GROUPS_AHEAD = 3
MEMORY_BYTES = GROUPS_AHEAD * (GROUP_BYTES + 2 * PAGE_BYTES * (EXPERTS_AT_ONCE + 1))


def pack_all(
    builders: Sequence[StoreBuilder], files: Mapping[Location, RangeFile], threads: int, on_bytes: Callable[[int], None]
) -> None:
    """Read the remaining blocks of all experts and their base, each once; encode them.

    A group of blocks of the base is read with the same blocks of all experts, while earlier groups are encoded in
    `threads` threads; this one writes them, in the order of all stores: by name. `on_bytes` is called on it with the
    experts' bytes that are done.

    Memory: `MEMORY_BYTES` (100 MiB) for reading, for at most `EXPERTS_AT_ONCE` experts, and as much for what is encoded
    of that; some 6 MiB per thread; what the builders state.
    """
    pool = BufferPool(MEMORY_BYTES // GROUPS_AHEAD, MEMORY_BYTES)
    encoders = ThreadPoolExecutor(threads, "mergepipe-encode")
    reader = ThreadPoolExecutor(1, "mergepipe-read")
    task = _Reader(files, encoders)
    ahead: deque[_Ahead] = deque()
    try:
        for group in _groups(builders):
            buffer = pool.take()
            if buffer is None:
                buffer = _finish(ahead.popleft(), on_bytes)
            ahead.append(_Ahead(group, buffer, reader.submit(task.read, group, buffer)))
        while ahead:
            _finish(ahead.popleft(), on_bytes)
    finally:
        reader.shutdown(cancel_futures=True)
        encoders.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Group:
    """Elements of one tensor that are read together, of the base (if it has it) and of experts."""

    span: Span
    base: Readable | None
    members: tuple[tuple[StoreBuilder, int, TensorEntry], ...]

    @property
    def nbytes(self) -> int:
        """The experts' bytes."""
        return sum(self.span.n_elements * entry.dtype.itemsize for _, _, entry in self.members)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A group that is being read or encoded."""

    group: _Group
    buffer: NDArray[np.uint8]
    read: Future[list[Future[list[Encoded]]]]


def _finish(ahead: _Ahead, on_bytes: Callable[[int], None]) -> NDArray[np.uint8]:
    """Write the blocks of a group as they are encoded; return its buffer for reuse."""
    for encoding in ahead.read.result():
        for builder, encoded, row in encoding.result():
            builder.append(encoded, row)
    on_bytes(ahead.group.nbytes)
    return ahead.buffer


def _groups(builders: Sequence[StoreBuilder]) -> Iterator[_Group]:
    """Split the remaining blocks into groups, in the order of all stores: by the tensor's name."""
    by_name: dict[str, list[tuple[StoreBuilder, int]]] = {}
    for builder in builders:
        for number, place in enumerate(builder.job.places):
            by_name.setdefault(place.entry.name, []).append((builder, number))
    for _, tensors in sorted(by_name.items()):
        by_base: dict[int | None, list[tuple[StoreBuilder, int]]] = {}
        for builder, number in tensors:
            base = builder.job.places[number].base
            key = id(builder) if base is None else id(base)  # without a base, shapes may differ
            by_base.setdefault(key, []).append((builder, number))
        for sharers in by_base.values():
            yield from _cut(sharers)


def _cut(tensors: Sequence[tuple[StoreBuilder, int]]) -> Iterator[_Group]:
    """Split the remaining blocks of one tensor into groups, without the experts that have a block already."""
    builder, number = tensors[0]
    place = builder.job.places[number]
    entry = place.entry
    first_blocks = [max(builder.n_done - builder.job.places[n].first_row, 0) for builder, n in tensors]
    entries: list[Readable] = [builder.job.places[n].entry for builder, n in tensors]
    entries += [] if place.base is None else [place.base]
    most = max(1, min(REQUEST_BYTES, GROUP_BYTES // (len(tensors) + 1)) // max(map(block_bytes, entries)))
    block = min(first_blocks)
    while block < place.n_rows:
        later = [start for start in first_blocks if start > block]
        stop = min(block + most, place.n_rows, *later)
        members = tuple(
            (builder, n, builder.job.places[n].entry)
            for (builder, n), start in zip(tensors, first_blocks, strict=True)
            if start <= block
        )
        span = Span(block * BLOCK_ELEMENTS, min(stop * BLOCK_ELEMENTS, entry.n_elements))
        yield _Group(span, place.base, members)
        block = stop


class _Reader:
    """Reads groups and submits their blocks for encoding."""

    def __init__(self, files: Mapping[Location, RangeFile], encoders: ThreadPoolExecutor) -> None:
        self._files = files
        self._encoders = encoders
        self._cuts = CutChooser(files)

    def read(self, group: _Group, buffer: NDArray[np.uint8]) -> list[Future[list[Encoded]]]:
        """Read a group into `buffer` and start encoding its blocks."""
        base = None
        at = 0
        if group.base is not None:
            base, at = self._fill(group.base, group.span, buffer, at, Purpose.BASE)
        members = []
        for builder, number, entry in group.members:
            content, at = self._fill(entry, group.span, buffer, at, Purpose.EXPERT)
            members.append(Member(builder, number, content))
        blocks = BlockGroup(group.span, group.base, base, tuple(members))
        self._cuts.choose(blocks)
        return [self._encoders.submit(blocks.encode, block) for block in blocks.blocks]

    def _fill(
        self, entry: Readable, span: Span, buffer: NDArray[np.uint8], at: int, purpose: Purpose
    ) -> tuple[RawBytes, int]:
        """Read elements into the buffer from `at` on; return them, and the offset after them."""
        if not isinstance(entry, TensorEntry):
            size = span.n_elements * entry.dtype.itemsize
            content = buffer[at : at + size]
            entry.opened(self._files)(span, content, purpose)
            return content, at + round_up(size, PAGE_BYTES)
        file = self._files[entry.file]
        start = entry.offset + span.start * entry.dtype.itemsize
        stop = start + span.n_elements * entry.dtype.itemsize
        content = read_exact(file, start, stop, purpose, buffer[at:])
        return content, at + round_up(request_bytes(file, start, stop), PAGE_BYTES)


# --- estimate what a pack of an expert would take, from blocks of it that are encoded and not written ---


SAMPLED_BLOCKS = 32


def estimate_packed_bytes(
    base: Checkpoint, expert: Checkpoint, files: Mapping[Location, RangeFile], purpose: Purpose
) -> int | None:
    """Estimate the bytes of the tensors in a pack on `base`; None for what is not packed.

    Encodes `SAMPLED_BLOCKS` blocks as `pack` does, at equal distances over the bytes of all tensors, and extrapolates.
    Reads at most 1 MiB and a few pages for each block of two bytes an element: 32 MiB; a tensor's sample for its cut
    once.
    """
    names = sorted(name for name, tensor in expert.tensors.items() if tensor.n_elements)
    entries = [entry for name in names if isinstance(entry := expert.tensors[name], TensorEntry)]
    ends = list(accumulate(entry.nbytes for entry in entries))
    if len(entries) < len(names) or not ends:
        return None
    drawn: Counter[tuple[int, int]] = Counter()  # a small model's blocks are drawn several times, and read once
    for number in range(SAMPLED_BLOCKS):
        at = ends[-1] * (2 * number + 1) // (2 * SAMPLED_BLOCKS)
        place = bisect_right(ends, at)
        entry = entries[place]
        element = (at - (ends[place] - entry.nbytes)) // entry.dtype.itemsize
        drawn[place, element // BLOCK_ELEMENTS] += 1
    sampled_bytes = encoded_bytes = 0

    @cache
    def cut(place: int) -> float | None:
        entry = entries[place]
        other = base.tensors[entry.name]
        if entry.dtype not in BANDED_DTYPES or not isinstance(other, TensorEntry):
            return None
        return cut_of(*(read_sample(tensor, files[tensor.file], purpose) for tensor in (other, entry)))

    for (place, block), times in drawn.items():
        entry = entries[place]
        span = BlockGrid(entry.n_elements, BLOCK_ELEMENTS).span(block)
        content = _read(entry, span, files, purpose)
        sampled_bytes += times * len(content)
        encoded_bytes += times * _encoded_bytes(
            base, entry, content, partial(_read, span=span, files=files, purpose=purpose), partial(cut, place)
        )
    return round(encoded_bytes / sampled_bytes * ends[-1])


def _encoded_bytes(
    base: Checkpoint,
    entry: TensorEntry,
    content: RawBytes,
    read: Callable[[TensorEntry], RawBytes],
    cut: Callable[[], float | None],
) -> int:
    """The bytes of a block of `entry`; `read` reads the same elements of another tensor."""
    other = base.tensors.get(entry.name)
    is_base = isinstance(other, TensorEntry) and other.shape == entry.shape and can_be_base_of(other.dtype, entry.dtype)
    if not is_base or not isinstance(other, TensorEntry):
        return encode_block(None, content, entry.dtype, None).nbytes
    if other.dtype is not entry.dtype:
        return encode_converted(read(other), other.dtype, content, entry.dtype).nbytes
    return encode_block(read(other), content, entry.dtype, cut()).nbytes


def _read(entry: TensorEntry, span: Span, files: Mapping[Location, RangeFile], purpose: Purpose) -> RawBytes:
    start = entry.offset + span.start * entry.dtype.itemsize
    return read_exact(files[entry.file], start, start + span.n_elements * entry.dtype.itemsize, purpose)
