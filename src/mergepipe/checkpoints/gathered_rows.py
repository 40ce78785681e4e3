"""Gather a tensor's rows from other tensors: aligned, extended and padded vocabularies."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.checkpoints.open_files import decoded, encoded_into, whole_cost_bytes
from mergepipe.core.blocks import F32, DType, Span, element_count
from mergepipe.storage import ranges as ranges
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import PAGE_BYTES, scratch

ZERO = -1
REQUEST_BYTES = 1 << 20
LARGE_MEAN_ROWS = 256
_MEAN_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `[first, stop)` of the source of index `source`."""

    source: int
    first: int
    stop: int

    @property
    def n_rows(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """The source of each of R rows: row `row_R[r]` of source `origin_R[r]`, zeros, or the mean `-2 - origin_R[r]`.

    `origin_R` (int32) is the index of a source, `ZERO`, or `mean_origin(k)` for the mean of the rows `means[k]`.
    """

    origin_R: NDArray[np.int32]
    row_R: NDArray[np.int64]
    means: tuple[tuple[RowRange, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.origin_R.shape != self.row_R.shape or self.origin_R.ndim != 1:
            raise ValueError(f"{self.origin_R.shape} origins, {self.row_R.shape} rows")
        if self.origin_R.size and int(self.origin_R.min()) < mean_origin(len(self.means)) + 1:
            raise ValueError("a row is the mean of rows that are not given")
        if any(not mean or any(part.n_rows < 1 for part in mean) for mean in self.means):
            raise ValueError("a mean needs at least one row")

    @property
    def n_rows(self) -> int:
        return self.origin_R.size

    def is_identity(self, n_rows: int) -> bool:
        """Whether the map selects all `n_rows` rows of source 0 in order."""
        return (
            self.n_rows == n_rows
            and not self.origin_R.any()
            and bool(np.array_equal(self.row_R, np.arange(n_rows, dtype=np.int64)))
        )


def mean_origin(index: int) -> int:
    """Return the origin code of a row that is the mean `RowMap.means[index]`."""
    return -2 - index


@dataclass(frozen=True, slots=True)
class _Runs:
    """Elements of one span, cut into runs that are contiguous in their source.

    Run n: `n_N[n]` elements from element `source_N[n]` of source `origin_N[n]`, to element `out_N[n]` of the span.
    """

    origin_N: NDArray[np.int32]
    source_N: NDArray[np.int64]
    n_N: NDArray[np.int64]
    out_N: NDArray[np.int64]

    def of(self, origin: int) -> _Runs:
        chosen_N = np.flatnonzero(self.origin_N == origin)
        return _Runs(self.origin_N[chosen_N], self.source_N[chosen_N], self.n_N[chosen_N], self.out_N[chosen_N])

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield (source element, elements, output element) of each run."""
        return zip(self.source_N.tolist(), self.n_N.tolist(), self.out_N.tolist(), strict=True)


@dataclass(frozen=True)
class GatheredRows(ComputedTensor):
    """A tensor put together row by row (along the first dimension) from `sources`, in `dtype`.

    Rows of sources in `dtype` are copied bit by bit; others, and means, are rounded to it once. Fetching requests
    exactly the pages that hold the rows, each once per source and span; the rows of a mean are requested on top, once
    a span. All requests are charged to the purpose of the fetch, whosever rows they are.

    Law: a span costs at most what its parts cost.
    """

    name: str
    dtype: DType
    sources: tuple[Readable, ...]
    rows: RowMap
    is_delta: bool = False
    model_dtype: DType | None = None  # in which the model is stored, where that is another

    def __post_init__(self) -> None:
        row_shape = self.sources[0].shape[1:]
        for index, source in enumerate(self.sources):
            if not source.shape or source.shape[1:] != row_shape:
                raise ValueError(f"{self.name}: rows of {source.shape} and rows of shape {row_shape}")
            taken_R = self.rows.row_R[self.rows.origin_R == index]
            if taken_R.size and not 0 <= int(taken_R.min()) <= int(taken_R.max()) < source.shape[0]:
                raise ValueError(f"{self.name}: rows beyond the {source.shape[0]} of source {index}")
        if self.rows.n_rows and int(self.rows.origin_R.max()) >= len(self.sources):
            raise ValueError(f"{self.name}: rows of a source that is not given")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.n_rows, *self.sources[0].shape[1:])

    @property
    def stored_dtype(self) -> DType:
        return self.model_dtype or self.dtype

    @property
    def is_unit(self) -> bool:
        return any(source.is_unit for source in self.sources)

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(dict.fromkeys(entry for source in self.sources for entry in source.stored))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the stored rows; a row that is used twice counts twice."""
        n_rows_S = np.bincount(self.rows.origin_R[self.rows.origin_R >= 0], minlength=len(self.sources))
        for mean in self.rows.means:
            for part in mean:
                n_rows_S[part.source] += part.n_rows
        pairs = zip(n_rows_S.tolist(), self.sources, strict=True)
        return sum(n_rows * source.nbytes // max(source.shape[0], 1) for n_rows, source in pairs)

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to fetch `span`; if a source is a unit, those of everything."""
        runs = self.runs(Span(0, self.n_elements) if self.is_unit else span)
        cost = 0
        for origin in np.unique(runs.origin_N).tolist():
            if origin >= 0:
                cost += self._source_cost_bytes(origin, runs.of(origin))
            elif origin != ZERO:
                pieces = self.mean_spans(origin)
                cost += sum(self._source_cost_bytes(part.source, _one_run(span)) for part, span in pieces)
        units = [source for source in self.sources if source.is_unit]
        return cost + (whole_cost_bytes(units) if runs.n_N.size else 0)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans. Keeps `REQUEST_BYTES` per reader thread, and a float32 row per mean of many rows."""
        return _OpenedRows(self, files)

    def runs(self, span: Span) -> _Runs:
        """Return the elements of `span` as runs, in order."""
        width = element_count(self.shape[1:])
        if not span.n_elements:
            return _Runs(np.empty(0, np.int32), *(np.empty(0, np.int64) for _ in range(3)))
        rows_R = np.arange(span.start // width, -(-span.stop // width), dtype=np.int64)
        first_R = np.maximum(rows_R * width, span.start)
        n_R = np.minimum((rows_R + 1) * width, span.stop) - first_R
        origin_R = self.rows.origin_R[rows_R]
        source_R = np.where(origin_R >= 0, self.rows.row_R[rows_R], rows_R) * width + first_R % width
        starts_R = np.ones(rows_R.size, np.bool_)
        starts_R[1:] = (np.diff(origin_R) != 0) | (source_R[1:] != source_R[:-1] + n_R[:-1])
        starts_N = np.flatnonzero(starts_R)
        n_N = np.add.reduceat(n_R, starts_N)
        return _Runs(origin_R[starts_N], source_R[starts_N], n_N, first_R[starts_N] - span.start)

    def mean_spans(self, origin: int) -> Iterator[tuple[RowRange, Span]]:
        """Yield the elements that a mean is taken over, in pieces of whole rows."""
        width = element_count(self.shape[1:])
        step = max(_MEAN_CHUNK_ELEMENTS // max(width, 1), 1)
        for part in self.rows.means[mean_origin(origin)]:
            for first in range(part.first, part.stop, step):
                yield part, Span(first * width, min(first + step, part.stop) * width)

    def _source_cost_bytes(self, index: int, runs: _Runs) -> int:
        source = self.sources[index]
        if isinstance(source, TensorEntry):
            start_N, stop_N = _byte_ranges(source, runs)
            order_N = np.argsort(start_N, kind="stable")
            first_G, stop_G = _joined_pages(start_N[order_N], stop_N[order_N])
            return int((stop_G - first_G).sum())
        if source.is_unit:
            return 0
        return sum(source.cost_bytes(Span(first, first + n)) for first, n, _ in runs)


def gathered_rows(
    source: Readable, row_R: NDArray[np.int64], *, fallback: Readable | None = None, name: str | None = None
) -> GatheredRows:
    """Gather rows `row_R` of `source`; where that is -1, the same row of `fallback`, or zeros.

    With the base's tensor as `fallback`, an expert's unknown row equals the base's, so its delta is exactly zero;
    reading it is charged to the expert. Where the two dtypes differ the rows are given in float32. The unknown rows
    of a source of deltas are zeros: it takes no fallback.
    """
    if source.is_delta and fallback is not None:
        raise ValueError(f"{source.name}: the unknown rows of a delta are zeros")
    is_known_R = row_R >= 0
    origin_R = np.where(is_known_R, 0, ZERO if fallback is None else 1).astype(np.int32)
    own_R = np.arange(row_R.size, dtype=np.int64)
    sources = (source,) if fallback is None else (source, fallback)
    rows = RowMap(origin_R, np.where(is_known_R, row_R, own_R))
    return GatheredRows(name or source.name, common_dtype(sources), sources, rows, source.is_delta)


def resized(source: Readable, n_rows: int, *, fallback: Readable | None = None) -> Readable:
    """Cut or extend `source` to `n_rows` rows, new rows as in `gathered_rows`; unchanged if it fits."""
    if source.shape[0] == n_rows:
        return source
    row_R = np.arange(n_rows, dtype=np.int64)
    return gathered_rows(source, np.where(row_R < source.shape[0], row_R, -1), fallback=fallback)


def with_rows(tensor: Readable, rows: Readable, indices: Sequence[int]) -> GatheredRows:
    """Return `tensor` with its rows `indices` replaced by `rows`, in order, as a tensor of the same model."""
    origin_R = np.zeros(tensor.shape[0], np.int32)
    row_R = np.arange(tensor.shape[0], dtype=np.int64)
    origin_R[list(indices)], row_R[list(indices)] = 1, np.arange(len(indices))
    sources = (tensor, rows)
    return GatheredRows(
        tensor.name, common_dtype(sources), sources, RowMap(origin_R, row_R), model_dtype=tensor.stored_dtype
    )


def common_dtype(sources: tuple[Readable, ...]) -> DType:
    """Return the common dtype of the sources, else float32, the dtype of merging."""
    dtypes = {source.dtype for source in sources}
    return dtypes.pop() if len(dtypes) == 1 else F32


class _OpenedRows:
    """Fetches the spans of gathered rows, from many threads."""

    def __init__(self, tensor: GatheredRows, files: Mapping[Location, RangeFile]) -> None:
        self._tensor = tensor
        self._files = files
        self._nested = {
            index: source.opened(files)
            for index, source in enumerate(tensor.sources)
            if not isinstance(source, TensorEntry)
        }
        self._lock = threading.Lock()
        self._large_means: dict[int, NDArray[np.float32]] = {}

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        runs = self._tensor.runs(span)
        for origin in np.unique(runs.origin_N).tolist():
            chosen = runs.of(origin)
            if origin >= 0:
                self._fill(origin, chosen, out, purpose)
            elif origin == ZERO:
                itemsize = self._tensor.dtype.itemsize
                for _, n, first in chosen:
                    out[first * itemsize : (first + n) * itemsize] = 0
            else:
                mean_W, dtype = self._mean(origin, purpose), self._tensor.dtype
                for element, n, first in chosen:
                    repeated_N = np.resize(np.roll(mean_W, -(element % mean_W.size)), n)
                    encoded_into(repeated_N, dtype.kernel_code, out[first * dtype.itemsize :])

    def _fill(self, index: int, runs: _Runs, out: NDArray[np.uint8], purpose: Purpose) -> None:
        """Fill `runs` of one source into `out`, in the tensor's dtype."""
        source, dtype = self._tensor.sources[index], self._tensor.dtype
        if source.dtype == dtype:
            self._read(index, runs, out, purpose)
            return
        last = int((runs.out_N + runs.n_N).max())
        raw = np.empty(last * source.dtype.itemsize, np.uint8)
        self._read(index, runs, raw, purpose)
        for _, n, first in runs:
            of_run = raw[first * source.dtype.itemsize : (first + n) * source.dtype.itemsize]
            values_N = decoded(of_run, source.dtype.kernel_code)
            encoded_into(values_N, dtype.kernel_code, out[first * dtype.itemsize :])

    def _read(self, index: int, runs: _Runs, raw: NDArray[np.uint8], purpose: Purpose) -> None:
        """Read `runs` of one source into `raw`, in the source's dtype."""
        source = self._tensor.sources[index]
        if isinstance(source, TensorEntry):
            self._read_stored(source, runs, raw, purpose)
            return
        itemsize, fetch = source.dtype.itemsize, self._nested[index]
        for first, n, out_first in runs:
            fetch(Span(first, first + n), raw[out_first * itemsize : (out_first + n) * itemsize], purpose)

    def _read_stored(self, entry: TensorEntry, runs: _Runs, raw: NDArray[np.uint8], purpose: Purpose) -> None:
        start_N, stop_N = _byte_ranges(entry, runs)
        order_N = np.argsort(start_N, kind="stable")
        start_N, stop_N = start_N[order_N], stop_N[order_N]
        to_N = runs.out_N[order_N] * entry.dtype.itemsize
        for request in _requests(start_N, stop_N):
            chunk = self._request(entry, request, purpose)
            # Sorted by start: none at or after `last` begins inside the request.
            last = int(np.searchsorted(start_N, request.stop))
            for n in np.flatnonzero(stop_N[:last] > request.start).tolist():
                begin, end = max(int(start_N[n]), request.start), min(int(stop_N[n]), request.stop)
                to = int(to_N[n]) + begin - int(start_N[n])
                raw[to : to + end - begin] = chunk[begin - request.start : end - request.start]

    def _request(self, entry: TensorEntry, request: Span, purpose: Purpose) -> NDArray[np.uint8]:
        """Read one request; the bytes are valid until this thread's next call."""
        buffer = scratch("rows", REQUEST_BYTES, np.uint8)
        file = self._files[entry.file]
        needed = min(request.stop, entry.offset + entry.nbytes) - request.start
        ranges.request(file, request.start, buffer[: request.n_elements], needed, purpose)
        return buffer

    def _mean(self, origin: int, purpose: Purpose) -> NDArray[np.float32]:
        n_rows = sum(part.n_rows for part in self._tensor.rows.means[mean_origin(origin)])
        if n_rows < LARGE_MEAN_ROWS:
            return self._computed_mean(origin, n_rows, purpose)
        with self._lock:
            if origin not in self._large_means:
                self._large_means[origin] = self._computed_mean(origin, n_rows, purpose)
            return self._large_means[origin]

    def _computed_mean(self, origin: int, n_rows: int, purpose: Purpose) -> NDArray[np.float32]:
        """Compute a mean in float32, from sums in float64."""
        width = element_count(self._tensor.shape[1:])
        total_W = np.zeros(width, np.float64)
        for part, span in self._tensor.mean_spans(origin):
            dtype = self._tensor.sources[part.source].dtype
            raw = np.empty(span.n_elements * dtype.itemsize, np.uint8)
            self._read(part.source, _one_run(span), raw, purpose)
            values_N = decoded(raw, dtype.kernel_code)
            total_W += values_N.reshape(-1, width).sum(axis=0, dtype=np.float64)
        return (total_W / n_rows).astype(np.float32)


def _one_run(span: Span) -> _Runs:
    """Return a span of a source as a single run to the start of a buffer."""
    first, n, to = (np.array([value], np.int64) for value in (span.start, span.n_elements, 0))
    return _Runs(np.zeros(1, np.int32), first, n, to)


def _byte_ranges(entry: TensorEntry, runs: _Runs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return first byte and end of each run in the file of `entry`."""
    start_N = entry.offset + runs.source_N * entry.dtype.itemsize
    return start_N, start_N + runs.n_N * entry.dtype.itemsize


def _joined_pages(start_N: NDArray[np.int64], stop_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Round byte ranges (sorted by start) to pages, as disjoint ranges, touching ones joined."""
    first_N = start_N // PAGE_BYTES * PAGE_BYTES
    reach_N = np.maximum.accumulate(-(-stop_N // PAGE_BYTES) * PAGE_BYTES)
    begins_N = np.ones(start_N.size, np.bool_)
    begins_N[1:] = first_N[1:] > reach_N[:-1]
    begins_G = np.flatnonzero(begins_N)
    return first_N[begins_G], reach_N[np.append(begins_G[1:], start_N.size) - 1]


def _requests(start_N: NDArray[np.int64], stop_N: NDArray[np.int64]) -> Iterator[Span]:
    """Return the requests for byte ranges (sorted by start): whole pages, at most `REQUEST_BYTES` each."""
    for first, stop in zip(*(bounds_N.tolist() for bounds_N in _joined_pages(start_N, stop_N)), strict=True):
        for at in range(first, stop, REQUEST_BYTES):
            yield Span(at, min(at + REQUEST_BYTES, stop))
