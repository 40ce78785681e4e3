"""Runs an operator's reductions and its block function on one tensor in memory, cut as a test wants it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, DType, Span
from mergepipe.engine.block_reductions import Reduction
from mergepipe.engine.tensor_work import Needs
from mergepipe.operators.base import Operator, OperatorInput, RawBlock, Reduced
from mergepipe.testing.tensors import STORED_DTYPES, Family

MOST_LOOKS = 9


class StoredTensor:
    """The stored bytes of a family in one buffer, `gap` bytes apart so that any alignment occurs, and its blocks.

    With `is_delta` the stored elements of the experts are their deltas. `present` are the experts that are read.
    """

    def __init__(
        self,
        family: Family,
        out_dtype: DType,
        gap: int = 0,
        *,
        is_delta: bool = False,
        present: Sequence[int] | None = None,
    ) -> None:
        self.family = family
        self.out_dtype = out_dtype
        self.n_elements = len(family.base)
        everyone = range(len(family.experts))
        self._present_E = np.array(everyone if present is None else present, np.int64)
        self._codes_E = np.array([dtype.kernel_code for dtype in family.expert_dtypes], np.int64)
        if is_delta:
            self._codes_E |= DELTA_FLAG
        position, self._offsets = gap, []
        for stored in (family.base, *family.experts):
            self._offsets.append(position)
            position += stored.nbytes + gap
        self._raw = np.full(position, 0xEE, np.uint8)
        for offset, stored in zip(self._offsets, (family.base, *family.experts), strict=True):
            self._raw[offset : offset + stored.nbytes] = stored.view(np.uint8)
        self._out = np.full(self.n_elements * out_dtype.itemsize, 0xEE, np.uint8)

    @property
    def result(self) -> NDArray[Any]:
        """The output's elements, bfloat16 as bits; see `STORED_DTYPES`."""
        return np.frombuffer(self._out.tobytes(), STORED_DTYPES[self.out_dtype.name])

    def block(self, span: Span) -> RawBlock:
        """The block of the elements of `span`."""
        family = self.family
        sizes = [dtype.itemsize for dtype in family.expert_dtypes]
        offsets = [offset + span.start * size for offset, size in zip(self._offsets[1:], sizes, strict=True)]
        return RawBlock(
            raw=self._raw,
            base_offset=self._offsets[0] + span.start * family.base_dtype.itemsize,
            base_code=family.base_dtype.kernel_code,
            present_E=self._present_E,
            counted_E=self._present_E,
            offsets_E=np.array(offsets, np.int64)[self._present_E],
            codes_E=self._codes_E[self._present_E],
            first_element=span.start,
            n_elements=span.n_elements,
            out=self._out,
            out_offset=span.start * self.out_dtype.itemsize,
            out_code=self.out_dtype.kernel_code,
        )

    def spans(self, cuts: Sequence[int]) -> list[Span]:
        """The tensor cut at `cuts`."""
        edges = sorted({0, self.n_elements, *(cut for cut in cuts if 0 < cut < self.n_elements)})
        return [Span(start, stop) for start, stop in pairwise(edges)]


def run_reduction(reduction: Reduction, blocks: Sequence[RawBlock], sample: Sequence[RawBlock] = ()) -> Reduced:
    """Drive a reduction as the engine does; with a `sample`, as it does where the tensor is not kept in memory."""
    if sample:
        for block in sample:
            reduction.survey(block)
        reduction.narrow()
    for block in blocks:
        reduction.accumulate(block)
    looks = 0
    while not reduction.finish():
        looks += 1
        if looks > MOST_LOOKS:
            raise AssertionError("a reduction that does not come to an end")
        for block in blocks:
            reduction.refine(block)
    return reduction.result()


def apply_operator(
    operator: Operator, inputs: OperatorInput, tensor: StoredTensor, cuts: Sequence[int], grains: Sequence[int] = ()
) -> NDArray[Any]:
    """Merge a whole tensor block by block, last block first; reductions see it cut at `grains`.

    Cuts that the operator does not allow are moved to the next lower one that it does.
    """
    step = operator.granularity(inputs)
    cuts, grains = [cut // step * step for cut in cuts], [grain // step * step for grain in grains]
    needs = Needs(operator, inputs)
    reduced, staged = needs.gather()
    if staged is not None:
        reduced = run_reduction(staged, [tensor.block(span) for span in reversed(tensor.spans(grains))])
    function = operator.block_function(inputs, reduced)
    for span in reversed(tensor.spans(cuts)):
        function(tensor.block(span))
    return tensor.result
