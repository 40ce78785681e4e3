"""Compare a finished composite or average with its sources before it is published: samples, or everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import Span
from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.snapshots.composite import SelfCheck, Thoroughness
from mergepipe.storage.contract import Store
from mergepipe.tailor.assignment import DERIVED_KINDS, Assignment, StepChoice
from mergepipe.tailor.checkpoint import FP32, StateReader, StoredState, TrainingCheckpoint
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import cast_bytes, values_of
from mergepipe.tailor.formats.registry import format_named

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
