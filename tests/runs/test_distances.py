"""Distances of checkpoints against numpy, over every dtype and over more than one chunk."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.jobs import diff as distances
from mergepipe.jobs.diff import distance, norm
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location

Tensors = dict[str, NDArray[np.generic]]
FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def write(directory: Path, tensors: Tensors) -> Checkpoint:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return open_checkpoint(LocalStore(), Location.local(directory))


def tensors_of(seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    found: Tensors = {f"t{i}": rng.standard_normal((7, 33)).astype(kind) for i, kind in enumerate(FLOATS)}
    found["steps"] = rng.integers(0, 9, 5)
    return found


def reference(a: Tensors, b: Tensors | None = None) -> float:
    """The same in one numpy expression."""
    names = [name for name in a if name != "steps"]
    parts = [a[n].astype(np.float64) - (0 if b is None else b[n].astype(np.float64)) for n in names]
    return math.sqrt(sum(float((part**2).sum()) for part in parts))


@pytest.mark.parametrize("chunk_elements", [1 << 20, 10])
def test_distance__is_that_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(distances, "CHUNK_ELEMENTS", chunk_elements)
    a, b = tensors_of(1), tensors_of(2)
    first, second = write(tmp_path / "a", a), write(tmp_path / "b", b)
    ticks: list[int] = []
    found = distance(LocalStore(), first, second, ticks.append)
    assert found == pytest.approx(reference(a, b), rel=1e-12)
    assert sum(ticks) == sum(t.nbytes for each in (a, b) for n, t in each.items() if n != "steps")
    assert norm(LocalStore(), first, ticks.append) == pytest.approx(reference(a), rel=1e-12)


def test_distance__of_a_checkpoint_to_itself_is_exactly_zero(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "a", tensors_of(3))
    assert distance(LocalStore(), checkpoint, checkpoint, lambda _: None) == 0.0


def test_distance__leaves_out_what_only_one_has(tmp_path: Path) -> None:
    a, b = tensors_of(1), tensors_of(2)
    first = write(tmp_path / "a", {**a, "only": np.ones(3, np.float32), "other": np.ones(3, np.float32)})
    second = write(tmp_path / "b", {**b, "other": np.ones(4, np.float32)})
    assert distance(LocalStore(), first, second, lambda _: None) == pytest.approx(reference(a, b), rel=1e-12)
