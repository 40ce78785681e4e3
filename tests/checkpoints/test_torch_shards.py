"""Shards of torch's Hugging Face writer, saved by two ranks: read as one model by their folder, refused one by one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe import tailor
from mergepipe.errors import MergePipeError
from support.late_modules import torch

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

WRITE = """
import sys
import numpy, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def save(rank, folder):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meeting")
    mesh = init_device_mesh("cpu", (2,))
    stored = numpy.load(f"{folder}/values.npz")
    values = {name: torch.from_numpy(stored[name]) for name in stored}
    shards = {name: distribute_tensor(value, mesh, [Shard("down" in name)]) for name, value in values.items()}
    shards["model.steps"] = torch.arange(4.0)
    writer = dcp.HuggingFaceStorageWriter(f"{folder}/step_4/model", save_distributed=True)
    dcp.save(shards, storage_writer=writer)
    dist.destroy_process_group()

if __name__ == "__main__":
    processes.start_processes(save, (sys.argv[1],), nprocs=2, start_method="fork")  # none imports torch again
"""
SHAPES = {
    "model.embed_tokens.weight": (11, 4), "model.layers.0.mlp.up_proj.weight": (7, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 7), "model.norm.weight": (4,), "lm_head.weight": (11, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two ranks have saved, and with the same model in one file."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(4)
    values: Any = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    np.savez(folder / "values.npz", **values)
    (folder / "write.py").write_text(WRITE)
    assert torch is not None
    subprocess.run(
        [sys.executable, folder / "write.py", folder], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )  # fmt: skip
    (folder / "whole").mkdir()
    save_file({**values, "model.steps": np.arange(4, dtype=np.float32)}, folder / "whole" / "model.safetensors")
    return folder


def test_merge__reads_the_shards_of_all_ranks_as_one_model(saved: Path, tmp_path: Path) -> None:
    shards, whole, other = saved / "step_4" / "model", saved / "whole", tmp_path / "other"
    other.mkdir()
    values = load_file(whole / "model.safetensors")
    save_file({name: value + 1 for name, value in values.items()}, other / "model.safetensors")
    for base, expert in ((shards, other), (other, shards)):
        made = []
        for name, models in (("sharded", (base, expert)), ("plain", (base, expert))):
            places = [whole if name == "plain" and model is shards else model for model in models]
            listed = [{"model": str(place), "parameters": {"weight": 0.4}} for place in places]
            recipe = {"merge_method": "task_arithmetic", "base_model": str(places[0]), "models": listed[1:]}
            out = tmp_path / f"{name}-{base.name}"
            mergepipe.merge(recipe, out)
            made.append((out / "model.safetensors").read_bytes())
        assert made[0] == made[1]


@pytest.mark.parametrize("folder", ["step_4", "step_4/model"])
def test_export__makes_a_model_of_shards(saved: Path, tmp_path: Path, folder: str) -> None:
    shutil.copytree(saved / folder, tmp_path / "step_4")
    (report,) = tailor.inspect(tmp_path / "step_4").checkpoints
    assert report.step == 4
    tailor.export(tmp_path / "step_4", tmp_path / "out", self_check="full")
    made, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(saved / "whole" / "model.safetensors")
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[name], value) for name, value in wanted.items())


def test_average__averages_shards(saved: Path, tmp_path: Path) -> None:
    for step in (4, 5):
        shutil.copytree(saved / "step_4", tmp_path / f"step_{step}")
    tailor.average([tmp_path / "step_4", tmp_path / "step_5"], tmp_path / "out", self_check="full")
    made, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(saved / "whole" / "model.safetensors")
    assert all(np.allclose(made[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("rank", [1, 2])
def test_open__refuses_one_shard(saved: Path, tmp_path: Path, rank: int) -> None:
    shard = saved / "step_4" / "model" / f"shard-0000{rank}-model-00001-of-00001.safetensors"
    whole = saved / "whole"
    recipe = {"merge_method": "linear", "models": [{"model": str(shard), "parameters": {"weight": 1}}]}
    calls: dict[str, Callable[[], object]] = {
        "merge": lambda: mergepipe.merge(recipe, tmp_path / "out"),
        "pack": lambda: mergepipe.pack(whole, [shard], tmp_path / "out"),
        "analyze": lambda: mergepipe.analyze(whole, [shard]),
    }
    for name, call in calls.items():
        with pytest.raises(MergePipeError) as caught:
            call()
        assert "holds one rank's part of each tensor" in str(caught.value), name


@pytest.mark.parametrize("rank", [1, 2])
def test_open__refuses_a_folder_that_lacks_a_rank(saved: Path, tmp_path: Path, rank: int) -> None:
    """Without the last rank, tensors that are cut along columns are read as narrower ones: shapes tell."""
    shutil.copytree(saved / "step_4" / "model", tmp_path / "step_4")
    (tmp_path / "step_4" / f"shard-0000{rank}-model-00001-of-00001.safetensors").unlink()
    config = {"model_type": "llama", "vocab_size": 11, "hidden_size": 4}
    (tmp_path / "step_4" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MergePipeError) as caught:
        tailor.export(tmp_path / "step_4", tmp_path / "out")
    assert ("none of rank 1" if rank == 1 else "embeddings are 11 x 4") in str(caught.value)
