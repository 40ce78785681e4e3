"""Statistics of an expert's tensor against its base: per block, and for the whole tensor.

Statistics are exact summaries of `delta = expert - base` in float32, or bounds on the safe side where they are rounded.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid
from mergepipe.core.values import dataclass

HASH_BYTES = 16
N_OCTAVES = 16
N_SKETCH = 16
COMMON_DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def rank_of_density(density: float, n_elements: int) -> int:
    """Return the number of elements that a density keeps: `floor(density * n)`, in double precision as in mergekit."""
    return math.floor(density * n_elements)


BIN_SHIFT = 16  # float32 bits below those that a bin of the magnitude histogram is made of
INFINITE_BITS = 0x7F800000
MOST_SHARE_ERROR = 0.02
HISTOGRAM_SHARES = (0.001, 0.002, 0.005, *(k / 64 for k in range(1, 64)))


@dataclass(frozen=True, slots=True)
class CutEstimate:
    """A magnitude cut as float32 bits, and by how much of the tensor the share that it keeps is off at most."""

    bits: int
    share_error: float


def histogram_cuts(counts_B: NDArray[np.number], n_elements: int) -> tuple[NDArray[np.float64], NDArray[np.uint32]]:
    """Return shares of the tensor and the cuts that keep exactly those, from a histogram of the upper magnitude bits.

    For each of `HISTOGRAM_SHARES` these are the lower edge of the bin that reaches it, and that of the next bin above.
    """
    filled_F = np.flatnonzero(counts_B != 0)[::-1]
    from_top_F = np.cumsum(counts_B[filled_F], dtype=np.float64)
    reached = np.searchsorted(from_top_F, np.array(HISTOGRAM_SHARES) * n_elements).tolist()
    wanted = {*reached, *(place - 1 for place in reached)}  # numpy's own `unique` would import its masked arrays
    chosen = np.array(sorted(place for place in wanted if 0 <= place < len(filled_F)), np.int64)
    bits_D = (filled_F[chosen] << BIN_SHIFT).astype(np.uint32)
    return (from_top_F[chosen] + 0.5) / n_elements, bits_D


BLOCK_RECORD = np.dtype(
    [
        ("hash", "u1", (HASH_BYTES,)),  # BLAKE3-128 of the expert's stored bytes
        ("norm", "<f4"),  # ||delta||, rounded up
        ("largest", "<f4"),  # max |delta|
        ("changed", "<u4"),  # elements with delta != 0
        ("octaves", "u1", (N_OCTAVES,)),  # energy by octave of magnitude below `largest`, see `encode_octaves`
        ("sketch", "<f2", (N_SKETCH,)),  # random projection of delta / ||delta||
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class TensorStatistics:
    """One tensor of one expert against one base.

    Attributes:
        blocks_B: one `BLOCK_RECORD` per block of the grid, in order.
        densities_D: sorted shares of the tensor (float64) whose exact magnitude cut is known.
        threshold_bits_D: the float32 bits of those cuts (uint32), parallel to `densities_D`.
        products_3: <base, base>, <delta, delta>, <base, delta> in float64.
        are_norms_spread: norms were taken from blocks of another size, and bound nothing.
    """

    grid: BlockGrid
    blocks_B: NDArray[np.void]
    densities_D: NDArray[np.float64]
    threshold_bits_D: NDArray[np.uint32]
    products_3: NDArray[np.float64]
    are_norms_spread: bool = False

    def __post_init__(self) -> None:
        if self.blocks_B.dtype != BLOCK_RECORD or len(self.blocks_B) != self.grid.n_blocks:
            raise ValueError(f"{len(self.blocks_B)} block records for {self.grid.n_blocks} blocks")
        if len(self.densities_D) != len(self.threshold_bits_D):
            raise ValueError("a threshold for each density")

    @property
    def is_estimate(self) -> bool:
        """Whether a probe made them: its cuts are estimates, and its norms bound nothing."""
        return not any(map(math.isfinite, self.products_3.tolist()))

    def estimated_cut(self, n_kept: int) -> CutEstimate | None:
        """Estimate the cut that keeps `n_kept` elements from the shares on record around it; None if they are far off.

        Between two cuts of neighbouring histogram bins the lower one is taken, which keeps ties as the exact cut does;
        between others the logarithm of the magnitude is interpolated.
        """
        share = n_kept / max(1, self.grid.n_elements)
        above = int(np.searchsorted(self.densities_D, share))
        if not 0 < above < len(self.densities_D):
            return None
        low, high = float(self.densities_D[above - 1]), float(self.densities_D[above])
        upper, lower = (int(bits) for bits in self.threshold_bits_D[above - 1 : above + 1])
        if upper > INFINITE_BITS:
            return None
        if upper - lower <= 1 << BIN_SHIFT or not lower:
            return CutEstimate(lower, high - share)
        if high - low > MOST_SHARE_ERROR:
            return None
        weight = (share - low) / (high - low)
        return CutEstimate(round(upper + weight * (lower - upper)), max(share - low, high - share))

    def threshold_bits(self, density: float) -> int | None:
        """The exact cut for `density`, or None if it was not worked out."""
        position = np.flatnonzero(self.densities_D == density)
        return int(self.threshold_bits_D[position[0]]) if len(position) else None


def encode_octaves(energy_BO: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Pack energies by octave (..., N_OCTAVES) as one byte each: 0 for none, else `240 + 4 log2(share)` clipped to 1.

    The share is of the row's total; a byte's step is a quarter of a factor two, the smallest share 2^-59.75. Entry `o`
    covers magnitudes in `(largest / 2^(o+1), largest / 2^o]`; the last octave also holds everything below it.
    """
    total_B1 = energy_BO.sum(axis=-1, keepdims=True)
    share_BO = np.divide(energy_BO, total_B1, out=np.zeros_like(energy_BO), where=total_B1 > 0)
    with np.errstate(divide="ignore"):
        code_BO = np.rint(240.0 + 4.0 * np.log2(share_BO))
    return np.where(share_BO > 0, np.clip(code_BO, 1, 240), 0).astype(np.uint8)


_QUARTER_POWERS = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])


def _octave_table() -> NDArray[np.float32]:
    """`2^((code - 240) / 4)` for every code but 0, by exact steps: the same on every machine."""
    steps = np.arange(256) - 240
    table = np.asarray(np.ldexp(_QUARTER_POWERS[steps % 4], steps // 4), np.float32)
    table[0] = 0.0
    return table


OCTAVE_SHARES = _octave_table()
"""The share of a block's energy that each code of `encode_octaves` stands for."""
