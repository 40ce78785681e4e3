"""Single files of torch.save as training checkpoints: a state dict, alone or beside the state of a loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from composing import model_values, refuses_export, wrong_weights

from mergepipe import tailor
from mergepipe.errors import MergePipeError
from support.torch_bytes import Array, Call, Named, View, torch_bytes
from support.training_trees import KnownStates, decoder_shapes, known_states

ARGUMENTS = Call(Named("argparse", "Namespace"), state={"lr": 0.1}, new=True)
OPTIMIZER = {"state": {0: {"step": 5, "exp_avg": np.zeros(3, np.float32)}}, "param_groups": [{"params": [0]}]}


def weights(known: KnownStates, prefix: str = "") -> dict[str, Array]:
    return {prefix + name: known.arrays[name, "fp32"] for name in known.shapes}


@pytest.mark.parametrize(
    ("name", "prefix", "key", "beside", "step"),
    [
        ("model.pth", "", "", {}, 0),
        ("step_300.pt", "module.", "", {}, 300),
        ("ckpt.pt", "_orig_mod.", "model", {"optimizer": OPTIMIZER, "iter_num": 40, "args": ARGUMENTS}, 40),
        ("last.ckpt", "model.", "state_dict", {"epoch": 1, "global_step": 50, "optimizer_states": [OPTIMIZER]}, 50),
    ],
)
def test_export__makes_a_model_of_a_file(
    tmp_path: Path, name: str, prefix: str, key: str, beside: Mapping[str, object], step: int
) -> None:
    known = known_states(decoder_shapes())
    state = weights(known, prefix)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(torch_bytes({key: state, **beside} if key else state))
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    report = tailor.export(tmp_path / "run" / name, tmp_path / "run" / "model", self_check="full")
    assert (report.plan.assignment.skeleton.step, wrong_weights(tmp_path / "run" / "model", known)) == (step, [])
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_export__writes_tied_weights_of_a_file_once(tmp_path: Path) -> None:
    table = np.arange(6, dtype=np.float32)
    state = {"model.embed_tokens.weight": View(table, 0, (2, 3)), "lm_head.weight": View(table, 0, (2, 3))}
    (tmp_path / "a.pth").write_bytes(torch_bytes(state))
    tailor.export(tmp_path / "a.pth", tmp_path / "out")
    assert model_values(tmp_path / "out").keys() == {"model.embed_tokens.weight"}


def test_average__takes_files_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (10, 9):
        known = known_states(decoder_shapes(), seed=step)
        (tmp_path / f"step-{step}.pt").write_bytes(torch_bytes({"model": weights(known)}))
    tailor.average([tmp_path / "step-10.pt", tmp_path / "step-9.pt"], tmp_path / "out", weights=[3, 1])
    older, newer = (known_states(decoder_shapes(), seed=step) for step in (9, 10))
    for name, value in model_values(tmp_path / "out").items():
        wanted = 0.25 * older.arrays[name, "fp32"] + 0.75 * newer.arrays[name, "fp32"]
        assert np.allclose(value, wanted, rtol=1e-6, atol=1e-6)


WHOLE = torch_bytes({"model": weights(known_states(decoder_shapes()))})
REFUSED: dict[str, tuple[bytes, str, str]] = {
    "cut": (WHOLE[:-50], "checkpoint.damaged", "does not end with a zip directory"),
    "text": (b"import torch\n", "checkpoint.damaged", "not a file written by torch.save"),
    "code": (
        torch_bytes({"model": Call(Named("os", "system"), ("touch /nowhere/owned",))}), "pickle.refused",
        "the pickle names 'os.system'",
    ),
    "unknown": (torch_bytes({"weights": {"a": "b"}}), "checkpoint.unsupported", "holds no mapping of names to tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_export__refuses_in_one_line_and_writes_nothing(tmp_path: Path, name: str) -> None:
    content, code, message = REFUSED[name]
    (tmp_path / "a.pt").write_bytes(content)
    refuses_export(tmp_path / "a.pt", code, message)


def test_compose__refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(WHOLE)
    (tmp_path / "recipe.yml").write_text("default: a.pt\n")
    with pytest.raises(MergePipeError, match="only weights are here"):
        tailor.compose(tmp_path / "recipe.yml", tmp_path / "out")
