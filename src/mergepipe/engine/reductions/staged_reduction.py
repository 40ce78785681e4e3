"""Gather what an operator needs of a whole tensor in stages, each of which may depend on earlier ones."""

from __future__ import annotations

from dataclasses import dataclass

from mergepipe.engine.reductions.block_reductions import Reduction, make_reduction
from mergepipe.engine.reductions.known_quantities import NOTHING_KNOWN, KnownQuantities
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    MagnitudeBand,
    MagnitudeCut,
    Operator,
    OperatorInput,
    RawBlock,
    Reduced,
    ReductionRequest,
    ScoreCut,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """The stages of quantities that `operator` needs of a tensor, less those that are `known` without looking at it.

    Of a sample only `sampled_elements` are looked at: ranks are those among them, sums are theirs.
    """

    operator: Operator
    inputs: OperatorInput
    known: KnownQuantities = NOTHING_KNOWN
    sampled_elements: int | None = None

    def reduction(self, request: ReductionRequest, n_experts: int) -> Reduction:
        """Make the reduction that answers `request`."""
        n_elements = self.inputs.n_elements
        if self.sampled_elements is None:
            return make_reduction(request, n_elements, n_experts)
        request = _among(request, n_elements, self.sampled_elements)
        return make_reduction(request, n_elements, n_experts, self.sampled_elements)

    def next(self, reduced: Reduced) -> tuple[Reduced, ReductionRequest | None]:
        """Advance as far as known quantities allow; return them, and the next request to gather, if any.

        Raises:
            ValueError: an operator asks again for what it was told.
        """
        earlier: list[ReductionRequest] = []
        while (request := self.operator.reduction(self.inputs, reduced)) is not None:
            if request in earlier:
                raise ValueError(f"{self.operator.spec.name} asks again for {request}")
            earlier.append(request)
            answer = self.known.answer(request)
            unanswered = self.known.unanswered(request) if answer is None else None
            if unanswered is not None:
                return reduced, unanswered
            reduced = self.known.completed(reduced) if answer is None else reduced.joined(answer)
        return reduced, None


def _among(request: ReductionRequest, n_elements: int, n_sampled: int) -> ReductionRequest:
    """Return a request with its ranks in proportion among `n_sampled` of the `n_elements`."""

    def ranks(of_all: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank * n_sampled // n_elements for rank in of_all)

    match request:
        case MagnitudeCut(kept_E):
            return MagnitudeCut(ranks(kept_E))
        case MagnitudeBand(kept_E, dropped_E):
            return MagnitudeBand(ranks(kept_E), ranks(dropped_E))
        case ScoreCut(score, of_scores):
            return ScoreCut(score, tuple(max(1, rank) for rank in ranks(of_scores)))
        case _:
            return request


class StagedReduction:
    """A `Reduction` that gathers one request after another. Memory: that of the largest of them.

    A stage that is done makes way for the next one, which sees every block as the other's refinement would.
    """

    def __init__(self, needs: Needs, first: Reduction, n_experts: int, reduced: Reduced = NOTHING_REDUCED) -> None:
        self._needs = needs
        self._n_experts = n_experts
        self._reduced = reduced
        self._current: Reduction | None = first
        self._is_new = False  # the current stage has not seen the blocks yet

    def survey(self, block: RawBlock) -> None:
        if self._current:
            self._current.survey(block)

    def narrow(self) -> None:
        if self._current:
            self._current.narrow()

    def accumulate(self, block: RawBlock) -> None:
        if self._current:
            self._current.accumulate(block)

    def refine(self, block: RawBlock) -> None:
        if self._current and self._is_new:
            self._current.accumulate(block)
        elif self._current:
            self._current.refine(block)

    def finish(self) -> bool:
        self._is_new = False
        if self._current is None:
            return True
        if not self._current.finish():
            return False
        joined = self._needs.known.completed(self._reduced.joined(self._current.result()))
        self._reduced, request = self._needs.next(joined)
        if request is None:
            self._current = None
            return True
        self._current = self._needs.reduction(request, self._n_experts)
        self._is_new = True
        return False

    def result(self) -> Reduced:
        return self._reduced
