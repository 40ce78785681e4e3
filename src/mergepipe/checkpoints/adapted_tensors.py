"""Tensors computed from thin matrices: an adapter's delta, and weights with an adapter applied."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, TensorEntry
from mergepipe.checkpoints.open_files import decoded_into, read_matrix, read_span, whole_cost_bytes
from mergepipe.core.blocks import F32, DType, Span
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location

# --- compute an adapter's delta of one tensor: a product of two thin matrices, never held as a whole ---


@dataclass(frozen=True, slots=True)
class LowRankDelta(ComputedTensor):
    """`scale * up @ down`, transposed where `transposed`: `up` is (M, R), `down` (R, N) as stored, the delta M x N.

    Each element is summed in float32 in the order of R and scaled last, whatever the span.
    """

    name: str
    up: TensorEntry
    down: TensorEntry
    scale: float
    transposed: bool = False

    def __post_init__(self) -> None:
        if len(self.up.shape) != 2 or len(self.down.shape) != 2 or self.up.shape[1] != self.down.shape[0]:
            raise ValueError(f"{self.name}: {self.up.shape} and {self.down.shape} have no product")

    @property
    def dtype(self) -> DType:
        return F32

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (self.up.shape[0], self.down.shape[1])
        return shape[::-1] if self.transposed else shape

    @property
    def is_delta(self) -> bool:
        return True

    @property
    def is_unit(self) -> bool:
        return True

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (self.up, self.down)

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down.nbytes

    def cost_bytes(self, span: Span) -> int:
        """Both factors are read for any span, once per opened tensor."""
        return whole_cost_bytes(self.stored)

    def opened(self, files: Mapping[Location, RangeFile]) -> LowRankFetch:
        """Return a fetch of spans; keeps both factors in float32 from its first call on."""
        return LowRankFetch(self, files)


class LowRankFetch:
    """Computes spans of a `LowRankDelta`; safe to call from many threads. Memory: the factors, in float32."""

    def __init__(self, tensor: LowRankDelta, files: Mapping[Location, RangeFile]) -> None:
        self._tensor = tensor
        self._files = files
        self._lock = threading.Lock()
        self._factors: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        """Write the elements `span` into `out` (uint8 of float32); see `checkpoints.contract.Fetch`."""
        from mergepipe.kernels.products import low_rank_product  # compiled: nothing that only opens waits for it

        left_RK, right_KC = self._read(purpose)
        if span.n_elements:
            low_rank_product(left_RK, right_KC, self._tensor.scale, span.start, out.view(np.float32))

    def _read(self, purpose: Purpose) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        with self._lock:
            if self._factors is None:
                up = read_matrix(self._tensor.up, self._files, purpose)
                down = read_matrix(self._tensor.down, self._files, purpose)
                left, right = (down.T, up.T) if self._tensor.transposed else (up, down)
                self._factors = np.ascontiguousarray(left), np.ascontiguousarray(right)
            return self._factors


# --- apply an adapter to weights, for experts that a recipe writes as `model+adapter` ---


@dataclass(frozen=True, slots=True)
class Adapted(ComputedTensor):
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
    def stored(self) -> tuple[TensorEntry, ...]:
        return (self.weights, *self.delta.stored)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.delta.nbytes

    def cost_bytes(self, span: Span) -> int:
        return self.weights.cost_bytes(span) + self.delta.cost_bytes(span)

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
