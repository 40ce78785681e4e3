"""Families and tensors that users test their operators with."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

import mergepipe.testing
from mergepipe.core.blocks import BF16, DTYPES, F16, F32, F64, DType
from mergepipe.testing.contracts import SPECIAL, STORED_DTYPES, decode_elements, encode_elements
from support.families import TINY, TINY_LLAMA, FamilyShape, delta_std, write_family, write_models
from support.rounding import canonical_bits, decode, encode


def load(model: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a model, through the safetensors library, as float32."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name).astype(np.float32) for name in opened.keys()}  # noqa: SIM118
    return tensors


def contents(model: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(model.iterdir())}


def test_write_family__same_arguments_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    first = write_family(tmp_path / "a", TINY, 3, seed=7, threads=1)
    second = write_family(tmp_path / "b", TINY, 3, seed=7, threads=3)
    assert [contents(m) for m in first.models] == [contents(m) for m in second.models]


def test_write_models__one_after_the_other_gives_the_family(tmp_path: Path) -> None:
    whole = write_family(tmp_path / "whole", TINY, 3, seed=7)
    written = [*write_models(tmp_path / "parts", TINY, [0, 2], seed=7)]
    written += write_models(tmp_path / "parts", TINY, [3], seed=7)
    assert [model.name for model in written] == ["base", "expert-2", "expert-3"]
    assert [contents(m) for m in written] == [contents(whole.models[number]) for number in (0, 2, 3)]
    with pytest.raises(FileExistsError, match=r"expert-3"):
        write_models(tmp_path / "parts", TINY, [3], seed=7)


@pytest.mark.parametrize("shape", [TINY, TINY_LLAMA])
def test_write_family__the_library_reads_every_tensor_of_the_shape(tmp_path: Path, shape: FamilyShape) -> None:
    for model in write_family(tmp_path, shape, 1).models:
        assert {name: t.shape for name, t in load(model).items()} == {t.name: t.shape for t in shape.tensors()}


def test_write_family__file_is_what_the_library_writes(tmp_path: Path) -> None:
    file = write_family(tmp_path, TINY, 0, dtype=F32).base / "model.safetensors"
    shuffled = dict(sorted(load(file.parent).items(), reverse=True))
    assert file.read_bytes() == save(shuffled, metadata={"format": "pt"})


def test_write_family__deltas_have_the_drawn_size(tmp_path: Path) -> None:
    paths = write_family(tmp_path, TINY, 3, seed=5, dtype=F32)
    base = load(paths.base)
    for number, expert in enumerate(paths.experts, start=1):
        for name, tensor in load(expert).items():
            drawn = delta_std(5, number, name)
            if tensor.size >= 256 and not (number == 2 and name == "model.embed_tokens.weight"):
                assert (tensor - base[name]).std() == pytest.approx(drawn, rel=0.2)


def test_write_family__every_second_expert_has_frozen_embeddings(tmp_path: Path) -> None:
    paths = write_family(tmp_path, TINY_LLAMA, 4)
    base = load(paths.base)
    frozen = [
        {name for name, tensor in load(expert).items() if tensor.tobytes() == base[name].tobytes()}
        for expert in paths.experts
    ]
    embeddings = {"model.embed_tokens.weight", "lm_head.weight"}
    assert [bool(f & embeddings) for f in frozen] == [False, True, False, True]
    assert all(f >= embeddings for f in frozen[1::2])


class _Rounding(NamedTuple):
    dtype: DType
    numpy_dtype: np.dtype[np.generic]


@pytest.mark.parametrize(
    "case",
    [
        _Rounding(BF16, np.dtype(ml_dtypes.bfloat16)),
        _Rounding(F16, np.dtype(np.float16)),
        _Rounding(F64, np.dtype(np.float64)),
    ],
    ids=lambda case: case.dtype.name,
)
def test_write_family__stored_base_is_the_float32_base_rounded_once(tmp_path: Path, case: _Rounding) -> None:
    exact = load(write_family(tmp_path / "f32", TINY, 0, dtype=F32).base)
    stored = load(write_family(tmp_path / "stored", TINY, 0, dtype=case.dtype).base)
    for name, tensor in exact.items():
        np.testing.assert_array_equal(stored[name], tensor.astype(case.numpy_dtype).astype(np.float32))


def test_write_family__shards_hold_the_same_tensors_within_the_cap(tmp_path: Path) -> None:
    whole = write_family(tmp_path / "whole", TINY, 2)
    sharded = write_family(tmp_path / "sharded", TINY, 2, shard_bytes=20_000)
    index = json.loads((sharded.base / "model.safetensors.index.json").read_text())
    files = sorted(sharded.base.glob("*.safetensors"))
    assert len(files) > 2
    assert set(index["weight_map"].values()) == {f.name for f in files}
    assert index["metadata"]["total_size"] == TINY.n_parameters() * 2
    assert all(f.stat().st_size < 22_000 for f in files if "model-00001-" not in f.name)
    for one, other in zip(whole.models, sharded.models, strict=True):
        ours, theirs = load(one), load(other)
        assert {n: t.tobytes() for n, t in ours.items()} == {n: t.tobytes() for n, t in theirs.items()}


@pytest.mark.parametrize("name", STORED_DTYPES)
def test_encode_elements__rounds_as_ml_dtypes_does(name: str) -> None:
    dtype = DTYPES[name]
    drawn = np.random.default_rng(3).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)).view(np.float32)
    values = np.concatenate([SPECIAL, drawn, ties])
    found, wanted = encode_elements(values, dtype), encode(values, dtype)
    assert np.array_equal(canonical_bits(found.view(wanted.dtype)), canonical_bits(wanted))
    np.testing.assert_array_equal(decode_elements(found, dtype), decode(wanted.tobytes(), dtype))


def test_testing__imports_numpy_alone() -> None:
    """The wheel brings neither ml_dtypes nor hypothesis."""
    imported = set()
    for path in Path(mergepipe.testing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
    assert imported - sys.stdlib_module_names == {"numpy", "mergepipe"}
