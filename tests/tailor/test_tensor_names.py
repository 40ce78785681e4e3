"""Models of torchtitan's names: Hugging Face names, and rows of Q and K in the order that transformers rotates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from composing import hidden
from safetensors.numpy import load_file

from mergepipe import tailor
from mergepipe.errors import MergePipeError
from mergepipe.tailor import Averager
from support.training_trees import KnownStates, known_states, write_titan

HEAD, WIDTH = 6, 12
LAYER = {
    "attention.{}wq": (2 * HEAD, WIDTH), "attention.{}wk": (HEAD, WIDTH), "attention.{}wv": (HEAD, WIDTH),
    "attention.wo": (WIDTH, 2 * HEAD), "feed_forward.w1": (10, WIDTH), "feed_forward.w2": (WIDTH, 10),
    "feed_forward.w3": (10, WIDTH), "attention_norm": (WIDTH,), "ffn_norm": (WIDTH,),
}  # fmt: skip
NAMES = {
    "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
    "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
CONFIG = {"model_type": "llama", "hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2}


def titan_states(step: int = 9, *, folder: str = "", head: str = "output") -> KnownStates:
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (37, WIDTH), "norm.weight": (WIDTH,)}
    shapes |= {f"layers.{n}.{k.format(folder)}.weight": shape for n in range(2) for k, shape in LAYER.items()}
    return known_states(shapes | {f"{head}.weight": (37, WIDTH)}, seed=step, step=step)


def config_of(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def rotated_pairs(vectors: np.ndarray, place: int) -> np.ndarray:
    """Rotate rows (2j, 2j + 1) of a head as complex numbers, which is the definition that torchtitan follows."""
    angles = place * 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    turned = (vectors[0::2] + 1j * vectors[1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=1).reshape(-1)


def rotated_halves(vectors: np.ndarray, place: int) -> np.ndarray:
    """Rotate rows j and j + half, as transformers does: x cos + rotate_half(x) sin."""
    angles = np.tile(place * 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD), 2)
    turned = np.concatenate([-vectors[HEAD // 2 :], vectors[: HEAD // 2]])
    return np.asarray(vectors * np.cos(angles) + turned * np.sin(angles))


@pytest.mark.thorough
@pytest.mark.parametrize(("folder", "head"), [("", "output"), ("qkv_linear.", "lm_head")])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_export__names_and_rotates_a_llama_of_torchtitan(
    tmp_path: Path, folder: str, head: str, world_size: int
) -> None:
    known = titan_states(folder=folder, head=head)
    write_titan(tmp_path / "at-9", known, world_size)
    tailor.export(tmp_path / "at-9", tmp_path / "out", config=config_of(tmp_path / "config"), self_check="full")
    made = load_file(tmp_path / "out" / "model.safetensors")
    stored = {name: known.arrays[name, "fp32"] for name in known.shapes}
    assert len(made) == len(stored)
    assert np.array_equal(made["model.embed_tokens.weight"], stored["tok_embeddings.weight"])
    assert np.array_equal(made["lm_head.weight"], stored[f"{head}.weight"])
    for key in (k for k in LAYER if not k.endswith(("wq", "wk"))):
        name = f"model.layers.1.{NAMES[key.rpartition('.')[2].removeprefix('{}')]}.weight"
        assert np.array_equal(made[name], stored[f"layers.1.{key.format(folder)}.weight"]), name
    token = np.random.default_rng(4).standard_normal(WIDTH)
    queries, keys = (made[f"model.layers.1.self_attn.{n}_proj.weight"].astype(float) @ token for n in "qk")
    titan = [stored[f"layers.1.attention.{folder}{n}.weight"].astype(float) @ token for n in ("wq", "wk")]
    for number in range(2):
        rows = slice(number * HEAD, number * HEAD + HEAD)
        score = rotated_halves(queries[rows], 7) @ rotated_halves(keys, 3)
        wanted = rotated_pairs(titan[0][rows], 7) @ rotated_pairs(titan[1], 3)
        assert score == pytest.approx(wanted, rel=1e-9)
    assert hidden(tmp_path) == []


def test_export__leaves_the_rows_of_a_qwen3_and_the_names_of_others(tmp_path: Path) -> None:
    known = titan_states()
    write_titan(tmp_path / "at-9", known)
    tailor.export(tmp_path / "at-9", tmp_path / "qwen", config=config_of(tmp_path / "c3", model_type="qwen3"))
    made = load_file(tmp_path / "qwen" / "model.safetensors")
    stored = known.arrays["layers.0.attention.wq.weight", "fp32"]
    assert np.array_equal(made["model.layers.0.self_attn.q_proj.weight"], stored)
    tailor.export(tmp_path / "at-9", tmp_path / "other", config=config_of(tmp_path / "c4", model_type="other"))
    assert set(load_file(tmp_path / "other" / "model.safetensors")) == set(known.shapes)


@pytest.mark.parametrize("names", [("w1", "w2", "w3", "expert_bias"), ("w1_EFD", "w2_EDF", "w3_EFD", "expert_bias_E")])
def test_export__unstacks_the_experts_of_a_qwen3_of_torchtitan(tmp_path: Path, names: tuple[str, ...]) -> None:
    shapes = {n: s for n, s in titan_states().shapes.items() if "layers.1.feed_forward" not in n}
    sizes = ((4, 5, WIDTH), (4, WIDTH, 5), (4, 5, WIDTH))
    shapes |= {f"layers.1.moe.experts.{name}": size for name, size in zip(names, sizes, strict=False)}
    shapes |= {"layers.1.moe.router.gate.weight": (4, WIDTH), f"layers.1.moe.{names[3]}": (4,)}
    known = known_states(shapes, seed=9, step=9)
    write_titan(tmp_path / "at-9", known, 3)
    config = config_of(tmp_path / "config", model_type="qwen3_moe")
    report = tailor.export(tmp_path / "at-9", tmp_path / "out", config=config, self_check="full")
    assert any("expert_bias is left out" in notice for notice in report.plan.notices)
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert len(made) == len(shapes) - 4 + 3 * 4
    assert np.array_equal(
        made["model.layers.1.mlp.gate.weight"], known.arrays["layers.1.moe.router.gate.weight", "fp32"]
    )
    for stored, projection in zip(names, ("gate_proj", "down_proj", "up_proj"), strict=False):
        experts = known.arrays[f"layers.1.moe.experts.{stored}", "fp32"]
        for number in range(4):
            tensor = made[f"model.layers.1.mlp.experts.{number}.{projection}.weight"]
            assert np.array_equal(tensor, experts[number])


def test_average__of_torchtitan_is_rotated_once(tmp_path: Path) -> None:
    config, paths = config_of(tmp_path / "config"), [tmp_path / f"at-{step}" for step in (3, 5, 9)]
    for path, step in zip(paths, (3, 5, 9), strict=True):
        write_titan(path, titan_states(step))
    tailor.average(paths, tmp_path / "out", config=config, self_check="full")
    with Averager(tmp_path / "running", config=config) as averager:
        for path in paths:
            averager.fold(path)
    tailor.export(paths[0], tmp_path / "first", config=config)
    made, running = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "running"))
    assert made.keys() == load_file(tmp_path / "first" / "model.safetensors").keys()
    rows = [*range(0, HEAD, 2), *range(1, HEAD, 2)]
    stored = np.mean([titan_states(s).arrays["layers.0.attention.wk.weight", "fp32"] for s in (3, 5, 9)], axis=0)
    np.testing.assert_allclose(made["model.layers.0.self_attn.k_proj.weight"], stored[rows], rtol=0, atol=1e-6)
    for name, array in made.items():
        np.testing.assert_allclose(running[name], array, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "changes", [{"head_dim": 5}, {"head_dim": 8}, {"head_dim": "6"}, {"num_attention_heads": None}]
)
def test_export__refuses_heads_that_are_none_of_the_model(tmp_path: Path, changes: dict[str, object]) -> None:
    write_titan(tmp_path / "at-9", titan_states())
    with pytest.raises(MergePipeError, match="heads of"):
        tailor.export(tmp_path / "at-9", tmp_path / "out", config=config_of(tmp_path / "config", **changes))
    assert (hidden(tmp_path), (tmp_path / "out").exists()) == ([], False)
