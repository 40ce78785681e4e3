"""Carry the statistics of a tensor's blocks over to blocks of another size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid
from mergepipe.operators.statistics import (
    BLOCK_RECORD,
    HASH_BYTES,
    N_OCTAVES,
    OCTAVE_SHARES,
    TensorStatistics,
    encode_octaves,
)


def on_grid(statistics: TensorStatistics, block_elements: int) -> TensorStatistics:
    """Return statistics by blocks of `block_elements`; what is known of the whole tensor stays as it is.

    Where every new block is made of whole old ones, norms stay bounds. Else the energy of an old block is spread evenly
    over its elements, and `are_norms_spread` is set. Laws: a block counts as unchanged only if it is; blocks with equal
    hashes hold equal bytes.
    """
    grid = BlockGrid(statistics.grid.n_elements, block_elements)
    if grid == statistics.grid:
        return statistics
    if not grid.n_elements:
        return replace(statistics, grid=grid)
    old_elements = statistics.grid.block_elements
    starts = [np.arange(0, grid.n_elements, size) for size in (old_elements, block_elements)]
    start_P = np.unique(np.concatenate(starts))  # pieces: each lies in one old block and in one new one
    n_P = np.diff(np.append(start_P, grid.n_elements))
    old_P, first_B = start_P // old_elements, np.flatnonzero(start_P % block_elements == 0)
    blocks_P = statistics.blocks_B[old_P]
    share_P = n_P / np.minimum(old_elements, grid.n_elements - old_P * old_elements)
    norm_P = blocks_P["norm"].astype(np.float64) * np.sqrt(share_P)
    norm_B = np.sqrt(np.add.reduceat(np.square(norm_P), first_B))
    blocks_B = np.zeros(grid.n_blocks, BLOCK_RECORD)
    blocks_B["hash"] = _hashes(blocks_P["hash"], start_P, n_P, old_elements, first_B)
    blocks_B["norm"] = np.where(norm_B > 0, np.nextafter(norm_B.astype(np.float32), np.float32(np.inf)), 0)
    blocks_B["largest"] = np.maximum.reduceat(blocks_P["largest"], first_B)
    blocks_B["changed"] = np.add.reduceat(np.ceil(blocks_P["changed"] * share_P), first_B)
    piece_B = np.diff(np.append(first_B, len(start_P)))
    finite_P = np.where(np.isfinite(norm_P), norm_P, 0.0)
    blocks_B["octaves"] = _octaves(blocks_P, finite_P, np.repeat(blocks_B["largest"], piece_B), first_B)
    whole_P = np.repeat(norm_B, piece_B)
    weight_P = np.divide(finite_P, whole_P, out=np.zeros_like(finite_P), where=whole_P > 0)
    blocks_B["sketch"] = np.add.reduceat(blocks_P["sketch"] * weight_P[:, None], first_B, axis=0)
    is_spread = statistics.are_norms_spread or bool((share_P < 1).any())
    return replace(statistics, grid=grid, blocks_B=blocks_B, are_norms_spread=is_spread)


def _hashes(
    hash_P: NDArray[np.uint8],
    start_P: NDArray[np.int64],
    n_P: NDArray[np.int64],
    old_elements: int,
    first_B: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Hash the old blocks that each new one is made of, and which elements of them."""
    stop_B = np.append(first_B[1:], len(start_P))
    places_P2 = np.stack([start_P % old_elements, n_P], axis=1).astype("<i8")
    digests = [
        blake3(hash_P[first:stop].tobytes() + places_P2[first:stop].tobytes()).digest(HASH_BYTES)
        for first, stop in zip(first_B.tolist(), stop_B.tolist(), strict=True)
    ]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, HASH_BYTES)


def _octaves(
    blocks_P: NDArray[np.void], norm_P: NDArray[np.float64], largest_P: NDArray[np.float32], first_B: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Count the energies of the pieces in octaves below the largest magnitude of the new blocks.

    Inside an old octave energy is taken to be spread evenly over the logarithm of magnitude.
    """
    energy_PO = OCTAVE_SHARES[blocks_P["octaves"]] * np.square(norm_P)[:, None]
    has_energy_P = (blocks_P["largest"] > 0) & np.isfinite(largest_P)
    ratio_P = np.divide(largest_P, blocks_P["largest"], out=np.ones_like(largest_P), where=has_energy_P)
    shift_P = np.log2(ratio_P)
    octave_PO = np.floor(shift_P)[:, None].astype(np.int64) + np.arange(N_OCTAVES)
    rest_P1 = (shift_P - np.floor(shift_P))[:, None]
    moved_PO = np.zeros_like(energy_PO)
    rows_P1 = np.arange(len(norm_P))[:, None]
    for step, share_P1 in ((0, 1 - rest_P1), (1, rest_P1)):
        np.add.at(moved_PO, (rows_P1, np.minimum(octave_PO + step, N_OCTAVES - 1)), energy_PO * share_P1)
    return encode_octaves(np.add.reduceat(moved_PO, first_B, axis=0))
