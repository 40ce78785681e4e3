"""Measure how the stored values of a tensor agree with a base, and with a change of that base.

Legend: N elements of a stretch, S columns of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.adapted_tensors import Adapted, AnyDelta, KroneckerDelta, LowRankDelta, SavedTensor
from mergepipe.checkpoints.codes import CodedTensor
from mergepipe.checkpoints.contract import Readable, Tensor
from mergepipe.checkpoints.open_files import decoded, encoded
from mergepipe.core.blocks import F32, BlockGrid, DType, Span
from mergepipe.core.rounding import holds_results
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

CHUNK_ELEMENTS = 1 << 19
"""Elements held at a time by each thread, in a dozen arrays of float32 and float64: 64 MiB at most."""
SKETCH = 256
Values = NDArray[np.float32]
Sums = NDArray[np.float64]
Files = Mapping[Location, RangeFile]
Read = Callable[[Span], Values]
"""Gives the elements of a span in float32."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a base tensor is to become: `before` plus a delta, or `after` where it is more than a sum.

    `rank` is the number of products that are summed for an element, `has_norms` says that the sum is scaled again
    (DoRA, (IA)^3). `scale` is the factor of the products, None where there are none.
    """

    before: Readable
    after: Readable
    rank: int = 0
    scale: float | None = None
    factor_dtype: DType = F32

    @property
    def delta(self) -> AnyDelta | None:
        """The delta, where nothing else is done to the base's tensor."""
        after = self.after
        is_sum = isinstance(after, Adapted) and after.weights is self.before and after.magnitude is None
        return after.delta if is_sum and isinstance(after, Adapted) else None

    @property
    def is_change(self) -> bool:
        """Whether the two are different tensors."""
        return self.after is not self.before

    @property
    def has_norms(self) -> bool:
        return isinstance(self.after, Adapted) and self.after.magnitude is not None

    @property
    def is_saved(self) -> bool:
        """Whether the tensor is replaced by one that is stored in full."""
        return isinstance(self.after, SavedTensor)


def change_of(before: Readable, after: Readable) -> Change:
    """Describe how a tensor differs from the one of the base."""
    delta: object = after.delta if isinstance(after, Adapted) else after
    if isinstance(delta, KroneckerDelta):
        return Change(before, after, 1, delta.scale, delta.first.stored[0].dtype)
    parts = [part for part in getattr(delta, "parts", ()) if isinstance(part, LowRankDelta)]
    if not parts:
        return Change(before, after)
    first = parts[0]
    rank = first.up.shape[1] // first.n_experts
    coarsest = min((entry.dtype for entry in first.stored), key=lambda dtype: dtype.significant_bits)
    return Change(before, after, rank, first.scale, coarsest)


def matrices_of(tensor: Tensor) -> tuple[Span, ...]:
    """Return the stretches of a tensor that are judged by themselves: each expert's matrices of a stack, else all."""
    if len(tensor.shape) != 3 or not tensor.n_elements:
        return (Span(0, tensor.n_elements),)
    return tuple(BlockGrid(tensor.n_elements, tensor.n_elements // tensor.shape[0]).spans())


@dataclass(slots=True)
class Agreement:
    """Counts and sums over the elements of one matrix of a model; see `measure`.

    D is what is stored minus the base in the stored dtype, C the change, E what the change leaves of itself when the
    result is rounded to that dtype.

    Attributes:
        n_changed: elements that differ from the base.
        n_outside: elements that no order of roundings makes of base and change.
        n_outside_changed: those of them that differ from the base, too.
        n_told: elements of which rounding leaves so much that the base itself is outside.
        n_moving: elements with a change; n_rounded_away: those of them that rounding gives back to the base.
        step: the norm of one step of the dtype, at each element.
    """

    n: int = 0
    n_not_finite: int = 0
    n_changed: int = 0
    n_outside: int = 0
    n_outside_changed: int = 0
    n_told: int = 0
    n_told_applied: int = 0
    n_moving: int = 0
    n_rounded_away: int = 0
    stored_square: float = 0.0
    change_square: float = 0.0
    stored_change: float = 0.0
    expected_change: float = 0.0
    step_square: float = 0.0
    stored_sketch_S: Sums = field(default_factory=lambda: np.zeros(SKETCH))
    change_sketch_S: Sums = field(default_factory=lambda: np.zeros(SKETCH))

    @property
    def scale(self) -> float:
        """The multiple of the change that the stored difference is nearest to, over that of an exact result."""
        whole = self.expected_change if self.expected_change > 0 else self.change_square
        return self.stored_change / whole if whole else 0.0

    @property
    def residual(self) -> float:
        """The norm of what the nearest multiple of the change leaves of the stored difference."""
        explained = self.stored_change**2 / self.change_square if self.change_square else 0.0
        return math.sqrt(max(self.stored_square - explained, 0.0))

    @property
    def scale_error(self) -> float:
        """How far from the truth independent errors of the elements may bring `scale`.

        The mean of N independent errors of this residual is within its standard deviation times the square root of
        2 ln N, which the largest of N normal values rarely exceeds.
        """
        if not self.change_square:
            return math.inf
        deviation = self.residual / math.sqrt(self.n * self.change_square)
        return deviation * math.sqrt(2 * math.log(max(self.n, 2)))

    @property
    def is_multiple(self) -> bool:
        """Whether a multiple of the change other than 0 explains the stored difference within a step of the dtype."""
        return self.residual <= math.sqrt(self.step_square) and abs(self.scale) > self.scale_error


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one matrix is compared with: `change` times `factor`, which is known within `slack`.

    With `other`, the delta of another matrix stands for that of the change. `is_stochastic` says that results were
    rounded to either neighbour, not to the nearest one.
    """

    change: Change
    stored: Readable
    grid: DType
    span: Span
    factor: float = 1.0
    slack: float = 0.0
    other: Read | None = None
    is_stochastic: bool = False


def grid_of(stored: Readable, before: Readable, files: Files) -> DType | None:
    """Return the dtype on whose grid a tensor's values are; None of codes, whose steps nothing says.

    A model that was merged in a narrow dtype may be saved in a wider one: its first values tell.
    """
    if isinstance(stored, CodedTensor):
        return None
    narrow = before.stored_dtype
    if narrow.significant_bits >= stored.dtype.significant_bits or narrow.significant_bits == 0:
        return stored.dtype
    values = reader(stored, files)(Span(0, min(stored.n_elements, CHUNK_ELEMENTS)))
    return narrow if np.array_equal(rounded(values, narrow), values, equal_nan=True) else stored.dtype


def measure(files: Files, compared: Comparison) -> Agreement:
    """Read one matrix of a model with its base and its change, once, and return how they agree.

    An element is `outside` if no result of base and change, computed in any order and precision down to the dtype's,
    is rounded to it. Before the last rounding, to the dtype of the stored values (unit roundoff u), a result is off by
    at most: u |base| where the base is wider and was rounded first; 2 v |change|, v the larger one of u and that of
    the factors, for the product and its scale; R 2^-24 max |change|, for R sums in float32, the largest change
    standing for sums of absolute products; and 3 (u + 2^-24) |result| for a sum, a norm and a quotient where there are
    norms. Rounding is monotone: what is stored lies between the two ends of that interval, each rounded. Stochastic
    rounding moves a result by less than a step of the dtype, at most 2 u |result|.

    Memory: some arrays of `CHUNK_ELEMENTS`.
    """
    change = compared.change
    read_before = reader(change.before, files)
    read_after = reader(change.after, files) if change.is_change and change.delta is None else None
    read_delta = None if change.delta is None else reader(change.delta, files)
    if compared.other is not None:
        read_after = None
        read_delta = compared.other
    read_stored = reader(compared.stored, files)
    agreement = Agreement()
    for start, span in _stretches(compared.span, change.after):
        before = _fitted(read_before, change.before, span)
        delta_N = np.zeros(span.n_elements)
        if read_delta is not None:
            delta_N += read_delta(span)
        elif read_after is not None:
            delta_N += read_after(span)
            delta_N -= before
        delta_N *= compared.factor
        _add(agreement, compared, start, before, delta_N, read_stored(span))
    return agreement


def _add(agreement: Agreement, compared: Comparison, start: int, before: Values, delta_N: Sums, stored: Values) -> None:
    grid = compared.grid
    bits = grid.significant_bits
    unit = 2.0**-bits
    factor_unit = max(unit, 2.0**-compared.change.factor_dtype.significant_bits)
    result_N = before + delta_N
    largest = float(np.max(np.abs(delta_N), initial=0.0))
    error_N = (2 * factor_unit + compared.slack) * np.abs(delta_N)
    error_N[delta_N != 0] += compared.change.rank * 2.0**-24 * largest
    if compared.change.before.dtype.significant_bits > bits:
        error_N += unit * np.abs(before)
    if compared.change.has_norms:
        error_N += 3 * (unit + 2.0**-24) * np.abs(result_N)
    if compared.is_stochastic:
        error_N += 2 * unit * np.abs(result_N)
    low = rounded((result_N - error_N).astype(np.float32), grid)
    high = rounded((result_N + error_N).astype(np.float32), grid)
    base = rounded(before, grid)
    # Where results are rounded stochastically, the exact one is what is expected on average.
    expected = result_N.astype(np.float32)
    if not compared.is_stochastic:
        expected = rounded(expected, grid)

    is_finite = np.isfinite(stored)
    is_outside = ~((stored >= low) & (stored <= high))
    is_changed = stored != base
    is_told = ~((base >= low) & (base <= high))
    is_moving = delta_N != 0
    agreement.n += len(stored)
    agreement.n_not_finite += int(np.count_nonzero(~is_finite & np.isfinite(expected)))
    agreement.n_changed += int(np.count_nonzero(is_changed))
    agreement.n_outside += int(np.count_nonzero(is_outside))
    agreement.n_outside_changed += int(np.count_nonzero(is_outside & is_changed))
    agreement.n_told += int(np.count_nonzero(is_told))
    agreement.n_told_applied += int(np.count_nonzero(is_told & ~is_outside))
    agreement.n_moving += int(np.count_nonzero(is_moving))
    kept_N = stored if compared.is_stochastic else expected
    agreement.n_rounded_away += int(np.count_nonzero(is_moving & (kept_N == base)))

    difference_N = np.where(is_finite, stored.astype(np.float64) - base, 0.0)
    agreement.stored_square += float(difference_N @ difference_N)
    agreement.change_square += float(delta_N @ delta_N)
    agreement.stored_change += float(difference_N @ delta_N)
    agreement.expected_change += float((expected.astype(np.float64) - base) @ delta_N)
    steps_N = 2 * unit * np.abs(result_N)
    agreement.step_square += float(steps_N @ steps_N)
    agreement.stored_sketch_S += _sketch(difference_N, start)
    agreement.change_sketch_S += _sketch(delta_N, start)


def _stretches(span: Span, tensor: Tensor) -> Iterator[tuple[int, Span]]:
    """Yield stretches of whole rows where one fits, each after the number of elements before it."""
    width = tensor.shape[-1] if tensor.shape else 1
    step = max(CHUNK_ELEMENTS // max(width, 1), 1) * max(width, 1)
    step = min(step, CHUNK_ELEMENTS)
    for part in BlockGrid(span.n_elements, step).spans():
        yield part.start, Span(span.start + part.start, span.start + part.stop)


def reader(tensor: Readable, files: Files) -> Read:
    """Open a tensor for reads of spans in float32; keeps what the opened tensor keeps."""
    fetch = tensor.opened(files)
    purpose = Purpose.ANALYSIS

    def read(span: Span) -> Values:
        raw = np.empty(span.n_elements * tensor.dtype.itemsize, np.uint8)
        fetch(span, raw, purpose)
        return decoded(raw, tensor.dtype.kernel_code)

    return read


def delta_reader(change: Change, files: Files) -> Read:
    """Open what a change adds to its base, whatever makes it."""
    if change.delta is not None:
        return reader(change.delta, files)
    read_before = reader(change.before, files)
    read_after = reader(change.after, files)
    return lambda span: read_after(span) - _fitted(read_before, change.before, span)


def _fitted(read: Read, tensor: Tensor, span: Span) -> Values:
    """Read a span of a base, with zeros for the rows that a resized table has in addition."""
    stop = min(span.stop, tensor.n_elements)
    if stop == span.stop:
        return read(span)
    values = np.zeros(span.n_elements, np.float32)
    if stop > span.start:
        values[: stop - span.start] = read(Span(span.start, stop))
    return values


def rounded(values: Values, dtype: DType) -> Values:
    """Return values rounded to a dtype, in float32."""
    if holds_results(dtype):
        return values
    return decoded(encoded(values, dtype.kernel_code), dtype.kernel_code)


def _sketch(values_N: Sums, start: int) -> Sums:
    """Sum elements with random signs into a few columns: products of sketches are those of the whole, on average.

    The sign of an element depends on its place in its matrix alone.
    """
    n_rows = -(-len(values_N) // SKETCH)
    padded = np.zeros(n_rows * SKETCH)
    padded[: len(values_N)] = values_N
    place_R = np.arange(n_rows, dtype=np.uint64) + np.uint64(start // SKETCH + 1)
    mixed_R = place_R * np.uint64(0x9E3779B97F4A7C15)
    mixed_R = (mixed_R ^ (mixed_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    signs_R = np.where(mixed_R >> np.uint64(63), 1.0, -1.0)
    return signs_R @ padded.reshape(n_rows, SKETCH)
