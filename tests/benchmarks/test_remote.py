"""What the part `remote` measures: bytes by two counts, requests, and a link of given speed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.remote import MappedServer
from benchmarks.reproduce.results import Results

from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.remote.pinned_store import open_store
from support.families import TINY, family_bytes
from support.fault_server import Link

pytestmark = pytest.mark.slow  # `make test-benchmarks`, which CI runs too


def test_remote__counts_what_a_merge_reads_beside_what_is_sent(tmp_path: Path) -> None:
    folders = ("--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"))
    assert main(["measure", "remote", "--size", "toy", "--keep", *folders]) == 0
    full, budget, packed, reading = Results.read(tmp_path / "results/remote.json").entries.values()
    for entry in (full, budget, packed):
        assert entry["sent_bytes"] == pytest.approx(entry["read_bytes"], abs=20_000)  # listings are not charged
        assert entry["link_seconds"] == entry["sent_bytes"] / 20e6
        assert entry["requests"] > 0
    weights = sum(path.stat().st_size for path in tmp_path.glob("work/family-*/*/*.safetensors"))
    assert weights <= full["read_bytes"] <= family_bytes(TINY, 6)
    assert budget["read_bytes"] < full["read_bytes"] * 2 / 3
    assert packed["read_bytes"] < full["read_bytes"]
    assert weights <= reading["sent_bytes"] <= family_bytes(TINY, 6)


def test_mapped_server__is_no_faster_than_its_link_and_counts_what_it_sends(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/file").write_bytes(bytes(1_000_000))
    with MappedServer((tmp_path / "model",), Link(0.0, 4e6)) as server:
        store = open_store(Ledger(), 2)
        file = store.open(Location.parse(f"{server.url}/bucket/model/file"))
        started = time.monotonic()
        assert file.read_into(0, memoryview(bytearray(1_000_000)), Purpose.EXPERT) == 1_000_000
        assert time.monotonic() - started > 0.2  # 0.25 s, less what stands in queues
        store.close()
        assert server.all_sent_bytes() == 1_000_000
