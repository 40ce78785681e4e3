"""Compare a finished average with its sources: samples of every contiguous piece, or everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.blocks import DTypeKind, Span
from mergepipe.core.values import dataclass
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


def compare(
    averaging: Averaging, made: Location, home: Location, thoroughness: Thoroughness, advance: Callable[[], None]
) -> SelfCheck:
    """Compare what was written with averages in float64, and everything else with the newest checkpoint.

    Raises:
        CorruptError: `tailor.self-check`.
    """
    if thoroughness is Thoroughness.OFF:
        return SelfCheck(thoroughness, 0, 0, 0)
    states = _made_states(averaging, made, home)
    n_threads = READERS if thoroughness is Thoroughness.SAMPLED else 1  # whole blocks of all sources are large
    n_elements = 0
    with StateReader(averaging.store) as reader, ThreadPoolExecutor(n_threads, "mergepipe-tailor-check") as pool:
        check = _Check(averaging, reader, thoroughness)
        for compared in pool.map(check.state, states, states.values()):
            n_elements += compared
            advance()
    return SelfCheck(thoroughness, len(states), n_elements, 0)


def _made_states(averaging: Averaging, made: Location, home: Location) -> Mapping[tuple[str, str], StoredState]:
    if averaging.request.optimizer is OptimizerState.NONE:
        entries = open_checkpoint(averaging.store, made).tensors.values()
        return {(e.name, WEIGHT): weight_state(e, WEIGHT) for t in entries for e in t.stored}
    opened = open_training_checkpoint(averaging.store, made, home)
    if opened.missing or opened.step != averaging.newest.step:
        raise CorruptError.of("tailor.self-check", home.name, f"is at step {opened.step}, lacks {opened.missing[:1]}")
    return opened.states


@dataclass(frozen=True, slots=True)
class _Check:
    """Compares single states, from any thread."""

    averaging: Averaging
    reader: StateReader
    thoroughness: Thoroughness

    def state(self, key: tuple[str, str], made: StoredState) -> int:
        """Compare one state with its sources; return how many elements were compared."""
        made = unpacked(self.averaging.store, made)
        summands = self.averaging.summands(*key)
        n_elements = 0
        for spans in compared_batches(made, self.thoroughness):
            raw = self.reader.read(made, *spans)
            if summands and made.dtype.kind is DTypeKind.FLOAT:
                is_same = self._is_average(summands, spans, raw, made)
            else:
                newest = summands[-1] if summands else unpacked(self.averaging.store, self.averaging.newest.states[key])
                stored = cast_bytes(self.reader.read(newest, *spans), newest.dtype, made.dtype, made.parameter)
                is_same = (stored == raw).reshape(-1, made.dtype.itemsize).all(axis=1)
            if not is_same.all():
                raise _differs(made, spans, int(np.argmin(is_same)))
            n_elements += len(is_same)
        return n_elements

    def _is_average(
        self, summands: Sequence[StoredState], spans: Sequence[Span], raw: NDArray[np.uint8], made: StoredState
    ) -> NDArray[np.bool_]:
        """Tell by element whether it is the average in float64, as closely as its dtype tells, or it is not finite."""
        values = values_of(raw, made.dtype, made.parameter).astype(np.float64)
        wanted, largest = np.zeros(values.shape), np.zeros(values.shape)
        with np.errstate(invalid="ignore"):
            for weight, state in zip(self.averaging.weights, summands, strict=True):
                summand = values_of(self.reader.read(state, *spans), state.dtype, state.parameter).astype(np.float64)
                wanted += weight * summand
                np.maximum(largest, np.abs(summand), out=largest)
            close = np.abs(values - wanted) <= _TOLERANCES[made.dtype.name] * largest
        is_same: NDArray[np.bool_] = close | ~np.isfinite(wanted)
        return is_same


def _differs(made: StoredState, spans: Sequence[Span], place: int) -> MergePipeError:
    """Make the error for the element at `place` of all that was compared."""
    ends = np.cumsum([span.n_elements for span in spans])
    span = spans[int(np.searchsorted(ends, place, side="right"))]
    return CorruptError.of(
        "tailor.self-check", made.parameter, f"{made.kind} is not the average in elements [{span.start}, {span.stop})",
        "nothing was published; check the sources, then report it",
    )  # fmt: skip
