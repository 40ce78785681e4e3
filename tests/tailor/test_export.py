"""One training checkpoint made a model: values of every format, the small files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from composing import FORMATS, hidden, model_values, refuses_export, tree, wrong_weights
from test_universal import write_universal

import mergepipe
from mergepipe import tailor
from mergepipe.errors import MergePipeError
from mergepipe.tailor.model_names import names_without_wrappers
from support.engine_views import write_partial
from support.slow_cases import slow_unless
from support.torch_bytes import Array, Call, Named, View, torch_bytes
from support.training_trees import (
    KnownStates,
    decay_groups,
    decoder_shapes,
    known_states,
    write_automodel,
    write_fsdp,
    write_titan,
    write_trainer_files,
    write_zero3,
)

STATES = ("fp32", "exp_avg", "exp_avg_sq")
CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 11, "hidden_size": 5, "torch_dtype": "float32"}


WRITERS: dict[str, Callable[[Path, KnownStates], None]] = {
    **FORMATS,
    "fsdp-full": partial(write_fsdp, full=True),
    "fsdp-sharded": partial(write_fsdp, full=False),
    "automodel": write_automodel,
    "titan-weights": partial(write_titan, weights_only=True),
    "universal-2": write_universal("zero2"),
    "universal-3": write_universal("zero3"),
    "weights": write_trainer_files,
    "partial": write_partial,
}


def is_fast(case: tuple[str, str | None]) -> bool:
    """Every format in one dtype, and every dtype from one format of each way to store values."""
    kind, dtype = case
    return dtype == "bfloat16" or kind in ("zero3", "dcp", "weights")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "dtype"), slow_unless(is_fast, product(WRITERS, ("float32", "bfloat16", "float16", None)))
)
def test_export__writes_the_masters_rounded_once(tmp_path: Path, kind: str, dtype: str | None) -> None:
    known = known_states(decoder_shapes(), step=9)
    WRITERS[kind](tmp_path / "at-9", known)
    before = tree(tmp_path)
    report = tailor.export(tmp_path / "at-9", tmp_path / "out", dtype=dtype, self_check="full", memory_bytes=32 << 20)
    made = model_values(tmp_path / "out")
    assert (made.keys(), hidden(tmp_path)) == (known.shapes.keys(), [])
    for name, value in made.items():
        wanted = known.arrays[name, "fp32"].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype or "f4")
        assert np.array_equal(value, wanted), name
        assert value.dtype == wanted.dtype
    assert {name: content for name, content in tree(tmp_path).items() if not name.startswith("out/")} == before
    assert report.manifest is not None
    assert report.manifest.self_check.elements == sum(array.size for array in made.values())
    assert mergepipe.verify(tmp_path / "out").damages == ()


def test_export__takes_masters_and_not_their_copies(tmp_path: Path) -> None:
    """The module's weights of a DeepSpeed checkpoint are changed: the model is made of the masters all the same."""
    known = known_states(decoder_shapes(), step=9)
    FORMATS["hf-zero2"](tmp_path / "at-9", known)
    path = tmp_path / "at-9" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-400:] = bytes(400)
    path.write_bytes(content)
    tailor.export(tmp_path / "at-9", tmp_path / "out")
    assert wrong_weights(tmp_path / "out", known) == []


@pytest.mark.parametrize("is_universal", [True, False])
def test_export__has_buffers_and_frozen_weights_of_stage_3(tmp_path: Path, *, is_universal: bool) -> None:
    known = known_states(decoder_shapes(), step=9)
    frozen = np.random.default_rng(5).standard_normal((3, 5)).astype(np.float32)
    more = {"model.layers.0.gate.bias": np.arange(4, dtype=np.float32), "model.projector.weight": frozen}
    buffers, fixed = ({name: more[name]} for name in more)
    write_zero3(tmp_path / "at-9", known, decay_groups(known.shapes), 2, buffers=buffers, frozen=fixed)
    if is_universal:
        (tmp_path / "recipe.yml").write_text("default: at-9\n")
        tailor.compose(tmp_path / "recipe.yml", tmp_path / "universal", export="universal")
    tailor.export(tmp_path / ("universal" if is_universal else "at-9"), tmp_path / "out", self_check="full")
    made = model_values(tmp_path / "out")
    assert made.keys() == {*known.shapes, *more}
    assert all(np.array_equal(made[name], array) for name, array in more.items())


@pytest.mark.parametrize("is_lent", [True, False])
def test_export__writes_an_ordinary_folder(tmp_path: Path, *, is_lent: bool) -> None:
    known = known_states(decoder_shapes(), step=9)
    FORMATS["hf-zero2"](tmp_path / "at-9", known)
    files = tmp_path / ("lender" if is_lent else "at-9")
    files.mkdir(exist_ok=True)
    (files / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": "/home/me/base"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (files / name).write_text("{}")
    tailor.export(tmp_path / "at-9", tmp_path / "out", dtype="bfloat16", config=files if is_lent else None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "generation_config.json", "mergepipe.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == CONFIG | {"torch_dtype": "bfloat16", "_name_or_path": "base"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "float32 masters of step 9 (deepspeed-zero), written as bfloat16" in card
    assert str(tmp_path) not in card + (tmp_path / "out" / "mergepipe.json").read_text()


LAYER = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("stored", "names"),
    [
        ([LAYER, "lm_head.weight"], [LAYER, "lm_head.weight"]),
        ([LAYER, "model.norm.weight"], [LAYER, "model.norm.weight"]),
        (["model." + LAYER, "model.lm_head.weight"], [LAYER, "lm_head.weight"]),
        (["net._orig_mod." + LAYER, "net._orig_mod.lm_head.weight"], [LAYER, "lm_head.weight"]),
        (["module." + LAYER, "module.lm_head.weight"], [LAYER, "lm_head.weight"]),
        (["_forward_module.model." + LAYER], [LAYER]),
        (["layers.0.attention.wq.weight", "output.weight"], ["layers.0.attention.wq.weight", "output.weight"]),
        (
            ["language_model." + LAYER, "vision_tower.norm.weight"],
            ["language_model." + LAYER, "vision_tower.norm.weight"],
        ),
        (["a.weight", "_orig_mod.a.weight"], ["a.weight", "_orig_mod.a.weight"]),
    ],
)
def test_names_without_wrappers__are_the_models_own(stored: list[str], names: list[str]) -> None:
    assert names_without_wrappers(stored) == dict(zip(names, stored, strict=True))


@pytest.mark.parametrize("kind", ["zero2", "zero3-saved"])
def test_export__gives_weights_the_models_own_names(tmp_path: Path, kind: str) -> None:
    """As Lightning keeps them: the attribute of a module, in a tag directory beside `latest`."""
    known = known_states(decoder_shapes(), step=9)
    wrapped = {f"model._orig_mod.{name}": name for name in known.shapes}
    arrays = {(name, kind): known.arrays[own, kind] for name, own in wrapped.items() for kind in STATES}
    shapes = {name: known.shapes[own] for name, own in wrapped.items()}
    FORMATS[kind](tmp_path / "at-9", KnownStates(shapes, arrays, 9))
    (tmp_path / "at-9" / "config.json").write_text(json.dumps(CONFIG))
    tailor.export(tmp_path / "at-9", tmp_path / "out", self_check="full")
    assert wrong_weights(tmp_path / "out", known) == []


def test_export__cuts_a_large_model_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergepipe.tailor.averaging.SHARD_BYTES", 600)
    known = known_states(decoder_shapes(), step=9)
    FORMATS["zero3"](tmp_path / "at-9", known)
    tailor.export(tmp_path / "at-9", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert (set(index["weight_map"]), len(set(index["weight_map"].values())) > 2) == (set(known.shapes), True)
    assert wrong_weights(tmp_path / "out", known) == []


def _without_rank(folder: Path) -> None:
    max(folder.glob("*optim*")).unlink()


def _cut_chunks(folder: Path) -> None:
    """Leave out the last bytes of a file, of which no weight may be the owner."""
    path = max(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-20])


def _without_file(folder: Path) -> None:
    max(folder.glob("*.distcp")).unlink()


def _other_config(key: str, number: int, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {key: number}))


def _foreign(folder: Path) -> None:
    (folder / "model_optim_rng.pt").write_bytes(b"")


REFUSED: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    "rank": ("zero2", _without_rank, "checkpoint.mismatch", "lacks the optimizer file of rank 2"),
    "chunks": ("dcp", _without_file, "checkpoint.mismatch", "lacks file __1_0.distcp"),
    "cut-chunks": ("dcp", _cut_chunks, "checkpoint.damaged", "__1_0.distcp: has "),
    "unit": ("lacks-norm", lambda _: None, "checkpoint.mismatch", "lacks norm: not saved"),
    "layers": ("zero2", partial(_other_config, "num_hidden_layers", 4), "checkpoint.mismatch", "says 4 layers"),
    "width": ("zero2", partial(_other_config, "hidden_size", 8), "checkpoint.mismatch", "says that embeddings are"),
    "foreign": ("zero2", _foreign, "checkpoint.unsupported", "is a Megatron checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_export__refuses_in_one_line_and_writes_nothing(tmp_path: Path, name: str) -> None:
    kind, damage, code, message = REFUSED[name]
    write = partial(write_partial, lacks="norm") if kind == "lacks-norm" else FORMATS[kind]
    write(tmp_path / "at-9", known_states(decoder_shapes(), step=9))
    damage(tmp_path / "at-9")
    refuses_export(tmp_path / "at-9", code, message)


# --- single files of torch.save: a state dict, alone or beside the state of a loop


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
REFUSED_FILES: dict[str, tuple[bytes, str, str]] = {
    "cut": (WHOLE[:-50], "checkpoint.damaged", "does not end with a zip directory"),
    "text": (b"import torch\n", "checkpoint.damaged", "not a file written by torch.save"),
    "code": (
        torch_bytes({"model": Call(Named("os", "system"), ("touch /nowhere/owned",))}), "pickle.refused",
        "the pickle names 'os.system'",
    ),
    "unknown": (torch_bytes({"weights": {"a": "b"}}), "checkpoint.unsupported", "has no mapping of names to tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_export__of_a_file_refuses_in_one_line_and_writes_nothing(tmp_path: Path, name: str) -> None:
    content, code, message = REFUSED_FILES[name]
    (tmp_path / "a.pt").write_bytes(content)
    refuses_export(tmp_path / "a.pt", code, message)


def test_compose__refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(WHOLE)
    (tmp_path / "recipe.yml").write_text("default: a.pt\n")
    with pytest.raises(MergePipeError, match="only weights are here"):
        tailor.compose(tmp_path / "recipe.yml", tmp_path / "out")
