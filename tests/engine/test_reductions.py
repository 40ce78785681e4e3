"""Magnitude cuts against a sort, and inner products however the tensor is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F32, GRAIN_ELEMENTS, BlockGrid, RawBlock, Span
from mergepipe.engine import block_reductions, rank_brackets, tie_search
from mergepipe.engine.analysis import FINE_SHARE, FineMagnitudes, TensorSummary
from mergepipe.engine.block_reductions import MagnitudeCuts, ScoreRanks, inner_products, scores_of
from mergepipe.engine.order_statistics import RankSearch
from mergepipe.kernels.reduce import COARSE_BINS, DeltaStretches, count_magnitudes, find_rank
from mergepipe.operators.statistics import rank_of_density
from mergepipe.testing import Family, StoredTensor, make_family, run_reduction
from support.oracle import order_of_ranks, reaching
from support.strategies import FLOATS, families


def magnitudes_EN(family: Family) -> NDArray[np.uint32]:
    """The bit patterns of |delta|, by numpy."""
    base_N, experts_EN = family.base_N, family.experts_EN
    with np.errstate(all="ignore"):
        deltas_EN = np.where(experts_EN == base_N, np.float32(0), experts_EN - base_N).astype(np.float32)
    return deltas_EN.view(np.uint32) & np.uint32(0x7FFFFFFF)


def assert_cuts(family: Family, kept_E: tuple[int, ...], cuts_E3: NDArray[np.uint32] | None) -> None:
    """The elements that reach a cut are the first of a full sort; NaN come before everything, zeros do not matter."""
    assert cuts_E3 is not None
    for bits_N, kept, cut_3 in zip(magnitudes_EN(family), kept_E, cuts_E3.tolist(), strict=True):
        magnitudes_N = bits_N.view(np.float32)
        if np.isnan(magnitudes_N).sum() < kept or kept == 0:  # which NaN come first depends on their bits
            first = order_of_ranks(magnitudes_N)[:kept]
            reached = np.flatnonzero(reaching(magnitudes_N, cut_3) & (bits_N > 0))
            assert reached.tolist() == np.sort(first[bits_N[first] > 0]).tolist()
        else:
            assert np.isnan(magnitudes_N[reaching(magnitudes_N, cut_3)]).all()


@given(st.data(), st.sampled_from([0.0, 0.001, 0.5, 0.999, 1.0]))
def test_magnitude_cuts__equals_a_sort(data: st.DataObject, share: float) -> None:
    n_experts = data.draw(st.integers(1, 4))
    family = data.draw(families(n_experts))
    n = len(family.base)
    kept_E = tuple(data.draw(st.one_of(st.integers(0, n), st.just(math.floor(share * n)))) for _ in range(n_experts))
    tensor = StoredTensor(family, F32, data.draw(st.integers(0, 5)))
    blocks = [tensor.block(span) for span in tensor.spans(data.draw(st.lists(st.integers(1, n), max_size=4)))]
    sample = blocks[: data.draw(st.integers(0, len(blocks)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_brackets, "BRACKET_ELEMENTS", data.draw(st.sampled_from((1, 1 << 18))))
        patch.setattr(tie_search, "TIES_ROOM", data.draw(st.sampled_from((1, 1 << 21))))
        reduced = run_reduction(MagnitudeCuts(kept_E, n), blocks, sample)
    assert_cuts(family, kept_E, reduced.cuts_E3)


def _one_expert(deltas: NDArray[np.float32]) -> Family:
    return Family(F32, (F32,), np.zeros(len(deltas), np.float32), (deltas,))


def _drive_counting_refinements(
    family: Family, kept: int, sample: list[Span], pieces: list[Span]
) -> tuple[int, np.uint32]:
    tensor = StoredTensor(family, F32)
    selection = MagnitudeCuts((kept,), len(family.base))
    selection.survey([tensor.block(span) for span in sample])
    selection.narrow()
    blocks = [tensor.block(span) for span in pieces]
    for block in blocks:
        selection.accumulate([block])
    refinements = 0
    while not selection.finish():
        refinements += 1
        assert refinements <= 2
        selection.refine(blocks)
    cuts_E3 = selection.result().cuts_E3
    assert_cuts(family, (kept,), cuts_E3)
    assert cuts_E3 is not None
    return refinements, cuts_E3[0, 0]


@pytest.mark.parametrize(
    ("first_scale", "surveyed", "looks"),
    [
        (1.0, range(0, 10, 5), 0),  # an honest sample
        *((scale, range(1), 1) for scale in (1e-6, 1e6, 0.0)),
        (1.0, (), 0), (1.05, (), 1), (1e-6, (), 2), (1e6, (), 2), (0.0, (), 2),
    ],
)  # fmt: skip
def test_magnitude_cuts__look_again_only_if_the_sample_or_the_first_block_misleads(
    first_scale: float, surveyed: Sequence[int], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not surveyed:
        monkeypatch.setattr(rank_brackets, "BRACKET_ELEMENTS", 1)
    deltas = (np.random.default_rng(0).standard_normal(100_000) * 1e-3).astype(np.float32)
    deltas[:10_000] *= np.float32(first_scale)
    pieces = [Span(i, i + 10_000) for i in range(0, 100_000, 10_000)]
    sample = [pieces[i] for i in surveyed]
    refinements, threshold = _drive_counting_refinements(_one_expert(deltas), 20_000, sample, pieces)
    assert refinements == looks
    assert threshold == np.sort(np.abs(deltas).view(np.uint32))[-20_000]


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 9e-41])  # the lowest bits of the bin of zeros, and more of them
@pytest.mark.parametrize("surveyed", [0, 1])
def test_magnitude_cuts__among_zeros_look_once(tiny: float, surveyed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_brackets, "BRACKET_ELEMENTS", 1)
    deltas = (np.random.default_rng(0).standard_normal(100_000) * 1e-3).astype(np.float32)
    deltas[np.arange(100_000) % 5 > 0] = 0.0
    deltas[1::5] = np.float32(tiny)
    pieces = [Span(i, i + 10_000) for i in range(0, 100_000, 10_000)]
    refinements, threshold = _drive_counting_refinements(_one_expert(deltas), 30_000, pieces[:surveyed], pieces)
    assert threshold == np.float32(tiny).view(np.uint32)
    assert refinements == (tiny > 0)  # for the ties alone


@pytest.mark.parametrize("surveyed", [0, 1])
def test_magnitude_cuts__among_the_largest_bits_look_once(surveyed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_brackets, "BRACKET_ELEMENTS", 1)
    magnitudes = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    magnitudes[::2] = np.uint32(0x7FFFFFFF).view(np.float32)  # a NaN as of memory that nobody wrote
    search = rank_brackets.BracketedRanks({30_000}, 100_000)
    block = StoredTensor(_one_expert(magnitudes), F32).block(Span(0, 100_000))
    deltas = DeltaStretches.by_expert([block])[0]
    for _ in range(surveyed):
        search.survey(deltas)
    search.narrow()
    search.accumulate(deltas)
    while not search.decide():
        search.refine(deltas)
    assert search.cut(30_000).bits == 0x7FFFFFFF
    assert search.cut(30_000).is_tied


@given(cuts=st.lists(st.integers(1, 99_999), max_size=5), n_runs=st.integers(1, 8), run_elements=st.integers(1, 9000))
def test_runs__of_stretches_are_spread_over_all_of_them(cuts: list[int], n_runs: int, run_elements: int) -> None:
    family = make_family(np.random.default_rng(0), 100_000, BF16, (F32,), 0.0)
    tensor = StoredTensor(family, F32)
    shown = tensor.spans(cuts)[::2]  # with gaps between them
    n_shown = sum(span.n_elements for span in shown)
    runs = DeltaStretches.by_expert([tensor.block(span) for span in shown])[0].runs(n_runs, run_elements)
    elements = [np.arange(first, first + n) for first, n, *_ in runs.stretches_S5.tolist()]
    assert np.isin(np.concatenate(elements), np.concatenate([np.arange(span.start, span.stop) for span in shown])).all()
    assert runs.n_elements == n_shown if n_shown <= n_runs * run_elements else n_runs <= len(elements) <= 2 * n_runs
    counts_B = np.zeros(COARSE_BINS, np.int64)
    count_magnitudes(runs, counts_B)
    deltas = (family.experts_EN[0] - family.base_N)[np.concatenate(elements)]
    assert np.array_equal(counts_B, np.bincount((deltas.view(np.uint32) & 0x7FFFFFFF) >> 16, minlength=COARSE_BINS))


def test_magnitude_cuts__of_an_expert_that_is_not_read_need_no_look() -> None:
    deltas = (np.random.default_rng(0).standard_normal(400_000) * 1e-3).astype(np.float32)
    family = Family(F32, (F32, F32), np.zeros(len(deltas), np.float32), (deltas, deltas))
    block = StoredTensor(family, F32).block(Span(0, len(deltas)))
    present = block._replace(present_E=block.present_E[:1], offsets_E=block.offsets_E[:1], codes_E=block.codes_E[:1])
    selection = MagnitudeCuts((len(deltas), 1_000), len(deltas))
    selection.accumulate([present])
    assert selection.finish()
    cuts_E3 = selection.result().cuts_E3
    assert cuts_E3 is not None
    assert cuts_E3[:, 0].tolist() == [0, 0]


@given(st.lists(st.integers(0, 767), max_size=40), st.integers(0, 5))
def test_find_rank__is_that_of_a_sort_whatever_bin_0_has(places: list[int], n_zero: int) -> None:
    counts_B = np.bincount(np.array(places, np.int64), minlength=768)
    counts_B[0] = n_zero
    for rank, wanted in enumerate(sorted((*places, 0), reverse=True), 1):
        assert find_rank(counts_B, rank) == (wanted, sum(place > wanted for place in places))


@given(st.data())
def test_inner_product_sums__do_not_depend_on_segmentation(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4 * GRAIN_ELEMENTS + 5))
    dtypes = tuple(data.draw(st.lists(st.sampled_from(FLOATS), min_size=1, max_size=3)))
    family = make_family(np.random.default_rng(data.draw(st.integers(0, 999))), n, F32, dtypes, 0.0)
    tensor = StoredTensor(family, F32)
    cuts = [GRAIN_ELEMENTS * i for i in data.draw(st.lists(st.integers(1, 4), max_size=4))]
    whole = run_reduction(inner_products(n, len(dtypes)), [tensor.block(Span(0, n))]).products_E3
    parts = [tensor.block(span) for span in reversed(tensor.spans(cuts))]
    in_parts = run_reduction(inner_products(n, len(dtypes)), parts).products_E3
    assert whole is not None
    assert in_parts is not None
    np.testing.assert_array_equal(whole, in_parts)
    base_N = family.base_N.astype(np.float64)
    deltas_EN = (family.experts_EN - family.base_N).astype(np.float64)
    wanted = np.stack([[base_N @ base_N, d @ d, base_N @ d] for d in deltas_EN])
    np.testing.assert_allclose(whole, wanted, rtol=1e-9, atol=1e-12)


@given(st.data())
def test_tensor_summary__answers_as_the_reduction_it_stands_in_for(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5 * GRAIN_ELEMENTS))
    dtypes = tuple(data.draw(st.lists(st.sampled_from(FLOATS), min_size=1, max_size=3)))
    family = make_family(np.random.default_rng(data.draw(st.integers(0, 999))), n, F32, dtypes, 0.0)
    tensor = StoredTensor(family, F32)
    grid = BlockGrid(n, 2 * GRAIN_ELEMENTS)
    blocks = [tensor.block(span) for span in reversed(list(grid.spans()))]
    density = data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    kept_E = (rank_of_density(density, n),) * len(dtypes)
    summary = TensorSummary(grid, len(dtypes), (density,))
    run_reduction(summary, blocks)
    statistics = [summary.statistics(e) for e in range(len(dtypes))]
    cuts_E3 = np.array([one.cut(kept_E[0]) for one in statistics], np.uint32)
    assert_cuts(family, kept_E, cuts_E3)
    assert_cuts(family, kept_E, run_reduction(MagnitudeCuts(kept_E, n), blocks).cuts_E3)
    sums = run_reduction(inner_products(n, len(dtypes)), blocks).products_E3
    assert sums is not None
    np.testing.assert_array_equal(np.stack([one.products_3 for one in statistics]), sums)


def stored_block(raw: NDArray[np.uint8], start: int, stop: int) -> RawBlock:
    """Elements of a float32 base alone."""
    none = np.zeros(0, np.int64)
    return RawBlock(
        raw, 4 * start, 1, none, none, none, none, start, stop - start, raw, 0, 1, np.uint64(0), np.empty((0, 2)), 0
    )


class StoredScore:
    """A score that is the stored value of the base."""

    def __call__(self, block: RawBlock, scores_N: NDArray[np.float32]) -> None:
        scores_N[:] = block.raw[block.base_offset : block.base_offset + scores_N.nbytes].view(np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(("first_scale", "most_looks"), [(1.0, 1), (1e-6, 3), (1e6, 3), (0.0, 3)])
@pytest.mark.parametrize("share", [None, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["all different", "few", "mostly zero"])
def test_score_ranks__equal_a_sort_whether_or_not_the_first_block_misleads(
    monkeypatch: pytest.MonkeyPatch, first_scale: float, most_looks: int, share: float | None, kind: str
) -> None:
    monkeypatch.setattr(block_reductions, "BRACKET_ELEMENTS", 1)
    rng, n, first = np.random.default_rng(len(kind)), 60_000, 6_000
    scores_N = np.abs(rng.standard_normal(n)).astype(np.float32)
    if kind == "few":
        scores_N = np.rint(scores_N * 4)
    if kind == "mostly zero":
        scores_N *= rng.random(n) < 0.4
    scores_N[:first] *= np.float32(first_scale)
    scores_N[-3:] = np.inf, np.nan, np.nan
    raw = scores_N.view(np.uint8)
    spans = [(0, first), (first, 30_000), (30_000, n)]
    blocks = [stored_block(raw, a, b) for a, b in spans]
    ranks = (1, 15_000, n // 2, n // 2 + 5_000) if share is None else ()
    reduction, n_looks = ScoreRanks(StoredScore(), n, ranks, share), 1
    reduction.accumulate(blocks)
    while not reduction.finish():
        n_looks += 1
        reduction.refine(blocks)
    n_nonzero = int(np.count_nonzero(scores_N))
    result = reduction.result()
    assert result.score_cuts_R3 is not None
    kept = int(n_nonzero * (share or 0))
    wanted = np.sort(scores_N.view(np.uint32))[[n - rank for rank in ranks or (kept,)]]
    np.testing.assert_array_equal(result.score_cuts_R3[:, 0], wanted)
    if share is not None:
        assert int(result.sums[0][0, 0]) == n_nonzero
        first_N = np.sort(order_of_ranks(scores_N)[:kept])
        assert np.flatnonzero(reaching(scores_N, result.score_cuts_R3[0])).tolist() == first_N.tolist()
    assert n_looks <= most_looks + (share is not None and kind == "few")
    assert n_looks == most_looks or first_scale != 1e6 or kind != "all different"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2])
def test_fine_magnitudes__are_kept_sorted_unless_they_are_many(share: float) -> None:
    fine = FineMagnitudes(1000)
    magnitudes = np.arange(int(1000 * share), 0, -1, dtype=np.uint32)
    for part in np.array_split(magnitudes, 3):
        fine.add(part)
    taken = fine.take_sorted()
    assert (taken is None) == (share > 1 / FINE_SHARE)
    assert taken is None or np.array_equal(taken, magnitudes[::-1])


@given(data=st.data())
def test_rank_search__decides_by_fine_magnitudes_as_by_a_second_look(data: st.DataObject) -> None:
    bits = np.array(data.draw(st.lists(st.sampled_from([0, 1, 0x10000, 0x10001, 0x1FFFF, 0x20000]), min_size=1)))
    ranks = range(1, len(bits) + 1)
    search = RankSearch(ranks, len(bits), orders_ties=False)
    block = stored_block(bits.astype(np.uint32).view(np.uint8), 0, len(bits))
    search.count_coarse(next(scores_of(StoredScore(), [block])))
    assert search.decide(np.sort(bits[bits & 0xFFFF != 0].astype(np.uint32)))
    ordered = np.sort(bits)[::-1]
    places = search.places
    assert [places[r].bits for r in ranks] == [0 if r == len(bits) else ordered[r - 1] for r in ranks]
    for rank in ranks[:-1]:
        place = places[rank]
        assert (place.n_larger, place.n_equal) == ((bits > place.bits).sum(), (bits == place.bits).sum())
