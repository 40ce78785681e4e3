"""The operator contract: what an operator needs of a whole tensor, and the function it applies to each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.spec import OperatorSpec

Scalar = float | bool


@dataclass(frozen=True, slots=True)
class RawBlock:
    """Consecutive elements of one tensor as stored bytes, for the base and for the experts that were read.

    `present_E` lists which experts (indices in recipe order) these bytes hold; `offsets_E` and `codes_E` are parallel
    to it: byte offsets into `raw` and kernel dtype codes. `counted_E` lists the experts whose delta is known: those
    present, and those known to equal the base. The result goes to `out` at `out_offset`.
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


@dataclass(frozen=True, slots=True)
class OperatorInput:
    """What an operator knows of one tensor: parameters in force, its size, and one random stream key per expert."""

    globals: Mapping[str, Scalar]
    anchor: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]
    n_elements: int
    stream_keys: tuple[int, ...]
    renormalize: bool = False  # where experts are omitted, weights are divided by the sum of those that are not

    def weights_E(self) -> NDArray[np.float64]:
        """The experts' weights."""
        return np.array([float(p["weight"]) for p in self.experts], np.float64)


@dataclass(frozen=True, slots=True)
class MagnitudeCut:
    """Wanted: per expert the magnitude of the `kept_E[e]`-th largest |delta| of the whole tensor."""

    kept_E: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InnerProducts:
    """Wanted: <base, base>, <delta, delta> and <base, delta> over the whole tensor, in float64."""


ReductionRequest = MagnitudeCut | InnerProducts


@dataclass(frozen=True, slots=True)
class Reduced:
    """Answers to a `ReductionRequest`; the fields that were not asked for are None.

    `threshold_bits_E` (uint32): the float32 bit patterns of the cut magnitudes; elements at or above are kept.
    `products_E3` (float64): per expert <base, base>, <delta, delta>, <base, delta>.
    """

    threshold_bits_E: NDArray[np.uint32] | None = None
    products_E3: NDArray[np.float64] | None = None


NOTHING_REDUCED = Reduced()


class BlockFunction(Protocol):
    """The elementwise part of an operator, ready to be applied to any block of one tensor, from any thread."""

    @property
    def copies_base(self) -> bool:
        """Whether the result is the base's value, so that bytes may be copied where the dtype stays."""
        ...

    def __call__(self, block: RawBlock) -> None: ...


class Operator(Protocol):
    """A merge rule."""

    @property
    def spec(self) -> OperatorSpec: ...

    @property
    def is_random(self) -> bool:
        """Whether the stream keys are used."""
        ...

    def reduction(self, given: OperatorInput) -> ReductionRequest | None:
        """What must be known of the whole tensor before any block can be merged."""
        ...

    def block_function(self, given: OperatorInput, reduced: Reduced) -> BlockFunction:
        """The function for this tensor's blocks."""
        ...
