"""Read a base and the experts packed relative to it in one pass, and encode them in threads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Readable, TensorEntry
from mergepipe.checkpoints.open_files import decoded, read_elements
from mergepipe.core.blocks import DType, Span
from mergepipe.deltastore.builder import Place, StoreBuilder
from mergepipe.deltastore.codec import encode_block, encode_converted
from mergepipe.deltastore.index import digest, make_row
from mergepipe.deltastore.pieces import BLOCK_ELEMENTS, HEAD_DENSITY, Codec, EncodedBlock, Piece, RawBytes
from mergepipe.kernels.compiled import Floats
from mergepipe.kernels.merge import take_delta
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
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


def sample_of(content: RawBytes, dtype: DType) -> Floats:
    """Sample a tensor that is in memory as a whole, in float32."""
    size = dtype.itemsize
    parts = [content[span.start * size : span.stop * size] for span in sample_spans(len(content) // size)]
    return decoded(np.concatenate(parts), dtype.kernel_code)


def read_sample(tensor: Readable, files: Mapping[Location, RangeFile], purpose: Purpose) -> Floats:
    """Read a sample of a tensor, in float32: of one that is stored at most 256 KiB, in whole pages."""
    parts = [read_elements(tensor, span, files, purpose) for span in sample_spans(tensor.n_elements)]
    return decoded(np.concatenate(parts), tensor.dtype.kernel_code)


def cut_of(base: Floats, expert: Floats, n_elements: int) -> float:
    """Choose the cut of a tensor of so many elements from samples of it and of its base, which has the same dtype."""
    deltas = np.empty_like(expert)
    take_delta(expert, base, len(expert), deltas)
    return choose_cut(deltas, is_sample=len(expert) < n_elements)


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
    ahead: deque[_Ahead] = deque()
    try:
        for group in _groups(builders):
            buffer = pool.take()
            if buffer is None:
                buffer = _finish(ahead.popleft(), on_bytes)
            ahead.append((group, buffer, reader.submit(_read, group, buffer, files, encoders)))
        while ahead:
            _finish(ahead.popleft(), on_bytes)
    finally:
        reader.shutdown(cancel_futures=True)
        encoders.shutdown(cancel_futures=True)


Encoded: TypeAlias = tuple[StoreBuilder, EncodedBlock, NDArray[np.void]]
"""The next block of a store: who writes it, its pieces, its row of the index."""


@dataclass(frozen=True, slots=True)
class _Member:
    """Tensor number `number` of the expert whose store is built by `builder`."""

    builder: StoreBuilder
    number: int

    @property
    def place(self) -> Place:
        return self.builder.job.places[self.number]

    @property
    def n_done(self) -> int:
        """The number of its blocks that the store has."""
        return max(self.builder.n_done - self.place.first_row, 0)


@dataclass(frozen=True, slots=True)
class _Group:
    """Whole blocks of tensors of one name and shape: elements `span`, of the base (if it has it) and of experts."""

    span: Span
    base: Readable | None
    members: tuple[_Member, ...]

    @property
    def nbytes(self) -> int:
        """The experts' bytes."""
        return sum(self.span.n_elements * member.place.entry.dtype.itemsize for member in self.members)

    def encode(self, base: RawBytes | None, experts: Sequence[RawBytes], block: int) -> list[Encoded]:
        """Encode one block of every expert, of the bytes of the group; called from many threads."""
        part = None if base is None or self.base is None else self._part(base, self.base.dtype, block)
        base_digest = None if part is None else digest(part)
        made = []
        for member, content in zip(self.members, experts, strict=True):
            expert = self._part(content, member.place.entry.dtype, block)
            member.builder.show(member.number, block, expert)
            encoded = self._encoded(part, member, expert)
            made.append((member.builder, encoded, make_row(encoded, base_digest, expert)))
        return made

    def _encoded(self, base: RawBytes | None, member: _Member, expert: RawBytes) -> EncodedBlock:
        dtype = member.place.entry.dtype
        if member.place.stays_plain:
            return EncodedBlock(Codec.RAW, {Piece.WHOLE: expert})
        if base is not None and self.base is not None and self.base.dtype is not dtype:
            return encode_converted(base, self.base.dtype, expert, dtype)
        return encode_block(base, expert, dtype, member.builder.cut(member.number))

    def _part(self, content: RawBytes, dtype: DType, block: int) -> RawBytes:
        first = (block * BLOCK_ELEMENTS - self.span.start) * dtype.itemsize
        return content[first : first + BLOCK_ELEMENTS * dtype.itemsize]

    def choose_cuts(
        self, base: RawBytes | None, experts: Sequence[RawBytes], files: Mapping[Location, RangeFile]
    ) -> None:
        """Give the builders the cuts that they lack; what is not in memory as a whole is sampled, the base once."""
        pairs = zip(self.members, experts, strict=True)
        lacking = [(member, content) for member, content in pairs if member.builder.lacks_cut(member.number)]
        if not lacking or base is None or self.base is None:
            return
        base_sample = _sample(self.base, base, files, Purpose.BASE)
        for member, content in lacking:
            entry = member.place.entry
            expert_sample = _sample(entry, content, files, Purpose.ANALYSIS)
            member.builder.set_cut(member.number, cut_of(base_sample, expert_sample, entry.n_elements))


def _sample(entry: Readable, content: RawBytes, files: Mapping[Location, RangeFile], purpose: Purpose) -> Floats:
    if len(content) == entry.n_elements * entry.dtype.itemsize:
        return sample_of(content, entry.dtype)
    return read_sample(entry, files, purpose)


_Ahead = tuple[_Group, NDArray[np.uint8], Future[list[Future[list[Encoded]]]]]
"""A group that is being read into a buffer, or encoded."""


def _finish(ahead: _Ahead, on_bytes: Callable[[int], None]) -> NDArray[np.uint8]:
    """Write the blocks of a group as they are encoded; return its buffer for reuse."""
    group, buffer, read = ahead
    for encoding in read.result():
        for builder, encoded, row in encoding.result():
            builder.append(encoded, row)
    on_bytes(group.nbytes)
    return buffer


def _groups(builders: Sequence[StoreBuilder]) -> Iterator[_Group]:
    """Split the remaining blocks into groups, in the order of all stores: by the tensor's name."""
    sharers: dict[tuple[str, int], list[_Member]] = {}
    for builder in builders:
        for number, place in enumerate(builder.job.places):
            key = id(builder) if place.base is None else id(place.base)  # without a base, shapes may differ
            sharers.setdefault((place.entry.name, key), []).append(_Member(builder, number))
    for _, members in sorted(sharers.items(), key=lambda item: item[0][0]):
        yield from _cut(members)


def _cut(members: Sequence[_Member]) -> Iterator[_Group]:
    """Split the remaining blocks of one tensor into groups, without the experts that have a block already."""
    place = members[0].place
    entries = [member.place.entry for member in members]
    sizes = [BLOCK_ELEMENTS * entry.dtype.itemsize for entry in (*entries, place.base) if entry is not None]
    most = max(1, min(REQUEST_BYTES, GROUP_BYTES // (len(members) + 1)) // max(sizes))
    block = min(member.n_done for member in members)
    while block < place.n_rows:
        later = [member.n_done for member in members if member.n_done > block]
        stop = min(block + most, place.n_rows, *later)
        span = Span(block * BLOCK_ELEMENTS, min(stop * BLOCK_ELEMENTS, place.entry.n_elements))
        yield _Group(span, place.base, tuple(member for member in members if member.n_done <= block))
        block = stop


def _read(
    group: _Group, buffer: NDArray[np.uint8], files: Mapping[Location, RangeFile], encoders: ThreadPoolExecutor
) -> list[Future[list[Encoded]]]:
    """Read a group into `buffer` and start encoding its blocks."""
    base, at, experts = None, 0, []
    if group.base is not None:
        base, at = _fill(group.base, group.span, buffer, at, files, Purpose.BASE)
    for member in group.members:
        content, at = _fill(member.place.entry, group.span, buffer, at, files, Purpose.EXPERT)
        experts.append(content)
    group.choose_cuts(base, experts, files)
    blocks = range(group.span.start // BLOCK_ELEMENTS, -(-group.span.stop // BLOCK_ELEMENTS))
    return [encoders.submit(group.encode, base, experts, block) for block in blocks]


def _fill(
    entry: Readable,
    span: Span,
    buffer: NDArray[np.uint8],
    at: int,
    files: Mapping[Location, RangeFile],
    purpose: Purpose,
) -> tuple[RawBytes, int]:
    """Read elements into the buffer from `at` on; return them, and the offset after them."""
    size = span.n_elements * entry.dtype.itemsize
    if not isinstance(entry, TensorEntry):
        content = buffer[at : at + size]
        entry.opened(files)(span, content, purpose)
        return content, at + round_up(size, PAGE_BYTES)
    file, start = files[entry.file], entry.offset + span.start * entry.dtype.itemsize
    content = read_exact(file, start, start + size, purpose, buffer[at:])
    return content, at + round_up(request_bytes(file, start, start + size), PAGE_BYTES)
