"""Packed tensors as merges read them: encoded blocks, decoded with the base's bytes, and tensors kept as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import (
    NO_TURNS,
    BaseBytes,
    ComputedTensor,
    Fetch,
    FetchOnBase,
    LeveledTensor,
    TensorEntry,
    Turns,
    range_cost_bytes,
)
from mergepipe.checkpoints.open_files import read_span
from mergepipe.core.blocks import DTYPES, F32, BlockGrid, DType, Span
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.codec import BlockContext, decode_block, decode_deltas
from mergepipe.deltastore.index import StoreIndex, StoreIndexReader
from mergepipe.deltastore.pieces import BLOCK_ELEMENTS, LADDERS, PIECES_OF, Codec, Level, Piece, RawBytes, corrupt
from mergepipe.errors import MismatchError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import PAGE_BYTES, read_exact, request_bytes, round_up, scratch

# --- a tensor that a store holds unencoded because the base lacks it: one byte range, located by the index ---


@dataclass(frozen=True, slots=True)
class PlainTensor(ComputedTensor):
    """One tensor of a store that the base lacks; the index is read when its offset is first needed."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    root: Location
    index_reader: StoreIndexReader
    first_row: int

    is_delta = False

    @property
    def nbytes(self) -> int:
        return self.n_elements * self.dtype.itemsize

    @property
    def files(self) -> frozenset[Location]:
        return frozenset({self.index_reader.path_of(Piece.WHOLE)})

    def entry(self) -> TensorEntry:
        """Locate the tensor."""
        stop = self.first_row + BlockGrid(self.n_elements, BLOCK_ELEMENTS).n_blocks
        index = self.index_reader.index
        if any(index.codec(row) is not Codec.RAW for row in range(self.first_row, stop)):
            raise corrupt(self.root, f"tensor {shown(self.name)} has no base but is encoded")
        first, last = index.piece_range(Piece.WHOLE, self.first_row, stop)
        if last - first != self.nbytes:
            raise corrupt(self.root, f"tensor {shown(self.name)} has {last - first} bytes, {self.nbytes} are needed")
        file = self.index_reader.path_of(Piece.WHOLE)
        granularity = self.index_reader.granularity_bytes
        return TensorEntry(self.name, self.dtype, self.shape, file, first, self.nbytes, granularity_bytes=granularity)

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (self.entry(),)

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to fetch `span` on its own, in whole pages."""
        return self.entry().cost_bytes(span)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Make the fetch over open files; it keeps no bytes."""
        entry = self.entry()

        def fetch(span: Span, out: RawBytes, purpose: Purpose) -> None:
            out[:] = read_span(entry, span, files, purpose)

        return fetch


# --- encoded tensors as merges read them: fetch the pieces of blocks and decode them, with the base's bytes if any ---


GROUP_BLOCKS = 16
"""Blocks whose pieces are read at once: at most 16 MiB of pieces and of decoded elements."""
_BYTE = DTYPES["U8"]


@dataclass(frozen=True, slots=True)
class EncodedTensor(ComputedTensor):
    """One tensor of a delta store, decoded block by block; of this class, one that its base lacks.

    Memory while fetching: the pieces and the elements of `GROUP_BLOCKS` blocks.
    """

    name: str
    stored_dtype: DType = field()  # over the property of all tensors
    shape: tuple[int, ...]
    root: Location
    index_reader: StoreIndexReader
    first_row: int

    @property
    def base(self) -> TensorEntry | None:
        return None

    @property
    def level(self) -> Level:
        return Level.LOSSLESS

    @property
    def is_delta(self) -> bool:
        return self.level is not Level.LOSSLESS

    @property
    def dtype(self) -> DType:
        return F32 if self.is_delta else self.stored_dtype

    @property
    def index(self) -> StoreIndex:
        """The store's index, read when it is first needed."""
        return self.index_reader.index

    @property
    def files(self) -> frozenset[Location]:
        return self.index_reader.files

    @property
    def n_blocks(self) -> int:
        return BlockGrid(self.n_elements, BLOCK_ELEMENTS).n_blocks

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The byte ranges of the store's files that the level reads; the base's file is not included."""
        entries = []
        step = self.index_reader.granularity_bytes
        for piece in PIECES_OF[self.level]:
            start, stop = self.index.piece_range(piece, self.first_row, self.first_row + self.n_blocks)
            if stop > start:
                size, path = stop - start, self.index_reader.path_of(piece)
                entries.append(TensorEntry(self.name, _BYTE, (size,), path, start, size, granularity_bytes=step))
        return tuple(entries)

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to fetch `span` on its own, in whole pages, without the base's."""
        step = self.index_reader.granularity_bytes
        return sum(
            range_cost_bytes(*self.index.piece_range(piece, self.first_row + first, self.first_row + stop), step)
            for first, stop in block_groups(span)
            for piece in PIECES_OF[self.level]
        )

    def opened(self, files: Mapping[Location, RangeFile]) -> PackedFetch:
        """Make the fetch over open files; it keeps nothing between calls."""
        return PackedFetch(self, files)

    def block_span(self, block: int) -> Span:
        return BlockGrid(self.n_elements, BLOCK_ELEMENTS).span(block)


@dataclass(frozen=True, slots=True)
class PackedTensor(EncodedTensor, LeveledTensor):
    """One tensor of a delta store at a level: the expert's tensor at LOSSLESS, float32 deltas below."""

    base: TensorEntry = field()
    level: Level = Level.LOSSLESS
    others: dict[Level, PackedTensor] = field(default_factory=dict, repr=False, compare=False)

    cut_elements = BLOCK_ELEMENTS
    last_level = Level.LOSSLESS

    @property
    def encoded_on(self) -> TensorEntry:
        return self.base

    def at_level(self, level: int) -> PackedTensor:
        """The same tensor read at another level; the same object for the same level."""
        wanted = Level(level)
        return self if wanted is self.level else self.others.setdefault(wanted, replace(self, level=wanted))

    def exact_level(self, n_kept: int) -> Level:
        """See `LeveledTensor`; LOSSLESS where a lower level saves nothing."""
        is_exact = n_kept <= self.head_elements and self.at_level(Level.HEAD).nbytes < self.nbytes
        return Level.HEAD if is_exact else Level.LOSSLESS

    def ladder(self, top: int) -> tuple[Level, ...]:
        """See `LeveledTensor`."""
        return LADDERS[Level(top)]

    def level_costs_bytes(self, level: int, stretches: int) -> NDArray[np.int64]:
        """`cost_bytes` at a level of each run of `stretches` blocks."""
        first_B = np.arange(0, self.n_blocks, stretches)
        if GROUP_BLOCKS % stretches:  # groups end inside these runs
            first_B = np.arange(self.n_blocks)
        last_B = np.append(first_B[1:], self.n_blocks)
        cost_B = np.zeros(len(first_B), np.int64)
        step = self.index_reader.granularity_bytes
        for piece in PIECES_OF[Level(level)]:
            start_B = self.index.offsets_PR[piece, self.first_row + first_B]
            stop_B = self.index.offsets_PR[piece, self.first_row + last_B]
            steps_B = -(-stop_B // step) - start_B // step
            cost_B += np.where(stop_B > start_B, steps_B, 0) * step
        if len(cost_B) == -(-self.n_blocks // stretches):
            return cost_B
        return np.add.reduceat(cost_B, np.arange(0, self.n_blocks, stretches))

    def squared_errors(self, level: int) -> NDArray[np.float64]:
        """The squared error of the delta at `level`, by block (float64)."""
        return self.index.errors(Level(level), self.first_row, self.first_row + self.n_blocks)

    @property
    def head_elements(self) -> int:
        """Elements with their deltas in HEAD, which are the largest: the density up to which HEAD is exact."""
        return int(self.index.rows["count"][self.first_row : self.first_row + self.n_blocks].sum())

    def opened_on_base(self, files: Mapping[Location, RangeFile], turns: Turns = NO_TURNS) -> FetchOnBase:
        """Open a tensor like `opened`, for callers that have the base's bytes."""
        return PackedFetch(self, files, turns).with_base


def block_groups(span: Span) -> Iterator[tuple[int, int]]:
    """Split `span` into ranges of blocks `[first, stop)` that are read together, at multiples of `GROUP_BLOCKS`."""
    first, last = span.start // BLOCK_ELEMENTS, -(-span.stop // BLOCK_ELEMENTS)
    while first < last:
        stop = min(last, (first // GROUP_BLOCKS + 1) * GROUP_BLOCKS)
        yield first, stop
        first = stop


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks `[first, stop)` whose pieces were read together: their offsets in files, where `room` has the first."""

    first: int
    stop: int
    offsets: Mapping[Piece, list[int]]
    places: Mapping[Piece, int]
    room: RawBytes

    def content(self, piece: Piece, first: int, stop: int) -> RawBytes:
        """The bytes of a piece of blocks `[first, stop)`, side by side; empty if they have none."""
        offsets = self.offsets[piece]
        shift = self.places[piece] - offsets[0]
        return self.room[offsets[first - self.first] + shift : offsets[stop - self.first] + shift]


@dataclass(frozen=True, slots=True)
class _Base:
    """The base's bytes of the elements `span`."""

    span: Span
    content: BaseBytes


class PackedFetch:
    """Fetches spans of one packed tensor. Safe to call from many threads."""

    def __init__(self, tensor: EncodedTensor, files: Mapping[Location, RangeFile], turns: Turns = NO_TURNS) -> None:
        self._tensor = tensor
        self._index = tensor.index
        self._files = files
        self._turns = turns

    def __call__(self, span: Span, out: RawBytes, purpose: Purpose) -> None:
        """Write the elements of `span`; the base's bytes are read from its file, charged to the base."""
        self._fetch(span, None, out, purpose, is_checked=True)

    def with_base(self, span: Span, base: BaseBytes, out: RawBytes, purpose: Purpose) -> None:
        """Write the elements of `span`; `base` holds the base's bytes of it.

        Blocks that `span` contains in part are completed from the base's file.
        """
        self._fetch(span, base, out, purpose, is_checked=True)

    def unchecked(self, span: Span, out: RawBytes, purpose: Purpose) -> None:
        """Write the elements of `span` without comparing digests, for callers that compare those of the result."""
        self._fetch(span, None, out, purpose, is_checked=False)

    def _fetch(self, span: Span, base: BaseBytes | None, out: RawBytes, purpose: Purpose, *, is_checked: bool) -> None:
        row = self._tensor.first_row
        for first, stop in block_groups(span):
            group = self._read_group(first, stop, purpose)
            group_base = self._read_base(first, stop) if base is None else _Base(span, base)
            with self._turns:
                for piece, offsets in group.offsets.items() if is_checked else ():
                    content = group.content(piece, first, stop)
                    self._index.check_pieces(piece, row + first, offsets, content, lambda at: self._where(at - row))
                for block in range(first, stop):
                    block_base = self._base_of(block, group_base, is_checked=is_checked)
                    self._decode(block, block_base, group, span, out)

    def _read_group(self, first: int, stop: int, purpose: Purpose) -> _Group:
        """Read the pieces of some blocks, one request per piece, into a scratch array of this thread."""
        pieces, row = PIECES_OF[self._tensor.level], self._tensor.first_row
        offsets = {piece: self._index.offsets_PR[piece, row + first : row + stop + 1].tolist() for piece in pieces}
        some = [piece for piece in pieces if offsets[piece][0] < offsets[piece][-1]]
        files = {piece: self._files[self._tensor.index_reader.path_of(piece)] for piece in some}
        sizes = {piece: _room_bytes(file, offsets[piece][0], offsets[piece][-1]) for piece, file in files.items()}
        room = scratch("read", sum(sizes.values()), np.uint8)
        places, at = dict.fromkeys(pieces, 0), 0
        for piece, file in files.items():
            begin, end = offsets[piece][0], offsets[piece][-1]
            read_exact(file, begin, end, purpose, room[at : at + sizes[piece]])
            places[piece] = at + begin % file.alignment
            at += sizes[piece]
        return _Group(first, stop, offsets, places, room)

    def _read_base(self, first: int, stop: int) -> _Base | None:
        """Read the base's bytes of blocks `[first, stop)` from its file; None without a base."""
        entry = self._tensor.base
        if entry is None:
            return None
        span = Span(self._tensor.block_span(first).start, self._tensor.block_span(stop - 1).stop)
        file, place = self._files[entry.file], entry.offset + span.start * entry.dtype.itemsize
        end = place + span.n_elements * entry.dtype.itemsize
        room = scratch("base-blocks", _room_bytes(file, place, end), np.uint8)
        return _Base(span, BaseBytes(read_exact(file, place, end, Purpose.BASE, room)))

    def _base_of(self, block: int, base: _Base | None, *, is_checked: bool) -> RawBytes | None:
        """Return the base's bytes of a block after checking their digest; None without a base."""
        entry, span = self._tensor.base, self._tensor.block_span(block)
        if base is not None and (span.start < base.span.start or base.span.stop < span.stop):
            base = self._read_base(block, block + 1)
        if entry is None or base is None:
            return None
        start, stop = ((at - base.span.start) * entry.dtype.itemsize for at in (span.start, span.stop))
        expected = self._index.rows["base"][self._tensor.first_row + block].tobytes()
        if is_checked and base.content.digest(start, stop) != expected:
            message = f"the base {entry.file} is not the one the store was packed with"
            hint = "give the base that it was packed with"
            raise MismatchError.of("base.mismatch", self._where(block), message, hint)
        return base.content.stored[start:stop]

    def _where(self, block: int) -> str:
        return f"{self._tensor.root}: tensor {self._tensor.name!r}, block {block}"

    def _decode(self, block: int, base: RawBytes | None, group: _Group, span: Span, out: RawBytes) -> None:
        """Decode a block into its place in the buffer of a span, through a copy where that has a part of it alone."""
        tensor, where, own = self._tensor, self._where(block), self._tensor.block_span(block)
        itemsize = F32.itemsize if tensor.is_delta else tensor.stored_dtype.itemsize
        low, high = max(own.start, span.start), min(own.stop, span.stop)
        place = out[(low - span.start) * itemsize : (high - span.start) * itemsize]
        is_whole = high - low == own.n_elements
        view = place if is_whole else scratch("whole", own.n_elements * itemsize, np.uint8)
        pieces = {piece: group.content(piece, block, block + 1) for piece in group.offsets}
        base_dtype = None if tensor.base is None else tensor.base.dtype
        context = BlockContext(base, tensor.stored_dtype, where, base_dtype)
        codec = self._index.codec(tensor.first_row + block)
        if tensor.is_delta:
            decode_deltas(codec, tensor.level, pieces, context, view.view(np.float32))
        else:
            decode_block(codec, pieces, context, view)
        if not is_whole:
            place[:] = view[(low - own.start) * itemsize : (high - own.start) * itemsize]


def _room_bytes(file: RangeFile, start: int, stop: int) -> int:
    """Room for a range in whole pages, so that the next one begins on a page."""
    return round_up(request_bytes(file, start, stop), PAGE_BYTES)
