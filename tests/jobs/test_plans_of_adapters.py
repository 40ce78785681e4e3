"""A recipe with an adapter as an expert gives the same bytes by a plan, whole and in parts, as without one.

An adapter changes some tensors only: of the others a plan reads nothing of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import LimitError, UnsupportedError
from mergepipe.options import MergeOptions, OutputOptions
from support.disk_families import weights_digest
from support.model_folders import recipe_of, write_adapter, write_model
from support.refusals import refuses

SIZE = 128
WIDE = 512
NAMES = ("q_proj", "k_proj")
OPTIONS = MergeOptions(catalog=False, threads=1, shard_bytes=50_000)
OF_PARTS = OutputOptions(catalog=False, threads=1, shard_bytes=50_000)


def write_models(folder: Path, size: int, change: float) -> Path:
    """Write a base, an expert that differs from it by `change`, and an adapter of half of the base's matrices."""
    random = np.random.default_rng(0)
    base = {
        f"model.layers.{layer}.self_attn.{name}.weight": random.normal(0, 1, (size, size)).astype(ml_dtypes.bfloat16)
        for layer in range(3) for name in NAMES
    }  # fmt: skip
    expert = {
        name: (tensor + random.normal(0, change, tensor.shape)).astype(tensor.dtype) for name, tensor in base.items()
    }
    factors = {}
    for layer in range(3):
        module = f"model.layers.{layer}.self_attn.q_proj"
        factors[f"{module}.lora_A.weight"] = random.normal(0, change, (4, size)).astype(np.float32)
        factors[f"{module}.lora_B.weight"] = random.normal(0, 0.1, (size, 4)).astype(np.float32)
    write_model(folder / "base", base)
    write_model(folder / "expert", expert)
    write_adapter(folder / "adapter", factors)
    return folder


@pytest.fixture(name="family", scope="module")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("family"), SIZE, 0.1)


@pytest.fixture(name="wide_family", scope="module")
def make_wide_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("wide"), WIDE, 1e-3)


def recipe(family: Path, method: str, *, alone: bool) -> dict[str, object]:
    adapter = str(family / "adapter") if alone else f"{family / 'base'}+{family / 'adapter'}"
    own = {"weight": 0.6} if method == "linear" else {"weight": 0.6, "density": 0.5}
    return recipe_of(method, {adapter: own, family / "expert": own}, family / "base")


@pytest.mark.thorough
@pytest.mark.parametrize("alone", [False, True], ids=["base+adapter", "adapter alone"])
@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
def test_run__of_a_plan_with_an_adapter_makes_what_a_merge_makes(
    family: Path, tmp_path: Path, method: str, alone: bool
) -> None:
    made = recipe(family, method, alone=alone)
    mergepipe.merge(made, tmp_path / "merged", options=OPTIONS)
    expected = weights_digest(tmp_path / "merged")

    plan = mergepipe.plan(made, everything=True, home=tmp_path / "home")
    mergepipe.run(plan, tmp_path / "whole", options=OPTIONS)
    assert weights_digest(tmp_path / "whole") == expected
    for part in ((1, 2), (2, 2)):
        mergepipe.run_part(plan, tmp_path / "parts", part, options=OF_PARTS)
    assert weights_digest(tmp_path / "parts") == expected
    assert mergepipe.merge(made, tmp_path / "budgeted", budget="100%", options=OPTIONS).expert_bytes > 0
    assert weights_digest(tmp_path / "budgeted") == expected


@pytest.mark.parametrize("alone", [False, True], ids=["base+adapter", "adapter alone"])
@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
def test_merge__under_a_budget_reads_adapters_whole_and_draws_a_sample_of_the_rest(
    wide_family: Path, tmp_path: Path, method: str, alone: bool
) -> None:
    made = recipe(wide_family, method, alone=alone) | {"out_dtype": "float32"}
    plan = mergepipe.plan(made, "40%", block_elements=16384, home=tmp_path / "home")
    assert plan.policy == "sample"
    report = mergepipe.run(plan, tmp_path / "out", home=tmp_path / "home")
    assert report.expert_bytes + report.analysis_bytes <= plan.planned_bytes <= plan.budget_bytes
    adapter, expert = (model for model in plan.models if model.role == "expert")
    assert adapter.planned_bytes == adapter.full_cost_bytes
    assert expert.planned_bytes < expert.full_cost_bytes / 2
    base = load_file(wide_family / "base" / "model.safetensors")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    mergepipe.merge(made, tmp_path / "full", options=MergeOptions(catalog=False, threads=1))
    full = load_file(tmp_path / "full" / "model.safetensors")
    for tensor in plan.tensors:
        is_drawn_B = np.zeros(WIDE * WIDE // 16384, np.bool_)
        for first, stop in tensor.access[1].blocks:
            is_drawn_B[first:stop] = True
        assert 0 < is_drawn_B.sum() < len(is_drawn_B)
        is_drawn_N = np.repeat(is_drawn_B, 16384)
        change_N = (merged[tensor.name] - base[tensor.name].astype(np.float32)).ravel()
        assert not change_N[~is_drawn_N].any()
        if method == "linear":
            of_full_N = (full[tensor.name] - base[tensor.name].astype(np.float32)).ravel()
            np.testing.assert_allclose(
                change_N[is_drawn_N], of_full_N[is_drawn_N] / tensor.probability, rtol=0.05, atol=1e-6
            )


def test_plan__under_a_budget_that_does_not_hold_the_adapters_names_the_least_that_does(
    wide_family: Path, tmp_path: Path
) -> None:
    made = recipe(wide_family, "linear", alone=True)
    with refuses(LimitError, "budget.too-small") as caught:
        mergepipe.plan(made, "1%", home=tmp_path / "home")
    least = re.search(r"smallest useful budget is (\d+)B", str(caught.value))
    assert least is not None
    plan = mergepipe.plan(made, f"{least.group(1)}B", home=tmp_path / "home")
    assert 0 < plan.planned_bytes <= plan.budget_bytes


def test_plan__by_norm_refuses_an_expert_without_statistics_among_others_that_have_some(
    family: Path, tmp_path: Path
) -> None:
    made = recipe(family, "linear", alone=True)
    mergepipe.analyze(family / "base", [family / "expert"], home=tmp_path / "home")
    for select in ("norm", "paper", "conflict"):
        with refuses(UnsupportedError, "plan.unsupported", "adapter': has no statistics and others have"):
            mergepipe.plan(made, "30%", select=select, home=tmp_path / "home")
    assert mergepipe.plan(made, "60%", select="random", home=tmp_path / "home").planned_bytes > 0


def test_plan__reads_nothing_of_an_adapter_where_it_changes_nothing(family: Path, tmp_path: Path) -> None:
    plan = mergepipe.plan(recipe(family, "linear", alone=True), everything=True, home=tmp_path / "home")
    for tensor in plan.tensors:
        adapter_access, expert_access = tensor.access
        assert bool(adapter_access.blocks) is ("q_proj" in tensor.name)
        assert bool(adapter_access.free) is ("k_proj" in tensor.name)
        assert expert_access.blocks
