"""Tests of benchmarks.floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.floor import CANDIDATES, MIB, WAYS, FloorResult, FloorSetting, calibrate, fastest_floor, measure_floor

from benchmarks import floor


def fake_floor(
    inputs: Sequence[Path], scratch: Path, output_bytes: int, setting: FloorSetting, max_read_bytes: int | None = None
) -> FloorResult:
    """A disk that likes 16 readers, and large requests."""
    del inputs, scratch
    seconds = 1.0 / setting.readers + MIB / setting.chunk_bytes / 1000
    return FloorResult(str(setting), seconds, max_read_bytes or 0, output_bytes)


def test_floor__is_the_fastest_of_the_ways_of_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "measure_floor", fake_floor)
    file = tmp_path / "in"
    file.write_bytes(bytes(10))
    best = calibrate([file], tmp_path / "scratch", 5, repeat=1)
    assert best == (FloorSetting(16, 4 * MIB), FloorSetting(16, 2 * MIB))
    assert len(best) == WAYS
    assert fastest_floor([file], tmp_path / "scratch", 5, CANDIDATES).setting == "16x4"


def test_measure_floor__writes_as_many_bytes_as_it_says_and_leaves_nothing(tmp_path: Path) -> None:
    file, scratch = tmp_path / "in", tmp_path / "scratch"
    file.write_bytes(bytes(3 * MIB + 5))
    result = measure_floor([file], scratch, MIB + 1, FloorSetting(2, MIB))
    assert (result.read_bytes, result.written_bytes) == (3 * MIB + 5, MIB + 1)
    assert not scratch.exists()
