"""Where requests have a price, short gaps are read: within the budget, and never less of them for a larger one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.planning.budget import PlanningChoices, Policy, ShareBudget
from mergepipe.planning.plan import Plan
from mergepipe.planning.planner import Ranking, plan_merge, rank_blocks
from mergepipe.planning.selection import Gaps
from mergepipe.storage.buffers import PAGE_BYTES
from support.planning_problems import BLOCK, make

SIZES = {"embed.weight": 40 * BLOCK + 5, "layers.0.attn.weight": 20 * BLOCK, "layers.0.norm.weight": 7}
BLOCK_BYTES = 4 * BLOCK


def ranked(seed: int, worth_bytes: int, n_experts: int = 2) -> Ranking:
    """A problem whose first expert's requests are worth some bytes, those of the others nothing."""
    problem = make("task_arithmetic", n_experts, seed, sizes=SIZES).problem
    priced = replace(problem, request_bytes=(worth_bytes,) + (0,) * (n_experts - 1))
    return rank_blocks(priced, ShareBudget(Fraction(1)), Policy.NORM, PlanningChoices())


def gaps_of(plan: Plan, expert: int) -> list[int]:
    """The blocks between what is read of an expert's tensors."""
    return [after[0] - before[1] for tensor in plan.tensors for before, after in pairwise(tensor.access[expert].blocks)]


@settings(max_examples=20)
@given(seed=st.integers(0, 3), worth=st.integers(1, 9), budget=st.integers(0, 150))
def test_plan__leaves_no_short_gap_in_its_prefix_and_keeps_the_budget(seed: int, worth: int, budget: int) -> None:
    ranking = ranked(seed, worth * (BLOCK_BYTES + 2 * PAGE_BYTES) + 1)
    budget_bytes = budget * BLOCK_BYTES
    selection = ranking.select(budget_bytes)
    assert selection.planned_bytes <= budget_bytes
    gaps = Gaps(ranking.data.candidates, ranking.items)
    closed_I = gaps.closed(ranking.order_I[: selection.n_prefix])
    is_read_I = selection.read_EB.ravel()[ranking.items.flat_I]
    assert is_read_I[closed_I].all()
    chosen = np.flatnonzero(closed_I[: ranking.items.n_single])
    flat_C, tensor_C = ranking.items.flat_I[chosen], ranking.items.tensor_I[chosen]
    for (first, tensor), (second, other) in pairwise(zip(flat_C.tolist(), tensor_C.tolist(), strict=True)):
        is_priced = second < ranking.items.n_columns and tensor == other
        assert not is_priced or second - first == 1 or second - first - 1 > worth


@settings(max_examples=20)
@given(seed=st.integers(0, 3), first=st.integers(0, 150), more=st.integers(0, 40))
def test_plan__of_a_larger_budget_holds_the_prefix_of_a_smaller_one(seed: int, first: int, more: int) -> None:
    ranking = ranked(seed, 4 * BLOCK_BYTES)
    gaps = Gaps(ranking.data.candidates, ranking.items)
    small, large = (ranking.select(budget * BLOCK_BYTES).n_prefix for budget in (first, first + more))
    assert small <= large
    assert not (gaps.closed(ranking.order_I[:small]) & ~gaps.closed(ranking.order_I[:large])).any()


def test_plan__reads_fewer_ranges_of_the_expert_whose_requests_cost() -> None:
    request = ShareBudget(Fraction(1, 4))
    problem = make("task_arithmetic", 2, 3, sizes=SIZES).problem
    free = plan_merge(problem, request, Policy.NORM, PlanningChoices())
    priced = plan_merge(
        replace(problem, request_bytes=(3 * BLOCK_BYTES + 1, 0)), request, Policy.NORM, PlanningChoices()
    )
    assert len(gaps_of(priced, 0)) < len(gaps_of(free, 0))
    assert priced.planned_bytes <= priced.budget_bytes == free.budget_bytes
    assert plan_merge(replace(problem, request_bytes=(0, 0)), request, Policy.NORM, PlanningChoices()) == free


def test_plan__of_everything_reads_everything_whatever_requests_cost() -> None:
    ranking = ranked(1, 10 * BLOCK_BYTES)
    assert ranking.select(ranking.full_cost_bytes).planned_bytes == ranking.full_cost_bytes
