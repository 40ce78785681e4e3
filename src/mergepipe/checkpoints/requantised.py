"""Write a merged weight in the codes of its base: FP8 codes and their scales."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.codes import CodedTensor, ScaledFP8, elements_of
from mergepipe.checkpoints.contract import ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.checkpoints.open_files import decoded, encoded, read_elements, read_span, whole_cost_bytes
from mergepipe.core.blocks import F8_E4M3, F8_E5M2, DType, Span
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

_LARGEST = {F8_E4M3.kernel_code: np.float32(448), F8_E5M2.kernel_code: np.float32(57344)}
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Requantised(ComputedTensor):
    """The codes of a merged weight as its base stores them, or (`is_scale`) their scales.

    Of each group of elements that share a scale, if a merge left all of them as they were (to the bits of the merged
    dtype), codes and scale are the base's bits. Else the scale is the largest magnitude over the dtype's largest value,
    rounded to the dtype of the scales, with `powers_of_two` upwards to one, and a code is the nearest to the quotient;
    a group of zeros keeps its scale. Codes and scales of a weight have one `shared`, in this process: the groups'
    scales, and the sums of the squared error and of the squared numbers. Memory: a scale and a byte for each group of
    the weight until all of its codes are made, and a million elements.
    """

    merged: Readable
    base: CodedTensor
    is_scale: bool
    powers_of_two: bool = False
    shared: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def _entry(self) -> TensorEntry:
        return self.base.stored[int(self.is_scale)]

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def dtype(self) -> DType:
        return self._entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._entry.shape

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (*self.merged.stored, *self.base.stored)

    def cost_bytes(self, span: Span) -> int:
        return 0 if not span.n_elements else whole_cost_bytes(self.stored)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; the first one looks at all of the weight."""
        scheme = self.base.scheme
        shared = self.shared
        lock = threading.Lock()
        assert isinstance(scheme, ScaledFP8)

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            with lock:
                same_GK, scales = shared.get("groups") or self._survey(scheme, files, purpose)
            if self.is_scale:
                out[:] = scales[span.start * self.dtype.itemsize :][: len(out)]
                return
            if not span.n_elements:
                return
            scales_GK = decoded(scales, scheme.scale_kernel).reshape(same_GK.shape)
            for rows in _chunks(self.base.rows_of(span), scheme.columns):
                raw, merged = self._raw(scheme, rows, files, purpose)
                numbers = self._decoded(scheme, merged)
                codes, errors = _coded(scheme, rows, numbers, raw[0], scales_GK, same_GK)
                first = rows.start * scheme.columns
                start = max(first, span.start)
                stop = min(rows.stop * scheme.columns, span.stop)
                wanted = slice(start - first, stop - first)
                out[start - span.start : stop - span.start] = codes[wanted]
                squared_error = np.dot(errors[wanted], errors[wanted])
                changed = numbers.reshape(-1)[wanted]
                squared_numbers = np.dot(changed, changed)
                with lock:
                    shared["squares"] += [squared_error, squared_numbers]
                    shared["left"] -= stop - start
            if not shared["left"]:
                shared.pop("groups", None)

        return fetch

    def _raw(
        self, scheme: ScaledFP8, rows: Span, files: Mapping[Location, RangeFile], purpose: Purpose
    ) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint8]]:
        """Read rows: the base's bytes, and the merged numbers'."""
        raw = [read_span(part, of_part, files, purpose) for part, of_part in self.base.parts_of(rows)]
        return raw, read_elements(self.merged, elements_of(rows, scheme.columns), files, purpose)

    def _decoded(self, scheme: ScaledFP8, merged: NDArray[np.uint8]) -> NDArray[np.float32]:
        return decoded(merged, self.merged.dtype.kernel_code).reshape(-1, scheme.columns)

    def _survey(
        self, scheme: ScaledFP8, files: Mapping[Location, RangeFile], purpose: Purpose
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
        """Find whether all numbers of each group (G, K) of rows and columns are the base's, and the groups' scales."""
        n_rows = self.base.shape[0]
        starts = np.arange(0, scheme.columns, scheme.block[1])
        largest_GK = np.zeros((-(-n_rows // scheme.block[0]), len(starts)), np.float32)
        same_GK = np.ones(largest_GK.shape, np.bool_)
        for rows in _chunks(Span(0, n_rows), scheme.columns):
            raw, merged = self._raw(scheme, rows, files, purpose)
            unchanged = encoded(scheme.decode(rows, raw), self.merged.dtype.kernel_code)
            bits = f"u{self.merged.dtype.itemsize}"
            same_RC = (merged.view(bits) == unchanged.view(bits)).reshape(-1, scheme.columns)
            group_R = _groups(rows, scheme.block[0])
            first_of_group = np.flatnonzero(np.diff(group_R, prepend=-1))
            groups = slice(int(group_R[0]), int(group_R[-1]) + 1)
            magnitudes_RC = np.abs(self._decoded(scheme, merged))
            for reduce, of_rows, of_groups in (
                (np.maximum, magnitudes_RC, largest_GK),
                (np.logical_and, same_RC, same_GK),
            ):
                by_group_of_rows = reduce.reduceat(of_rows, first_of_group, axis=0)
                part_GK = reduce.reduceat(by_group_of_rows, starts, axis=1)
                reduce(of_groups[groups], part_GK, out=of_groups[groups])
        scales = (largest_GK / _LARGEST[scheme.code_kernel]).reshape(-1)
        if self.powers_of_two:
            mantissas, exponents = np.frexp(scales)
            scales = np.ldexp(np.float32(1), exponents - (mantissas == np.float32(0.5))).astype(np.float32)
        kept = read_span(self.base.stored[1], Span(0, scales.size), files, purpose)
        made = encoded(scales, scheme.scale_kernel)
        keeps = same_GK.reshape(-1) | ~(decoded(made, scheme.scale_kernel) > 0)
        made = np.where(keeps[:, None], kept.reshape(len(keeps), -1), made.reshape(len(keeps), -1)).reshape(-1)
        self.shared.setdefault("squares", np.zeros(2))  # codes and scales may look at the weight at the same time
        self.shared.setdefault("left", np.array(self.base.n_elements))
        self.shared["groups"] = same_GK, made
        return same_GK, made


def _coded(
    scheme: ScaledFP8,
    rows: Span,
    numbers_RC: NDArray[np.float32],
    base_codes: NDArray[np.uint8],
    scales_GK: NDArray[np.float32],
    same_GK: NDArray[np.bool_],
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Encode the numbers of some rows; return codes and errors by element.

    Groups that are the same keep the codes of the base: their errors, and their numbers in place, become 0.
    """
    group_R = _groups(rows, scheme.block[0])

    def by_element(of_groups: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(of_groups[group_R], scheme.block[1], axis=1)[:, : scheme.columns]

    scales_RC = by_element(scales_GK)
    same_RC = by_element(same_GK)
    made = encoded(numbers_RC / scales_RC, scheme.code_kernel)
    errors_RC = decoded(made, scheme.code_kernel).reshape(numbers_RC.shape) * scales_RC - numbers_RC
    errors_RC[same_RC] = 0
    numbers_RC[same_RC] = 0
    return np.where(same_RC.reshape(-1), base_codes, made), errors_RC.reshape(-1)


def _groups(elements: Span, size: int) -> NDArray[np.int64]:
    return np.arange(elements.start, elements.stop) // size


def _chunks(rows: Span, columns: int) -> Iterator[Span]:
    """Cut rows into stretches of about a million elements."""
    step = max(1, _CHUNK_ELEMENTS // columns)
    return (Span(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step))
