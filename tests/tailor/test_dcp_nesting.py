"""Tests of DCP checkpoints as torch writes them, whose weights lie in nested mappings: none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from mergepipe import tailor

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")


def ones(*shape: int) -> Any:
    return torch.ones(*shape)


def adam(*names: str) -> dict[str, Any]:
    return {name: {"step": torch.tensor(3.0), "exp_avg": ones(2, 2), "exp_avg_sq": ones(2, 2)} for name in names}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"model": {"enc": {"w": ones(4, 4)}, "dec": {"w": ones(8, 8)}}}, {"enc.w", "dec.w"}),
        ({"model": {"w": ones(2, 2)}, "ema": {"w": ones(2, 2), "n": ones(1)}}, {"w"}),
        (
            {
                "model": {"enc": {"w": ones(2, 2)}, "frozen": {"w": torch.zeros(2, 2)}},
                "optim": {"state": adam("enc.w")},
            },
            {"enc.w", "frozen.w"},
        ),
        ({"w": ones(2, 2), "optim": {"state": adam("w")}, "train_state": {"step": torch.tensor(3)}}, {"w"}),
    ],
)
def test_export__has_the_weights_of_nested_mappings(tmp_path: Path, content: dict[str, Any], names: set[str]) -> None:
    dcp.save(content, checkpoint_id=str(tmp_path / "step-3"), no_dist=True)
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    tailor.export(tmp_path / "step-3", tmp_path / "out", config=config)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


@pytest.mark.filterwarnings("ignore")
def test_export__of_an_asynchronous_save_is_that_of_a_synchronous_one(tmp_path: Path) -> None:
    content = {"model": {"w": torch.arange(12.0).reshape(4, 3)}, "optim": {"state": adam("w")}}
    content["optim"]["state"]["w"] |= {"exp_avg": ones(4, 3), "exp_avg_sq": ones(4, 3)}
    dcp.save(content, checkpoint_id=str(tmp_path / "sync-3"), no_dist=True)
    dcp.async_save(content, checkpoint_id=str(tmp_path / "async-3"), no_dist=True).result()
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    for name in ("sync-3", "async-3"):
        tailor.export(tmp_path / name, tmp_path / f"out-{name}", config=config, self_check="full")
    kept = [(tmp_path / name / "__0_0.distcp").stat().st_size for name in ("sync-3", "async-3")]
    made = [(tmp_path / f"out-{name}" / "model.safetensors").read_bytes() for name in ("sync-3", "async-3")]
    assert (kept[0], made[0]) == (kept[1], made[1])
    opened = [tailor.inspect(tmp_path / name).checkpoints[0] for name in ("sync-3", "async-3")]
    assert (opened[0].units, opened[0].step, opened[0].missing) == (opened[1].units, 3, ())
