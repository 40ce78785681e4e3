"""Read a finished result back and compare it with its sources before it is published: samples, or everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DTypeKind, Span
from mergepipe.errors import CorruptError
from mergepipe.snapshots.manifest import SelfCheck, Thoroughness
from mergepipe.storage.contract import Store
from mergepipe.tailor.checkpoint import StateReader, StoredState
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import cast_bytes, values_of

StateKey: TypeAlias = tuple[str, str]  # a parameter and a kind

_SAMPLE_ELEMENTS = 32
_BLOCK_ELEMENTS = 1 << 20
_READERS = 8
_STATES_AT_ONCE = 64
_MOST_AHEAD = 1 << 20  # elements, each with its tolerance: 16 MiB
_TOLERANCES = {"F64": 2.0**-20, "F32": 2.0**-20, "BF16": 2.0**-7, "F16": 2.0**-9}
_SMALLEST_STEPS = {"F64": 0.0, "F32": 2.0**-149, "BF16": 2.0**-133, "F16": 2.0**-24}
"""Between subnormal numbers of the dtype."""
_NO_STATES: Mapping[StateKey, StoredState] = MappingProxyType({})


class ResultCheck:
    """Compares states of a result with their sources, samples of which may be read ahead. A context manager.

    `summands(name, kind)` are the raw states that a state is the average of by `weights`, in float64; one alone, or
    the last where elements are no floats, is cast. What is rounded stochastically is compared within one step.
    """

    def __init__(
        self,
        store: Store,
        thoroughness: Thoroughness,
        summands: Callable[[str, str], Sequence[StoredState]],
        weights: tuple[float, ...] = (1.0,),
        *,
        is_stochastic: bool = False,
    ) -> None:
        self._store = store
        self._thoroughness = thoroughness
        self._summands = summands
        self._weights = weights
        self._is_stochastic = is_stochastic
        self._reader = StateReader(store)
        is_large = thoroughness is Thoroughness.FULL and len(weights) > 1  # whole blocks of all sources
        self._pool = ThreadPoolExecutor(1 if is_large else _READERS, "mergepipe-tailor-check")
        self._ahead: dict[object, Future[list[_Wanted]]] = {}

    def __enter__(self) -> ResultCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.__exit__()

    def read_ahead(self, planned: Mapping[StateKey, StoredState]) -> None:
        """Begin to read the samples of the sources, of at most `_MOST_AHEAD` elements; the output need not be there."""
        if self._thoroughness is not Thoroughness.SAMPLED:
            return
        n_elements = 0
        for batch in self._batches(planned):
            n_elements += _count(batch)
            if n_elements > _MOST_AHEAD:
                return
            self._ahead[_identity(batch)] = self._pool.submit(self._wanted, batch)

    def compare(
        self,
        states: Mapping[StateKey, StoredState],
        advance: Callable[[], None],
        masters: Mapping[StateKey, StoredState] = _NO_STATES,
    ) -> SelfCheck:
        """Compare what was written with its sources and, where `masters` has one, with the result's own master."""
        if self._thoroughness is Thoroughness.OFF:
            return SelfCheck(self._thoroughness, 0, 0, 0)
        n_elements = 0
        for compared in self._pool.map(partial(self._compare, masters), self._batches(states)):
            n_elements += compared
            advance()
        return SelfCheck(self._thoroughness, len(states), n_elements, sum(key in masters for key in states))

    def _batches(self, states: Mapping[StateKey, StoredState]) -> Iterator[Sequence[_Compared]]:
        """Yield what is compared at once: samples of some states, which lie beside one another, or one block."""
        batch: list[_Compared] = []
        for state in sorted(states.values(), key=lambda state: state.kind):
            pieces = [piece.span for piece in state.pieces]
            if self._thoroughness is Thoroughness.FULL:
                blocks = (range(span.start, span.stop, _BLOCK_ELEMENTS) for span in pieces)
                for span, starts in zip(pieces, blocks, strict=True):
                    ends = (min(start + _BLOCK_ELEMENTS, span.stop) for start in starts)
                    yield from ([(state, (Span(a, b),))] for a, b in zip(starts, ends, strict=True))
            elif pieces:
                batch.append((state, tuple(end for span in pieces for end in _both_ends(span))))
            if len(batch) == _STATES_AT_ONCE:
                yield batch
                batch = []
        if batch:
            yield batch

    def _compare(self, masters: Mapping[StateKey, StoredState], batch: Sequence[_Compared]) -> int:
        """Compare states, from any thread; return how many elements were compared."""
        ahead = self._ahead.pop(_identity(batch), None)
        wanted = self._wanted(batch) if ahead is None else ahead.result()
        made = self._reader.read_many([(unpacked(self._store, state), spans) for state, spans in batch])
        for compared, values, raw in zip(batch, wanted, made, strict=True):
            _require_same(compared, values, raw)
            state, spans = compared
            master = masters.get((state.parameter, state.kind))
            if master is not None:
                stored = self._reader.read(unpacked(self._store, master), *spans)
                _require_same(compared, _cast(compared, stored, master), raw)
        return _count(batch)

    def _wanted(self, batch: Sequence[_Compared]) -> list[_Wanted]:
        """Read what elements of states of the result must be."""
        summands = []
        for state, _ in batch:
            states = self._summands(state.parameter, state.kind)
            summands.append(states if state.dtype.kind is DTypeKind.FLOAT else states[-1:])
        requests = [(state, spans) for (_, spans), states in zip(batch, summands, strict=True) for state in states]
        read = iter(self._reader.read_many(requests))
        return [
            self._expected(compared, [(next(read), state) for state in states])
            for compared, states in zip(batch, summands, strict=True)
        ]

    def _expected(self, compared: _Compared, summands: Sequence[tuple[NDArray[np.uint8], StoredState]]) -> _Wanted:
        """Return what the elements of a state must be, by those of its sources."""
        dtype = compared[0].dtype
        is_cast = len(summands) == 1 and (summands[0][1].dtype == dtype or not self._is_stochastic)
        return _cast(compared, *summands[0]) if is_cast else _average(compared, summands, self._weights)


_Compared: TypeAlias = tuple[StoredState, tuple[Span, ...]]
"""A state of the result, and the elements of it that are compared."""

_Wanted: TypeAlias = tuple[NDArray[Any], NDArray[np.float64] | None]
"""Expected elements: averages in float64 with their largest distances, or bytes a row and None."""


def _identity(batch: Sequence[_Compared]) -> object:
    """Identify what is compared, wherever it lies."""
    return tuple((state.parameter, state.kind, state.dtype, spans) for state, spans in batch)


def _count(batch: Sequence[_Compared]) -> int:
    return sum(span.n_elements for _, spans in batch for span in spans)


def _both_ends(span: Span) -> Iterator[Span]:
    head = min(span.start + _SAMPLE_ELEMENTS, span.stop)
    yield Span(span.start, head)
    if head < span.stop:
        yield Span(max(head, span.stop - _SAMPLE_ELEMENTS), span.stop)


def _cast(compared: _Compared, raw: NDArray[np.uint8], state: StoredState) -> _Wanted:
    """Cast the elements of a state."""
    dtype = compared[0].dtype
    return cast_bytes(raw, state.dtype, dtype, state.parameter).reshape(-1, dtype.itemsize), None


def _average(
    compared: _Compared, summands: Sequence[tuple[NDArray[np.uint8], StoredState]], weights: Sequence[float]
) -> _Wanted:
    """Average the elements of states."""
    dtype = compared[0].dtype
    averages, largest = np.zeros(_count([compared])), np.zeros(_count([compared]))
    with np.errstate(invalid="ignore"):
        for weight, (raw, state) in zip(weights, summands, strict=True):
            summand = values_of(raw, state.dtype, state.parameter).astype(np.float64)
            averages += weight * summand
            np.maximum(largest, np.abs(summand), out=largest)
    return averages, _TOLERANCES[dtype.name] * largest + _SMALLEST_STEPS[dtype.name]


def _require_same(compared: _Compared, wanted: _Wanted, raw: NDArray[np.uint8]) -> None:
    """Compare averages within the rounding of the dtype where they are finite, other elements but for the bits of NaN.

    Raises:
        CorruptError: they differ.
    """
    (values, distances), (state, spans) = wanted, compared
    if distances is not None:
        made = values_of(raw, state.dtype, state.parameter).astype(np.float64)
        with np.errstate(invalid="ignore"):
            is_same = (np.abs(made - values) <= distances) | ~np.isfinite(values)
    else:
        is_same = (raw.reshape(values.shape) == values).all(axis=1)
        if state.dtype.kind is DTypeKind.FLOAT and not is_same.all():
            stored = np.ascontiguousarray(values).reshape(-1)
            is_nan = [np.isnan(values_of(either, state.dtype, state.parameter)) for either in (raw, stored)]
            is_same |= is_nan[0] & is_nan[1]
    if is_same.all():
        return
    ends = np.cumsum([span.n_elements for span in spans])
    span = spans[int(np.searchsorted(ends, int(np.argmin(is_same)), side="right"))]
    message = f"{state.kind} differs from its sources in elements [{span.start}, {span.stop})"
    hint = "nothing was published; check the sources, then report it"
    raise CorruptError.of("output.damaged", state.parameter, message, hint)
