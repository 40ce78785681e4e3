"""A merge to the Hub needs room for one shard on this machine, whatever the size of the output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import mergepipe
from mergepipe.options import MergeOptions
from support.hub_server import written_hub
from support.sparse_models import decoder, nbytes_of, write_sparse

SCALE = int(os.environ.get("MERGEPIPE_DISK_SCALE", "10"))
"""The part of a 70B model, of 10 GB of disk, and of shards of 9 GB that is tried."""
WIDTH = round((1 / SCALE) ** 0.5 * 64) * 128
SHAPES = decoder(80, WIDTH, WIDTH * 7 // 2, 128_256 * WIDTH // 8192, keys=WIDTH // 8)
DISK_BYTES, SHARD_BYTES = 10**10 // SCALE, 9 * 10**9 // SCALE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of so many bytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only who may mount a file system can limit one")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_merge__of_seventy_billion_weights_to_the_hub_fits_on_ten_gigabytes(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("base", "expert"):
        write_sparse(tmp_path / name, SHAPES, SHARD_BYTES)
    models = [{"model": str(tmp_path / "expert"), "parameters": {"weight": 0.5}}]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base"), "models": models}
    options = MergeOptions(home=disk / "home", threads=2, shard_bytes=SHARD_BYTES)
    monkeypatch.setenv("TMPDIR", str(disk))
    with written_hub(monkeypatch, disk / "hf") as hub:
        hub.keeps_content = False
        hub.commit("user/merged", {})
        report = mergepipe.merge(recipe, "hf://user/merged", options=options)
        index = json.loads(hub.model_files("user/merged")["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == nbytes_of(SHAPES) > 10 * DISK_BYTES
    assert nbytes_of(SHAPES) < hub.uploaded_bytes <= report.output_bytes
    assert not list(disk.rglob("*.safetensors"))
