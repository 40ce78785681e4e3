"""Rules that keep some elements of each delta, all but in task_arithmetic, and sum them or merge them as TIES does.

What is kept (by magnitude, in a band, at random, at random by rank) and how it is combined are independent:
ties, dare, breadcrumbs and della come from the one list of `Sparse` at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, F32, RawBlock, itemsize_of_code
from mergepipe.errors import RecipeError
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    BlockFunction,
    Influence,
    MagnitudeCut,
    Marks,
    Operator,
    OperatorInput,
    Plain,
    Products,
    Reduced,
    ReductionRequest,
    RowSums,
    Sums,
)
from mergepipe.operators.elementwise import ElementwiseRule, Keep, nonzero_sum
from mergepipe.operators.spec import (
    DENSITY,
    OperatorSpec,
    ParameterSpec,
    Scope,
    delta_spec,
    rescale_to_magnitudes,
    shared,
)
from mergepipe.operators.statistics import NOTHING_KEPT, rank_of_density

SMALLEST_SUM = 1e-7  # of magnitudes, to be divided by
SCRATCH_ELEMENTS = 1 << 18
_NO_MARKS = np.empty(0, np.uint8)


# --- combine what is kept of the deltas ---


@dataclass(frozen=True, slots=True)
class Sparse(Plain):
    """`M_0 + lambda sum_i w_i delta_i` of what is kept of each delta: all, here.

    With `elects`, as TIES merges: the sign of `sum_i w_i delta_i` is elected, a zero counting as positive, and `lambda`
    times the sum, or with `normalize` the weighted mean, of what agrees with it is added.
    Sources: Ilharco et al. 2022 (arXiv 2212.04089); Yadav et al. 2023 (arXiv 2306.01708), Algorithm 1.
    """

    spec: OperatorSpec
    elects: bool = False
    trims: ClassVar[bool] = False

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """Signs that are elected are not worked out: of an election only the weights are stated."""
        weights_E = inputs.weights_E()
        if not self.elects:
            coefficients_E = self._combination(inputs).coefficients_E.astype(np.float64)
        else:
            divisor = nonzero_sum(np.abs(weights_E)) if inputs.globals["normalize"] else 1.0
            coefficients_E = weights_E * (float(inputs.globals["lambda"]) / divisor)
        keeps_all = type(self) is Sparse
        is_additive = keeps_all and not self.elects
        return Influence(coefficients_E, self._kept_energy(inputs), trims=self.trims, is_additive=is_additive)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        return self._combination(inputs)

    def _combination(self, inputs: OperatorInput) -> ElementwiseRule:
        """Return the rule that keeps everything. Coefficients are worked out in float64 and rounded once."""
        weights_E, scale = inputs.weights_E(), float(inputs.globals["lambda"])
        if self.elects:
            normalizes = bool(inputs.globals["normalize"])
            return ElementwiseRule(
                weights_E.astype(np.float32), consensus=True, normalize=normalizes, delta_scale=scale
            )
        divisor = nonzero_sum(weights_E) if inputs.globals["normalize"] else 1.0
        return ElementwiseRule((weights_E * (scale / divisor)).astype(np.float32))

    def _kept_energy(self, inputs: OperatorInput) -> NDArray[np.float64]:
        """Return the expected share of `||delta||^2` that dropping at random and rescaling leaves."""
        return np.ones(len(inputs.experts))


# --- keep by magnitude ---


class Largest(Sparse):
    """Keep the `density` share of largest magnitude.

    Exactly `floor(density * n)` elements are kept: of equal magnitudes those with the smallest hashes of their index.
    `rescale` multiplies what is kept so that the sum of magnitudes stays, as mergekit does.
    """

    trims = True

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        kept_E = tuple(rank_of_density(float(p["density"]), inputs.n_elements) for p in inputs.experts)
        if all(n_kept == inputs.n_elements for n_kept in kept_E):
            return None
        return MagnitudeCut(kept_E) if reduced.cuts_E3 is None else _sums_to_rescale(inputs, reduced)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        scales_E = scales_of_sums(inputs, reduced)
        return replace(self._combination(inputs), keep=Keep.LARGE, cuts_E3=reduced.cuts_E3, scales_E=scales_E)


class Band(Sparse):
    """Drop the `gamma` share of largest elements, keep the next `density` share.

    Source: Davari and Belilovsky 2023 (arXiv 2312.06795), section 3. Exactly as many elements are dropped and kept as
    the shares say; equal magnitudes are ordered as in TIES.
    """

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        ranks = [band_ranks(inputs.n_elements, float(p["density"]), float(p["gamma"])) for p in inputs.experts]
        if all(rank == (inputs.n_elements, 0) for rank in ranks):
            return None
        if reduced.cuts_E3 is None or reduced.upper_cuts_E3 is None:
            return MagnitudeCut(tuple(n_kept for n_kept, _ in ranks), tuple(n_dropped for _, n_dropped in ranks))
        return _sums_to_rescale(inputs, reduced)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        return replace(
            self._combination(inputs),
            keep=Keep.ALL if reduced.upper_cuts_E3 is None else Keep.BAND,
            cuts_E3=reduced.cuts_E3,
            upper_cuts_E3=reduced.upper_cuts_E3,
            scales_E=scales_of_sums(inputs, reduced),
        )


def band_ranks(n_elements: int, density: float, gamma: float) -> tuple[int, int]:
    """Ranks by magnitude of the last element kept and of the last one dropped above; `gamma` gives way to `density`."""
    if density >= 1.0:
        return n_elements, 0
    target = rank_of_density(density, n_elements)
    dropped = min(rank_of_density(gamma, n_elements), n_elements - target)
    return dropped + target, dropped


def _sums_to_rescale(inputs: OperatorInput, reduced: Reduced) -> ReductionRequest | None:
    """Sums of magnitudes before and after trimming, where they are wanted and not known."""
    if not inputs.globals["rescale"] or reduced.sums or reduced.cuts_E3 is None:
        return None
    n_experts, lower_E3, upper_E3 = len(inputs.experts), reduced.cuts_E3, reduced.upper_cuts_E3
    upper_E3 = np.array([NOTHING_KEPT] * n_experts, np.uint32) if upper_E3 is None else upper_E3

    def add_magnitudes(block: RawBlock, row_elements: int, sums_AK: Sums, _: Marks) -> None:
        """Sum |delta| by expert (even places), and what of it lies between two cuts (odd places)."""
        from mergepipe.kernels.select import add_kept_magnitudes

        add_kept_magnitudes(block, lower_E3, upper_E3, row_elements, sums_AK)

    return RowSums(add_magnitudes, 2 * n_experts, max(1, inputs.n_elements))


@np.errstate(all="ignore")
def scales_of_sums(inputs: OperatorInput, reduced: Reduced) -> NDArray[np.float32]:
    """Return the factors of each expert's kept elements that keep the sum of magnitudes; 1 where nothing is summed."""
    if not reduced.sums:
        return np.ones(len(inputs.experts), np.float32)
    before_E, after_E = reduced.sums[-1].sum(axis=0).reshape(-1, 2).T
    is_small_E = (before_E < SMALLEST_SUM) | (after_E < SMALLEST_SUM)
    ratio_E: NDArray[np.float64] = np.divide(before_E, after_E, out=np.ones_like(after_E), where=~is_small_E)
    return ratio_E.astype(np.float32)


# --- keep at random ---


class Drawn(Sparse):
    """Drop each element with probability `1 - density`; `rescale` multiplies the survivors by `1/density`.

    A block of a sample was dropped once already: its elements are kept with `min(1, density / drawn_probability)`, so
    that each element of the tensor is kept with its density where that is below the probability of the draw. Survivors
    are multiplied so that the mean over draws is that of the full merge.
    Source: Yu et al. 2023 (arXiv 2311.03099), Eq. 2-4.
    """

    is_random = True

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        density_E = _densities_E(inputs)
        kept_E = np.minimum(1.0, density_E / inputs.drawn_probability)
        scales_E = _inverse(kept_E)
        if not inputs.globals["rescale"]:
            scales_E *= density_E
        return replace(
            self._combination(inputs),
            keep=Keep.RANDOM,
            stream_keys_E=np.array(inputs.stream_keys, np.uint64),
            limits_E=np.rint(kept_E * 2.0**32).astype(np.uint64),
            scales_E=scales_E.astype(np.float32),
        )

    def _kept_energy(self, inputs: OperatorInput) -> NDArray[np.float64]:
        """`density * (1 / density)^2` when rescaled, else `density`."""
        density_E = _densities_E(inputs)
        return _inverse(density_E) if inputs.globals["rescale"] else density_E


def _densities_E(inputs: OperatorInput) -> NDArray[np.float64]:
    return np.array([float(p["density"]) for p in inputs.experts], np.float64)


def _inverse(density_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """`1 / density`; 0 where nothing is kept."""
    inverse_E: NDArray[np.float64] = np.divide(1.0, density_E, out=np.zeros_like(density_E), where=density_E > 0.0)
    return inverse_E


class Ranked(Drawn):
    """Drop at random by rank in the row; `rescale` multiplies the survivors so that the sum of magnitudes stays.

    Source: Deep et al. 2024 (arXiv 2406.11617), sections 3.1 to 3.3. Ranks are those of the tensor's last dimension.
    Deviation: rescaled by the ratio of sums of magnitudes, as mergekit does, and not by each element's probability.
    The influence stated is DARE's, though large elements are kept more often.
    """

    def granularity(self, inputs: OperatorInput) -> int:
        return inputs.row_elements if bool((_densities_E(inputs) < 1.0).any()) else 1

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        for parameters in inputs.experts:
            if conflict := spread_conflict(parameters):
                raise RecipeError.of("recipe.value", "epsilon", conflict, "choose a smaller epsilon")
        if not inputs.globals["rescale"] or reduced.sums or bool((_densities_E(inputs) >= 1.0).all()):
            return None
        survival = survival_of(inputs)
        return RowSums(survival.add_magnitudes, 2 * len(inputs.experts), inputs.row_elements, survival.mark_rows)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        """Drop by rank, where marks do not say what survives."""
        keep = Keep.LARGE if reduced.marks_MB is None else Keep.MARKED
        scales_E = scales_of_sums(inputs, reduced)
        rule = replace(self._combination(inputs), keep=keep, scales_E=scales_E, marks_MB=reduced.marks_MB)
        return RankedRule(survival_of(inputs), rule) if rule.marks_MB is None else rule


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

    def drop(self, block: RawBlock, place: int, values_N: NDArray[np.float32]) -> None:
        """Write the delta of the expert at `place` of those present, cleared of what does not survive."""
        from mergepipe.kernels.ranked import decode_deltas, drop_ranked

        decode_deltas(block, place, 0, values_N)
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

    @property
    def mark_rows(self) -> int:
        """Rows of marks of what survives: none where rows are not whole groups of marks."""
        from mergepipe.kernels.merge import MARK_ELEMENTS

        return 0 if self.row_elements % MARK_ELEMENTS else len(self.lowest_E)

    def add_magnitudes(self, block: RawBlock, row_elements: int, sums_AK: Sums, marks_MB: Marks) -> None:
        """Sum |delta| by expert (even places), and what survives (odd places), and mark that."""
        from mergepipe.kernels.ranked import add_survivors

        self.check_rows(block)
        for place, e in enumerate(block.present_E):
            add_survivors(
                block, place, row_elements, self.stream_keys_E[e], float(self.lowest_E[e]), float(self.spread_E[e]),
                sums_AK, marks_MB[e] if len(marks_MB) else _NO_MARKS,
            )  # fmt: skip

    def parts(self, block: RawBlock) -> Iterator[RawBlock]:
        """The block in pieces, of whole rows where anything is dropped, about `SCRATCH_ELEMENTS` long."""
        self.check_rows(block)
        step = self.row_elements * max(1, SCRATCH_ELEMENTS // self.row_elements)
        for skip in range(0, block.n_elements, step):
            yield block.part(skip, min(step, block.n_elements - skip))


def survival_of(inputs: OperatorInput) -> Survival:
    """Return the survival under the parameters in force; at density 1 all elements survive, at 0 none."""
    density_E = _densities_E(inputs)
    epsilon_E = np.where((density_E > 0.0) & (density_E < 1.0), [float(p["epsilon"]) for p in inputs.experts], 0.0)
    keys_E = np.array(inputs.stream_keys, np.uint64)
    return Survival(inputs.row_elements, keys_E, density_E - epsilon_E, 2.0 * epsilon_E)


@dataclass(frozen=True, slots=True, eq=False)
class RankedRule:
    """Drops, writes what is left as deltas beside the base, and merges those. Memory: 4 bytes an expert and element."""

    survival: Survival
    rule: ElementwiseRule

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
            self.survival.drop(part, place, deltas_EN[place])
        self.rule(
            part._replace(
                raw=scratch,
                base_offset=0,
                offsets_E=base_bytes + np.arange(n_present, dtype=np.int64) * n * F32.itemsize,
                codes_E=np.full(n_present, F32.kernel_code | DELTA_FLAG, np.int64),
            )
        )


# --- the rules ---


_YADAV, _YU = "Yadav et al. 2023, arXiv 2306.01708", "Yu et al. 2023, arXiv 2311.03099"
_DAVARI = "Davari and Belilovsky 2023, arXiv 2312.06795"
_DEEP = "Deep et al. 2024, arXiv 2406.11617"
_GAMMA = ParameterSpec(
    "gamma", Scope.MODEL, "share of the delta's largest elements that is dropped", default=0.01, low=0.0, high=1.0
)
_SPREAD = ParameterSpec(
    "epsilon",
    Scope.MODEL,
    "the smallest element of a row survives with density - epsilon, the largest with density + epsilon",
    default=0.15,
    low=0.0,
    high=0.5,
)
_NOT_RESCALED = shared("rescale", "nothing is trimmed, so nothing is rescaled", False, ignored=True)
_RESCALED, _AS_IT_IS = rescale_to_magnitudes(True), rescale_to_magnitudes(False)
_BY_DENSITY = shared("rescale", "multiply surviving elements by 1/density", True)

OPERATORS: tuple[Operator, ...] = (
    Sparse(
        delta_spec(
            "task_arithmetic", "sum of task vectors", "Ilharco et al. 2022, arXiv 2212.04089",
            normalize=False, rescale=_NOT_RESCALED,
        )
    ),
    Largest(
        delta_spec("ties", "trim, elect sign, disjoint merge", _YADAV, DENSITY, normalize=True, rescale=_AS_IT_IS),
        elects=True,
    ),
    Drawn(
        delta_spec("dare_linear", "drop and rescale, then sum", _YU, DENSITY, normalize=False, rescale=_BY_DENSITY)
    ),
    Drawn(
        delta_spec(
            "dare_ties", "drop and rescale, elect sign, disjoint merge", f"{_YU}; {_YADAV}", DENSITY,
            normalize=False, rescale=_BY_DENSITY,
        ),
        elects=True,
    ),
    Band(
        delta_spec(
            "breadcrumbs", "drop the largest and the smallest, then sum", _DAVARI, DENSITY, _GAMMA,
            normalize=False, rescale=_AS_IT_IS,
        )
    ),
    Band(
        delta_spec(
            "breadcrumbs_ties", "drop the largest and the smallest, elect sign, disjoint merge", f"{_DAVARI}; {_YADAV}",
            DENSITY, _GAMMA, normalize=False, rescale=_AS_IT_IS,
        ),
        elects=True,
    ),
    Ranked(
        delta_spec(
            "della", "drop by rank in the row, elect sign, disjoint merge", _DEEP, DENSITY, _SPREAD,
            normalize=True, rescale=_RESCALED, conflict=spread_conflict,
        ),
        elects=True,
    ),
    Ranked(
        delta_spec(
            "della_linear", "drop by rank in the row, then sum", _DEEP, DENSITY, _SPREAD,
            normalize=False, rescale=_RESCALED, conflict=spread_conflict,
        )
    ),
)  # fmt: skip
