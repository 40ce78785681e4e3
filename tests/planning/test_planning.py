"""A plan never costs more than its budget, spends all that fits, and nothing else decides."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe import Plan
from mergepipe.core.blocks import BlockGrid
from mergepipe.errors import LimitError
from mergepipe.operators.statistics import BLOCK_RECORD, N_OCTAVES, N_SKETCH, NOTHING_KEPT, Cut
from mergepipe.planning.budget import BudgetRequest, ByteBudget, OnOmit, PlanningChoices, Policy, ShareBudget
from mergepipe.planning.candidates import REASON_MISSING, REASON_NO_CUT, REASON_OTHER_SIZE
from mergepipe.planning.plan import NOTHING_READ, PlannedTensor, parse_plan
from mergepipe.planning.planner import Ranking, rank_blocks
from mergepipe.planning.problem import PlanningProblem, sample_cost_bytes
from mergepipe.planning.selection import ItemOrder
from support.oracle import order_of_ranks, reaching
from support.planning_problems import BLOCK, DEFAULT_SIZES, Given, make, random_arrays
from support.refusals import refuses

OPERATORS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp")
ALL = ShareBudget(Fraction(1))
Read = set[tuple[int, str, int]]


def plan_of(
    problem: PlanningProblem,
    request: BudgetRequest = ALL,
    policy: Policy = Policy.NORM,
    options: PlanningChoices = PlanningChoices(),  # noqa: B008 - frozen
) -> Plan:
    ranking = rank_blocks(problem, request, policy, options)
    return ranking.plan(ranking.budget_bytes)


def read_blocks(plan: Plan) -> Read:
    """(expert, tensor, block) of all that is read."""
    return {
        (e, tensor.name, block)
        for tensor in plan.tensors
        for e, access in enumerate(tensor.access)
        for start, stop in access.blocks
        for block in range(start, stop)
    }


def item_order(ranking: Ranking) -> ItemOrder:
    assert isinstance(ranking.order, ItemOrder)
    return ranking.order


def cost_of(problem: PlanningProblem, read: Read) -> int:
    tasks = {task.name: task for task in problem.tasks}
    return sum(
        tasks[name].experts[e].cost_bytes(BlockGrid(tasks[name].base.n_elements, problem.block_elements).span(block))
        for e, name, block in read
    )


def everything(problem: PlanningProblem) -> Read:
    return {
        (e, task.name, block)
        for task in problem.tasks
        for e in range(len(problem.experts))
        for block in range(BlockGrid(task.base.n_elements, problem.block_elements).n_blocks)
    }


def made(operator: str, seed: int, missing: tuple[tuple[int, str], ...] = ()) -> Given:
    n_experts = 1 if operator == "slerp" else 3
    return make(operator, n_experts, seed).without_statistics([each for each in missing if each[0] < n_experts])


SPREAD_SIZES = {f"layers.{layer}.w": 4 * BLOCK for layer in range(16)}
MISSING = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(DEFAULT_SIZES))), max_size=6).map(tuple)
LARGEST = 3 * 2**18
ORDERS = [policy for policy in Policy if policy is not Policy.SAMPLE]  # that draws positions, and orders no items


@given(
    operator=st.sampled_from(OPERATORS),
    policy=st.sampled_from(Policy),
    seed=st.integers(0, 3),
    missing=MISSING,
    budget=st.integers(0, LARGEST),
)
def test_plan__costs_what_its_blocks_cost_and_at_most_the_budget(
    operator: str, policy: Policy, seed: int, missing: tuple[tuple[int, str], ...], budget: int
) -> None:
    problem = made(operator, seed, missing).with_content_ids().problem
    plan = plan_of(problem, ByteBudget(budget), policy)
    assert plan.planned_bytes == cost_of(problem, read_blocks(plan)) <= budget
    assert sum(model.planned_bytes for model in plan.models if model.role == "expert") == plan.planned_bytes


@given(
    operator=st.sampled_from(OPERATORS),
    policy=st.sampled_from(ORDERS),
    missing=MISSING,
    budgets=st.tuples(st.integers(0, LARGEST), st.integers(0, LARGEST)).map(sorted),
)
def test_plan__with_a_larger_budget_keeps_the_prefix_of_its_order(
    operator: str, policy: Policy, missing: tuple[tuple[int, str], ...], budgets: list[int]
) -> None:
    ranking = rank_blocks(made(operator, 1, missing).problem, ALL, policy, PlanningChoices())
    less, more = (ranking.select(each) for each in budgets)
    assert less.n_prefix <= more.n_prefix
    order = item_order(ranking)
    prefix, items = order.order_I[: less.n_prefix], order.items
    columns, n_single = ranking.candidates.columns, items.n_single
    singles, wholes = prefix[prefix < n_single], prefix[prefix >= n_single]
    assert more.read_EB.ravel()[items.flat_I[singles]].all()
    for item in wholes.tolist():
        assert more.read_EB[items.expert_I[item], columns.of_tensor(int(items.tensor_I[item]))].all()


@given(
    operator=st.sampled_from(OPERATORS), policy=st.sampled_from(ORDERS), missing=MISSING, budget=st.integers(0, LARGEST)
)
def test_plan__leaves_out_nothing_that_would_fit(
    operator: str, policy: Policy, missing: tuple[tuple[int, str], ...], budget: int
) -> None:
    ranking = rank_blocks(made(operator, 1, missing).with_content_ids().problem, ALL, policy, PlanningChoices())
    selection, items = ranking.select(budget), item_order(ranking).items
    left_out_I = ~selection.read_EB.ravel()[items.flat_I]
    assert not (items.cost_I[left_out_I] <= budget - selection.planned_bytes).any()


@pytest.mark.thorough
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(
    "missing", [(), ((0, "embed.weight"),), tuple((e, n) for e in range(3) for n in DEFAULT_SIZES)]
)
def test_plan__with_the_full_cost_reads_everything(
    operator: str, policy: Policy, missing: tuple[tuple[int, str], ...]
) -> None:
    problem = made(operator, 2, missing).problem
    plan = plan_of(problem, ALL, policy)
    assert read_blocks(plan) == everything(problem)
    assert plan.planned_bytes == plan.full_cost_bytes == plan.budget_bytes
    assert read_blocks(plan_of(problem, ByteBudget(plan.full_cost_bytes), policy)) == everything(problem)
    assert read_blocks(plan_of(problem, ByteBudget(plan.full_cost_bytes - 1), policy)) < everything(problem)


def test_usefulness__a_budget_that_reads_nothing_is_refused_and_the_smallest_useful_one_named() -> None:
    ranking = rank_blocks(make().problem, ByteBudget(4095), Policy.NORM, PlanningChoices())
    with refuses(LimitError, "budget.too-small") as caught:
        ranking.check_usefulness(ranking.plan(4095))
    least = ranking.least_useful_bytes()
    assert least is not None
    assert f"{least}B" in str(caught.value)
    ranking.check_usefulness(ranking.plan(least))
    assert read_blocks(ranking.plan(least)) != set()
    assert read_blocks(ranking.plan(least - 1)) == set()


def test_plan__names_every_expert_of_which_nothing_is_read() -> None:
    problem = make(weights=(1.0, 1e-6, 1.0)).problem
    plan = plan_of(problem, ShareBudget(Fraction(1, 2)))
    assert {e for e, _, _ in read_blocks(plan)} == {0, 2}
    starved = [each for each in plan.fallbacks if each.decision == NOTHING_READ]
    assert [each.where for each in starved] == ["expert './expert-1'"]
    assert "come first" in starved[0].reason
    assert [each for each in plan_of(problem).fallbacks if each.decision == NOTHING_READ] == []
    assert plan_of(problem, ByteBudget(0)).fallbacks == ()


def test_plan__spends_what_a_tensor_that_does_not_fit_leaves() -> None:
    problem = make("ties", n_experts=1).without_statistics([(0, "embed.weight")]).problem
    cost = cost_of(problem, {(0, "layers.0.attn.weight", 0)})
    ranking = rank_blocks(problem, ALL, Policy.NORM, PlanningChoices())
    order = item_order(ranking)
    order_I = np.argsort(-order.items.cost_I, kind="stable")  # the whole tensor first
    selection = replace(order, order_I=order_I).select(2 * cost)
    assert selection.n_prefix == 0
    assert selection.planned_bytes > cost


@settings(max_examples=20)
@given(policy=st.sampled_from(Policy), operator=st.sampled_from(OPERATORS), shuffle=st.randoms(use_true_random=False))
def test_plan__does_not_depend_on_the_order_of_mappings(policy: Policy, operator: str, shuffle: Random) -> None:
    problem = made(operator, 3).problem
    shuffled = []
    for known in problem.statistics:
        names = list(known)
        shuffle.shuffle(names)
        shuffled.append({name: known[name] for name in names})
    request = ShareBudget(Fraction(1, 3))
    one = plan_of(problem, request, policy)
    other = plan_of(replace(problem, statistics=tuple(shuffled)), request, policy)
    assert one == other
    assert one.digest == other.digest


@pytest.mark.parametrize("operator", ["dare_linear", "dare_ties"])
def test_plan__charges_the_samples_of_content_ids_that_are_not_known(operator: str) -> None:
    given = make(operator)
    samples = sum(sample_cost_bytes(model.checkpoint) for model in given.problem.experts)
    assert samples > 0
    plan = plan_of(given.problem)
    known = plan_of(given.with_content_ids().problem)
    assert plan.planned_bytes == plan.full_cost_bytes == known.planned_bytes + samples
    assert plan_of(make("ties").problem).planned_bytes == known.planned_bytes


@given(budget=st.integers(0, LARGEST), policy=st.sampled_from(Policy))
def test_plan__that_reads_anything_charges_the_samples_of_all_experts(budget: int, policy: Policy) -> None:
    problem = make("dare_linear").problem
    plan = plan_of(problem, ByteBudget(budget), policy)
    samples = sum(sample_cost_bytes(model.checkpoint) for model in problem.experts) if read_blocks(plan) else 0
    assert plan.planned_bytes == cost_of(problem, read_blocks(plan)) + samples <= budget


def test_plan__takes_thresholds_and_products_from_the_statistics() -> None:
    given = make("ties")
    for tensor in plan_of(given.problem, ByteBudget(0)).tensors[:2]:
        for e, cut in enumerate(tensor.cuts):
            delta_N = given.experts[e][tensor.name] - given.base[tensor.name]
            first = np.sort(order_of_ranks(delta_N)[: int(0.2 * tensor.n_elements)])
            assert cut is not None
            assert np.flatnonzero(reaching(delta_N, cut)).tolist() == first.tolist()
    slerp = make("slerp", 1)
    tensor = plan_of(slerp.problem, ByteBudget(0)).tensors[0]
    assert tensor.products == (tuple(slerp.problem.statistics[0][tensor.name].products_3.tolist()),)


def test_plan__knows_cuts_that_need_no_statistics() -> None:
    given = make("ties", 1, parameters={"weight": 1.0, "density": 0.01}, sizes={"small": 7})
    assert plan_of(given.problem).tensors[0].cuts == (NOTHING_KEPT,)
    whole = make("ties", 1, parameters={"weight": 1.0, "density": 1.0}).without_statistics([(0, "embed.weight")])
    assert plan_of(whole.problem).tensors[0].cuts == ()


@given(budget=st.integers(0, LARGEST))
def test_plan__reads_a_tensor_whole_where_its_cut_is_not_known(budget: int) -> None:
    problem = make("ties", parameters={"weight": 1.0, "density": 0.123}).problem
    plan = plan_of(problem, ByteBudget(budget))
    for tensor in plan.tensors:
        n_blocks = BlockGrid(tensor.n_elements, BLOCK).n_blocks
        for access, cut in zip(tensor.access, tensor.cuts_E, strict=True):
            if cut is None:
                assert access.blocks in ((), ((0, n_blocks),))
    assert {each.reason for each in plan.fallbacks if "read whole" in each.decision} <= {REASON_NO_CUT}


@pytest.mark.parametrize(
    ("operator", "decision"),
    [
        ("ties", "2 of 5 tensors are read whole or not at all, from 'embed.weight' on"),
        ("task_arithmetic", "the blocks of 2 of 5 tensors are spread over the model, whatever is in them"),
    ],
)
def test_plan__records_missing_statistics_once_per_expert(operator: str, decision: str) -> None:
    given = make(operator).without_statistics([(1, "embed.weight"), (1, "layers.0.attn.weight")])
    plan = plan_of(given.problem)
    notices = [(each.where, each.decision, each.reason) for each in plan.fallbacks if each.reason == REASON_MISSING]
    assert notices == [("expert './expert-1'", decision, REASON_MISSING)]


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "slerp"])
@pytest.mark.parametrize("factor", [Fraction(1, 2), Fraction(2), Fraction(3, 4)])
def test_plan__carries_statistics_over_to_blocks_of_another_size(operator: str, factor: Fraction) -> None:
    problem = replace(made(operator, 1).problem, block_elements=int(BLOCK * factor))
    plan = plan_of(problem, ShareBudget(Fraction(1, 2)))
    assert not [each for each in plan.fallbacks if "read whole" in each.decision]
    spread = [each for each in plan.fallbacks if "of larger blocks" in each.decision]
    assert len(spread) == (0 if factor == 2 else len(problem.experts))
    assert all(f"--block-elements {problem.block_elements}`" in each.reason for each in spread)


def test_plan__does_not_use_statistics_of_a_tensor_of_another_size() -> None:
    problem = make("ties", 1).problem
    of_other = dict.fromkeys(DEFAULT_SIZES, problem.statistics[0]["layers.0.attn.weight"])
    plan = plan_of(replace(problem, statistics=(of_other,)))
    assert REASON_OTHER_SIZE in {each.reason for each in plan.fallbacks}


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic", "dare_ties", "ties"])
def test_plan__of_what_is_not_known_spreads_over_experts_and_tensors(operator: str) -> None:
    missing = [(e, name) for e in range(3) for name in SPREAD_SIZES]
    weights = (0.1, 0.7, 0.2)
    problem = make(operator, sizes=SPREAD_SIZES, weights=weights).without_statistics(missing).problem
    plan = plan_of(problem, ShareBudget(Fraction(1, 4)))
    read = read_blocks(plan)
    per_expert = [sum(expert == e for expert, _, _ in read) for e in range(3)]
    assert min(per_expert) > 0
    tolerance = 4 if operator == "ties" else 1  # whole tensors, of four blocks
    assert max(per_expert) - min(per_expert) <= tolerance
    assert plan.planned_bytes > 0.9 * plan.budget_bytes
    layers = {name.split(".")[1] for _, name, _ in read}
    assert len(layers) >= 4
    if operator != "ties":
        assert any(0 < sum(tensor == name for _, tensor, _ in read) < 12 for name in SPREAD_SIZES)


@pytest.mark.parametrize("operator", ["linear", "passthrough"])
def test_plan__of_no_expert_is_empty(operator: str) -> None:
    problem = make("linear", 1).problem
    alone = [
        replace(task, experts=(), expert_models=(), parameters=replace(task.parameters, experts=()))
        for task in problem.tasks
    ]
    resolution = replace(problem.resolution, tasks=tuple(alone))
    plan = plan_of(replace(problem, operator=operator, resolution=resolution, statistics=()))
    assert plan.planned_bytes == plan.full_cost_bytes == 0
    assert [tensor.access for tensor in plan.tensors] == [()] * 5


def test_plan__says_that_there_was_nothing_to_adjust() -> None:
    options = PlanningChoices(min_density=0.1)
    plan = plan_of(make().problem, ShareBudget(Fraction(1, 4)), options=options)
    assert [each.decision for each in plan.adjustments] == ["nothing adjusted"]


def with_plain_statistics(operator: str) -> PlanningProblem:
    """A problem whose statistics are small integers and eighths: no sum of theirs depends on the machine."""
    problem = make(operator, arrays=PLAIN_ARRAYS).problem
    known = []
    for e, of_expert in enumerate(problem.statistics):
        tensors = {}
        for name, each in of_expert.items():
            blocks = np.zeros(each.grid.n_blocks, BLOCK_RECORD)
            i = np.arange(each.grid.n_blocks)
            blocks["hash"] = (i[:, None] * 7 + e) % 251
            blocks["norm"] = ((i * 37 + e * 5) % 11 + 1) / 8
            blocks["largest"] = blocks["norm"] / 4
            blocks["changed"] = (i + e) % 5
            blocks["octaves"] = 240 - 4 * np.arange(N_OCTAVES)
            blocks["sketch"] = (((i[:, None] + e) * np.arange(1, N_SKETCH + 1)) % 7 - 3) / 8
            cuts = np.array([Cut(0x3E000000)] * len(each.densities_D), np.uint32)  # 0.125
            tensors[name] = replace(each, blocks_B=blocks, cuts_D3=cuts, products_3=np.array([4.0, 1.0, 0.5]))
        known.append(tensors)
    return replace(problem, statistics=tuple(known))


PLAIN_ARRAYS = random_arrays(3, 0, {"h.0.w": 9 * BLOCK, "h.1.w": 4 * BLOCK + 1, "h.1.b": 3})


@pytest.mark.parametrize(
    ("operator", "policy", "digest"),
    [
        ("task_arithmetic", Policy.NORM, "c1ba7907b9292ee9ccfb09d23dd5cf10"),
        ("task_arithmetic", Policy.CONFLICT, "918f84710dc5299a7fd1334667a07c3d"),
        ("linear", Policy.RANDOM, "551d2482e08b1b37872dcb33eda14341"),
        ("ties", Policy.NORM, "b7a7f5aced706ea5f5cf0e983a70f7cc"),
        ("ties", Policy.CONFLICT, "2c2cec94f8d69fe2daf3f058b72ed86c"),
        ("dare_ties", Policy.NORM, "d80e07d6c1322b39a1482bb0d30c4766"),
    ],
)
def test_plan__is_the_same_on_every_machine(operator: str, policy: Policy, digest: str) -> None:
    assert plan_of(with_plain_statistics(operator), ShareBudget(Fraction(2, 5)), policy).digest == digest


def test_problem__refuses_statistics_for_other_experts() -> None:
    problem = make().problem
    with pytest.raises(ValueError, match="2 experts for 3"):
        replace(problem, statistics=problem.statistics[:2])


# --- the bound on what omission costs ---


def planned_coefficients(given: Given, plan: Plan, tensor: PlannedTensor) -> tuple[np.ndarray, np.ndarray]:
    """The coefficients (E, N) of the full merge and of the plan's, in float64."""
    parameters = plan.parameters[tensor.parameters]
    grid = BlockGrid(tensor.n_elements, plan.block_elements)
    present_EB = np.zeros((len(given.experts), grid.n_blocks), np.bool_)
    for e, access in enumerate(tensor.access):
        for start, stop in access.runs:
            present_EB[e, start:stop] = True
    present_EN = np.repeat(present_EB, [span.n_elements for span in grid.spans()], axis=1)
    weights_E1 = np.array([float(expert["weight"]) for expert in parameters.experts])[:, None]
    if plan.operator == "task_arithmetic":
        full_E1 = weights_E1 * float(parameters.globals["lambda"])
        return np.broadcast_to(full_E1, present_EN.shape), np.where(present_EN, full_E1, 0.0)
    anchor = float(parameters.anchor["weight"])
    full_E1 = weights_E1 / ((anchor + weights_E1.sum()) or 1.0)
    planned_EN = np.where(present_EN, full_E1, 0.0)
    if plan.on_omit == OnOmit.RENORMALIZE:
        kept_EN = np.where(present_EN, weights_E1, 0.0)
        sum_N = anchor + kept_EN.sum(axis=0)
        planned_EN = kept_EN / np.where(sum_N == 0, 1.0, sum_N)
    return np.broadcast_to(full_E1, present_EN.shape), planned_EN


def measured_distances(given: Given, plan: Plan) -> tuple[float, float]:
    """||M_full - M_A|| and ||M_full - M_0||, of the deltas in float64."""
    squares = np.zeros(2)
    for tensor in plan.tensors:
        deltas_EN = np.stack([expert[tensor.name] for expert in given.experts]).astype(np.float64)
        deltas_EN -= given.base[tensor.name]
        full_EN, planned_EN = planned_coefficients(given, plan, tensor)
        error_N = ((full_EN - planned_EN) * deltas_EN).sum(axis=0)
        changed_N = (full_EN * deltas_EN).sum(axis=0)
        squares += [error_N @ error_N, changed_N @ changed_N]
    error, changed = np.sqrt(squares).tolist()
    return error, changed


WEIGHTS = st.tuples(*[st.sampled_from([0.0, 0.2, 0.5, 1.0, -0.3, 2.0])] * 3)


@given(
    operator=st.sampled_from(["linear", "task_arithmetic"]),
    on_omit=st.sampled_from(OnOmit),
    policy=st.sampled_from(ORDERS),
    weights=WEIGHTS,
    seed=st.integers(0, 4),
    budget=st.integers(0, LARGEST),
)
def test_bound__is_never_below_the_distance(
    operator: str, on_omit: OnOmit, policy: Policy, weights: tuple[float, ...], seed: int, budget: int
) -> None:
    given = make(operator, 3, seed, weights=weights, parameters={})
    options = PlanningChoices(OnOmit.KEEP if operator == "task_arithmetic" else on_omit)
    plan = plan_of(given.problem, ByteBudget(budget), policy, options)
    assert plan.bound is not None
    error, changed = measured_distances(given, plan)
    assert error <= plan.bound.distance
    assert changed <= plan.bound.nothing_read
    assert plan.bound.drifts == (options.on_omit is OnOmit.RENORMALIZE)
    assert plan.bound.drifts or plan.bound.distance <= plan.bound.nothing_read
    assert parse_plan(plan.to_json()) == plan


def test_bound__is_tight_for_one_expert_and_zero_for_everything() -> None:
    given = make("task_arithmetic", 1)
    plan = plan_of(given.problem, ShareBudget(Fraction(1, 2)))
    error, changed = measured_distances(given, plan)
    assert plan.bound is not None
    assert plan.bound.distance == pytest.approx(error, rel=1e-5)
    assert plan.bound.nothing_read == pytest.approx(changed, rel=1e-5)
    everything_read = plan_of(given.problem, ALL).bound
    assert everything_read is not None
    assert everything_read.distance == 0.0


def test_bound__is_worse_than_the_base_where_renormalised_weights_of_few_experts_drift_far() -> None:
    base, experts = random_arrays(3, 3, {"layers.0.w": BLOCK})  # of which the largest alone is read
    given = make("linear", arrays=(base, experts), weights=(1.0, 1.0, 1.0), parameters={})
    for on_omit, is_worse in ((OnOmit.KEEP, False), (OnOmit.RENORMALIZE, True)):
        plan = plan_of(given.problem, ShareBudget(Fraction(1, 3)), options=PlanningChoices(on_omit))
        assert plan.bound is not None
        assert plan.bound.is_worse_than_the_base is is_worse
        assert ("worse than the base" in str(plan.bound)) is is_worse


@pytest.mark.parametrize("operator", ["ties", "dare_linear", "dare_ties", "slerp"])
def test_bound__is_claimed_for_fixed_coefficients_only(operator: str) -> None:
    assert plan_of(made(operator, 0).problem, ShareBudget(Fraction(1, 2))).bound is None


def test_bound__is_not_given_for_samples_nor_where_norms_are_not_known() -> None:
    given = make("task_arithmetic", 2)
    half = ShareBudget(Fraction(1, 2))
    assert plan_of(given.problem, half, Policy.SAMPLE).bound is None
    assert plan_of(given.without_statistics([(0, "embed.weight")]).problem, half).bound is None
    for norm in (np.inf, np.nan):
        given.problem.statistics[0]["embed.weight"].blocks_B["norm"][0] = norm
        assert plan_of(given.problem, half).bound is None


def test_bound__of_larger_blocks_than_those_of_the_statistics_holds_and_of_smaller_ones_is_not_claimed() -> None:
    given = make("task_arithmetic", 2, sizes={"layers.0.w": 8 * BLOCK})
    half = ShareBudget(Fraction(1, 2))
    larger = plan_of(replace(given.problem, block_elements=2 * BLOCK), half)
    assert larger.bound is not None
    assert measured_distances(given, larger)[0] <= larger.bound.distance
    assert plan_of(replace(given.problem, block_elements=BLOCK // 2), half).bound is None


# --- the papers' own order ---


def test_paper__reads_by_the_norm_where_norm_reads_by_its_square() -> None:
    """A block of norm 3 at two blocks' cost: 3 / 2 < 2 / 1 by the norm, 9 / 2 > 4 / 1 by its square."""
    names = {"layers.0.w": 2 * BLOCK, "layers.1.w": BLOCK}
    rng = np.random.default_rng(0)
    base = {name: np.zeros(n, np.float32) for name, n in names.items()}
    expert = {name: rng.standard_normal(n).astype(np.float32) for name, n in names.items()}
    for (name, values), norm in zip(expert.items(), (3.0, 2.0), strict=True):
        expert[name] = (values * (norm / np.linalg.norm(values))).astype(np.float32)
    given = make("task_arithmetic", arrays=(base, (expert,)))
    problem = replace(given.problem, block_elements=2 * BLOCK)
    budget = ByteBudget(cost_of(problem, {(0, "layers.0.w", 0)}))
    assert read_blocks(plan_of(problem, budget, Policy.NORM)) == {(0, "layers.0.w", 0)}
    assert read_blocks(plan_of(problem, budget, Policy.PAPER)) == {(0, "layers.1.w", 0)}


@pytest.mark.parametrize("operator", ["task_arithmetic", "linear", "ties", "dare_ties"])
def test_paper__orders_by_the_coefficient_times_the_norm_per_byte_whatever_is_kept(operator: str) -> None:
    weights = (1.0, -0.5, 0.25)
    parameters = {} if operator in ("linear", "task_arithmetic") else {"density": 0.5}
    given = make(operator, 3, 4, weights=weights, parameters=parameters)
    ranking = rank_blocks(given.problem, ALL, Policy.PAPER, PlanningChoices())
    order = item_order(ranking)
    columns, items = ranking.candidates.columns, order.items
    scores = []
    for item in order.order_I.tolist():
        e, t, column = int(items.expert_I[item]), int(items.tensor_I[item]), int(items.column_I[item])
        name, n = columns.tasks[t].name, int(columns.n_B[column])
        first = (column - int(columns.first_T[t])) * BLOCK
        delta = (given.experts[e][name] - given.base[name])[first : first + n].astype(np.float64)
        scores.append(abs(weights[e]) * np.linalg.norm(delta) / items.cost_I[item])
    assert len(scores) == len(everything(given.problem))
    assert all(first >= second * (1 - 1e-5) for first, second in pairwise(scores))
