"""Gather what an operator needs of a whole tensor in stages, each of which may depend on earlier ones."""

from __future__ import annotations

from mergepipe.core.values import dataclass
from mergepipe.engine.reductions.block_reductions import Reduction, make_reduction
from mergepipe.engine.reductions.known_quantities import NOTHING_KNOWN, KnownQuantities
from mergepipe.operators.base import NOTHING_REDUCED, Operator, OperatorInput, RawBlock, Reduced, ReductionRequest


@dataclass(frozen=True, slots=True)
class Needs:
    """The stages of quantities that `operator` needs of a tensor, less those that are `known` without looking at it."""

    operator: Operator
    inputs: OperatorInput
    known: KnownQuantities = NOTHING_KNOWN

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
        self._current = make_reduction(request, self._needs.inputs.n_elements, self._n_experts)
        self._is_new = True
        return False

    def result(self) -> Reduced:
        return self._reduced
