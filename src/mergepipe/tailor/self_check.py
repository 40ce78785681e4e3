"""Read a finished result back and compare it with its sources before it is published: samples, or everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind, Span
from mergepipe.errors import CorruptError
from mergepipe.snapshots.composite import SelfCheck, Thoroughness
from mergepipe.storage.contract import Store
from mergepipe.tailor.checkpoint import StateReader, StoredState
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import cast_bytes, values_of

StateKey: TypeAlias = tuple[str, str]  # a parameter and a kind

_SAMPLE_ELEMENTS = 32
_BLOCK_ELEMENTS = 1 << 20
_READERS = 8
_MOST_AHEAD = 1 << 20  # elements, each with its tolerance: 16 MiB
_TOLERANCES = {"F64": 2.0**-20, "F32": 2.0**-20, "BF16": 2.0**-7, "F16": 2.0**-9}
_NO_STATES: Mapping[StateKey, StoredState] = MappingProxyType({})


class ResultCheck:
    """Compares states of a result with their sources, samples of which may be read ahead. A context manager.

    `summands(name, kind)` are the raw states that a state is the average of by `weights`, in float64; one alone, or
    the last where elements are no floats, is cast.
    """

    def __init__(
        self,
        store: Store,
        thoroughness: Thoroughness,
        summands: Callable[[str, str], Sequence[StoredState]],
        weights: tuple[float, ...] = (1.0,),
    ) -> None:
        self._store = store
        self._thoroughness = thoroughness
        self._summands = summands
        self._weights = weights
        self._reader = StateReader(store)
        is_large = thoroughness is Thoroughness.FULL and len(weights) > 1  # whole blocks of all sources
        self._pool = ThreadPoolExecutor(1 if is_large else _READERS, "mergepipe-tailor-check")
        self._ahead: dict[StateKey, Future[_Wanted]] = {}

    def __enter__(self) -> ResultCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def read_ahead(self, planned: Mapping[StateKey, StoredState]) -> None:
        """Begin to read the samples of the sources, of at most `_MOST_AHEAD` elements; the output need not be there."""
        if self._thoroughness is not Thoroughness.SAMPLED:
            return
        n_elements = 0
        for key, state in planned.items():
            for spans in _compared_batches(state, self._thoroughness):
                n_elements += sum(span.n_elements for span in spans)
                if n_elements > _MOST_AHEAD:
                    return
                self._ahead[key] = self._pool.submit(self._wanted, key, spans, state.dtype)

    def compare(
        self,
        states: Mapping[StateKey, StoredState],
        advance: Callable[[], None],
        masters: Mapping[StateKey, StoredState] = _NO_STATES,
    ) -> SelfCheck:
        """Compare what was written with its sources and, where `masters` has one, with the result's own master.

        Raises:
            CorruptError: `output.damaged`, a state differs.
        """
        if self._thoroughness is Thoroughness.OFF:
            return SelfCheck(self._thoroughness, 0, 0, 0)
        n_elements = 0
        for compared in self._pool.map(self._state, states, states.values(), map(masters.get, states)):
            n_elements += compared
            advance()
        return SelfCheck(self._thoroughness, len(states), n_elements, sum(key in masters for key in states))

    def _state(self, key: StateKey, made: StoredState, master: StoredState | None) -> int:
        """Compare one state, from any thread; return how many elements were compared."""
        made = unpacked(self._store, made)
        ahead = self._ahead.pop(key, None)
        n_elements = 0
        for spans in _compared_batches(made, self._thoroughness):
            raw = self._reader.read(made, *spans)
            wanted = None if ahead is None else ahead.result()
            if wanted is None or (wanted.spans, wanted.dtype) != (spans, made.dtype):
                wanted = self._wanted(key, spans, made.dtype)
            _require_same(made, spans, wanted.agrees(raw, made.parameter))
            if master is not None:
                cast = self._cast(unpacked(self._store, master), spans, made.dtype)
                _require_same(made, spans, cast.agrees(raw, made.parameter))
            n_elements += sum(span.n_elements for span in spans)
        return n_elements

    def _wanted(self, key: StateKey, spans: Sequence[Span], dtype: DType) -> _Wanted:
        """Read what elements of a state of the result must be, as values of `dtype`."""
        summands = self._summands(*key)
        if len(summands) < 2 or dtype.kind is not DTypeKind.FLOAT:
            return self._cast(summands[-1], spans, dtype)
        n_elements = sum(span.n_elements for span in spans)
        averages, largest = np.zeros(n_elements), np.zeros(n_elements)
        with np.errstate(invalid="ignore"):
            for weight, state in zip(self._weights, summands, strict=True):
                summand = values_of(self._reader.read(state, *spans), state.dtype, state.parameter).astype(np.float64)
                averages += weight * summand
                np.maximum(largest, np.abs(summand), out=largest)
        return _Wanted(spans, dtype, averages, _TOLERANCES[dtype.name] * largest)

    def _cast(self, state: StoredState, spans: Sequence[Span], dtype: DType) -> _Wanted:
        stored = cast_bytes(self._reader.read(state, *spans), state.dtype, dtype, state.parameter)
        return _Wanted(spans, dtype, stored.reshape(-1, dtype.itemsize), None)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the elements in `spans` must be: averages in float64 and how far off they may be, or bytes a row."""

    spans: Sequence[Span]
    dtype: DType
    values: NDArray[np.float64] | NDArray[np.uint8]
    distances: NDArray[np.float64] | None

    def agrees(self, raw: NDArray[np.uint8], parameter: str) -> NDArray[np.bool_]:
        """Compare elements: averages within the rounding of the dtype where they are finite, bytes but for NaNs'."""
        if self.distances is not None:
            made = values_of(raw, self.dtype, parameter).astype(np.float64)
            with np.errstate(invalid="ignore"):
                close = np.abs(made - self.values) <= self.distances
            return np.asarray(close | ~np.isfinite(self.values))
        is_same = np.asarray((raw.reshape(self.values.shape) == self.values).all(axis=1))
        if self.dtype.kind is DTypeKind.FLOAT and not is_same.all():
            stored = np.ascontiguousarray(self.values, np.uint8).reshape(-1)
            is_nan = [np.isnan(values_of(either, self.dtype, parameter)) for either in (raw, stored)]
            is_same |= is_nan[0] & is_nan[1]
        return is_same


def _require_same(made: StoredState, spans: Sequence[Span], is_same: NDArray[np.bool_]) -> None:
    if is_same.all():
        return
    ends = np.cumsum([span.n_elements for span in spans])
    span = spans[int(np.searchsorted(ends, int(np.argmin(is_same)), side="right"))]
    raise CorruptError.of(
        "output.damaged", made.parameter,
        f"{made.kind} differs from its sources in elements [{span.start}, {span.stop})",
        "nothing was published; check the sources, then report it",
    )  # fmt: skip


def _compared_batches(state: StoredState, thoroughness: Thoroughness) -> Iterator[Sequence[Span]]:
    """Yield the elements of a state that are compared, in what is read at once: all samples, or a block."""
    spans: list[Span] = []
    for start, stop in ((piece.span.start, piece.span.stop) for piece in state.pieces):
        if thoroughness is Thoroughness.FULL:
            yield from ([Span(at, min(at + _BLOCK_ELEMENTS, stop))] for at in range(start, stop, _BLOCK_ELEMENTS))
            continue
        head = min(start + _SAMPLE_ELEMENTS, stop)
        spans += [Span(start, head)]
        spans += [Span(max(head, stop - _SAMPLE_ELEMENTS), stop)] if head < stop else []
    if spans:
        yield spans
