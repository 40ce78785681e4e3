"""Compare a finished composite or average with its sources before it is published: samples, or everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.blocks import DType, DTypeKind, Span
from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.snapshots.composite import SelfCheck, Thoroughness
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.assignment import DERIVED_KINDS, Assignment, StepChoice
from mergepipe.tailor.checkpoint import FP32, WEIGHT, StateReader, StoredState, TrainingCheckpoint
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import cast_bytes, values_of
from mergepipe.tailor.formats.hf_trainer import weight_state
from mergepipe.tailor.formats.registry import format_named, open_training_checkpoint

if TYPE_CHECKING:
    from mergepipe.tailor.averaging import Averaging

# --- read a finished composite back and compare it with its sources before it is published ---


_SAMPLE_ELEMENTS = 32
_BLOCK_ELEMENTS = 1 << 20
READERS = 8


def check_composite(
    store: Store,
    made: TrainingCheckpoint,
    assignment: Assignment,
    steps: tuple[StepChoice, ...],
    thoroughness: Thoroughness,
    on_state: Callable[[], None],
) -> SelfCheck:
    """Compare every state of `made` with its source, every copy of a weight with its master, and the step counters."""
    _check_structure(made, assignment, steps)
    if thoroughness is Thoroughness.OFF:
        return SelfCheck(thoroughness, 0, 0, 0)
    n_elements = copies = 0
    with StateReader(store) as reader, ThreadPoolExecutor(READERS, "mergepipe-tailor-check") as pool:
        check = _Check(store, reader, made, assignment, thoroughness)
        for compared, is_copy in pool.map(check.state, made.states.values()):
            on_state()
            n_elements += compared
            copies += is_copy
    return SelfCheck(thoroughness, len(made.states), n_elements, copies)


@dataclass(frozen=True, slots=True)
class _Check:
    """Compares single states, from any thread."""

    store: Store
    reader: StateReader
    made: TrainingCheckpoint
    assignment: Assignment
    thoroughness: Thoroughness

    def state(self, state: StoredState) -> tuple[int, bool]:
        """Compare one state with its source and, if it is a copy of a weight, with the composite's own master.

        Returns how many elements were compared, and whether there was a master.
        """
        owner = self.made.units.tied.get(state.parameter, state.parameter)
        stored = self.assignment.find_state(state.parameter, state.kind)
        if stored is None:
            raise _failed(self.made, f"{state.kind} of {state.parameter} has no source")
        target = unpacked(self.store, state)
        compared = self._compare(unpacked(self.store, stored), target)
        master = self.made.states.get((owner, FP32)) if state.kind in DERIVED_KINDS else None
        if master is not None:
            self._compare(unpacked(self.store, master), target)
        return compared, master is not None

    def _compare(self, stored: StoredState, target: StoredState) -> int:
        """Compare `target` with `stored` cast to its dtype; return how many elements were compared."""
        count = 0
        for spans in compared_batches(target, self.thoroughness):
            if not self._is_same(stored, target, spans):
                span = next((span for span in spans if not self._is_same(stored, target, [span])), spans[0])
                raise _failed(
                    self.made, f"{target.kind} of {target.parameter} differs from {stored.kind} of its source in "
                    f"elements [{span.start}, {span.stop})",
                )  # fmt: skip
            count += sum(span.n_elements for span in spans)
        return count

    def _is_same(self, stored: StoredState, target: StoredState, spans: Sequence[Span]) -> bool:
        wanted = cast_bytes(self.reader.read(stored, *spans), stored.dtype, target.dtype, stored.parameter)
        return _same(wanted, self.reader.read(target, *spans), target)


def _failed(made: TrainingCheckpoint, message: str) -> MergePipeError:
    return CorruptError.of(
        "output.damaged", made.path.name, message, "nothing was published; check the sources, then report it"
    )


def _check_structure(made: TrainingCheckpoint, assignment: Assignment, steps: tuple[StepChoice, ...]) -> None:
    if made.missing:
        raise _failed(made, f"lacks {made.missing[0]}")
    is_other_step = made.step != assignment.state.step and format_named(made.format).records_step
    if is_other_step or dict(made.parameters) != dict(assignment.skeleton.parameters):
        raise _failed(made, f"is at step {made.step} with {len(made.parameters)} parameters")
    wanted = {name: choice.value for choice in steps for name in choice.counter.parameters}
    written_steps = {name: step.value for step in made.steps for name in step.parameters}
    wrong = [name for name, value in wanted.items() if written_steps.get(name) != value]
    if wrong:
        raise _failed(made, f"the step counter of {wrong[0]} is {written_steps.get(wrong[0])}, not {wanted[wrong[0]]}")


def _same(a: NDArray[np.uint8], b: NDArray[np.uint8], state: StoredState) -> bool:
    """Whether the bytes are equal except for the payload of NaNs."""
    if np.array_equal(a, b):
        return True
    x, y = (values_of(stored, state.dtype, state.parameter).astype(np.float64) for stored in (a, b))
    return bool(np.all((x == y) | (np.isnan(x) & np.isnan(y)))) and bool(np.isnan(x).any())


def compared_batches(state: StoredState, thoroughness: Thoroughness) -> Iterator[Sequence[Span]]:
    """Yield the elements of a state that are compared, in what is read at once: all samples, or a block."""
    spans = list(_compared_spans(state, thoroughness))
    if thoroughness is Thoroughness.FULL:
        yield from ([span] for span in spans)
    elif spans:
        yield spans


def _compared_spans(state: StoredState, thoroughness: Thoroughness) -> Iterator[Span]:
    for piece in state.pieces:
        start, stop = piece.span.start, piece.span.stop
        if thoroughness is Thoroughness.FULL:
            yield from (Span(at, min(at + _BLOCK_ELEMENTS, stop)) for at in range(start, stop, _BLOCK_ELEMENTS))
            continue
        head = min(start + _SAMPLE_ELEMENTS, stop)
        yield Span(start, head)
        if head < stop:
            yield Span(max(head, stop - _SAMPLE_ELEMENTS), stop)


# --- compare a finished average with its sources: samples of every contiguous piece, or everything ---


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
        """Compare what was written with averages in float64, and everything else with the newest checkpoint."""
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
        if len(summands) < 2 or dtype.kind is not DTypeKind.FLOAT:
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
    if averaging.request.is_model:
        entries = open_checkpoint(averaging.store, made).tensors.values()
        return {(e.name, WEIGHT): weight_state(e, WEIGHT) for t in entries for e in t.stored}
    opened = open_training_checkpoint(averaging.store, made, home)
    if opened.missing or opened.step != averaging.newest.step:
        raise CorruptError.of("output.damaged", home.name, f"is at step {opened.step}, lacks {opened.missing[:1]}")
    return opened.states


def _differs(made: StoredState, spans: Sequence[Span], place: int) -> MergePipeError:
    """Make the error for the element at `place` of all that was compared."""
    ends = np.cumsum([span.n_elements for span in spans])
    span = spans[int(np.searchsorted(ends, place, side="right"))]
    return CorruptError.of(
        "output.damaged", made.parameter,
        f"{made.kind} differs from its sources in elements [{span.start}, {span.stop})",
        "nothing was published; check the sources, then report it",
    )  # fmt: skip
