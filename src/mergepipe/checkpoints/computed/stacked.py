"""Stack tensors of one shape into a tensor, along its first dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Fetch, TensorEntry
from mergepipe.checkpoints.range_reads import decoded_into, read_span
from mergepipe.checkpoints.read_cost import block_cost_bytes
from mergepipe.core.blocks import DELTA_FLAG, F32, DType, Span, element_count
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class Stacked:
    """The elements of `parts` in order, seen in `shape`; float32 where the parts' dtypes differ.

    Law: fetching a span gives the bytes that it has in the concatenation of the parts.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        first = self.parts[0]
        if any(part.shape != first.shape or part.is_delta != first.is_delta for part in self.parts):
            raise ValueError(f"{self.name}: parts of different shapes or kinds")
        if element_count(self.shape) != len(self.parts) * first.n_elements:
            raise ValueError(f"{self.name}: {len(self.parts)} parts of {first.shape} are not {self.shape}")

    @property
    def dtype(self) -> DType:
        first = self.parts[0].dtype
        return first if all(part.dtype == first for part in self.parts) else F32

    @property
    def is_delta(self) -> bool:
        return self.parts[0].is_delta

    @property
    def is_unit(self) -> bool:
        return False

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return self.parts

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def kernel_code(self) -> int:
        return self.dtype.kernel_code | (DELTA_FLAG if self.is_delta else 0)

    def pieces(self, span: Span) -> Iterator[tuple[TensorEntry, Span]]:
        """Yield the parts that `span` touches, in order, with the span inside each."""
        part_elements = self.parts[0].n_elements
        at = span.start
        while at < span.stop:
            index = at // part_elements
            stop = min(span.stop, (index + 1) * part_elements)
            yield self.parts[index], Span(at - index * part_elements, stop - index * part_elements)
            at = stop

    def cost_bytes(self, span: Span) -> int:
        return sum(block_cost_bytes(part, inside) for part, inside in self.pieces(span))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps nothing."""
        return _StackedFetch(self, self.dtype, files)


@dataclass(frozen=True, slots=True)
class _StackedFetch:
    """Reads one span part by part."""

    tensor: Stacked
    dtype: DType
    files: Mapping[Location, RangeFile]

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        done = 0
        for part, inside in self.tensor.pieces(span):
            nbytes = inside.n_elements * self.dtype.itemsize
            target = out[done : done + nbytes]
            raw = read_span(part, inside, self.files, purpose)
            if part.dtype == self.dtype:
                target[:] = raw
            else:
                decoded_into(raw, part.dtype.kernel_code, target.view(np.float32))
            done += nbytes
