"""Orders in which items are taken, and numbers of positions: uniform over seeds, the same whatever else is merged."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from mergepipe.operators.statistics import N_SKETCH
from mergepipe.planning.budget import PlanningChoices, Policy, ShareBudget
from mergepipe.planning.candidates import find_candidates
from mergepipe.planning.plan import ALL
from mergepipe.planning.planner import rank_blocks, sample_order
from mergepipe.planning.problem import Columns, PlanningProblem
from mergepipe.planning.selection import (
    Items,
    descending_order,
    layer_of,
    norm_order,
    position_numbers,
    random_order,
    tensor_cosines,
)
from support.planning_problems import BLOCK, Arrays, make, random_arrays

SIZES = {f"model.layers.{layer}.{kind}.weight": 2 * BLOCK for layer in range(3) for kind in ("attn", "mlp")}


def items_of(costs: list[int], scores: list[int], n_experts: int = 1) -> Items:
    n_columns = len(costs) // n_experts
    return Items(
        flat_I=np.arange(len(costs)),
        cost_I=np.array(costs, np.int64),
        rate_I=np.array(scores, np.float64) / np.array(costs),
        tensor_I=np.arange(len(costs)) % n_columns,
        level_I=np.full(len(costs), ALL, np.int8),
        n_single=len(costs),
        n_columns=n_columns,
    )


def prefix_score(costs: list[int], scores: list[int], budget: int) -> int:
    spent = score = 0
    for i in norm_order(items_of(costs, scores), np.zeros(len(costs), np.bool_)).tolist():
        spent += costs[i]
        if spent > budget:
            break
        score += scores[i]
    return score


def best_score(costs: list[int], scores: list[int], budget: int) -> int:
    """The exact knapsack, by trying every subset."""
    return max(
        sum(scores[i] for i in chosen)
        for size in range(len(costs) + 1)
        for chosen in itertools.combinations(range(len(costs)), size)
        if sum(costs[i] for i in chosen) <= budget
    )


SCORES = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(scores=SCORES, cost=st.integers(1, 9), budget=st.integers(0, 90))
def test_by_norm__is_the_exact_knapsack_where_costs_are_equal(scores: list[int], cost: int, budget: int) -> None:
    costs = [cost] * len(scores)
    assert prefix_score(costs, scores, budget) == best_score(costs, scores, budget)


@given(
    pairs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=9), budget=st.integers(0, 60)
)
def test_by_norm__misses_the_exact_knapsack_by_less_than_one_item(pairs: list[tuple[int, int]], budget: int) -> None:
    costs, scores = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found, best = prefix_score(costs, scores, budget), best_score(costs, scores, budget)
    assert found <= best <= found + max(scores)


@given(hnp.arrays(np.float64, st.integers(0, 60), elements=st.sampled_from([0.0, -1.0, 1.0, 2.5, 1e-300, 1e300])))
def test_descending__equals_a_stable_sort(rates: NDArray[np.float64]) -> None:
    assert descending_order(rates).tolist() == np.argsort(-rates, kind="stable").tolist()


def test_at_random__is_a_permutation_that_the_seed_decides() -> None:
    items = items_of([1] * 1000, [1] * 1000)
    first, second = random_order(items, 1), random_order(items, 2)
    assert sorted(first.tolist()) == list(range(1000))
    assert first.tolist() == random_order(items, 1).tolist()
    assert first.tolist() != second.tolist()
    assert first[:6].tolist() == FIRST_DRAWN_WITH_SEED_1


FIRST_DRAWN_WITH_SEED_1 = [852, 830, 377, 650, 825, 933]


def test_at_random__takes_every_item_equally_often() -> None:
    items = items_of([1] * 40, [1] * 40)
    counts = Counter(i for seed in range(2000) for i in random_order(items, seed)[:10].tolist())
    assert len(counts) == 40
    assert all(abs(count - 500) < 5 * 500**0.5 for count in counts.values())


def test_layers__are_the_first_number_of_a_name() -> None:
    assert layer_of("model.layers.12.self_attn.q_proj.weight") == "12"
    assert (layer_of("model.embed_tokens.weight"), layer_of("h2o.weight"), layer_of("3.bias")) == ("", "", "3")


def one_tensor(base: NDArray[np.float32], deltas: list[NDArray[np.float64]]) -> tuple[Arrays, tuple[Arrays, ...]]:
    return {"w": base}, tuple({"w": (base + delta).astype(np.float32)} for delta in deltas)


def blocks_read(problem: PlanningProblem, n_blocks: int, policy: Policy) -> list[set[int]]:
    """Blocks that come first of each expert in `n_blocks` blocks: four pages each, and one more as they lie."""
    ranking = rank_blocks(problem, ShareBudget(Fraction(1)), policy, PlanningChoices())
    return [set(np.flatnonzero(read_B).tolist()) for read_B in ranking.select(n_blocks * 5 * 4096).read_EB]


def read_of(problem: PlanningProblem, n_blocks: int, policy: Policy) -> list[int]:
    return [len(blocks) for blocks in blocks_read(problem, n_blocks, policy)]


def test_conflict__reads_what_two_experts_say_once_and_for_both() -> None:
    rng = np.random.default_rng(1)
    common, own = rng.standard_normal((2, 20 * BLOCK))
    noise = 1e-3 * rng.standard_normal(20 * BLOCK)
    arrays = one_tensor(np.zeros(20 * BLOCK, np.float32), [0.8 * common, 0.8 * common + noise, own])
    problem = make(arrays=arrays).problem
    assert read_of(problem, 20, Policy.NORM) == [0, 0, 20]
    first, second, third = blocks_read(problem, 20, Policy.CONFLICT)
    assert (first | second, first & second, third) == (set(range(20)), set(), set())
    first, second, third = blocks_read(problem, 40, Policy.CONFLICT)
    assert (first | second, first & second, third) == (set(range(20)), set(), set(range(20)))


def test_conflict__leaves_out_two_experts_that_cancel() -> None:
    rng = np.random.default_rng(1)
    common, own = rng.standard_normal((2, 20 * BLOCK))
    noise = 1e-3 * rng.standard_normal(20 * BLOCK)
    arrays = one_tensor(np.zeros(20 * BLOCK, np.float32), [common, noise - common, 0.5 * own])
    problem = make(arrays=arrays).problem
    assert read_of(problem, 20, Policy.NORM)[2] == 0
    assert read_of(problem, 20, Policy.CONFLICT) == [0, 0, 20]


def test_conflict__is_norm_where_experts_say_unrelated_things() -> None:
    problem = make(arrays=random_arrays(3, 1, {"w": 20 * BLOCK})).problem
    assert read_of(problem, 25, Policy.CONFLICT) == pytest.approx(read_of(problem, 25, Policy.NORM), abs=2)


def test_tensor_cosines__estimate_the_angles_between_deltas() -> None:
    rng = np.random.default_rng(1)
    common, own = rng.standard_normal((2, 64 * BLOCK))
    arrays = one_tensor(np.zeros(64 * BLOCK, np.float32), [common, 0.6 * common + 0.8 * own, -common])
    problem = make(arrays=arrays).problem
    candidates = find_candidates(problem, samples=False)
    columns, statistics = candidates.columns, candidates.statistics
    cosine_EE = tensor_cosines(columns, statistics)[0]
    noise = 2 / (64 * N_SKETCH) ** 0.5  # that cosines are shrunk by
    assert cosine_EE[0].tolist() == pytest.approx([1.0 - noise, 0.6 - noise, noise - 1.0], abs=0.1)
    unknown_EE = tensor_cosines(columns, {pair: known for pair, known in statistics.items() if pair != (1, 0)})[0]
    assert unknown_EE[1].tolist() == [0.0, 0.0, 0.0]
    assert unknown_EE[0, 2] == cosine_EE[0, 2]


def numbers(counts: list[int], seed: int, names: list[str] | None = None) -> NDArray[np.float64]:
    """The numbers of tensors with so many positions each."""
    first_T = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tensor_B = np.repeat(np.arange(len(counts)), counts)
    every = np.arange(len(tensor_B), dtype=np.int64)
    slots = np.zeros((1, len(counts)), np.int16)
    columns = Columns((), slots, first_T, tensor_B, every, np.ones_like(every), frozenset())
    return position_numbers(names or [f"tensor {t}" for t in range(len(counts))], columns, seed)


@given(count=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), digits=st.integers(0, 8))
def test_position_numbers__spread_every_share_evenly_along_a_tensor(count: int, seed: int, digits: int) -> None:
    number_B = numbers([count], seed)
    size = 2 ** min(digits, max(0, count - 1).bit_length())
    for start in range(0, count - size + 1, size):
        assert len(set((number_B[start : start + size] * size).astype(int).tolist())) == size
    assert ((number_B >= 0) & (number_B < 1)).all()


def test_position_numbers__are_uniform_over_seeds() -> None:
    number_SB = np.stack([numbers([5, 1, 16], seed) for seed in range(2000)])
    for b in range(number_SB.shape[1]):
        counts, _ = np.histogram(number_SB[:, b], 10, (0, 1))
        assert abs(counts - 200).max() < 5 * np.sqrt(2000 * 0.1 * 0.9)
    together = np.asarray(np.corrcoef(number_SB.T))
    assert abs(together[0, 5:]).max() < 0.12  # of different tensors: independent


def test_position_numbers__do_not_depend_on_other_tensors() -> None:
    alone = numbers([37], 3, ["b"])
    assert (numbers([11, 37, 900], 3, ["a", "b", "c"])[11:48] == alone).all()
    assert not (numbers([37], 4, ["b"]) == alone).any()


@pytest.mark.thorough
@pytest.mark.parametrize("importance", [(1.0, 1.0, 1.0), (1.5, 1.0, 1.2)], ids=["alike", "by importance"])
def test_sample__is_right_in_the_mean(importance: tuple[float, ...]) -> None:
    """Over seeds each position counts once: what is drawn of it, divided by its probability."""
    sizes = {"layers.0.w": 40 * BLOCK, "layers.1.w": 23 * BLOCK + 5, "layers.2.w": 7 * BLOCK}
    given = make("task_arithmetic", 2, sizes=sizes)
    totals = {name: n * each for (name, n), each in zip(sizes.items(), importance, strict=True)}
    problem = replace(given.problem, importance=totals)
    candidates = find_candidates(problem, samples=True)
    budget_bytes = int(candidates.full_E.sum()) // 4
    tensor_B, n_seeds = candidates.columns.tensor_B, 1500
    counted_B, squares_B = np.zeros(len(tensor_B)), np.zeros(len(tensor_B))
    for seed in range(n_seeds):
        drawn = sample_order(problem, candidates, seed).select(budget_bytes)
        assert drawn.planned_bytes <= budget_bytes
        assert drawn.drawn_B is not None
        assert drawn.probability_T is not None
        counts_B = drawn.drawn_B / drawn.probability_T[tensor_B]
        counted_B += counts_B
        squares_B += counts_B**2
    mean_B = counted_B / n_seeds
    deviation_B = np.sqrt((squares_B / n_seeds - mean_B**2) / n_seeds)
    assert (abs(mean_B - 1) < 4.5 * deviation_B).all()
    assert abs(mean_B.mean() - 1) < 0.01
