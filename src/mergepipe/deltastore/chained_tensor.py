"""A packed tensor whose base is a tensor of another store: a checkpoint of a training run, packed on the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mergepipe.checkpoints.base_bytes import BaseBytes
from mergepipe.checkpoints.contract import ComputedTensor, NeedsBase, TensorEntry
from mergepipe.core.blocks import DType, Span
from mergepipe.deltastore.codec.block import RawBytes
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.tensor import PackedTensor
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class ChainedTensor:
    """One tensor of a store on the same tensor of its base's store, which may be chained as well; read in full."""

    packed: PackedTensor
    base: ComputedTensor

    is_delta = False
    is_unit = False

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
    def n_elements(self) -> int:
        return self.packed.n_elements

    @property
    def kernel_code(self) -> int:
        return self.packed.kernel_code

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.base.nbytes

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The byte ranges of this store, of those below it, and of the first one's base."""
        below = (self.base.encoded_on,) if isinstance(self.base, NeedsBase) else ()
        return (*self.packed.stored, *self.base.stored, *below)

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to fetch `span` on its own, in whole pages, of all stores of the chain."""
        return self.packed.cost_bytes(span) + self.base.cost_bytes(self._whole_blocks(span))

    def opened(self, files: Mapping[Location, RangeFile]) -> ChainedFetch:
        """Make the fetch over open files; it keeps nothing between calls."""
        return ChainedFetch(self, files)

    def _whole_blocks(self, span: Span) -> Span:
        start = span.start // BLOCK_ELEMENTS * BLOCK_ELEMENTS
        return Span(start, min(-(-span.stop // BLOCK_ELEMENTS) * BLOCK_ELEMENTS, self.n_elements))


class ChainedFetch:
    """Fetches spans of one chained tensor. Safe to call from many threads.

    Memory: the elements of the span's blocks, once for each store of the chain.
    """

    def __init__(self, tensor: ChainedTensor, files: Mapping[Location, RangeFile]) -> None:
        self._tensor = tensor
        self._fetch_base = tensor.base.opened(files)
        self._fetch = tensor.packed.opened_on_base(files)

    def __call__(self, span: Span, out: RawBytes, purpose: Purpose) -> None:
        """Write the elements of `span`; all that is read is charged to `purpose`, but for the first store's base."""
        size = self._tensor.dtype.itemsize
        blocks = self._tensor._whole_blocks(span)
        base = np.empty(blocks.n_elements * self._tensor.base.dtype.itemsize, np.uint8)
        self._fetch_base(blocks, base, purpose)
        whole = out if blocks == span else np.empty(blocks.n_elements * size, np.uint8)
        self._fetch(blocks, BaseBytes(base), whole, purpose)
        if whole is not out:
            out[:] = whole[(span.start - blocks.start) * size :][: len(out)]
