"""How the results of one tensor are rounded to the output's dtype, and what that keeps of their change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from mergepipe.core.blocks import F32, F64, GRAIN_ELEMENTS, DType, Span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RoundingMode(StrEnum):
    """The neighbour that a result becomes: the nearest, ties to even, or one chosen at random by the distance."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


LEAST_KEPT = 0.9
"""A smaller share of the change is worth a notice."""


@dataclass(frozen=True, slots=True)
class Survival:
    """Sums over elements: the change as it was written times the change as it was meant, and the square of the latter.

    Changes are differences from the base. The sums are those of an eighth of a large tensor, spread over it.
    """

    product: float = 0.0
    square: float = 0.0

    @property
    def share(self) -> float | None:
        """The share of the change that rounding keeps, to four digits: a projection; None where nothing is known."""
        return float(f"{self.product / self.square:.4g}") if self.square > 0.0 else None

    @classmethod
    def total(cls, parts: Iterable[Survival]) -> Survival:
        """Return the sums over all parts."""
        listed = list(parts)
        return cls(math.fsum(part.product for part in listed), math.fsum(part.square for part in listed))


NOTHING_MEASURED = Survival()


def holds_results(dtype: DType) -> bool:
    """Whether a dtype holds every float32 number, so that nothing is rounded."""
    return dtype in (F32, F64)


@dataclass(frozen=True, slots=True)
class TensorRounding:
    """The rounding of one tensor by a key of random bits, 0 to nearest, and the sums of its pieces as they are made.

    Nothing is summed unless it `measures`. Law: `survival()` does not depend on the order in which pieces are made, nor
    on how they are cut between grains.
    """

    key: int = 0
    measures: bool = True
    pieces: dict[int, NDArray[np.float64]] = field(default_factory=dict, compare=False)

    def sums_of(self, span: Span) -> NDArray[np.float64]:
        """Return zeros to which what rounding keeps of a piece is added: a row for each grain that it touches."""
        import numpy as np

        if not self.measures:
            return np.empty((0, 2))
        n_grains = -(-span.stop // GRAIN_ELEMENTS) - span.start // GRAIN_ELEMENTS
        sums_G2 = np.zeros((n_grains, 2))
        self.pieces[span.start] = sums_G2
        return sums_G2

    def survival(self) -> Survival:
        """Return the sums of all pieces."""
        rows: list[Survival] = []
        for sums_G2 in self.pieces.values():
            rows += [Survival(*row) for row in sums_G2.tolist()]
        return Survival.total(rows)


UNMEASURED = TensorRounding(measures=False)
"""To nearest, of what is no result yet."""
