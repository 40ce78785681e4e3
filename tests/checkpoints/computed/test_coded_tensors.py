"""Weights of codes of every scheme: their numbers, budgets of stored bytes, and what is refused."""

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
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.options import MergeOptions
from support.coded_weights import COLUMNS, GROUP, ROWS, SCHEMES, Tensors, codes_of, gptq, model, packed
from support.late_modules import LateModule, torch
from support.model_folders import write_adapter

NO_CATALOG = MergeOptions(catalog=False, block_elements=16384)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_merge__of_codes_has_their_numbers_and_reads_stored_bytes_within_its_budget(
    tmp_path: Path, scheme: str
) -> None:
    parts = [SCHEMES[scheme](seed) for seed in (0, 10)]
    more: dict[str, Any] = {"bits": int(scheme[8]), "group_size": GROUP} if scheme.startswith("GPTQ") else {}
    base, one = (model(tmp_path / str(k), tensors, **more) for k, (tensors, _) in enumerate(parts))
    path = recipe(tmp_path, "linear", base, one, dtype="float32")
    report = mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == {"l.weight", "norm.weight"}
    np.testing.assert_allclose(merged["l.weight"], (parts[0][1] + parts[1][1]) / 2, rtol=2e-6, atol=1e-9)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    named = scheme.partition(",")[0]
    assert any(f"is quantised ({named})" in str(notice) for notice in report.recipe_notices)
    path = recipe(tmp_path, "task_arithmetic", one, base_model=str(base), dtype="float32")
    report = mergepipe.merge(path, tmp_path / "budgeted", budget="100%", options=NO_CATALOG)
    assert report.planned_bytes is not None
    assert report.expert_bytes <= report.planned_bytes
    assert report.expert_bytes < sum(tensor.nbytes for tensor in parts[1][0].values()) + (64 << 10)
    merged = load_file(tmp_path / "budgeted" / "model.safetensors")
    np.testing.assert_allclose(merged["l.weight"], parts[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.startswith(("GPTQ", "AWQ"))])
def test_merge__of_gptq_and_awq_has_the_bits_of_one_product_in_float16(tmp_path: Path, scheme: str) -> None:
    tensors, numbers = SCHEMES[scheme](0)
    bits: dict[str, Any] = {"bits": int(scheme[8])} if scheme.startswith("GPTQ") else {}
    path = recipe(tmp_path, "passthrough", model(tmp_path / "m", tensors, group_size=GROUP, **bits))
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    written = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    np.testing.assert_array_equal(written, numbers.astype(np.float16))


def test_merge__of_groups_that_are_not_named_takes_them_side_by_side(tmp_path: Path) -> None:
    tensors, numbers = packed(0, 4, has_zeros=True)
    tensors["l.weight_g_idx"] = np.full(COLUMNS, -1, np.int32)
    path = recipe(tmp_path, "passthrough", model(tmp_path / "m", tensors), dtype="float32")
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == {"l.weight", "norm.weight"}
    np.testing.assert_allclose(merged["l.weight"], numbers, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize(
    "more", [{"desc_act": True, "group_size": GROUP}, {"group_size": 32}, {"packing_format": "auto_round:other"}]
)
def test_check__refuses_gptq_that_names_no_groups_where_its_order_is_not_told(tmp_path: Path, more: Any) -> None:
    path = model(tmp_path / "m", gptq(0, is_in_order=True)[0], **more)
    with pytest.raises(UnsupportedError, match=r"quantised \(GPTQ or AWQ\)"):
        mergepipe.check(recipe(tmp_path, "linear", path, path))


def test_merge__of_gptq_v2_takes_zeros_as_they_are(tmp_path: Path) -> None:
    tensors, numbers = gptq(0)
    path = recipe(tmp_path, "passthrough", model(tmp_path / "m", tensors, checkpoint_format="gptq_v2"), dtype="float32")
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    scale = tensors["l.scales"].astype(np.float64)[tensors["l.g_idx"]].T
    merged = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    np.testing.assert_allclose(merged, numbers + scale, rtol=2e-6, atol=1e-9)


def gpt_oss(seed: int, experts: int = 3, outputs: int = 48, groups: int = 4) -> Tensors:
    blocks = codes_of(seed, 256, experts, outputs, groups, 16).astype(np.uint8)
    scales = (codes_of(seed + 1, 8, experts, outputs, groups) + 118).astype(np.uint8)
    return {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}


@pytest.mark.thorough
@pytest.mark.transformers
def test_merge__of_gpt_oss_has_the_bits_of_transformers(tmp_path: Path) -> None:
    mxfp4_of = LateModule("transformers.integrations.mxfp4")
    tensors = gpt_oss(0)
    path = recipe(tmp_path, "passthrough", model(tmp_path / "m", tensors, "mxfp4"))
    mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG)
    merged = load_file(tmp_path / "out" / "model.safetensors")["e.gate_up_proj"]
    theirs = mxfp4_of.convert_moe_packed_tensors(*(torch.from_numpy(tensor) for tensor in tensors.values()))
    assert merged.shape == tuple(theirs.shape)
    assert merged.dtype == ml_dtypes.bfloat16
    assert merged.tobytes() == theirs.contiguous().view(torch.uint8).numpy().tobytes()


def test_merge__of_gpt_oss_stays_within_its_budget(tmp_path: Path) -> None:
    base, one = (model(tmp_path / str(seed), gpt_oss(seed, outputs=256), "mxfp4") for seed in (0, 10))
    path = recipe(tmp_path, "task_arithmetic", one, base_model=str(base))
    report = mergepipe.merge(path, tmp_path / "out", budget="100%", options=NO_CATALOG)
    stored = sum(tensor.nbytes for tensor in gpt_oss(10, outputs=256).values())
    assert report.planned_bytes is not None
    assert report.expert_bytes <= report.planned_bytes < stored + (32 << 10)


@pytest.mark.parametrize("scheme", ["bitsandbytes NF4", "MXFP4", "MXFP4, of DeepSeek-V4"])
def test_lora_apply__adds_to_the_numbers_of_codes(tmp_path: Path, scheme: str) -> None:
    tensors, numbers = SCHEMES[scheme](0)
    rng = np.random.default_rng(1)
    down, up = (rng.standard_normal(shape).astype(np.float32) * 1e-2 for shape in ((4, COLUMNS), (ROWS, 4)))
    adapter = write_adapter(tmp_path / "adapter", {"l.lora_A.weight": down, "l.lora_B.weight": up})
    mergepipe.apply_lora(model(tmp_path / "base", tensors), [adapter], tmp_path / "out", catalog=False)
    written = load_file(tmp_path / "out" / "model.safetensors")["l.weight"]
    assert written.dtype == ml_dtypes.bfloat16
    expected = numbers + 2 * (up.astype(np.float64) @ down)
    np.testing.assert_allclose(written.astype(np.float64), expected, rtol=1 / 256, atol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "name", "tensor", "message"),
    [
        ("AWQ of 4 bits", "l.qzeros", np.zeros((4, 3), np.int32), r"qzeros' has the shape \[4, 3\]; .* \[4, 12\]"),
        ("GPTQ of 4 bits", "l.g_idx", np.full(COLUMNS, 9, np.int32), "names no group of 4 for each of 256 inputs"),
        (
            "packed integers of 4 bits, in another order", "l.weight_g_idx", np.full(COLUMNS, 4, np.int32),
            "names no group of 4 for each of 256 inputs",
        ),
        ("NVFP4, of ModelOpt", "l.weight_scale_2", np.ones(2, np.float32), r"\[2\]; .* must be \[1\]"),
        ("NVFP4", "l.weight_scale", np.ones((96, 8), ml_dtypes.float8_e4m3fn), r"\[96, 8\]; .* must be \[96, 16\]"),
        (
            "MXFP4, of DeepSeek-V4", "l.scale", np.ones((96, 4), ml_dtypes.float8_e8m0fnu),
            r"\[96, 4\]; .* must be \[96, 8\]",
        ),
        ("bitsandbytes NF4", "l.weight.absmax", np.ones(7, np.float32), r"\[7\]; .* must be \[384\]"),
        ("bitsandbytes int8", "l.SCB", np.ones(7, np.float32), r"\[7\]; .* must be \[96\]"),
    ],
)  # fmt: skip
def test_check__refuses_scales_of_a_wrong_shape(
    tmp_path: Path, scheme: str, name: str, tensor: NDArray[Any], message: str
) -> None:
    path = model(tmp_path / "m", SCHEMES[scheme](0)[0] | {name: tensor})
    with pytest.raises(CorruptError, match=message):
        mergepipe.check(recipe(tmp_path, "linear", path, path))


@pytest.mark.parametrize("scheme", ["MXFP4", "MXFP4, of DeepSeek-V4", "NVFP4", "NVFP4, of ModelOpt"])
def test_check__refuses_codes_of_4_bits_that_are_no_whole_groups(tmp_path: Path, scheme: str) -> None:
    tensors, _ = SCHEMES[scheme](0)
    names = list(tensors)
    width = 32 if scheme.startswith("MXFP4") else 16
    tensors[names[0]] = np.ascontiguousarray(tensors[names[0]][:, : 3 * width // 4])
    tensors[names[1]] = np.ascontiguousarray(tensors[names[1]][:, :1])
    path = model(tmp_path / "m", tensors)
    with pytest.raises(UnsupportedError, match="shows that the weights are quantised"):
        mergepipe.check(recipe(tmp_path, "linear", path, path))


ZEROS = "packed integers of 4 bits, zeros"
N_WORDS = ROWS * 4 // 32  # of the zero points of a group


@pytest.mark.parametrize(
    ("scheme", "name", "change", "message"),
    [
        (
            "packed integers of 4 bits",
            "l.weight_scale",
            np.int32,
            "stored as I32; .* must be BF16 or F16 or F32 or F64",
        ),
        ("packed integers of 4 bits", "l.weight_scale", np.uint8, "stored as U8"),
        (ZEROS, "l.weight_zero_point", np.int64, "stored as I64; .* must be I32"),
        (ZEROS, "l.weight_zero_point", np.float32, "stored as F32"),
        ("packed integers of 4 bits, in another order", "l.weight_g_idx", np.int64, "stored as I64"),
        ("GPTQ of 4 bits", "l.g_idx", np.int64, "stored as I64"),
        ("NVFP4", "l.weight_global_scale", np.int32, "stored as I32"),
        ("NVFP4, of ModelOpt", "l.weight_scale_2", np.int64, "stored as I64"),
    ],
)
def test_check__refuses_parts_of_another_dtype(
    tmp_path: Path, scheme: str, name: str, change: type, message: str
) -> None:
    tensors, _ = SCHEMES[scheme](0)
    path = model(tmp_path / "m", tensors | {name: tensors[name].astype(change)})
    with pytest.raises(CorruptError, match=message):
        mergepipe.check(recipe(tmp_path, "linear", path, path))


@pytest.mark.parametrize("shape", [(COLUMNS // GROUP, N_WORDS), (1, N_WORDS * COLUMNS // GROUP), (-1,)])
def test_check__refuses_zero_points_of_as_many_elements_in_another_shape(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    tensors, _ = SCHEMES[ZEROS](0)
    changed = tensors["l.weight_zero_point"].reshape(shape)
    path = model(tmp_path / "m", tensors | {"l.weight_zero_point": changed})
    with pytest.raises(CorruptError, match=rf"must be \[{N_WORDS}, {COLUMNS // GROUP}\]"):
        mergepipe.check(recipe(tmp_path, "linear", path, path))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("NVFP4", "l.weight_global_scale"), ("NVFP4, of ModelOpt", "l.weight_scale_2"),
        ("packed integers of 4 bits", "l.weight_scale"), ("GPTQ of 4 bits", "l.scales"), ("AWQ of 4 bits", "l.scales"),
    ],
)  # fmt: skip
def test_merge__reads_scales_of_every_floating_dtype(tmp_path: Path, scheme: str, name: str, dtype: type) -> None:
    """Of powers of two, which every dtype holds."""
    tensors, _ = SCHEMES[scheme](0)
    powers = np.exp2(np.round(np.log2(np.abs(tensors[name].astype(np.float64)))))
    powers = np.minimum(powers, 2.0**14)  # float16 ends at 65504
    exact = model(tmp_path / "exact", tensors | {name: powers.astype(np.float32)})
    same = model(tmp_path / "same", tensors | {name: powers.astype(dtype)})
    written = []
    for path in (exact, same):
        out = tmp_path / f"out-{path.name}"
        mergepipe.merge(recipe(tmp_path, "linear", path, path, dtype="float32"), out, options=NO_CATALOG)
        written.append(load_file(out / "model.safetensors")["l.weight"])
    assert np.array_equal(written[0], written[1])
