"""Tests of benchmarks.floor."""

from __future__ import annotations

from pathlib import Path

from benchmarks.floor import CHUNK_BYTES, floor_seconds, measure_floor


def test_floor__reads_and_writes_as_many_bytes_as_are_asked_for_and_leaves_nothing(tmp_path: Path) -> None:
    file, scratch = tmp_path / "in", tmp_path / "scratch"
    file.write_bytes(bytes(2 * CHUNK_BYTES + 5))
    seconds, read_bytes = measure_floor([file], scratch, CHUNK_BYTES + 1)
    assert seconds > 0
    assert read_bytes == 2 * CHUNK_BYTES + 5
    assert measure_floor([file], scratch, 0, CHUNK_BYTES + 1)[1] == CHUNK_BYTES
    assert floor_seconds([file], scratch, 1, CHUNK_BYTES) > 0
    assert not scratch.exists()
