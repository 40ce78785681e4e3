"""Analyse without writing: read tensors once, and report the statistics of their experts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import GRAIN_ELEMENTS, BlockGrid, RawBlock, itemsize_of_code
from mergepipe.engine.block_reductions import join_products
from mergepipe.engine.jobs import Job, TensorWork
from mergepipe.engine.observer import Observer, OnStatistics
from mergepipe.engine.order_statistics import RankSearch
from mergepipe.engine.pipeline import Pipeline
from mergepipe.engine.segments import (
    HoldLimits,
    Segments,
    choose_buffer_sizes,
    cut_everywhere,
    full_access,
    plan_jobs,
    tasks_of,
    uncut_blocks,
)
from mergepipe.engine.work import AnalysisWork, EngineOptions
from mergepipe.kernels.reduce import COARSE_BINS, DeltaStretches, sum_squares, summarize_block
from mergepipe.operators.base import NOTHING_REDUCED, Reduced
from mergepipe.operators.statistics import (
    BLOCK_RECORD,
    COMMON_DENSITIES,
    HASH_BYTES,
    INFINITE_BITS,
    N_OCTAVES,
    N_SKETCH,
    TensorStatistics,
    encode_octaves,
    histogram_cuts,
    rank_of_density,
)
from mergepipe.recipes.tasks import MergeTask
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import scratch


def run_analysis(
    work: AnalysisWork, files: Mapping[Location, RangeFile], store: Store, options: EngineOptions, observer: Observer
) -> None:
    """Read every task's tensors once from open files of `store`, and report the statistics of each expert.

    A tensor whose copies do not fit into the memory cap may be read twice. Memory: as `make_part`.
    """
    cut_of = uncut_blocks(cut_everywhere(work.block_elements), work.tasks, options.memory_bytes)
    sizes = choose_buffer_sizes(work.tasks, options.memory_bytes, cut_of)
    pipeline = Pipeline(
        work.tasks, files, store, sizes, options.memory_bytes, None, options.threads, observer.on_progress
    )
    # One look at a tensor is expected to suffice where all models have one 16-bit format (see `FineMagnitudes`).
    held = [t for t in work.tasks if t.base.dtype.itemsize > 2 or any(s.dtype != t.base.dtype for s in t.experts)]
    limits = pipeline.hold_limits(held)
    pipeline.run(_jobs(work, plan_jobs(work.tasks, sizes, full_access, cut_of), limits, observer))


def _jobs(work: AnalysisWork, cut: Iterator[Segments], limits: HoldLimits, observer: Observer) -> Iterator[Job]:
    for segments in cut:
        works = {}
        for index in tasks_of(segments):
            task = work.tasks[index]
            grid = BlockGrid(task.base.n_elements, work.block_elements)
            summary = TensorSummary(grid, len(task.experts), work.densities)
            works[index] = TensorWork(task, summary, partial(_report, task, summary, observer.on_statistics))
        yield Job(segments, works, limits, writes=False, tap=observer.tap)


def _report(task: MergeTask, summary: TensorSummary, on_statistics: OnStatistics) -> None:
    """Pass on the statistics of every expert of a task."""
    for e in range(len(task.experts)):
        on_statistics(task, e, summary.statistics(e))


# --- the statistics of every expert's tensor, gathered while its blocks are read: the reduction behind ANALYZE ---


FINE_SHARE = 8
LARGEST, CHANGED, FINE = range(3)  # of `extremes_B3`


_of_thread = threading.local()


def _scratch(n_elements: int) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    """Return this thread's two histograms, which their user clears, and its room for the fine magnitudes of a block."""
    if not hasattr(_of_thread, "counts_2B"):
        _of_thread.counts_2B = np.zeros((2, COARSE_BINS), np.int32)
    return _of_thread.counts_2B, scratch("fine", n_elements + 1, np.uint32)


class FineMagnitudes:
    """The magnitudes of one delta whose lower 16 bits are not zero: few, where models have 16-bit formats.

    They are kept up to an eighth of the tensor, so that cuts need no second look at it. Safe to use from many threads.
    Memory: half a byte an element.
    """

    def __init__(self, n_elements: int) -> None:
        self._left = n_elements // FINE_SHARE
        self._parts: list[NDArray[np.uint32]] = []
        self._lock = threading.Lock()

    def add(self, magnitudes: NDArray[np.uint32]) -> None:
        """Add those of a block; they are copied."""
        if len(magnitudes):
            with self._lock:
                self._left -= len(magnitudes)
                if self._left < 0:
                    self._parts.clear()
                else:
                    self._parts.append(magnitudes.copy())

    def take_sorted(self) -> NDArray[np.uint32] | None:
        """Return all that were added, rising, and keep none; None after the first call, and where they are too many."""
        if self._left < 0:
            return None
        self._left = -1
        magnitudes = np.concatenate(self._parts) if self._parts else np.empty(0, np.uint32)
        self._parts.clear()
        magnitudes.sort()
        return magnitudes


class BlockSummaries:
    """The quantities of each block of one expert's tensor, as they are gathered; see `summarize_block`."""

    def __init__(self, n_blocks: int) -> None:
        self.extremes_B3 = np.zeros((n_blocks, 3), np.int64)
        self.energies_BO = np.zeros((n_blocks, N_OCTAVES), np.float64)
        self.sketch_BS = np.zeros((n_blocks, N_SKETCH), np.float32)
        self.hash_B = np.zeros((n_blocks, HASH_BYTES), np.uint8)

    def records(self, energy_B: NDArray[np.float64]) -> NDArray[np.void]:
        """Round on the safe side: the norm up; an undefined delta counts as infinite."""
        records_B = np.zeros(len(energy_B), BLOCK_RECORD)
        norm_B = np.sqrt(energy_B)
        is_usual_B = np.isfinite(norm_B) & (norm_B > 0)
        with np.errstate(over="ignore"):  # a norm beyond float32 is infinite there
            rounded_B = np.where(np.isnan(norm_B), np.inf, norm_B).astype(np.float32)
        records_B["norm"] = np.where(is_usual_B, np.nextafter(rounded_B, np.float32(np.inf)), rounded_B)
        largest_B = np.minimum(self.extremes_B3[:, LARGEST], INFINITE_BITS)
        records_B["largest"] = largest_B.astype(np.uint32).view(np.float32)
        records_B["changed"] = self.extremes_B3[:, CHANGED]
        records_B["octaves"][is_usual_B] = encode_octaves(self.energies_BO[is_usual_B])
        scaled_BS = self.sketch_BS[is_usual_B] / norm_B[is_usual_B, np.newaxis]
        records_B["sketch"][is_usual_B] = scaled_BS.astype(np.float16)
        records_B["hash"] = self.hash_B
        return records_B


class TensorSummary:
    """Gathers `TensorStatistics` per expert; a `Reduction`. Blocks must be shown whole, cut on the grid.

    Memory: per expert what `RankSearch` takes for the densities, half a byte an element, and the statistics.
    """

    def __init__(self, grid: BlockGrid, n_experts: int, densities: Sequence[float] = COMMON_DENSITIES) -> None:
        self._grid = grid
        self._densities = tuple(sorted(densities))
        ranks = {rank_of_density(density, grid.n_elements) for density in self._densities}
        self._search_E = [RankSearch(ranks, grid.n_elements) for _ in range(n_experts)]
        n_cells = -(-grid.n_elements // GRAIN_ELEMENTS)
        self._base_C = np.zeros(n_cells, np.float64)
        self._cells_EC2 = np.zeros((n_experts, n_cells, 2), np.float64)
        self._summaries_E = [BlockSummaries(grid.n_blocks) for _ in range(n_experts)]
        self._fine_E = [FineMagnitudes(grid.n_elements) for _ in range(n_experts)]

    def survey(self, blocks: Sequence[RawBlock]) -> None:
        """Ignore samples: what one pass cannot decide, a second one decides."""

    def narrow(self) -> None:
        """See `survey`."""

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        for block in blocks:
            sum_squares(block, self._base_C[block.first_element // GRAIN_ELEMENTS :])
            for index in range(block.first_element // self._grid.block_elements, self._grid.n_blocks):
                span = self._grid.span(index)
                if span.start >= block.first_element + block.n_elements:
                    break
                part = block.part(span.start - block.first_element, span.n_elements)
                for place, e in enumerate(block.present_E):
                    self._summarize(part, place, int(e), index)

    def _summarize(self, block: RawBlock, place: int, e: int, index: int) -> None:
        """Summarize the delta of a grid's block."""
        counts_2B, fine_N = _scratch(block.n_elements)
        summaries, cells_C2 = self._summaries_E[e], self._cells_EC2[e, block.first_element // GRAIN_ELEMENTS :]
        extremes_3 = summaries.extremes_B3[index]
        summarize_block(
            block, place, counts_2B, cells_C2, summaries.sketch_BS[index], summaries.energies_BO[index], extremes_3,
            fine_N,
        )  # fmt: skip
        offset, nbytes = int(block.offsets_E[place]), block.n_elements * itemsize_of_code(int(block.codes_E[place]))
        stored = block.raw[offset : offset + nbytes]
        summaries.hash_B[index] = np.frombuffer(blake3(stored.data).digest(HASH_BYTES), np.uint8)
        self._search_E[e].move_counts(counts_2B[0])
        self._fine_E[e].add(fine_N[: extremes_3[FINE]])

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        for e, deltas in DeltaStretches.by_expert(blocks).items():
            if self._search_E[e].is_open:
                self._search_E[e].count_fine(deltas)

    def finish(self) -> bool:
        searches = zip(self._search_E, self._fine_E, strict=True)
        decided = [search.decide(fine.take_sorted()) for search, fine in searches]
        return all(decided)

    def result(self) -> Reduced:
        """Nothing is reduced for a merge: `statistics` are the result."""
        return NOTHING_REDUCED

    def statistics(self, e: int) -> TensorStatistics:
        """Return the statistics of one expert, after `finish` returned True."""
        n = self._grid.n_elements
        cuts = [self._search_E[e].cut(rank_of_density(density, n)) for density in self._densities]
        densities_D, cuts_D3 = merged_cuts(
            np.array(self._densities, np.float64), np.array(cuts, np.uint32), self._search_E[e].histogram(), n
        )
        return TensorStatistics(
            self._grid,
            self._summaries_E[e].records(self._block_energies(e)),
            densities_D,
            cuts_D3,
            join_products(self._base_C, self._cells_EC2[e : e + 1])[0],
        )

    def _block_energies(self, e: int) -> NDArray[np.float64]:
        """Return the energy of an expert's delta by block."""
        energy_C = self._cells_EC2[e, :, 0]
        width = self._grid.block_elements // GRAIN_ELEMENTS
        n_whole = len(energy_C) // width
        energies_B = np.empty(self._grid.n_blocks, np.float64)
        energies_B[:n_whole] = energy_C[: n_whole * width].reshape(n_whole, width).sum(axis=1)
        energies_B[n_whole:] = energy_C[n_whole * width :].sum()
        return energies_B


def merged_cuts(
    densities_D: NDArray[np.float64], cuts_D3: NDArray[np.uint32], counts_B: NDArray[np.number], n_elements: int
) -> tuple[NDArray[np.float64], NDArray[np.uint32]]:
    """Merge exact cuts with those of a histogram, by rising share; of one rank the exact cut counts."""
    shares_H, cuts_H3 = histogram_cuts(counts_B, n_elements)
    ranks_D = np.floor(densities_D * n_elements)
    is_known_H = (np.floor(shares_H * n_elements)[:, np.newaxis] == ranks_D).any(axis=1)
    is_new_H = ~is_known_H & (shares_H < 1)
    shares = np.concatenate([densities_D, shares_H[is_new_H]])
    order = np.argsort(shares, kind="stable")
    return shares[order], np.concatenate([cuts_D3, cuts_H3[is_new_H]])[order]
