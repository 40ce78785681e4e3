"""What benchmarks.remote measures: bytes by two counts, requests, resolves, and a link of given speed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from benchmarks.process import BenchmarkError
from benchmarks.remote import PARTS, Bench, MappedServer, Measured, main, median_of, s3_environment, table, ties_recipe

from mergepipe.storage.contract import RemoteSettings
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.remote.web import open_store
from support.families import TINY, family_bytes, write_family
from support.fault_server import Link

pytestmark = pytest.mark.slow  # `make test-benchmarks`, which CI runs too


def measured(name: str, seconds: float) -> Measured:
    return Measured(name, seconds, 1.0, 100, 100, 4.0, 3, 0, 10**6, 1.0, 1.0, 0.5)


def test_remote__small_form_measures_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    main([
        "--shape", "tiny", "--experts", "2", "--bandwidth", "20e6", "--latency", "0.002", "--fast-bandwidth", "200e6",
        "--root", str(tmp_path), "--json", str(path),
    ])  # fmt: skip
    numbers = json.loads(path.read_text())
    rows = {row["name"]: row for row in numbers["merges"]}
    assert list(rows) == ["full", "budget", "packed"]
    for row in rows.values():
        assert row["seconds"] > row["seconds_to_first_request"] > 0
        assert row["sent_bytes"] == pytest.approx(row["read_bytes"], abs=20_000)  # listings are not charged
        assert row["floor_seconds"] == row["sent_bytes"] / 20e6
        assert row["requests"] > 0
        assert row["retries"] == 0
        assert min(row["peak_memory_bytes"], row["client_cpu_seconds"], row["server_cpu_seconds"]) > 0
    weights = sum(path.stat().st_size for path in tmp_path.glob("family-tiny/*/*.safetensors"))
    assert family_bytes(TINY, 2) > weights
    assert weights <= rows["full"]["read_bytes"] <= family_bytes(TINY, 2)
    assert rows["budget"]["read_bytes"] < rows["full"]["read_bytes"] * 2 / 3
    assert rows["packed"]["read_bytes"] < rows["full"]["read_bytes"]
    assert min(numbers["loopback"].values()) > 0
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in rows)
    assert "loopback:" in printed
    assert set(PARTS) == {*rows, "loopback"}


def test_remote__failed_merge_ends_the_benchmark(tmp_path: Path) -> None:
    family = write_family(tmp_path / "family", TINY, 1)
    bench = Bench(tmp_path, Link(), 4)
    with MappedServer(tmp_path, family.models, Link()) as server:
        recipe = ties_recipe("s3://bucket/family/base", ["s3://bucket/family/missing"])
        with pytest.raises(BenchmarkError, match=r"broken\.yml(?s:.*)exit code \d+\n(?s:.*)missing"):
            bench.merge("broken", recipe, (), s3_environment(server.url), server)


def test_mapped_server__is_no_faster_than_its_link_and_counts_what_it_sends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").rename(tmp_path / "folder" / "file")
    with MappedServer(tmp_path, [tmp_path / "folder"], Link(0.0, 4e6)) as server:
        store = open_store(Ledger(), RemoteSettings(2))
        file = store.open(Location.parse(f"{server.url}/bucket/folder/file"))
        started = time.monotonic()
        assert file.read_into(0, memoryview(bytearray(1_000_000)), Purpose.EXPERT) == 1_000_000
        assert time.monotonic() - started > 0.2  # 0.25 s, less what stands in queues
        store.close()
        assert server.all_sent_bytes() == 1_000_000
        server.count_afresh()
        assert (server.all_sent_bytes(), server.first_request_at) == (0, None)


def test_table__shows_the_median_round_beside_its_floor() -> None:
    rounds = [measured("full", seconds) for seconds in (9.0, 5.0, 6.0)]
    row = median_of(rounds)
    assert row.seconds == 6.0
    assert (row.share, row.network_share) == (1.5, 1.25)
    assert "| full | 0.0 | 0.0 | 6.0 | 4.0 | 1.50 | 1.25 | 3 | 0 | 1 | 1.0 | 1.0 | 0.5 |" in table([row])
