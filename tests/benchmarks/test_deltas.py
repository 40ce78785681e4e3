"""Tests of benchmarks.deltas."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from benchmarks.deltas import delta_size, distance, norm, read_tensors, rounded_to_bf16
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


def test_distance__refuses_models_with_other_tensors() -> None:
    one, two = {"a": np.zeros(2)}, {"a": np.zeros(3)}
    with pytest.raises(ValueError, match="same tensors"):
        distance(one, two)


def test_norm__is_over_all_tensors() -> None:
    assert norm({"a": np.array([3.0]), "b": np.array([[4.0, 12.0]])}) == 13.0


def test_rounded_to_bf16__rounds_to_nearest_even() -> None:
    halfway = 1 + math.ldexp(1, -8)  # between 1 and the next bfloat16, 1 + 2**-7
    tensors = {"a": np.array([halfway, halfway + math.ldexp(1, -20), -halfway])}
    assert rounded_to_bf16(tensors)["a"].tolist() == [1.0, 1 + math.ldexp(1, -7), -1.0]
    assert tensors["a"][0] == halfway
