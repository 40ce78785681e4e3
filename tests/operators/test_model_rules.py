"""Rules that look at whole tensors, against their textbook formulas; what all rules have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F32, GRAIN_ELEMENTS, DType
from mergepipe.errors import RecipeError, UnsupportedError
from mergepipe.operators.base import NOTHING_REDUCED, NUMBERS_OF, OperatorInput, Scalar
from mergepipe.operators.registry import operator_named, operator_specs
from mergepipe.operators.selective import magnitude_cuts
from mergepipe.operators.sparse import survival_of
from mergepipe.operators.spec import BaseRole, Scope
from mergepipe.testing import Family, StoredTensor
from support.merge_in_memory import apply_operator
from support.model_oracle import MERGES, ModelCase, fused_importance
from support.random_oracle import words_of_elements

KEYS = (3, 2**64 - 1, 17, 1 << 40, 12345)
EACH: tuple[dict[str, Scalar], ...] = (
    {"weight": 0.6, "density": 0.4, "gamma": 0.05, "epsilon": 0.1, "threshold": 0.4},
    {"weight": 0.3, "density": 0.7, "gamma": 0.01, "epsilon": 0.15, "threshold": 0.2},
    {"weight": 0.8, "density": 0.2, "gamma": 0.0, "epsilon": 0.05, "threshold": 0.9},
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule with its parameters: `shared` beside the defaults."""

    name: str
    shared: dict[str, Scalar] = field(default_factory=dict)
    has_base: bool = True

    def __str__(self) -> str:
        changed = [f"{key}={value}" for key, value in self.shared.items()]
        return " ".join([self.name, *changed, *([] if self.has_base else ["no base"])])

    @property
    def n_experts(self) -> int:
        """Models other than the anchor."""
        most = operator_specs()[self.name].max_experts
        return (3 if most is None else most) - (not self.has_base)

    def inputs(self, shape: tuple[int, ...]) -> OperatorInput:
        """What the engine would say of one tensor of that shape."""
        spec = operator_specs()[self.name]
        defaults = {p.name: p.default for p in spec.parameters if p.scope is Scope.GLOBAL and p.default is not None}
        everyone = EACH[: self.n_experts + (not self.has_base)]
        experts: tuple[Mapping[str, Scalar], ...] = everyone[len(everyone) - self.n_experts :]
        anchor: dict[str, Scalar] = {} if self.has_base and spec.base_role is not BaseRole.OPTIONAL else EACH[0]
        n = int(np.prod(shape))
        return OperatorInput({**defaults, **self.shared}, anchor, experts, n, KEYS[: self.n_experts], shape=shape)


RULES = (
    Rule("nuslerp"),
    Rule("nuslerp", has_base=False),
    Rule("nuslerp", {"nuslerp_flatten": False}),
    Rule("nuslerp", {"nuslerp_flatten": False}, has_base=False),
    Rule("nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": True}),
    Rule("multislerp"),
    Rule("multislerp", {"normalize_weights": False}, has_base=False),
    Rule("karcher"),
    Rule("karcher", {"max_iter": 2.0}, has_base=False),
    Rule("geometric_median"),
    Rule("geometric_median", {"max_iter": 3.0}, has_base=False),
    Rule("model_stock"),
    Rule("model_stock", {"filter_wise": True}),
    Rule("sce"),
    Rule("sce", {"select_topk": 0.3}),
    Rule("sce", {"select_topk": 0.0}),
    Rule("ram", {"epsilon": 1e-3}),
    Rule("ramplus_tl", {"epsilon": 1e-3, "r": 0.7, "alpha": 0.9}),
    Rule("magmax"),
    Rule("magmax", {"lambda": 0.4}),
    Rule("fisher"),
    Rule("sar", {"epsilon": 1e-3}),
    Rule("sar", {"density": 0.3}),
    Rule("consensus", {"lambda": 0.5}),
    Rule("consensus", {"least_models": 3.0}),
    Rule("nearswap", {"t": 1e-3}),
    Rule("arcee_fusion"),
    Rule("breadcrumbs"),
    Rule("breadcrumbs", {"rescale": True, "normalize": True, "lambda": 0.7}),
    Rule("breadcrumbs_ties", {"normalize": True}),
    Rule("breadcrumbs_ties", {"rescale": True}),
    Rule("ties", {"rescale": True}),
)
RANDOM_RULES = (
    Rule("della"), Rule("della", {"rescale": False}), Rule("della_linear"), Rule("dare_ties"), Rule("dare_linear"),
)  # fmt: skip
OTHER_RULES = (Rule("linear"), Rule("task_arithmetic"), Rule("ties"), Rule("slerp", {"t": 0.3}))
FEWER = settings(max_examples=settings.default.max_examples // 2)  # type: ignore[union-attr] # of so many rules each
SHAPES = st.sampled_from([(1,), (50,), (40_000,), (7, 9), (3, 6000), (130, 130), (2, 3, 50)])


def exact_family(seed: int, n: int, n_experts: int, *, as_deltas: bool = False, dtype: DType = F32) -> Family:
    """Numbers so coarse that sums and differences of base and deltas are exact in float32."""
    rng = np.random.default_rng(seed)
    base_N = (np.rint(rng.standard_normal(n) * 0.05 * 2**14) / 2**14).astype(np.float32)
    common_N = rng.standard_normal(n)
    experts = []
    for e in range(n_experts):
        step_N = (common_N + rng.standard_normal(n)) * 1e-3 * (1 + e)
        delta_N = np.where(rng.random(n) < 0.2, 0.0, np.rint(step_N * 2**22) / 2**22).astype(np.float32)
        experts.append(delta_N if as_deltas else base_N + delta_N)
    return Family(dtype, (dtype,) * n_experts, base_N, tuple(experts))


def merged(
    rule: Rule, shape: tuple[int, ...], tensor: StoredTensor, cuts: Sequence[int] = (), grains: Sequence[int] = ()
) -> NDArray[Any]:
    return apply_operator(operator_named(rule.name), rule.inputs(shape), tensor, cuts, grains)


def wanted(rule: Rule, shape: tuple[int, ...], family: Family) -> NDArray[np.float64]:
    base = family.base_N.astype(np.float64).reshape(shape)
    models = family.experts_EN.astype(np.float64).reshape(-1, *shape)
    given_ = rule.inputs(shape)
    each = given_.experts if rule.has_base else (given_.anchor, *given_.experts)
    models = models if rule.has_base else np.concatenate([base[None], models])
    return MERGES[rule.name](ModelCase(base, models, given_.globals, each, rule.has_base)).ravel()


def at_the_edge(rule: Rule, shape: tuple[int, ...], family: Family) -> NDArray[np.bool_]:
    """Elements that rounding may put on either side of a cut."""
    base_N, models_EN = family.base_N.astype(np.float64), family.experts_EN.astype(np.float64)
    if rule.name == "arcee_fusion":
        importance_N = fused_importance(base_N.reshape(shape), models_EN[0].reshape(shape)).ravel()
        return np.asarray(np.abs(importance_N - 1.0) < 1e-5)
    if rule.name == "sce" and 0 < float(rule.shared.get("select_topk", 1.0)) < 1:
        variance_N = (models_EN - base_N).var(axis=0)
        kept = int(np.count_nonzero(variance_N) * float(rule.shared["select_topk"]))
        cut = np.sort(variance_N)[-kept] if kept else np.inf
        return np.asarray(np.abs(variance_N - cut) < 1e-6 * variance_N)
    if rule.name == "consensus":
        deltas_EN, each = models_EN - base_N, rule.inputs(shape).experts
        total_N = sum(float(p["weight"]) * delta_N for p, delta_N in zip(each, deltas_EN, strict=True))
        reach_EN = np.array([[float(p["threshold"])] for p in each]) * np.abs(total_N - deltas_EN)
        return np.asarray((np.abs(np.abs(deltas_EN) - reach_EN) <= 1e-6 * np.abs(deltas_EN).max(axis=0)).any(axis=0))
    return np.zeros(len(base_N), np.bool_)


@pytest.mark.parametrize("rule", RULES, ids=str)
@FEWER
@given(st.data())
def test_rule__agrees_with_its_formula(rule: Rule, data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    n = int(np.prod(shape))
    family = exact_family(data.draw(st.integers(0, 99)), n, rule.n_experts)
    cuts = data.draw(st.lists(st.integers(1, n), max_size=4))
    found_N = merged(rule, shape, StoredTensor(family, F32, data.draw(st.integers(0, 5))), cuts).astype(np.float64)
    wanted_N = wanted(rule, shape, family)
    size_N = np.abs(family.base_N) + np.abs(family.experts_EN - family.base_N).sum(axis=0) + np.abs(wanted_N)
    is_wrong_N = (np.abs(found_N - wanted_N) > 2e-6 * size_N) & ~at_the_edge(rule, shape, family)
    assert np.flatnonzero(is_wrong_N).tolist() == []


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [*RULES, *RANDOM_RULES, *OTHER_RULES], ids=str)
@FEWER
@given(st.data())
def test_rule__does_not_depend_on_how_the_tensor_is_cut(rule: Rule, data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    n = int(np.prod(shape))
    family = exact_family(data.draw(st.integers(0, 99)), n, rule.n_experts)
    whole = merged(rule, shape, StoredTensor(family, BF16))
    cuts = data.draw(st.lists(st.integers(1, n), max_size=5))
    grains = [GRAIN_ELEMENTS * i for i in data.draw(st.lists(st.integers(1, 4), max_size=4))]
    parts = merged(rule, shape, StoredTensor(family, BF16, 3), cuts, grains)
    np.testing.assert_array_equal(whole.view(np.uint16), parts.view(np.uint16))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [*RULES, *RANDOM_RULES, *OTHER_RULES], ids=str)
def test_rule__takes_stored_deltas_as_they_are(rule: Rule) -> None:
    shape = (60, 500)
    plain = merged(rule, shape, StoredTensor(exact_family(4, 30_000, rule.n_experts), F32), [9_000])
    family = exact_family(4, 30_000, rule.n_experts, as_deltas=True)
    of_deltas = merged(rule, shape, StoredTensor(family, F32, is_delta=True), [9_000])
    np.testing.assert_array_equal(plain, of_deltas)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [r for r in (*RULES, *RANDOM_RULES, *OTHER_RULES) if r.n_experts > 1], ids=str)
def test_rule__takes_an_omitted_expert_for_one_without_a_delta(rule: Rule) -> None:
    shape = (60, 500)
    family = exact_family(5, 30_000, rule.n_experts)
    omitted = merged(rule, shape, StoredTensor(family, F32, present=range(1, rule.n_experts)))
    unchanged = replace(family, experts=(family.base, *family.experts[1:]))
    np.testing.assert_array_equal(omitted, merged(rule, shape, StoredTensor(unchanged, F32)))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [*RULES, *RANDOM_RULES], ids=str)
def test_rule__gives_the_base_where_no_expert_differs(rule: Rule) -> None:
    base_N = exact_family(1, 5000, 0).base
    family = Family(F32, (F32,) * rule.n_experts, base_N, (base_N,) * rule.n_experts)
    found_N = merged(rule, (50, 100), StoredTensor(family, F32))
    if rule.name in ("nuslerp", "multislerp", "karcher") and (not rule.has_base or rule.name == "karcher"):
        weights = sum(float(p["weight"]) for p in EACH[: rule.n_experts + 1])
        scale = weights if rule.shared.get("normalize_weights") is False else 1.0
        np.testing.assert_allclose(found_N, scale * base_N, rtol=1e-6)
    else:
        np.testing.assert_array_equal(found_N, base_N)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [*RULES, *RANDOM_RULES, *OTHER_RULES], ids=str)
def test_rule__survives_values_that_are_no_numbers(rule: Rule) -> None:
    family = exact_family(2, 600, rule.n_experts)
    family.experts[0][7], family.experts[0][40], family.base[90] = np.nan, np.inf, -np.inf
    first = merged(rule, (6, 100), StoredTensor(family, F32))
    np.testing.assert_array_equal(first, merged(rule, (6, 100), StoredTensor(family, F32), [100, 300]))


@pytest.mark.parametrize(
    ("numbers", "direction"), [((-3.0, 1.0, 2.0), 1.0), ((1.0, -1.0, -4.0), -1.0), ((-2.0, 1.0, 0.0), -1.0)]
)
def test_karcher__of_opposite_directions_keeps_those_of_the_mean(numbers: tuple[float, ...], direction: float) -> None:
    """One element: directions are signs. The first model's where they cancel out; a zero has none."""
    arrays = [np.array([number], np.float32) for number in numbers]
    rule = Rule("karcher", has_base=False)
    family = Family(F32, (F32, F32), arrays[0], tuple(arrays[1:]))
    found_N = merged(rule, (1,), StoredTensor(family, F32))
    np.testing.assert_allclose(found_N, direction * np.abs(numbers).mean(), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(operator_specs()))
def test_operator__is_registered_under_its_specification(name: str) -> None:
    operator = operator_named(name)
    assert operator.spec is operator_specs()[name]
    assert operator.is_random == name.startswith(("dare", "della"))


def _mean_ranks(delta_RL: NDArray[np.float32]) -> NDArray[np.float64]:
    """Ranks by magnitude within rows; equal elements have the mean of theirs."""
    ranks_RL = np.empty(delta_RL.shape, np.float64)
    for row_L, ranks_L in zip(np.abs(delta_RL), ranks_RL, strict=True):
        rising_L = np.sort(row_L)
        ranks_L[:] = (np.searchsorted(rising_L, row_L) + np.searchsorted(rising_L, row_L, "right") - 1) / 2
    return ranks_RL


@given(st.sampled_from([(1,), (50,), (40_000,), (300, 130), (3, 20_000)]), st.integers(0, 99))
def test_della__drops_by_rank_and_random_word(shape: tuple[int, ...], seed: int) -> None:
    rule = Rule("della_linear", {"rescale": False})
    n = int(np.prod(shape))
    family = exact_family(seed, n, 3)
    found_N = merged(rule, shape, StoredTensor(family, F32)).astype(np.float64)
    total_N = family.base_N.astype(np.float64)
    for e, parameters in enumerate(EACH):
        delta_RL = (family.experts_EN[e] - family.base_N).reshape(-1, shape[-1])
        last = max(1, shape[-1] - 1)
        share_RL = _mean_ranks(delta_RL) / last if shape[-1] > 1 else np.full(delta_RL.shape, 0.5)
        density, epsilon = float(parameters["density"]), float(parameters["epsilon"])
        chance_N = (density - epsilon + 2 * epsilon * share_RL).ravel()
        is_kept_N = words_of_elements(KEYS[e], n) < chance_N * 2**32
        total_N += float(parameters["weight"]) * np.where(is_kept_N, delta_RL.ravel(), 0.0)
    np.testing.assert_allclose(found_N, total_N, rtol=0, atol=1e-7)


def test_della__keeps_the_sum_of_magnitudes_and_prefers_the_large() -> None:
    rule = Rule("della_linear")
    given_ = replace(
        rule.inputs((400, 500)), experts=({"weight": 1.0, "density": 0.5, "epsilon": 0.2},), stream_keys=(9,)
    )
    family = exact_family(3, 200_000, 1)
    family = replace(family, base=np.zeros_like(family.base), experts=(family.experts[0] - family.base,))
    found_RL = apply_operator(operator_named(rule.name), given_, StoredTensor(family, F32), []).reshape(400, 500)
    delta_RL = family.experts[0].reshape(400, 500)
    assert np.abs(found_RL).sum() == pytest.approx(np.abs(delta_RL).sum(), rel=1e-4)
    ranks_RL, is_kept_RL = _mean_ranks(delta_RL), found_RL != 0
    for low, wanted_share in ((450, 0.68), (350, 0.6)):  # the smallest are zeros: kept or not cannot be seen
        share = is_kept_RL[(ranks_RL >= low) & (ranks_RL < low + 50)].mean()
        assert share == pytest.approx(wanted_share, abs=0.02)


def test_della__refuses_probabilities_out_of_range() -> None:
    given_ = replace(Rule("della").inputs((10,)), experts=({"weight": 1.0, "density": 0.1, "epsilon": 0.15},))
    with pytest.raises(RecipeError, match=r"epsilon: density 0.1 with epsilon 0.15 gives probabilities from -0.05 to"):
        operator_named("della").reduction(given_)


def test_della__refuses_a_block_that_cuts_a_row() -> None:
    tensor = StoredTensor(exact_family(0, 100, 3), F32)
    with pytest.raises(ValueError, match="inside a row of 10"):
        next(survival_of(Rule("della").inputs((10, 10))).parts(tensor.block(tensor.spans([5])[1])))


def test_della__of_density_one_drops_nothing_and_is_cut_anywhere() -> None:
    everyone = ({"weight": 1.0, "density": 1.0, "epsilon": 0.15}, {"weight": 0.5, "density": 1.0, "epsilon": 0.15})
    tensor = StoredTensor(exact_family(0, 1000, 2), F32)
    for name in ("della", "della_linear"):
        operator = operator_named(name)
        given_ = replace(Rule(name).inputs((10, 100)), experts=everyone, stream_keys=(1, 2))
        assert operator.granularity(given_) == 1
        whole = apply_operator(operator, given_, tensor, [])
        np.testing.assert_array_equal(apply_operator(operator, given_, tensor, [37, 450]), whole)


def test_multislerp__refuses_directions_that_cancel() -> None:
    delta_N = np.ones(30, np.float32)
    third_N = np.zeros(30, np.float32)
    family = Family(F32, (F32,) * 3, np.zeros(30, np.float32), (delta_N, -delta_N, third_N))
    given_ = replace(Rule("multislerp").inputs((30,)), experts=({"weight": 1.0},) * 3)
    with pytest.raises(UnsupportedError, match="directions of the models cancel out"):
        apply_operator(operator_named("multislerp"), given_, StoredTensor(family, F32), [])


def test_multislerp__returns_the_only_model() -> None:
    given_ = replace(Rule("multislerp").inputs((500,)), experts=({"weight": 0.3},))
    family = exact_family(0, 500, 1)
    assert operator_named("multislerp").reduction(given_, NOTHING_REDUCED) is None
    found_N = apply_operator(operator_named("multislerp"), given_, StoredTensor(family, F32), [])
    np.testing.assert_array_equal(found_N, family.experts[0])


@given(
    st.floats(0, 1e3, width=32), st.lists(st.floats(0, 1e3, width=32, allow_subnormal=False), min_size=1, max_size=9)
)
def test_magnitude_cuts__are_the_smallest_that_reach_the_cut(cut: float, weights: list[float]) -> None:
    weight_R = np.array(weights, np.float32)
    bits_R = magnitude_cuts(np.float32(cut), weight_R)
    for weight, bits in zip(weight_R, bits_R, strict=True):
        if bits == 0xFFFFFFFF:
            with np.errstate(all="ignore"):
                assert not np.float32(np.inf) * weight >= np.float32(cut)
            continue
        smallest = np.uint32(bits).view(np.float32)
        with np.errstate(all="ignore"):
            assert smallest * weight >= np.float32(cut)
            assert bits == 0 or np.uint32(bits - 1).view(np.float32) * weight < np.float32(cut)


NUMBERED = (
    Rule("fisher"),
    Rule("fisher", {"normalize": False, "lambda": 0.5}),
    Rule("sar"),
    Rule("sar", {"density": 0.4, "rescale": False}),
    Rule("sar", {"density": 0.4}),
)


@pytest.mark.parametrize("rule", NUMBERED, ids=str)
@pytest.mark.parametrize("cuts", [[], [100, 9_000, 17_001]], ids=str)
def test_rule__by_importance_takes_the_numbers_beside_each_model(rule: Rule, cuts: list[int]) -> None:
    """The first model has none, so that each of its elements counts as one."""
    shape, rng = (60, 500), np.random.default_rng(8)
    deltas = exact_family(7, 30_000, rule.n_experts, as_deltas=True)
    numbers_EN = rng.random((rule.n_experts, 30_000)).astype(np.float32) * (rng.random(30_000) < 0.9)
    numbers_EN[0] = 1.0
    inputs = rule.inputs(shape)
    numbered = tuple({"weight": 0.0, NUMBERS_OF: float(e)} for e in range(1, rule.n_experts))
    family = replace(
        deltas, expert_dtypes=(F32,) * (2 * rule.n_experts - 1), experts=(*deltas.experts, *numbers_EN[1:])
    )
    tensor = StoredTensor(family, F32, is_delta=True)
    operator = operator_named(rule.name)
    found_N = apply_operator(operator, replace(inputs, experts=(*inputs.experts, *numbered)), tensor, cuts)
    base, deltas_EN = family.base_N.astype(np.float64), np.array(deltas.experts, np.float64)
    numbers = numbers_EN.astype(np.float64).reshape(-1, *shape)
    models = (base + deltas_EN).reshape(-1, *shape)
    case = ModelCase(base.reshape(shape), models, inputs.globals, inputs.experts, numbers=numbers)
    size_N = np.abs(base) + np.abs(deltas_EN).sum(axis=0)
    assert (np.abs(found_N - MERGES[rule.name](case).ravel()) <= 2e-6 * size_N).all()


def test_geometric_median__stays_with_the_majority() -> None:
    """Of three models of which two agree it is what they agree on, however far away the third one is."""
    alike, far = np.array([0.5, -1.0], np.float32), np.array([100.0, 300.0], np.float32)
    family = Family(F32, (F32, F32, F32), np.zeros(2, np.float32), (alike, alike, far))
    found_N = merged(Rule("geometric_median", {"tol": 1e-8}), (2,), StoredTensor(family, F32))
    np.testing.assert_allclose(found_N, alike, atol=1e-3)
