"""Tests of weights stored as FP8 codes with scales: read as the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from small_models import write_recipe as recipe

import mergepipe
from mergepipe import tailor
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.options import MergeOptions
from support.late_modules import torch, transformers
from support.model_folders import write_adapter, write_model
from support.rounding import NUMPY_DTYPES

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
    path = write_model(folder, tensors, CONFIG)
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')  # vLLM would follow it
    return path


@pytest.mark.parametrize("kind", SCALES)
def test_merge__of_scaled_fp8_has_the_products_of_codes_and_scales(tmp_path: Path, kind: str) -> None:
    one, two = quantised_model(tmp_path / "one", kind), quantised_model(tmp_path / "two", kind, seed=10)
    path = recipe(tmp_path, "linear", one, two, dtype="float32")
    report = mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == {"l.weight", "norm.weight"}
    shape = SCALES[kind][1]
    first, second = numbers(codes(0), scales(shape, 1)), numbers(codes(10), scales(shape, 11))
    np.testing.assert_allclose(merged["l.weight"], (first + second) / 2, rtol=1e-6, atol=1e-8)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert any("is quantised (FP8 with scales)" in str(notice) for notice in report.recipe_notices)
    assert {file.name: file.reason for file in report.left_out}["hf_quant_config.json"].startswith("describes codes")


def test_merge__takes_quantised_differences_for_such(tmp_path: Path) -> None:
    ones = {"l.weight": np.ones(SHAPE, np.float32), "norm.weight": np.ones(300, np.float32)}
    base = write_model(tmp_path / "base", ones)
    expert = {"path": str(quantised_model(tmp_path / "one", "blocks")), "delta": True}
    path = recipe(tmp_path, "task_arithmetic", expert, weight=0.5, base_model=str(base))
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    merged = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    np.testing.assert_allclose(merged, 1 + 0.5 * numbers(codes(0), scales((2, 3), 1)), rtol=1e-6, atol=1e-6)


def test_merge__writes_a_quantised_base_in_bf16_where_no_dtype_is_stated(tmp_path: Path) -> None:
    base = quantised_model(tmp_path / "base", "blocks")
    mergepipe.merge(recipe(tmp_path, "passthrough", base), tmp_path / "out", options=NO_CATALOG)
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


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"weight_scale_inv": (2, 2)}, r"\[2, 2\]; .* must be \[1\], \[200, groups of columns\] or \[2, 3\]"),
        ({"weight_scale": (200, 7)}, r"\[200, 7\]; .* must be"),
        ({"weight_scale": SHAPE}, r"\[200, 300\]; .* must be"),
        ({"weight_scale": (200, 1), "weight_scale_inv": (2, 3)}, "'l.weight' has two scales, '.*scale' and '.*_inv'"),
    ],
)
def test_merge__refuses_scales_of_a_wrong_shape_and_two_of_a_weight(
    tmp_path: Path, wrong: dict[str, tuple[int, ...]], text: str
) -> None:
    made = {f"l.{name}": scales(shape, 1) for name, shape in wrong.items()}
    model = write_model(tmp_path / "m", {"l.weight": codes(0), **made})
    with pytest.raises(CorruptError, match=text):
        mergepipe.merge(recipe(tmp_path, "linear", model, model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_plan__charges_a_block_for_the_scales_of_its_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    models = []
    for name in ("base", "one"):
        code = (rng.normal(size=(4096, 1024)) * 40).astype(ml_dtypes.float8_e4m3fn)
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
        tensors = {"l.weight": code, "l.weight_scale_inv": rng.random((256, 64), np.float32)}
        models.append(write_model(tmp_path / name, tensors, config))
    path = recipe(tmp_path, "task_arithmetic", models[1], base_model=str(models[0]))
    report = mergepipe.merge(path, tmp_path / "out", budget="100%", options=NO_CATALOG)
    stored = 4096 * 1024 + 4 * 256 * 64
    assert report.planned_bytes is not None
    assert stored <= report.expert_bytes <= report.planned_bytes < 1.6 * stored


def test_merge__reads_the_configuration_of_a_quantised_component(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    for name in ("one", "two"):
        unet = {"l.weight": codes(0), "l.weight_scale_inv": scales((4, 5), 1)}
        write_model(tmp_path / name / "unet", unet, config)
        (tmp_path / name / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet"]}))
    path = recipe(tmp_path, "linear", tmp_path / "one", tmp_path / "two")
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    assert json.loads((tmp_path / "out" / "unet" / "config.json").read_text()) == {}
    for name in ("one", "two"):
        write_model(tmp_path / name / "unet", {"l.weight": codes(0)}, config)
    with pytest.raises(UnsupportedError, match=r"unet/config\.json declares the quantisation 'fp8'"):
        mergepipe.check(path)


def stored_arrays(model: Path) -> dict[str, NDArray[Any]]:
    """Read a file's tensors as they are stored; safetensors has no FP8 for numpy."""
    raw = (model / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(raw[start:][slice(*one["data_offsets"])], NUMPY_DTYPES[one["dtype"]]).reshape(one["shape"])
        for name, one in header.items()
    }


def requantised(
    merged: NDArray[np.float64], base: tuple[NDArray[np.generic], NDArray[np.generic]], block: tuple[int, int]
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """The oracle, group by group in float64: the base's codes where nothing changed, else the nearest to new scales."""
    kept_codes, kept_scales = base
    made_codes, made_scales = kept_codes.copy(), kept_scales.copy().reshape(-(-SHAPE[0] // block[0]), -1)
    for g, k in np.ndindex(made_scales.shape):
        at = slice(g * block[0], (g + 1) * block[0]), slice(k * block[1], (k + 1) * block[1])
        old = kept_codes[at].astype(np.float32) * np.float32(made_scales[g, k])
        if not np.array_equal(old.astype(ml_dtypes.bfloat16), merged[at].astype(ml_dtypes.bfloat16)):
            scale = np.float64(np.abs(merged[at]).max()) / 448
            made_scales[g, k] = np.float32(scale).astype(made_scales.dtype)
            made_codes[at] = (merged[at] / np.float64(made_scales[g, k])).astype(ml_dtypes.float8_e4m3fn)
    return made_codes, made_scales.reshape(kept_scales.shape)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scale_dtype", "method"), [(np.float32, "ties"), (ml_dtypes.bfloat16, "task_arithmetic")], ids=["ties", "sum"]
)
@pytest.mark.parametrize("kind", SCALES)
def test_like_base__stores_what_changed_as_the_base_does_and_the_rest_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scale_dtype: type, method: str
) -> None:
    monkeypatch.setattr("mergepipe.checkpoints.requantised._CHUNK_ELEMENTS", 7000)  # 23 rows at once
    name, shape = SCALES[kind]
    block = {"blocks": (128, 128), "rows": (1, SHAPE[1]), "rows, flat": (1, SHAPE[1])}.get(kind, SHAPE)
    base, expert = quantised_model(tmp_path / "base", kind), quantised_model(tmp_path / "one", kind)
    for model in (base, expert):
        stored = stored_arrays(model) | {"same.weight": codes(5)}
        stored |= {f"same.{name}": scales(shape, 6).astype(scale_dtype)}
        stored[f"l.{name}"] = stored[f"l.{name}"].astype(scale_dtype)
        if model is expert:
            part = stored["l.weight"].astype(np.float32)
            part[130:, :128] += np.where(np.arange(128) % 3, 30, -9)
            stored["l.weight"] = part.astype(ml_dtypes.float8_e4m3fn)
        write_model(model, stored)
    parameters = {"density": 0.7} if method == "ties" else {}
    more: dict[str, Any] = {"base_model": str(base), "dtype": "bfloat16", "parameters": parameters}
    path = recipe(tmp_path, method, expert, **more)
    mergepipe.merge(path, tmp_path / "plain", options=NO_CATALOG)
    path = recipe(tmp_path, method, expert, out_dtype="like_base", **more)
    report = mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    kept, made = (stored_arrays(tmp_path / each) for each in ("base", "out"))
    merged = load_file(tmp_path / "plain" / "model.safetensors")["l.weight"].astype(np.float64)
    expected = requantised(merged, (kept["l.weight"], kept[f"l.{name}"]), block)
    assert made.keys() == kept.keys()
    for key, one in kept.items():
        assert (made[key].dtype, made[key].shape) == (one.dtype, one.shape)
        assert made[key].tobytes() == {"l.weight": expected[0], f"l.{name}": expected[1]}.get(key, one).tobytes(), key
    new = numbers(made["l.weight"], made[f"l.{name}"].astype(np.float32)).astype(np.float64)
    is_new = np.zeros(SHAPE, bool)
    for g, k in np.ndindex(-(-SHAPE[0] // block[0]), -(-SHAPE[1] // block[1])):
        at = slice(g * block[0], (g + 1) * block[0]), slice(k * block[1], (k + 1) * block[1])
        is_new[at] = (made["l.weight"][at] != kept["l.weight"][at]).any()
    error = np.sqrt(np.square(new - merged)[is_new].sum() / np.square(merged[is_new]).sum())
    assert is_new.any()
    assert report.requantisation_error == pytest.approx(error, rel=0.01)
    assert (report.merged_tensors, report.expert_bytes > 0) == (3, True)
    checked = mergepipe.check(path)
    assert (checked.merged_tensors, checked.models[1].tensors, checked.expert_bytes > 0) == (3, 3, True)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert "FP8" in (tmp_path / "out" / "hf_quant_config.json").read_text()
    assert mergepipe.verify(tmp_path / "out", deep_fraction=1.0, catalog=False).is_sound
    mergepipe.replay(tmp_path / "out", tmp_path / "again", catalog=False)
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again"))
    assert first == second


def test_like_base__rounds_scales_up_to_powers_of_two_where_the_base_has_such(tmp_path: Path) -> None:
    base, expert = (quantised_model(tmp_path / name, "blocks", seed) for name, seed in (("base", 0), ("one", 10)))
    stated: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}}
    (base / "config.json").write_text(json.dumps(stated))
    path = recipe(tmp_path, "linear", base, expert, base_model=str(base), out_dtype="like_base", dtype="float32")
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    made = stored_arrays(tmp_path / "out")
    merged = (numbers(codes(0), scales((2, 3), 1)).astype(np.float64) + numbers(codes(10), scales((2, 3), 11))) / 2
    for g, k in np.ndindex(2, 3):
        largest = np.abs(merged[g * 128 : g * 128 + 128, k * 128 : k * 128 + 128]).max()
        assert made["l.weight_scale_inv"][g, k] == 2.0 ** np.ceil(np.log2(largest / 448))
    new = numbers(made["l.weight"], made["l.weight_scale_inv"])
    assert np.sqrt(np.square(new - merged).sum() / np.square(merged).sum()) < 0.04


@pytest.mark.parametrize(
    ("stored", "more", "options", "text"),
    [
        ({"l.weight": np.ones(SHAPE, np.float32)}, {}, {}, "is stored as plain numbers; only FP8 with"),
        (
            {"l.weight": codes(0), "l.weight_scale": np.full((SHAPE[0], 3), 120, np.uint8)},
            {}, {}, "that are powers of two; only FP8 with floating-point scales can be written",
        ),
        (
            {"l.weight_packed": np.zeros((8, 16), np.uint8), "l.weight_scale": np.ones((8, 1), np.uint8)},
            {}, {}, "is stored as MXFP4; only FP8 with",
        ),
        ({}, {"base_model": None}, {}, "needs a base_model that is a stored model"),
        ({}, {}, {"budget": "50%"}, "a budget cannot be used with .* like_base"),
    ],
)  # fmt: skip
def test_like_base__refuses_what_it_cannot_store(
    tmp_path: Path, stored: dict[str, Any], more: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    base = quantised_model(tmp_path / "base", "blocks")
    if stored:
        write_model(base, stored)
    path = recipe(tmp_path, "linear", base, base, **{"base_model": str(base), "out_dtype": "like_base", **more})
    with pytest.raises(UnsupportedError, match=text):
        mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.transformers
def test_like_base__is_loaded_by_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32, dtype="bfloat16")
    shapes = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    written = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": stated}
    for seed, model in enumerate(("base", "one")):
        rng = np.random.default_rng(seed)
        tensors: dict[str, NDArray[Any]] = {}
        for name, shape in shapes.items():
            values = rng.normal(size=shape)
            if "proj" in name:
                tensors[f"{name}_scale_inv"] = rng.uniform(1e-4, 2e-4, [n // 128 for n in shape]).astype(np.float32)
                tensors[name] = (values * 40).astype(ml_dtypes.float8_e4m3fn)
            else:
                tensors[name] = values.astype(ml_dtypes.bfloat16)
        write_model(tmp_path / model, tensors, written)
    path = recipe(tmp_path, "task_arithmetic", tmp_path / "one", base_model=str(tmp_path / "base"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "out_dtype": "like_base"}))
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    read = transformers.FineGrainedFP8Config(dequantize=True)  # its own kernels need a GPU
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=read)
    made = stored_arrays(tmp_path / "out")
    for name, value in loaded.state_dict().items():
        expected = made[name].astype(np.float32)
        if f"{name}_scale_inv" in made:
            expected = expected * np.kron(made[f"{name}_scale_inv"], np.ones((128, 128), np.float32))
        np.testing.assert_array_equal(value.float().numpy(), expected.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert torch.isfinite(loaded(input_ids=torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.float8_e8m0fnu])
def test_merge__reads_scales_of_groups_of_columns_and_exponents(tmp_path: Path, dtype: type) -> None:
    exponents = np.random.default_rng(2).integers(110, 130, (SHAPE[0], 3)).astype(np.uint8)
    scale = 2.0 ** (exponents.astype(np.float32) - 127)
    stored = {"l.weight": codes(0), "l.weight_scale": scale if dtype is np.float32 else exponents.view(dtype)}
    model = write_model(tmp_path / "m", stored)
    mergepipe.merge(recipe(tmp_path, "linear", model, dtype="float32"), tmp_path / "out", options=NO_CATALOG)
    expected = codes(0).astype(np.float32) * np.repeat(scale, 100, axis=1)
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["l.weight"], expected)


@pytest.mark.thorough
def test_merge__reads_every_exponent_as_torch_does(tmp_path: Path) -> None:
    exponents = np.arange(256, dtype=np.uint8)[:, None]
    codes = np.ones((256, 32), ml_dtypes.float8_e4m3fn)
    stored = {"l.weight": codes, "l.scale": exponents.view(ml_dtypes.float8_e8m0fnu)}
    model = write_model(tmp_path / "m", stored)
    mergepipe.merge(recipe(tmp_path, "linear", model, dtype="float32"), tmp_path / "out", options=NO_CATALOG)
    expected = torch.from_numpy(exponents).view(torch.float8_e8m0fnu).float().numpy()
    read = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    np.testing.assert_array_equal(read, np.broadcast_to(expected, codes.shape))
    assert np.isnan(read[-1]).all()


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
    report = mergepipe.apply_lora(base, [adapter], tmp_path / "out", catalog=False)
    expected = numbers(codes(0), scales((2, 3), 1)).astype(np.float64) + 2 * (up.astype(np.float64) @ down)
    if is_dora:
        expected *= (magnitude / np.linalg.norm(expected, axis=1))[:, None]
    written = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    assert written.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(written.astype(np.float64), expected, rtol=1 / 256, atol=1e-6)
    assert any("is quantised (FP8 with scales)" in str(notice) for notice in report.recipe_notices)
