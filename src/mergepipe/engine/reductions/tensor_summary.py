"""Gather statistics of every expert's tensor while its blocks are read: the reduction behind ANALYZE.

A merge that reads everything anyway gathers them on the way; the operator's own tensor-wide needs are answered from
the same counts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, GRAIN_ELEMENTS, ITEMSIZE_BY_KERNEL_CODE, BlockGrid
from mergepipe.engine.reductions.block_reductions import join_products
from mergepipe.engine.reductions.order_statistics import RankSearch
from mergepipe.operators.base import InnerProducts, MagnitudeBand, MagnitudeCut, RawBlock, Reduced, ReductionRequest
from mergepipe.operators.statistics import (
    BLOCK_RECORD,
    COMMON_DENSITIES,
    HASH_BYTES,
    N_OCTAVES,
    N_SKETCH,
    TensorStatistics,
    encode_octaves,
    histogram_cuts,
    rank_of_density,
)


class TensorSummary:
    """Gathers `TensorStatistics` per expert; a `Reduction`. Blocks must be shown whole, cut on the grid.

    Memory: per expert 320 KiB, 256 KiB per density while refining, and the statistics themselves.
    """

    def __init__(
        self,
        grid: BlockGrid,
        n_experts: int,
        request: ReductionRequest | None,
        densities: Sequence[float] = COMMON_DENSITIES,
    ) -> None:
        self._grid = grid
        self._request = request
        self._densities = tuple(sorted(densities))
        ranks = {rank_of_density(density, grid.n_elements) for density in self._densities}
        self._search_E = [
            RankSearch(ranks | requested, grid.n_elements) for requested in _requested_ranks(request, n_experts)
        ]
        n_cells = -(-grid.n_elements // GRAIN_ELEMENTS)
        self._base_C = np.zeros(n_cells, np.float64)
        self._cells_EC2 = np.zeros((n_experts, n_cells, 2), np.float64)
        self._records_EB = np.zeros((n_experts, grid.n_blocks), BLOCK_RECORD)
        self._fine_E = [0] * n_experts
        self._lock = threading.Lock()
        self._local = threading.local()

    def survey(self, block: RawBlock) -> None:
        """Ignore samples: what one pass cannot decide, a second one decides."""

    def narrow(self) -> None:
        """See `survey`."""

    def accumulate(self, block: RawBlock) -> None:
        from mergepipe.kernels.summary import sum_squares

        first_cell = block.first_element // GRAIN_ELEMENTS
        sum_squares(block.raw, block.base_offset, block.base_code, block.n_elements, self._base_C[first_cell:])
        for index in range(block.first_element // self._grid.block_elements, self._grid.n_blocks):
            span = self._grid.span(index)
            if span.start >= block.first_element + block.n_elements:
                break
            for place, e in enumerate(block.present_E):
                self._summarize(block, place, int(e), index)

    def _summarize(self, block: RawBlock, place: int, e: int, index: int) -> None:
        from mergepipe.kernels.summary import octave_energies, summarize_block

        span = self._grid.span(index)
        skip = span.start - block.first_element
        code = int(block.codes_E[place])
        offset = int(block.offsets_E[place]) + skip * ITEMSIZE_BY_KERNEL_CODE[code & ~DELTA_FLAG]
        counts_B = self._scratch()
        cells_C2 = self._cells_EC2[e, span.start // GRAIN_ELEMENTS :]
        sketch_S = np.zeros(N_SKETCH, np.float32)
        base_offset = block.base_offset + skip * ITEMSIZE_BY_KERNEL_CODE[block.base_code]
        extremes_3 = np.zeros(3, np.int64)
        summarize_block(
            block.raw, base_offset, block.base_code, offset, code,
            span.n_elements, counts_B, cells_C2, sketch_S, extremes_3,
        )  # fmt: skip
        largest_bits, changed, fine = extremes_3.tolist()
        energies_O = np.zeros(N_OCTAVES, np.float64)
        octave_energies(counts_B, largest_bits, energies_O)
        n_cells = -(-span.n_elements // GRAIN_ELEMENTS)
        record = self._records_EB[e, index : index + 1]
        stored = block.raw[offset : offset + span.n_elements * ITEMSIZE_BY_KERNEL_CODE[code & ~DELTA_FLAG]]
        record["hash"] = np.frombuffer(blake3(stored.data).digest(HASH_BYTES), np.uint8)
        fill_record(record, float(cells_C2[:n_cells, 0].sum()), largest_bits, changed, energies_O, sketch_S)
        self._search_E[e].move_counts(counts_B)
        with self._lock:
            self._fine_E[e] += fine

    def _scratch(self) -> NDArray[np.int64]:
        """Return a cleared thread-local histogram."""
        from mergepipe.kernels.reduce import COARSE_BINS

        if not hasattr(self._local, "counts_B"):
            self._local.counts_B = np.zeros(COARSE_BINS, np.int64)
        counts_B: NDArray[np.int64] = self._local.counts_B
        return counts_B

    def refine(self, block: RawBlock) -> None:
        for place, e in enumerate(block.present_E):
            self._search_E[int(e)].count_fine(block, place)

    def finish(self) -> bool:
        decided = [
            search.decide(all_coarse=not fine) for search, fine in zip(self._search_E, self._fine_E, strict=True)
        ]
        return all(decided)

    def result(self) -> Reduced:
        match self._request:
            case MagnitudeCut(kept_E):
                return Reduced(threshold_bits_E=self._bits(kept_E))
            case MagnitudeBand(kept_E, dropped_E):
                return Reduced(threshold_bits_E=self._bits(kept_E), upper_bits_E=self._bits(dropped_E))
            case InnerProducts():
                return Reduced(products_E3=join_products(self._base_C, self._cells_EC2))
            case _:  # not what statistics hold: still to be reduced
                return Reduced()

    def _bits(self, rank_E: Sequence[int]) -> NDArray[np.uint32]:
        return np.array([s.threshold_bits(rank) for s, rank in zip(self._search_E, rank_E, strict=True)], np.uint32)

    def statistics(self, e: int) -> TensorStatistics:
        """Return the statistics of one expert, after `finish` returned True."""
        n = self._grid.n_elements
        bits = [self._search_E[e].threshold_bits(rank_of_density(density, n)) for density in self._densities]
        densities_D, bits_D = merged_cuts(
            np.array(self._densities, np.float64), np.array(bits, np.uint32), self._search_E[e].histogram(), n
        )
        return TensorStatistics(
            self._grid,
            self._records_EB[e],
            densities_D,
            bits_D,
            join_products(self._base_C, self._cells_EC2[e : e + 1])[0],
        )


def merged_cuts(
    densities_D: NDArray[np.float64], bits_D: NDArray[np.uint32], counts_B: NDArray[np.float64], n_elements: int
) -> tuple[NDArray[np.float64], NDArray[np.uint32]]:
    """Merge exact cuts with those of a histogram, by rising share; of one rank the exact cut counts."""
    shares_H, edges_H = histogram_cuts(counts_B, n_elements)
    ranks_D = np.floor(densities_D * n_elements)
    is_new_H = ~np.isin(np.floor(shares_H * n_elements), ranks_D) & (shares_H < 1)
    shares = np.concatenate([densities_D, shares_H[is_new_H]])
    order = np.argsort(shares, kind="stable")
    return shares[order], np.concatenate([bits_D, edges_H[is_new_H]])[order]


def _requested_ranks(request: ReductionRequest | None, n_experts: int) -> list[set[int]]:
    match request:
        case MagnitudeCut(kept_E):
            return [{n_kept} for n_kept in kept_E]
        case MagnitudeBand(kept_E, dropped_E):
            return [{n_kept, n_dropped} for n_kept, n_dropped in zip(kept_E, dropped_E, strict=True)]
        case _:
            return [set() for _ in range(n_experts)]


def fill_record(
    record: NDArray[np.void],
    energy: float,
    largest_bits: int,
    changed: int,
    energies_O: NDArray[np.float64],
    sketch_S: NDArray[np.float32],
) -> None:
    """Round on the safe side: the norm up; an undefined delta counts as infinite."""
    norm = np.sqrt(energy)
    rounded = np.float32(norm)
    record["norm"] = np.nextafter(rounded, np.float32(np.inf)) if np.isfinite(norm) and norm > 0 else rounded
    if not np.isfinite(norm):
        record["norm"] = np.inf
    record["largest"] = np.uint32(min(largest_bits, 0x7F800000)).view(np.float32)
    record["changed"] = changed
    if np.isfinite(norm) and norm > 0:
        record["octaves"] = encode_octaves(energies_O)
        record["sketch"] = (sketch_S / norm).astype(np.float16)
