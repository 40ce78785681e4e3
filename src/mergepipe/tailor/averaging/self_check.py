"""Compare a finished average with its sources: samples of every contiguous piece, or everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.blocks import DType, DTypeKind, Span
from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.storage.location import Location
from mergepipe.tailor.averaging.request import OptimizerState
from mergepipe.tailor.checkpoint import WEIGHT, StoredState
from mergepipe.tailor.composition.composition_plan import unpacked
from mergepipe.tailor.composition.copy.dtype_cast import cast_bytes, values_of
from mergepipe.tailor.composition.self_check import READERS, SelfCheck, Thoroughness, compared_batches
from mergepipe.tailor.formats.open_checkpoint import open_training_checkpoint
from mergepipe.tailor.formats.trainer_files import weight_state
from mergepipe.tailor.values import StateReader

if TYPE_CHECKING:
    from mergepipe.tailor.averaging.average import Averaging

_TOLERANCES = {"F64": 2.0**-20, "F32": 2.0**-20, "BF16": 2.0**-7, "F16": 2.0**-9}
_MOST_AHEAD = 1 << 20  # elements, each with its tolerance: 16 MiB


class AverageCheck:
    """Compares a finished average with its sources, samples of which may be read ahead. A context manager."""

    def __init__(self, averaging: Averaging, thoroughness: Thoroughness) -> None:
        self._averaging = averaging
        self._thoroughness = thoroughness
        self._reader = StateReader(averaging.store)
        n_threads = READERS if thoroughness is Thoroughness.SAMPLED else 1  # whole blocks of all sources are large
        self._pool = ThreadPoolExecutor(n_threads, "mergepipe-tailor-check")
        self._ahead: dict[tuple[str, str], Future[_Wanted]] = {}

    def __enter__(self) -> AverageCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def read_ahead(self) -> None:
        """Begin to read the samples of the sources, of at most `_MOST_AHEAD` elements; the output need not be there."""
        if self._thoroughness is not Thoroughness.SAMPLED:
            return
        n_elements = 0
        for key, planned in self._averaging.planned_states().items():
            for spans in compared_batches(planned, self._thoroughness):
                n_elements += sum(span.n_elements for span in spans)
                if n_elements > _MOST_AHEAD:
                    return
                self._ahead[key] = self._pool.submit(self._wanted, key, spans, planned.dtype)

    def compare(self, made: Location, home: Location, advance: Callable[[], None]) -> SelfCheck:
        """Compare what was written with averages in float64, and everything else with the newest checkpoint.

        Raises:
            CorruptError: `tailor.self-check`.
        """
        if self._thoroughness is Thoroughness.OFF:
            return SelfCheck(self._thoroughness, 0, 0, 0)
        states = _made_states(self._averaging, made, home)
        n_elements = 0
        for compared in self._pool.map(self._state, states, states.values()):
            n_elements += compared
            advance()
        return SelfCheck(self._thoroughness, len(states), n_elements, 0)

    def _state(self, key: tuple[str, str], made: StoredState) -> int:
        """Compare one state with its sources, from any thread; return how many elements were compared."""
        made = unpacked(self._averaging.store, made)
        ahead = self._ahead.pop(key, None)
        n_elements = 0
        for spans in compared_batches(made, self._thoroughness):
            wanted = None if ahead is None else ahead.result()
            if wanted is None or (wanted.spans, wanted.dtype) != (spans, made.dtype):
                wanted = self._wanted(key, spans, made.dtype)
            is_same = wanted.agrees(self._reader.read(made, *spans), made.parameter)
            if not is_same.all():
                raise _differs(made, spans, int(np.argmin(is_same)))
            n_elements += len(is_same)
        return n_elements

    def _wanted(self, key: tuple[str, str], spans: Sequence[Span], dtype: DType) -> _Wanted:
        """Read what elements of a state of the result must be, as values of `dtype`."""
        summands = self._averaging.summands(*key)
        if not summands or dtype.kind is not DTypeKind.FLOAT:
            state = summands[-1] if summands else unpacked(self._averaging.store, self._averaging.newest.states[key])
            stored = cast_bytes(self._reader.read(state, *spans), state.dtype, dtype, state.parameter)
            return _Wanted(spans, dtype, stored.reshape(-1, dtype.itemsize), None)
        n_elements = sum(span.n_elements for span in spans)
        averages, largest = np.zeros(n_elements), np.zeros(n_elements)
        with np.errstate(invalid="ignore"):
            for weight, state in zip(self._averaging.weights, summands, strict=True):
                summand = values_of(self._reader.read(state, *spans), state.dtype, state.parameter).astype(np.float64)
                averages += weight * summand
                np.maximum(largest, np.abs(summand), out=largest)
        return _Wanted(spans, dtype, averages, _TOLERANCES[dtype.name] * largest)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the elements in `spans` must be: averages in float64 and how far off they may be, or bytes a row."""

    spans: Sequence[Span]
    dtype: DType
    values: NDArray[np.float64] | NDArray[np.uint8]
    distances: NDArray[np.float64] | None

    def agrees(self, raw: NDArray[np.uint8], parameter: str) -> NDArray[np.bool_]:
        """Tell by element whether it is what it must be, as closely as its dtype tells, or that is not finite."""
        if self.distances is None:
            return np.asarray((raw.reshape(self.values.shape) == self.values).all(axis=1))
        made = values_of(raw, self.dtype, parameter).astype(np.float64)
        with np.errstate(invalid="ignore"):
            close = np.abs(made - self.values) <= self.distances
        return np.asarray(close | ~np.isfinite(self.values))


def _made_states(averaging: Averaging, made: Location, home: Location) -> Mapping[tuple[str, str], StoredState]:
    if averaging.request.optimizer is OptimizerState.NONE:
        entries = open_checkpoint(averaging.store, made).tensors.values()
        return {(e.name, WEIGHT): weight_state(e, WEIGHT) for t in entries for e in t.stored}
    opened = open_training_checkpoint(averaging.store, made, home)
    if opened.missing or opened.step != averaging.newest.step:
        raise CorruptError.of("tailor.self-check", home.name, f"is at step {opened.step}, lacks {opened.missing[:1]}")
    return opened.states


def _differs(made: StoredState, spans: Sequence[Span], place: int) -> MergePipeError:
    """Make the error for the element at `place` of all that was compared."""
    ends = np.cumsum([span.n_elements for span in spans])
    span = spans[int(np.searchsorted(ends, place, side="right"))]
    return CorruptError.of(
        "tailor.self-check", made.parameter, f"{made.kind} is not the average in elements [{span.start}, {span.stop})",
        "nothing was published; check the sources, then report it",
    )  # fmt: skip
