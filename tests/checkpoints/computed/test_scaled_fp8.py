"""Tests of weights stored as FP8 codes with scales: read as the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from small_models import write_adapter, write_model

import mergepipe
from mergepipe import tailor
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.options import MergeOptions, OutputOptions

NO_CATALOG = MergeOptions(catalog=False)
SHAPE = (200, 300)  # the last block of rows and of columns is cut
CONFIG = {"model_type": "x", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
SCALES = {
    "tensor": ("weight_scale", ()),
    "one": ("weight_scale", (1,)),
    "rows": ("weight_scale", (SHAPE[0], 1)),
    "rows, flat": ("weight_scale", (SHAPE[0],)),
    "blocks": ("weight_scale_inv", (2, 3)),
}


def codes(seed: int) -> NDArray[np.generic]:
    values = np.random.default_rng(seed).normal(size=SHAPE) * 40
    return values.astype(ml_dtypes.float8_e4m3fn)


def scales(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(1e-3, 2e-3, shape).astype(np.float32)


def numbers(code: NDArray[np.generic], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """The oracle: every scale spread over the elements that share it, one product in float32."""
    if scale.ndim == 2 and scale.shape != (SHAPE[0], 1):
        spread = np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)[: SHAPE[0], : SHAPE[1]]
    else:
        spread = scale.reshape(-1, 1)
    return code.astype(np.float32) * spread


def quantised_model(folder: Path, kind: str, seed: int = 0) -> Path:
    name, shape = SCALES[kind]
    tensors = {
        "l.weight": codes(seed), f"l.{name}": scales(shape, seed + 1), "l.input_scale": np.float32(0.5).reshape(1),
        "norm.weight": np.ones(300, ml_dtypes.bfloat16),
    }  # fmt: skip
    path = write_model(folder, tensors)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def recipe(folder: Path, method: str, *models: Path, **more: object) -> Path:
    path = folder / "recipe.yml"
    listed = [{"model": str(model), "parameters": {"weight": 1.0}} for model in models]
    path.write_text(json.dumps({"merge_method": method, "models": listed, **more}))
    return path


@pytest.mark.parametrize("kind", SCALES)
def test_merge__of_scaled_fp8_has_the_products_of_codes_and_scales(tmp_path: Path, kind: str) -> None:
    one, two = quantised_model(tmp_path / "one", kind), quantised_model(tmp_path / "two", kind, seed=10)
    report = mergepipe.merge(
        recipe(tmp_path, "linear", one, two, dtype="float32"), tmp_path / "out", options=NO_CATALOG
    )
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == {"l.weight", "norm.weight"}
    shape = SCALES[kind][1]
    first, second = numbers(codes(0), scales(shape, 1)), numbers(codes(10), scales(shape, 11))
    np.testing.assert_allclose(merged["l.weight"], (first + second) / 2, rtol=1e-6, atol=1e-8)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert any("is quantised (FP8 with scales)" in str(notice) for notice in report.recipe_notices)


def test_merge__writes_a_quantised_base_in_bf16_where_no_dtype_is_stated(tmp_path: Path) -> None:
    base = quantised_model(tmp_path / "base", "blocks")
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps({"merge_method": "passthrough", "models": [{"model": str(base)}]}))
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    written = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    expected = numbers(codes(0), scales((2, 3), 1)).astype(ml_dtypes.bfloat16)
    assert written.dtype == ml_dtypes.bfloat16
    assert written.tobytes() == expected.tobytes()


def test_merge__of_a_quantised_expert_stays_within_its_budget(tmp_path: Path) -> None:
    base, one = quantised_model(tmp_path / "base", "blocks"), quantised_model(tmp_path / "one", "blocks", seed=10)
    path = recipe(tmp_path, "task_arithmetic", one, base_model=str(base), dtype="float32")
    options = MergeOptions(catalog=False, block_elements=16384)
    report = mergepipe.merge(path, tmp_path / "out", budget="60%", options=options)
    assert report.planned_bytes is not None
    assert 0 < report.expert_bytes <= report.planned_bytes
    first, second = numbers(codes(0), scales((2, 3), 1)), numbers(codes(10), scales((2, 3), 11))
    changed = load_file(tmp_path / "out" / "model.safetensors")["l.weight"] != first
    assert 0 < changed.mean() < 1
    full = mergepipe.merge(path, tmp_path / "full", budget="100%", options=options)
    assert full.expert_bytes <= report.planned_bytes * 2
    merged = load_file(tmp_path / "full" / "model.safetensors")["l.weight"]
    np.testing.assert_allclose(merged, second, rtol=1e-5, atol=1e-7)


def test_merge__refuses_a_packed_expert_of_a_quantised_base(tmp_path: Path) -> None:
    base, one = quantised_model(tmp_path / "base", "blocks"), quantised_model(tmp_path / "one", "blocks", seed=10)
    mergepipe.pack(base, [one], tmp_path / "packed")
    path = recipe(tmp_path, "task_arithmetic", tmp_path / "packed" / "one", base_model=str(base))
    with pytest.raises(UnsupportedError, match=r"is packed, and its base .* is quantised"):
        mergepipe.check(path)


def test_merge__refuses_scales_of_a_wrong_shape(tmp_path: Path) -> None:
    tensors = {"l.weight": codes(0), "l.weight_scale_inv": scales((2, 2), 1)}
    model = write_model(tmp_path / "m", tensors)
    with pytest.raises(CorruptError, match=r"has the shape \[2, 2\]; .* it must be \[1\], \[200, 1\] or \[2, 3\]"):
        mergepipe.check(recipe(tmp_path, "linear", model, model))


def test_plan__charges_a_block_for_the_scales_of_its_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    models = []
    for name in ("base", "one"):
        code = (rng.normal(size=(4096, 1024)) * 40).astype(ml_dtypes.float8_e4m3fn)
        model = write_model(
            tmp_path / name, {"l.weight": code, "l.weight_scale_inv": rng.random((256, 64), np.float32)}
        )
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
        (model / "config.json").write_text(json.dumps(config))
        models.append(model)
    path = recipe(tmp_path, "task_arithmetic", models[1], base_model=str(models[0]))
    report = mergepipe.merge(path, tmp_path / "out", budget="100%", options=NO_CATALOG)
    stored = 4096 * 1024 + 4 * 256 * 64
    assert report.planned_bytes is not None
    assert stored <= report.expert_bytes <= report.planned_bytes < 1.6 * stored


def test_merge__reads_the_configuration_of_a_quantised_component(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    for name in ("one", "two"):
        unet = {"l.weight": codes(0), "l.weight_scale_inv": scales((4, 5), 1)}
        write_model(tmp_path / name / "unet", unet)
        (tmp_path / name / "unet" / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet"]}))
    path = recipe(tmp_path, "linear", tmp_path / "one", tmp_path / "two")
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    assert json.loads((tmp_path / "out" / "unet" / "config.json").read_text()) == {}
    for name in ("one", "two"):
        write_model(tmp_path / name / "unet", {"l.weight": codes(0)})
        (tmp_path / name / "unet" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"unet/config\.json declares the quantisation 'fp8'"):
        mergepipe.check(path)


def test_average__refuses_codes(tmp_path: Path) -> None:
    models = [quantised_model(tmp_path / name, "blocks") for name in ("one", "two")]
    with pytest.raises(UnsupportedError, match="shows that the weights are quantised"):
        tailor.average(models, tmp_path / "out")


@pytest.mark.parametrize("is_dora", [False, True])
def test_lora_apply__adds_to_the_numbers_of_a_quantised_base(tmp_path: Path, *, is_dora: bool) -> None:
    base, rng = quantised_model(tmp_path / "base", "blocks"), np.random.default_rng(1)
    rows, columns = codes(0).shape
    down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, columns), (rows, 4)))
    magnitude = np.linspace(1, 2, rows, dtype=np.float32)
    tensors = {"l.lora_A.weight": down, "l.lora_B.weight": up}
    more: dict[str, NDArray[np.float32]] = {"l.lora_magnitude_vector": magnitude} if is_dora else {}
    adapter = write_adapter(tmp_path / "adapter", {**tensors, **more}, use_dora=is_dora)
    report = mergepipe.apply_lora(base, [adapter], tmp_path / "out", options=OutputOptions(catalog=False))
    expected = numbers(codes(0), scales((2, 3), 1)).astype(np.float64) + 2 * (up.astype(np.float64) @ down)
    if is_dora:
        expected *= (magnitude / np.linalg.norm(expected, axis=1))[:, None]
    written = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    assert written.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(written.astype(np.float64), expected, rtol=1 / 256, atol=1e-6)
    assert any("is quantised (FP8 with scales)" in str(notice) for notice in report.recipe_notices)
