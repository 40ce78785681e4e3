"""Experts in fp16 and fp32, and those of another dtype than their base: every bit comes back, levels are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import as_bytes, decoded, deltas_at, deltas_of

import mergepipe
from mergepipe.core.blocks import BF16, F16, F32, DType
from mergepipe.deltastore.codec import BlockContext, convert, encode_block, encode_converted
from mergepipe.deltastore.encode_pass import choose_cut
from mergepipe.deltastore.pieces import Codec, Level, RawBytes
from mergepipe.testing import SPECIAL
from support.model_folders import recipe_of
from support.rounding import decode, encode
from support.safetensors_bytes import file_bytes

seeds = st.integers(0, 2**32 - 1)
CONVERSIONS = [(base, dtype) for base in (BF16, F16, F32) for dtype in (BF16, F16, F32) if base is not dtype]


def pair(seed: int, n: int, step: float, base_dtype: DType = F16, dtype: DType = F16) -> tuple[RawBytes, RawBytes]:
    """A base and an expert whose deltas have about the size `step`; weights of many sizes, subnormal ones included."""
    rng = np.random.default_rng(seed)
    sizes_N = np.exp2(rng.integers(-22, 2, n)).astype(np.float32)
    base_N = (rng.standard_normal(n) * np.where(rng.random(n) < 0.1, sizes_N, np.float32(0.02))).astype(np.float32)
    base = as_bytes(encode(base_N, base_dtype))
    moved_N = decode(base.tobytes(), base_dtype) + (rng.standard_normal(n) * step).astype(np.float32)
    return base, as_bytes(encode(moved_N.astype(np.float32), dtype))


def test_encode_block__fp16_is_small_for_a_small_change() -> None:
    rng = np.random.default_rng(0)
    base = as_bytes(encode((rng.standard_normal(1 << 17) * 0.02).astype(np.float32), F16))
    moved_N = decode(base.tobytes(), F16) + (rng.standard_normal(1 << 17) * 1e-4).astype(np.float32)
    expert = as_bytes(encode(moved_N.astype(np.float32), F16))
    block = encode_block(base, expert, F16, choose_cut(deltas_of(base, expert, F16), is_sample=False))
    assert block.codec is Codec.BANDS
    assert block.nbytes < 0.38 * len(expert)
    assert encode_block(base, expert, F16, None).nbytes > 0.4 * len(expert)


@pytest.mark.parametrize(("base_dtype", "dtype"), CONVERSIONS, ids=lambda dtype: dtype.name)
@given(seed=seeds, n=st.integers(1, 6000), step=st.floats(-7, 0))
def test_encode_converted__experts_of_another_dtype_come_back_with_exact_deltas(
    base_dtype: DType, dtype: DType, seed: int, n: int, step: float
) -> None:
    base, expert = pair(seed, n, 10.0**step, base_dtype, dtype)
    block = encode_converted(base, base_dtype, expert, dtype)
    context = BlockContext(base, dtype, "test", base_dtype)
    assert np.array_equal(decoded(block, context, len(expert)), expert)
    full_N = deltas_of(base, expert, dtype, base_dtype)
    for level in (Level.HEAD, Level.LOSSLESS):
        assert np.array_equal(deltas_at(block, level, context, n), full_N)
    assert block.errors[0] == pytest.approx(float((full_N.astype(np.float64) ** 2).sum()), rel=1e-6)
    converted = convert(base, base_dtype, dtype).copy()
    same = encode_converted(base, base_dtype, converted, dtype)
    assert same.codec is Codec.SAME
    assert np.array_equal(deltas_at(same, Level.HEAD, context, n), deltas_of(base, converted, dtype, base_dtype))


@pytest.mark.parametrize(("base_dtype", "dtype"), CONVERSIONS, ids=lambda dtype: dtype.name)
def test_convert__of_special_values_is_that_of_the_reference(base_dtype: DType, dtype: DType) -> None:
    base = as_bytes(encode(SPECIAL, base_dtype))
    assert convert(base, base_dtype, dtype).tobytes() == encode(decode(base.tobytes(), base_dtype), dtype).tobytes()


def test_merge__of_packed_experts_in_other_dtypes_gives_what_raw_ones_give(tmp_path: Path) -> None:
    n, dtypes = 70_000, {"expert-1": F32, "expert-2": F16, "expert-3": BF16}
    base, _ = pair(0, n, 0.0, BF16, BF16)
    (tmp_path / "base.safetensors").write_bytes(_file(base, BF16, n))
    for seed, (name, dtype) in enumerate(dtypes.items()):
        values_N = decode(pair(0, n, 0.0, BF16, dtype)[1].tobytes(), dtype)
        moved_N = values_N + (np.random.default_rng(seed).standard_normal(n) * 1e-4).astype(np.float32)
        moved = as_bytes(encode(moved_N.astype(np.float32), dtype))
        (tmp_path / f"{name}.safetensors").write_bytes(_file(moved, dtype, n))
    raw = [tmp_path / f"{name}.safetensors" for name in dtypes]
    report = mergepipe.pack(tmp_path / "base.safetensors", raw, tmp_path / "stores")
    assert [expert.blocks.keys() for expert in report.experts] == [{"bytes"}, {"bytes"}, {"bands"}]
    outputs = []
    for number, models in enumerate([raw, [tmp_path / "stores" / name for name in dtypes]]):
        weighted = {place: {"weight": 0.5, "density": 0.2} for place in models}
        recipe = recipe_of("ties", weighted, tmp_path / "base.safetensors", dtype="float32")
        mergepipe.merge(recipe, tmp_path / f"out-{number}")
        outputs.append((tmp_path / f"out-{number}" / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]
    for path in raw:
        mergepipe.unpack(tmp_path / "stores" / path.stem, tmp_path / "back" / path.stem)
        assert (tmp_path / "back" / path.stem / path.name).read_bytes() == path.read_bytes()


def _file(stored: RawBytes, dtype: DType, n: int) -> bytes:
    return file_bytes({"w": {"dtype": dtype.name, "shape": [n], "data_offsets": [0, len(stored)]}}, stored.tobytes())
