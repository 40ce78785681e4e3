"""Extracted adapters: as good as the best of their rank, read back as experts, honest about what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.jobs.extract_lora import EXACT_SIDE, truncated_svd
from mergepipe.runs.adapters import target_modules

Q, DOWN, NORM, EMBED = (
    "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight",
    "model.embed_tokens.weight",
)  # fmt: skip


def spectrum(shape: tuple[int, ...], values: NDArray[np.float64]) -> NDArray[np.float32]:
    """A matrix of these singular values."""
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.standard_normal((shape[0], len(values))))[0]
    right = np.linalg.qr(rng.standard_normal((shape[1], len(values))))[0]
    return np.asarray((left * values) @ right.T, np.float32)


@pytest.mark.parametrize("shape", [(40, 64), (EXACT_SIDE + 132, EXACT_SIDE + 32)])
def test_truncated_svd__is_nearly_the_best_of_its_rank(shape: tuple[int, int]) -> None:
    values = 1.0 / np.arange(1, 37)
    matrix = spectrum(shape, values)
    factors = truncated_svd(matrix, 8, None, seed=1)
    best = np.sqrt(np.sum(values[8:] ** 2))
    measured = np.linalg.norm(matrix.astype(np.float64) - factors.up_MR.astype(np.float64) @ factors.down_RN)
    assert factors.rank == 8
    assert best * (1 - 1e-5) <= measured <= best * 1.005
    assert factors.error == pytest.approx(measured, rel=1e-4)
    assert factors.norm == pytest.approx(np.sqrt(np.sum(values**2)), rel=1e-5)


@pytest.mark.parametrize("shape", [(40, 64), (EXACT_SIDE + 132, EXACT_SIDE + 32)])
def test_truncated_svd__takes_no_more_than_an_energy_needs(shape: tuple[int, int]) -> None:
    values = np.concatenate([np.full(36, 1.0), np.full(4, 0.01)])
    factors = truncated_svd(spectrum(shape, values), None, 0.95, seed=1)
    assert factors.rank == int(np.ceil(0.95 * np.sum(values**2)))
    assert factors.relative_error**2 <= 0.05


def write_pair(root: Path) -> tuple[Path, Path]:
    """A base, and a model that differs by rank two in two matrices, and in its embedding and norm."""
    rng = np.random.default_rng(5)
    shapes = {Q: (16, 16), DOWN: (16, 24), NORM: (16,), EMBED: (32, 16), "model.layers.0.mlp.up_proj.weight": (24, 16)}
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = dict(base)
    for name in (Q, DOWN):
        model[name] = base[name] + spectrum(shapes[name], np.array([0.5, 0.2]))
    model[NORM], model[EMBED] = base[NORM] + 0.01, base[EMBED] * 1.01
    for folder, tensors in ((root / "base", base), (root / "model", model)):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return root / "base", root / "model"


def test_extract_lora__an_embedding_with_added_tokens_is_saved_in_full(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors[EMBED] = np.concatenate([tensors[EMBED], np.full((8, 16), 0.25, np.float32)])
    save_file(tensors, model / "model.safetensors")
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", rank=2, save_modules=True)
    assert sorted(report.saved_modules) == ["model.embed_tokens", "model.norm"]
    mergepipe.apply_lora(base, [tmp_path / "lora"], tmp_path / "out", catalog=False)
    made = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in tensors.items():
        np.testing.assert_allclose(made[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_extract_lora__the_adapter_makes_the_model_again(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", rank=2, save_modules=True, base_model_id="org/base")
    assert sorted(tensor.name for tensor in report.tensors) == sorted((Q, DOWN))
    assert sorted(report.saved_modules) == ["model.embed_tokens", "model.norm"]
    assert (report.left, report.relative_error < 1e-5) == ((), True)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 2, "org/base")
    assert config["target_modules"] == ["down_proj", "q_proj"]
    recipe = {
        "merge_method": "linear",
        "models": [{"model": f"{base}+{tmp_path}/lora", "parameters": {"weight": 1}}],
        "dtype": "float32",
    }
    mergepipe.merge(recipe, tmp_path / "merged")
    made, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", model))
    assert all(np.allclose(made[name], wanted[name], atol=1e-6) for name in wanted)
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in (tmp_path / "lora").iterdir())


def test_extract_lora__names_what_it_leaves(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", energy=0.8)
    assert {tensor.name: tensor.rank for tensor in report.tensors} == {Q: 1, DOWN: 1}
    assert [left.name for left in report.left] == [EMBED, NORM]
    a, b = (load_file(folder / "model.safetensors") for folder in (base, model))
    deltas = {name: np.linalg.norm(b[name].astype(np.float64) - a[name]) ** 2 for name in a}
    left = deltas[EMBED] + deltas[NORM] + 2 * 0.2**2
    assert report.relative_error == pytest.approx(np.sqrt(left / sum(deltas.values())), rel=1e-4)


def test_extract_lora__takes_no_embedding_for_a_linear_layer(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    names = ("transformer.wpe.weight", "bert.embeddings.position_embeddings.weight", "model.embed_positions.weight")
    for folder, value in ((base, 0.0), (model, 1.0)):
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: np.full((8, 4), value, np.float32) for name in names}, folder / "model.safetensors")
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", rank=1)
    assert {tensor.name for tensor in report.tensors} == {Q, DOWN}
    assert {left.name for left in report.left} == {EMBED, NORM, *names}


def test_target_modules__are_named_in_full_where_a_last_name_means_others_too() -> None:
    modules = ["a.0.q", "a.1.q", "a.0.v", "a.1.v"]
    assert target_modules(["a.0.q", "a.1.q", "a.1.v"], modules) == ["q", "a.1.v"]
