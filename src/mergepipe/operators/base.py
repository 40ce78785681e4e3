"""The operator contract: what an operator needs of a whole tensor, and the function it applies to each block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import RawBlock
from mergepipe.operators.spec import OperatorSpec

Scalar = float | bool
NUMBERS_OF = "numbers_of"
"""The parameter of an expert that is no model but holds the weights of one, by that one's place."""


@dataclass(frozen=True, slots=True)
class OperatorInput:
    """The facts of one tensor that operators use: parameters in force, its size, and one random stream key per expert.

    `anchor` is empty where the anchor is only what deltas are taken against. An empty `shape` with more than one
    element stands for a flat tensor. Of a tensor that is sampled, blocks were drawn with `drawn_probability`, by which
    the result is divided.
    """

    globals: Mapping[str, Scalar]
    anchor: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]
    n_elements: int
    stream_keys: tuple[int, ...]
    renormalize: bool = False  # where experts are omitted, weights are divided by the sum of those that are not
    shape: tuple[int, ...] = ()
    drawn_probability: float = 1.0

    def weights_E(self) -> NDArray[np.float64]:
        """The experts' weights."""
        return np.array([float(p["weight"]) for p in self.experts], np.float64)

    @property
    def row_elements(self) -> int:
        """Elements of one row: the tensor's last dimension; all of it for a flat one."""
        return max(1, self.shape[-1] if len(self.shape) > 1 else self.n_elements)

    @property
    def n_columns(self) -> int:
        """Elements for each entry of the first dimension: elements a column apart are next to each other along it."""
        return max(1, self.n_elements // max(1, self.shape[0]) if len(self.shape) > 1 else 1)


class Request:
    """Base of what an operator can want of a whole tensor. A new one is answered in `engine.block_reductions`."""

    __slots__ = ()
    is_of_merged: ClassVar[bool] = False  # wanted of the merged delta, whatever of the experts is read

    def needs_rows(self, n_elements: int) -> bool:
        """Whether rows or columns of the tensor have to be seen whole."""
        return False

    def among(self, n_sampled: int, n_elements: int) -> Self:
        """Return the request of a sample, its ranks in proportion among `n_sampled` of the `n_elements`."""
        return self


def _in_proportion(ranks: tuple[int, ...], n_sampled: int, n_elements: int) -> tuple[int, ...]:
    return tuple(rank * n_sampled // n_elements for rank in ranks)


class RowRequest(Request):
    """Base of what is wanted for each row of `row_elements`; the whole tensor may be one row."""

    __slots__ = ()
    row_elements: int

    def needs_rows(self, n_elements: int) -> bool:
        """Whether there is more than one row."""
        return self.row_elements < n_elements


@dataclass(frozen=True, slots=True)
class MagnitudeCut(Request):
    """Wanted: per expert the cut that exactly `kept_E[e]` elements of the whole tensor reach, by |delta|.

    With `dropped_E` also the cut above it, which `dropped_E[e]` elements reach.
    """

    kept_E: tuple[int, ...]
    dropped_E: tuple[int, ...] = ()

    def among(self, n_sampled: int, n_elements: int) -> Self:
        """See `Request`."""
        kept_E, dropped_E = (_in_proportion(ranks, n_sampled, n_elements) for ranks in (self.kept_E, self.dropped_E))
        return replace(self, kept_E=kept_E, dropped_E=dropped_E)


@dataclass(frozen=True, slots=True)
class InnerProducts(Request):
    """Wanted: <base, base>, <delta, delta> and <base, delta> over the whole tensor, in float64."""


@dataclass(frozen=True, slots=True)
class RowGram(RowRequest):
    """Wanted: inner products of the base and all deltas with one another, for each row of `row_elements`, in float64.

    The whole tensor may be one row.
    """

    row_elements: int


@dataclass(frozen=True, slots=True)
class ColumnGram(Request):
    """A `RowGram` for each of `n_columns` columns: element `i` belongs to column `i % n_columns`.

    Cuts inside the tensor must fall on multiples of `cell_elements`, a multiple of `n_columns`.
    """

    n_columns: int
    cell_elements: int

    def needs_rows(self, n_elements: int) -> bool:
        """Columns always have to be."""
        return True


Sums = NDArray[np.float64]
Marks = NDArray[np.uint8]
Measure = Callable[[RawBlock, int, Sums, Marks], None]
"""Adds sums of functions of an element, its base and its deltas, of rows of so many elements.

They are added to the sums of the block's atoms (see `kernels.products`); nothing else is touched. A measure that
selects elements marks those that survive it, if there are any rows of marks, so that they need not be chosen again.
"""


@dataclass(frozen=True, slots=True)
class RowSums(RowRequest):
    """Wanted: the `n_sums` of the measure for each row of `row_elements`, and its marks if small enough to keep.

    There are `mark_rows` of them: one for each expert or one for all; 0 where none can be made.
    """

    measure: Measure
    n_sums: int
    row_elements: int
    mark_rows: int = 0


Score = Callable[[RawBlock, NDArray[np.float32]], None]
"""Writes a float32 for each element of a block that is not negative (or NaN, which counts as larger than all)."""


@dataclass(frozen=True, slots=True)
class ScoreCut(Request):
    """Wanted: the scores that are the `ranks[i]`-th largest of the whole tensor.

    With a `share` in their place how many elements have a score other than zero, and the cut that it of these reaches.
    """

    score: Score
    ranks: tuple[int, ...] = ()
    share: float | None = None

    def among(self, n_sampled: int, n_elements: int) -> Self:
        """See `Request`."""
        ranks = _in_proportion(self.ranks, n_sampled, n_elements)
        return replace(self, ranks=tuple(max(1, rank) for rank in ranks))


@dataclass(frozen=True, slots=True)
class SoftmaxDivergence(RowRequest):
    """Wanted: for each row of `row_elements` the divergence of the only expert's softmax from the base's."""

    row_elements: int


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedDelta(Request):
    """Wanted: the merged delta of the operator, a matrix, after the spectral step that `inputs` has in its globals.

    No more is known of the tensor than `reduced` says. See `operators.spectral.calibrate`.
    """

    is_of_merged: ClassVar[bool] = True
    operator: Operator
    inputs: OperatorInput
    reduced: Reduced


ReductionRequest = (
    MagnitudeCut | InnerProducts | RowGram | ColumnGram | RowSums | ScoreCut | SoftmaxDivergence | CalibratedDelta
)


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Answers to the `ReductionRequest`s so far; the fields that were not asked for are None.

    `cuts_E3` (uint32, see `operators.statistics.Cut`): elements that reach the cut are kept, but not those that reach
    that of `upper_cuts_E3`.
    `products_E3` (float64): per expert <base, base>, <delta, delta>, <base, delta>.
    `gram_GFF` (float64): per row or column the inner products of base (0) and deltas (from 1 on).
    `sums`: answers to `RowSums` and `SoftmaxDivergence`, each rows by sums (float64), and the count of a `ScoreCut`
    by share, in the order of the requests.
    `score_cuts_R3` (uint32): the answer to the last `ScoreCut`; by ranks only bits are meant.
    `marks_MB` (uint8): the marks of the last measure that made some, unless they are too large.
    `delta_N` (float32): the merged delta itself, after a spectral step.
    """

    cuts_E3: NDArray[np.uint32] | None = None
    products_E3: NDArray[np.float64] | None = None
    upper_cuts_E3: NDArray[np.uint32] | None = None
    gram_GFF: NDArray[np.float64] | None = None
    sums: tuple[NDArray[np.float64], ...] = ()
    score_cuts_R3: NDArray[np.uint32] | None = None
    marks_MB: NDArray[np.uint8] | None = None
    delta_N: NDArray[np.float32] | None = None

    def joined(self, later: Reduced) -> Reduced:
        """Both together: what `later` knows stands in the place of what was known before, sums are added at the end."""
        names = (field.name for field in fields(later) if field.name != "sums")
        known: dict[str, Any] = {name: value for name in names if (value := getattr(later, name)) is not None}
        return replace(self, sums=(*self.sums, *later.sums), **known)


NOTHING_REDUCED = Reduced()


# --- what a planner may know: the share of an expert's delta that an operator passes on ---


Products = NDArray[np.float64]
"""Per expert <base, base>, <delta, delta>, <base, delta> of one tensor; see `Reduced.products_E3`."""


@dataclass(frozen=True, slots=True, eq=False)
class DividedWeights:
    """Weights that are divided by their sum: those of the experts, and of the anchor, which is always read."""

    weights_E: NDArray[np.float64]
    anchor_weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Influence:
    """The effect of one expert's delta on the result of one tensor.

    Attributes:
        coefficients_E: signed factor on what is left of the delta (float64 values of the float32 in force).
        energy_factor_E: expected share of ||delta||^2 that random dropping and rescaling leaves; 1 without them.
        trims: only elements at or above the tensor's magnitude cut take part.
        is_additive: the coefficients are fixed, and the result is a multiple of the base and the sum of the deltas
            times these: the norms of what is left out bound the error.
        divided: the weights that are divided by their sum and that of the anchor, which can be that of what was read
            only; None where nothing is divided.
        is_known: False where the operator says nothing: an expert's tensor is then read whole or not at all.
    """

    coefficients_E: NDArray[np.float64]
    energy_factor_E: NDArray[np.float64]
    trims: bool = False
    is_additive: bool = False
    divided: DividedWeights | None = None
    is_known: bool = True


def unknown_influence(n_experts: int) -> Influence:
    """Return the influence of an operator that does not state the effect of a part of a delta: plan whole tensors."""
    ones_E = np.ones(n_experts)
    return Influence(ones_E, ones_E.copy(), is_known=False)


# --- the operator ---


BlockFunction = Callable[[RawBlock], None]
"""The elementwise part of an operator: merges any block of one tensor into `block.out`, from any thread."""


class Operator(Protocol):
    """A merge rule: all that recipes, planners and the engine know of it. Nothing else names a single operator."""

    @property
    def spec(self) -> OperatorSpec: ...

    @property
    def is_random(self) -> bool:
        """Whether the stream keys are used."""
        ...

    def granularity(self, inputs: OperatorInput) -> int:
        """Cuts inside the tensor must fall on multiples of this many elements; 1 where any cut will do."""
        ...

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        """Return the next reduction of the whole tensor, `reduced` being known; None when blocks can be merged."""
        ...

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """Return what a planner may use; `unknown_influence` by default. `products_E3`: None where not known."""
        ...

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        """The function for this tensor's blocks."""
        ...


class Plain:
    """Defaults that most operators share: nothing is random, nothing is reduced, any cut will do.

    It has no `influence`: what a planner may know is for each operator to say.
    """

    is_random = False

    def granularity(self, inputs: OperatorInput) -> int:
        """Any cut will do."""
        return 1

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        """Nothing is needed."""
        return None


class AllAlike(Plain):
    """A rule that omits blocks soundly but has no fixed coefficients: every delta counts as much as its norm."""

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """Return the same for all experts."""
        ones_E = np.ones(len(inputs.experts))
        return Influence(ones_E, ones_E.copy())


@dataclass(frozen=True, slots=True)
class Blockwise(AllAlike):
    """A rule that needs nothing of a whole tensor: a function makes that for its blocks."""

    spec: OperatorSpec
    function: Callable[[OperatorInput], BlockFunction]

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        return self.function(inputs)
