"""Fuse an intermediate merge into its consumer: compute its tensors block by block and never write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, TensorEntry
from mergepipe.core.blocks import DType, Span
from mergepipe.engine.jobs import TensorWork, merge_piece
from mergepipe.engine.pipeline import fill_now, opened_sources
from mergepipe.engine.segments import SegmentShape, full_access, lay_out, stored_bytes
from mergepipe.operators.base import NOTHING_REDUCED, BlockFunction, Operator, OperatorInput, Reduced
from mergepipe.operators.registry import operator_named
from mergepipe.recipes.tasks import Action, MergeTask
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES, aligned_buffer, round_up


def can_fuse(task: MergeTask, operator: Operator, inputs: OperatorInput) -> bool:
    """Whether every block of the result depends only on the same block of the inputs, and on no random numbers."""
    if task.action is Action.COPY or not task.experts:
        return True
    is_elementwise = operator.granularity(inputs) == 1 and operator.reduction(inputs, NOTHING_REDUCED) is None
    return is_elementwise and not operator.is_random


@dataclass(frozen=True, slots=True)
class MergedTensor(ComputedTensor):
    """The result of one task as a `ComputedTensor`, rounded to the task's dtype as a written one would be.

    Memory: while a block is fetched, its bytes of all inputs and of the result.
    """

    task: MergeTask
    operator_name: str
    inputs: OperatorInput
    is_delta: bool = False

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def dtype(self) -> DType:
        return self.task.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.task.shape

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for source in (self.task.base, *self.task.experts) for entry in source.stored)

    @property
    def nbytes(self) -> int:
        return self.task.base.nbytes + sum(source.nbytes for source in self.task.experts)

    def cost_bytes(self, span: Span) -> int:
        """Bytes of all inputs; of inputs that are read as a unit, all of them again: more than is requested."""
        return sum(source.cost_bytes(span) for source in (self.task.base, *self.task.experts))

    def _block_function(self, reduced: Reduced) -> BlockFunction | None:
        if self.task.action is Action.COPY:
            return None
        return operator_named(self.operator_name).block_function(self.inputs, reduced)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps what computed inputs keep."""
        work = TensorWork(self.task, None, self._block_function)
        work.conclude()
        sources = opened_sources((self.task,), files)
        everyone = tuple(range(len(self.task.experts)))

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            (run,) = full_access(0, self.task, span)
            raw_bytes = round_up(stored_bytes(self.task, span.n_elements, everyone), PAGE_BYTES)
            shape = SegmentShape(0, (run,), out.nbytes)
            layout = lay_out(shape, (self.task,), raw_bytes, lambda path: files[path].alignment)
            buffer = aligned_buffer(raw_bytes + round_up(max(1, out.nbytes), PAGE_BYTES))
            fill_now(layout, buffer, files, sources, purpose)
            (piece,) = layout.pieces
            merge_piece(work, piece, buffer)
            out[:] = buffer[piece.out_offset : piece.out_offset + out.nbytes]

        return fetch
