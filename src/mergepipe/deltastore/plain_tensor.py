"""A tensor that a store holds unencoded because the base lacks it: one byte range, located by the index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.read_cost import block_cost_bytes
from mergepipe.core.blocks import BlockGrid, DType, Span, element_count
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.codec.block import RawBytes
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, Codec, Piece
from mergepipe.deltastore.index_reader import StoreIndexReader
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """One tensor of a store that the base lacks; the index is read when its offset is first needed."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    root: Location
    index_reader: StoreIndexReader
    first_row: int

    is_unit = False
    is_delta = False

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def nbytes(self) -> int:
        return self.n_elements * self.dtype.itemsize

    @property
    def kernel_code(self) -> int:
        return self.dtype.kernel_code

    @property
    def files(self) -> frozenset[Location]:
        return frozenset({self.index_reader.path_of(Piece.WHOLE)})

    def entry(self) -> TensorEntry:
        """Locate the tensor.

        Raises:
            CorruptError: it is encoded, or its size does not fit.
        """
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
        return block_cost_bytes(self.entry(), span)

    def opened(self, files: Mapping[Location, RangeFile]) -> PlainFetch:
        """Make the fetch over open files; it keeps no bytes."""
        return PlainFetch(self.entry(), files)


@dataclass(frozen=True, slots=True)
class PlainFetch:
    """Reads spans of an unencoded tensor; holds one at a time."""

    entry: TensorEntry
    files: Mapping[Location, RangeFile]

    def __call__(self, span: Span, out: RawBytes, purpose: Purpose) -> None:
        start = self.entry.offset + span.start * self.entry.dtype.itemsize
        stop = start + span.n_elements * self.entry.dtype.itemsize
        out[:] = read_exact(self.files[self.entry.file], start, stop, purpose)
