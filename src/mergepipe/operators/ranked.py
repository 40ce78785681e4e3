"""Rules that drop at random by rank: della, della_linear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, F32, itemsize_of_code
from mergepipe.errors import RecipeError
from mergepipe.operators.base import (
    NO_MARKS,
    NOTHING_REDUCED,
    BlockFunction,
    Influence,
    Operator,
    OperatorInput,
    Plain,
    Products,
    RawBlock,
    Reduced,
    ReductionRequest,
    SurvivorSums,
)
from mergepipe.operators.elementwise import ElementwiseRule, Keep
from mergepipe.operators.linear import fixed_coefficients
from mergepipe.operators.sparse import (
    consensus_coefficients,
    consensus_rule,
    densities_E,
    dropped_energy,
    scales_of_sums,
)
from mergepipe.operators.spec import DENSITY, OperatorSpec, ParameterSpec, Scope, delta_spec, rescale_to_magnitudes

# --- block functions with numbers of their own for each row or column ---


@dataclass(frozen=True, slots=True, eq=False)
class RowRule:
    """`anchor_scale_R M_0 + sum_e coefficients_ER delta_e` of elements whose magnitude reaches `lower_bits_ER`."""

    row_elements: int
    coefficients_ER: NDArray[np.float32]
    anchor_scale_R: NDArray[np.float32]
    lower_bits_ER: NDArray[np.uint32] | None = None
    copies_base: bool = False

    def __call__(self, block: RawBlock) -> None:
        """Merge one block into `block.out`."""
        from mergepipe.kernels.merge import merge_rows

        chosen = block.present_E
        lower_ER = self.lower_bits_ER
        merge_rows(
            block.raw, block.base_offset, block.base_code, block.offsets_E, block.codes_E,
            self.coefficients_ER[chosen], self.anchor_scale_R,
            np.zeros((len(chosen), len(self.anchor_scale_R)), np.uint32) if lower_ER is None else lower_ER[chosen],
            self.row_elements, block.first_element, block.out, block.out_offset, block.out_code, block.n_elements,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRule:
    """`anchor_scale_P M_0 + sum_e coefficients_EP delta_e`; element `i` belongs to column `i % P`."""

    coefficients_EP: NDArray[np.float32]
    anchor_scale_P: NDArray[np.float32]
    copies_base: bool = False

    def __call__(self, block: RawBlock) -> None:
        """Merge one block into `block.out`."""
        from mergepipe.kernels.merge import merge_columns

        merge_columns(
            block.raw, block.base_offset, block.base_code, block.offsets_E, block.codes_E,
            self.coefficients_EP[block.present_E], self.anchor_scale_P, block.first_element, block.out,
            block.out_offset, block.out_code, block.n_elements,
        )  # fmt: skip


# --- rules that drop at random by rank: della, della_linear ---


SCRATCH_ELEMENTS = 1 << 18
_DEEP = "Deep et al. 2024, arXiv 2406.11617"
_SPREAD = ParameterSpec(
    "epsilon",
    Scope.MODEL,
    "the smallest element of a row survives with density - epsilon, the largest with density + epsilon",
    default=0.15,
    low=0.0,
    high=0.5,
)


def spread_conflict(model: Mapping[str, float | bool]) -> str:
    """Whether elements of one model survive with probabilities outside of (0, 1); all do at density 1, none at 0."""
    if not {"density", "epsilon"} <= model.keys():
        return ""
    density, epsilon = float(model["density"]), float(model["epsilon"])
    low, high = density - epsilon, density + epsilon
    if density in (0.0, 1.0) or (low > 0.0 and high < 1.0):
        return ""
    return f"density {density:g} with epsilon {epsilon:g} gives probabilities from {low:g} to {high:g}, outside (0, 1)"


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """Survival by rank: per expert the probability of a row's smallest element, and the surplus of its largest."""

    row_elements: int
    stream_keys_E: NDArray[np.uint64]
    lowest_E: NDArray[np.float64]
    spread_E: NDArray[np.float64]

    def decode(self, block: RawBlock, place: int, out_N: NDArray[np.float32]) -> None:
        """The delta of the expert at `place` of those present."""
        from mergepipe.kernels.ranked import decode_deltas

        decode_deltas(
            block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]), int(block.codes_E[place]),
            block.n_elements, out_N,
        )  # fmt: skip

    def drop(self, block: RawBlock, place: int, values_N: NDArray[np.float32]) -> None:
        """Clear what does not survive of that delta."""
        from mergepipe.kernels.ranked import drop_ranked

        e = int(block.present_E[place])
        lowest, spread = float(self.lowest_E[e]), float(self.spread_E[e])
        if lowest + spread <= 0.0:
            values_N.fill(0.0)
        elif lowest < 1.0:
            drop_ranked(values_N, block.first_element, self.row_elements, self.stream_keys_E[e], lowest, spread)

    def check_rows(self, block: RawBlock) -> None:
        """Refuse a block that cuts a row in which something is dropped."""
        if block.first_element % self.row_elements and bool((self.lowest_E < 1.0).any()):
            raise ValueError(f"a block starts at element {block.first_element}, inside a row of {self.row_elements}")

    def parts(self, block: RawBlock) -> Iterator[RawBlock]:
        """The block in pieces, of whole rows where anything is dropped, about `SCRATCH_ELEMENTS` long."""
        self.check_rows(block)
        step = self.row_elements * max(1, SCRATCH_ELEMENTS // self.row_elements)
        for skip in range(0, block.n_elements, step):
            yield block.part(skip, min(step, block.n_elements - skip))


@dataclass(frozen=True, slots=True, eq=False)
class RankedRule:
    """Drops, writes what is left as deltas beside the base, and merges those. Memory: 4 bytes an expert and element."""

    survival: Survival
    rule: ElementwiseRule
    copies_base: bool = False

    def __call__(self, block: RawBlock) -> None:
        """Merge one block into `block.out`."""
        for part in self.survival.parts(block):
            self._merge(part)

    def _merge(self, part: RawBlock) -> None:
        n, n_present = part.n_elements, len(part.present_E)
        base_bytes = -(-n * itemsize_of_code(part.base_code) // F32.itemsize) * F32.itemsize
        scratch = np.empty(base_bytes + n_present * n * F32.itemsize, np.uint8)
        stored = part.raw[part.base_offset : part.base_offset + n * itemsize_of_code(part.base_code)]
        scratch[: len(stored)] = stored
        deltas_EN = scratch[base_bytes:].view(np.float32).reshape(n_present, n)
        for place in range(n_present):
            self.survival.decode(part, place, deltas_EN[place])
            self.survival.drop(part, place, deltas_EN[place])
        self.rule(
            replace(
                part,
                raw=scratch,
                base_offset=0,
                offsets_E=base_bytes + np.arange(n_present, dtype=np.int64) * n * F32.itemsize,
                codes_E=np.full(n_present, F32.kernel_code | DELTA_FLAG, np.int64),
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class SurvivingMagnitudes:
    """A measure of survivors: per expert the sum of |delta| (even places), and of what survives (odd places)."""

    survival: Survival

    @property
    def n_sums(self) -> int:
        return 2 * len(self.survival.lowest_E)

    @property
    def mark_rows(self) -> int:
        from mergepipe.kernels.merge import MARK_ELEMENTS

        return 0 if self.survival.row_elements % MARK_ELEMENTS else len(self.survival.lowest_E)

    def __call__(
        self, block: RawBlock, row_elements: int, sums_AK: NDArray[np.float64], marks_MB: NDArray[np.uint8]
    ) -> None:
        from mergepipe.kernels.products import common_multiple
        from mergepipe.kernels.ranked import add_survivors

        self.survival.check_rows(block)
        survival = self.survival
        for place, e in enumerate(block.present_E):
            add_survivors(
                block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]),
                int(block.codes_E[place]), block.first_element, block.n_elements, row_elements,
                common_multiple(row_elements), survival.stream_keys_E[e], float(survival.lowest_E[e]),
                float(survival.spread_E[e]), sums_AK[:, 2 * e : 2 * e + 2], marks_MB[e] if len(marks_MB) else NO_MARKS,
            )  # fmt: skip


class _Ranked(Plain):
    """The common part of both rules: whole rows, random streams, and the sums that rescaling needs."""

    __slots__ = ()
    is_random = True

    def granularity(self, inputs: OperatorInput) -> int:
        return inputs.row_elements if bool((densities_E(inputs) < 1.0).any()) else 1

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        check_spread(inputs)
        if not inputs.globals["rescale"] or reduced.sums or bool((densities_E(inputs) >= 1.0).all()):
            return None
        return SurvivorSums(SurvivingMagnitudes(survival_of(inputs)), inputs.row_elements)


@dataclass(frozen=True, slots=True)
class Della(_Ranked):
    """Drop by rank, rescale so that the sum of magnitudes stays, elect signs and merge as TIES.

    Source: Deep et al. 2024 (arXiv 2406.11617), sections 3.1 to 3.3. Ranks are those of the tensor's last dimension.
    Deviation: rescaled by the ratio of sums of magnitudes, as mergekit does, and not by each element's probability.
    """

    spec: ClassVar[OperatorSpec] = delta_spec(
        "della",
        "drop by rank in the row, elect sign, disjoint merge",
        _DEEP,
        DENSITY,
        _SPREAD,
        normalize=True,
        rescale=rescale_to_magnitudes(True),
        conflict=spread_conflict,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """Return DARE's influence, but large elements are kept more often: the sign election is not worked out."""
        return Influence(consensus_coefficients(inputs), dropped_energy(inputs))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        keep = Keep.LARGE if reduced.marks_MB is None else Keep.MARKED
        scales_E = scales_of_sums(inputs, reduced)
        return _dropping(inputs, consensus_rule(inputs, keep=keep, scales_E=scales_E, marks_MB=reduced.marks_MB))


@dataclass(frozen=True, slots=True)
class DellaLinear(_Ranked):
    """Drop by rank and rescale as DELLA, then `M_0 + lambda sum_i w_i delta_i`."""

    spec: ClassVar[OperatorSpec] = delta_spec(
        "della_linear",
        "drop by rank in the row, then sum",
        _DEEP,
        DENSITY,
        _SPREAD,
        normalize=False,
        rescale=rescale_to_magnitudes(True),
        conflict=spread_conflict,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return Influence(fixed_coefficients(inputs).astype(np.float64), dropped_energy(inputs))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        keep = Keep.LARGE if reduced.marks_MB is None else Keep.MARKED
        scales_E = scales_of_sums(inputs, reduced)
        coefficients_E = fixed_coefficients(inputs)
        return _dropping(
            inputs, ElementwiseRule(coefficients_E, keep=keep, scales_E=scales_E, marks_MB=reduced.marks_MB)
        )


def _dropping(inputs: OperatorInput, rule: ElementwiseRule) -> BlockFunction:
    """Have a rule drop by rank, if it is not told by marks what survives."""
    return RankedRule(survival_of(inputs), rule) if rule.marks_MB is None else rule


def survival_of(inputs: OperatorInput) -> Survival:
    """Return the survival under the parameters in force; at density 1 all elements survive, at 0 none."""
    density_E = densities_E(inputs)
    epsilon_E = np.where((density_E > 0.0) & (density_E < 1.0), [float(p["epsilon"]) for p in inputs.experts], 0.0)
    keys_E = np.array(inputs.stream_keys, np.uint64)
    return Survival(inputs.row_elements, keys_E, density_E - epsilon_E, 2.0 * epsilon_E)


def check_spread(inputs: OperatorInput) -> None:
    """Refuse probabilities outside of (0, 1)."""
    for parameters in inputs.experts:
        conflict = spread_conflict(parameters)
        if conflict:
            raise RecipeError.of("recipe.value", "epsilon", conflict, "choose a smaller epsilon")


OPERATORS: tuple[Operator, ...] = (Della(), DellaLinear())
