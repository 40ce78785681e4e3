"""What `analyze` says that a pack would take, beside what packs take."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.reports import AnalyzedExpert
from support.families import TINY, write_family

SHAPE = replace(TINY, hidden=256, intermediate=1024, vocab=8000)


def analyzed(folder: Path, *experts: str) -> tuple[AnalyzedExpert, ...]:
    return mergepipe.analyze(folder / "base", [folder / name for name in experts]).experts


def test_analyze__says_what_a_pack_would_take(tmp_path: Path) -> None:
    write_family(tmp_path, SHAPE, 2)
    experts = analyzed(tmp_path, "expert-1", "expert-2")
    packed = mergepipe.pack(tmp_path / "base", [tmp_path / f"expert-{e}" for e in (1, 2)], tmp_path / "packed")
    for estimated, actual in zip(experts, packed.experts, strict=True):
        assert estimated.packed_bytes == pytest.approx(actual.store_bytes, rel=0.05)
    assert [expert.packed_bytes for expert in analyzed(tmp_path, "expert-1")] == [None]  # nothing was read now


@pytest.mark.parametrize("kind", ["equal", "float16", "float32", "unrelated"])
def test_analyze__estimates_packs_of_what_differs_in_other_ways(tmp_path: Path, kind: str) -> None:
    write_family(tmp_path, SHAPE, 1)
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    for file in (tmp_path / "other").glob("*.safetensors"):
        tensors = load_file(file)
        generator = np.random.default_rng(0)
        for name, tensor in tensors.items():
            values = tensor.astype(np.float32)
            if kind == "unrelated":
                tensors[name] = (values.std() * generator.standard_normal(tensor.shape)).astype(ml_dtypes.bfloat16)
            elif kind != "equal":
                tensors[name] = (values * np.float32(1.001)).astype(kind)
        save_file(tensors, file)
    (expert,) = analyzed(tmp_path, "other")
    packed = mergepipe.pack(tmp_path / "base", [tmp_path / "other"], tmp_path / "packed").experts[0]
    assert expert.packed_bytes is not None
    slack_bytes = 0.05 * packed.tensor_bytes  # the estimate has no header and index
    assert expert.packed_bytes == pytest.approx(packed.store_bytes, abs=slack_bytes)
    assert (expert.packed_bytes == 0) == (kind == "equal")
