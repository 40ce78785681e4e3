"""The policy `sample`: positions of all experts, merged exactly, their delta divided by the probability of a draw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget_cases import CASES, Setting, make_setting
from numpy.typing import NDArray
from safetensors.numpy import load_file

import mergepipe
from mergepipe import Plan
from mergepipe.core.blocks import BF16, F32, DType
from mergepipe.errors import LimitError, UnsupportedError
from mergepipe.planning.plan import PlannedTensor, parse_plan
from support.budgets import AWKWARD, GRAIN, TensorPlanOf, as_float32, planned_tensor, smallest_memory
from support.disk_families import DiskFamily, weights_digest, write_family, write_recipe
from support.model_folders import recipe_of, write_model
from support.refusals import refuses

UNIT = GRAIN
WIDE = (
    TensorPlanOf("layers.0.wide", (40 * UNIT + 37,), F32, (F32,), delta_powers=(-4, -3)),
    TensorPlanOf("layers.1.wide", (23 * UNIT,), F32, (F32,), delta_powers=(-4, -2)),
    TensorPlanOf("layers.1.norm", (96,), F32, (F32,)),
)
ELEMENTWISE = ("linear_sum", "task_arithmetic")


def drawn(tensor: PlannedTensor, unit: int = UNIT) -> NDArray[np.bool_]:
    """Mark the positions of a tensor of which anything is known."""
    drawn_B = np.zeros(-(-tensor.n_elements // unit), np.bool_)
    for access in tensor.access:
        for start, stop in access.runs:
            drawn_B[start:stop] = True
    return drawn_B


def of_elements(tensor: PlannedTensor, unit: int = UNIT) -> NDArray[np.bool_]:
    """Mark the elements of the drawn positions."""
    return np.repeat(drawn(tensor, unit), unit)[: tensor.n_elements]


def load_weights(out: Path) -> dict[str, NDArray[np.float32]]:
    """Load the tensors of an output in float32."""
    loaded = (load_file(file) for file in sorted(out.glob("*.safetensors")))
    return {name: stored for tensors in loaded for name, stored in tensors.items()}


def scaled(base_N: NDArray[np.float32], full_N: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """What is merged where it was drawn: grain by grain, the longer a change beside its base, the less it is scaled."""
    merged_N = full_N.copy()
    for start in range(0, len(base_N), GRAIN):
        base, change = base_N[start : start + GRAIN], full_N[start : start + GRAIN] - base_N[start : start + GRAIN]
        of_base, of_change = (np.square(values, dtype=np.float64).sum() for values in (base, change))
        own = max(1.0, factor / (1 + (factor - 1) * of_change / (0.02**2 * of_base)))
        merged_N[start : start + GRAIN] = base + np.float32(own) * change
    return merged_N


def sampled(setting: Setting, budget: str, unit: int = UNIT, seed: int = 0) -> Plan:
    return setting.plan(budget, "sample", block_elements=unit, seed=seed)


@pytest.mark.thorough
@pytest.mark.parametrize("is_analyzed", [False, True], ids=["unknown", "analyzed"])
def test_sample__of_a_larger_budget_holds_that_of_a_smaller_one(tmp_path: Path, is_analyzed: bool) -> None:
    setting = make_setting(tmp_path, CASES["ties"], plans=(*AWKWARD, *WIDE))
    if is_analyzed:
        setting.analyze()
    smaller: dict[str, NDArray[np.bool_]] = {}
    most_bytes = 3 * (UNIT * 8 + 2 * 4096)  # of a position: three experts of up to 8 bytes an element
    for percent in (0, 4, 10, 11, 25, 50, 90, 100):
        plan = sampled(setting, f"{percent}%")
        assert plan.budget_bytes - most_bytes < plan.planned_bytes <= plan.budget_bytes or percent == 100
        for tensor in plan.tensors:
            drawn_B = drawn(tensor)
            for access in tensor.access:
                runs = np.zeros_like(drawn_B)
                for start, stop in access.runs:
                    runs[start:stop] = True
                assert (runs == drawn_B).all()  # all experts of a drawn position, and nothing else
            assert (drawn_B >= smaller.get(tensor.name, drawn_B)).all()
            smaller[tensor.name] = drawn_B
    assert all(drawn_B.all() for drawn_B in smaller.values())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_sample__is_the_base_plus_the_scaled_delta_of_the_full_merge(tmp_path: Path, name: str, dtype: DType) -> None:
    plans = tuple(replace(plan, base_dtype=dtype, expert_dtypes=(dtype,)) for plan in WIDE)
    setting = make_setting(tmp_path, CASES[name], plans=plans, out_dtype="float32")
    plan = sampled(setting, "30%")
    full, out = (load_weights(place) for place in (setting.full(), setting.run(plan, "out")))
    for tensor in plan.tensors:
        base_N = as_float32(setting.family.models[0], tensor.name)
        merged_N = scaled(base_N, full[tensor.name].ravel(), 1 / tensor.probability)
        expected_N = np.where(of_elements(tensor), merged_N, base_N)
        np.testing.assert_allclose(out[tensor.name].ravel(), expected_N, rtol=3e-6, atol=3e-8)
        assert (out[tensor.name].ravel() == base_N)[~of_elements(tensor)].all()
    factors = [1 / tensor.probability for tensor in plan.tensors if tensor.name != "layers.1.norm"]
    assert min(factors) > 2


def random_family(folder: Path, n_experts: int, n_elements: int = 40 * UNIT) -> tuple[Path, list[Path]]:
    """Write a base and experts that differ from it so little that a sample of them is scaled in full."""
    rng = np.random.default_rng(4)
    base_N = rng.standard_normal(n_elements).astype(np.float32)
    experts = []
    for number in range(n_experts):
        delta_N = np.float32(1e-4) * rng.standard_normal(n_elements).astype(np.float32)
        experts.append(write_model(folder / f"expert-{number}", {"layers.0.wide": base_N + delta_N}))
    return write_model(folder / "base", {"layers.0.wide": base_N}), experts


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("budget", ["10%", "25%", "50%"])
def test_sample__is_as_far_from_the_full_merge_as_its_probability_says_whatever_was_merged(
    tmp_path: Path, method: str, budget: str
) -> None:
    """The squared distance is (1 - p) / p of the full merge's squared change: no error bar says more than p does."""
    base, (one, two) = random_family(tmp_path, 2)
    density = {} if method == "task_arithmetic" else {"density": 0.3}
    recipe = recipe_of(method, {one: {"weight": 0.7, **density}, two: {"weight": 0.4, **density}}, base)
    mergepipe.merge(recipe, tmp_path / "full", catalog=False)
    base_N, full_N = (load_weights(place)["layers.0.wide"].astype(np.float64) for place in (base, tmp_path / "full"))
    for seed in range(3):
        plan = mergepipe.plan(recipe, budget, block_elements=UNIT, seed=seed, home=tmp_path / "home")
        mergepipe.run(plan, tmp_path / f"out-{seed}", home=tmp_path / "home")
        error_N = load_weights(tmp_path / f"out-{seed}")["layers.0.wide"] - full_N
        of_change = np.square(error_N).sum() / np.square(full_N - base_N).sum()
        probability = plan.tensors[0].probability
        assert of_change == pytest.approx((1 - probability) / probability, rel=0.15)


@pytest.mark.parametrize(("budget", "rescale"), [("20%", True), ("50%", False)], ids=["kept whole", "dropped, too"])
def test_sample__of_dare_has_the_mean_of_the_full_merge(tmp_path: Path, budget: str, rescale: bool) -> None:
    density = 0.4
    base, (one, two) = random_family(tmp_path, 2)
    each = {one: {"weight": 0.7, "density": density}, two: {"weight": 0.4, "density": density}}
    recipe = recipe_of("dare_linear", each, base, parameters={"rescale": rescale})
    base_N, one_N, two_N = (load_file(place / "model.safetensors")["layers.0.wide"] for place in (base, one, two))
    wanted_N = np.float64(0.7) * (one_N - base_N) + np.float64(0.4) * (two_N - base_N)
    wanted_N = wanted_N if rescale else density * wanted_N
    shares = []
    for seed in range(30):
        options: dict[str, Any] = {"budget": budget, "seed": seed, "block_elements": UNIT, "catalog": False}
        mergepipe.merge(recipe, tmp_path / "out", force=True, **options)
        change_N = load_weights(tmp_path / "out")["layers.0.wide"].astype(np.float64) - base_N
        shares.append(change_N @ wanted_N / (wanted_N @ wanted_N))
    deviation = np.std(shares, ddof=1) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - 1) < 4 * deviation < 0.15


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("budget", ["20%", "60%", "100%"])
def test_sample__of_dare_keeps_of_drawn_blocks_what_the_draw_left_to_drop(
    tmp_path: Path, method: str, budget: str
) -> None:
    """Every kept element is multiplied by one over the smaller of density and probability of the draw."""
    base, (expert,) = random_family(tmp_path, 1)
    recipe = recipe_of(method, {expert: {"weight": 1.0, "density": 0.4}}, base)
    plan = mergepipe.plan(recipe, budget, block_elements=UNIT, home=tmp_path / "home")
    (tensor,) = plan.tensors
    mergepipe.run(plan, tmp_path / "out", home=tmp_path / "home")
    base_N, expert_N = (load_file(place / "model.safetensors")["layers.0.wide"] for place in (base, expert))
    change_N = load_weights(tmp_path / "out")["layers.0.wide"] - base_N
    is_kept_N = change_N != 0
    assert not is_kept_N[~of_elements(tensor)].any()
    kept_share = is_kept_N[of_elements(tensor)].mean()
    assert kept_share == pytest.approx(min(1.0, 0.4 / tensor.probability), abs=0.01)
    factor = 1 / min(0.4, tensor.probability)
    ratio_K = change_N[is_kept_N] @ (expert_N - base_N)[is_kept_N] / np.square((expert_N - base_N)[is_kept_N]).sum()
    assert ratio_K == pytest.approx(factor, rel=0.01)


def test_sample__cuts_magnitudes_among_what_it_read(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["ties"], plans=WIDE, out_dtype="float32")
    plan = sampled(setting, "30%")
    wide = planned_tensor(plan, WIDE[0].name)
    inside_N = of_elements(wide)
    assert 0 < inside_N.sum() < len(inside_N)
    parts = [{WIDE[0].name: model[WIDE[0].name][inside_N]} for model in setting.family.models]
    family = write_family(tmp_path / "part", parts)
    recipe = write_recipe(tmp_path / "part.yml", setting.case, family, "float32")
    mergepipe.merge(recipe, tmp_path / "part-full", catalog=False)
    of_part = load_weights(tmp_path / "part-full")[WIDE[0].name]
    out_N = load_weights(setting.run(plan, "out"))[WIDE[0].name]
    base_N = parts[0][WIDE[0].name]
    expected_N = scaled(base_N, of_part, 1 / wide.probability)
    np.testing.assert_allclose(out_N[inside_N], expected_N, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["linear", "ties", "dare_ties"])
def test_sample__is_the_same_before_and_after_an_analysis(tmp_path: Path, name: str) -> None:
    setting = make_setting(tmp_path, CASES[name], plans=(*AWKWARD, *WIDE))

    def digest(out: str) -> str:
        mergepipe.merge(setting.recipe, tmp_path / out, budget="30%", block_elements=UNIT, home=setting.home)
        return weights_digest(tmp_path / out)

    before, plan = digest("before"), sampled(setting, "30%")
    setting.analyze(UNIT)
    assert digest("after") == before
    assert sampled(setting, "30%").digest == plan.digest
    assert mergepipe.plan(setting.recipe, "30%", home=setting.home, block_elements=UNIT).digest == plan.digest


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ties", "dare_ties", "slerp"])
def test_sample__is_the_same_whatever_the_threads_the_memory_and_the_run(tmp_path: Path, name: str) -> None:
    setting = make_setting(tmp_path, CASES[name], plans=(*AWKWARD, *WIDE))
    plan = sampled(setting, "35%", GRAIN)
    path = tmp_path / "plan.json"
    path.write_bytes(plan.to_json())
    digest = weights_digest(setting.run(path, "stored"))
    memory_bytes = smallest_memory(plan, tmp_path / "refused")
    for threads, memory in ((1, None), (3, memory_bytes)):
        out = tmp_path / f"out-{threads}"
        mergepipe.run(plan, out, home=setting.home, threads=threads, memory_bytes=memory)
        assert weights_digest(out) == digest
    again = setting.with_home("another")
    assert sampled(again, "35%", GRAIN).digest == plan.digest
    assert sampled(again, "35%", GRAIN, seed=1).digest != plan.digest


def test_sample__is_repaired_and_replayed_to_the_same_bytes(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["ties"], plans=WIDE)
    out = setting.run(sampled(setting, "40%"), "out")
    digest = weights_digest(out)
    mergepipe.replay(out, tmp_path / "again", home=setting.home)
    assert weights_digest(tmp_path / "again") == digest
    file = next(out.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-200_000:-100_000:997] = bytes(len(content[-200_000:-100_000:997]))
    file.write_bytes(content)
    assert weights_digest(out) != digest
    mergepipe.repair(out, home=setting.home)
    assert weights_digest(out) == digest


def test_sample__is_stated_by_plans_and_explanations(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["ties"], plans=WIDE)
    plan = sampled(setting, "20%", seed=7)
    assert parse_plan(plan.to_json()) == plan
    sampling = plan.sampling
    assert sampling is not None
    assert (sampling.unit_elements, sampling.seed, sampling.most_probability) == (UNIT, 7, 1.0)
    assert 0.1 < sampling.least_probability < sampling.mean_probability < 0.3
    out = setting.run(plan, "out")
    explanation = mergepipe.explain(out, tensor="*.wide", home=setting.home)
    assert explanation.sampling == sampling
    reasons = {use.reason for tensor in explanation.tensors for use in tensor.uses}
    factor = 1 / sampling.least_probability
    assert any(f"the merged delta is multiplied by {factor:.3g}" in reason for reason in reasons)
    assert explanation.verdict is not None
    assert "/docs/benchmarks/rules.md" in explanation.verdict.measured


@pytest.mark.parametrize("name", ["linear_sum", "ties", "dare_ties"])
def test_sample__reads_embeddings_and_heads_after_all_other_tensors(tmp_path: Path, name: str) -> None:
    last = ("model.embed_tokens.weight", "lm_head.weight")
    plans = (*WIDE, *(TensorPlanOf(embedding, (10 * UNIT,), F32, (F32,)) for embedding in last))
    setting = make_setting(tmp_path, CASES[name], plans=plans, out_dtype="float32")
    half, most, full = (sampled(setting, budget) for budget in ("50%", "85%", "100%"))
    (told,) = half.fallbacks
    assert told.where == "2 tensors"
    assert all(embedding in told.decision for embedding in last)
    for tensor in half.tensors:
        assert (tensor.probability == 0) is (tensor.name in last)
    assert not most.fallbacks
    for tensor in most.tensors:
        assert 0 < tensor.probability <= 1
        assert (tensor.probability < 1) is (tensor.name in last)
    assert all(tensor.probability == 1 for tensor in full.tensors)
    out = load_weights(setting.run(half, "half"))
    for embedding in last:
        assert (out[embedding] == as_float32(setting.family.models[0], embedding)).all()
    assert weights_digest(setting.run(full, "all")) == weights_digest(setting.full())


def test_sample__of_rows_that_units_would_cut_is_refused(tmp_path: Path) -> None:
    plans = (TensorPlanOf("layers.0.wide", (300, 500), F32, (F32,)),)
    setting = make_setting(tmp_path, CASES["dare_linear"], plans=plans)
    recipe = tmp_path / "della.yml"
    recipe.write_text(setting.recipe.read_text().replace("dare_linear", "della"))
    setting = replace(setting, recipe=recipe)
    with refuses(UnsupportedError, "plan.unsupported", "whole rows"):
        sampled(setting, "30%")
    assert sampled(setting, "100%").planned_bytes > 0


def test_sample__that_holds_no_position_is_refused(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["linear"], plans=WIDE[:2])
    with refuses(LimitError, "budget.too-small") as caught:
        sampled(setting, "100B")
    least = re.search(r"smallest useful budget is (\d+)B", str(caught.value))
    assert least is not None
    assert sampled(setting, f"{least.group(1)}B").planned_bytes == int(least.group(1))


def test_sample__of_packed_experts_reads_whole_encoded_blocks(tmp_path: Path) -> None:
    raw = make_setting(tmp_path, CASES["linear_sum"], plans=(TensorPlanOf("layers.0.wide", (900_000,), BF16, (BF16,)),))
    base, *experts = raw.family.places
    stores = [expert.folder for expert in mergepipe.pack(base, experts, tmp_path / "stores", threads=2).experts]
    family = DiskFamily(raw.family.models, (base, *stores))
    recipe = write_recipe(tmp_path / "packed.yml", raw.case, family)
    packed = replace(raw, family=family, recipe=recipe)
    unit = 1 << 18
    plans = [sampled(setting, "60%", unit) for setting in (raw, packed)]
    numbers: Sequence[NDArray[np.bool_]] = [drawn(plan.tensors[0], unit) for plan in plans]
    assert all(0 < drawn_B.sum() < len(drawn_B) for drawn_B in numbers)
    out = load_weights(packed.run(plans[1], "packed"))
    assert set(out) == set(load_weights(raw.full()))
