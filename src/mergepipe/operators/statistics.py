"""Statistics of an expert's tensor against its base: per block, and for the whole tensor."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import ALL_TIES, BlockGrid

# Statistics are exact summaries of `delta = expert - base` in float32, or bounds on the safe side where they are
# rounded.


HASH_BYTES = 16
N_OCTAVES = 16
N_SKETCH = 16
COMMON_DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def rank_of_density(density: float, n_elements: int) -> int:
    """Return the number of elements that a density keeps: `floor(density * n)`, in double precision as in mergekit."""
    return math.floor(density * n_elements)


NOTHING_KEPT_BITS = 0xFFFFFFFF


class Cut(NamedTuple):
    """A cut through a tensor's elements by falling magnitude, and where magnitudes are equal by a hash of their index.

    Elements whose float32 bits are above `bits` reach it, and of those with these bits the ones whose
    `kernels.merge.tie_hash` under `key` is at most `last`. In arrays: three uint32, axis `3`.
    """

    bits: int
    key: int = 0
    last: int = ALL_TIES

    @property
    def is_tied(self) -> bool:
        """Whether some of the elements with its bits reach it and others do not."""
        return self.last != ALL_TIES


NOTHING_KEPT = Cut(NOTHING_KEPT_BITS)


def tie_key(bits: int, n_larger: int, n_equal: int) -> int:
    """Key the order of the elements of one magnitude by facts of the whole tensor's content.

    These follow from the content alone, at no further read. Tensors that differ have different orders in all
    likelihood: which of their equal elements two experts keep is independent.
    """
    return int.from_bytes(blake3(struct.pack("<3q", bits, n_larger, n_equal)).digest(4), "little")


BIN_SHIFT = 16  # float32 bits below those that a bin of the magnitude histogram is made of
INFINITE_BITS = 0x7F800000
MOST_SHARE_ERROR = 0.02
HISTOGRAM_SHARES = (0.001, 0.002, 0.005, *(k / 64 for k in range(1, 64)))


class CutEstimate(NamedTuple):
    """A magnitude cut, and by how much of the tensor the share that it keeps is off at most."""

    cut: Cut
    share_error: float


def histogram_cuts(counts_B: NDArray[np.number], n_elements: int) -> tuple[NDArray[np.float64], NDArray[np.uint32]]:
    """Return shares of the tensor and the cuts (D, 3) that keep exactly those, from counts of upper magnitude bits.

    For each of `HISTOGRAM_SHARES` these are the lower edge of the bin that reaches it, and that of the next bin above.
    """
    filled_F = np.flatnonzero(counts_B != 0)[::-1]
    from_top_F = np.cumsum(counts_B[filled_F], dtype=np.float64)
    reached = np.searchsorted(from_top_F, np.array(HISTOGRAM_SHARES) * n_elements).tolist()
    wanted = {*reached, *(place - 1 for place in reached)}  # numpy's own `unique` would import its masked arrays
    chosen = np.array(sorted(place for place in wanted if 0 <= place < len(filled_F)), np.int64)
    cuts_D3 = np.tile(np.array(Cut(0), np.uint32), (len(chosen), 1))
    cuts_D3[:, 0] = filled_F[chosen] << BIN_SHIFT
    return (from_top_F[chosen] + 0.5) / n_elements, cuts_D3


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
        cuts_D3: those cuts (uint32, see `Cut`), parallel to `densities_D`.
        products_3: <base, base>, <delta, delta>, <base, delta> in float64.
    """

    grid: BlockGrid
    blocks_B: NDArray[np.void]
    densities_D: NDArray[np.float64]
    cuts_D3: NDArray[np.uint32]
    products_3: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.blocks_B.dtype != BLOCK_RECORD or len(self.blocks_B) != self.grid.n_blocks:
            raise ValueError(f"{len(self.blocks_B)} block records for {self.grid.n_blocks} blocks")
        if self.cuts_D3.shape != (len(self.densities_D), 3):
            raise ValueError("a cut for each density")

    def estimated_cut(self, n_kept: int) -> CutEstimate | None:
        """Estimate the cut that keeps `n_kept` elements from the shares on record around it; None if they are far off.

        Between cuts of one bin of the histogram, or of neighbouring ones, the elements of the lower cut's magnitude are
        shared out by their hash; between others the logarithm of the magnitude is interpolated.
        """
        share = n_kept / max(1, self.grid.n_elements)
        above = int(np.searchsorted(self.densities_D, share))
        if not 0 < above < len(self.densities_D):
            return None
        low, high = float(self.densities_D[above - 1]), float(self.densities_D[above])
        upper, lower = (Cut(*cut) for cut in self.cuts_D3[above - 1 : above + 1].tolist())
        if upper.bits > INFINITE_BITS:
            return None
        weight = (share - low) / (high - low)
        if upper.bits - lower.bits <= 1 << BIN_SHIFT or not lower.bits:
            return CutEstimate(self._shared_out(upper, lower, weight, low, high), high - share)
        if high - low > MOST_SHARE_ERROR:
            return None
        bits = round(upper.bits + weight * (lower.bits - upper.bits))
        return CutEstimate(Cut(bits), max(share - low, high - share))

    def _shared_out(self, upper: Cut, lower: Cut, weight: float, low: float, high: float) -> Cut:
        """Return the cut at the lower one's magnitude that is as far from the upper cut as `weight` says."""
        if not lower.bits:
            return lower
        n_larger, n_reaching = (int(share * self.grid.n_elements) for share in (low, high))
        first = upper.last + 1 if upper.bits == lower.bits else 0
        key = (lower.key or upper.key) if first else lower.key
        last = first + round(weight * (lower.last - first))
        return Cut(lower.bits, key or tie_key(lower.bits, n_larger, n_reaching - n_larger), min(last, ALL_TIES))

    def cut(self, n_kept: int) -> Cut | None:
        """The exact cut that keeps `n_kept` elements, or None if no share on record keeps as many."""
        same_D = np.flatnonzero(np.floor(self.densities_D * self.grid.n_elements) == n_kept)
        return Cut(*self.cuts_D3[same_D[0]].tolist()) if len(same_D) else None


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
