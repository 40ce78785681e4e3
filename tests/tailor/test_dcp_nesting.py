"""Tests of DCP checkpoints as torch writes them, whose weights lie in nested mappings: none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mergepipe import tailor
from support.late_modules import LateModule, torch

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]
dcp: Any = LateModule("torch.distributed.checkpoint")
W = np.ones((2, 2), np.float32)


def adam(*names: str) -> dict[str, Any]:
    return {name: {"step": 3.0, "exp_avg": W, "exp_avg_sq": W} for name in names}


def tensors(content: Any) -> Any:
    """The same nested mappings with torch tensors in place of arrays."""
    if isinstance(content, dict):
        return {key: tensors(value) for key, value in content.items()}
    return torch.tensor(content)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"model": {"enc": {"w": W}, "dec": {"w": np.ones((8, 8), np.float32)}}}, {"enc.w", "dec.w"}),
        ({"model": {"w": W}, "ema": {"w": W, "n": W[0]}}, {"w"}),
        (
            {"model": {"enc": {"w": W}, "frozen": {"w": 0 * W}}, "optim": {"state": adam("enc.w")}},
            {"enc.w", "frozen.w"},
        ),
        ({"w": W, "optim": {"state": adam("w")}, "train_state": {"step": 3}}, {"w"}),
    ],
)
def test_export__has_the_weights_of_nested_mappings(tmp_path: Path, content: dict[str, Any], names: set[str]) -> None:
    dcp.save(tensors(content), checkpoint_id=str(tmp_path / "step-3"), no_dist=True)
    tailor.export(tmp_path / "step-3", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


def test_export__of_an_asynchronous_save_is_that_of_a_synchronous_one(tmp_path: Path) -> None:
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    content = tensors({"model": {"w": w}, "optim": {"state": {"w": {"step": 3.0, "exp_avg": w, "exp_avg_sq": w}}}})
    dcp.save(content, checkpoint_id=str(tmp_path / "sync-3"), no_dist=True)
    dcp.async_save(content, checkpoint_id=str(tmp_path / "async-3"), no_dist=True).result()
    for name in ("sync-3", "async-3"):
        tailor.export(tmp_path / name, tmp_path / f"out-{name}", self_check="full")
    kept = [(tmp_path / name / "__0_0.distcp").stat().st_size for name in ("sync-3", "async-3")]
    made = [(tmp_path / f"out-{name}" / "model.safetensors").read_bytes() for name in ("sync-3", "async-3")]
    assert (kept[0], made[0]) == (kept[1], made[1])
    opened = [tailor.inspect(tmp_path / name).checkpoints[0] for name in ("sync-3", "async-3")]
    assert (opened[0].units, opened[0].step, opened[0].missing) == (opened[1].units, 3, ())
