"""Dtypes, block grids and element spans: the units in which all rooms describe tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_BLOCK_ELEMENTS = 256 * 1024
# Added to a dtype's kernel code if the stored values are deltas from the base, not weights.
DELTA_FLAG = 16
# As the last hash of a cut, see `operators.statistics.Cut`: no element of its magnitude is left out.
ALL_TIES = 0xFFFFFFFF
# Elements that follow each other in the order of equal ones: it is decided for all of them at once.
TIE_RUN = 64
# Tensors are cut at multiples of this, and sums are kept per grain: totals do not depend on the cuts.
GRAIN_ELEMENTS = 16 * 1024


class DTypeKind(StrEnum):
    """The way in which elements of a dtype are processed."""

    FLOAT = "float"  # decodes to float32, can be merged
    EXACT = "exact"  # integers and booleans: copied, never merged
    OPAQUE = "opaque"  # known to the format, not decoded by this version


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: `name` as safetensors spells it, `kernel_code` as the kernels know it (-1: no kernel).

    Rounding to a float dtype changes a value by 2^-`significant_bits` of it at most, subnormal ones excepted.
    """

    name: str
    itemsize: int
    kind: DTypeKind
    kernel_code: int = -1
    recipe_name: str = ""
    significant_bits: int = 0


F64 = DType("F64", 8, DTypeKind.FLOAT, 0, "float64", 53)
F32 = DType("F32", 4, DTypeKind.FLOAT, 1, "float32", 24)
F16 = DType("F16", 2, DTypeKind.FLOAT, 2, "float16", 11)
BF16 = DType("BF16", 2, DTypeKind.FLOAT, 3, "bfloat16", 8)
F8_E4M3 = DType("F8_E4M3", 1, DTypeKind.FLOAT, 4, "float8_e4m3fn", 4)
F8_E5M2 = DType("F8_E5M2", 1, DTypeKind.FLOAT, 5, "float8_e5m2", 3)

_DTYPES = (
    F64,
    F32,
    F16,
    BF16,
    F8_E4M3,
    F8_E5M2,
    *(DType(name, size, DTypeKind.EXACT) for name, size in (
        ("I64", 8), ("U64", 8), ("I32", 4), ("U32", 4), ("I16", 2), ("U16", 2), ("I8", 1), ("U8", 1), ("BOOL", 1),
    )),
    *(DType(name, size, DTypeKind.OPAQUE) for name, size in (
        ("C64", 8), ("F8_E8M0", 1), ("F8_E4M3FNUZ", 1), ("F8_E5M2FNUZ", 1),
    )),
)  # fmt: skip

DTYPES: dict[str, DType] = {d.name: d for d in _DTYPES}
ITEMSIZE_BY_KERNEL_CODE: dict[int, int] = {d.kernel_code: d.itemsize for d in _DTYPES if d.kernel_code >= 0}


def itemsize_of_code(code: int) -> int:
    """Return the bytes of an element by its kernel code, be it a delta's or not."""
    return ITEMSIZE_BY_KERNEL_CODE[code & ~DELTA_FLAG]


DTYPES_BY_RECIPE_NAME: dict[str, DType] = {d.recipe_name: d for d in _DTYPES if d.recipe_name}


def promoted_dtype(first: DType, second: DType) -> DType:
    """Return the smallest float dtype that holds the values of both: the larger, float32 for two of one size."""
    if first == second:
        return first
    if first.itemsize == second.itemsize:
        return F32
    return max(first, second, key=lambda dtype: dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of elements `[start, stop)` of one flattened tensor."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a span: [{self.start}, {self.stop})")

    @property
    def n_elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """A flattened tensor of `n_elements` divided into blocks of `block_elements`, the last one shorter.

    Laws: the spans are disjoint, in order and cover `[0, n_elements)`; an empty tensor has no block.
    """

    n_elements: int
    block_elements: int

    def __post_init__(self) -> None:
        if self.n_elements < 0 or self.block_elements < 1:
            raise ValueError(f"not a grid: {self.n_elements} elements in blocks of {self.block_elements}")

    @property
    def n_blocks(self) -> int:
        return -(-self.n_elements // self.block_elements)

    def span(self, index: int) -> Span:
        """Elements of block `index`."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(index)
        start = index * self.block_elements
        return Span(start, min(start + self.block_elements, self.n_elements))

    def spans(self) -> Iterator[Span]:
        """All blocks in order."""
        return (self.span(i) for i in range(self.n_blocks))


def element_count(shape: tuple[int, ...]) -> int:
    """Number of elements of `shape`; 1 for a 0-d tensor."""
    return math.prod(shape)


class RawBlock(NamedTuple):
    """Consecutive elements of one tensor as stored bytes, for the base and for the experts that were read.

    `present_E` lists which experts (indices in recipe order) these bytes hold; `offsets_E` and `codes_E` are parallel
    to it: byte offsets into `raw` and kernel dtype codes. `counted_E` lists the experts whose delta is known: those
    present, and those known to equal the base. The result goes to `out` at `out_offset`, rounded stochastically by a
    `rounding_key` other than 0. What rounding keeps of it is added to `sums_G2`, of the tensor's grains from
    `first_grain` on, if it has rows and the result is no float32.
    """

    raw: NDArray[np.uint8]
    base_offset: int
    base_code: int
    present_E: NDArray[np.int64]
    counted_E: NDArray[np.int64]
    offsets_E: NDArray[np.int64]
    codes_E: NDArray[np.int64]
    first_element: int
    n_elements: int
    out: NDArray[np.uint8]
    out_offset: int
    out_code: int
    rounding_key: np.uint64
    sums_G2: NDArray[np.float64]
    first_grain: int

    def check_bounds(self) -> None:
        """Refuse a block whose elements are not all in its buffers: compiled code does not look."""
        n_bytes = len(self.raw)
        are_inside = len(self.present_E) == len(self.offsets_E) and self._fits(
            self.base_offset, self.base_code, n_bytes
        )
        for offset, code in zip(self.offsets_E.tolist(), self.codes_E.tolist(), strict=True):
            are_inside = are_inside and self._fits(offset, code, n_bytes)
        if not are_inside:
            places = f"{self.base_offset} and {self.offsets_E.tolist()}"
            raise ValueError(f"{self.n_elements} elements at {places} of a buffer of {n_bytes} bytes")

    def check_output_bounds(self) -> None:
        """Refuse a block whose result does not fit into `out`."""
        if not self._fits(self.out_offset, self.out_code, len(self.out)):
            place = f"{self.n_elements} elements of code {self.out_code} at {self.out_offset}"
            raise ValueError(f"{place} of an output of {len(self.out)} bytes")

    def _fits(self, offset: int, code: int, nbytes: int) -> bool:
        return offset >= 0 and 0 <= self.n_elements * itemsize_of_code(code) <= nbytes - offset

    def part(self, skip: int, n_elements: int) -> RawBlock:
        """Return `n_elements` elements from `skip` on."""
        offsets_E = self.offsets_E.copy()
        for place, code in enumerate(self.codes_E.tolist()):
            offsets_E[place] += skip * itemsize_of_code(code)
        return self._replace(
            base_offset=self.base_offset + skip * itemsize_of_code(self.base_code),
            offsets_E=offsets_E,
            first_element=self.first_element + skip,
            n_elements=n_elements,
            out_offset=self.out_offset + skip * itemsize_of_code(self.out_code),
        )
