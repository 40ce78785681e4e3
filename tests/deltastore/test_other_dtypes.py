"""Experts in fp16 and fp32, and those of another dtype than their base: every bit comes back, levels are exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import (
    N_WIDE,
    as_bytes,
    decoded,
    deltas_at,
    deltas_of,
    halves,
    make_family,
    relabel,
    weights,
    write_model,
)

import mergepipe
from mergepipe.cli import main
from mergepipe.core.blocks import BF16, F16, F32, DType
from mergepipe.deltastore.bands import encode_bands
from mergepipe.deltastore.codec import (
    BlockContext,
    convert,
    decode_block,
    encode_block,
    encode_converted,
    encode_planes,
)
from mergepipe.deltastore.encode_pass import choose_cut, cut_of, sample_of
from mergepipe.deltastore.pieces import Codec, EncodedBlock, Level, Piece, RawBytes
from mergepipe.errors import CorruptError, MergePipeError, MismatchError
from mergepipe.testing import SPECIAL
from support.bucket_outputs import files_below
from support.model_folders import recipe_of
from support.public_names import BLOCK_ELEMENTS
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


# --- tensors packed without a base, or taken for those of an unrelated one


def test_encode_block__unrelated_experts_are_encoded_without_the_base() -> None:
    base, expert = weights(BLOCK_ELEMENTS, BF16, 1), weights(BLOCK_ELEMENTS, BF16, 2)
    block = encode_block(base, expert, BF16, None)
    assert block.codec is Codec.STANDALONE
    assert block.nbytes < 0.664 * len(expert)
    alone = encode_block(None, expert, BF16, None)
    assert alone.codec is Codec.STANDALONE
    assert alone.errors == (0.0, 0.0) != block.errors


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_encode_block__takes_the_smallest_near_and_far(dtype: DType) -> None:
    rng, codecs = np.random.default_rng(4), []
    base_N = rng.standard_normal(70_000) * 0.02
    for step in (0.1, 0.3, 0.5, 0.8, 3.0):
        base, expert = (
            as_bytes(encode(values.astype(np.float32), dtype))
            for values in (base_N, base_N + rng.standard_normal(70_000) * 0.02 * step)
        )
        cut = cut_of(sample_of(base, dtype), sample_of(expert, dtype), len(expert) // dtype.itemsize)
        block = encode_block(base, expert, dtype, cut)
        banded = encode_bands(base.view(np.uint16), expert.view(np.uint16), cut, dtype)
        assert banded is not None
        assert block.nbytes == min(sum(map(len, banded.pieces.values())), len(encode_planes(None, expert, dtype)))
        codecs.append(block.codec)
    assert codecs[0] is Codec.BANDS
    assert codecs[-1] is Codec.STANDALONE


@pytest.mark.parametrize("codec", [Codec.SAME, Codec.BANDS, Codec.BYTES])
def test_decode_block__without_a_base_refuses_what_needs_one(codec: Codec) -> None:
    block = EncodedBlock(codec, {piece: np.zeros(9, np.uint8) for piece in Piece})
    with pytest.raises(CorruptError, match="relative to its base"):
        decode_block(block.codec, block.pieces, BlockContext(None, BF16, "test"), np.empty(8, np.uint8))


@pytest.fixture(scope="module")
def packed_base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of several dtypes, and its store without a base, packed by the command."""
    root = tmp_path_factory.mktemp("alone")
    rng = np.random.default_rng(3)
    tensors = {
        "wide": halves((rng.standard_normal(N_WIDE) * 0.02).astype(np.float32)),
        "norm": np.full(9, 0x3F80, "<u2"),
    }
    model = write_model(root / "model", tensors)
    assert main(["pack", str(model), "--out", str(root / "stores")]) == 0
    return model, root / "stores" / "model"


def test_pack__a_model_on_its_own_takes_two_thirds_and_comes_back(
    packed_base: tuple[Path, Path], tmp_path: Path
) -> None:
    model, store = packed_base
    files = files_below(store)
    assert sum(map(len, files.values())) < 0.665 * (model / "model.safetensors").stat().st_size
    mergepipe.unpack(store, tmp_path / "back")
    assert files_below(tmp_path / "back") == files_below(model)
    assert mergepipe.verify(store).damages == ()


def test_merge__a_packed_base_and_experts_without_a_base_give_what_raw_ones_give(tmp_path: Path) -> None:
    family = make_family(tmp_path / "f", 2)
    models = [family.base, *family.experts]
    mergepipe.pack(None, models, tmp_path / "stores")
    outputs = []
    for number, places in enumerate([models, [tmp_path / "stores" / model.name for model in models]]):
        recipe = recipe_of("linear", {place: {"weight": 0.25} for place in places}, dtype="bfloat16")
        mergepipe.merge(recipe, tmp_path / f"out-{number}")
        outputs.append((tmp_path / f"out-{number}" / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("changes", "error"), [({"is_plain": True}, CorruptError), ({"base_dtype": "BF16"}, MismatchError)]
)
def test_open__a_header_that_claims_plain_blocks_or_a_base_is_refused(
    packed_base: tuple[Path, Path], tmp_path: Path, changes: dict[str, object], error: type[MergePipeError]
) -> None:
    store = shutil.copytree(packed_base[1], tmp_path / "store")
    relabel(store, lambda document: document["tensors"][0].update(changes))
    with pytest.raises(error):
        mergepipe.unpack(store, tmp_path / "back")
