"""Recipes in published forms give what mergekit gives, to one unit in the last place of bf16; so do chat templates."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from test_mergekit import OFFLINE, PEER_PYTHON, REQUIRED, ulp_distance

import mergepipe
from mergepipe.core.blocks import BF16, F32
from mergepipe.options import MergeOptions
from mergepipe.runs.small_files import NAMED
from support.chat_conversations import CONVERSATIONS
from support.families import TINY_LLAMA, write_family
from support.published_forms import FORMS, Form

pytestmark = pytest.mark.peer

COMPARED = [form for form in FORMS if form.is_compared]
RANK = 4
OPTIONS = MergeOptions(catalog=False)


def write_adapter(folder: Path, base: Path) -> None:
    """A LoRA for every query projection of the base."""
    rng = np.random.default_rng(5)
    factors: dict[str, NDArray[np.float32]] = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = tensor.shape
            factors[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, columns), np.float32) * np.float32(0.02)
            factors[f"{module}.lora_B.weight"] = rng.standard_normal((rows, RANK), np.float32) * np.float32(0.02)
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def run_peer(script: str, *arguments: str, folder: Path) -> str:
    if not PEER_PYTHON.exists() and not os.environ.get(REQUIRED):
        pytest.skip("no .venv-peer: run `make test-peers`")
    command = [str(PEER_PYTHON), str(Path(__file__).with_name(script)), *arguments]
    ran = subprocess.run(
        command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run mergekit over all recipes of the table that it takes."""
    root = tmp_path_factory.mktemp("forms")
    write_family(root, TINY_LLAMA, 3, seed=11, dtype=F32)
    write_family(root / "halves", TINY_LLAMA, 3, seed=11, dtype=BF16)
    (root / "halves" / "expert-3").rename(root / "half")
    write_adapter(root / "lora", root / "base")
    for form in COMPARED:
        (root / f"{form.name}.yml").write_bytes(form.recipe.encode())
    run_peer("run_mergekit.py", ".", "--lora-merge-cache=loras", folder=root)
    return root


@pytest.mark.parametrize("form", COMPARED, ids=lambda form: form.name)
def test_merge__of_a_published_form_is_mergekits(folder: Path, form: Form, tmp_path: Path) -> None:
    report = mergepipe.merge(folder / f"{form.name}.yml", tmp_path / "out", options=OPTIONS)
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_merged(folder / f"{form.name}-mergekit")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in ours.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in theirs.items()
    }
    far = {name: int(ulp_distance(bits(ours[name]), bits(theirs[name])).max(initial=0)) for name in ours}
    assert {name: distance for name, distance in far.items() if distance > 1} == {}
    of_tensors = re.compile("no dtype is stated|the filter .* matches no tensor")  # no matter of the recipe's form
    told = [n.code for n in report.recipe_notices if not of_tensors.search(n.message)]
    assert tuple(told) == form.notices


def load_merged(folder: Path) -> dict[str, NDArray[np.generic]]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def bits(tensor: NDArray[np.generic]) -> NDArray[np.uint16]:
    """A tensor as bf16 bits, flat."""
    return tensor.astype(ml_dtypes.bfloat16).view(np.uint16).ravel()


def test_chat_templates__render_as_mergekits_of_the_same_names(tmp_path: Path) -> None:
    names = sorted(set(NAMED) - {"gemma"})
    (tmp_path / "ours.json").write_text(json.dumps({name: NAMED[name] for name in names}))
    (tmp_path / "conversations.json").write_text(json.dumps(CONVERSATIONS))
    rendered = json.loads(run_peer("render_templates.py", "ours.json", "conversations.json", folder=tmp_path))
    assert sorted(rendered) == names
    assert [(name, ours) for name, pairs in rendered.items() for ours, theirs in pairs if ours != theirs] == []
