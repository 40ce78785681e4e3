"""Apply an adapter to weights, for experts that a recipe writes as `model+adapter`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.computed.low_rank import LowRankDelta, LowRankFetch
from mergepipe.checkpoints.contract import Fetch, TensorEntry
from mergepipe.checkpoints.range_reads import decoded_into, read_span
from mergepipe.checkpoints.read_cost import block_cost_bytes
from mergepipe.core.blocks import F32, DType, Span
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class Adapted:
    """`weights + delta` in float32, element by element; no rounding to the dtype of `weights`.

    A span costs its own weights and, each time it is planned on its own, the factors of the delta: that is an upper
    bound, since an opened tensor reads the factors once.
    """

    weights: TensorEntry
    delta: LowRankDelta

    def __post_init__(self) -> None:
        if self.weights.shape != self.delta.shape or self.weights.is_delta:
            raise ValueError(f"{self.name}: {self.delta.shape} cannot be added to {self.weights.shape}")

    @property
    def name(self) -> str:
        return self.weights.name

    @property
    def dtype(self) -> DType:
        return F32

    @property
    def stored_dtype(self) -> DType:
        return self.weights.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def is_delta(self) -> bool:
        return False

    @property
    def is_unit(self) -> bool:
        return False

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (self.weights, *self.delta.stored)

    @property
    def n_elements(self) -> int:
        return self.weights.n_elements

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.delta.nbytes

    @property
    def kernel_code(self) -> int:
        return F32.kernel_code

    def cost_bytes(self, span: Span) -> int:
        return block_cost_bytes(self.weights, span) + self.delta.cost_bytes(span)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps the delta's factors in float32, and a span's weights during its fetch."""
        return _AdaptedFetch(self.weights, self.delta.opened(files), files)


@dataclass(frozen=True, slots=True)
class _AdaptedFetch:
    """Adds one span of the delta to the same span of the weights."""

    weights: TensorEntry
    delta: LowRankFetch
    files: Mapping[Location, RangeFile]

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        raw = read_span(self.weights, span, self.files, purpose)
        self.delta(span, out, purpose)
        values = out.view(np.float32)
        values += decoded_into(raw, self.weights.dtype.kernel_code, np.empty(len(values), np.float32))
