"""Tensors computed from thin matrices: an adapter's delta, and weights with an adapter applied."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.checkpoints.open_files import decoded, once, read_elements, read_matrix, whole_cost_bytes
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.core.blocks import F32, GRAIN_ELEMENTS, DType, DTypeKind, Span
from mergepipe.core.rounding import UNMEASURED, TensorRounding, holds_results
from mergepipe.errors import CorruptError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import PAGE_BYTES, aligned_buffer, read_exact, request_bytes, round_up

# --- compute an adapter's delta of one tensor: a product of two thin matrices, never held as a whole ---


_RULES: Mapping[str, Callable[..., NDArray[np.float32]]] = {
    "transposed": lambda stored: stored.T,
    "scaled rows": lambda stored, scales: stored * scales,
    "product": lambda left, right: left @ right,
    "pairs of columns": lambda first, second: first[:, :, None] * second[:, None],
    "pairs of rows": lambda first, second: first[:, None] * second[None],
}
COLUMNS_BY_EXPERT = "columns by expert"
ROWS_IN_PAIRS = "rows in pairs"
_RULES_BY_COUNT: Mapping[str, Callable[[NDArray[np.float32], int], NDArray[np.float32]]] = {
    COLUMNS_BY_EXPERT: lambda stored, n_experts: stored.reshape(len(stored), n_experts, -1).swapaxes(1, 2),
    ROWS_IN_PAIRS: lambda stored, n_heads: stored.reshape(n_heads, -1, 2, stored.shape[1]).swapaxes(1, 2),
}
"""Orders of other programs, by the number of experts or heads: the columns of an expert side by side, as older versions
of unsloth write them, where PEFT has the expert as the fastest index; rows of a head as llama.cpp rotates them."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A factor of shape (rows, columns) that is made of stored tensors by a rule, a key of `_RULES`.

    A rule of `_RULES_BY_COUNT` orders one tensor otherwise, by a `count`.
    A LoHa, `(a @ b) * (c @ d)`, is the product of the pairs of columns of a and c with the pairs of rows of b and d.
    """

    rule: str
    parts: tuple[Factor, ...]
    shape: tuple[int, int]
    count: int = 0

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for part in self.parts for entry in part.stored)


Factor: TypeAlias = StoredTensor | Composed
_KEPT = 4  # of two modules, where a layer ends and the next begins


class _Delta(ComputedTensor):
    """A delta of thin matrices: float32, and all stored bytes are read, once, for any span."""

    __slots__ = ()
    if TYPE_CHECKING:  # a field of one kind, a property of the other

        @property
        def parts(self) -> tuple[LowRankDelta | None, ...]: ...

    dtype, is_delta, is_unit = F32, True, True

    def cost_bytes(self, span: Span) -> int:
        """All factors are read for any span, once per opened tensor."""
        return whole_cost_bytes(self.stored)

    def opened(self, files: Mapping[Location, RangeFile]) -> DeltaFetch:
        """Return a fetch of spans; keeps the factors in float32 from its first call on, those that parts share once."""
        factors = {(part.up, part.down): _factors_of(part, files) for part in self.parts if part is not None}
        products = [None if part is None else _product(part, factors[part.up, part.down]) for part in self.parts]
        return DeltaFetch(products, self.n_elements // len(self.parts))


@dataclass(frozen=True, slots=True)
class LowRankDelta(_Delta):
    """`scale * up @ down`, transposed where `transposed`: `up` is (M, R), `down` (R, N) as stored, the delta M x N.

    Without `down` it is a vector: `scale * up`, (M, 1) as (M,). With `n_experts` the factors are those of PEFT's
    adapters of fused experts, and the delta that of `expert`: `up` is (M, R * E), experts fastest, `down` (E * R, N).
    `rows` are those that are wanted of the delta as the base stores it. Each element is summed in float32 in the order
    of R and scaled last, whatever the span.
    """

    name: str
    up: Factor
    down: Factor | None
    scale: float
    transposed: bool = False
    n_experts: int = 1
    expert: int = 0
    rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        down_shape = (self.up.shape[-1], 1) if self.down is None else self.down.shape
        if len(self.up.shape) != 2 or len(down_shape) != 2 or self.up.shape[1] != down_shape[0]:
            raise ValueError(f"{self.name}: {self.up.shape} and {down_shape} have no product")
        if self.up.shape[1] % self.n_experts or not 0 <= self.expert < self.n_experts:
            raise ValueError(f"{self.name}: a rank of {self.up.shape[1]} for {self.n_experts} experts")

    @property
    def shape(self) -> tuple[int, ...]:
        if self.down is None:
            return self.up.shape[:1]
        shape = (self.up.shape[0], self.down.shape[1])
        n_rows, n_columns = shape[::-1] if self.transposed else shape
        return (n_rows if self.rows is None else self.rows[1] - self.rows[0], n_columns)

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (*self.up.stored, *(() if self.down is None else self.down.stored))

    @property
    def parts(self) -> tuple[LowRankDelta | None, ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class StackedDelta(_Delta):
    """Deltas of equal size end to end, seen in `shape`: one for each matrix of a layer's experts, zeros where None."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[LowRankDelta | None, ...]

    def __post_init__(self) -> None:
        if any(part is not None and part.n_elements * len(self.parts) != self.n_elements for part in self.parts):
            raise ValueError(f"{self.name}: {len(self.parts)} parts do not make {self.shape}")

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(dict.fromkeys(entry for part in self.parts if part is not None for entry in part.stored))


@dataclass(frozen=True, slots=True)
class KroneckerDelta(_Delta):
    """`scale * kron(first, second)`, the delta of a LoKr: each element of `first` times all of `second`."""

    name: str
    first: Factor
    second: Factor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first.shape[0] * self.second.shape[0], self.first.shape[1] * self.second.shape[1]

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (*self.first.stored, *self.second.stored)

    def opened(self, files: Mapping[Location, RangeFile]) -> DeltaFetch:
        """Return a fetch of spans; keeps the factors, and computes the rows of each span."""
        factors = _read_factors(self.first, self.second, files)
        return DeltaFetch([_kronecker_rows(self.scale, factors)], self.n_elements)


AnyDelta: TypeAlias = LowRankDelta | StackedDelta | KroneckerDelta
_Matrices: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]
_Factors: TypeAlias = Callable[[Purpose], _Matrices]
_Product: TypeAlias = tuple[float, Callable[[Span, Purpose], tuple[NDArray[np.float32], NDArray[np.float32], int]]]
"""A scale, and what returns two factors and the first element of a span in their flattened product."""


def _read_factors(up: Factor, down: Factor | None, files: Mapping[Location, RangeFile]) -> _Factors:
    """Two stored factors in float32, read when first needed."""

    def read(purpose: Purpose) -> _Matrices:
        down_RN = np.ones((1, 1), np.float32) if down is None else read_finite(down, files, purpose)
        return read_finite(up, files, purpose), down_RN

    return once(read)


_kept: OrderedDict[tuple[object, ...], _Factors] = OrderedDict()
_guard = threading.Lock()


def _factors_of(part: LowRankDelta, files: Mapping[Location, RangeFile]) -> _Factors:
    """Return the factors of a delta; those that a layer's experts share, each opened on its own, are kept for the next.

    Memory: `_KEPT` pairs, until others take their place.
    """
    made = _read_factors(part.up, part.down, files)
    if part.n_experts == 1:
        return made
    # A pair that is kept holds its files, so that no other has their ids.
    key = (part.up, part.down, *(id(files[entry.file]) for entry in part.stored))
    with _guard:
        shared = _kept.setdefault(key, made)
        _kept.move_to_end(key)
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)
    return shared


def read_finite(factor: Factor, files: Mapping[Location, RangeFile], purpose: Purpose) -> NDArray[np.float32]:
    """Read all of an adapter's tensor in float32, in its shape; refuses infinities and what is no number."""
    if isinstance(factor, Composed):
        parts = [read_finite(part, files, purpose) for part in factor.parts]
        if factor.rule in _RULES_BY_COUNT:
            return _RULES_BY_COUNT[factor.rule](parts[0], factor.count).reshape(factor.shape)
        return _RULES[factor.rule](*parts).reshape(factor.shape)
    values = read_matrix(factor, files, purpose)
    _check_finite(factor, values)
    return values


def _check_finite(tensor: StoredTensor, values: NDArray[np.float32]) -> None:
    if not np.isfinite(values).all():
        where = tensor.stored[0].file
        raise CorruptError.of("tensor.not-finite", where, f"'{tensor.name}' holds infinities or NaN")


@dataclass(frozen=True, slots=True)
class SavedTensor(ComputedTensor):
    """A tensor that an adapter stores in full; fetching refuses infinities and what is no number.

    `model_dtype` is that of the model whose tensor it replaces, where that is another.
    """

    name: str
    values: StoredTensor
    model_dtype: DType | None = None

    @property
    def dtype(self) -> DType:
        return self.values.dtype

    @property
    def stored_dtype(self) -> DType:
        return self.model_dtype or self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return self.values.stored

    def cost_bytes(self, span: Span) -> int:
        return self.values.cost_bytes(span)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps nothing."""

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            out[:] = read_elements(self.values, span, files, purpose)
            if self.dtype.kind is DTypeKind.FLOAT:
                _check_finite(self.values, decoded(out, self.dtype.kernel_code))

        return fetch


def _product(tensor: LowRankDelta, factors: _Factors) -> _Product:
    """The two factors of a delta as they are multiplied, (R, K) and (K, C)."""

    def oriented(purpose: Purpose) -> _Matrices:
        up, down = factors(purpose)
        up = up.reshape(up.shape[0], -1, tensor.n_experts)[:, :, tensor.expert]
        down = down.reshape(tensor.n_experts, -1, down.shape[1])[tensor.expert]
        left, right = (down.T, up.T) if tensor.transposed else (up, down)
        left = left if tensor.rows is None else left[slice(*tensor.rows)]
        return np.ascontiguousarray(left), np.ascontiguousarray(right)

    kept = once(oriented)
    return tensor.scale, lambda span, purpose: (*kept(purpose), span.start)


def _kronecker_rows(scale: float, factors: _Factors) -> _Product:
    """The elements of a `KroneckerDelta`, as a product of one row: of the rows that a span touches, computed for it."""

    def rows_of(span: Span, purpose: Purpose) -> tuple[NDArray[np.float32], NDArray[np.float32], int]:
        first, second = factors(purpose)
        width = first.shape[1] * second.shape[1]
        rows = np.arange(span.start // width, -(-span.stop // width))
        values = first[rows // len(second)][:, :, None] * second[rows % len(second)][:, None]
        return np.ones((1, 1), np.float32), values.reshape(1, -1), span.start - int(rows[0]) * width

    return scale, rows_of


class DeltaFetch:
    """Computes spans of a delta, or adds them to weights; safe to call from many threads.

    Memory: the factors, in float32.
    """

    def __init__(self, products: Sequence[_Product | None], part_elements: int) -> None:
        self._products = products
        self._part_elements = part_elements
        self.rounding = UNMEASURED

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        """Write the elements `span` into `out` (uint8 of float32); see `checkpoints.contract.Fetch`."""
        self.add(span, np.zeros(len(out), np.uint8), F32, out, F32, purpose)

    def add(
        self, span: Span, weights: NDArray[np.uint8], dtype: DType, out: NDArray[np.uint8], out_dtype: DType,
        purpose: Purpose,
    ) -> None:  # fmt: skip
        """Write the elements `span` plus those of the weights (stored bytes) to `out`, rounded to its dtype.

        They are rounded as `rounding` says, which learns what that keeps; float32 holds every result.
        """
        from mergepipe.kernels.products import add_low_rank

        rounding = UNMEASURED if holds_results(out_dtype) else self.rounding
        key = np.uint64(rounding.key)
        sums_G2 = rounding.sums_of(span)
        nothing = np.empty((1, 0), np.float32), np.empty((0, self._part_elements), np.float32)
        for product, inside, start in self._pieces(span):
            stop = start + inside.n_elements
            raw = weights[start * dtype.itemsize : stop * dtype.itemsize]
            target = out[start * out_dtype.itemsize : stop * out_dtype.itemsize]
            scale, factors = product or (0.0, lambda inside, _: (*nothing, inside.start))
            left, right, first = factors(inside, purpose)
            element = span.start + start
            sums = sums_G2[element // GRAIN_ELEMENTS - span.start // GRAIN_ELEMENTS :]
            add_low_rank(
                left, right, scale, first, raw, dtype.kernel_code, target, out_dtype.kernel_code, element, key, sums
            )

    def _pieces(self, span: Span) -> Iterator[tuple[_Product | None, Span, int]]:
        """Yield the parts that a span touches, with the elements of each, and where in the span they start."""
        at = span.start
        while at < span.stop:
            index, first = at // self._part_elements, at % self._part_elements
            n_elements = min(span.stop - at, self._part_elements - first)
            yield self._products[index], Span(first, first + n_elements), at - span.start
            at += n_elements


# --- apply an adapter to weights, for experts that a recipe writes as `model+adapter` ---


_NORM_ELEMENTS = 1 << 20


class _Room(threading.local):
    """A buffer of each thread, of the largest span that it read: new pages cost as much as what is computed in them."""

    buffer = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> NDArray[np.uint8]:
        """Return at least so many bytes, page-aligned, contents undefined."""
        if len(self.buffer) < nbytes:
            self.buffer = aligned_buffer(round_up(nbytes, PAGE_BYTES))
        return self.buffer


_room = _Room()


@dataclass(frozen=True, slots=True)
class Adapted(ComputedTensor):
    """`weights + delta` in float32, element by element, rounded once to `dtype`.

    With a `magnitude` (DoRA), each output feature of the sum is scaled to that norm: features are rows, or columns of
    a transposed delta, whose norms need a pass over the whole matrix first. With a `scaled_axis` ((IA)^3) it multiplies
    the rows (0) or columns (-1) as it is. A span costs its own weights (whole rows of
    them for norms of rows, all for those of columns) and, each time it is planned on its own, the factors of the delta:
    that is an upper bound, since an opened tensor reads the factors, and takes norms of columns, once.

    Sums of a plain delta are rounded as `rounding` says, which learns what that keeps; where they are scaled only how
    they are rounded is taken from it.

    Source: S.-Y. Liu et al., "DoRA: weight-decomposed low-rank adaptation", 2024, equation 5; the norm of a feature is
    summed in float64.
    """

    weights: Readable
    delta: AnyDelta
    magnitude: StoredTensor | None = None
    dtype: DType = F32  # over the property of all tensors
    scaled_axis: int | None = None
    rounding: TensorRounding = UNMEASURED

    def __post_init__(self) -> None:
        if self.weights.shape != self.delta.shape or self.weights.is_delta:
            raise ValueError(f"{self.name}: {self.delta.shape} cannot be added to {self.weights.shape}")

    @property
    def name(self) -> str:
        return self.delta.name

    @property
    def stored_dtype(self) -> DType:
        return self.weights.stored_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (*self.weights.stored, *self.delta.stored, *([] if self.magnitude is None else self.magnitude.stored))

    @property
    def has_norms(self) -> bool:
        return self.magnitude is not None and self.scaled_axis is None

    @property
    def has_norms_of_columns(self) -> bool:
        return self.has_norms and isinstance(self.delta, LowRankDelta) and self.delta.transposed

    def whole_rows(self, span: Span) -> Span:
        """Return the rows that a span touches where norms of rows are needed; else the span."""
        if not self.has_norms or self.has_norms_of_columns:
            return span
        width = self.shape[1]
        return Span(span.start // width * width, -(-span.stop // width) * width)

    def cost_bytes(self, span: Span) -> int:
        cost = self.weights.cost_bytes(self.whole_rows(span)) + self.delta.cost_bytes(span)
        if self.magnitude is not None:
            cost += whole_cost_bytes((self.magnitude,))
        return cost + sum(self.weights.cost_bytes(chunk) for chunk in self.norm_chunks())

    def norm_chunks(self) -> list[Span]:
        """List the rows that norms of columns are taken over, chunk by chunk."""
        if not self.has_norms_of_columns:
            return []
        step = max(_NORM_ELEMENTS // self.shape[1], 1) * self.shape[1]
        return [Span(start, min(start + step, self.n_elements)) for start in range(0, self.n_elements, step)]

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps the delta's factors and norms of columns, and a span's weights for a while."""
        return _AdaptedFetch(self, files)


class _AdaptedFetch:
    """Adds one span of the delta to the same span of the weights, and scales the sum where there is a magnitude."""

    def __init__(self, tensor: Adapted, files: Mapping[Location, RangeFile]) -> None:
        self._tensor = tensor
        self._files = files
        self._delta = tensor.delta.opened(files)
        self._delta.rounding = tensor.rounding
        self._computed = None if isinstance(tensor.weights, TensorEntry) else tensor.weights.opened(files)
        self._scales = once(self._read_scales)

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        from mergepipe.kernels.rounding import encode_all_by  # compiled: nothing that only opens waits for it

        tensor = self._tensor
        if tensor.magnitude is None:
            self._add(span, out, tensor.dtype, purpose)
            return
        rows, width = tensor.whole_rows(span), tensor.shape[-1]
        sums = np.empty(rows.n_elements, np.float32)
        self._add(rows, sums.view(np.uint8), F32, purpose)
        magnitude, column_scales = self._scales(purpose)
        if column_scales is not None:
            sums *= column_scales[np.arange(rows.start, rows.stop) % width]
        elif tensor.scaled_axis is not None:
            sums *= magnitude[np.arange(rows.start, rows.stop) // width]
        else:
            sums_MN = sums.reshape(-1, width)
            norms_M = np.sqrt(np.einsum("mn,mn->m", sums_MN, sums_MN, dtype=np.float64))
            sums_MN *= (magnitude[rows.start // width : rows.stop // width] / norms_M).astype(np.float32)[:, None]
        key = np.uint64(tensor.rounding.key)
        wanted = sums[span.start - rows.start : span.stop - rows.start]
        encode_all_by(wanted, span.start, key, out, tensor.dtype.kernel_code)

    def _add(self, span: Span, out: NDArray[np.uint8], dtype: DType, purpose: Purpose) -> None:
        weights = self._tensor.weights
        nbytes = span.n_elements * weights.dtype.itemsize
        if self._computed is not None:
            raw = _room.of(nbytes)[:nbytes]
            self._computed(span, raw, purpose)
        elif isinstance(weights, TensorEntry):
            file, start = self._files[weights.file], weights.offset + span.start * weights.dtype.itemsize
            room = _room.of(request_bytes(file, start, start + nbytes))
            raw = read_exact(file, start, start + nbytes, purpose, room)
        self._delta.add(span, raw, weights.dtype, out, dtype, purpose)

    def _read_scales(self, purpose: Purpose) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the magnitudes and, for norms of columns, the scale of each column."""
        tensor = self._tensor
        assert tensor.magnitude is not None
        magnitude = read_finite(tensor.magnitude, self._files, purpose).reshape(-1)
        squares_N = np.zeros(tensor.shape[-1])
        for chunk in tensor.norm_chunks():
            sums = np.empty(chunk.n_elements, np.float32)
            self._add(chunk, sums.view(np.uint8), F32, purpose)
            squares_N += np.square(sums, dtype=np.float64).reshape(-1, len(squares_N)).sum(axis=0)
        if tensor.has_norms_of_columns:
            return magnitude, (magnitude / np.sqrt(squares_N)).astype(np.float32)
        return magnitude, magnitude if tensor.scaled_axis == -1 else None
