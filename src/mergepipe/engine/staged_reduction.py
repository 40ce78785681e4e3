"""Gather what an operator needs of a whole tensor in stages, each of which may depend on earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.core.blocks import RawBlock
from mergepipe.engine.jobs import Reduction
from mergepipe.engine.known_quantities import NOTHING_KNOWN, KnownQuantities
from mergepipe.operators.base import NOTHING_REDUCED, Operator, OperatorInput, Reduced, ReductionRequest


class StagedReduction:
    """A `Reduction` that gathers what `operator` needs of a tensor, one request after another, while it `is_open`.

    What is `known` without looking at the tensor is not gathered. Of a sample only `n_sampled` elements are looked at:
    ranks are ranks within the sample, and sums are sums over it. When a stage is done the next one begins, and sees
    every block where the earlier one would have refined. Memory: that of the largest stage.
    """

    def __init__(
        self,
        operator: Operator,
        inputs: OperatorInput,
        known: KnownQuantities = NOTHING_KNOWN,
        n_sampled: int | None = None,
    ) -> None:
        self._operator = operator
        self._inputs = inputs
        self._known = known
        self._n_sampled = n_sampled
        self._reduced = NOTHING_REDUCED
        self._request: ReductionRequest | None = None
        self._current: Reduction | None = None
        self._advance()
        self._is_new = False

    def _advance(self) -> None:
        """Answer requests from known quantities as far as they go, then begin to gather the first other one, if any."""
        self._current = None
        self._request = self._next_request()
        if self._request is not None:
            self._current = self._reduction_for(self._request)
        self._is_new = True  # it has not seen the blocks yet

    def _next_request(self) -> ReductionRequest | None:
        """Return the operator's next request that needs the blocks; join answers that are known to what is reduced."""
        earlier: list[ReductionRequest] = []
        while True:
            request = self._operator.reduction(self._inputs, self._reduced)
            if request is None:
                return None
            if request in earlier:
                raise ValueError(f"{self._operator.spec.name} asks again for {request}")
            earlier.append(request)
            answer = self._known.answer(request)
            if answer is None:
                return request
            self._reduced = self._reduced.joined(answer)

    def _reduction_for(self, request: ReductionRequest) -> Reduction:
        """Begin to gather the part of a request that is not known."""
        from mergepipe.engine.block_reductions import make_reduction  # many merges reduce nothing

        n_elements = self._inputs.n_elements
        missing = self._known.missing(request)
        if self._n_sampled is not None:
            missing = missing.among(self._n_sampled, n_elements)
        return make_reduction(missing, n_elements, len(self._inputs.experts), self._n_sampled)

    @property
    def is_open(self) -> bool:
        """Whether the tensor has to be looked at."""
        return self._current is not None

    def survey(self, blocks: Sequence[RawBlock]) -> None:
        if self._current:
            self._current.survey(blocks)

    def narrow(self) -> None:
        if self._current:
            self._current.narrow()

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        if self._current:
            self._current.accumulate(blocks)

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        if self._current and self._is_new:
            self._current.accumulate(blocks)
        elif self._current:
            self._current.refine(blocks)

    def finish(self) -> bool:
        self._is_new = False
        if self._current is None:
            return True
        if not self._current.finish():
            return False
        gathered = self._known.completed(self._request, self._current.result())
        self._reduced = self._reduced.joined(gathered)
        self._advance()
        return not self.is_open

    def result(self) -> Reduced:
        return self._reduced
