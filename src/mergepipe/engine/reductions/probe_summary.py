"""Estimate statistics from one small sample of every block, or of every few blocks, without a full pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

import numpy as np
from blake3 import blake3

from mergepipe.checkpoints.contract import Source, TensorEntry
from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.engine.pipeline.segments import Run
from mergepipe.engine.reductions.tensor_summary import CHANGED, BlockSummaries
from mergepipe.operators.base import RawBlock, Reduced
from mergepipe.operators.statistics import (
    HASH_BYTES,
    TensorStatistics,
    histogram_cuts,
)
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.storage.buffers import PAGE_BYTES


def sample_runs(task_index: int, task: MergeTask, grid: BlockGrid, fraction: float, stride: int = 1) -> Iterable[Run]:
    """Return one run per `stride`-th block: whole pages in its middle, `fraction` of it but at least one page.

    Elements that lie across the ends of those pages are left out. A block without a whole page inside is read in full.
    The task has one expert.
    """
    expert = task.experts[0]
    if not isinstance(expert, TensorEntry):  # it has no pages of its own
        yield from (Run(task_index, span, (0,), (0,)) for span in islice(grid.spans(), 0, None, stride))
        return
    size = expert.dtype.itemsize
    for span in islice(grid.spans(), 0, None, stride):
        start, stop = expert.offset + span.start * size, expert.offset + span.stop * size
        first, last = -(-start // PAGE_BYTES), stop // PAGE_BYTES
        pages = min(max(1, int((last - first) * fraction)), last - first)
        if pages < 1:
            yield Run(task_index, span, (0,), (0,))
            continue
        begin = (first + (last - first - pages) // 2) * PAGE_BYTES - expert.offset
        yield Run(task_index, Span(-(-begin // size), (begin + pages * PAGE_BYTES) // size), (0,), (0,))


class ProbeSummary:
    """Scales the sample of each block up to the block; a `Reduction` for a task with one expert.

    Norms, counts and magnitude cuts are estimates; no inner product is claimed. A block that is not sampled is taken to
    be like the sampled one before it. The hash is one of the block's
    place, since its bytes are not known: no block is taken for the same as another.
    """

    def __init__(self, grid: BlockGrid, expert: Source, stride: int = 1) -> None:
        from mergepipe.kernels.reduce import COARSE_BINS

        self._grid = grid
        self._stride = stride
        self._weight_B = np.zeros(COARSE_BINS, np.float64)
        self._lock = threading.Lock()
        self._place = ",".join(f"{entry.file}:{entry.offset}" for entry in expert.stored)
        self._energy_B = np.zeros(grid.n_blocks, np.float64)
        self._summaries = BlockSummaries(grid.n_blocks)

    def survey(self, block: RawBlock) -> None:
        """The whole pass is a sample."""

    def narrow(self) -> None:
        """See `survey`."""

    def accumulate(self, block: RawBlock) -> None:
        from mergepipe.kernels.reduce import COARSE_BINS
        from mergepipe.kernels.summary import CELL_ELEMENTS, summarize_block

        index = block.first_element // self._grid.block_elements
        counts_B = np.zeros(COARSE_BINS, np.int64)
        cells_C2 = np.zeros((-(-block.n_elements // CELL_ELEMENTS), 2), np.float64)
        summarize_block(
            block.raw, block.base_offset, block.base_code, int(block.offsets_E[0]), int(block.codes_E[0]),
            block.n_elements, counts_B, cells_C2, self._summaries.sketch_BS[index], self._summaries.energies_BO[index],
            self._summaries.extremes_B3[index], np.empty(block.n_elements + 1, np.uint32),
        )  # fmt: skip
        n_group = sum(self._grid.span(b).n_elements for b in self._group(index))
        filled_F = np.flatnonzero(counts_B != 0)
        with self._lock:
            self._weight_B[filled_F] += counts_B[filled_F] * (n_group / block.n_elements)
        scale = self._grid.span(index).n_elements / block.n_elements
        self._energy_B[index] = float(cells_C2[:, 0].sum()) * scale
        # A sample without a change proves nothing: the block counts as changed, so that it is never taken for free.
        changed = int(self._summaries.extremes_B3[index, CHANGED])
        self._summaries.extremes_B3[index, CHANGED] = max(1, round(changed * scale))

    def finish(self) -> bool:
        return True

    def refine(self, block: RawBlock) -> None:
        raise AssertionError("a probe needs one pass")

    def result(self) -> Reduced:
        return Reduced()

    def statistics(self, _: int) -> TensorStatistics:
        """The estimates; the argument is the expert's index, of which there is one."""
        records_B = self._summaries.records(self._energy_B)
        for index in range(self._grid.n_blocks):
            record = records_B[index : index + 1]
            if index % self._stride:
                sampled = index - index % self._stride
                record[:] = records_B[sampled : sampled + 1]
                scale = self._grid.span(index).n_elements / self._grid.span(sampled).n_elements
                record["norm"] *= np.float32(np.sqrt(scale))
            record["hash"] = np.frombuffer(blake3(f"{self._place}:{index}".encode()).digest(HASH_BYTES), np.uint8)
        shares_D, cuts_D3 = histogram_cuts(self._weight_B, self._grid.n_elements)
        return TensorStatistics(self._grid, records_B, shares_D, cuts_D3, np.full(3, np.nan))

    def _group(self, index: int) -> range:
        """Return the blocks that a sampled block stands for."""
        return range(index, min(index + self._stride, self._grid.n_blocks))
