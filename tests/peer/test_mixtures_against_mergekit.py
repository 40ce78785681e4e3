"""Mixtures of experts are those that mergekit-moe builds of the same recipes, bit for bit, routers included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_forms_against_mergekit import run_peer

import mergepipe

pytestmark = pytest.mark.peer

PROMPTS = (("write code def return", "a number"), ("tell me a story", "about the theorem"))
CASES: dict[str, dict[str, object]] = {
    "llama-cheap_embed": {"gate_mode": "cheap_embed"},
    "llama-hidden": {"gate_mode": "hidden", "dtype": "float32"},
    "llama-hidden_avg": {"gate_mode": "hidden_avg"},
    "llama-hidden_last": {"gate_mode": "hidden_last", "dtype": "float16"},
    "llama-deepseek": {"gate_mode": "cheap_embed", "architecture": "deepseek", "shared": 1},
    "llama-qwen": {"gate_mode": "hidden", "architecture": "qwen", "shared": 1, "prompted": True},
    "qwen2-hidden": {"gate_mode": "hidden", "shared": 1, "prompted": True},
    "qwen3-cheap_embed": {"gate_mode": "cheap_embed", "dtype": "float32"},
}


def recipe_text(family: str, case: dict[str, object]) -> str:
    lines = [
        f"base_model: ./{family}/base",
        f"gate_mode: {case['gate_mode']}",
        f"dtype: {case.get('dtype', 'bfloat16')}",
    ]
    if "architecture" in case:
        lines.append(f"architecture: {case['architecture']}")
    lines.append("experts:")
    for name, (positive, negative) in zip("ab", PROMPTS, strict=True):
        lines.append(f"  - source_model: ./{family}/{name}")
        lines.append(f"    positive_prompts: [{positive}, the proof of the theorem]")
        lines.append(f"    negative_prompts: [{negative}]")
    if "shared" in case:
        lines += ["shared_experts:", f"  - source_model: ./{family}/a"]
        lines += ["    positive_prompts: [tell me about the proof]"] if "prompted" in case else []
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixtures")
    run_peer("run_mixtures.py", "prepare", ".", folder=root)
    for name, case in CASES.items():
        (root / f"{name}.yml").write_text(recipe_text(name.partition("-")[0], case))
    run_peer("run_mixtures.py", "build", ".", folder=root)
    return root


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", CASES)
def test_mixtures__are_those_of_mergekit(root: Path, name: str, tmp_path: Path) -> None:
    mergepipe.merge(root / f"{name}.yml", tmp_path / "out")
    made, expected = tensors(tmp_path / "out"), tensors(root / f"{name}-mergekit")
    assert made.keys() == expected.keys()
    for key, tensor in expected.items():
        assert made[key].dtype == tensor.dtype, key
        np.testing.assert_array_equal(made[key].float().numpy(), tensor.float().numpy(), err_msg=key)
