"""A packed tensor as a merge reads it: blocks fetched piece by piece, decoded beside the base's bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.blocks import DELTA_FLAG, DTYPES, F32, BlockGrid, DType, Span, element_count
from mergepipe.budget import Purpose
from mergepipe.cost import range_cost_bytes
from mergepipe.deltastore.bands import Bands
from mergepipe.deltastore.block import BlockContext, RawBytes, decode_block, decode_deltas
from mergepipe.deltastore.header import PIECE_NAMES
from mergepipe.deltastore.index import StoreIndex, digest
from mergepipe.deltastore.levels import BLOCK_ELEMENTS, EXACT_BANDS, LADDERS, PIECES_OF, Level, Piece
from mergepipe.errors import CorruptError, MismatchError
from mergepipe.readers.base import FetchOnBase, TensorEntry
from mergepipe.storage.base import RangeFile
from mergepipe.storage.buffers import PAGE_BYTES, aligned_buffer, round_up

GROUP_BLOCKS = 16
"""Blocks whose pieces are read at once: at most 16 MiB of bf16 and what it decodes to."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a delta store, at a level. At LOSSLESS it is the expert's tensor; below, float32 deltas.

    Each block is read on its own. Memory while fetching: the pieces and the elements of `GROUP_BLOCKS` blocks.
    """

    name: str
    stored_dtype: DType
    shape: tuple[int, ...]
    root: Path
    index: StoreIndex
    first_row: int
    base: TensorEntry
    bands: Bands | None
    level: Level = Level.LOSSLESS
    others: dict[Level, PackedTensor] = field(default_factory=dict, repr=False, compare=False)

    is_unit = False
    cut_elements = BLOCK_ELEMENTS
    last_level = Level.LOSSLESS

    @property
    def encoded_on(self) -> TensorEntry:
        return self.base

    @property
    def is_delta(self) -> bool:
        return self.level is not Level.LOSSLESS

    @property
    def dtype(self) -> DType:
        return F32 if self.is_delta else self.stored_dtype

    @property
    def kernel_code(self) -> int:
        return self.dtype.kernel_code | (DELTA_FLAG if self.is_delta else 0)

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def n_blocks(self) -> int:
        return BlockGrid(self.n_elements, BLOCK_ELEMENTS).n_blocks

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The ranges of the store's files that this level reads. The base's file is not among them."""
        entries = []
        for piece in PIECES_OF[self.level]:
            start, stop = self.index.piece_range(piece, self.first_row, self.first_row + self.n_blocks)
            if stop > start:
                size = stop - start
                entries.append(TensorEntry(self.name, DTYPES["U8"], (size,), self._path(piece), start, size))
        return tuple(entries)

    @property
    def nbytes(self) -> int:
        return self.index.bytes_of(PIECES_OF[self.level], self.first_row, self.first_row + self.n_blocks)

    def at_level(self, level: int) -> PackedTensor:
        """The same tensor read at another level; the same object for the same level."""
        wanted = Level(level)
        return self if wanted is self.level else self.others.setdefault(wanted, replace(self, level=wanted))

    def exact_level(self, kept: int) -> Level:
        """See `Graded`; the last level where a lower one saves nothing."""
        for level, band in EXACT_BANDS.items():
            if kept <= self.elements_above(band) and self.at_level(level).nbytes < self.nbytes:
                return level
        return Level.LOSSLESS

    def ladder(self, top: int) -> tuple[Level, ...]:
        """See `Graded`."""
        return LADDERS[Level(top)]

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to fetch `span` on its own, in whole pages, without the base's."""
        return self.level_cost_bytes(span, self.level)

    def level_cost_bytes(self, span: Span, level: int) -> int:
        """`cost_bytes` at another level."""
        return sum(
            range_cost_bytes(*self.index.piece_range(piece, self.first_row + first, self.first_row + stop))
            for first, stop in block_groups(span)
            for piece in PIECES_OF[Level(level)]
        )

    def level_costs_bytes(self, level: int, stretches: int) -> NDArray[np.int64]:
        """`level_cost_bytes` of each `stretches` blocks."""
        first_B = np.arange(0, self.n_blocks, stretches)
        if GROUP_BLOCKS % stretches:  # a fetch is cut inside
            first_B = np.arange(self.n_blocks)
        last_B = np.append(first_B[1:], self.n_blocks)
        cost_B = np.zeros(len(first_B), np.int64)
        for piece in PIECES_OF[Level(level)]:
            start_B = self.index.offsets_PR[piece, self.first_row + first_B]
            stop_B = self.index.offsets_PR[piece, self.first_row + last_B]
            pages_B = -(-stop_B // PAGE_BYTES) - start_B // PAGE_BYTES
            cost_B += np.where(stop_B > start_B, pages_B, 0) * PAGE_BYTES
        if len(cost_B) == -(-self.n_blocks // stretches):
            return cost_B
        return np.add.reduceat(cost_B, np.arange(0, self.n_blocks, stretches))

    def squared_errors(self, level: int) -> NDArray[np.float64]:
        """What is left of the delta's squares at `level`, block by block (float64)."""
        return self.index.errors(Level(level), self.first_row, self.first_row + self.n_blocks)

    def elements_above(self, band: int) -> int:
        """Elements with |delta| at or above cut `band` (0, 1, 2): the densities up to which a level is exact."""
        return int(self.index.rows["counts"][self.first_row : self.first_row + self.n_blocks, band].sum())

    def block_span(self, block: int) -> Span:
        return BlockGrid(self.n_elements, BLOCK_ELEMENTS).span(block)

    def opened(self, files: Mapping[Path, RangeFile]) -> PackedFetch:
        """Ready to be fetched; keeps nothing between fetches."""
        return PackedFetch(self, files)

    def opened_on_base(self, files: Mapping[Path, RangeFile]) -> FetchOnBase:
        """As `opened`, for who has the base's bytes."""
        return PackedFetch(self, files).with_base

    def _path(self, piece: Piece) -> Path:
        return self.root / PIECE_NAMES[piece]


def block_groups(span: Span) -> Iterator[tuple[int, int]]:
    """Blocks `[first, stop)` that are read together to fetch `span`: cut at multiples of `GROUP_BLOCKS`."""
    first, last = span.start // BLOCK_ELEMENTS, -(-span.stop // BLOCK_ELEMENTS)
    while first < last:
        stop = min(last, (first // GROUP_BLOCKS + 1) * GROUP_BLOCKS)
        yield first, stop
        first = stop


class PackedFetch:
    """Fetches spans of one packed tensor. Safe to call from many threads."""

    def __init__(self, tensor: PackedTensor, files: Mapping[Path, RangeFile]) -> None:
        self._tensor = tensor
        self._files = files

    def __call__(self, span: Span, out: RawBytes, purpose: Purpose) -> None:
        """Write the elements of `span`; the base's bytes are read from its file, charged to the base."""
        self._fetch(span, None, out, purpose)

    def with_base(self, span: Span, base: RawBytes, out: RawBytes, purpose: Purpose) -> None:
        """Write the elements of `span`; `base` (uint8) holds the base's bytes of it.

        Blocks that `span` cuts are completed from the base's file.
        """
        self._fetch(span, base, out, purpose)

    def _fetch(self, span: Span, base: RawBytes | None, out: RawBytes, purpose: Purpose) -> None:
        for first, stop in block_groups(span):
            pieces = self._read_pieces(first, stop, purpose)
            for block in range(first, stop):
                own = self._tensor.block_span(block)
                self._decode(block, self._base_of(own, span, base), pieces, _Target(span, own, out))

    def _read_pieces(self, first: int, stop: int, purpose: Purpose) -> dict[Piece, tuple[int, RawBytes]]:
        """Bytes of each piece for some blocks, with where they begin in its file."""
        tensor = self._tensor
        found = {}
        for piece in PIECES_OF[tensor.level]:
            start, end = tensor.index.piece_range(piece, tensor.first_row + first, tensor.first_row + stop)
            if end > start:
                file = self._files[tensor.root / PIECE_NAMES[piece]]
                found[piece] = start, read_range(file, start, end, purpose)
        return found

    def _base_of(self, own: Span, span: Span, base: RawBytes | None) -> RawBytes:
        itemsize = self._tensor.base.dtype.itemsize
        if base is not None and span.start <= own.start and own.stop <= span.stop:
            return base[(own.start - span.start) * itemsize : (own.stop - span.start) * itemsize]
        entry = self._tensor.base
        start = entry.offset + own.start * itemsize
        return read_range(self._files[entry.file], start, start + own.n_elements * itemsize, Purpose.BASE)

    def _decode(
        self, block: int, base: RawBytes, pieces: Mapping[Piece, tuple[int, RawBytes]], target: _Target
    ) -> None:
        tensor = self._tensor
        row = tensor.first_row + block
        where = f"{tensor.root}: tensor {tensor.name!r}, block {block}"
        if digest(base) != tensor.index.rows["base"][row].tobytes():
            raise MismatchError.of(
                "store.base", where, f"the base {tensor.base.file} is not the one it was packed beside",
                "give the base that it was packed with",
            )  # fmt: skip
        own = {piece: self._own_piece(piece, row, pieces, where) for piece in PIECES_OF[tensor.level]}
        context = BlockContext(base, tensor.stored_dtype, tensor.bands, where)
        codec = tensor.index.codec(row)
        if tensor.is_delta:
            target.write(lambda view: decode_deltas(codec, tensor.level, own, context, view.view(np.float32)))
        else:
            target.write(lambda view: decode_block(codec, own, context, view), tensor.stored_dtype.itemsize)

    def _own_piece(self, piece: Piece, row: int, pieces: Mapping[Piece, tuple[int, RawBytes]], where: str) -> RawBytes:
        start, stop = self._tensor.index.piece_range(piece, row, row + 1)
        if start == stop:
            return np.empty(0, np.uint8)
        begin, content = pieces[piece]
        own = content[start - begin : stop - begin]
        self._tensor.index.check_piece(piece, row, own, where)
        return own


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the elements of block `own` go in the buffer of `span`."""

    span: Span
    own: Span
    out: RawBytes

    def write(self, decode: _Decode, itemsize: int = 4) -> None:
        """Decode straight into the buffer where the whole block is wanted, else by way of a copy."""
        low, high = max(self.own.start, self.span.start), min(self.own.stop, self.span.stop)
        place = self.out[(low - self.span.start) * itemsize : (high - self.span.start) * itemsize]
        if high - low == self.own.n_elements:
            decode(place)
            return
        whole = np.empty(self.own.n_elements * itemsize, np.uint8)
        decode(whole)
        place[:] = whole[(low - self.own.start) * itemsize : (high - self.own.start) * itemsize]


class _Decode(Protocol):
    def __call__(self, view: RawBytes) -> None: ...


def read_range(file: RangeFile, start: int, stop: int, purpose: Purpose) -> RawBytes:
    """Bytes `[start, stop)` of a file, in one request on its alignment.

    Raises:
        CorruptError: the file ends before.
    """
    first = start // file.alignment * file.alignment
    buffer = aligned_buffer(max(round_up(stop - first, file.alignment), 1))
    got = file.read_into(first, buffer.data, purpose)
    if got < stop - first:
        raise CorruptError.of(
            "storage.shrunk", file.path, f"ends at byte {first + got}, {stop} bytes are needed", "copy it again"
        )
    return buffer[start - first : stop - first]
