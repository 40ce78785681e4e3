"""Tensors packed without a base, or taken for those of an unrelated one: models come back, and lies are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from packing_cases import N_WIDE, as_bytes, halves, make_family, relabel, weights, write_model

import mergepipe
from mergepipe.cli import main
from mergepipe.core.blocks import BF16, F16, DType
from mergepipe.deltastore.bands import encode_bands
from mergepipe.deltastore.codec import BlockContext, decode_block, encode_block, encode_planes
from mergepipe.deltastore.encode_pass import cut_of, sample_of
from mergepipe.deltastore.pieces import BLOCK_ELEMENTS, Codec, EncodedBlock, Piece
from mergepipe.errors import CorruptError, MergePipeError, MismatchError
from support.bucket_outputs import files_below
from support.model_folders import recipe_of
from support.rounding import encode


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
        cut = cut_of(sample_of(base, dtype), sample_of(expert, dtype))
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
