"""Tests of benchmarks.deltas."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from benchmarks.deltas import delta_size, merge_errors, read_tensors
from numpy.typing import NDArray
from safetensors.numpy import save_file


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
