"""Tests of benchmarks.deltas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from benchmarks.deltas import delta_size, merge_errors, read_tensors
from benchmarks.floor import CHUNK_BYTES, floor_seconds, measure_floor
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mergepipe.core.blocks import F32
from support.families import TINY, write_family


def write(directory: Path, shards: list[dict[str, NDArray[np.generic]]]) -> Path:
    directory.mkdir()
    for number, shard in enumerate(shards):
        save_file(shard, directory / f"model-{number}.safetensors")
    return directory


def bf16(*values: float) -> NDArray[np.generic]:
    return np.array(values, dtype=ml_dtypes.bfloat16)


def test_read_tensors__reads_all_shards_exactly(tmp_path: Path) -> None:
    model = write(tmp_path / "m", [{"a": bf16(1.5, -2.0)}, {"b": np.array([[0.1]], dtype=np.float32)}])
    tensors = read_tensors(model)
    assert tensors["a"].tolist() == [1.5, -2.0]
    assert tensors["b"].tolist() == [[float(np.float32(0.1))]]


def test_read_tensors__refuses_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        read_tensors(tmp_path)


def test_delta_size__is_the_relative_norm_and_the_share_of_changed_elements(tmp_path: Path) -> None:
    base = write(tmp_path / "base", [{"a": bf16(3.0, 0.0), "b": bf16(4.0, 0.0)}])
    expert = write(tmp_path / "expert", [{"a": bf16(3.0, 1.0), "b": bf16(4.0, 0.0)}])
    size = delta_size(base, expert)
    assert size.relative_norm == pytest.approx(0.2)
    assert size.changed_fraction == 0.25


def test_delta_size__refuses_models_with_other_tensors(tmp_path: Path) -> None:
    base = write(tmp_path / "base", [{"a": bf16(3.0, 0.0)}])
    expert = write(tmp_path / "expert", [{"a": bf16(3.0)}])
    with pytest.raises(ValueError, match="same tensors"):
        delta_size(base, expert)


def test_merge_errors__are_over_what_merging_changed_and_over_the_weights(tmp_path: Path) -> None:
    base, full, merged = (
        write(tmp_path / name, [{"a": np.array(values, np.float32)}])
        for name, values in (("base", [3.0, 0.0]), ("full", [3.0, 4.0]), ("merged", [3.0, 1.0]))
    )
    errors = merge_errors(merged, full, base)
    assert (errors.error, errors.relative_l2) == (0.75, 0.6)


# --- benchmarks.floor


def test_floor__reads_and_writes_as_many_bytes_as_are_asked_for_and_leaves_nothing(tmp_path: Path) -> None:
    file, scratch = tmp_path / "in", tmp_path / "scratch"
    file.write_bytes(bytes(2 * CHUNK_BYTES + 5))
    seconds, read_bytes = measure_floor([file], scratch, CHUNK_BYTES + 1)
    assert seconds > 0
    assert read_bytes == 2 * CHUNK_BYTES + 5
    assert measure_floor([file], scratch, 0, CHUNK_BYTES + 1)[1] == CHUNK_BYTES
    assert floor_seconds([file], scratch, 1, CHUNK_BYTES) > 0
    assert not scratch.exists()


# --- the families that benchmarks merge


@pytest.mark.thorough
def test_write_family__fitted_deltas_have_the_measured_sizes_directions_and_cosines(tmp_path: Path) -> None:
    shape = replace(TINY, hidden=512, intermediate=1024)
    paths = write_family(tmp_path, shape, 3, dtype=F32, is_fitted=True)
    base, first_expert, _, third_expert = (load_file(model / "model.safetensors") for model in paths.models)
    matrices = [
        tensor.name
        for tensor in shape.tensors()
        if len(tensor.shape) > 1 and min(tensor.shape) >= 512 and not tensor.is_embedding
    ]
    assert len(matrices) >= shape.layers
    for name in matrices:
        first, third = ((expert[name] - base[name]).astype(np.float64) for expert in (first_expert, third_expert))
        assert first.std() == pytest.approx(1.8e-3, rel=0.05)
        assert 0.0 < (first * third).sum() / np.linalg.norm(first) / np.linalg.norm(third) < 0.1
        squares = np.linalg.svd(first, compute_uv=False) ** 2
        assert 0.26 < squares[:16].sum() / squares.sum() < 0.75
