"""The writer with durable progress: what it notes is on the disk, and going on from any note gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from mergepipe.core.blocks import BF16, F32, element_count
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.snapshots import shards as written_shards
from mergepipe.snapshots.shards import (
    BlockTable,
    ShardLayout,
    ShardWriter,
    TensorDigest,
    TensorSpec,
    block_table_of,
    plan_shards,
    table_of,
)
from mergepipe.storage import output
from mergepipe.storage.ledger import Ledger

SPECS = (
    TensorSpec("empty.first", F32, (0, 3)), TensorSpec("a", BF16, (300, 300)), TensorSpec("b", F32, (77,)),
    TensorSpec("c", BF16, (262144 * 2 + 5,)), TensorSpec("one", F32, ()), TensorSpec("d", BF16, (1111, 13)),
    TensorSpec("empty.last", F32, (0,)),
)  # fmt: skip


@dataclass(slots=True)
class Notes:
    """A `DurableProgress` that remembers, and ends the run after so many notes."""

    done: tuple[TensorDigest, ...]
    interval_bytes: int
    most: int = 10**6
    noted: list[TensorDigest] = field(default_factory=list)
    calls: int = 0
    asked: int = 0

    def is_due(self, pending_bytes: int) -> bool:
        self.asked += 1
        return pending_bytes >= self.interval_bytes

    def note(self, digests: Sequence[TensorDigest]) -> None:
        self.noted.extend(digests)
        self.calls += 1
        if self.calls >= self.most:
            raise InterruptedError


def content_of(spec: TensorSpec) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(len(spec.name) + spec.nbytes).integers(0, 256, spec.nbytes, np.uint8)


def write(folder: Path, shards: Sequence[ShardLayout], notes: Notes | None) -> tuple[TensorDigest, ...]:
    folder.mkdir(exist_ok=True)
    with ShardWriter(folder, shards, Ledger(), notes) as writer:
        specs = [spec for shard in shards for spec in shard.tensors]
        for spec in specs[len(notes.done) if notes else 0 :]:
            content = content_of(spec)
            for start in range(0, len(content), 50_000):
                writer.append(content[start : start + 50_000])
        writer.finish()
        return tuple(writer.digests)


@pytest.mark.thorough
@pytest.mark.parametrize("shard_bytes", [1, 200_000, 10**9])
@pytest.mark.parametrize("chunk_bytes", [4096, 65536])
@pytest.mark.parametrize("interval_bytes", [1, 150_000])
def test_writer__goes_on_from_any_note(
    tmp_path: Path, shard_bytes: int, chunk_bytes: int, interval_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "CHUNK_BYTES", chunk_bytes)
    shards = plan_shards(SPECS, shard_bytes)
    wanted = write(tmp_path / "wanted", shards, None)
    for most in range(1, 100):
        folder = tmp_path / f"out{most}"
        notes = Notes((), interval_bytes, most)
        try:
            assert write(folder, shards, notes) == wanted
            break
        except InterruptedError:
            done = tuple(notes.noted)
        assert done == wanted[: len(done)]
        for shard in shards:  # what was not noted may be anything, or nothing
            path, own = folder / shard.name, [d for d in done if d.name in {t.name for t in shard.tensors}]
            written = len(shard.header) + sum(spec.nbytes for spec in shard.tensors[: len(own)])
            if own:
                path.write_bytes(path.read_bytes()[:written] + b"\xff" * (shard.file_bytes - written))
            else:
                path.unlink(missing_ok=True)
        again = Notes(done, interval_bytes)
        assert write(folder, shards, again) == wanted
        assert done + tuple(again.noted) == wanted[: len(done) + len(again.noted)]
        for shard in shards:
            assert (folder / shard.name).read_bytes() == (tmp_path / "wanted" / shard.name).read_bytes()
    assert most > 2


def test_writer__asks_whether_to_record_only_when_there_is_a_tensor_to_record(tmp_path: Path) -> None:
    """A clock that starts anew with each answer must not be used up by parts of tensors."""
    notes = Notes((), 1)
    with ShardWriter(tmp_path, plan_shards((TensorSpec("a", F32, (10**6,)),), 10**9), Ledger(), notes) as writer:
        for _ in range(3):
            writer.append(np.zeros(10**6, np.uint8))
        assert notes.asked == 0
        writer.append(np.zeros(10**6, np.uint8))
        writer.finish()
    assert (notes.asked, [digest.name for digest in notes.noted]) == (1, ["a"])


def table() -> tuple[BlockTable, list[int]]:
    shards = plan_shards(SPECS, 200_000)
    digests = [
        TensorDigest(s.name, (b"x" * 16,) * -(-element_count(s.shape) // 262144)) for x in shards for s in x.tensors
    ]
    return table_of(shards, digests), [element_count(s.shape) for x in shards for s in x.tensors]


def test_block_table__survives_a_round_trip() -> None:
    made, counts = table()
    assert sum(len(tensor) for tensor in made.tensors) == 7
    assert block_table_of(made.to_bytes(), "", len(made.headers), counts) == made


def _refusal(raw: bytes, n_files: int, counts: list[int]) -> MergePipeError:
    with pytest.raises(MergePipeError) as caught:
        block_table_of(raw, "", n_files, counts)
    return caught.value


def test_block_table__what_is_none_or_another_is_refused() -> None:
    made, counts = table()
    raw, n_files = made.to_bytes(), len(made.headers)
    for size in range(len(raw)):
        assert isinstance(_refusal(raw[:size], n_files, counts), CorruptError)
    assert _refusal(raw + b"x", n_files, counts).code == "manifest.damaged"
    assert _refusal(raw, n_files + 1, counts).code == "manifest.damaged"
    assert _refusal(raw, n_files, [*counts[1:], 10**6]).code == "manifest.damaged"
    newer = raw[:8] + (2).to_bytes(4, "little") + raw[12:]
    assert isinstance(_refusal(newer, n_files, counts), UnsupportedError)


def test_writer__looks_at_one_tensor_for_each_piece_however_many_the_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = plan_shards([TensorSpec(f"t{i}", F32, (1000,)) for i in range(200)], 10**9)
    measured = Mock(wraps=element_count)
    monkeypatch.setattr(written_shards, "element_count", measured)
    write(tmp_path, shards, None)
    assert measured.call_count < 10 * 200
