"""A recipe with an adapter as an expert gives the same bytes by a plan, whole and in parts, as without one.

An adapter changes some tensors only: of the others a plan reads nothing of it.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mergepipe
from mergepipe.options import MergeOptions, OutputOptions
from support.disk_families import weights_digest
from support.model_folders import recipe_of, write_adapter, write_model

SIZE = 128
NAMES = ("q_proj", "k_proj")
OPTIONS = MergeOptions(catalog=False, threads=1, shard_bytes=50_000)
OF_PARTS = OutputOptions(catalog=False, threads=1, shard_bytes=50_000)


@pytest.fixture(name="family", scope="module")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    random = np.random.default_rng(0)
    base = {
        f"model.layers.{layer}.self_attn.{name}.weight": random.normal(0, 1, (SIZE, SIZE)).astype(ml_dtypes.bfloat16)
        for layer in range(3) for name in NAMES
    }  # fmt: skip
    expert = {
        name: (tensor + random.normal(0, 0.1, tensor.shape)).astype(tensor.dtype) for name, tensor in base.items()
    }
    factors = {}
    for layer in range(3):
        module = f"model.layers.{layer}.self_attn.q_proj"
        factors[f"{module}.lora_A.weight"] = random.normal(0, 0.1, (4, SIZE)).astype(np.float32)
        factors[f"{module}.lora_B.weight"] = random.normal(0, 0.1, (SIZE, 4)).astype(np.float32)
    write_model(folder / "base", base)
    write_model(folder / "expert", expert)
    write_adapter(folder / "adapter", factors)
    return folder


def recipe(family: Path, method: str, *, alone: bool) -> dict[str, object]:
    adapter = str(family / "adapter") if alone else f"{family / 'base'}+{family / 'adapter'}"
    own = {"weight": 0.6} if method == "linear" else {"weight": 0.6, "density": 0.5}
    return recipe_of(method, {adapter: own, family / "expert": own}, family / "base")


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


def test_plan__reads_nothing_of_an_adapter_where_it_changes_nothing(family: Path, tmp_path: Path) -> None:
    plan = mergepipe.plan(recipe(family, "linear", alone=True), everything=True, home=tmp_path / "home")
    for tensor in plan.tensors:
        adapter_access, expert_access = tensor.access
        assert bool(adapter_access.blocks) is ("q_proj" in tensor.name)
        assert bool(adapter_access.free) is ("k_proj" in tensor.name)
        assert expert_access.blocks
