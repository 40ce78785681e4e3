"""Reduce blocks to tensor-wide quantities: cuts of magnitudes and scores, inner products, sums by row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, F32, GRAIN_ELEMENTS, RawBlock
from mergepipe.engine.jobs import Reduction
from mergepipe.engine.order_statistics import RankSearch
from mergepipe.engine.rank_brackets import BRACKET_ELEMENTS, BracketedRanks, BracketedScores
from mergepipe.kernels.merge import MARK_BYTES, MARK_ELEMENTS
from mergepipe.kernels.products import add_column_grams, add_row_grams, count_atoms, join_atoms
from mergepipe.kernels.reduce import DeltaStretches, count_nonzero, sum_products, sum_squares
from mergepipe.kernels.select import add_divergences
from mergepipe.operators.base import (
    NUMBERS_OF,
    CalibratedDelta,
    ColumnGram,
    InnerProducts,
    MagnitudeCut,
    Reduced,
    ReductionRequest,
    RowGram,
    RowSums,
    Score,
    ScoreCut,
    SoftmaxDivergence,
)
from mergepipe.operators.spec import SVC
from mergepipe.storage.ranges import scratch

SCORED_ELEMENTS = 64 * 1024
MOST_MARK_BYTES = 128 << 20  # of one tensor


def make_reduction(
    request: ReductionRequest, n_elements: int, n_experts: int, n_ranked: int | None = None
) -> Reduction:
    """Make the reduction that answers `request`; of a sample only `n_ranked` of the tensor's elements are ranked."""
    n_ranked = n_elements if n_ranked is None else n_ranked
    match request:
        case MagnitudeCut(kept_E, dropped_E):
            return MagnitudeCuts(kept_E, n_ranked, dropped_E)
        case InnerProducts():
            return inner_products(n_elements, n_experts)
        case RowGram(row_elements):
            return row_grams(n_elements, n_experts, row_elements)
        case ColumnGram(n_columns, cell_elements):
            return column_grams(n_elements, n_experts, n_columns, cell_elements)
        case RowSums():
            return measure_sums(request, n_elements)
        case ScoreCut(score, ranks, share):
            return ScoreRanks(score, n_ranked, ranks, share)
        case SoftmaxDivergence(row_elements):
            return SoftmaxDivergences(n_elements, row_elements)
        case CalibratedDelta():
            return calibrated_delta(request)


class MagnitudeCuts:
    """Per expert the cut that exactly `kept_E[e]` elements reach by |delta|, and that of `dropped_E[e]`, if wanted.

    Memory: see `BracketedRanks`, per expert.
    """

    def __init__(self, kept_E: Sequence[int], n_elements: int, dropped_E: Sequence[int] = ()) -> None:
        self._kept_E, self._dropped_E = tuple(kept_E), tuple(dropped_E)
        ranks = zip(self._kept_E, self._dropped_E or self._kept_E, strict=True)
        self._search_E = [BracketedRanks(set(both), n_elements) for both in ranks]

    def survey(self, blocks: Sequence[RawBlock]) -> None:
        _look(self._search_E, blocks, BracketedRanks.survey)

    def narrow(self) -> None:
        for search in self._search_E:
            search.narrow()

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        _look(self._search_E, blocks, BracketedRanks.accumulate)

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        _look(self._search_E, blocks, BracketedRanks.refine)

    def finish(self) -> bool:
        decided = [search.decide() for search in self._search_E]  # each one, so that all open ones start refining
        return all(decided)

    def result(self) -> Reduced:
        upper_E3 = self._cuts(self._dropped_E) if self._dropped_E else None
        return Reduced(cuts_E3=self._cuts(self._kept_E), upper_cuts_E3=upper_E3)

    def _cuts(self, rank_E: Sequence[int]) -> NDArray[np.uint32]:
        cuts = [search.cut(rank) for search, rank in zip(self._search_E, rank_E, strict=True)]
        return np.array(cuts, np.uint32).reshape(-1, 3)


def _look(
    search_E: Sequence[BracketedRanks],
    blocks: Sequence[RawBlock],
    step: Callable[[BracketedRanks, DeltaStretches], None],
) -> None:
    """Run a step for every open expert, starting at another one for each buffer: threads seldom contend."""
    stretches = list(DeltaStretches.by_expert(blocks).items())
    shift = blocks[0].first_element // GRAIN_ELEMENTS % len(stretches) if stretches else 0
    for e, deltas in (*stretches[shift:], *stretches[:shift]):
        if search_E[e].is_open:
            step(search_E[e], deltas)


class OnePass:
    """Base of reductions that need no sample and each block once."""

    def survey(self, blocks: Sequence[RawBlock]) -> None:
        """Nothing to learn from a sample."""

    def narrow(self) -> None:
        """Nothing to narrow."""

    def finish(self) -> bool:
        """One pass is enough."""
        return True

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        """Called only beside other reductions; does nothing."""


class Summed(OnePass):
    """A reduction of sums, to which each block is added by a function; another makes the answer of them."""

    def __init__(self, add: Callable[[RawBlock], None], answer: Callable[[], Reduced]) -> None:
        self._add, self._answer = add, answer

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        for block in blocks:
            self._add(block)

    def result(self) -> Reduced:
        return self._answer()


def inner_products(n_elements: int, n_experts: int) -> Summed:
    """<base, base>, <delta, delta>, <base, delta> in float64, the same however the tensor is cut for reading.

    Memory: 8 bytes per 16 Ki elements, and 16 per expert and 16 Ki elements.
    """
    n_cells = -(-n_elements // GRAIN_ELEMENTS)
    base_C, cells_EC2 = np.zeros(n_cells), np.zeros((n_experts, n_cells, 2))

    def add(block: RawBlock) -> None:
        first_cell = block.first_element // GRAIN_ELEMENTS
        sum_squares(block, base_C[first_cell:])
        for place, e in enumerate(block.present_E):
            sum_products(block, place, cells_EC2[e, first_cell:])

    return Summed(add, lambda: Reduced(products_E3=join_products(base_C, cells_EC2)))


def row_grams(n_elements: int, n_experts: int, row_elements: int) -> Summed:
    """Inner products of base and deltas by row, the same however the tensor is cut. Memory: 8 (E + 1)^2 an atom."""
    gram_AFF = np.zeros((count_atoms(n_elements, row_elements), n_experts + 1, n_experts + 1))
    return Summed(
        lambda block: add_row_grams(block, row_elements, gram_AFF),
        lambda: Reduced(gram_GFF=_both_triangles(join_atoms(gram_AFF, n_elements, row_elements))),
    )


def column_grams(n_elements: int, n_experts: int, n_columns: int, cell_elements: int) -> Summed:
    """Inner products of base and deltas by column. Memory: 8 (E + 1)^2 for each column of each cell."""
    gram_CFFP = np.zeros((-(-n_elements // cell_elements), n_experts + 1, n_experts + 1, n_columns))
    return Summed(
        lambda block: add_column_grams(block, n_columns, cell_elements, gram_CFFP),
        lambda: Reduced(gram_GFF=_both_triangles(gram_CFFP.sum(axis=0).transpose(2, 0, 1))),
    )


def _both_triangles(upper_GFF: NDArray[np.float64]) -> NDArray[np.float64]:
    """Complete a symmetric matrix from its upper triangle."""
    return np.triu(upper_GFF) + np.triu(upper_GFF, 1).transpose(0, 2, 1)


def measure_sums(request: RowSums, n_elements: int) -> Summed:
    """Sums of a measure by row, the same however the tensor is cut, and the marks of what survives it, if it makes any.

    Memory: 8 bytes for each sum of an atom; of the marks a bit for each element and row of them, 128 MiB at most, else
    none.
    """
    row_elements, row_bytes = request.row_elements, -(-n_elements // MARK_ELEMENTS) * MARK_BYTES
    is_small = request.mark_rows * row_bytes <= MOST_MARK_BYTES
    sums_AK = np.zeros((count_atoms(n_elements, row_elements), request.n_sums))
    marks_MB = np.zeros((request.mark_rows if is_small else 0, row_bytes), np.uint8)

    def add(block: RawBlock) -> None:
        if len(marks_MB) and block.first_element % MARK_ELEMENTS:
            raise ValueError(
                f"a block starts at element {block.first_element}, inside a group of {MARK_ELEMENTS} marks"
            )
        request.measure(block, row_elements, sums_AK, marks_MB)

    def answer() -> Reduced:
        sums = join_atoms(sums_AK, n_elements, row_elements)
        return Reduced(sums=(sums,), marks_MB=marks_MB if marks_MB.size else None)

    return Summed(add, answer)


class ScoreRanks:
    """The exact scores of some ranks; or the cut that a share of those that are not zero reach, and how many they are.

    The first look at a large tensor is into brackets. Where one misses, or a sample was shown, histograms are counted.
    Memory: see `RankSearch` and `BracketedScores`, and 512 KiB a thread.
    """

    def __init__(self, score: Score, n_elements: int, ranks: Sequence[int] = (), share: float | None = None) -> None:
        self._score, self._n_elements, self._share = score, n_elements, share
        self._ranks = tuple(ranks)
        self._search = RankSearch(set(ranks), n_elements, orders_ties=share is not None)
        self._brackets = BracketedScores() if n_elements >= BRACKET_ELEMENTS else None
        self._has_missed = False
        self._n_nonzero = 0
        self._lock = threading.Lock()

    def survey(self, blocks: Sequence[RawBlock]) -> None:
        if self._share is None:
            for scores in scores_of(self._score, blocks):
                self._search.count_coarse(scores)

    def narrow(self) -> None:
        if self._share is None:
            self._brackets = None
            self._search.narrow()

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        if self._share is None and not self._search.is_open:
            return
        for scores in scores_of(self._score, blocks):
            if self._share is not None:
                n_nonzero = int(count_nonzero(values_of(scores)))
                with self._lock:
                    self._n_nonzero += n_nonzero
            if self._brackets is not None:
                with self._lock:
                    if not self._brackets.is_placed:
                        shares = [rank / self._n_elements for rank in self._search.open_ranks]
                        self._brackets.place(values_of(scores), shares, self._share)
                self._brackets.accumulate(values_of(scores))
            else:
                self._search.count_coarse(scores)
                self._search.count_fine(scores)

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        for scores in scores_of(self._score, blocks):
            if self._has_missed:
                self._search.count_coarse(scores)
            else:
                self._search.count_fine(scores)

    def finish(self) -> bool:
        if self._share is not None and not self._ranks:
            self._ranks = (int(self._n_nonzero * self._share),)
            self._search.seek(self._ranks[0])
        if self._brackets is not None and self._search.is_open:
            answers = self._brackets.answers(self._search.open_ranks)
            self._brackets, self._has_missed = None, answers is None
            for rank, place in (answers or {}).items():
                self._search.answer(rank, place)
            return self._search.settle()
        self._has_missed = False
        return self._search.decide()

    def result(self) -> Reduced:
        counts = () if self._share is None else (np.array([[self._n_nonzero]], np.float64),)
        cuts = [self._search.cut(rank) for rank in self._ranks]
        return Reduced(sums=counts, score_cuts_R3=np.array(cuts, np.uint32))


def scores_of(score: Score, blocks: Iterable[RawBlock]) -> Iterator[DeltaStretches]:
    """Yield the scores of blocks in pieces, each in the place of the one before, as stored deltas of one expert."""
    for block in blocks:
        room_N = scratch("scores", min(SCORED_ELEMENTS, block.n_elements), np.float32)
        for skip in range(0, block.n_elements, SCORED_ELEMENTS):
            part = block.part(skip, min(SCORED_ELEMENTS, block.n_elements - skip))
            scores_N = room_N[: part.n_elements]
            score(part, scores_N)
            stretch = part.first_element, part.n_elements, 0, 0, F32.kernel_code | DELTA_FLAG
            yield DeltaStretches(scores_N.view(np.uint8), F32.kernel_code, np.array([stretch], np.int64))


def values_of(scores: DeltaStretches) -> NDArray[np.float32]:
    """Return the scores of a piece of them."""
    return scores.raw.view(np.float32)


class SoftmaxDivergences(OnePass):
    """The divergence of the model's softmax from the base's by row, the same however the tensor is cut.

    Rows that lie inside a block are done in the first look, the others need their totals for a second one.
    Memory: 24 bytes an atom, a byte a row, and 256 KiB a thread.
    """

    def __init__(self, n_elements: int, row_elements: int) -> None:
        self._n_elements, self._row_elements = n_elements, row_elements
        n_atoms = count_atoms(n_elements, row_elements)
        self._totals_A2 = np.zeros((n_atoms, 2), np.float64)
        self._totals_R2 = np.empty((0, 2), np.float64)
        self._sums_A = np.zeros(n_atoms, np.float64)
        self._is_done_R = np.zeros(-(-n_elements // row_elements), np.uint8)

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        for block in blocks:
            add_divergences(block, self._row_elements, self._totals_R2, self._totals_A2, self._sums_A, self._is_done_R)

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        self.accumulate(blocks)

    def finish(self) -> bool:
        if self._is_done_R.all() or len(self._totals_R2):
            return True
        self._totals_R2 = join_atoms(self._totals_A2, self._n_elements, self._row_elements)
        return False

    def result(self) -> Reduced:
        return Reduced(sums=(join_atoms(self._sums_A[:, None], self._n_elements, self._row_elements),))


def calibrated_delta(request: CalibratedDelta) -> Summed:
    """The merged delta of a matrix after a spectral step. Memory: see `calibration_cost`."""
    from mergepipe.operators.spectral import calibrate, gather_deltas

    inputs, alpha = request.inputs, request.inputs.globals.get(SVC)
    function = request.operator.block_function(inputs, request.reduced)
    merged_N = np.zeros(inputs.n_elements, np.float32)
    models = [e for e, p in enumerate(inputs.experts) if NUMBERS_OF not in p and alpha]
    experts = {e: np.zeros(inputs.n_elements, np.float32) for e in models}

    def answer() -> Reduced:
        matrices = [delta_N.reshape(inputs.shape) for delta_N in experts.values()]
        calibrate(merged_N.reshape(inputs.shape), matrices, None if alpha is None else float(alpha))
        return Reduced(delta_N=merged_N)

    return Summed(lambda block: gather_deltas(block, function, merged_N, experts), answer)


def join_products(base_C: NDArray[np.float64], cells_EC2: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over cells: per expert <base, base>, <delta, delta>, <base, delta>."""
    products_E3 = np.empty((len(cells_EC2), 3), np.float64)
    products_E3[:, 0] = base_C.sum()
    products_E3[:, 1:] = cells_EC2.sum(axis=1)
    return products_E3
